from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.sample import BLOCK, LAYOUT, ROOT, World, append_rows, flip, rows, sequence, some_tokens
from tiers import lane_format, media
from tiers.errors import OtherFormat
from tiers.lane import LaneWriter
from tiers.lane_format import lane_size
from tiers.lane_reader import LaneReader, LaneSet
from tiers.media import Device, Place
from tiers.paths import Paths
from tiers.prefix import PrefixFinder
from tiers.view import StoreReader

TOKENS = some_tokens(5 * BLOCK + 3)
ALIGN = 1 << 20
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A plain file for a DAX device of 4 MB, aligned to 1 MB, with a sysfs directory that says so."""
    path, sysfs = tmp_path / "dax0.0", tmp_path / "sysfs"
    path.write_bytes(b"\xa5" * (4 * ALIGN))
    (sysfs / "dax0.0").mkdir(parents=True)
    (sysfs / "dax0.0" / "size").write_text(f"{4 * ALIGN}\n")
    (sysfs / "dax0.0" / "align").write_text(f"{ALIGN:#x}\n")
    monkeypatch.setattr(media, "SYSFS_DAX", sysfs)
    return Device.find(path)


@pytest.fixture(params=["shm", "file", "device"])
def medium_world(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> Iterator[tuple[World, str]]:
    """One installation on each kind of medium."""
    if request.param == "shm":
        yield world, ""
        return
    lanes = tmp_path / "l"  # an ordinary file system, or whatever the temporary directory lies on
    on_disk = World(Paths.at(tmp_path / "data", lanes).make())
    yield on_disk, str(request.getfixturevalue("device").path) if request.param == "device" else ""


def open_lane(world: World, device: str, name: str = "e0", **options: object) -> LaneWriter:
    lane_bytes, records = world.settings.lane_bytes, world.settings.lane_record_count
    return LaneWriter.open(
        world.paths.lane(name), lane_bytes=lane_bytes, record_count=records, incarnation=1, busy_s=0.2, device=device,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


# ---------------------------------------------------------------- the contract, on every medium


def test_what_is_appended_is_read_drained_and_freed(medium_world: tuple[World, str]) -> None:
    world, device = medium_world
    lane = open_lane(world, device)
    world.capture(lane, "a", TOKENS, [3, 20, 43])
    reader = LaneReader.open(world.paths.lane("e0"))
    assert [h.token_end for h in reader.records(0)] == [0, 3, 20, 43]
    assert np.array_equal(reader.frame(reader.records(0)[2]), rows(3, TOKENS[3:20]))
    assert world.restorable(TOKENS) == 43
    world.drain()
    assert lane.tail == lane.head == reader.tail
    assert world.restorable(TOKENS) == 43


def test_the_ring_wraps_and_the_writer_goes_on_after_it_was_closed(medium_world: tuple[World, str]) -> None:
    world, device = medium_world
    tokens, position = some_tokens(4000), 0
    for _ in range(4):
        lane = open_lane(world, device)
        if not position:
            world.capture(lane, "a", tokens, [])
        for _ in range(25):
            append_rows(lane, "a", position, tokens[position : position + 40])
            position += 40
            if lane.free_bytes < 20_000:
                world.drain()
        lane.close()
        world.drain()
    assert world.restorable(tokens, limit=position) == position == 4000


@pytest.mark.parametrize("flush", ["always", "never", "auto"])
def test_every_way_to_flush_leaves_the_same_bytes(medium_world: tuple[World, str], flush: str) -> None:
    world, device = medium_world
    world.capture(open_lane(world, device, flush=flush), "a", TOKENS, [43])
    assert world.restorable(TOKENS) == 43


FOLLOWER = """
import sys
from tests.tiers.sample import rows, some_tokens, BLOCK
from tiers.lane_format import RecordType
from tiers.lane_reader import LaneReader
import numpy as np
tokens = some_tokens(400)
reader = LaneReader.open(sys.argv[1])
print("following", flush=True)
seen = position = 0
while position < 400:
    for header in reader.records(seen):
        seen = header.number + 1
        if header.type == RecordType.ROWS:
            assert header.token_start == position
            assert np.array_equal(reader.frame(header), rows(position, tokens[position : header.token_end]))
            position = header.token_end
print("done", flush=True)
"""


def start_follower(lane: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", FOLLOWER, str(lane)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline().strip() == "following"
    return process


@pytest.mark.process
def test_reader_in_another_process_follows_without_a_lock(medium_world: tuple[World, str], tmp_path: Path) -> None:
    """The writer's flock is the only one on the lane; the reader gets nothing but a read-only mapping."""
    world, device = medium_world
    lane = open_lane(world, device)
    process = start_follower(world.paths.lane("e0"))
    inode = os.stat(world.paths.lane("e0")).st_ino
    try:
        tokens = some_tokens(400)
        world.capture(lane, "a", tokens, range(10, 200, 10))
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        holders = [int(fields[4]) for fields in locks if fields[5].endswith(f":{inode}")]
        assert holders == [os.getpid()]
        for start in range(190, 400, 7):
            append_rows(lane, "a", start, tokens[start : min(400, start + 7)])
        out, _ = process.communicate(timeout=60)
        assert out.strip() == "done" and process.returncode == 0
    finally:
        process.kill()


