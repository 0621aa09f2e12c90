"""Frames put back by the row scatterer are where the framework puts them, and a restored stream goes on as it would have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.arena import Arena, LayerShape
from engine.capture.device_restore import DeviceRestore
from engine.capture.device_rows import DeviceRows, build
from engine.capture.errors import CaptureError
from tests.engine.capture.conftest import Place
from tests.engine.capture.shim_driver import ShimDriver
from tests.engine.driver import EngineDriver, random_tokens, submit
from tests.engine.kinds import write_model
from tiers.layout import ALL_GROUPS
from tiers.paths import Paths

PLAIN = [LayerShape(2, 8, 8), LayerShape(1, 12, 8)]
WINDOWS = [LayerShape(2, 8, 8, window=6), LayerShape(1, 8, 8), LayerShape(1, 12, 8, window=6)]


def arena_of(layers: list[LayerShape], device: torch.device) -> Arena:
    return Arena.allocate(layers, 3, 64, torch.float32, device, step_tokens=8, block_tokens=4)


def pair(layers: list[LayerShape], place: Place, way: str = "stream") -> tuple[Arena, Arena, DeviceRows]:
    """An arena of the framework's, one whose frames go through handlers, and these."""
    theirs, ours = arena_of(layers, place.device), arena_of(layers, place.device)
    rows = build(ours, place.driver, way)
    rows.rows.wait_ready()
    return theirs, ours, rows


def same(first: Arena, second: Arena) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.groups, second.groups, strict=True))


@pytest.mark.parametrize("way", ["stream", "graph", "executor"])
def test_any_part_of_a_frame_goes_to_any_slot(way: str, place: Place) -> None:
    theirs, ours, rows = pair(PLAIN, place, way)
    rng = np.random.default_rng(1)
    with ours.together():
        for slot, start, count, take in (
            (0, 0, 9, (0, 9)),
            (2, 5, 12, (3, 7)),
            (1, 30, 1, (0, 1)),
            (0, 9, 20, (1, 20)),
        ):
            frame = rng.integers(0, 100, theirs.layout.frame_bytes(count), dtype=np.uint8)
            for arena in (theirs, ours):
                arena.copy_in(arena.slots[slot], start, frame, count, take)
            frame[:] = 0  # the caller's memory is free at once
    assert same(theirs, ours)
    assert rows.restore.launches == 1, "all pieces in one launch"
    rows.close()


def test_windows_take_their_last_rows_and_frames_may_lack_them(place: Place) -> None:
    theirs, ours, rows = pair(WINDOWS, place)
    rng = np.random.default_rng(2)
    full = sum(1 << group for group, at in enumerate(theirs.group_windows) if at == 0)
    for arena in (theirs, ours):
        arena.slots[1].bases = [0, 33]
    with ours.together():
        for start, count, groups in ((0, 20, full), (20, 16, ALL_GROUPS), (36, 3, ALL_GROUPS)):
            frame = rng.integers(0, 100, theirs.layout.frame_bytes(count, groups), dtype=np.uint8)
            for arena in (theirs, ours):
                arena.copy_in(
                    arena.slots[1], start, frame, count, (0, count), firsts=[0, 33 if start else 20], groups=groups
                )
    assert same(theirs, ours)
    assert rows.restore.launches == 1
    rows.close()


def test_more_than_tier_0_holds_goes_through_its_two_halves(place: Place) -> None:
    theirs, ours, rows = pair(PLAIN, place)
    ours.applier = small = DeviceRestore(ours, rows.rows, rows._mapped, half_bytes=5 * theirs.layout.token_bytes)
    rng = np.random.default_rng(3)
    with ours.together():
        for slot in range(3):
            frame = rng.integers(0, 100, theirs.layout.frame_bytes(50), dtype=np.uint8)
            for arena in (theirs, ours):
                arena.copy_in(arena.slots[slot], 7, frame, 50, (0, 50))
    assert same(theirs, ours)
    assert small.launches == 30
    rows.close()


def test_a_single_frame_is_there_when_the_call_returns(place: Place) -> None:
    theirs, ours, rows = pair(PLAIN, place)
    frame = np.random.default_rng(4).integers(0, 100, theirs.layout.frame_bytes(6), dtype=np.uint8)
    for arena in (theirs, ours):
        arena.copy_in(arena.slots[0], 0, frame, 6, (0, 6))
    assert same(theirs, ours) and rows.restore.launches == 1
    rows.close()
    assert ours.applier is None


@pytest.mark.parametrize("fails_at", [0, 2])
def test_what_the_handlers_fail_to_put_back_the_framework_does(
    fails_at: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours, rows = pair(PLAIN, place)
    ours.applier = small = DeviceRestore(ours, rows.rows, rows._mapped, half_bytes=5 * theirs.layout.token_bytes)
    whole, calls = rows.rows.start_scatter, [0]

    def fails(*arguments: object) -> object:
        calls[0] += 1
        if calls[0] > fails_at:
            raise CaptureError("the executor is past its lease")
        return whole(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rows.rows, "start_scatter", fails)
    frame = np.random.default_rng(5).integers(0, 100, theirs.layout.frame_bytes(40), dtype=np.uint8)
    for start in (0, 20):
        for arena in (theirs, ours):
            arena.copy_in(arena.slots[2], start, frame, 40, (0, 40))
    assert same(theirs, ours)
    assert small.failed == "the executor is past its lease" and small.launches == fails_at
    rows.close()


@pytest.mark.process
@pytest.mark.parametrize("kind", ["llama", "short_window"])
def test_a_stream_that_handlers_restored_goes_on_bit_for_bit(
    kind: str, tmp_path: Path, shim_driver: ShimDriver
) -> None:
    model, prompt = write_model(kind, tmp_path / kind, context_tokens=256), random_tokens(9, 90)
    paths = Paths.at(tmp_path / "data", tmp_path / "lanes")
    options = {"prefill_chunk": 32, "context_tokens": 256, "lane_bytes": 8 << 20}
    first = EngineDriver.start(model, paths, "e0", **options)  # type: ignore[arg-type]
    first.handle(submit("s", prompt, 30))
    first.run()
    whole = first.tokens("s")
    first.close()
    second = EngineDriver.start(model, paths, "e1", **options)  # type: ignore[arg-type]
    capture = second.engine.capture
    assert capture is not None
    capture.rows = build(second.engine.arena, shim_driver, "stream")
    capture.rows.rows.wait_ready()
    second.handle(submit("s", prompt + whole[:20], 30, epoch=2, prompt_count=90))
    second.run()
    assert second.tokens("s") == whole[20:]
    assert sum(second.started("s").reused.values()) > 80
    assert capture.rows.restore.launches > 0 and second.engine.stats().restore_by == "scatter"
    second.close()
