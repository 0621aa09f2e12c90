"""Pulling a repository of the hub with the real client library, from a hub on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ops.hub import Hub
from tests.system.harness import build_tiny_model

pytestmark = pytest.mark.process
REPO = "someone/tiny-llama"


@pytest.fixture
def hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hub]:
    directory = shutil.copytree(build_tiny_model(request.config.cache.mkdir("concordia-tiny")), tmp_path / "repository")
    running = Hub(REPO, directory)
    yield running
    running.close()


def pulled(cache: Path) -> Path:
    return cache / "concordia" / "models" / REPO.replace("/", "--")


def pull(hub: Hub, cache: Path, name: str = REPO, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(cache / "hub"), **environment}
    settings |= {"XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "ops.cli", "pull", name]
    return subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_repository_is_pulled_whole_and_once(hub: Hub, tmp_path: Path) -> None:
    done = pull(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    target = pulled(tmp_path)
    for file in hub.directory.iterdir():
        assert (target / file.name).read_bytes() == file.read_bytes()
    again = pull(hub, tmp_path)
    assert again.returncode == 0, again.stderr


def test_a_download_that_was_cut_goes_on(hub: Hub, tmp_path: Path) -> None:
    large = hub.directory / "merges.txt"  # the library keeps what it has in pieces of 10 MB
    large.write_bytes(os.urandom(25 << 20))
    hub.cuts = {large.name: 15 << 20}
    done = pull(hub, tmp_path)
    if done.returncode != 0:  # the library may give up; what it has is kept for the next pull
        assert "pull again" in done.stderr
        done = pull(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert any(line.startswith(large.name) for line in hub.ranges), "it began anew instead of going on"
    assert (pulled(tmp_path) / large.name).read_bytes() == large.read_bytes()


def test_what_cannot_be_had_is_said(hub: Hub, tmp_path: Path) -> None:
    missing = pull(hub, tmp_path, "someone/nothing")
    assert missing.returncode != 0 and "is not on the hub" in missing.stderr
    hub.gated = True
    gated = pull(hub, tmp_path)
    assert gated.returncode != 0 and "is gated" in gated.stderr
    hub.close()
    away = pull(hub, tmp_path)
    assert away.returncode != 0 and "can't be reached" in away.stderr
    assert not (pulled(tmp_path)).exists()