# ---------------------------------------------------------------- devices


def drain_and_tidy(world: World) -> None:
    drain = world.drained()
    drain.step()  # an empty lane that was set aside goes in the next round
    drain.close()


def test_size_and_alignment_come_from_sysfs(device: Device) -> None:
    assert (device.size, device.align) == (4 * ALIGN, ALIGN)
    with pytest.raises(OtherFormat, match="not a DAX device"):
        Device.find("/dev/dax9.9")


def test_lanes_on_a_device_do_not_overlap_and_a_full_one_says_so(world: World, device: Device) -> None:
    lanes = [open_lane(world, str(device.path), f"e{index}") for index in range(4)]
    assert sorted(media.place_of(lane.path).offset for lane in lanes) == [0, ALIGN, 2 * ALIGN, 3 * ALIGN]
    with pytest.raises(OSError, match="no free range"):
        open_lane(world, str(device.path), "e4")
    for index, lane in enumerate(lanes):
        world.capture(lane, f"s{index}", some_tokens(43, seed=index), [43])
    for index in range(4):
        assert world.restorable(some_tokens(43, seed=index)) == 43
    lanes[1].close()
    media.remove(world.paths.lane("e1"))
    again = open_lane(world, str(device.path), "e5")
    assert media.place_of(again.path).offset == ALIGN and again.head == again.tail == 0


def test_a_lane_whose_header_page_is_damaged_keeps_its_range(world: World, device: Device) -> None:
    lanes = [open_lane(world, str(device.path), f"e{index}") for index in range(2)]
    flip(device.path, media.place_of(lanes[0].path).offset)
    third = open_lane(world, str(device.path), "e2")
    assert [media.place_of(lane.path).offset for lane in (*lanes, third)] == [0, ALIGN, 2 * ALIGN]
    world.capture(lanes[0], "a", TOKENS, [43])
    lanes[0].close()
    assert open_lane(world, str(device.path), "e0").head == 2, "made good from its entries"
    assert world.restorable(TOKENS) == 43


