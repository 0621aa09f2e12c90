from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.tiers.sample import BLOCK, LAYOUT, ROOT, World, rows, sequence, some_tokens
from tiers.errors import LaneFull, TooLarge
from tiers.lane_format import PointKind, RecordType
from tiers.lane_reader import LaneReader
from tiers.staging import StagingRing

TOKENS = some_tokens(5 * BLOCK + 3)
RING_BYTES = 1 << 13
Copy = Callable[[np.ndarray, np.ndarray], Callable[[], bool]]


def plain() -> tuple[np.ndarray, Copy]:
    def copy(target: np.ndarray, source: np.ndarray) -> Callable[[], bool]:
        np.copyto(target, source)
        return lambda: True

    return np.zeros(RING_BYTES, np.uint8), copy


def pinned() -> tuple[np.ndarray, Copy]:
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    stream = torch.cuda.Stream()

    def copy(target: np.ndarray, source: np.ndarray) -> Callable[[], bool]:
        on_device = torch.from_numpy(source.copy()).cuda()
        stream.wait_stream(torch.cuda.current_stream())
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            torch.from_numpy(target).copy_(on_device, non_blocking=True)
            event.record(stream)
        copy.kept.append(on_device)  # type: ignore[attr-defined]
        return event.query

    copy.kept = []  # type: ignore[attr-defined]
    return torch.zeros(RING_BYTES, dtype=torch.uint8, pin_memory=True).numpy(), copy


@pytest.fixture(params=[pytest.param(plain, id="plain"), pytest.param(pinned, id="cuda", marks=pytest.mark.gpu)])
def ring(request: pytest.FixtureRequest, world: World) -> Iterator[tuple[StagingRing, Copy]]:
    """The same contract for plain and for pinned memory."""
    memory, copy = request.param()
    made = StagingRing(world.lane(), memory)
    yield made, copy
    made.close()


def open_sequence(ring: StagingRing, name: str) -> None:
    ring.append_open(sequence(name), 1, ROOT, LAYOUT, BLOCK, "default", "chat", name, TOKENS[:0])


def stage(ring: StagingRing, copy: Copy, name: str, start: int, end: int) -> None:
    reservation = ring.reserve_rows(LAYOUT, end - start)
    ready = copy(reservation.frame, rows(start, TOKENS[start:end]))
    reservation.commit(sequence(name), 1, start, TOKENS[start:end], ready=ready)


def settle(ring: StagingRing) -> None:
    for _ in range(100_000):
        if not ring.append_ready():
            return
    raise AssertionError("copies don't complete")


def test_what_is_staged_is_in_the_lane_once_its_copy_is_complete(ring: tuple[StagingRing, Copy], world: World) -> None:
    staging, copy = ring
    open_sequence(staging, "a")
    for start, end in ((0, 5), (5, 20), (20, 43)):
        stage(staging, copy, "a", start, end)
    staging.append_close(sequence("a"), 1, 43)
    settle(staging)
    assert world.restorable(TOKENS) == 43
    kinds = [header.type for header in LaneReader.open(world.paths.lane("e0")).records(0)]
    assert kinds == [RecordType.OPEN, *[RecordType.ROWS] * 3, RecordType.CLOSE]


def test_ring_wraps_many_times(ring: tuple[StagingRing, Copy], world: World) -> None:
    staging, copy = ring
    for turn in range(30):
        name = f"s{turn}"
        open_sequence(staging, name)
        for start in range(0, 40, 10):
            stage(staging, copy, name, start, start + 10)
        settle(staging)
        if turn % 5 == 4:
            world.drain()
    world.drain()
    assert world.restorable(TOKENS) == 40


def test_rollback_points_are_staged_in_their_place(ring: tuple[StagingRing, Copy], world: World) -> None:
    staging, copy = ring
    open_sequence(staging, "a")
    stage(staging, copy, "a", 0, 8)
    reservation = staging.reserve_point(100)
    ready = copy(reservation.frame, np.arange(100, dtype=np.uint8))
    reservation.commit(sequence("a"), 1, 8, PointKind.CHUNK, ready=ready)
    stage(staging, copy, "a", 8, 12)
    settle(staging)
    reader = LaneReader.open(world.paths.lane("e0"))
    _, _, point, _ = reader.records(0)
    assert point.type == RecordType.POINT and reader.state(point).tolist() == list(range(100))


def test_copies_that_complete_late_keep_their_order(world: World) -> None:
    memory, _ = plain()
    staging = StagingRing(world.lane(), memory)
    open_sequence(staging, "a")
    done = [False, False]
    for index, (start, end) in enumerate(((0, 5), (5, 9))):
        reservation = staging.reserve_rows(LAYOUT, end - start)
        np.copyto(reservation.frame, rows(start, TOKENS[start:end]))
        reservation.commit(sequence("a"), 1, start, TOKENS[start:end], ready=lambda index=index: done[index])
    done[1] = True
    assert staging.append_ready() == 2 and world.restorable(TOKENS) == 0
    done[0] = True
    assert staging.append_ready() == 0 and world.restorable(TOKENS) == 9


def test_full_ring_and_full_lane_say_so_and_go_on(world: World) -> None:
    memory, copy = plain()
    staging = StagingRing(world.lane(), memory)
    open_sequence(staging, "a")
    with pytest.raises(LaneFull):
        for _ in range(10_000):
            stage(staging, copy, "a", 0, 8)
    assert staging.waiting > 0
    world.drain()
    assert staging.append_ready() == 0
    stage(staging, copy, "a", 8, 16)
    world.drain()
    assert world.restorable(TOKENS) == 16


def test_frame_larger_than_the_ring_is_refused(world: World) -> None:
    staging = StagingRing(world.lane(), np.zeros(1024, np.uint8))
    with pytest.raises(TooLarge):
        staging.reserve_rows(LAYOUT, 40)


def test_newer_reservation_drops_the_older(world: World) -> None:
    staging = StagingRing(world.lane(), plain()[0])
    first = staging.reserve_rows(LAYOUT, 2)
    staging.reserve_rows(LAYOUT, 2)
    with pytest.raises(AssertionError, match="dropped"):
        first.commit(sequence("a"), 1, 0, TOKENS[:2])
