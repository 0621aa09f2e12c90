"""A sign of life: NAME.beat in the lane directory, written from a process's own event loop, so that it stops with the loop.

16 bytes: pid, CLOCK_MONOTONIC ns. All but engines write theirs; their parent (`ops/watchdog.py`), the gateway
(`gateway/supervisors.py`) and `concordia status` read it. An engine has its status page instead (`engine/status_page.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

BEAT_S = 0.5
_LATE_FACTOR = 2  # of a watcher's interval counts at most this much: what lies beyond, it was held up itself

_FORM = struct.Struct("<QQ")


def seen(passed: float, interval: float) -> float:
    """Of a time that passed between two looks of a watcher what it was there for. Any unit."""
    return min(passed, _LATE_FACTOR * interval)


class Beat(NamedTuple):
    """The last beat of a process."""

    pid: int
    at_ns: int

    @property
    def age_ms(self) -> float:
        return (time.monotonic_ns() - self.at_ns) / 1e6


def beat(path: Path) -> None:
    """Say that this process's loop turns. Makes the file, also anew if somebody deleted it. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, _FORM.pack(os.getpid(), time.monotonic_ns()), 0)
    finally:
        os.close(descriptor)


async def beat_for_ever(path: Path) -> None:
    """Beat until cancelled. Where there is no room or no directory, nothing is heard, and it is tried again."""
    while True:
        with contextlib.suppress(OSError):
            beat(path)
        await asyncio.sleep(BEAT_S)


class Beating:
    """Beats of a loop that isn't asyncio's: it calls `turn` each time round, at least every BEAT_S."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._due = 0.0

    def turn(self) -> None:
        """Beat, if it is time to and there is room."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + BEAT_S
            with contextlib.suppress(OSError):
                beat(self._path)


def read(path: Path) -> Beat | None:
    """The last beat; None if there was none."""
    try:
        return Beat(*_FORM.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return None


class Listener:
    """For how long a process has not been heard: time in which the listener stood still itself does not count.

    So when everything was stopped and goes on (SIGSTOP and SIGCONT, a frozen container), nobody is missed.
    """

    def __init__(self, path: Path, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._interval_s = interval_s
        self._clock = clock
        self._heard: Beat | None = None
        self._listened_at = clock()
        self.silent_s = 0.0

    def listen(self) -> float:
        """Seconds of silence as of now; 0 as long as it was never heard. Call it every `interval_s`."""
        now, last = self._clock(), read(self._path)
        passed_s = seen(now - self._listened_at, self._interval_s)
        self._listened_at = now
        if last is not None and last != self._heard:
            self._heard, self.silent_s = last, 0.0
        elif self._heard is not None:
            self.silent_s += passed_s
        return self.silent_s

    @property
    def pid(self) -> int:
        """Of whom was heard last; 0: nobody."""
        return self._heard.pid if self._heard else 0
