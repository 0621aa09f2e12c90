"""Each tenant's share of a lane: one that floods it is held back alone, and goes on when its records were drained."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.tiers.sample import BLOCK, LAYOUT, ROOT, World, append_rows, rows, sequence, some_tokens
from tiers.errors import LaneFull, LaneShareFull
from tiers.keeper_operations import Operations
from tiers.lane import LaneWriter
from tiers.lane_reader import LaneReader
from tiers.settings import TenantLimits, TierSettings
from tiers.shares import LaneShares

LIMITS = TierSettings(
    tenant_lane_bytes=8192, tenants={"large": TenantLimits(lane_bytes=0), "small": TenantLimits(lane_bytes=2048)}
)


def open_lane(world: World) -> LaneWriter:
    return LaneWriter.open(
        world.paths.lane("e0"), lane_bytes=world.settings.lane_bytes, record_count=world.settings.lane_record_count,
        incarnation=1, busy_s=0.2, shares=LaneShares(lambda namespace: LIMITS.tenant_limit(namespace, "lane")),
    )  # fmt: skip


def flood(lane: LaneWriter, namespace: str, most: int = 1000) -> int:
    """Bytes that a tenant could put into the lane, a token a record."""
    tokens, start = some_tokens(1), 0
    lane.append_open(sequence(namespace), 1, ROOT, LAYOUT, BLOCK, namespace, "chat", namespace, tokens[:0])
    while start < most:
        try:
            reservation = lane.reserve_rows(LAYOUT, 1, namespace)
        except LaneFull:
            break
        np.copyto(reservation.frame, rows(start, tokens))
        reservation.commit(sequence(namespace), 1, start, tokens)
        start += 1
    return lane.shares.used[namespace]


@pytest.mark.parametrize(("namespace", "limit"), [("small", 2048), ("anybody", 8192)])
def test_a_tenant_is_held_to_its_share_and_the_others_go_on(world: World, namespace: str, limit: int) -> None:
    world.settings = dataclasses.replace(world.settings, lane_record_count=512)
    lane = open_lane(world)
    assert limit - 256 < flood(lane, namespace) <= limit
    with pytest.raises(LaneShareFull, match=namespace):
        lane.reserve_rows(LAYOUT, 1, namespace)
    assert lane.shares.refused == {namespace: 2}
    assert flood(lane, "other", most=5) > 0
    keeper = LaneReader.open(world.paths.lane("e0"), writable_tail=True)
    keeper.advance_tail(lane.head)
    lane.reserve_rows(LAYOUT, 1, namespace)
    assert lane.shares.used[namespace] == 0


def test_without_a_share_of_its_own_or_a_name_only_the_lane_is_the_limit(world: World) -> None:
    lane = open_lane(world)
    flood(lane, "large")
    with pytest.raises(LaneFull) as caught:
        lane.reserve_rows(LAYOUT, 1)
    assert not isinstance(caught.value, LaneShareFull)


def test_a_record_larger_than_the_share_is_let_through_alone(world: World) -> None:
    lane = open_lane(world)
    tokens = some_tokens(100)
    for _ in range(2):
        reservation = lane.reserve_rows(LAYOUT, 100, "small")
        reservation.frame[:] = 0
        reservation.commit(sequence("a"), 1, 0, tokens)
        with pytest.raises(LaneShareFull):
            lane.reserve_rows(LAYOUT, 1, "small")
        LaneReader.open(world.paths.lane("e0"), writable_tail=True).advance_tail(lane.head)


def test_what_waits_counts_after_a_restart_of_the_engine_too(world: World) -> None:
    lane = open_lane(world)
    used = flood(lane, "small")
    lane.close()
    again = open_lane(world)
    assert again.shares.used == {"small": used}
    with pytest.raises(LaneShareFull):
        again.reserve_rows(LAYOUT, 1, "small")


def test_the_keeper_tells_what_each_tenant_has_in_the_lanes_and_on_the_disk(world: World) -> None:
    world.settings = dataclasses.replace(
        world.settings, tenant_budget_bytes=10**6, tenants={"b": TenantLimits(disk_bytes=5000, lane_bytes=2048)}
    )
    lane = world.lane()
    world.capture(lane, "a", some_tokens(20), [20], namespace="a")
    drain = world.drained()
    append_rows(lane, "a", 20, some_tokens(3))
    world.capture(lane, "b", some_tokens(9), [9], namespace="b")
    found = Operations(drain).tenants()
    assert (found["a"]["limit"], found["b"]["limit"], found["b"]["lane_limit"]) == (10**6, 5000, 2048)
    assert found["a"]["bytes"] > 0 and found["b"]["bytes"] == 0
    assert found["a"]["lane_bytes"] > 0 and found["b"]["lane_bytes"] > 9 * LAYOUT.token_bytes
    assert drain.stats()["tenants"] == {"a": [found["a"]["bytes"], 10**6]}
    drain.close()


def test_settings_come_back_out_of_json_whole() -> None:
    assert TierSettings.of(dataclasses.asdict(LIMITS)) == LIMITS
    assert LIMITS.tenant_limit("large", "lane") == 0 and LIMITS.tenant_limit("large", "memory") == 0
