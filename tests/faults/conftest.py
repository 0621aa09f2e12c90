from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import drain, paths, start_engine, tiny_dir, weights  # noqa: F401
from tests.faults.layer import Layer
from tests.faults.processes import Processes
from tests.tiers.conftest import world  # noqa: F401
from tests.tiers.sample import World


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Processes that end with the test."""
    started = Processes()
    yield started
    started.close()


@pytest.fixture
def layer(world: World, tmp_path: Path) -> Layer:  # noqa: F811
    """The file layer over the store of `world`."""
    return Layer.over(world.paths.store, tmp_path)
