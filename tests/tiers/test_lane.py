from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiers.sample import BLOCK, LAYOUT, ROOT, World, append_rows, flip, rows, sequence, some_tokens
from tiers import failpoints, huge_pages, lane_format, lane_reader
from tiers.errors import BadRecord, LaneBusy, LaneFull, OtherFormat, TooLarge
from tiers.lane import LaneWriter
from tiers.lane_format import ENTRY_BYTES, RecordType, data_offset
from tiers.lane_reader import LaneReader, LaneSet
from tiers.media import Place


def entry_at(number: int, record_count: int = 64) -> int:
    return lane_format.DIRECTORY_OFFSET + (number % record_count) * ENTRY_BYTES


def test_record_comes_back_as_appended(world: World) -> None:
    tokens = some_tokens(5)
    lane = world.lane()
    assert (
        lane.append_open(sequence("a"), 3, ROOT, LAYOUT, BLOCK, "tenant", "chat", "stream-1", some_tokens(BLOCK)) == 0
    )
    assert append_rows(lane, "a", BLOCK, tokens, epoch=3) == 1
    assert lane.append_close(sequence("a"), 3, BLOCK + 5) == 2
    reader = LaneReader.open(world.paths.lane("e0"))
    opened, wrote, closed = reader.records(0)
    said = reader.open_payload(opened)
    assert (said.root, said.namespace, said.session, said.stream) == (ROOT, "tenant", "chat", "stream-1")
    assert said.token_start == BLOCK and said.tokens == some_tokens(BLOCK).tobytes()
    assert (wrote.type, wrote.epoch, wrote.sequence) == (RecordType.ROWS, 3, sequence("a"))
    assert (wrote.token_start, wrote.token_end) == (BLOCK, BLOCK + 5)
    assert reader.tokens(wrote) == tokens.tobytes()
    assert np.array_equal(reader.frame(wrote), rows(BLOCK, tokens))
    assert closed.type == RecordType.CLOSE and closed.token_end == BLOCK + 5


def test_uncommitted_record_is_not_seen(world: World) -> None:
    lane = world.lane()
    reader = LaneReader.open(world.paths.lane("e0"))
    lane.reserve_rows(LAYOUT, 2)
    assert reader.records(0) == []
    append_rows(lane, "a", 0, some_tokens(2))
    assert len(reader.records(0)) == 1


def test_a_newer_reservation_drops_the_older(world: World) -> None:
    lane = world.lane()
    first = lane.reserve_rows(LAYOUT, 2)
    lane.reserve_rows(LAYOUT, 2)
    with pytest.raises(AssertionError, match="dropped"):
        first.commit(sequence("a"), 1, 0, some_tokens(2))


def test_full_lane_says_so_and_goes_on_after_a_drain(world: World) -> None:
    lane = world.lane()
    with pytest.raises(LaneFull):
        for position in range(1000):
            append_rows(lane, "a", position, some_tokens(1))
    assert lane.head == world.settings.lane_record_count - 1  # the directory filled first
    keeper = LaneReader.open(world.paths.lane("e0"), writable_tail=True)
    keeper.advance_tail(lane.head - 3)
    append_rows(lane, "a", lane.head, some_tokens(1))
    assert [header.number for header in keeper.records(keeper.tail)] == list(range(lane.head - 4, lane.head))


def test_full_ring_says_so_before_anything_is_overwritten(world: World) -> None:
    lane = world.lane()
    tokens = some_tokens(100)
    with pytest.raises(LaneFull):
        while True:
            append_rows(lane, "a", 0, tokens)
    assert lane.free_bytes < LAYOUT.frame_bytes(100) + 4096
    reader = LaneReader.open(world.paths.lane("e0"))
    for header in reader.records(0):
        assert np.array_equal(reader.frame(header), rows(0, tokens))


def test_record_larger_than_the_ring_is_refused(world: World) -> None:
    with pytest.raises(TooLarge, match="lane_bytes"):
        world.lane().reserve_rows(LAYOUT, 1 << 16)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=120), lag=st.integers(1, 8))
