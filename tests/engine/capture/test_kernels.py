"""The kernels' own source, run on the CPU, against numpy: random shapes, patterns, overflow, weak hashes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.capture import source
from engine.capture.driver import Buffer
from engine.capture.hashing import page_hashes
from engine.capture.kernel_device import KernelDevice, Places
from engine.capture.launch import SideStream
from engine.capture.regions import memory_of
from engine.capture.source import PageShape
from engine.capture.specialisations import all_handlers
from tests.engine.capture.conftest import aligned_array
from tests.engine.capture.shim_driver import ShimDriver

SEED = 0x1234_5678_9ABC_DEF0


class Scan:
    """One scanner over a region, with room for `room` pages, driven word by word."""

    def __init__(self, driver: ShimDriver, data: np.ndarray, shape: PageShape, room: int) -> None:
        self.driver, self.data, self.shape, self.room = driver, data, shape, room
        self.module = driver.load(source.page_scanner(shape))
        self.stream = driver.stream()
        self.table = driver.mapped_buffer(8 * shape.page_count)
        self.bitmap = driver.mapped_buffer(4 * -(-shape.page_count // 32))
        self.places = Places.of(room, shape.page_bytes)
        self.out = driver.mapped_buffer(self.places.byte_count)
        self.counters = driver.device_buffer(8)

    def run(self, blocks: int = 3, flags: int = 0, first: int = 0, end: int | None = None) -> dict[int, np.ndarray]:
        """Scan once; pages by number. `found` is how many changed, with or without room."""
        words = (
            self.data.ctypes.data,
            self.table.address,
            self.bitmap.address,
            self.out.address,
            self.counters.address,
            0,
            0,
            self.room,
            SEED,
            flags,
            first,
            self.shape.page_count if end is None else end,
        )
        self.module.launch("run", self.stream, blocks, self.shape.threads, words)
        self.stream.synchronize()
        taken = min(self.found, self.room)
        size = taken * self.shape.page_bytes
        pages = self.out.array("u1", size, self.places.pages).reshape(taken, self.shape.page_bytes)
        hashes, expected = (
            self.out.array("<u8", taken, self.places.hashes),
            page_hashes(pages, SEED, self.shape.hash_mask),
        )
        assert np.array_equal(hashes, expected), "the hash that travels is of the bytes that travel"
        indices = self.out.array("<u4", taken, self.places.indices)
        assert len(set(indices.tolist())) == taken
        return {int(index): page.copy() for index, page in zip(indices, pages, strict=True)}

    @property
    def found(self) -> int:
        return int(self.out.array("<u4", 1)[0])

    def expected(self, pages: list[int]) -> dict[int, np.ndarray]:
        padded = np.zeros(self.shape.page_count * self.shape.page_bytes, dtype=np.uint8)
        padded[: self.data.size] = self.data
        return {page: padded.reshape(-1, self.shape.page_bytes)[page] for page in pages}


def same(got: dict[int, np.ndarray], expected: dict[int, np.ndarray]) -> bool:
    return got.keys() == expected.keys() and all(np.array_equal(got[page], expected[page]) for page in got)


@pytest.mark.parametrize(
    "page_bytes, alignment, batch, threads", [(512, 16, 1, 32), (1536, 4, 5, 64), (4096, 1, 32, 64)]
)
def test_scans_of_random_regions_agree_with_numpy(
    shim_driver: ShimDriver, page_bytes: int, alignment: int, batch: int, threads: int
) -> None:
    rng = np.random.default_rng([page_bytes, 1])
    size = 40 * page_bytes + int(rng.integers(1, page_bytes))
    whole = aligned_array(rng.integers(0, 256, size + 16, dtype=np.uint8))
    data = whole[alignment % 16 : alignment % 16 + size]
    assert data.ctypes.data % alignment == 0
    shape = PageShape(page_bytes, size, alignment, batch=batch, threads=threads)
    scan = Scan(shim_driver, data, shape, shape.page_count)
    assert same(scan.run(flags=1), scan.expected(list(range(shape.page_count))))
    for _ in range(12):
        count = int(rng.choice([0, 1, 2, 7, shape.page_count]))
        changed = sorted(rng.choice(shape.page_count, count, replace=False).tolist())
        for page in changed:
            end = min(size, (page + 1) * page_bytes)
            data[int(rng.integers(page * page_bytes, end))] ^= int(rng.integers(1, 256))
        assert same(scan.run(blocks=int(rng.integers(1, 9))), scan.expected(changed))


def test_pages_without_room_are_found_again_until_all_are_taken(shim_driver: ShimDriver) -> None:
    rng = np.random.default_rng(2)
    shape = PageShape(512, 90 * 512, batch=8, threads=64)
    data = aligned_array(rng.integers(0, 256, shape.region_bytes, dtype=np.uint8))
    scan = Scan(shim_driver, data, shape, room=16)
    got: dict[int, np.ndarray] = {}
    lefts = []
    scan.table.array("<u8", 90)[:] = page_hashes(data.reshape(90, 512), SEED)
    data.reshape(90, 512)[:70, 3] ^= 1
    while True:
        part = scan.run()
        assert not part.keys() & got.keys(), "no page comes twice"
        got |= part
        lefts.append(scan.found)
        if scan.found <= scan.room:
            break
    assert lefts == [70, 54, 38, 22, 6]
    assert same(got, scan.expected(list(range(70))))


def test_marks_without_room_are_kept(shim_driver: ShimDriver) -> None:
    rng = np.random.default_rng(3)
    shape = PageShape(512, 100 * 512, bitmap=True, batch=32, threads=64)
    data = aligned_array(rng.integers(0, 256, shape.region_bytes, dtype=np.uint8))
    scan = Scan(shim_driver, data, shape, room=9)
    marks = sorted(rng.choice(100, 40, replace=False).tolist())
    for page in marks:
        scan.bitmap.array("<u4", 4)[page // 32] |= np.uint32(1 << (page % 32))
    got: dict[int, np.ndarray] = {}
    for _ in range(5):
        part = scan.run()
        assert not part.keys() & got.keys()
        got |= part
    assert same(got, scan.expected(marks))
    assert not scan.bitmap.array("<u4", 4).any()


def test_a_range_of_pages_is_scanned_alone(shim_driver: ShimDriver) -> None:
    shape = PageShape(512, 64 * 512, batch=4, threads=32)
    data = aligned_array(np.ones(shape.region_bytes, dtype=np.uint8))
    scan = Scan(shim_driver, data, shape, room=64)
    assert sorted(scan.run(flags=1, first=10, end=23)) == list(range(10, 23))
    assert sorted(scan.run(first=0, end=23)) == list(range(10)), "the others were never taken"


@pytest.mark.parametrize("hash_bits", [1, 4])
def test_a_weak_hash_misses_just_the_pages_that_collide(shim_driver: ShimDriver, hash_bits: int) -> None:
    rng = np.random.default_rng(4)
    shape = PageShape(512, 64 * 512, batch=8, hash_bits=hash_bits, threads=64)
    data = aligned_array(rng.integers(0, 256, shape.region_bytes, dtype=np.uint8))
    pages = data.reshape(64, 512)
    scan = Scan(shim_driver, data, shape, room=64)
    scan.run(flags=1)
    missed = 0
    for _ in range(5):
        before = page_hashes(pages, SEED, shape.hash_mask)
        known = scan.table.array("<u8", 64).copy()
        pages[:] = rng.integers(0, 256, (64, 512), dtype=np.uint8)
        after = page_hashes(pages, SEED, shape.hash_mask)
        assert np.array_equal(known, before), "the table holds what was seen last"
        changed = np.nonzero(before != after)[0].tolist()
        missed += 64 - len(changed)
        assert same(scan.run(), scan.expected(changed))
    assert missed > 0, "with this few bits some pages must collide"
    assert same(scan.run(flags=1), scan.expected(list(range(64)))), "a scan of everything brings them back"


def test_the_hash_tells_swapped_units_zero_runs_and_single_bits_apart() -> None:
    rng = np.random.default_rng(5)
    page = rng.integers(0, 256, 1024, dtype=np.uint8)
    variants = [page, np.zeros(1024, np.uint8), np.full(1024, 255, np.uint8)]
    for unit in range(0, 1008, 16):
        swapped = page.copy()
        swapped[unit : unit + 16], swapped[unit + 16 : unit + 32] = page[unit + 16 : unit + 32], page[unit : unit + 16]
        variants.append(swapped)
    for bit in range(8192):
        flipped = page.copy()
        flipped[bit // 8] ^= 1 << (bit % 8)
        variants.append(flipped)
    hashes = page_hashes(np.stack(variants), SEED)
    assert len(set(hashes.tolist())) == len(variants)
    assert page_hashes(page[None], SEED + 1)[0] != hashes[0]


def test_the_device_takes_pages_part_by_part_when_the_staging_is_small(
    shim_driver: ShimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.capture.kernel_device._STAGING_BYTES", 8 * 512)
    rng = np.random.default_rng(6)
    data = aligned_array(rng.integers(0, 256, 100 * 512, dtype=np.uint8))
    device = KernelDevice(shim_driver, SideStream(shim_driver), seed=SEED)
    region = device.pages(memory_of(data), 512)
    assert list(region.scan().indices) == list(range(100))
    data.reshape(100, 512)[20:60, 7] ^= 3
    delta = region.scan()
    assert list(delta.indices) == list(range(20, 60))
    assert region.scan().indices.size == 0
    target = aligned_array(np.zeros_like(data))
    assert device.pages(memory_of(target), 512).apply(delta).count == 40
    assert np.array_equal(target.reshape(100, 512)[20:60], data.reshape(100, 512)[20:60])
    device.close()


def test_handlers_are_swapped_between_two_scans_once_they_are_compiled(shim_driver: ShimDriver) -> None:
    rng = np.random.default_rng(7)
    data = aligned_array(rng.integers(0, 256, 64 * 512, dtype=np.uint8))
    device = KernelDevice(shim_driver, SideStream(shim_driver), seed=SEED)
    region = device.pages(memory_of(data), 512)
    region.scan()
    shim_driver.hold_loads.clear()
    region.reshape(memory_of(data), bitmap=True)
    data[5 * 512] ^= 1
    assert list(region.scan().indices) == [5], "the old handlers go on while the new ones are compiled"
    data[9 * 512] ^= 1
    shim_driver.hold_loads.set()
    region._next[1].scan.result(60), region._next[1].apply.result(60), region._next[1].mark.result(60)  # type: ignore[index]
    assert 9 in region.scan().indices, "the change before the swap comes with the first scan after it"
    region.mark([3])
    assert list(region.scan().indices) == [3]
    device.close()


def test_registered_memory_is_gathered_into_in_place(shim_driver: ShimDriver) -> None:
    from engine.capture.handlers import RowRange
    from engine.capture.source import RowGroup, RowShape

    shape = RowShape((RowGroup(2, 16, 2 * 8 * 16, 8 * 16),), threads=32)
    data = aligned_array(np.arange(2 * 8 * 16, dtype=np.uint8))
    device = KernelDevice(shim_driver, SideStream(shim_driver))
    rows = device.rows([memory_of(data)], shape)
    ring = aligned_array(np.zeros(4096, dtype=np.uint8))
    rows.reach(shim_driver.register(ring))
    staged = rows._staging.host
    assert staged is not None
    staged[:] = 77
    inside = RowRange(0, 1, 3, ring[256 : 256 + 2 * 32])
    rows.gather([inside])
    assert np.array_equal(inside.frame, data.reshape(2, 8, 16)[:, 1:3].reshape(-1))
    assert (staged == 77).all(), "nothing went through the ring"
    device.close()


def test_any_number_of_blocks_shares_any_number_of_ranges(shim_driver: ShimDriver) -> None:
    from engine.capture.handlers import RowRange
    from engine.capture.plain import PlainDevice
    from engine.capture.source import RowGroup, RowShape

    rng = np.random.default_rng(8)
    shape = RowShape((RowGroup(3, 16, 3 * 40 * 16, 40 * 16), RowGroup(1, 12, 40 * 12, 40 * 12)), threads=32)
    arrays = [aligned_array(rng.integers(0, 256, 4 * group.slot_stride, dtype=np.uint8)) for group in shape.groups]
    device = KernelDevice(shim_driver, SideStream(shim_driver))
    rows = device.rows([memory_of(array) for array in arrays], shape)
    plain = PlainDevice().rows([memory_of(array) for array in arrays], shape)
    for blocks, count in ((1, 5), (2, 7), (7, 2), (5, 5), (9, 1), (3, 64), (8, 30)):
        ranges, expected = [], []
        for _ in range(count):
            start, size = int(rng.integers(0, 30)), int(rng.integers(1, 10))
            given = int(rng.integers(4)), start, start + size
            for frames in (ranges, expected):
                frames.append(RowRange(*given, np.zeros(size * shape.token_bytes, np.uint8)))
        device.blocks = lambda module, units, blocks=blocks: blocks  # type: ignore[method-assign,misc]
        rows.gather(ranges)
        plain.gather(expected)
        for got, wanted in zip(ranges, expected, strict=True):
            assert np.array_equal(got.frame, wanted.frame), (blocks, count)
    device.close()


def test_no_handler_has_shared_memory_of_its_own_where_the_executor_calls_it() -> None:
    """An operator would have the addresses of the executor's shared memory: only what is launched by itself may have some."""
    for handler in all_handlers():
        if handler.name != "executor":
            operated = handler.text[: handler.text.index('extern "C" __global__')]
            assert "__shared__" not in operated, handler.name


