"""Rollback points: from the lane to the store, found by token content alone."""

from __future__ import annotations

import dataclasses
import itertools

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
    flip,
    read_all,
    sequence,
    some_tokens,
    state,
)
from tiers.compaction import Compaction
from tiers.errors import BadBlock
from tiers.keeper_operations import Operations
from tiers.lane import LaneWriter
from tiers.lane_format import PointKind, data_offset
from tiers.lane_reader import LaneReader
from tiers.layout import Layout
from tiers.prefix import PointRef, PrefixFinder
from tiers.verify import verify

EXAMPLES = itertools.count()
TOKENS = some_tokens(5 * BLOCK + 3)
SHAPE = dataclasses.replace(LAYOUT, state_bytes=100)


def open_sequence(
    lane: LaneWriter, name: str, tokens: np.ndarray, *, namespace: str = "default", layout: Layout = SHAPE
) -> None:
    lane.append_open(sequence(name), 1, ROOT, layout, BLOCK, namespace, "chat", name, tokens)


def points(world: World, tokens: np.ndarray, *, limit: int = 1000, namespace: str = "default") -> list[PointRef]:
    """What is found for `tokens`; the state of each is read and compared."""
    with world.finder().reading() as read:
        found = read.points(ROOT, namespace, tokens, limit=limit, block_tokens=BLOCK)
        for point in found:
            assert np.array_equal(read.point(point), state(point.position, 100))
    return found


def capture(world: World) -> LaneWriter:
    """One sequence with points at 0, within a block, at a block's end and at the tip."""
    lane = world.lane()
    open_sequence(lane, "a", TOKENS[:0])
    append_point(lane, "a", 0, PointKind.CHUNK, 100)
    for start, end in ((0, 5), (5, 16), (16, 43)):
        append_rows(lane, "a", start, TOKENS[start:end])
        append_point(lane, "a", end, PointKind.TIP if end == 43 else PointKind.MESSAGE, 100)
    return lane


def test_points_are_found_in_the_lane_and_on_disk(world: World) -> None:
    capture(world)
    for tier in ("lane", "disk"):
        assert [(p.position, p.tier, p.kind) for p in points(world, TOKENS)] == [
            (0, tier, 1), (5, tier, 2), (16, tier, 2), (43, tier, 4),
        ]  # fmt: skip
        assert [p.position for p in points(world, TOKENS, limit=16)] == [0, 5, 16]
        assert [p.position for p in points(world, TOKENS, limit=15)] == [0, 5]
        world.drain()


def test_another_list_finds_the_points_of_what_is_equal(world: World) -> None:
    capture(world)
    other = TOKENS.copy()
    other[10:] += 1
    for _ in range(2):
        assert [p.position for p in points(world, other)] == [0, 5]
        assert points(world, TOKENS, namespace="another tenant") == []
        world.drain()


def test_points_partly_in_the_lane_partly_on_disk(world: World) -> None:
    lane = capture(world)
    world.drain()
    more = np.concatenate([TOKENS, some_tokens(20, seed=9)])
    append_rows(lane, "a", 43, more[43:60])
    append_point(lane, "a", 60, PointKind.TIP, 100)
    assert [(p.position, p.tier) for p in points(world, more)][-2:] == [(43, "disk"), (60, "lane")]


def test_point_some_blocks_back_in_its_record(world: World) -> None:
    lane = world.lane()
    open_sequence(lane, "a", TOKENS[:0])
    append_rows(lane, "a", 0, TOKENS)
    append_point(lane, "a", 11, PointKind.CHUNK, 100)
    for _ in range(2):
        assert [p.position for p in points(world, TOKENS)] == [11]
        world.drain()


def test_point_ahead_of_its_rows_is_counted_as_a_gap(world: World) -> None:
    lane = world.lane()
    open_sequence(lane, "a", TOKENS[:0])
    append_point(lane, "a", 3, PointKind.CHUNK, 100)
    assert points(world, TOKENS) == []
    assert world.drain()["gap"] == 1


def test_same_state_is_stored_once(world: World) -> None:
    lane = capture(world)
    open_sequence(lane, "b", TOKENS[:0])
    append_rows(lane, "b", 0, TOKENS[:5])
    append_point(lane, "b", 5, PointKind.CHUNK, 100)
    counts = world.drain()
    assert (counts["points_put"], counts["points_shared"]) == (4, 1)


