from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiers.sample import BLOCK, LAYOUT, ROOT, World, append_rows, flip, read_all, rows, sequence, some_tokens
from tiers.errors import BadBlock
from tiers.lane_format import data_offset
from tiers.lane_reader import LaneReader
from tiers.layout import RootId, block_chain
from tiers.prefix import PrefixFinder
from tiers.view import StoreReader

EXAMPLES = itertools.count()
TOKENS = some_tokens(5 * BLOCK + 3)


def test_nothing_stored_restores_nothing(world: World) -> None:
    assert world.restorable(TOKENS) == 0


def test_lane_alone(world: World) -> None:
    world.capture(world.lane(), "a", TOKENS, [20, 21, 22, 40, 43])
    finder = world.finder()
    position, tiers = read_all(finder, TOKENS)
    assert position == 43 and tiers == ["lane"] * 5  # one extent a record, however many blocks it spans


def test_disk_alone(world: World) -> None:
    world.capture(world.lane(), "a", TOKENS, [20, 21, 22, 40, 43])
    world.drain()
    position, tiers = read_all(world.finder(), TOKENS)
    assert position == 43 and set(tiers) == {"disk"}


def test_partly_on_disk_partly_in_the_lane_within_one_block(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [18, 19])
    world.drain()
    append_rows(lane, "a", 19, TOKENS[19:20])
    position, tiers = read_all(world.finder(), TOKENS[:20])
    assert position == 20 and tiers[-1] == "lane" and tiers[-2] == "disk"
    append_rows(lane, "a", 20, TOKENS[20:30])  # the block is whole now, one half on disk
    assert read_all(world.finder(), TOKENS)[0] == 30
    world.drain()
    assert read_all(world.finder(), TOKENS)[0] == 30


def test_one_finder_follows_lane_and_store(world: World) -> None:
    reader = StoreReader(world.paths.store, map_bytes=world.settings.store_map_bytes)
    finder = PrefixFinder(reader, world.paths.lane_dir)
    assert read_all(finder, TOKENS) == (0, [])
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [1])
    for position in range(1, 43):
        append_rows(lane, "a", position, TOKENS[position : position + 1])
        if position % 7 == 0:
            reader.close()  # LMDB allows one opening a process
            world.drain()
        assert read_all(finder, TOKENS)[0] == position + 1


def test_limit_and_start_cut_the_extents(world: World) -> None:
    world.capture(world.lane(), "a", TOKENS, [30, 43])
    for _ in range(2):
        for limit in (0, 1, 7, 8, 9, 31, 43):
            assert world.restorable(TOKENS, limit=limit) == limit
            for start in (0, 3, 8, 30, 42):
                assert world.restorable(TOKENS, limit=limit, start=start) == max(limit, start)
        world.drain()


def test_start_is_not_looked_for(world: World) -> None:
    """What is resident need not be stored: a sequence that opens in the middle is found from there."""
    world.capture(world.lane(), "a", TOKENS, [43], start=16)
    assert world.restorable(TOKENS) == 0
    assert world.restorable(TOKENS, start=20) == 43
    assert world.restorable(TOKENS, start=16) == 43


@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize("diverges_at", [0, 1, 5, 8, 21, 24, 40, 42])
def test_divergent_tokens_reuse_up_to_the_divergence(world: World, diverges_at: int, drained: bool) -> None:
    world.capture(world.lane(), "a", TOKENS, [30, 31, 43])
    if drained:
        world.drain()
    other = TOKENS.copy()
    other[diverges_at:] += 1
    assert world.restorable(other) == diverges_at


def test_longest_of_several_branches(world: World) -> None:
    lane = world.lane()
    for index, shared in enumerate((1, 6, 3, 5)):
        branch = TOKENS[:16].copy()
        branch[8 + shared :] += 1 + index
        world.capture(lane, f"s{index}", branch, [16 if index % 2 else 8 + shared])
    assert world.restorable(TOKENS[:16]) == 8 + 6
    world.drain()
    assert world.restorable(TOKENS[:16]) == 8 + 6


def test_tail_of_a_sequence_on_disk_is_found_by_another(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [20])
    lane.append_close(sequence("a"), 1, 20)
    world.drain()
    world.capture(lane, "b", TOKENS, [24], start=16)
    assert world.restorable(TOKENS) == 24


def test_lane_of_a_dead_engine_is_read_together_with_a_live_one(world: World) -> None:
    dead, live = world.lane("e0"), world.lane("e1")
    world.capture(dead, "a", TOKENS, [20])
    dead.close()
    world.capture(live, "b", TOKENS, [22, 30], start=16, epoch=2, stream="a")
    assert world.restorable(TOKENS) == 30


