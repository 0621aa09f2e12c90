"""Time that the process was stopped for doesn't count."""

from __future__ import annotations

import asyncio

import pytest

from gateway import awake
from gateway.awake import AwakeTimer


async def test_a_stop_ends_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by a minute within the first slice; the rest is waited for all the same."""
    monkeypatch.setattr(awake, "SLICE_S", 0.01)
    loop, slept_s = asyncio.get_running_loop(), 0.0
    real, over, slices = loop.time, asyncio.Event(), 0
    monkeypatch.setattr(loop, "time", lambda: real() + slept_s)

    class Counted(AwakeTimer):
        def _end(self) -> None:
            nonlocal slices
            slices += 1
            super()._end()

    Counted(0.05, over.set)
    slept_s = 60.0
    await over.wait()
    assert slices >= 5


async def test_one_that_is_cancelled_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "SLICE_S", 0.001)
    rung, over = [], asyncio.Event()
    timer = AwakeTimer(0.01, lambda: rung.append(1))
    AwakeTimer(0.003, timer.cancel)
    AwakeTimer(0.03, over.set)
    await over.wait()
    assert not rung
