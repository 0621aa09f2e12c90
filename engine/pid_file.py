"""Who runs under a name: JSON {pid, start_ticks, incarnation, settings} in the lane directory. No torch here.

Written when a process is started (by the nursery's child itself, so that no crash leaves an engine without one), read by the
host agent that adopts it and by `concordia status`. The start time tells a recycled pid from the process that was meant.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.status_page import start_ticks


@dataclass(frozen=True, slots=True)
class PidFile:
    """settings: digest of what the process was started with; another digest can't be adopted."""

    pid: int
    start_ticks: int
    incarnation: int = 0
    settings: str = ""

    @property
    def alive(self) -> bool:
        """The process is there, is the one that was meant, and is not a zombie."""
        return self.start_ticks != 0 and start_ticks(self.pid) == self.start_ticks and _state(self.pid) not in "ZX"

    @property
    def stopped(self) -> bool:
        """Somebody sent it SIGSTOP."""
        return _state(self.pid) == "T"


def write(path: Path, *, pid: int, incarnation: int = 0, settings: str = "") -> PidFile:
    """Write the file of a living process, whole or not at all."""
    entry = PidFile(pid, start_ticks(pid), incarnation, settings)
    temporary = path.with_suffix(f".{os.getpid()}.new")
    temporary.write_text(json.dumps(asdict(entry)) + "\n")
    os.replace(temporary, path)
    return entry


def read(path: Path) -> PidFile | None:
    """What the file says; None if there is none or it can't be read (then nothing is known about the process)."""
    try:
        return PidFile(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def settings_digest(settings: dict[str, Any]) -> str:
    """Digest of all that makes one engine differ from another (the log's look does not)."""
    what = {key: value for key, value in settings.items() if key not in ("log", "host", "gateway")}
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=8).hexdigest()


def _state(pid: int) -> str:
    """Letter of its main thread; X if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
