"""Deadlines that count only the time that this process was awake for. On the event loop.

A process that is stopped and goes on (SIGSTOP, a frozen container) finds all its timers due at once, before it has heard from
anybody who was stopped with it. What would end somebody's answer then counts in slices. Source: docs/failure-model.md
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SLICE_S = 1.0


class AwakeTimer:
    """Calls `act` once, after `delay_s` seconds awake (up to a slice later for each stop), unless it is cancelled."""

    def __init__(self, delay_s: float, act: Callable[[], object]) -> None:
        self._act = act
        self._left_s = delay_s
        self._loop = asyncio.get_running_loop()
        self._begin()

    def cancel(self) -> None:
        """It is not called any more."""
        self._handle.cancel()

    def _begin(self) -> None:
        self._since = self._loop.time()
        self._handle = self._loop.call_later(min(SLICE_S, self._left_s), self._end)

    def _end(self) -> None:
        self._left_s -= min(self._loop.time() - self._since, SLICE_S)
        if self._left_s > 1e-6:
            self._begin()
        else:
            self._act()
