"""What `concordia doctor` says of capture on a GPU, whatever machine the test runs on."""

from __future__ import annotations

import fcntl
import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ops import config as configuration
from ops import doctor
from ops.config import Config
from tests.faults.each_change import killed_before
from tiers.paths import Paths


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configuration.load({"data_dir": str(tmp_path)}, environment={})


def with_engine(config: Config, **options: Any) -> Config:
    return replace(config, engine=replace(config.engine, **options))


@pytest.mark.parametrize(
    ("devices", "cupy", "machine", "launch", "level", "word"),
    [
        (0, False, "x86_64", "auto", "ok", "no GPU"),
        (1, False, "x86_64", "auto", "advice", "not installed"),
        (1, True, "x86_64", "auto", "ok", "by handlers, launched by auto"),
        (1, True, "x86_64", "copy", "ok", "copies"),
        (1, True, "aarch64", "auto", "ok", "without the persistent executor on aarch64"),
        (1, True, "aarch64", "executor", "problem", "without the persistent executor"),
    ],
)
def test_capture_on_a_gpu(
    config: Config, monkeypatch: pytest.MonkeyPatch, devices: int, cupy: bool, machine: str, launch: str, level: str, word: str
) -> None:  # fmt: skip
    monkeypatch.setattr(doctor.cuda_lane, "device_count", lambda: devices)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if cupy else None)
    monkeypatch.setattr("platform.machine", lambda: machine)
    found = doctor.handlers(with_engine(config, capture_launch=launch))
    assert (found.level, word in found.found) == (level, True), found
    assert bool(found.advice) == (level != "ok")


@pytest.mark.parametrize(
    ("devices", "launch", "reason", "level", "word"),
    [
        (0, "auto", "not asked", "ok", "no handler"),
        (1, "copy", "not asked", "ok", "no handler"),
        (1, "auto", "", "ok", "in place"),
        (1, "auto", "CUDA_ERROR_NOT_SUPPORTED", "advice", "tier 0"),
    ],
)
def test_whether_a_gpu_writes_into_the_lanes(
    config: Config, monkeypatch: pytest.MonkeyPatch, devices: int, launch: str, reason: str, level: str, word: str
) -> None:
    monkeypatch.setattr(doctor.cuda_lane, "device_count", lambda: devices)
    monkeypatch.setattr(doctor.cuda_lane, "why_not", lambda directory, index: reason)
    found = doctor.lane_in_place(with_engine(config, capture_launch=launch))
    assert (found.level, word in found.found) == (level, True), found
    assert bool(found.advice) == (level == "advice") and (level == "ok" or reason in found.advice)


@pytest.mark.process
def test_a_killed_doctor_leaves_no_file(config: Config, tmp_path: Path) -> None:
    changes = 0
    while killed_before(changes, lambda: doctor._sync_times(tmp_path)):
        assert list(tmp_path.iterdir()) == []
        changes += 1
    assert changes and list(tmp_path.iterdir()) == []


def test_lane_directories_that_nobody_uses_are_named_with_how_to_remove_them(config: Config, tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    assert doctor.left_behind(config, shared).level == "ok"
    homes = {name: tmp_path / name for name in ("there", "gone", "old", "held")}
    for name, home in homes.items():
        Paths(home, shared / f"concordia-{name}").make().lane("e0").write_bytes(bytes(8192))
    for name in ("gone", "held"):
        shutil.rmtree(homes[name])
    (shared / "concordia-old" / "owner").unlink()
    with open(shared / "concordia-held" / "e0.lane", "rb") as lane:
        fcntl.flock(lane, fcntl.LOCK_EX)
        found = doctor.left_behind(config, shared)
    gone, unnamed = found.advice.splitlines()
    assert found.level == "advice" and found.found.startswith("2 lane directories")
    assert f"`rm -r {shared / 'concordia-gone'}`" in gone and f"`rm -r {shared / 'concordia-old'}`" in unnamed