@pytest.mark.parametrize("size", [99, 101])
def test_point_of_the_wrong_size_is_a_bad_record(world: World, size: int) -> None:
    lane = world.lane()
    open_sequence(lane, "a", TOKENS[:0])
    append_point(lane, "a", 0, PointKind.CHUNK, size)
    assert world.drain()["bad_records"] == 1


def test_flipped_point_is_found_out_in_the_lane_and_on_disk(world: World) -> None:
    lane = capture(world)
    reader = LaneReader.open(world.paths.lane("e0"))
    record = next(header for header in reader.records(0) if header.type == 4 and header.token_end == 5)
    flip(world.paths.lane("e0"), data_offset(64) + record.payload_offset + 70)
    with pytest.raises(BadBlock, match="rollback point 5"):
        points(world, TOKENS)
    assert world.drain()["bad_records"] == 1
    assert [p.position for p in points(world, TOKENS)] == [0, 16, 43]
    data = world.paths.store / "data.mdb"
    flip(data, data.read_bytes().find(state(16, 100).tobytes()) + 3)
    with pytest.raises(BadBlock, match="checksum"):
        points(world, TOKENS)
    lane.close()


@pytest.mark.parametrize("part", ["state", "gone"])
def test_a_damaged_point_is_stored_anew_when_its_state_comes_again(world: World, part: str) -> None:
    """Else each turn would compute it again, and none would have it."""
    lane, data = capture(world), world.paths.store / "data.mdb"
    drain = world.drained()
    if part == "gone":
        with drain.store().group() as group:
            keys = [key for key, _ in group.scan_raw("points") if int.from_bytes(key[16:20], "big") == 5]
            group.delete_raw("states", keys[0][20:])
    drain.close()
    if part == "state":
        flip(data, data.read_bytes().find(state(5, 100).tobytes()) + 3)
    open_sequence(lane, "again", TOKENS[:0])
    append_rows(lane, "again", 0, TOKENS[:5])
    append_point(lane, "again", 5, PointKind.MESSAGE, 100)
    drain = world.drained()
    assert drain.counts["points_put"] == 1
    counted = drain.store().usage()
    drain.store().recount()
    assert drain.store().usage() == counted, "it is counted once"
    drain.close()
    lane.close()
    assert [point.position for point in points(world, TOKENS)] == [0, 5, 16, 43]
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []


def test_forget_takes_the_points_along(world: World) -> None:
    lane = capture(world)
    lane.append_close(sequence("a"), 1, 43)
    drain = world.drained()
    assert Operations(drain).forget(ROOT, "default", TOKENS)["points"] == 4
    assert drain.stats()["stored_points"] == drain.stats()["stored_blocks"] == 0
    drain.close()


def test_forget_keeps_what_another_session_that_says_the_same_has(world: World) -> None:
    """A chat went on under another name; when that is deleted, the first has its last block and its points as before."""
    lane = world.lane()
    for name, ends in (("stays", (16, 21)), ("gone", (16, 23, 43))):
        lane.append_open(sequence(name), 1, ROOT, SHAPE, BLOCK, "default", name, name, TOKENS[:0])
        for start, end in itertools.pairwise((0, *ends)):
            append_rows(lane, name, start, TOKENS[start:end])
            append_point(lane, name, end, PointKind.MESSAGE, 100)
        lane.append_close(sequence(name), 1, ends[-1])
    drain = world.drained()
    deleted = Operations(drain).forget(ROOT, "default", TOKENS, "gone")
    drain.close()
    assert deleted == {"blocks": 3, "tails": 1, "points": 2, "sequences": 1}
    assert world.restorable(TOKENS) == 21
    assert [point.position for point in points(world, TOKENS)] == [16, 21]
    drain = world.drained()
    Operations(drain).forget(ROOT, "default", TOKENS[:21], "stays")
    assert drain.stats()["stored_points"] == drain.stats()["stored_blocks"] == 0
    drain.close()
    assert world.restorable(TOKENS) == 0


def test_forget_keeps_the_point_at_the_end_of_a_block_where_a_fork_begins(world: World) -> None:
    lane = capture(world)
    lane.append_close(sequence("a"), 1, 43)
    drain = world.drained()
    assert Operations(drain).forget(ROOT, "default", TOKENS, "chat", keep_tokens=16)["points"] == 1
    drain.close()
    assert [point.position for point in points(world, TOKENS)] == [0, 5, 16]


