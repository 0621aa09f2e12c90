"""The tiny model, and engines that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine import main
from engine.arena import Arena
from engine.attention import ArenaCache
from engine.check import self_check
from engine.model import Model, load
from tests.engine.driver import EngineDriver
from tests.system.harness import build_tiny_model
from tiers.drain import Drain
from tiers.paths import Paths
from tiers.prefix import PrefixFinder
from tiers.settings import TierSettings

load_once = cache(load)


def check_once(model: Model, arena: Arena, cache: ArenaCache) -> None:
    """`self_check` of a module that no engine of this process has checked yet; a run has hundreds of them on a few modules."""
    if not getattr(model.module, "checked", False):
        self_check(model, arena, cache)
        model.module.checked = True


@pytest.fixture(scope="session")
def tiny_dir(request: pytest.FixtureRequest) -> Path:
    """Directory of the tiny seeded model."""
    assert request.config.cache is not None
    return build_tiny_model(request.config.cache.mkdir("concordia-tiny"))


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
def weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of one test process that are started with the same settings share the module: it is loaded and checked once."""
    monkeypatch.setattr(main, "load", load_once)
    monkeypatch.setattr(main, "self_check", check_once)


@pytest.fixture
def start_engine(tiny_dir: Path, paths: Paths, drain: Drain, weights: None) -> Iterator[Callable[..., EngineDriver]]:
    """Start engines that share one data directory."""
    engines: list[EngineDriver] = []

    def start(name: str = "e0", **options: Any) -> EngineDriver:
        engines.append(EngineDriver.start(options.pop("model_dir", tiny_dir), paths, name, **options))
        engines[-1].engine.lookup.finder = PrefixFinder(drain.store(), paths.lane_dir)
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
