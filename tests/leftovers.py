"""Lane directories in shared memory that a run of tests leaves: a worker that was killed can't remove its own."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from bench.scratch import data_directory, is_served
from tiers.paths import SHARED_MEMORY

OF_A_KILLED_RUN_S = 3600.0


def clear(base: Path) -> list[Path]:
    """Remove those in which nothing lives of this run (below `base`), of an earlier one that was killed, or of nobody; returns them."""
    found = [directory for directory in SHARED_MEMORY.glob("concordia-*") if _is_left(directory, base)]
    for directory in found:
        shutil.rmtree(directory, ignore_errors=True)
    return found


def _is_left(directory: Path, base: Path) -> bool:
    data_dir = data_directory(directory)
    if data_dir is None:
        return False  # somebody makes it just now, or it is no lane directory
    of_a_killed_run = data_dir.is_relative_to(base.parent) and _age_s(directory) > OF_A_KILLED_RUN_S
    return not is_served(directory) and (data_dir.is_relative_to(base) or not data_dir.exists() or of_a_killed_run)


def _age_s(directory: Path) -> float:
    try:
        return time.time() - directory.stat().st_mtime
    except OSError:
        return 0.0
