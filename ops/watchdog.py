"""Does a child still turn? `serve` asks it of gateway and host agent, the host agent of keeper and nursery. On their parent's loop.

What is asked of an engine (`ops/hang.py`), with more patience: the bound is `host.silent_limit_s`, and all of it must have been seen by
a parent that was awake. So a loaded machine, a debugger, or everything stopped and resumed at once is no alarm. One that hasn't beaten
yet (it starts) is only watched for being stopped, and one that waits for a disk is left to it, as the next one would wait, too: a keeper
may sync or copy its store for long. A child that was stopped (SIGSTOP) gets SIGCONT, which costs nobody a connection; SIGKILL if that
doesn't help, or if it is stuck otherwise: then it is started again as after any death.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from ops.hang import Cause, HangJudge, look_at
from tiers import heartbeat

LOOK_S = 0.5
LEAST_LOOK_S = 0.05
LEFT_ALONE = ("t", "D")  # a debugger holds it, and wants to; it waits for a disk


@dataclass(frozen=True, slots=True)
class Finding:
    """A child that stands still. cure: the signal that it is to get."""

    cause: Cause
    limit_s: float
    cure: signal.Signals


class Watchdog:
    """Of one kept child, whoever it is at the time; `look` every `look_s`.

    beat     file of its heartbeat; None: it has none
    limit_s  how long it may stand still; 0: for ever
    spin_s   how long its main thread may compute without a heartbeat, in processor time
    """

    def __init__(self, beat: Path | None, limit_s: float, spin_s: float) -> None:
        self.look_s = max(LEAST_LOOK_S, min(LOOK_S, limit_s / 4))
        self._beat = beat
        self._limit_s = limit_s
        self._judge = HangJudge(1000 * limit_s, 1000 * limit_s, 1000 * spin_s, 1000 * self.look_s)
        self._continued = 0  # pid that was sent SIGCONT and has not been seen to go on

    def look(self, pid: int) -> Finding | None:
        """Look at the child now; what is to be done about it, if anything."""
        if not self._limit_s:
            return None
        beat = heartbeat.read(self._beat) if self._beat else None
        age_ms = beat.age_ms if beat is not None and beat.pid == pid else float("inf")
        look = look_at(pid, age_ms, 0.0) if age_ms >= 2000 * self.look_s else None
        if look is None or look.state in LEFT_ALONE or (look.state != "T" and age_ms == float("inf")):
            self._judge.beat()
            self._continued = 0
            return None
        hung = self._judge.judge(look)
        if hung is None:
            return None
        self._judge.beat()  # what is done about it is given as much time
        again = self._continued == pid
        cure = signal.SIGCONT if hung.cause == "stopped" and not again else signal.SIGKILL
        return Finding(hung.cause, hung.bound_ms / 1000, cure)

    def signalled(self, pid: int) -> None:
        """The child was sent what was found to help."""
        self._continued = pid
