"""Pulling a repository of the hub with the real client library, from a hub on this machine."""

from __future__ import annotations

import os
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
def hub() -> Iterator[Hub]:
    running = Hub(REPO, build_tiny_model())
    yield running
    running.close()


def pull(hub: Hub, cache: Path, name: str = REPO, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(cache / "hub"), **environment}
    settings |= {"CONCORDIA_MODEL_CACHE": str(cache)}
    command = [sys.executable, "-m", "ops.cli", "pull", name]
    return subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_repository_is_pulled_whole_and_once(hub: Hub, tmp_path: Path) -> None:
    done = pull(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    target = tmp_path / REPO.replace("/", "--")
    for file in hub.directory.iterdir():
        assert (target / file.name).read_bytes() == file.read_bytes()
    again = pull(hub, tmp_path)
    assert again.returncode == 0, again.stderr


def test_a_download_that_was_cut_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.cut_at = 100_000
    done = pull(hub, tmp_path)
    if done.returncode != 0:  # the library may give up; what it has is kept for the next pull
        assert "pull again" in done.stderr
        done = pull(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    weights = "model.safetensors"
    assert any(line.startswith(weights) for line in hub.ranges), "it began anew instead of going on"
    assert (tmp_path / REPO.replace("/", "--") / weights).read_bytes() == (hub.directory / weights).read_bytes()


def test_what_cannot_be_had_is_said(hub: Hub, tmp_path: Path) -> None:
    missing = pull(hub, tmp_path, "someone/nothing")
    assert missing.returncode != 0 and "is not on the hub" in missing.stderr
    hub.gated = True
    gated = pull(hub, tmp_path)
    assert gated.returncode != 0 and "is gated" in gated.stderr
    hub.close()
    away = pull(hub, tmp_path)
    assert away.returncode != 0 and "can't be reached" in away.stderr
    assert not (tmp_path / REPO.replace("/", "--")).exists()
