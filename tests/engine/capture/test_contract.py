"""What every device of the capture contract does: host memory, the kernels on the CPU (each way to launch), CUDA."""

from __future__ import annotations

import numpy as np
import pytest

from engine.capture.handlers import RowRange
from engine.capture.hashing import page_hashes
from engine.capture.plain import PlainDevice
from engine.capture.regions import memory_of
from engine.capture.source import RowGroup, RowShape, StatePart, StateShape
from tests.engine.capture.conftest import Bench

PAGE = 512


def random_bytes(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 256, count, dtype=np.uint8)


def padded_pages(data: np.ndarray, page_bytes: int) -> np.ndarray:
    pages = np.zeros(-(-data.size // page_bytes) * page_bytes, dtype=np.uint8)
    pages[: data.size] = data
    return pages.reshape(-1, page_bytes)


# ---------------------------------------------------------------- pages


def test_the_first_scan_takes_every_page_and_the_next_one_none(bench: Bench) -> None:
    data = random_bytes(np.random.default_rng(1), 5 * PAGE + 130)
    array = bench.put(data)
    region = bench.device.pages(bench.memory(array), PAGE)
    delta = region.scan()
    assert list(delta.indices) == [0, 1, 2, 3, 4, 5]
    assert np.array_equal(delta.pages, padded_pages(data, PAGE))
    assert np.array_equal(delta.hashes, page_hashes(delta.pages, delta.seed))
    assert region.scan().indices.size == 0


def test_a_scan_finds_exactly_the_changed_pages(bench: Bench) -> None:
    rng = np.random.default_rng(2)
    data = random_bytes(rng, 70 * PAGE + 3)
    array = bench.put(data)
    region = bench.device.pages(bench.memory(array), PAGE)
    region.scan()
    for changed in ([0], [69, 70], [3, 4, 5, 40], list(range(71)), []):
        for page in changed:
            data[min(data.size - 1, page * PAGE + int(rng.integers(PAGE)))] ^= 1 << int(rng.integers(8))
        bench.set(array, data)
        delta = region.scan()
        assert list(delta.indices) == changed
        assert np.array_equal(delta.pages, padded_pages(data, PAGE)[changed])


def test_everything_is_taken_on_request(bench: Bench) -> None:
    array = bench.put(random_bytes(np.random.default_rng(3), 40 * PAGE))
    region = bench.device.pages(bench.memory(array), PAGE)
    region.scan()
    assert region.scan(everything=True).indices.size == 40
    assert region.scan().indices.size == 0


def test_a_bitmap_region_gives_the_marked_pages_once(bench: Bench) -> None:
    rng = np.random.default_rng(4)
    data = random_bytes(rng, 77 * PAGE + 50)
    array = bench.put(data)
    region = bench.device.pages(bench.memory(array), PAGE, bitmap=True)
    assert region.scan().indices.size == 78
    assert region.scan().indices.size == 0
    data[33 * PAGE] ^= 1
    bench.set(array, data)
    assert region.scan().indices.size == 0, "only marks count"
    region.mark([33, 2, 77, 33])
    delta = region.scan()
    assert list(delta.indices) == [2, 33, 77]
    assert np.array_equal(delta.pages, padded_pages(data, PAGE)[[2, 33, 77]])
    assert region.scan().indices.size == 0


def test_pages_go_back_through_a_block_table(bench: Bench) -> None:
    rng = np.random.default_rng(5)
    data = random_bytes(rng, 12 * PAGE)
    source = bench.put(data)
    delta = bench.device.pages(bench.memory(source), PAGE).scan()
    target = bench.put(np.zeros(20 * PAGE, dtype=np.uint8))
    region = bench.device.pages(bench.memory(target), PAGE)
    region.scan()
    table = [int(place) for place in rng.permutation(20)[:12]]
    applied = region.apply(delta, table)
    assert (applied.count, applied.refused) == (12, [])
    got = bench.get(target).reshape(20, PAGE)
    assert np.array_equal(got[table], data.reshape(12, PAGE))
    assert not got[[place for place in range(20) if place not in table]].any()
    assert region.scan().indices.size == 0, "what was put back is known, not changed"


def test_a_short_last_page_goes_back_without_touching_what_follows(bench: Bench) -> None:
    data = random_bytes(np.random.default_rng(6), 3 * PAGE + 77)
    array = bench.put(np.concatenate([data, np.full(512, 9, dtype=np.uint8)]))
    whole = bench.memory(array)
    memory = memory_of(whole.address, data.size, device=whole.device)
    region = bench.device.pages(memory, PAGE)
    delta = region.scan()
    bench.set(array, np.concatenate([np.zeros_like(data), np.full(512, 9, dtype=np.uint8)]))
    assert region.apply(delta).count == 4
    got = bench.get(array)
    assert np.array_equal(got[: data.size], data)
    assert (got[data.size :] == 9).all()


def test_pages_that_are_damaged_or_have_no_place_are_refused(bench: Bench) -> None:
    rng = np.random.default_rng(7)
    data = random_bytes(rng, 50 * PAGE)
    delta = bench.device.pages(bench.memory(bench.put(data)), PAGE).scan()
    target = bench.put(np.zeros(50 * PAGE, dtype=np.uint8))
    region = bench.device.pages(bench.memory(target), PAGE)
    delta.pages[3, 100] ^= 4
    delta.indices[9] = 50
    applied = region.apply(delta)
    assert (applied.count, applied.refused) == (48, [3, 9])
    assert not bench.get(target).reshape(50, PAGE)[[3, 9]].any()
    delta.pages[:, 0] ^= 1
    assert region.apply(delta).refused == list(range(50)), "more than one report names"


def test_a_delta_of_one_device_is_applied_by_another(bench: Bench) -> None:
    data = random_bytes(np.random.default_rng(8), 9 * PAGE + 1)
    plain = data.copy()
    theirs = PlainDevice(seed=99).pages(memory_of(plain), PAGE)
    array = bench.put(np.zeros_like(data))
    ours = bench.device.pages(bench.memory(array), PAGE)
    assert ours.apply(theirs.scan()).count == 10
    assert np.array_equal(bench.get(array), data)
    plain[:] = 0
    assert theirs.apply(ours.scan(everything=True)).count == 10
    assert np.array_equal(plain, data)


def test_a_reshaped_region_misses_no_change(bench: Bench) -> None:
    rng = np.random.default_rng(9)
    data = random_bytes(rng, 32 * PAGE)
    array = bench.put(data)
    region = bench.device.pages(bench.memory(array), PAGE)
    held = np.zeros_like(data)
    for turn in range(6):
        if turn == 2:
            region.reshape(bench.memory(array), page_bytes=2 * PAGE)
        if turn == 4:
            data = np.concatenate([data, random_bytes(rng, 5 * PAGE)])
            held = np.concatenate([held, np.zeros(5 * PAGE, dtype=np.uint8)])
            array = bench.put(data)
            region.reshape(bench.memory(array))
        data[int(rng.integers(data.size))] ^= 1
        bench.set(array, data)
        delta = region.scan()
        for index, page in zip(delta.indices, delta.pages, strict=True):
            part = held[int(index) * region.page_bytes :][: region.page_bytes]
            part[:] = page[: part.size]
        assert np.array_equal(held, data)


# ---------------------------------------------------------------- rows


def rows_of(
    bench: Bench, rng: np.random.Generator, groups: tuple[RowGroup, ...], slots: int
) -> tuple[list, list, RowShape]:
    arrays = [random_bytes(rng, group.slot_stride * slots) for group in groups]
    return [bench.put(array) for array in arrays], arrays, RowShape(groups, threads=64)


GROUPS = {
    "one-group": (RowGroup(4, 32, 4 * 8 * 32, 8 * 32),),
    "two-groups-odd-rows": (RowGroup(3, 6, 3 * 10 * 6, 10 * 6), RowGroup(2, 48, 2 * 10 * 48 + 16, 10 * 48)),
    "ring": (RowGroup(2, 16, 2 * 4 * 16, 4 * 16, ring_rows=4), RowGroup(1, 8, 1 * 12 * 8, 12 * 8)),
}


@pytest.mark.parametrize("name", GROUPS)
def test_rows_of_several_slots_are_gathered_together_and_put_back(bench: Bench, name: str) -> None:
    rng = np.random.default_rng(10)
    groups = GROUPS[name]
    device_arrays, arrays, shape = rows_of(bench, rng, groups, slots=3)
    region = bench.device.rows([bench.memory(array) for array in device_arrays], shape)
    ranges = [RowRange(slot, start, end, np.zeros(0)) for slot, start, end in ((0, 5, 6), (2, 0, 3), (1, 3, 7))]
    ranges = [RowRange(r.slot, r.start, r.end, np.zeros(r.token_count * shape.token_bytes, np.uint8)) for r in ranges]
    region.gather(ranges)
    plain = PlainDevice().rows([memory_of(array) for array in arrays], shape)
    for got in ranges:
        expected = RowRange(got.slot, got.start, got.end, np.zeros_like(got.frame))
        plain.gather([expected])
        assert np.array_equal(got.frame, expected.frame)
    moved = [RowRange((r.slot + 1) % 3, r.start, r.end, r.frame) for r in ranges]
    region.scatter(moved)
    plain.scatter(moved)
    for device_array, array in zip(device_arrays, arrays, strict=True):
        assert np.array_equal(bench.get(device_array), array)


def test_part_of_a_frame_is_put_back(bench: Bench) -> None:
    rng = np.random.default_rng(11)
    device_arrays, arrays, shape = rows_of(bench, rng, GROUPS["one-group"], slots=2)
    frame = random_bytes(rng, 8 * shape.token_bytes)
    part = RowRange(1, 2, 5, frame, frame_first=3, frame_tokens=8)
    bench.device.rows([bench.memory(array) for array in device_arrays], shape).scatter([part])
    PlainDevice().rows([memory_of(array) for array in arrays], shape).scatter([part])
    assert np.array_equal(bench.get(device_arrays[0]), arrays[0])


def test_a_range_can_begin_at_another_row_in_every_group(bench: Bench) -> None:
    rng = np.random.default_rng(14)
    device_arrays, arrays, shape = rows_of(bench, rng, GROUPS["two-groups-odd-rows"], slots=2)
    region = bench.device.rows([bench.memory(array) for array in device_arrays], shape)
    got = RowRange(1, 7, 9, np.zeros(2 * shape.token_bytes, np.uint8), rows=(7, 2))
    region.gather([got])
    first = arrays[0].reshape(2, 3, 10, 6)[1, :, 7:9].reshape(-1)
    second = arrays[1].reshape(2, -1)[1, : 2 * 10 * 48].reshape(2, 10, 48)[:, 2:4].reshape(-1)
    assert np.array_equal(got.frame, np.concatenate([first, second]))


def test_more_ranges_than_one_launch_takes(bench: Bench) -> None:
    rng = np.random.default_rng(12)
    device_arrays, arrays, shape = rows_of(bench, rng, GROUPS["one-group"], slots=2)
    region = bench.device.rows([bench.memory(array) for array in device_arrays], shape)
    ranges = [RowRange(i % 2, i % 8, i % 8 + 1, np.zeros(shape.token_bytes, np.uint8)) for i in range(150)]
    region.gather(ranges)
    planes = arrays[0].reshape(2, 4, 8, 32)
    for item in ranges:
        assert np.array_equal(item.frame, planes[item.slot, :, item.start].reshape(-1))


# ---------------------------------------------------------------- state


def test_a_snapshot_holds_what_was_there_and_goes_back_to_any_slot(bench: Bench) -> None:
    rng = np.random.default_rng(13)
    shape = StateShape((StatePart(96, 128), StatePart(33, 36), StatePart(64, 64)), threads=64)
    arrays = [random_bytes(rng, part.slot_stride * 4) for part in shape.parts]
    device_arrays = [bench.put(array) for array in arrays]
    region = bench.device.state([bench.memory(array) for array in device_arrays], shape)
    snapshot = region.save(2)
    expected = np.concatenate(
        [
            array[2 * part.slot_stride : 2 * part.slot_stride + part.byte_count]
            for array, part in zip(arrays, shape.parts, strict=True)
        ]
    )
    for array, device_array in zip(arrays, device_arrays, strict=True):
        bench.set(device_array, np.zeros_like(array))
    state = region.read(snapshot)
    assert np.array_equal(state, expected)
    region.restore(0, state)
    at = 0
    for device_array, part in zip(device_arrays, shape.parts, strict=True):
        got = bench.get(device_array)
        assert np.array_equal(got[: part.byte_count], expected[at : at + part.byte_count])
        assert not got[part.byte_count :].any()
        at += part.byte_count
