"""Servers that system tests share. One that a test leaves damaged is killed and started again for the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.driver import DriverError, System
from tests.system import harness

# Systems that are too dear to be started once a worker, and the group of the tests that ask for them. The one with the tiny model isn't.
GROUPS = {
    "demo_system": "demo",
    "reference_system": "demo",
    "exact_system": "exact",
    "guarded_system": "guarded",
    "other_system": "commands",
    "warm_system": "warm",
    "hot_system": "hot",
}

LEAST_TIMEOUT_S = 300
OFTEN_KILLED = {"restart_backoff_ms": 20, "restart_limit_ms": 50}  # tests kill far more often than life does
shared: dict[str, list[System]] = {}  # by group: systems of this process that are ended after the group's last test


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks of every test here. `make test` runs several workers, and keeps the tests of one group at one of them."""
    item.add_marker(pytest.mark.system)
    # By signal, so that fixtures are torn down and no process is left. Generous: it only has to end what would never end.
    limit_s = max([LEAST_TIMEOUT_S, *(mark.args[0] for mark in item.iter_markers("timeout"))])
    item.add_marker(pytest.mark.timeout(limit_s, method="signal"), append=False)
    group = group_of(item)
    if group:
        item.add_marker(pytest.mark.xdist_group(group))


def group_of(item: pytest.Item) -> str:
    """Group of a test by the system it asks for, be it by name or as a case of its parameters."""
    assert isinstance(item, pytest.Function)
    cases = item.callspec.params if hasattr(item, "callspec") else {}
    named = [GROUPS[fixture] for fixture in item.fixturenames if fixture in GROUPS]
    chosen = [str(cases[name]) for name in ("served", "any_policy") if name in cases]
    found = {name for name in (*named, *chosen) if name != "tiny"}
    assert len(found) <= 1, f"{item.nodeid} asks for systems of several groups: {found}"
    return next(iter(found), "")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A system that nobody asks for any more would only take memory and time from the others."""
    group = group_of(item)
    if group and (not isinstance(nextitem, pytest.Function) or group_of(nextitem) != group):
        for system in shared.pop(group, []):
            end(system)


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
    model: str | Path,
    directory: Path,
    engines: int,
    sections: dict[str, Any] | None = None,
    *,
    api_key: str = "",
    environment: dict[str, str] | None = None,
    **engine: Any,
) -> Iterator[System]:
    """A system for as long as the fixture lives; its end is graceful and must leave nothing."""
    settings = {
        "engine": {**harness.ONE_THREAD, **engine},
        "tiers": harness.SMALL_LANES,
        "host": OFTEN_KILLED,
        **(sections or {}),
    }
    system = System(
        model, directory / "data", engines=engines, settings=settings, api_key=api_key, environment=environment
    )
    try:
        yield system.start()
        end(system)
    finally:
        system.close()


def end(system: System) -> None:
    """End it gracefully, unless it has been."""
    if system.serve is None or system.serve.poll() != 0:
        settled_or_new(system)
        assert system.stop() == 0, system.log_tail()


def running_for_its_group(name: str, *arguments: Any, **options: Any) -> Iterator[System]:
    """`running`, but ended with the last test of the group of the fixture `name`."""
    for system in running(*arguments, **options):
        shared.setdefault(GROUPS[name], []).append(system)
        yield system


def settled_or_new(system: System) -> System:
    """The system idle with all engines; killed and started again if the last test left it otherwise."""
    try:
        return harness.settled(system, timeout_s=60.0)
    except DriverError as error:
        print(f"a damaged system is replaced: {error}")
        system.kill_all()
        return harness.settled(system.start())


@pytest.fixture(scope="session")
def tiny_system(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    host = {**OFTEN_KILLED, "silent_limit_s": 2}
    yield from running(tiny_model, tmp_path_factory.mktemp("tiny"), 2, {"host": host})


@pytest.fixture(scope="session")
def demo_system(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("demo")
    yield from running_for_its_group("demo_system", demo_model, directory, 2, {"tiers": harness.LANES})


@pytest.fixture(scope="session")
def reference_system(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("reference")
    yield from running_for_its_group("reference_system", demo_model, directory, 1, {"tiers": harness.LANES})


@pytest.fixture(scope="session")
def guarded_system(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Open to other addresses, so with keys; a short queue; nothing on the disk or in a lane is readable."""
    sections: dict[str, Any] = {"gateway": {"host": "0.0.0.0", "max_waiting": 1}}
    sections["tiers"] = {**harness.SMALL_LANES, "lane_encryption": "always", "durability": "turn"}
    sections |= {f"tenants.{name}": {"api_key": f"{harness.SECRET} {name}"} for name in ("acme", "zeta")}
    environment = {"CONCORDIA_STORE_KEYS": f"* = {'7e' * 32}"}
    key, directory = f"{harness.SECRET} the test", tmp_path_factory.mktemp("guarded")
    options: dict[str, Any] = {"api_key": key, "environment": environment, "slots": 4}
    for system in running_for_its_group("guarded_system", tiny_model, directory, 1, sections, **options):
        yield system
        log = system.log_path
    assert harness.SECRET not in log.read_text(), "a key is in the log"


@pytest.fixture
def tiny(tiny_system: System) -> System:
    """Two engines with the tiny model, idle."""
    return settled_or_new(tiny_system)


@pytest.fixture
def guarded(guarded_system: System) -> System:
    """One engine with the tiny model behind keys, idle."""
    return settled_or_new(guarded_system)


@pytest.fixture
def demo(demo_system: System) -> System:
    """Two engines with the demo model, idle."""
    return settled_or_new(demo_system)


@pytest.fixture
def reference(reference_system: System) -> System:
    """One engine with the demo model that nobody kills: what an uninterrupted run says."""
    return settled_or_new(reference_system)
