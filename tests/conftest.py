"""The order of the whole suite, and what a run must not leave in shared memory."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import leftovers, order

# Unit tests sync thousands of small files, and would wait for the disk each time: theirs lie in this directory, if `make test` gives it.
IN_MEMORY = os.environ.get("TESTS_IN_MEMORY", "")
ON_DISK = ("tests/system/", "tests/faults/")

# Servers of a test are asked without a proxy of this machine, and what is a log is plain, whatever is set for pytest.
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = f"{os.environ.get(name, '')},127.0.0.1".lstrip(",")
os.environ.pop("FORCE_COLOR", None)

# A busy machine may hold up any example for longer than the fifth of a second that is usual.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

gc.disable()  # nothing that is imported is garbage: looking for some among it takes a third of a worker's start


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long work first: with short tests at the end no worker is left alone with a long one."""
    items.sort(key=order.rank)
    if getattr(config.option, "loadgroup", False):
        for item in items:
            order.name_group(item)


def pytest_collection_finish() -> None:
    """What was imported is never looked at again."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of the test's own."""
    if not IN_MEMORY or request.node.nodeid.startswith(ON_DISK):
        yield tmp_path
        return
    made = tempfile.mkdtemp(dir=IN_MEMORY)
    yield Path(made)
    shutil.rmtree(made, ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Lane directories of systems that this run started and whose processes are gone."""
    base = Path(config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
    for directory in leftovers.clear(base):
        terminalreporter.write_line(f"left in shared memory by a test, and removed: {directory}", yellow=True)
