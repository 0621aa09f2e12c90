"""The tiny model, and engines that end with the test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import EngineDriver
from tiers.drain import Drain
from tiers.paths import Paths
from tiers.prefix import PrefixFinder
from tiers.settings import TierSettings


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny seeded model."""
    directory = tmp_path_factory.mktemp("tiny-model")
    subprocess.run([sys.executable, "-m", "tests.system.tiny_model", str(directory)], check=True)
    return directory


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.at(tmp_path / "data", tmp_path / "lanes")


@pytest.fixture
def drain(paths: Paths) -> Iterator[Drain]:
    """The keeper's drain, in this process: LMDB can be open only once in one, so engines here read through it."""
    paths.make()
    drain = Drain(paths, TierSettings(store_map_bytes=1 << 30))
    drain.open()
    yield drain
    drain.close()


@pytest.fixture
def keeper(drain: Drain) -> Callable[[], object]:
    """Drains on demand: `keeper()`."""
    return lambda: drain.flush(sync=False)


@pytest.fixture
def start_engine(tiny_dir: Path, paths: Paths, drain: Drain) -> Iterator[Callable[..., EngineDriver]]:
    """Start engines that share one data directory."""
    engines: list[EngineDriver] = []

    def start(name: str = "e0", **options: Any) -> EngineDriver:
        engines.append(EngineDriver.start(tiny_dir, paths, name, **options))
        engines[-1].engine.finder = PrefixFinder(drain.store(), paths.lane_dir)
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