def test_other_tenant_and_other_model_find_nothing(world: World) -> None:
    world.capture(world.lane(), "a", TOKENS, [43], namespace="alice")
    for _ in range(2):
        assert world.restorable(TOKENS, namespace="alice") == 43
        assert world.restorable(TOKENS, namespace="bob") == 0
        other = RootId(b"another model---")
        assert world.finder().find(other, "alice", TOKENS, limit=43, block_tokens=BLOCK) == []
        world.drain()


def test_flipped_lane_record_is_a_bad_block(world: World) -> None:
    world.capture(world.lane(), "a", TOKENS, [8, 16])
    reader = LaneReader.open(world.paths.lane("e0"))
    last = reader.records(0)[-1]
    flip(world.paths.lane("e0"), data_offset(64) + last.payload_offset + 64 + 10)
    with pytest.raises(BadBlock, match=r"tokens \[8, 16\)"):
        world.restorable(TOKENS)


def test_flipped_block_is_a_bad_block(world: World) -> None:
    world.capture(world.lane(), "a", TOKENS, [43])
    world.drain()
    flip_value(world, rows(16, TOKENS[16:24]))
    with pytest.raises(BadBlock, match=r"checksum.*tokens \[16, 24\)"):
        world.restorable(TOKENS)


def flip_value(world: World, frame: np.ndarray) -> None:
    """Flip a bit of the stored value that holds `frame`."""
    path = world.paths.store / "data.mdb"
    at = path.read_bytes().find(frame.tobytes())
    assert at > 0
    flip(path, at + 5)


def test_bad_block_is_healed_when_its_rows_come_again(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [43])
    world.drain()
    flip_value(world, rows(16, TOKENS[16:24]))
    world.capture(lane, "b", TOKENS, [30], start=16)
    assert world.drain()["blocks_put"] == 1
    assert world.restorable(TOKENS) == 43


def test_record_overwritten_during_a_restore_is_noticed(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [43])
    keeper = LaneReader.open(world.paths.lane("e0"), writable_tail=True)
    with pytest.raises(BadBlock, match="overwritten"):
        with world.finder().reading() as read:
            for extent in read.find(ROOT, "default", TOKENS, limit=43, block_tokens=BLOCK):
                read(extent)
            keeper.advance_tail(lane.head)
            big = some_tokens(200)
            for position in range(8):
                append_rows(lane, "b", position, big)
                keeper.advance_tail(lane.head)


def test_frames_are_views_not_copies(world: World) -> None:
    world.capture(world.lane(), "a", TOKENS, [43])
    with world.finder().reading() as read:
        (extent,) = read.find(ROOT, "default", TOKENS, limit=43, block_tokens=BLOCK)
        frame = read(extent).frame
        assert not frame.flags.owndata and not frame.flags.writeable


@pytest.mark.process
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut_any_drain_any_branch(world: World, data: st.DataObject) -> None:
    """Against a model: what can be restored is the longest prefix that any sequence has captured, whatever is where."""
    space = engine = f"e{next(EXAMPLES)}"  # an example that failed leaves its lane locked
    lane = world.lane(engine)
    captured: list[np.ndarray] = []
    for index in range(data.draw(st.integers(1, 4))):
        base = captured[data.draw(st.integers(0, len(captured) - 1))] if captured else some_tokens(60, seed=3)
        shared = data.draw(st.integers(0, len(base)))
        tokens = np.concatenate([base[:shared], some_tokens(60 - shared, seed=100 + index)])
        total = data.draw(st.integers(1, 59))
        cuts = sorted({*data.draw(st.lists(st.integers(1, total), max_size=5)), total})
        name = f"{space}-{index}"
        lane.append_open(sequence(name), 1, ROOT, LAYOUT, BLOCK, space, "s", name, tokens[:0])
        start = 0
        for end in cuts:
            append_rows(lane, name, start, tokens[start:end])
            start = end
            if data.draw(st.booleans()):
                world.drain()
        captured.append(tokens[:total])
    wanted = some_tokens(60, seed=3) if data.draw(st.booleans()) else captured[-1]
    expected = max(_common(wanted, tokens) for tokens in captured)
    assert read_all(world.finder(), wanted, namespace=space)[0] == expected
    world.drain()
    assert read_all(world.finder(), wanted, namespace=space)[0] == expected
    lane.close()
    world.paths.lane(engine).unlink()


def _common(left: np.ndarray, right: np.ndarray) -> int:
    size = min(len(left), len(right))
    differs = np.nonzero(left[:size] != right[:size])[0]
    return int(differs[0]) if len(differs) else size


def test_store_reader_before_the_store_exists(world: World) -> None:
    reader = StoreReader(world.paths.data_dir / "nowhere")
    with reader.snapshot() as view:
        chain = block_chain(ROOT, "default", TOKENS, BLOCK)
        assert (
            not view.has_block(chain[1]) and view.tails(chain[0]) == [] and view.best_child(chain[0], b"1234") is None
        )