def test_marks_of_large_pages_are_taken_a_word_at_a_time(
    shim_driver: ShimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.capture.kernel_device._STAGING_BYTES", 3 * 512)
    data = aligned_array(np.random.default_rng(9).integers(0, 256, 70 * 512, dtype=np.uint8))
    device = KernelDevice(shim_driver, SideStream(shim_driver), seed=SEED)
    region = device.pages(memory_of(data), 512, bitmap=True)
    assert list(region.scan().indices) == list(range(70))
    module, whole, marked = region._now.scan.result(), device.start, []

    def start(*given: Any, **options: Any) -> None:
        whole(*given, **options)
        if given[0] is module and not marked:  # a kernel writes pages of the part that has just been taken
            marked.append(True)
            monkeypatch.setattr(device, "start", whole)
            region.mark([3, 40])

    monkeypatch.setattr(device, "start", start)
    region.scan(everything=True)
    assert 3 in region.scan().indices, "a mark that came behind its part is still there"
    device.close()


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 512"):
        PageShape(1000, 10_000)
    with pytest.raises(ValueError, match="32 with a bitmap"):
        PageShape(512, 10_000, bitmap=True, batch=8)
    with pytest.raises(ValueError, match="0 bytes"):
        PageShape(512, 0)


def test_buffers_of_the_device_alone_have_no_host_view() -> None:
    with pytest.raises(AssertionError, match="on the device"):
        Buffer(4096, 64).array("<u4", 1)
