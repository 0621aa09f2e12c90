"""What runs, seen from the files in the lane directory: works with the gateway down. Reads only; runs in the command's process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from engine import pid_file
from engine.status_page import StatusPage
from tiers.paths import Paths


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process. state: running, dead, or for an engine what its page says."""

    name: str
    pid: int
    state: str
    incarnation: int
    beat_age_ms: float | None = None
    step_count: int | None = None


@dataclass(frozen=True, slots=True)
class LaneRow:
    """One lane file."""

    name: str
    file_bytes: int


def engine_state(paths: Paths, engine: str) -> str:
    """`not started`, `dead`, or the state its page says."""
    known = pid_file.read(paths.pid_file(engine))
    if known is None:
        return "not started"
    if not known.alive:
        return "dead"
    with contextlib.suppress(FileNotFoundError, ValueError):
        page = StatusPage.open(paths.status(engine))
        if page.pid == known.pid:
            return page.state
    return "starting"


def processes(paths: Paths) -> list[ProcessRow]:
    """Every process that left a pid file."""
    return [_row(paths, path) for path in sorted(paths.lane_dir.glob("*.pid"), key=_order)]


def lanes(paths: Paths) -> list[LaneRow]:
    """Every lane."""
    return [LaneRow(path.stem, path.stat().st_blocks * 512) for path in sorted(paths.lane_dir.glob("*.lane"))]


def _order(path: Path) -> tuple[int, str]:
    first = ["serve", "gateway", "host", "keeper", "nursery"]
    return (first.index(path.stem) if path.stem in first else len(first), path.stem)


def _row(paths: Paths, path: Path) -> ProcessRow:
    known = pid_file.read(path)
    if known is None:
        return ProcessRow(path.stem, 0, "unreadable pid file", 0)
    if not known.alive:
        return ProcessRow(path.stem, known.pid, "dead", known.incarnation)
    with contextlib.suppress(FileNotFoundError, ValueError):
        page = StatusPage.open(paths.status(path.stem))
        if page.pid == known.pid:
            return ProcessRow(
                path.stem, known.pid, page.state, known.incarnation, round(page.beat_age_ms(), 1), page.step_count
            )
    return ProcessRow(path.stem, known.pid, "running", known.incarnation)