def test_ring_wraps_many_times_without_losing_a_record(world: World, sizes: list[int], lag: int) -> None:
    lane = world.lane()
    keeper = LaneReader.open(world.paths.lane("e0"), writable_tail=True)
    waiting = {header.number: None for header in keeper.records(keeper.tail)}
    keeper.advance_tail(keeper.tail + len(waiting))
    for index, size in enumerate(sizes):
        tokens = some_tokens(size, seed=index)
        while True:
            try:
                append_rows(lane, "a", index, tokens)
                break
            except LaneFull:
                header = keeper.records(keeper.tail)[0]
                assert np.array_equal(
                    keeper.frame(header),
                    rows(header.token_start, some_tokens(sizes[header.token_start], header.token_start)),
                )
                keeper.advance_tail(header.number + 1)
        while len(keeper.records(keeper.tail)) > lag:
            keeper.advance_tail(keeper.tail + 1)
    for header in keeper.records(keeper.tail):
        assert np.array_equal(
            keeper.frame(header), rows(header.token_start, some_tokens(header.token_count, header.token_start))
        )
    lane.close()
    keeper.close()


def test_overwritten_record_is_noticed(world: World) -> None:
    lane = world.lane()
    keeper = LaneReader.open(world.paths.lane("e0"), writable_tail=True)
    append_rows(lane, "a", 0, some_tokens(300))
    (first,) = keeper.records(0)
    assert keeper.intact(first)
    for position in range(1, 4):
        keeper.advance_tail(lane.head)
        append_rows(lane, "a", position, some_tokens(300))
    assert not keeper.intact(first)
    with pytest.raises(BadRecord, match="overwritten"):
        keeper.payload(first)


def test_flipped_payload_is_a_bad_record(world: World) -> None:
    append_rows(world.lane(), "a", 0, some_tokens(4))
    flip(world.paths.lane("e0"), data_offset(64) + 70)
    reader = LaneReader.open(world.paths.lane("e0"))
    (header,) = reader.records(0)
    with pytest.raises(BadRecord, match=r"checksum is wrong.*tokens \[0, 4\)"):
        reader.frame(header)


@pytest.mark.parametrize("offset", range(0, 80, 5))
def test_flipped_entry_is_a_bad_record(world: World, offset: int) -> None:
    lane = world.lane()
    append_rows(lane, "a", 0, some_tokens(4))
    append_rows(lane, "a", 4, some_tokens(4))
    flip(world.paths.lane("e0"), entry_at(0) + offset)
    reader = LaneReader.open(world.paths.lane("e0"))
    assert [header.type for header in reader.records(0)] == [RecordType.BAD, RecordType.ROWS]


def test_writer_goes_on_after_the_last_record_of_an_existing_lane(world: World) -> None:
    lane = world.lane()
    append_rows(lane, "a", 0, some_tokens(4))
    lane.reserve_rows(LAYOUT, 4)  # a crash before commit
    lane.close()
    again = world.lane()
    assert again.head == 1 and again.lane_id == lane.lane_id
    append_rows(again, "a", 4, some_tokens(4))
    reader = LaneReader.open(world.paths.lane("e0"))
    assert [header.token_start for header in reader.records(0)] == [0, 4]
    assert np.array_equal(reader.frame(reader.records(0)[0]), rows(0, some_tokens(4)))


def test_writer_goes_on_after_a_flipped_last_entry(world: World) -> None:
    lane = world.lane()
    append_rows(lane, "a", 0, some_tokens(4))
    lane.close()
    flip(world.paths.lane("e0"), entry_at(0) + 40)
    again = world.lane()
    assert again.head == 1
    append_rows(again, "a", 4, some_tokens(4))
    reader = LaneReader.open(world.paths.lane("e0"))
    assert np.array_equal(reader.frame(reader.records(1)[0]), rows(4, some_tokens(4)))


