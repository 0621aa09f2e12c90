"""Budgets of tenants on an engine: idle state beyond a tenant's memory goes, captures beyond its share of the lane wait."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine.arena import Slot
from engine.budgets import slots_over_budget
from tests.engine.driver import EngineDriver, random_tokens, submit
from tiers.drain import Drain
from tiers.settings import TenantLimits, TierSettings

Start = Callable[..., EngineDriver]


def slot(index: int, tenant: str, length: int, *, used: int = 0, busy: bool = False, stored: int = -1) -> Slot:
    return Slot(
        index, np.zeros(0, np.int32), length, length if stored < 0 else stored, tenant, last_used=used, busy=busy
    )


def chosen(slots: list[Slot], limit: int, coming: int = 0, needed: tuple[int, ...] = ()) -> list[int]:
    found = slots_over_budget(slots, "a", limit, lambda slot: slot.length, coming, needed)
    return [slot.index for slot in found]


def test_least_recently_used_first_and_only_as_many_as_it_takes() -> None:
    slots = [slot(0, "a", 10, used=3), slot(1, "a", 10, used=1), slot(2, "a", 10, used=2), slot(3, "b", 99)]
    assert chosen(slots, 30) == []
    assert chosen(slots, 29) == [1]
    assert chosen(slots, 15) == [1, 2]
    assert chosen(slots, 30, coming=5) == [1]


def test_live_lagging_and_needed_state_stays() -> None:
    slots = [slot(0, "a", 10, busy=True), slot(1, "a", 10, stored=9), slot(2, "a", 10), slot(3, "a", 10)]
    assert chosen(slots, 1, needed=(3,)) == [2]


@pytest.mark.process
def test_idle_state_beyond_the_budget_leaves_the_device_and_comes_back_from_the_tiers(
    start_engine: Start, keeper
) -> None:
    engine = start_engine()
    token_bytes = engine.engine.arena.layout.token_bytes
    limits = {"small": TenantLimits(memory_bytes=250 * token_bytes)}
    engine.engine.tiers = TierSettings(tenants=limits)
    prompts = {name: random_tokens(seed, 100) for seed, name in enumerate(("x", "y", "z"))}
    for tenant in ("small", "large"):
        for name, prompt in prompts.items():
            engine.handle(submit(f"{tenant}-{name}", prompt, 4, namespace=tenant, session=name))
            engine.run()
            keeper()
        stats = engine.engine.tenant_stats()
        if tenant == "small":
            assert stats["small"].memory_bytes == 2 * 104 * token_bytes and stats["small"].evicted == 1
            assert {s.session for s in engine.engine.arena.slots if s.length} == {"y", "z"}, "the oldest went"
    assert stats["small"].memory_limit == 250 * token_bytes and stats["large"].evicted == 0
    answer = engine.tokens("small-x")
    engine.handle(submit("again", prompts["x"] + answer + [5], 4, namespace="small", session="x"))
    engine.run()
    assert engine.started("again").reused.get("disk", 0) >= 100, engine.started("again")


@pytest.mark.process
def test_a_tenant_beyond_its_share_of_the_lane_lags_alone_and_is_caught_up(start_engine: Start, drain: Drain) -> None:
    engine = start_engine()
    capture, token_bytes = engine.engine.capture, engine.engine.arena.layout.token_bytes
    assert capture is not None
    capture.lane.shares.limit_of = lambda namespace: 40 * token_bytes if namespace == "small" else 0
    prompt = random_tokens(7, 120)
    for tenant in ("small", "large"):
        engine.handle(submit(tenant, prompt, 4, namespace=tenant, session=tenant))
        engine.run()
    stats = engine.engine.tenant_stats()
    assert stats["large"].lag_tokens == 0 and stats["large"].lane_refused == 0
    assert stats["small"].lag_tokens > 60 and stats["small"].lane_refused > 0
    assert 0 < stats["small"].lane_bytes <= 40 * token_bytes
    assert engine.engine.stats().lane_full == 0, "the lane itself has room"
    for _ in range(20):
        drain.flush(sync=True)
        engine.step()
    stats = engine.engine.tenant_stats()
    assert stats["small"].lag_tokens == 0
    assert engine.engine.lookup.finder.find(
        engine.engine.root, "small", np.array(prompt, np.int32), limit=120, block_tokens=engine.engine.block_tokens
    )[-1].token_end == 120  # fmt: skip