def test_a_lane_on_a_device_whose_removal_is_killed_is_found_again(
    world: World, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = open_lane(world, str(device.path))
    lane.close()

    def killed(*given: object, **more: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Place, "map_head", killed)
        with pytest.raises(KeyboardInterrupt):
            media.remove(lane.path)
    assert len(media.adopt(world.paths.lane_dir, device, lane_size)) == 1, "no link to a range that may be given away"


def test_what_lay_on_the_device_before_is_never_read(world: World, device: Device) -> None:
    first = open_lane(world, str(device.path))
    world.capture(first, "a", TOKENS, [43])
    reader = LaneReader.open(world.paths.lane("e0"))
    header = reader.records(0)[1]
    first.close()
    media.remove(world.paths.lane("e0"))
    assert not reader.intact(header)
    second = open_lane(world, str(device.path))
    assert LaneReader.open(world.paths.lane("e0")).records(0) == []
    assert second.lane_id != first.lane_id and not reader.intact(header)


def test_lane_of_another_geometry_on_a_device_is_set_aside_drained_and_freed(world: World, device: Device) -> None:
    lane = open_lane(world, str(device.path))
    world.capture(lane, "a", TOKENS, [43])
    lane.close()
    path = world.paths.lane("e0")
    LaneWriter.open(path, lane_bytes=1 << 17, record_count=64, incarnation=2, device=str(device.path))
    assert len(device.lanes(lane_size)) == 2
    drain_and_tidy(world)
    assert len(device.lanes(lane_size)) == 1 and world.restorable(TOKENS) == 43


def test_lanes_are_found_again_when_the_lane_directory_is_lost(world: World, device: Device) -> None:
    """As after a loss of power: the device still holds what shared memory forgot. Another installation's lanes stay alone."""
    other = World(Paths.at(world.paths.data_dir.parent / "other", world.paths.data_dir.parent / "other-lanes").make())
    other.capture(open_lane(other, str(device.path)), "b", some_tokens(43, seed=9), [43])
    world.capture(open_lane(world, str(device.path)), "a", TOKENS, [43])
    shutil.rmtree(world.paths.lane_dir)
    world.paths.make()
    assert world.restorable(TOKENS) == 0
    adopted = media.adopt(world.paths.lane_dir, device, lane_size)
    assert len(adopted) == 1 and media.adopt(world.paths.lane_dir, device, lane_size) == []
    assert world.restorable(TOKENS) == 43
    drain_and_tidy(world)
    assert not adopted[0].exists() and world.restorable(TOKENS) == 43
    assert other.restorable(some_tokens(43, seed=9)) == 43


def test_another_host_that_maps_the_same_memory_follows_by_a_link_alone(world: World, device: Device) -> None:
    """Its lane directory is another one, and the device has another name there."""
    lane = open_lane(world, str(device.path))
    place = media.place_of(world.paths.lane("e0"))
    elsewhere = world.paths.data_dir.parent / "host-b"
    (elsewhere / "lanes").mkdir(parents=True)
    os.link(device.path, elsewhere / "dax7.0")
    seen_there = Place(elsewhere / "dax7.0", place.offset, place.size, place.align, is_device=True)
    media.write_link(elsewhere / "lanes" / "a-e0.lane", seen_there)
    world.capture(lane, "a", TOKENS, [43])
    finder = PrefixFinder(StoreReader(elsewhere / "no-store"), elsewhere / "lanes")
    with finder.reading() as read:
        (extent,) = read.find(ROOT, "default", TOKENS, limit=43, block_tokens=BLOCK)
        assert np.array_equal(read(extent).frame, rows(0, TOKENS[:43]))


def test_a_flipped_link_ends_nobody(world: World, device: Device) -> None:
    """It is refused, or leads where it did."""
    lane = open_lane(world, str(device.path))
    lane.close()
    link = world.paths.lane("e0")
    good = link.read_bytes()
    for bit in range(8 * good.index(b'"offset"'), 8 * len(good)):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        link.write_bytes(flipped)
        lanes = LaneSet(world.paths.lane_dir, writable_tail=True)
        assert [reader.lane_id for reader in lanes.scan()] in ([], [lane.lane_id])
        lanes.close()
    link.write_bytes(good.replace(device.path.name.encode(), b"gone"))
    lanes = LaneSet(world.paths.lane_dir)
    assert lanes.scan() == []
    again = open_lane(world, str(device.path))
    assert [reader.lane_id for reader in lanes.scan()] == [again.lane_id] != [lane.lane_id], "the writer replaces it"


def test_link_that_is_garbage_is_refused_and_replaced_by_the_writer(world: World, device: Device) -> None:
    world.paths.lane("e0").write_bytes(media.LINK_MAGIC + b"{")
    lanes = LaneSet(world.paths.lane_dir)
    assert lanes.scan() == []
    lane = open_lane(world, str(device.path))
    assert [reader.lane_id for reader in lanes.scan()] == [lane.lane_id]


# ---------------------------------------------------------------- flush

PMEM_C = """
#include <stddef.h>
long calls, bytes; const char *last;
void pmem_persist(const void *at, size_t size) { calls++; bytes += size; last = at; }
"""


def test_records_on_a_device_are_flushed_through_libpmem_payload_before_commit_word(
    world: World, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = open_lane(world, str(device.path))
    calls: list[tuple[int, int]] = []
    entry = lane_format.DIRECTORY_OFFSET
    committed: list[int] = []

    def persist(start: int, size: int) -> None:
        calls.append((start, size))
        committed.append(lane._words[(entry >> 3) + lane_format.COMMIT])

    lane._flush = persist
    reservation = lane.reserve_rows(LAYOUT, 2)
    reservation.commit(sequence("a"), 1, 0, TOKENS[:2])
    data = lane_format.data_offset(64)
    assert calls == [(data, 64 + LAYOUT.frame_bytes(2)), (entry, 128)] and committed == [0, 1]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build a stand-in for libpmem with")
def test_libpmem_is_called_with_addresses_inside_the_mapping(
    world: World, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ctypes

    source, library = tmp_path / "pmem.c", tmp_path / "libpmem.so.1"
    source.write_text(PMEM_C)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    real = ctypes.CDLL
    monkeypatch.setattr(media.ctypes, "CDLL", lambda name, **more: real(str(library) if "pmem" in str(name) else name))
    lane = open_lane(world, str(device.path))
    world.capture(lane, "a", TOKENS, [43])
    shim = real(str(library))
    assert ctypes.c_long.in_dll(shim, "calls").value == 4  # two records, each payload and entry
    assert ctypes.c_long.in_dll(shim, "bytes").value > LAYOUT.frame_bytes(43)


def test_device_without_libpmem_says_what_that_means(
    world: World, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "_libpmem_persist", lambda: None)
    lane = open_lane(world, str(device.path))
    assert lane._flush is None
    world.capture(lane, "a", TOKENS, [43])
    assert world.restorable(TOKENS) == 43