@pytest.mark.parametrize(
    ("place", "is_seen"), [("append.commit_word.before", False), ("append.commit_word.after", True)]
)
def test_a_record_that_can_not_be_flushed_is_dropped_unless_readers_saw_it(
    world: World, place: str, is_seen: bool
) -> None:
    lane, count = world.lane(), 1 + is_seen
    append_rows(lane, "a", 0, some_tokens(5))
    used = dict(lane.shares.used)
    failpoints.arm(f"{place}:1:EIO")
    with pytest.raises(OSError, match="Input/output error"):
        append_rows(lane, "a", 5, some_tokens(3))
    assert lane.head == count and (lane.shares.used == used) == (not is_seen)
    append_rows(lane, "a", 8, some_tokens(4, seed=2))
    keeper = LaneReader.open(lane.path)
    found = keeper.records(0)
    assert [header.token_start for header in found] == ([0, 5, 8] if is_seen else [0, 8])
    assert np.array_equal(keeper.frame(found[-1]), rows(8, some_tokens(4, seed=2)))


def test_a_large_lane_lies_in_huge_pages_where_the_kernel_has_them(world: World) -> None:
    """Its bytes, offsets and size are those of any lane; readers map it the same way."""
    large = dataclasses.replace(world, settings=dataclasses.replace(world.settings, lane_bytes=40 << 20))
    lane, tokens = large.lane("e7"), some_tokens(9)
    append_rows(lane, "a", 0, tokens)
    size = data_offset(world.settings.lane_record_count) + (40 << 20)
    assert lane.path.stat().st_size == size and lane.path.stat().st_blocks * 512 >= size
    if huge_pages.can_collapse(lane.path.parent):
        assert huge_pages.huge_bytes(lane.path) >= 32 << 20
    keeper = LaneReader.open(lane.path)
    assert np.array_equal(keeper.frame(keeper.records(0)[0]), rows(0, tokens))
    lane.close()
    assert append_rows(large.lane("e7"), "a", 9, tokens) == 1


def test_a_lane_that_shared_memory_has_no_room_for_takes_none(world: World) -> None:
    large = dataclasses.replace(world, settings=dataclasses.replace(world.settings, lane_bytes=1 << 50))
    with pytest.raises(OSError, match="are free") as caught:
        large.lane()
    assert caught.value.errno == errno.ENOSPC
    assert list(world.paths.lane_dir.glob("*.lane*")) == []


