"""Is a silent engine hung, or is it only slow? The judge is pure; `look_at` reads what it judges by from /proc.

Used by the host agent's watch (`ops/host.py`), on its loop. The age of a heartbeat alone says little on a busy machine: an engine
that wants to run and gets no processor is slow, not hung, and so is one that computes. What counts against an engine is
time in which none of its threads ran or wanted to. Four ways to be hung, each with its own bound:

    stopped   the main thread is in state T (SIGSTOP): `stopped_ms`, on two looks
    blocked   no thread runs or wants to: the bound that the engine learned from its own steps, at least `floor_ms`
    disk      the same with a thread in state D (a page is being read, or a driver is stuck): ten times that
    spinning  the main thread burns processor time without a beat: `spin_ms` of it

Source: proc_pid_stat(5), the kernel's sched-stats.rst (schedstat: ns on a processor, ns waiting for one).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tiers.heartbeat import seen

Cause = Literal["stopped", "blocked", "disk", "spinning"]
DISK_FACTOR = 10
RESUMED_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of an engine at one moment.

    at_s         CLOCK_MONOTONIC
    beat_age_ms  since its last heartbeat
    bound_ms     what it allows itself without one
    state        letter of its main thread: R, S, D, T ...; D also where it sleeps while another thread is in D
    runnable     some thread runs or waits for a processor
    busy_ms      on a processor or waiting for one, all threads, since each began
    main_cpu_ms  on a processor, main thread, since it began
    """

    at_s: float
    beat_age_ms: float
    bound_ms: float
    state: str
    runnable: bool
    busy_ms: float
    main_cpu_ms: float


@dataclass(frozen=True, slots=True)
class Hung:
    """The verdict."""

    cause: Cause
    bound_ms: float


@dataclass(slots=True)
class HangJudge:
    """Evidence of one silent stretch, that is from a heartbeat to the next. `judge` takes looks in order of time."""

    floor_ms: float
    stopped_ms: float
    spin_ms: float
    interval_ms: float
    blocked_ms: float = 0.0
    disk_ms: float = 0.0
    stopped_for_ms: float = 0.0
    slow_told: bool = False
    patient_until_s: float = 0.0
    _first: Look | None = None
    _last: Look | None = None

    def beat(self) -> None:
        """It was heard: what was held against it is forgotten."""
        self.blocked_ms = self.disk_ms = self.stopped_for_ms = 0.0
        self.slow_told = False
        self._first = self._last = None

    def watcher_stood_still(self, at_s: float) -> None:
        """The watcher did until now. Maybe all were stopped with it: those that are resumed after it are no hangs."""
        self.patient_until_s = at_s + RESUMED_WITHIN_S

    def judge(self, look: Look) -> Hung | None:
        """Take one look in; the verdict, if it is ripe."""
        last = self._last
        if last is None or look.beat_age_ms < (look.at_s - last.at_s) * 1000:
            self.beat()
            self._first = self._last = look
            return None
        self._last = look
        bound_ms = max(self.floor_ms, look.bound_ms)
        if look.state == "T":
            self.stopped_for_ms += self._counted_ms(last, look)
            unseen_ms = 2 * self.interval_ms  # a silence is only looked into when it is as long
            stopped = last.state == "T" and look.beat_age_ms >= self.stopped_ms <= self.stopped_for_ms + unseen_ms
            stopped = stopped and look.at_s >= self.patient_until_s
            return Hung("stopped", self.stopped_ms) if stopped else None
        self._weigh(last, look)
        if self.blocked_ms > bound_ms:
            return Hung("blocked", bound_ms)
        if self.disk_ms > DISK_FACTOR * bound_ms:
            return Hung("disk", DISK_FACTOR * bound_ms)
        assert self._first is not None, "a stretch has a first look"
        if look.main_cpu_ms - self._first.main_cpu_ms > self.spin_ms:
            return Hung("spinning", self.spin_ms)
        return None

    def _weigh(self, last: Look, look: Look) -> None:
        passed_ms = (look.at_s - last.at_s) * 1000
        if look.runnable or look.busy_ms - last.busy_ms > passed_ms / 2:
            return
        if look.state == "D":
            self.disk_ms += self._counted_ms(last, look)
        else:
            self.blocked_ms += self._counted_ms(last, look)

    def _counted_ms(self, last: Look, look: Look) -> float:
        return seen((look.at_s - last.at_s) * 1000, self.interval_ms)

    def slow(self) -> str:
        """Why a stretch that is over the bound is no hang yet, told once a stretch; "" otherwise."""
        look = self._last
        if look is None or self.slow_told or look.beat_age_ms <= max(self.floor_ms, look.bound_ms):
            return ""
        self.slow_told = True
        if look.state == "D":
            return "disk"
        first = self._first
        ran = first is not None and look.main_cpu_ms - first.main_cpu_ms > look.beat_age_ms / 4
        return "computing" if ran else "starved"


def look_at(pid: int, beat_age_ms: float, bound_ms: float) -> Look:
    """Look at a process now. One that is gone looks like one that can run: its death is told by other means."""
    states, busy_ns, main_cpu_ns = {}, 0, 0
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                state, cpu_ns, wait_ns = _thread(Path(f"/proc/{pid}/task/{thread}"))
                states[int(thread)] = state
                busy_ns += cpu_ns + wait_ns
                if int(thread) == pid:
                    main_cpu_ns = cpu_ns
    runnable = not states or "R" in states.values()
    state = states.get(pid, "R")
    if state == "S" and "D" in states.values():  # it waits for that thread, maybe
        state = "D"
    return Look(time.monotonic(), beat_age_ms, bound_ms, state, runnable, busy_ns / 1e6, main_cpu_ns / 1e6)


def _thread(path: Path) -> tuple[str, int, int]:
    """State letter, ns on a processor, ns waiting for one; from `stat` alone where the kernel has no scheduler statistics."""
    fields = (path / "stat").read_text().rpartition(")")[2].split()
    try:
        cpu_ns, wait_ns, _ = (int(text) for text in (path / "schedstat").read_text().split())
    except (OSError, ValueError):
        ticks = int(fields[11]) + int(fields[12])
        return fields[0], ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK"), 0
    return fields[0], cpu_ns, wait_ns
