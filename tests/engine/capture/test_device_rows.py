"""Capture with handlers writes what capture without them writes: the engine's path on a GPU, its kernels on this CPU."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.arena import Arena, LayerShape, Slot
from engine.capture import Capture, Cursor
from engine.capture.device_rows import DeviceRows, build, for_engine, shape_of
from engine.capture.driver import Buffer
from engine.capture.errors import CaptureError
from engine.capture.launch import ExecutorLaunch
from tests.engine.capture.conftest import Place
from tests.engine.capture.shim_driver import ShimDriver
from tiers.errors import LaneFull
from tiers.lane import LaneWriter
from tiers.lane_format import RecordType
from tiers.lane_reader import LaneReader
from tiers.layout import RootId

ROOT = RootId(bytes(16))


@pytest.fixture
def arena() -> Arena:
    return filled_arena(torch.device("cpu"))


def filled_arena(device: torch.device) -> Arena:
    made = Arena.allocate([LayerShape(2, 8, 8), LayerShape(1, 12, 8)], 3, 64, torch.float32, device)
    generator = torch.Generator().manual_seed(1)
    for group in made.groups:
        group.copy_(torch.randn(group.shape, generator=generator))
    for slot in made.slots:
        slot.tokens[:] = np.arange(64) + 100 * slot.index
    return made


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[LaneWriter]:
    made = LaneWriter.open(tmp_path / "e0.lane", lane_bytes=1 << 20, record_count=256, incarnation=1)
    yield made


def lane_home(place: Place, tmp_path: Path) -> Path:
    """Of a lane that a device is to write: shared memory, which it can have registered."""
    if place.device.type == "cpu":
        return tmp_path
    return Path(tempfile.mkdtemp(prefix="concordia-test-", dir="/dev/shm"))


def frames(lane: LaneWriter) -> dict[tuple[bytes, int, int], bytes]:
    """What the lane holds, by sequence and range."""
    found = {}
    reader = LaneReader.open(lane.path)
    for record in reader.records(0):
        if record.type == RecordType.ROWS:
            found[(record.sequence, record.token_start, record.token_end)] = bytes(reader.frame(record))
    reader.close()
    return found


def run_steps(capture: Capture, arena: Arena) -> None:
    """Prefill of three sequences, then decode steps of all of them together."""
    pairs: list[tuple[Cursor, Slot]] = [(capture.cursor(f"s{slot.index}", 1, 0), slot) for slot in arena.slots]
    for cursor, slot in pairs:
        slot.length = 5 + slot.index
        assert capture.advance(cursor, slot)
    for _ in range(6):
        capture.ahead([(cursor, slot, slot.length + 1) for cursor, slot in pairs])
        for cursor, slot in pairs:
            slot.length += 1
            assert capture.advance(cursor, slot)
    for cursor, _ in pairs:
        capture.close(cursor)


@pytest.mark.parametrize("way", ["stream", "graph", "executor", "auto"])
def test_the_lane_holds_the_same_with_handlers_and_without(
    way: str, place: Place, lane: LaneWriter, tmp_path: Path
) -> None:
    arena = filled_arena(place.device)
    run_steps(Capture(lane, arena, ROOT, 4), arena)
    expected = frames(lane)
    lane.close()
    other = LaneWriter.open(lane_home(place, tmp_path) / "e1.lane", lane_bytes=1 << 20, record_count=256, incarnation=1)
    rows = build(arena, place.driver, way)
    rows.reach_lane(other.ring)
    rows.rows._gather.result(60)
    capture = Capture(other, arena, ROOT, 4, rows=rows)
    run_steps(capture, arena)
    assert frames(other) == expected and len(expected) == 21
    assert rows.launches == 3 + 6, "one launch a prefill, one a step of three sequences"
    assert rows.in_lane == (0 if rows.lane else 6 * 3), "each straight into the lane, where it can be registered"
    if way == "auto":
        assert {cost.name for cost in rows.costs} == {"stream", "graph"}, "the executor is tried once it is proven"
    capture.let_go()
    if place.device.type != "cpu":
        shutil.rmtree(other.path.parent)


def test_the_executor_is_measured_once_it_is_proven(arena: Arena, tmp_path: Path, shim_driver: ShimDriver) -> None:
    proof = tmp_path / "proof"
    proof.touch()
    rows = build(arena, shim_driver, "auto", proof)
    assert {cost.name for cost in rows.costs} == {"stream", "graph", "executor"}
    assert rows.way in ("stream", "graph", "executor")
    rows.close()


def test_the_framework_copies_until_the_handlers_are_compiled(
    arena: Arena, lane: LaneWriter, shim_driver: ShimDriver
) -> None:
    shim_driver.hold_loads.clear()
    rows = build(arena, shim_driver, "stream")
    run_steps(Capture(lane, arena, ROOT, 4, rows=rows), arena)
    assert rows.launches == 0
    assert len(frames(lane)) == 21
    shim_driver.hold_loads.set()
    rows.close()
    lane.close()


def test_handlers_that_fail_leave_the_framework_in_charge(
    arena: Arena, lane: LaneWriter, tmp_path: Path, shim_driver: ShimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = build(arena, shim_driver, "executor")
    rows.rows.wait_ready()
    launcher = rows.device.launcher
    assert isinstance(launcher, ExecutorLaunch)
    capture = Capture(lane, arena, ROOT, 4, rows=rows)
    cursor, slot = capture.cursor("s", 1, 0), arena.slots[0]
    slot.length = 5
    assert capture.advance(cursor, slot) and rows.launches == 1
    monkeypatch.setattr(launcher.executor, "stuck", True)
    slot.length = 9
    assert capture.advance(cursor, slot) and rows.launches == 1
    assert "past its lease" in rows.failed
    assert len(frames(lane)) == 2
    monkeypatch.undo()
    rows.close()
    lane.close()


def test_a_lane_that_cannot_be_registered_is_filled_through_the_ring(
    arena: Arena, lane: LaneWriter, shim_driver: ShimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(array: np.ndarray) -> Buffer:
        raise CaptureError("the limit of locked memory is too low")

    monkeypatch.setattr(shim_driver, "register", refuse)
    rows: DeviceRows = build(arena, shim_driver, "stream")
    rows.reach_lane(lane.ring)
    assert rows.lane == "the limit of locked memory is too low"
    rows.rows._gather.result(60)
    capture = Capture(lane, arena, ROOT, 4, rows=rows)
    run_steps(capture, arena)
    assert len(frames(lane)) == 21 and rows.in_lane == 0
    assert capture.by == "stream, through tier 0: the limit of locked memory is too low"
    rows.close()
    lane.close()


def test_a_lane_that_was_left_is_written_no_more(
    arena: Arena, lane: LaneWriter, tmp_path: Path, shim_driver: ShimDriver
) -> None:
    rows = build(arena, shim_driver, "stream")
    rows.reach_lane(lane.ring)
    old = lane.ring[: rows.rows.shape.token_bytes]
    assert rows.rows._address(old)
    other = LaneWriter.open(tmp_path / "e1.lane", lane_bytes=1 << 20, record_count=256, incarnation=1)
    Capture(lane, arena, ROOT, 4, rows=rows).renew(other)
    assert not rows.rows._address(np.zeros_like(old)) and len(rows.rows._reachable) == 1
    rows.close()
    other.close()


def in_turn(capture: Capture, pairs: list[tuple[Cursor, Slot]], between: Callable[[], object]) -> None:
    """A step of all sequences, in which something happens between two of its captures."""
    capture.ahead([(cursor, slot, slot.length + 1) for cursor, slot in pairs])
    for cursor, slot in pairs:
        slot.length += 1
        assert capture.advance(cursor, slot)
        between()


def test_places_that_somebody_else_got_are_gathered_again(
    arena: Arena, lane: LaneWriter, tmp_path: Path, shim_driver: ShimDriver
) -> None:
    rows = build(arena, shim_driver, "stream")
    rows.reach_lane(lane.ring)
    rows.rows.wait_ready()
    capture = Capture(lane, arena, ROOT, 4, rows=rows)
    pairs: list[tuple[Cursor, Slot]] = [(capture.cursor(f"s{slot.index}", 1, 0), slot) for slot in arena.slots]
    for cursor, slot in pairs:
        slot.length = 5
        assert capture.advance(cursor, slot)
    other = capture.cursor("other", 1, 0)
    in_turn(capture, pairs, lambda: capture.lane.append_close(other.sequence, 1, 0))
    plain = LaneWriter.open(tmp_path / "e1.lane", lane_bytes=1 << 20, record_count=256, incarnation=1)
    for slot in arena.slots:
        slot.length = 5
    without = Capture(plain, arena, ROOT, 4)
    pairs = [(without.cursor(f"s{slot.index}", 1, 0), slot) for slot in arena.slots]
    for cursor, slot in pairs:
        assert without.advance(cursor, slot)
    in_turn(without, pairs, lambda: None)
    assert frames(lane) == frames(plain)
    assert rows.launches == 3 + 1 + 2, "all three together, and the two whose places were lost each alone"
    capture.let_go()
    without.let_go()


@pytest.mark.parametrize("in_lane", [True, False])
def test_rows_that_found_no_room_are_not_taken_for_those_of_the_slots_next_sequence(
    arena: Arena, lane: LaneWriter, shim_driver: ShimDriver, monkeypatch: pytest.MonkeyPatch, in_lane: bool
) -> None:
    rows = build(arena, shim_driver, "stream")
    if in_lane:
        rows.reach_lane(lane.ring)
    rows.rows.wait_ready()
    capture = Capture(lane, arena, ROOT, 4, rows=rows)
    pairs: list[tuple[Cursor, Slot]] = [(capture.cursor(f"s{slot.index}", 1, 0), slot) for slot in arena.slots]
    for cursor, slot in pairs:
        slot.length = 8
        assert capture.advance(cursor, slot)
    capture.ahead([(cursor, slot, 9) for cursor, slot in pairs])
    cursor, slot = pairs[0]
    slot.length = 9

    def full(*_: object) -> None:
        raise LaneFull("no room", where="here", cause="a test")

    with monkeypatch.context() as patch:
        patch.setattr(Capture, "_append", full)
        assert not capture.advance(cursor, slot)
    for group in arena.groups:
        group[slot.index, :, 8] += 1.0  # another token's, at the same place behind the same prefix
    following = capture.cursor("next", 1, 8)
    assert following.position == 8 and capture.advance(following, slot)
    expected = np.empty(arena.layout.frame_bytes(1), np.uint8)
    arena.copy_out(slot, 8, 9, expected)
    assert frames(lane)[(following.sequence, 8, 9)] == expected.tobytes()
    capture.let_go()


def test_rows_that_a_window_has_overwritten_are_not_asked_of_the_device(
    tmp_path: Path, shim_driver: ShimDriver
) -> None:
    arena = Arena.allocate(
        [LayerShape(1, 8, 8, window=4), LayerShape(1, 8, 8)], 3, 64, torch.float32, torch.device("cpu"), step_tokens=4, block_tokens=4,
    )  # fmt: skip
    lane = LaneWriter.open(tmp_path / "e0.lane", lane_bytes=1 << 20, record_count=256, incarnation=1)
    rows = build(arena, shim_driver, "stream")
    rows.reach_lane(lane.ring)
    rows.rows.wait_ready()
    asked: list[int] = []
    gather = rows.rows.gather
    rows.rows.gather = lambda ranges: asked.extend(r for item in ranges for r in item.rows) or gather(ranges)  # type: ignore[method-assign]
    capture = Capture(lane, arena, ROOT, 4, rows=rows)
    pairs: list[tuple[Cursor, Slot]] = [(capture.cursor(f"s{slot.index}", 1, 0), slot) for slot in arena.slots]
    for cursor, slot in pairs:
        slot.length = 4
        assert capture.advance(cursor, slot)
    late, slot = pairs[0]
    for position in range(4, 40):  # nobody captures it meanwhile
        arena.make_room(slot, position, position + 1)
        slot.length = position + 1
    assert arena.oldest(slot) > late.position
    for _ in range(2):
        capture.ahead([(cursor, held, held.length + 1) for cursor, held in pairs])
        for cursor, held in pairs:
            held.length += 1
            assert capture.advance(cursor, held)
    assert late.lost and min(asked) >= 0
    capture.let_go()


def test_shapes_come_from_the_arena(arena: Arena) -> None:
    shape = shape_of(arena)
    assert shape.token_bytes == arena.layout.token_bytes
    assert [group.planes for group in shape.groups] == [planes for planes, _ in arena.layout.groups]


def test_without_a_device_the_reason_is_told(arena: Arena, lane: LaneWriter) -> None:
    assert for_engine(arena, "copy", lane.ring) == (None, "capture_launch is set to copy")
    try:
        from engine.capture.cuda_driver import CudaDriver

        CudaDriver()
    except CaptureError:
        rows, reason = for_engine(arena, "auto", lane.ring)
        assert rows is None and reason
    lane.close()
