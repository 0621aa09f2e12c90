"""Compaction: what ended becomes a base, what nothing names is freed, and nothing else is."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiers.sample import (
    BLOCK,
    LAYOUT,
    ROOT,
    World,
    append_point,
    append_rows,
    read_all,
    sequence,
    some_tokens,
    state,
)  # fmt: skip
from tests.tiers.sample import rows as made_rows
from tiers import drain as drain_file
from tiers import failpoints, store_file
from tiers.base import Base, pack_base, session_key, unpack_base
from tiers.compaction import Budget, Compaction, Now, Progressing, SessionUse, plan_eviction, plan_folds, sequences_of
from tiers.drain import Drain
from tiers.errors import BadBlock, NoRoom, OverBudget, TierError
from tiers.keeper_jobs import Jobs
from tiers.keeper_operations import Operations
from tiers.lane import LaneWriter
from tiers.lane_format import PointKind
from tiers.layout import Layout
from tiers.pages import cached_bytes, drop_cached
from tiers.paths import SHARED_MEMORY
from tiers.prefix import PrefixFinder
from tiers.usage import measure_usage
from tiers.verify import verify

EXAMPLES = itertools.count()
TOKENS = some_tokens(5 * BLOCK + 3)


@pytest.fixture
def drain(world: World) -> Iterator[Drain]:
    drain = Drain(world.paths, world.settings)
    yield drain
    drain.close()


def compact(drain: Drain, *, budget: Budget = Budget(), dry_run: bool = False, settle_s: float = 0) -> Progressing:
    compaction = Compaction(drain, settle_s=settle_s, grace_s=0, budget=budget, dry_run=dry_run)
    for _ in compaction.run():
        pass
    return compaction.progress


def counts(drain: Drain) -> dict[str, int]:
    with drain.store().snapshot() as view:
        return {
            name: view.count(name)
            for name in ("blocks", "nodes", "children", "tails", "points", "states", "sequences", "streams", "bases")
        }


def answer(
    world: World,
    lane: LaneWriter,
    name: str,
    tokens: np.ndarray,
    *,
    session: str = "chat",
    start: int = 0,
    namespace: str = "default",
) -> None:
    world.capture(lane, name, tokens, [len(tokens)], start=start, session=session, namespace=namespace)
    lane.append_close(sequence(name), 1, len(tokens))


def restorable(world: World, drain: Drain, tokens: np.ndarray, namespace: str = "default") -> int:
    """Through the drain's own store: LMDB is opened once a process."""
    finder = PrefixFinder(drain.store(), world.paths.lane_dir)  # type: ignore[arg-type]
    try:
        return read_all(finder, tokens, namespace=namespace)[0]
    finally:
        finder.close()


def check_usage(drain: Drain) -> None:
    """What is counted along is what is there."""
    with drain.store().snapshot() as view:
        there = {key: entry for key, entry in measure_usage(view).items() if entry != [0, 0]}
    assert {key: entry for key, entry in drain.store().usage().items() if entry != [0, 0]} == there


# ---------------------------------------------------------------- fold


def test_ended_sequences_become_one_base(world: World, drain: Drain) -> None:
    lane = world.lane()
    answer(world, lane, "first", TOKENS[:20])
    answer(world, lane, "second", TOKENS, start=16)
    drain.flush(sync=True)
    done = compact(drain)
    assert done.counts["folded"] == 1 and done.counts["folded_sequences"] == 2
    after = counts(drain)
    assert (after["bases"], after["sequences"], after["streams"], after["blocks"]) == (1, 0, 0, 5)
    with drain.store().snapshot() as view:
        base = view.base(session_key("default", "chat"))
    assert base is not None and base.tokens == TOKENS.tobytes() and len(base.block_ids) == 5
    assert base.tail == sequence("second") and after["tails"] == 1
    assert restorable(world, drain, TOKENS) == 43
    check_usage(drain)


def test_live_session_is_left_alone(world: World, drain: Drain) -> None:
    lane = world.lane()
    answer(world, lane, "first", TOKENS[:20])
    world.capture(lane, "second", TOKENS, [30], start=16)
    drain.flush(sync=True)
    assert compact(drain).counts["folded"] == 0
    append_rows(lane, "second", 30, TOKENS[30:])
    drain.flush(sync=True)
    assert restorable(world, drain, TOKENS) == 43


