from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.sample import World
from tiers.paths import Paths


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A fresh installation; lanes in shared memory, under a short name because sockets live there."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    lane_dir = tempfile.mkdtemp(prefix="concordia-test-", dir=shared)
    yield World(Paths.at(tmp_path / "data", lane_dir).make())
    shutil.rmtree(lane_dir, ignore_errors=True)
