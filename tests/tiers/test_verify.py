from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.sample import BLOCK, World, append_rows, flip, rows, sequence, some_tokens
from tiers.compaction import Compaction
from tiers.lane_format import data_offset
from tiers.lane_reader import LaneReader
from tiers.layout import block_chain
from tiers.store import Store
from tiers.verify import Affected, Checked, Finding, verify

TOKENS = some_tokens(5 * BLOCK + 3)


def findings(world: World) -> tuple[list[Finding], Checked]:
    checked = Checked()
    found = verify(world.paths.store, world.paths.lane_dir, map_bytes=world.settings.store_map_bytes, checked=checked)
    return list(found), checked


def flip_frame(path: Path, frame: bytes) -> None:
    at = path.read_bytes().find(frame)
    assert at > 0
    flip(path, at + 1)


def test_nothing_is_wrong(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [43])
    world.drain()
    append_rows(lane, "a", 43, some_tokens(2))
    found, checked = findings(world)
    assert found == []
    assert (checked.blocks, checked.tails, checked.sequences, checked.records) == (5, 1, 1, 1)


def test_nothing_is_there(world: World) -> None:
    assert findings(world) == ([], Checked())


def test_bad_block_names_every_session_that_leans_on_it(world: World) -> None:
    lane = world.lane()
    branch = TOKENS.copy()
    branch[30:] += 1
    world.capture(lane, "stream-a", TOKENS, [43], session="alice")
    world.capture(lane, "stream-b", branch, [43], session="bob")
    world.drain()
    flip_frame(world.paths.store / "data.mdb", rows(16, TOKENS[16:24]).tobytes())
    flip_frame(world.paths.store / "data.mdb", rows(32, branch[32:40]).tobytes())
    (shared, own), _ = findings(world)
    shared, own = (shared, own) if len(shared.affected) == 2 else (own, shared)
    assert set(shared.affected) == {Affected("alice", "stream-a", 16, 24), Affected("bob", "stream-b", 16, 24)}
    assert own.affected == (Affected("bob", "stream-b", 32, 40),)
    assert shared.kind == "block" and "checksum" in shared.reason


def test_bad_tail_names_its_session(world: World) -> None:
    world.capture(world.lane(), "stream-a", TOKENS, [43], session="alice")
    world.drain()
    flip_frame(world.paths.store / "data.mdb", rows(40, TOKENS[40:43]).tobytes())
    (found,), _ = findings(world)
    assert found.kind == "tail" and found.affected == (Affected("alice", "stream-a", 40, 43),)


@pytest.mark.parametrize("tokens, kind", [(TOKENS[8:16].tobytes(), "parent"), (b"its entry stays", "block")])
def test_missing_block_names_its_sessions(world: World, tokens: bytes, kind: str) -> None:
    world.capture(world.lane(), "stream-a", TOKENS, [43], session="alice")
    world.drain()
    chain = block_chain(b"root-of-the-test", "default", TOKENS, BLOCK)  # type: ignore[arg-type]
    store = Store(world.paths.store, map_bytes=world.settings.store_map_bytes)
    with store.group() as group:
        group.delete_block(chain[1], tokens, chain[2])
    store.close()
    (found,), _ = findings(world)
    assert found.kind == kind and found.affected == (Affected("alice", "stream-a", 8, 16),)


def test_bad_record_in_a_lane_names_its_session(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "stream-a", TOKENS, [10, 20], session="alice")
    reader = LaneReader.open(world.paths.lane("e0"))
    flip(world.paths.lane("e0"), data_offset(64) + reader.records(0)[2].payload_offset + 70)
    (found,), _ = findings(world)
    assert found.kind == "record" and found.affected == (Affected("alice", "stream-a", 10, 20),)
    assert sequence("stream-a")  # named by the OPEN record that still waits in the lane


def test_a_tail_piece_that_a_compacted_session_has_lost_is_named(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "stream-a", TOKENS, [43], session="alice")
    lane.append_close(sequence("stream-a"), 1, 43)
    drain = world.drained()
    for _ in Compaction(drain, settle_s=0, grace_s=0).run():
        pass
    with drain.store().group() as group:
        (key,) = [key for key, _ in group.scan_raw("tails")]
        group.delete_tail(key)
    drain.close()
    (found,), _ = findings(world)
    assert (found.kind, found.affected) == ("parent", (Affected("alice", "stream-a", 40, 43),))
