"""Did an engine die by itself, or of a signal that somebody sent? The verdict is pure; the rest reads what it rests on from /proc.

Used by the host agent (`ops/host.py`), on its loop. SIGKILL and the signals that ask a process to end are nothing that a process does to
itself; but the kernel sends SIGKILL too when memory runs out, and the host agent does when it fences. What remains came from outside.
Source: proc_pid_stat(5) (`flags`, `exit_code`: both are set before a dying process's robust mutexes are let go of and its memory is freed),
`oom_kill` in /proc/vmstat (counts those of memory cgroups, too, and is increased before the signal is sent).
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

OUTSIDE = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
OOM_READING_INTERVAL_S = 1.0
OOM_READINGS = 10  # so many seconds may pass between the kernel's choice of a victim and its death
_PF_EXITING = 0x4


def from_outside(reason: str, cause: str, exit_code: int | None, *, fenced: bool, out_of_memory: bool) -> bool:
    """Whether an engine did not die of what it computed.

    reason, cause  as in `EngineDown`
    exit_code      negative for a signal, None if nobody knows
    fenced         it was alive when the host agent killed it
    out_of_memory  the kernel killed some process for memory lately, or can't say
    """
    if reason == "exited" or (reason, cause) == ("hung", "stopped"):  # told to end; stopped by SIGSTOP
        return True
    if reason != "killed" or fenced or out_of_memory:
        return False
    return exit_code is not None and -exit_code in OUTSIDE


def look_at_end(pid: int) -> tuple[bool, int | None]:
    """Whether a process lives, and if it is on its way out or a zombie its exit code, negative for a signal; None: it can't be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False, None
    if not int(fields[6]) & _PF_EXITING:
        return True, None
    return False, os.waitstatus_to_exitcode(int(fields[-1])) or None  # 0 is also shown to those who may not see it


def oom_kills() -> int | None:
    """Processes that the kernel has killed for memory since it was booted; None where it doesn't say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


class OomKills:
    """Whether the kernel killed anybody for memory in the last seconds. `note` is to be called at least that often."""

    def __init__(self, read: Callable[[], int | None] = oom_kills, clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._at = clock()
        self._readings = deque([read()], maxlen=OOM_READINGS)

    def note(self) -> None:
        """Read the counter, if it is time to."""
        now = self._clock()
        if now - self._at >= OOM_READING_INTERVAL_S:
            self._at = now
            self._readings.append(self._read())

    @property
    def lately(self) -> bool:
        """Also where the counter can't be read: then nobody knows."""
        now, before = self._read(), self._readings[0]
        return now is None or before is None or now != before