def test_a_lane_of_small_pages_is_as_good(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel before 6.1, or no memory in one piece."""
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 9999)
    monkeypatch.setattr(huge_pages, "LEAST_BYTES", 1)
    lane = world.lane()
    append_rows(lane, "a", 0, some_tokens(5))
    keeper = LaneReader.open(lane.path)
    assert np.array_equal(keeper.frame(keeper.records(0)[0]), rows(0, some_tokens(5)))
    assert huge_pages.huge_bytes(lane.path) == 0


def test_second_writer_is_refused(world: World) -> None:
    lane = world.lane()
    with pytest.raises(LaneBusy):
        world.lane()
    lane.close()
    world.lane()


def test_lane_of_another_geometry_is_set_aside_and_drained(world: World) -> None:
    tokens = some_tokens(BLOCK)
    lane = world.lane()
    world.capture(lane, "a", tokens, [BLOCK])
    lane.close()
    other = LaneWriter.open(world.paths.lane("e0"), lane_bytes=1 << 17, record_count=64, incarnation=2)
    assert other.head == 0
    assert len(list(world.paths.lane_dir.glob("*.lane"))) == 2
    drain = world.drained()
    drain.step()
    drain.close()
    assert len(list(world.paths.lane_dir.glob("*.lane"))) == 1
    assert world.restorable(tokens) == BLOCK


def test_file_that_is_no_lane_is_refused_by_readers_and_replaced_by_the_writer(world: World) -> None:
    world.paths.lane("e0").write_bytes(b"x" * 100_000)
    with pytest.raises(OtherFormat):
        LaneReader.open(world.paths.lane("e0"))
    lanes = LaneSet(world.paths.lane_dir)
    assert lanes.scan() == []
    world.lane()
    assert len(lanes.scan()) == 1


def test_a_lane_that_cannot_be_mapped_yet_keeps_no_descriptor(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again at each look, which would take the last ones that there are."""
    world.lane()
    lanes = LaneSet(world.paths.lane_dir, writable_tail=True)

    def refused(place: Place) -> mmap.mmap:
        raise OSError(errno.EMFILE, "Too many open files", str(place.path))

    with monkeypatch.context() as patch:
        patch.setattr(lane_reader, "_map_tail", refused)
        assert lanes.scan() == []
        before = os.listdir("/proc/self/fd")
        assert lanes.scan() == [] and os.listdir("/proc/self/fd") == before
    assert len(lanes.scan()) == 1


def test_reader_can_only_write_the_tail_page(world: World) -> None:
    world.lane()
    reader = LaneReader.open(world.paths.lane("e0"))
    with pytest.raises(AssertionError):
        reader.advance_tail(0)
    with pytest.raises(TypeError):
        reader._memory[0] = 0  # read-only mapping


WRITER = """
import sys
import numpy as np
from tests.tiers.sample import LAYOUT, World, rows, sequence, some_tokens
from tiers.copy_sum import Memory
from tiers.errors import LaneFull
from tiers.paths import Paths
lane = World(Paths.at(sys.argv[1], sys.argv[2])).lane()
print("go", flush=True)
position = 0
while True:
    try:
        tokens = some_tokens(1 + position % 40, seed=position)  # the kernel takes 8, 16, ...
        lane.append_rows(LAYOUT, sequence("a"), 1, position, tokens, [Memory.of(rows(position, tokens))])
        position += 1
    except LaneFull:
        pass
"""


@pytest.mark.process
def test_killed_writer_leaves_no_bad_record(world: World) -> None:
    """SIGKILL at a random instruction, five times: every committed record is whole, and the next writer goes on."""
    seed = int(time.time())
    print("seed", seed)
    pause = np.random.default_rng(seed)
    seen = 0
    for _ in range(5):
        process = _start(WRITER, world)
        keeper = LaneReader.open(world.paths.lane("e0"), writable_tail=True)
        goal, deadline = seen + int(pause.integers(15, 80)), time.monotonic() + 60
        while seen < goal and time.monotonic() < deadline:
            seen += _check_and_free(keeper, keep=3)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        seen += _check_and_free(keeper, keep=3)
        keeper.close()
    assert seen > 50


def _check_and_free(keeper: LaneReader, keep: int) -> int:
    headers = keeper.records(keeper.tail)
    for header in headers:
        assert header.type == RecordType.ROWS
        tokens = some_tokens(header.token_count, seed=header.token_start)
        assert np.array_equal(keeper.frame(header), rows(header.token_start, tokens))
    if len(headers) > keep:
        keeper.advance_tail(headers[-keep].number)
    return max(0, len(headers) - keep)


def _start(script: str, world: World) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(world.paths.data_dir), str(world.paths.lane_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    while process.stdout.readline().strip() != "go":
        assert process.poll() is None
    return process


def test_entry_has_golden_bytes(world: World) -> None:
    """The format of docs/log-format.md, to the byte. If this fails, raise the version."""
    lane = world.lane()
    reservation = lane.reserve_rows(LAYOUT, 2)
    reservation.frame[:] = np.arange(LAYOUT.frame_bytes(2), dtype=np.uint8)
    reservation.commit(sequence("golden"), 7, 40, [1, -2])
    raw = world.paths.lane("e0").read_bytes()
    entry = raw[entry_at(0) : entry_at(0) + ENTRY_BYTES]
    assert entry.hex() == GOLDEN_ENTRY
    payload = raw[data_offset(64) : data_offset(64) + 64 + LAYOUT.frame_bytes(2)]
    assert payload == b"\1\0\0\0\xfe\xff\xff\xff" + bytes(56) + bytes(range(LAYOUT.frame_bytes(2)))


GOLDEN_ENTRY = (
    "4352454302000200" "0000000000000000" "0700000000000000" "e400c30bc0c57b7de30c6b3cb756c382"
    "28000000" "2a000000" "0000000000000000" "b000000000000000" "1194062671659af7" "849da3b8eecd58f9"
    + "00" * 40 + "0100000000000000"
)  # fmt: skip
