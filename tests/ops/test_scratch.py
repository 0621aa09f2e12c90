"""Temporary directories of benches and of the demo: gone with their run, or when the next one begins if it was killed."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from bench import scratch
from engine import pid_file
from tiers.paths import SHARED_MEMORY, Paths


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_directory_goes_with_its_run_and_says_whose_it_is(tmp_path: Path) -> None:
    with scratch.directory("some") as made, scratch.directory("other", SHARED_MEMORY) as shared:
        known = pid_file.read(made / scratch.OWNER)
        assert made.parent == tmp_path and shared.parent == SHARED_MEMORY
        assert known is not None and known.pid == os.getpid() and known.alive
        scratch.clear()
        assert made.exists() and shared.exists()
    assert not made.exists() and not shared.exists()


def test_what_a_killed_run_left_goes_when_the_next_one_begins(tmp_path: Path) -> None:
    killed = subprocess.Popen(["sleep", "600"])
    left, shared = tmp_path / "concordia-some-left", SHARED_MEMORY / f"concordia-some-{os.getpid()}"
    for made in (left, shared):
        made.mkdir()
        pid_file.write(made / scratch.OWNER, pid=killed.pid)
    unknown = tmp_path / "concordia-of-nobody"
    unknown.mkdir()
    lanes = Paths.at(left / "data").make().lane_dir
    scratch.clear()
    assert left.exists() and shared.exists()
    killed.kill()
    killed.wait()
    pid_file.write(lanes / "host.pid", pid=os.getpid())  # its `serve` is still ending
    scratch.clear()
    assert left.exists() and lanes.exists() and not shared.exists()
    (lanes / "host.pid").unlink()
    with scratch.directory("next"):
        assert not any(path.exists() for path in (left, lanes, shared)) and unknown.exists()
