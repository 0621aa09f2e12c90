"""Directories for one run of a bench or of the demo, gone with it; what a killed run left goes when the next one begins.

Each names its owner by pid and start time (`engine/pid_file.py`). With a directory go the lane directories in shared memory of
installations whose data directory lies in it, as they say themselves, unless a process of theirs still lives.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine import pid_file
from tiers.paths import SHARED_MEMORY

CHECKOUT = Path(__file__).resolve().parent.parent
OWNER = "scratch.owner"


@contextmanager
def directory(name: str, where: Path | None = None) -> Iterator[Path]:
    """A new directory `concordia-NAME-…` below `where` (default: where temporary files lie); in the checkout one that git ignores."""
    clear()
    prefix = f".bench-{name}-" if where == CHECKOUT else f"concordia-{name}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=where, ignore_cleanup_errors=True) as made:
        pid_file.write(Path(made) / OWNER, pid=os.getpid())
        yield Path(made)


def clear() -> list[Path]:
    """Remove what runs left whose process is dead; returns it. What can't be told is left alone."""
    found: dict[Path, None] = {}
    for place in {Path(tempfile.gettempdir()), SHARED_MEMORY, CHECKOUT}:
        for owner in [*place.glob(f"concordia-*/{OWNER}"), *place.glob(f".bench-*/{OWNER}")]:
            lane_dirs = _lane_directories(owner.parent)
            if _is_dead(owner) and not any(map(is_served, lane_dirs)):
                found |= dict.fromkeys([*lane_dirs, owner.parent])
    for left in found:
        shutil.rmtree(left, ignore_errors=True)
    return list(found)


def data_directory(lane_dir: Path) -> Path | None:
    """Whose lane directory it is; None where it doesn't say, or is none."""
    try:
        return Path(os.fsdecode((lane_dir / "owner").read_bytes()))
    except OSError:
        return None


def is_served(lane_dir: Path) -> bool:
    """Whether a process of that installation lives."""
    return any(known is not None and known.alive for known in map(pid_file.read, lane_dir.glob("*.pid")))


def _lane_directories(scratch: Path) -> list[Path]:
    """Those in shared memory whose data directory lies in `scratch`."""
    owners = {lane_dir: data_directory(lane_dir) for lane_dir in SHARED_MEMORY.glob("concordia-*")}
    return [lane_dir for lane_dir, data in owners.items() if data and data.is_relative_to(scratch.resolve())]


def _is_dead(owner: Path) -> bool:
    known = pid_file.read(owner)
    return known is not None and not known.alive and owner.stat().st_uid == os.getuid()