def test_session_that_was_just_used_is_left_alone(world: World, drain: Drain) -> None:
    answer(world, world.lane(), "first", TOKENS)
    drain.flush(sync=True)
    assert compact(drain, settle_s=60).counts["folded"] == 0
    with drain.store().snapshot() as view:
        (used,) = sequences_of(view, drain.now())
    assert len(plan_folds([used], used.progress.used_ms - 2, 0)) == 1, "its stamp may be a little ahead of the time"
    assert compact(drain, settle_s=0).counts["folded"] == 1


def test_open_sequence_of_an_older_epoch_has_ended(world: World, drain: Drain) -> None:
    dead, live = world.lane("e0"), world.lane("e1")
    world.capture(dead, "old", TOKENS, [20], stream="s")
    world.capture(live, "new", TOKENS, [43], start=16, stream="s", epoch=2)
    drain.flush(sync=True)
    with drain.store().snapshot() as view:
        assert {one.id: one.live for one in sequences_of(view, drain.now())} == {
            sequence("old"): False, sequence("new"): True,
        }  # fmt: skip
        hours_later = Now(drain.now().ms + 2 * 3_600_000, 0)
        assert not any(one.live for one in sequences_of(view, hours_later))
        assert any(one.live for one in sequences_of(view, hours_later._replace(healthy_ms=hours_later.ms)))


def test_a_tail_survives_the_block_of_another_session_that_begins_with_it(world: World, drain: Drain) -> None:
    """The other session leaves that block behind, and it is freed: what this one has is its own piece."""
    lane = world.lane()
    answer(world, lane, "own", TOKENS[:30], session="own")
    drain.flush(sync=True)
    longer = np.concatenate([TOKENS[:30], some_tokens(2, seed=7)])
    answer(world, lane, "longer", longer, session="other", start=24)
    answer(world, lane, "elsewhere", some_tokens(1, seed=8), session="other")
    drain.flush(sync=True)
    compact(drain)
    assert restorable(world, drain, TOKENS[:30]) == 30
    check_usage(drain)


def test_superseded_branch_is_freed(world: World, drain: Drain) -> None:
    lane = world.lane()
    other = TOKENS.copy()
    other[18:] += 1
    answer(world, lane, "rejected", other)
    answer(world, lane, "kept", TOKENS, start=16)
    drain.flush(sync=True)
    assert counts(drain)["blocks"] == 8
    assert compact(drain).counts["freed_blocks"] == 3
    assert counts(drain)["blocks"] == counts(drain)["nodes"] == counts(drain)["children"] == 5
    assert restorable(world, drain, TOKENS) == 43 and restorable(world, drain, other) == 18
    check_usage(drain)


def test_blocks_that_another_session_shares_stay(world: World, drain: Drain) -> None:
    lane = world.lane()
    branch = TOKENS.copy()
    branch[20:] += 1
    answer(world, lane, "a", TOKENS, session="a")
    answer(world, lane, "b", branch, session="b", start=16)
    drain.flush(sync=True)
    compact(drain)
    assert Operations(drain).remove("default", "a", force=False, dry_run=False)["blocks"] == 3
    assert restorable(world, drain, branch) == 43 and restorable(world, drain, TOKENS) == 20
    check_usage(drain)


def test_compacted_session_goes_on_and_is_compacted_again(world: World, drain: Drain) -> None:
    lane = world.lane()
    answer(world, lane, "a", TOKENS[:30])
    drain.flush(sync=True)
    compact(drain)
    answer(world, lane, "b", TOKENS, start=24)
    drain.flush(sync=True)
    assert compact(drain).counts["folded"] == 1
    assert counts(drain)["bases"] == 1 and counts(drain)["tails"] == 1
    assert restorable(world, drain, TOKENS) == 43


