"""A flipped bit in a lane's header page, tail or a commit word: found, and nothing that waits in the lane is lost by it."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from tests.tiers.sample import BLOCK, LAYOUT, ROOT, World, append_rows, flip, sequence, some_tokens
from tiers import drain as drain_module
from tiers.drain import Drain
from tiers.errors import LaneFull, StoreFailed
from tiers.lane_format import COMMIT, DIRECTORY_OFFSET, ENTRY_BYTES, PAGE, RESERVED_WORD, geometry_bytes
from tiers.lane_header import header_problem, mend
from tiers.lane_reader import LaneReader
from tiers.repair import ASIDE, mend_lanes
from tiers.verify import Finding, verify

TOKENS = some_tokens(6 * BLOCK + 3)
CUTS = [5, 11, 20, 30, 51]
HEADER_BYTES = 48


def waiting(world: World, *, laps: int = 0) -> Path:
    """A lane whose last six records wait for the keeper; its directory has been gone through `laps` times before."""
    lane = world.lane()
    for _ in range(2 * laps):
        for _ in range(world.settings.lane_record_count // 2):
            lane.append_close(sequence("nobody"), 1, 0)
        world.drain()
    world.capture(lane, "a", TOKENS, CUTS)
    lane.close()
    return world.paths.lane("e0")


def found(world: World) -> list[Finding]:
    return list(verify(world.paths.store, world.paths.lane_dir, map_bytes=world.settings.store_map_bytes))


def test_any_flipped_byte_of_the_header_is_found_and_made_good_by_the_next_writer(world: World) -> None:
    path = waiting(world)
    good = path.read_bytes()
    for at in range(HEADER_BYTES):
        path.write_bytes(good)
        flip(path, at, 1 << at % 8)
        assert [(finding.kind, finding.key) for finding in found(world)] == [("lane", "e0.lane")]
        lane = world.lane()
        assert (lane.head, lane.tail) == (6, 0)
        lane.close()
        assert found(world) == []
        assert world.restorable(TOKENS) == len(TOKENS)


def test_a_keeper_that_starts_makes_it_good_and_keeps_the_damaged_page(world: World) -> None:
    flip(waiting(world), 3)
    drain = Drain(world.paths, world.settings)
    drain.open()
    drain.flush(sync=True)
    drain.close()
    assert world.restorable(TOKENS) == len(TOKENS) and found(world) == []
    assert len((world.paths.store / ASIDE / "lane-e0.broken").read_bytes()) == PAGE


def test_a_keeper_makes_it_good_also_where_its_store_can_not_be_opened_yet(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(waiting(world), 3)
    aside = world.paths.store / ASIDE
    aside.write_text("in the way of what is kept aside")
    drain = Drain(world.paths, world.settings)
    with monkeypatch.context() as patched:
        patched.setattr(drain_module, "Store", failing_store)
        with pytest.raises(StoreFailed):
            drain.open()
    drain._retry_at = 0
    drain.flush(sync=True)
    drain.close()
    assert world.restorable(TOKENS) == len(TOKENS)


def failing_store(*given: object, **more: object) -> None:
    raise StoreFailed("the disk is full")


def test_a_lane_of_another_geometry_says_enough_of_itself(world: World) -> None:
    path = waiting(dataclasses.replace(world, settings=dataclasses.replace(world.settings, lane_bytes=1 << 15)))
    for at in (0, 8, 12, 32, 40):
        flip(path, at)
        assert header_problem(path) and mend(path, 64, 1 << 16) == ["header page"]
        assert not header_problem(path)
    assert world.restorable(TOKENS) == len(TOKENS)


def test_what_can_not_be_made_good_is_set_aside_unless_somebody_writes_it(world: World) -> None:
    lane = world.lane()
    path, aside = world.paths.lane("e0"), world.paths.store / ASIDE
    os.truncate(path, path.stat().st_size - PAGE)
    given = (world.paths.lane_dir, world.settings.lane_record_count, world.settings.lane_bytes, aside)
    assert "cut" in header_problem(path)
    assert mend_lanes(*given) == {}
    assert "is being written" in mend_lanes(*given, set_aside=True)["e0.lane"] and path.exists()
    lane.close()
    assert "renamed" in mend_lanes(*given, set_aside=True)["e0.lane"]
    assert not path.exists() and (world.paths.lane_dir / "e0.lane.broken").exists() and found(world) == []


def test_a_lane_of_a_later_version_is_not_damaged(world: World) -> None:
    path = waiting(world)
    with open(path, "r+b") as file:
        file.write(geometry_bytes(64, 1 << 16, 7, 9))
    assert header_problem(path) == "" and mend(path, 64, 1 << 16) == []


def flip_commit_word(path: Path, number: int, bit: int = 0x80) -> None:
    flip(path, DIRECTORY_OFFSET + number % 64 * ENTRY_BYTES + 8 * COMMIT, bit)


@pytest.mark.parametrize("laps", [0, 2])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_flipped_commit_words_hide_nothing(world: World, laps: int, width: int) -> None:
    path = waiting(world, laps=laps)
    first = LaneReader.open(path).tail
    for begin in range(first, first + 6 - width):
        for number in range(begin, begin + width):
            flip_commit_word(path, number)
        assert [finding.reason for finding in found(world)] == ["a record's commit word is flipped"] * width
        assert world.restorable(TOKENS) == len(TOKENS)
        lane = world.lane()
        assert lane.head == first + 6
        lane.close()
        assert found(world) == []
    for number in range(first, first + width):
        flip_commit_word(path, number)
    assert world.drain().get("bad_records", 0) == 0
    assert world.restorable(TOKENS) == len(TOKENS)


@pytest.mark.parametrize("laps, ahead, bit", [(1, 0, 0x40), (1, 1, 0x40), (0, 1, 0x08)])
def test_a_flipped_commit_word_makes_no_record_of_what_its_slot_held_before(
    world: World, laps: int, ahead: int, bit: int
) -> None:
    """Else the keeper would pass over the record that its writer puts there next."""
    path = waiting(world, laps=laps)
    lane, more = world.lane(), some_tokens(BLOCK, seed=9)
    head = lane.head
    flip_commit_word(path, head + ahead, bit)
    assert LaneReader.open(path).is_committed(head + ahead)
    assert LaneReader.open(path).head() == head
    drain = world.drained()
    assert lane.tail == head
    world.capture(lane, "b", more, [5, 8])
    drain.flush(sync=True)
    assert lane.tail == lane.head and drain.counts["gap"] == drain.counts["bad_records"] == 0
    drain.close()
    shutil.rmtree(world.paths.lane_dir)
    assert world.restorable(more) == len(more)


@pytest.mark.parametrize("word", [0, 8])
@pytest.mark.parametrize("bit", [0x01, 0x02, 0x04, 0x20, 0x40])
def test_a_tail_that_was_flipped_to_another_possible_one_loses_nothing(world: World, word: int, bit: int) -> None:
    path = waiting(world, laps=1)
    assert LaneReader.open(path).tail == 64
    flip(path, PAGE + word, bit)
    assert LaneReader.open(path).tail <= 64
    assert "lane" in [finding.kind for finding in found(world)]
    assert world.restorable(TOKENS) == len(TOKENS)
    lane = world.lane()
    assert lane.head == 70 and lane.tail <= 64, "a writer that believed it would write over what waits"
    assert world.drain().get("gap", 0) == 0
    assert lane.tail == 70 and found(world) == []
    shutil.rmtree(world.paths.lane_dir)
    assert world.restorable(TOKENS) == len(TOKENS)


def test_a_writer_finds_no_room_behind_a_flipped_entry(world: World) -> None:
    lane = world.lane()
    lane.append_close(sequence("nobody"), 1, 0)
    lane.append_open(sequence("a"), 1, ROOT, LAYOUT, BLOCK, "default", "chat", "a", TOKENS[:0])
    for at in (48, 53):  # its payload's place
        flip(world.paths.lane("e0"), DIRECTORY_OFFSET + at)
    kept = 0
    with pytest.raises(LaneFull):
        while lane.head < 60:
            append_rows(lane, "a", kept, long := some_tokens(150, seed=kept))
            kept += len(long)
    assert world.drain()["bad_records"] == 1
    append_rows(lane, "a", kept, some_tokens(150))


@pytest.mark.parametrize("laps", [0, 2])
@pytest.mark.parametrize("byte, bit", [(0, 0x40), (5, 1)])
def test_a_tail_that_can_not_be_is_found_and_all_is_taken_again(world: World, laps: int, byte: int, bit: int) -> None:
    path = waiting(world, laps=laps)
    flip(path, PAGE + byte, bit)
    assert "lane" in [finding.kind for finding in found(world)]
    world.drain()
    reader = LaneReader.open(path)
    assert reader.tail == reader.head() == 6 + 64 * laps
    assert world.restorable(TOKENS) == len(TOKENS) and found(world) == []


def test_a_writer_that_opens_a_lane_with_such_a_tail_writes_over_nothing(world: World) -> None:
    path = waiting(world, laps=2)
    flip(path, PAGE, 0x40)
    lane = world.lane()
    assert lane.head == 6 + 128
    world.drain()
    assert world.restorable(TOKENS) == len(TOKENS)
    append_rows(lane, "b", 0, TOKENS[:1])


def test_a_tail_that_is_flipped_under_a_keeper_costs_nothing(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [20])
    drain = world.drained()
    for bit in (0x40, 0x01, 0x40):
        flip(world.paths.lane("e0"), PAGE + 5, bit)
        start = {0x40: 20, 0x01: 30}[bit]
        append_rows(lane, "a", start, TOKENS[start : start + 10])
        drain.flush(sync=True)
        assert lane.tail == lane.head
    drain.close()
    shutil.rmtree(world.paths.lane_dir)
    assert world.restorable(TOKENS) == 40


@pytest.mark.parametrize("laps", [0, 2])
@pytest.mark.parametrize("byte, bit", [(0, 0x40), (2, 1), (6, 0x10)])
def test_a_flipped_end_of_reservations_costs_neither_what_waits_nor_what_comes(
    world: World, laps: int, byte: int, bit: int
) -> None:
    path = waiting(world, laps=laps)
    flip(path, 8 * RESERVED_WORD + byte, bit)
    assert found(world) == [] and world.restorable(TOKENS) == len(TOKENS)
    assert world.drain().get("bad_records", 0) == 0
    lane = world.lane()
    later = some_tokens(2 * BLOCK, seed=9)
    world.capture(lane, "later", later, [len(later)], session="later")
    flip(path, 8 * RESERVED_WORD + byte, bit)
    append_rows(lane, "a", len(TOKENS), TOKENS[:1])
    assert world.restorable(later) == len(later)
    assert world.drain().get("bad_records", 0) == 0
    shutil.rmtree(world.paths.lane_dir)
    assert world.restorable(TOKENS) == len(TOKENS) and world.restorable(later) == len(later)


@pytest.mark.parametrize("byte, bit", [(0, 0x02), (5, 0x01), (7, 0x80)])
def test_a_flipped_commit_word_of_the_only_record_does_not_send_the_tail_away(
    world: World, byte: int, bit: int
) -> None:
    lane = world.lane()
    lane.append_close(sequence("nobody"), 1, 0)
    world.drain()
    flip(world.paths.lane("e0"), DIRECTORY_OFFSET + 8 * COMMIT + byte, bit)
    world.drain()
    world.capture(lane, "a", TOKENS, CUTS)
    world.drain()
    assert lane.tail == lane.head == 7
    shutil.rmtree(world.paths.lane_dir)
    assert world.restorable(TOKENS) == len(TOKENS)


def test_a_lane_that_was_gone_through_is_taken_again_in_many_groups(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = waiting(world, laps=2)
    for word in (0, 8):
        flip(path, PAGE + word + 5)
    monkeypatch.setattr(drain_module, "GROUP_RECORDS", 7)
    counts = world.drain()
    reader = LaneReader.open(path)
    assert reader.tail == reader.head() == 6 + 128 and counts["records"] == 64
    assert world.restorable(TOKENS) == len(TOKENS)


def test_a_lane_that_is_written_to_by_others_while_it_is_drained_ends_the_drain(world: World) -> None:
    path = waiting(world)
    drain = Drain(world.paths, world.settings)
    drain.open()
    take = drain.step

    def damaged(**given: bool) -> bool:
        for number in range(2, 6):
            with open(path, "r+b") as file:
                file.seek(DIRECTORY_OFFSET + number * ENTRY_BYTES + 8 * COMMIT)
                file.write(bytes(8))
        return take(**given)

    drain.step = damaged  # type: ignore[method-assign]
    assert drain.flush(sync=True) == {"e0": 2}
    drain.close()