def test_model_without_rows_has_blocks_and_points_all_the_same(world: World) -> None:
    lane = world.lane()
    bare = Layout((), state_bytes=100)
    open_sequence(lane, "a", TOKENS[:0], layout=bare)
    for start, end in ((0, 20), (20, 43)):
        reservation = lane.reserve_rows(bare, end - start)
        assert reservation.frame.size == 0
        reservation.commit(sequence("a"), 1, start, TOKENS[start:end])
        append_point(lane, "a", end, PointKind.CHUNK, 100)
    for _ in range(2):
        assert [p.position for p in points(world, TOKENS)] == [20, 43]
        with world.finder().reading() as read:
            found = read.find(ROOT, "default", TOKENS, limit=43, block_tokens=BLOCK)
            assert found[-1].token_end == 43
            assert all(read(extent).frame.size == 0 for extent in found)
        world.drain()


@pytest.mark.process
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_points_any_drain_any_branch(world: World, data: st.DataObject) -> None:
    """Against a model: the points found are those at equal prefixes, wherever they lie."""
    space = engine = f"e{next(EXAMPLES)}"
    lane = world.lane(engine)
    taken: list[tuple[np.ndarray, int]] = []
    base = some_tokens(40, seed=3)
    for index in range(data.draw(st.integers(1, 3))):
        shared = data.draw(st.integers(0, 40))
        tokens = np.concatenate([base[:shared], some_tokens(40 - shared, seed=50 + index)])
        open_sequence(lane, f"{space}-{index}", tokens[:0], namespace=space)
        start = 0
        for end in sorted(data.draw(st.sets(st.integers(1, 40), max_size=4))):
            append_rows(lane, f"{space}-{index}", start, tokens[start:end])
            if data.draw(st.booleans()):
                append_point(lane, f"{space}-{index}", end, PointKind.CHUNK, 100)
                taken.append((tokens, end))
            start = end
            if data.draw(st.booleans()):
                world.drain()
    expected = {end for tokens, end in taken if np.array_equal(tokens[:end], base[:end])}
    for _ in range(2):
        assert [p.position for p in points(world, base, namespace=space)] == sorted(expected)
        world.drain()
    lane.close()
    world.paths.lane(engine).unlink()


def ended(lane: LaneWriter, name: str, tokens: np.ndarray, positions: tuple[int, ...]) -> None:
    """A session of one turn, with points at `positions`, the last of which is its end."""
    lane.append_open(sequence(name), 1, ROOT, SHAPE, BLOCK, "default", name, name, tokens[:0])
    for start, end in itertools.pairwise((0, *positions)):
        append_rows(lane, name, start, tokens[start:end])
        append_point(lane, name, end, PointKind.MESSAGE, 100)
    lane.append_close(sequence(name), 1, len(tokens))


@pytest.mark.parametrize("compacted", [True, False])
def test_what_another_session_of_equal_or_like_tokens_needs_stays(world: World, compacted: bool) -> None:
    """An imported copy, two who ask the same, one who went on from there: removing one takes nothing of the other."""
    lane = world.lane()
    longer = np.concatenate([TOKENS, some_tokens(2 * BLOCK, seed=9)])
    other = np.concatenate([TOKENS[:20], some_tokens(10, seed=8)])
    ended(lane, "kept", TOKENS, (18, 40, 43))
    ended(lane, "equal", TOKENS, (18, 40, 43))
    ended(lane, "longer", longer, (18, 40, 43, 59))
    ended(lane, "other", other, (18, 30))
    drain = world.drained()
    if compacted:
        for _ in Compaction(drain, settle_s=0, grace_s=0).run():
            pass
    finder = PrefixFinder(drain.store(), world.paths.lane_dir)  # type: ignore[arg-type]

    def positions() -> list[int]:
        with finder.reading() as read:
            return [p.position for p in read.points(ROOT, "default", TOKENS, limit=43, block_tokens=BLOCK)]

    before = positions()
    assert before[-1] == 43 and len(before) > 1
    for name in ("equal", "longer", "other"):
        Operations(drain).remove("default", name, force=False, dry_run=False)
        assert (read_all(finder, TOKENS)[0], positions()) == (43, before), name
    drain.close()
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []
    drain = world.drained()
    Operations(drain).remove("default", "kept", force=False, dry_run=False)
    with drain.store().snapshot() as view:
        assert [view.count(name) for name in ("blocks", "tails", "points", "sequences", "bases")] == [0] * 5
    drain.close()
