"""An installation without processes: a store, lanes and sessions made by hand, and the command line to look at them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from click.testing import CliRunner, Result

from gateway.sessions import SessionFile, SessionRecord
from ops import cli
from tests.tiers import forked
from tests.tiers.forked import Forked
from tests.tiers.sample import BLOCK, World, some_tokens
from tiers import keeper_client
from tiers.errors import KeeperAway
from tiers.paths import Paths

_CONFIGURED = structlog.get_config() if structlog.is_configured() else None


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Commands that run in this process set the log up, those of a module's fixtures too; other tests look at all events."""
    _log_as_before()
    yield
    _log_as_before()


def _log_as_before() -> None:
    structlog.reset_defaults()
    if _CONFIGURED is not None:
        structlog.configure(**_CONFIGURED)
    structlog.contextvars.clear_contextvars()


@dataclass
class Place:
    """One data directory with its lanes, and `concordia` run on it."""

    world: World
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> Paths:
        return self.world.paths

    def run(self, *arguments: str) -> Result:
        clean = {name: None for name in os.environ if name.startswith("CONCORDIA_")}
        where = ("--data-dir", str(self.paths.data_dir), "--lane-dir", str(self.paths.lane_dir))
        return CliRunner().invoke(cli.main, [*arguments, *where], env={**clean, **self.environment})

    def json(self, *arguments: str, code: int = 0) -> Any:
        """The command's JSON; it must end with `code`."""
        result = self.run(*arguments, "--json")
        assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr, result.exception)
        return json.loads(result.stdout)

    def refused(self, code: int, *arguments: str) -> str:
        """What a command that ends with `code` says on stderr, which is one line."""
        result = self.run(*arguments)
        assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr, result.exception)
        assert result.stderr.splitlines()[-1].startswith("concordia: "), result.stderr
        return result.stderr

    def session(self, name: str, tokens: np.ndarray, *, cuts: list[int] | None = None, drained: bool = True) -> None:
        """A session with one finished turn, its state in the store (or still in the lane)."""
        lane = self.world.lane()
        self.world.capture(lane, f"stream-{name}", tokens, cuts or [len(tokens)], session=name)
        lane.close()
        if drained:
            self.world.drain()
        self.record(name, tokens)

    def record(self, name: str, tokens: np.ndarray) -> None:
        file = SessionFile(self.paths.sessions, writable=True)
        file.put(SessionRecord(name, 1.0, 2.0, turns=1, token_count=len(tokens)), tokens.astype("<i4").tobytes())
        file.close()


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    """Makes installations by name."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    made: list[str] = []

    def make(name: str) -> Place:
        lane_dir = tempfile.mkdtemp(prefix="concordia-test-", dir=shared)
        made.append(lane_dir)
        return Place(World(Paths.at(tmp_path / name, lane_dir).make()))

    yield make
    for lane_dir in made:
        shutil.rmtree(lane_dir, ignore_errors=True)


@pytest.fixture
def place(places: Callable[[str], Place]) -> Place:
    return places("data")


@pytest.fixture
def keeper(place: Place) -> Iterator[Callable[[], None]]:
    """Starts a keeper on the place, and waits until it answers."""
    started: list[Forked] = []

    def start() -> None:
        where = ["--data-dir", str(place.paths.data_dir), "--lane-dir", str(place.paths.lane_dir)]
        fields = json.dumps({"block_tokens": BLOCK, "store_map_bytes": place.world.settings.store_map_bytes})
        started.append(forked.parent().keeper([*where, "--orphan-s", "0", "--settings-json", fields], os.environ))
        deadline = time.monotonic() + 60
        while True:
            try:
                keeper_client.stats(place.paths.keeper_socket)
                return
            except KeeperAway:
                assert time.monotonic() < deadline, "the keeper does not start"
                time.sleep(0.02)

    yield start
    for process in started:
        process.kill()
        process.wait()


TOKENS = some_tokens(5 * BLOCK + 3)
