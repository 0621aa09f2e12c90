"""Servers that system tests share. One that a test leaves damaged is killed and started again for the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.driver import DriverError, System
from tests.system import harness


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.system)
            # By signal, so that fixtures are torn down and no process is left.
            given = item.get_closest_marker("timeout")
            item.add_marker(pytest.mark.timeout(given.args[0] if given else 120, method="signal"), append=False)


@pytest.fixture(scope="session")
def tiny_model(request: pytest.FixtureRequest) -> Path:
    """Directory of the tiny seeded model."""
    assert request.config.cache is not None
    return harness.build_tiny_model(request.config.cache.mkdir("concordia-tiny"))


@pytest.fixture(scope="session")
def demo_model() -> str:
    """Name of the demo model, pulled if it is missing."""
    return harness.pull_demo_model()


def running(
    model: str | Path, directory: Path, engines: int, sections: dict[str, Any] | None = None, **engine: Any
) -> Iterator[System]:
    """A system for as long as the fixture lives; its end is graceful and must leave nothing."""
    settings = {
        "engine": {**harness.ONE_THREAD, **engine},
        "tiers": harness.SMALL_LANES,
        "host": {"restart_backoff_ms": 50, "restart_limit_ms": 200},  # tests kill far more often than life does
        **(sections or {}),
    }
    system = System(model, directory / "data", engines=engines, settings=settings)
    try:
        yield system.start()
        settled_or_new(system)
        assert system.stop() == 0, system.log_tail()
    finally:
        system.close()


def settled_or_new(system: System) -> System:
    """The system idle with all engines; killed and started again if the last test left it otherwise."""
    try:
        return harness.settled(system, timeout_s=30.0)
    except DriverError as error:
        print(f"a damaged system is replaced: {error}")
        system.kill_all()
        return harness.settled(system.start())


@pytest.fixture(scope="session")
def tiny_system(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    yield from running(tiny_model, tmp_path_factory.mktemp("tiny"), 2)


@pytest.fixture(scope="session")
def demo_system(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    yield from running(demo_model, tmp_path_factory.mktemp("demo"), 2)


@pytest.fixture(scope="session")
def reference_system(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    yield from running(demo_model, tmp_path_factory.mktemp("reference"), 1)


@pytest.fixture
def tiny(tiny_system: System) -> System:
    """Two engines with the tiny model, idle."""
    return settled_or_new(tiny_system)


@pytest.fixture
def demo(demo_system: System) -> System:
    """Two engines with the demo model, idle."""
    return settled_or_new(demo_system)


@pytest.fixture
def reference(reference_system: System) -> System:
    """One engine with the demo model that nobody kills: what an uninterrupted run says."""
    return settled_or_new(reference_system)