def test_dry_run_changes_nothing_and_says_what_would_go(world: World, drain: Drain) -> None:
    lane = world.lane()
    other = TOKENS.copy()
    other[18:] += 1
    answer(world, lane, "rejected", other)
    answer(world, lane, "kept", TOKENS, start=16)
    drain.flush(sync=True)
    with drain.store().group() as group:
        group.delete_sequence(sequence("rejected"))
    before = counts(drain)
    done = compact(drain, dry_run=True)
    assert done.counts["freed_blocks"] == 3 and counts(drain) == before
    assert compact(drain).counts["freed_blocks"] == 3


def test_what_is_named_while_it_runs_stays(world: World, drain: Drain) -> None:
    """A sequence that opens on blocks which were unnamed when they were marked, at every point of the run."""
    lane = world.lane()
    for stop in itertools.count():
        name = f"n{stop}"
        tokens = some_tokens(43, seed=stop)
        answer(world, lane, name, tokens, session=name)
        drain.flush(sync=True)
        with drain.store().group() as group:
            group.delete_sequence(sequence(name))
        steps = Compaction(drain, settle_s=0, grace_s=0).run()
        if len(list(itertools.islice(steps, stop))) < stop:
            break
        opened = restorable(world, drain, tokens)
        world.capture(lane, name + "-more", tokens, [43], start=opened // BLOCK * BLOCK, session=name)
        for _ in steps:
            pass
        assert restorable(world, drain, tokens) >= opened // BLOCK * BLOCK
        drain.flush(sync=True)
    assert stop > 4


def test_sequence_with_a_hole_is_kept_as_it_is(world: World, drain: Drain) -> None:
    answer(world, world.lane(), "a", TOKENS, start=16)
    drain.flush(sync=True)
    done = compact(drain)
    assert done.counts["kept_broken"] == 1 and done.counts["freed_blocks"] == 0
    answer(world, world.lane("e1"), "b", TOKENS[:20])
    drain.flush(sync=True)
    assert restorable(world, drain, TOKENS) == 43


def test_nothing_is_freed_while_a_base_is_damaged(world: World, drain: Drain) -> None:
    answer(world, world.lane(), "a", TOKENS)
    drain.flush(sync=True)
    compact(drain)
    with drain.store().group() as group:
        raw = bytearray(group.raw("bases", session_key("default", "chat")))
        raw[20] ^= 1
        group._txn.put(session_key("default", "chat"), bytes(raw), db=group._db[b"bases"])
    with pytest.raises(BadBlock, match="base"):
        compact(drain)
    assert restorable(world, drain, TOKENS) == 43


# ---------------------------------------------------------------- rollback points and windows


def test_superseded_points_go_and_the_needed_ones_stay(world: World, drain: Drain) -> None:
    lane, tokens = world.lane(), some_tokens(64)
    shape = dataclasses.replace(LAYOUT, state_bytes=100)
    lane.append_open(sequence("a"), 1, ROOT, shape, BLOCK, "default", "chat", "a", tokens[:0])
    for position in range(0, 64, 2):
        append_rows(lane, "a", position, tokens[position : position + 2])
        if position % 8 == 0:
            drain.flush(sync=True)
        append_point(lane, "a", position + 2, PointKind.CHUNK, 100)
    lane.append_close(sequence("a"), 1, 64)
    drain.flush(sync=True)
    assert counts(drain)["points"] == 32
    compact(drain)
    assert counts(drain)["points"] == counts(drain)["states"] == 7
    with drain.store().snapshot() as view:
        base = view.base(session_key("default", "chat"))
        assert base is not None and [p for p, _, _ in base.points] == [2, 32, 48, 56, 60, 62, 64]
        for position, _, point in base.points:
            assert np.array_equal(view.point(point).frame, state(position, 100))  # type: ignore[arg-type]
    check_usage(drain)


def test_window_rows_outside_kept_windows_go(world: World, drain: Drain) -> None:
    lane, tokens = world.lane(), some_tokens(128)
    shape = dataclasses.replace(LAYOUT, windows=(0, 8))
    lane.append_open(sequence("a"), 1, ROOT, shape, BLOCK, "default", "chat", "a", tokens[:0])
    append_rows(lane, "a", 0, tokens)
    lane.append_close(sequence("a"), 1, 128)
    drain.flush(sync=True)
    done = compact(drain)
    assert done.counts["rewritten_blocks"] > 4
    finder = PrefixFinder(drain.store(), world.paths.lane_dir)  # type: ignore[arg-type]
    with finder.reading() as read:
        found = read.find(ROOT, "default", tokens, limit=128, block_tokens=BLOCK)
        assert found[-1].token_end == 128 and found[-1].groups & 2
        thin = [extent for extent in found if not extent.groups & 2]
        assert len(thin) == done.counts["rewritten_blocks"]
        for extent in thin:
            piece = read(extent)
            rows, window = LAYOUT.views(piece.frame, BLOCK, groups=piece.groups)
            expected = LAYOUT.views(made_rows(extent.token_start, tokens[extent.token_start : extent.token_end]), BLOCK)
            assert np.array_equal(rows, expected[0]) and window.shape == (1, 0, 8)
    finder.close()
    assert compact(drain).counts["rewritten_blocks"] == 0
    check_usage(drain)
    # the same rows captured again make the blocks whole
    lane.append_open(sequence("b"), 1, ROOT, shape, BLOCK, "default", "chat", "b", tokens[:0])
    append_rows(lane, "b", 0, tokens)
    drain.flush(sync=True)
    assert restorable(world, drain, tokens) == 128
    check_usage(drain)


# ---------------------------------------------------------------- bases


def test_base_has_golden_bytes() -> None:
    """The format of docs/log-format.md, to the byte. If this fails, raise the version."""
    base = Base("t", "s", "r", b"R" * 16, 8, 2, b"\1\0\0\0", b"B" * 16, b"", [(1, 4, b"P" * 16)], 5)
    packed = pack_base(base)
    assert packed[:8] == b"CBAS\x01\x00\x00\x00"
    assert packed[16:].hex() == GOLDEN_BASE
    assert unpack_base(packed, "") == base


GOLDEN_BASE = (
    "8ba96e616d657370616365a174a773657373696f6ea173a673747265616da172a4726f6f74c41052525252525252525252525252525252"
    "ac626c6f636b5f746f6b656e7308a565706f636802a6746f6b656e73c40401000000a6626c6f636b73c4104242424242424242424242"
    "4242424242a47461696cc400a6706f696e7473919301 04c41050505050505050505050505050505050a7757365645f6d7305"
).replace(" ", "")


@given(byte=st.integers(0, 1 << 16), bit=st.integers(0, 7), size=st.integers(0, 1 << 16))
def test_any_flipped_or_cut_base_is_noticed(byte: int, bit: int, size: int) -> None:
    packed = bytearray(pack_base(Base("t", "s", "r", b"R" * 16, 8, 2, TOKENS.tobytes(), b"B" * 80, b"", [], 5)))
    with pytest.raises(BadBlock):
        unpack_base(bytes(packed[: size % len(packed)]), "")
    packed[byte % len(packed)] ^= 1 << bit
    with pytest.raises(BadBlock):
        unpack_base(bytes(packed), "")


# ---------------------------------------------------------------- eviction


def use(
    name: str, used_ms: int, size: int = 100, *, namespace: str = "t", live: bool = False, pinned: bool = False
) -> SessionUse:
    return SessionUse(session_key(namespace, name), namespace, name, "", used_ms, size, live, pinned)


def chosen(sessions: list[SessionUse], used: int, budget: Budget, now_ms: int = 1_000_000, **tenants: int) -> list[str]:
    return [session.session for session in plan_eviction(sessions, used, tenants, budget, now_ms)]


def test_nothing_is_evicted_within_the_budget() -> None:
    assert chosen([use("a", 1)], 89, Budget(disk_bytes=100)) == []
    assert chosen([use("a", 1)], 10**9, Budget()) == []


def test_least_recently_used_goes_first_until_there_is_room() -> None:
    sessions = [use("new", 30), use("old", 10), use("middle", 20)]
    assert chosen(sessions, 300, Budget(disk_bytes=300)) == ["old"]
    assert chosen(sessions, 300, Budget(disk_bytes=130)) == ["old", "middle"]


def test_live_and_pinned_sessions_are_never_evicted() -> None:
    sessions = [use("live", 1, live=True), use("pinned", 2, pinned=True), use("other", 3)]
    assert chosen(sessions, 1000, Budget(disk_bytes=1, tenant_bytes=1, ttl_s=0.001), t=1000) == ["other"]


def test_tenant_over_its_budget_pays_itself() -> None:
    sessions = [use("a", 1, namespace="x"), use("b", 2, namespace="y"), use("c", 3, namespace="y")]
    assert chosen(sessions, 300, Budget(tenant_bytes=150), x=100, y=200) == ["b"]
    assert chosen(sessions, 300, Budget(tenant_bytes=150, tenants={"y": 0}), x=100, y=200) == [], "one without a limit"
    assert chosen(sessions, 300, Budget(tenants={"y": 150}), x=1000, y=200) == ["b"], "one with a limit of its own"


def test_time_to_live() -> None:
    assert chosen([use("old", 0), use("new", 999_000)], 0, Budget(ttl_s=2)) == ["old"]


def test_eviction_frees_the_oldest_session(world: World, drain: Drain) -> None:
    lane = world.lane()
    lists = [some_tokens(43, seed=index) for index in range(4)]
    for index, tokens in enumerate(lists):
        answer(world, lane, f"s{index}", tokens, session=f"s{index}")
        drain.flush(sync=True)
    Operations(drain).pin("default", "s0", True)
    total = drain.store().usage().total_bytes
    done = compact(drain, budget=Budget(disk_bytes=int(total * 1.2)))
    assert done.counts["evicted"] == 1
    assert [restorable(world, drain, tokens) for tokens in lists] == [43, 0, 43, 43]
    check_usage(drain)


def test_pins_and_sessions_survive_a_restart(world: World) -> None:
    answer(world, world.lane(), "a", TOKENS)
    drain = world.drained()
    Operations(drain).pin("default", "chat", True)
    compact(drain)
    drain.close()
    drain = Drain(world.paths, world.settings)
    (found,) = Operations(drain).sessions()
    assert found["pinned"] and found["compacted"] and found["stored"] == 43 and not found["live"]
    assert compact(drain, budget=Budget(disk_bytes=1, ttl_s=1e-9)).counts["evicted"] == 0
    Operations(drain).pin("default", "chat", False)
    assert compact(drain, budget=Budget(disk_bytes=1)).counts["evicted"] == 1
    assert counts(drain)["blocks"] == 0
    drain.close()


def test_remove_refuses_a_live_session(world: World, drain: Drain) -> None:
    world.capture(world.lane(), "a", TOKENS, [43])
    with pytest.raises(ValueError, match="live"):
        Operations(drain).remove("default", "chat", force=False, dry_run=False)
    assert Operations(drain).remove("default", "chat", force=True, dry_run=True) == {"token_lists": 1}
    assert Operations(drain).remove("default", "chat", force=True, dry_run=False)["blocks"] == 5
    assert Operations(drain).sessions() == []


# ---------------------------------------------------------------- crashes


@pytest.mark.parametrize(
    "name", [f"compact.{place}.{side}" for place in ("base_switch", "free") for side in ("before", "after")]
)
@pytest.mark.parametrize("turn", [1, 2])
def test_failure_at_any_step_loses_nothing(world: World, name: str, turn: int) -> None:
    lane = world.lane()
    other = TOKENS.copy()
    other[18:] += 1
    answer(world, lane, "rejected", other, session="a")
    answer(world, lane, "kept", TOKENS, start=16, session="a")
    answer(world, lane, "b", some_tokens(30, seed=5), session="b")
    drain = world.drained()
    failpoints.arm(f"{name}:{turn}:EIO")
    try:
        compact(drain)
    except (OSError, TierError):
        pass
    finally:
        failpoints.arm(None)
    drain.close()
    drain = Drain(world.paths, world.settings)
    assert restorable(world, drain, TOKENS) == 43
    compact(drain)
    assert counts(drain)["blocks"] == 5 + 3 and counts(drain)["bases"] == 2 and counts(drain)["sequences"] == 0
    check_usage(drain)
    drain.close()
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []


@pytest.mark.process
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_history_keeps_the_newest_of_every_session(world: World, data: st.DataObject) -> None:
    """Against a model: after any mix of answers, live sequences and compactions, every session's newest list is whole."""
    space = engine = f"e{next(EXAMPLES)}"
    lane, drain = world.lane(engine), Drain(world.paths, world.settings)
    try:
        newest: dict[str, np.ndarray] = {}
        open_now: set[str] = set()
        for turn in range(data.draw(st.integers(1, 7))):
            session = data.draw(st.sampled_from("abc"))
            if session in open_now:
                continue
            base = newest[data.draw(st.sampled_from(sorted(newest)))] if newest else some_tokens(40, seed=3)
            shared = data.draw(st.integers(0, len(base)))
            tokens = np.concatenate([base[:shared], some_tokens(data.draw(st.integers(1, 30)), seed=100 + turn)])
            start = restorable(world, drain, tokens, space) // BLOCK * BLOCK
            name = f"{space}-{turn}"
            world.capture(lane, name, tokens, [len(tokens)], start=start, session=session, namespace=space)
            if data.draw(st.booleans()):
                lane.append_close(sequence(name), 1, len(tokens))
            else:
                open_now.add(session)
            newest[session] = tokens
            if data.draw(st.booleans()):
                drain.flush(sync=True)
            if data.draw(st.booleans()):
                compact(drain)
        for _ in range(2):
            for tokens in newest.values():
                assert restorable(world, drain, tokens, space) == len(tokens)
            check_usage(drain)
            drain.flush(sync=True)
            compact(drain)
    finally:  # also of an example that is given up in the middle of its draws
        drain.close()
        lane.close()
        Path(world.paths.lane(engine)).unlink()


def test_layout_of_nothing_is_compacted(world: World, drain: Drain) -> None:
    lane, bare = world.lane(), Layout((), state_bytes=16)
    lane.append_open(sequence("a"), 1, ROOT, bare, BLOCK, "default", "chat", "a", TOKENS[:0])
    lane.reserve_rows(bare, 43).commit(sequence("a"), 1, 0, TOKENS)
    append_point(lane, "a", 43, PointKind.TIP, 16)
    lane.append_close(sequence("a"), 1, 43)
    drain.flush(sync=True)
    assert compact(drain).counts["folded"] == 1
    assert counts(drain)["blocks"] == 5 and counts(drain)["points"] == 1


# ---------------------------------------------------------------- over the budget


def test_over_the_budget_nothing_is_put_until_there_is_room(world: World) -> None:
    """Records wait in the lane, deleting still works, and what only a lane names yet is not freed meanwhile."""
    lane = world.lane()
    drain = world.drained()
    old = some_tokens(43, seed=9)
    answer(world, lane, "old", old, session="old")
    drain.flush(sync=True)
    drain.settings = dataclasses.replace(world.settings, disk_budget_bytes=drain.store().usage().total_bytes + 100)
    answer(world, lane, "new", TOKENS, session="new")
    with pytest.raises(OverBudget):
        drain.flush(sync=False)
    assert lane.tail < lane.head and "budget" in drain.stats()["failing"] and Jobs(drain).wants_compaction()
    assert drain.stats()["budgets"]["disk"][1] > 0
    compact(drain, budget=drain.budget())
    assert restorable(world, drain, old) == 0
    drain.flush(sync=True)
    assert restorable(world, drain, TOKENS) == 43 and drain.stats()["failing"] == ""
    drain.close()


def test_over_the_budget_what_an_unread_sequence_leans_on_stays(world: World) -> None:
    lane = world.lane()
    drain = world.drained()
    answer(world, lane, "old", TOKENS[:24], session="old")
    drain.flush(sync=True)
    drain.settings = dataclasses.replace(world.settings, disk_budget_bytes=drain.store().usage().total_bytes + 100)
    answer(world, lane, "new", TOKENS, session="new", start=24)
    compact(drain, budget=drain.budget())
    assert counts(drain)["blocks"] == 3
    drain.settings = world.settings
    drain.flush(sync=True)
    assert restorable(world, drain, TOKENS) == 43
    drain.close()


@pytest.mark.parametrize("whose", ["store", "tenant"])
def test_a_budget_that_only_pinned_and_live_sessions_use_up_is_said(
    world: World, whose: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They stay, and the operator is told: in the log once, and in what the keeper tells as long as it lasts."""
    lane = world.lane()
    answer(world, lane, "old", some_tokens(43, seed=9), session="old", namespace="one")
    world.capture(lane, "live", some_tokens(43, seed=8), [43], session="live", namespace="one")
    drain = world.drained()
    Operations(drain).pin("one", "old", True)
    used = drain.store().usage().total_bytes
    limits = {"disk_budget_bytes": used} if whose == "store" else {"tenant_budget_bytes": used}
    drain.settings = dataclasses.replace(world.settings, **limits)
    for _ in range(2):
        assert compact(drain, budget=drain.budget()).counts["evicted"] == 0
    assert restorable(world, drain, some_tokens(43, seed=9), "one") == 43
    (held,) = drain.stats()["held"]
    assert (held["tenant"], held["limit"]) == ("" if whose == "store" else "one", used)
    said = capsys.readouterr()
    assert (said.out + said.err).count("compact.budget_held") == 1
    Operations(drain).pin("one", "old", False)
    assert compact(drain, budget=drain.budget()).counts["evicted"] == 1
    assert drain.stats()["held"] == []
    drain.close()


def test_page_cache_of_the_store_is_counted_and_given_back(world: World) -> None:
    if world.paths.data_dir.stat().st_dev == SHARED_MEMORY.stat().st_dev:
        pytest.skip("what lies in memory alone is never given back; `make test` has a disk")
    answer(world, world.lane(), "a", TOKENS)
    world.drain()
    data = world.paths.store / "data.mdb"
    data.read_bytes()
    assert cached_bytes(data) > 0 and cached_bytes(Path("/nowhere")) == 0
    with open(data, "rb") as file:
        os.fsync(file.fileno())
    drop_cached(data, 1 << 30)
    assert cached_bytes(data) < data.stat().st_size


KILLED = """
import sys
from tests.tiers.sample import World
from tests.tiers.test_compaction import compact
from tiers import failpoints
from tiers.drain import Drain
from tiers.paths import Paths
world = World(Paths.at(sys.argv[1], sys.argv[2]))
drain = Drain(world.paths, world.settings)
failpoints.arm(sys.argv[3])
compact(drain)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "place",
    [
        f"compact.{place}.{side}:{turn}"
        for place in ("base_switch", "free")
        for side in ("before", "after")
        for turn in (1, 2)
    ],
)
def test_killed_at_any_step_loses_nothing(world: World, place: str) -> None:
    lane = world.lane()
    other = TOKENS.copy()
    other[18:] += 1
    answer(world, lane, "rejected", other, session="a")
    answer(world, lane, "kept", TOKENS, start=16, session="a")
    answer(world, lane, "b", some_tokens(30, seed=5), session="b")
    repository = Path(__file__).parents[2]
    command = [sys.executable, "-c", KILLED, str(world.paths.data_dir), str(world.paths.lane_dir), place]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    assert subprocess.run(command, check=False, cwd=repository, env=environment, timeout=120).returncode == -9
    drain = Drain(world.paths, world.settings)
    assert restorable(world, drain, TOKENS) == 43
    compact(drain)
    assert counts(drain)["blocks"] == 5 + 3 and counts(drain)["bases"] == 2 and counts(drain)["sequences"] == 0
    check_usage(drain)
    drain.close()
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []


def test_many_tails_after_one_block_are_all_found(world: World, drain: Drain) -> None:
    """Five thousand conversations that differ after a common beginning: none is left out of the search."""
    lane = world.lane()
    answer(world, lane, "first", TOKENS[:12])
    drain.flush(sync=True)
    with drain.store().group() as group:
        track = group.load_track(sequence("first"))
        assert track is not None
        for index in range(5000):
            tail = np.array([index + 100_000, 7], np.int32)
            group.frame_buffer(2, LAYOUT)[:] = made_rows(8, tail)
            group.put_tail(track, sequence(f"t{index}"), 8, tail.tobytes())
    for index in (0, 4095, 4096, 4999):
        wanted = np.concatenate([TOKENS[:8], np.array([index + 100_000, 7], np.int32)])
        assert restorable(world, drain, wanted) == 10


def test_without_collecting_it_folds_and_frees_nothing(world: World, drain: Drain) -> None:
    lane = world.lane()
    other = TOKENS.copy()
    other[18:] += 1
    answer(world, lane, "rejected", other)
    answer(world, lane, "kept", TOKENS, start=16)
    drain.flush(sync=True)
    for _ in Compaction(drain, settle_s=0, grace_s=0, collect=False).run():
        pass
    assert counts(drain)["bases"] == 1 and counts(drain)["blocks"] == 8
    for _ in Compaction(drain, settle_s=0, grace_s=0, collect=False, budget=Budget(disk_bytes=1)).run():
        pass
    assert counts(drain)["blocks"] == 0


# ---------------------------------------------------------------- without a budget: what the disk has room for


class FakeDisk:
    """A file system of `total` bytes of which `free` are free."""

    def __init__(self, total: int, free: int) -> None:
        self.f_frsize, self.f_blocks, self.f_bavail = 4096, total // 4096, free // 4096


GB = 1 << 30


@pytest.mark.parametrize(
    ("total", "free", "used", "reserve"),
    [
        (1000 * GB, 900 * GB, 0, 8 * GB),
        (100 * GB, 80 * GB, 1 * GB, 5 * GB),
        (1000 * GB, 2 * GB, 18 * GB, 2 * GB),  # others fill the disk: sessions go before it is full
        (4 * GB, 1 * GB, 0, 128 << 20),
    ],
)
def test_share_of_the_disk_leaves_a_reserve(
    total: int, free: int, used: int, reserve: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(drain_file.os, "statvfs", lambda path: FakeDisk(total, free))
    assert drain_file.disk_share(tmp_path, used) == pytest.approx((used + free - reserve) / 1.1, rel=1e-3)


def test_sessions_are_evicted_before_the_disk_is_full(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default, without any budget: least recently used first, and no record is refused meanwhile."""
    monkeypatch.setattr(drain_file, "CROWDED_CHECK_S", 0.0)
    lane, drain = world.lane(), Drain(world.paths, world.settings)
    lists = [some_tokens(5 * BLOCK + 2, seed=index) for index in range(6)]
    for index, tokens in enumerate(lists):
        answer(world, lane, f"s{index}", tokens, session=f"s{index}")
        drain.flush(sync=True)
    assert not drain.is_crowded()
    total = drain.store().usage().total_bytes
    monkeypatch.setattr(drain_file, "disk_share", lambda path, used: total)
    assert drain.is_crowded() and Jobs(drain).wants_compaction()
    assert compact(drain, budget=drain.budget()).counts["evicted"] >= 1
    assert not drain.is_crowded()
    assert restorable(world, drain, lists[0]) == 0 and restorable(world, drain, lists[-1]) == len(lists[-1])
    assert drain.stats()["budgets"]["disk"] == [drain.store().usage().total_bytes, total]
    drain.close()


def test_on_a_full_disk_sessions_are_removed_and_evicted_though_records_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting is what makes room, so it can't wait for what has none."""
    lane, drain = world.lane(), Drain(world.paths, world.settings)
    lists = [some_tokens(5 * BLOCK + 2, seed=index) for index in range(3)]
    for index, tokens in enumerate(lists[:2]):
        answer(world, lane, f"s{index}", tokens, session=f"s{index}")
    drain.flush(sync=True)
    world.capture(lane, "late", lists[2], [len(lists[2])], session="late")
    monkeypatch.setattr(store_file, "FREE_DISK_RESERVE_BYTES", 1 << 60)
    with pytest.raises(NoRoom):
        drain.step()
    store = drain.store()
    Operations(drain).remove("default", "s0", force=False, dry_run=False)
    assert [restorable(world, drain, tokens) for tokens in lists] == [0, 42, 42]
    assert compact(drain, budget=Budget(disk_bytes=1)).counts["evicted"] == 1
    assert [restorable(world, drain, tokens) for tokens in lists] == [0, 0, 42]
    assert drain.store() is store and "full" in drain.failing, "it was not closed for want of room"
    monkeypatch.undo()
    drain.flush(sync=True)
    assert lane.tail == lane.head and not drain.failing
    assert restorable(world, drain, lists[2]) == 42
    drain.close()
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []
