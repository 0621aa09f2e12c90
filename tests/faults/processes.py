"""Real processes of the tiers, started with a failpoint or under a file layer, and waited for by condition."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from tests.tiers import forked
from tests.tiers.forked import Forked, Parent
from tests.tiers.sample import World
from tiers import failpoints, keeper_client
from tiers.errors import KeeperAway, TierError

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 60.0
Value = TypeVar("Value")


@dataclass
class Processes:
    """What a test started."""

    all: list[subprocess.Popen[str] | Forked] = field(default_factory=list)
    parents: dict[str, Parent] = field(default_factory=dict)  # of keepers under a file layer, by its library

    def start(
        self, *command: str, env: Mapping[str, str] | None = None, log: IO[bytes] | None = None, **more: str
    ) -> subprocess.Popen[str]:
        environment = {**(os.environ if env is None else env), "PYTHONPATH": str(REPOSITORY), **more}
        process = subprocess.Popen(
            [sys.executable, *command], cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=log
        )
        self.all.append(process)
        return process

    def keeper(
        self, world: World, *, env: Mapping[str, str] | None = None, failpoint: str = "", log: IO[bytes] | None = None
    ) -> Forked:
        """A keeper on `world`, without a host agent."""
        environment = dict(os.environ if env is None else env)
        arguments = [
            "--data-dir", str(world.paths.data_dir), "--lane-dir", str(world.paths.lane_dir), "--orphan-s", "0",
            "--settings-json", json.dumps(asdict(world.settings)),
        ]  # fmt: skip
        keeper = self._parent(environment).keeper(arguments, {**environment, failpoints.VARIABLE: failpoint}, log)
        self.all.append(keeper)
        return keeper

    def _parent(self, environment: Mapping[str, str]) -> Parent:
        library = environment.get("LD_PRELOAD", "")
        if not library:
            return forked.parent()
        if library not in self.parents:
            self.parents[library] = Parent(environment)
        return self.parents[library]

    def end(self) -> None:
        """Kill what runs."""
        for process in self.all:
            if process.poll() is None:
                process.kill()
            process.wait(PATIENCE_S)
            if process.stdout is not None:
                process.stdout.close()
        self.all.clear()

    def close(self) -> None:
        """Kill what runs, and whoever forks keepers."""
        self.end()
        for parent in self.parents.values():
            parent.close()
        self.parents.clear()


def wait_for(what: str, question: Callable[[], Value]) -> Value:
    """The first answer that is true. Raises AssertionError after a minute."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            answer = question()
        except (KeeperAway, TierError):
            answer = None  # type: ignore[assignment]
        if answer:
            return answer
        time.sleep(0.01)
    raise AssertionError(f"waited {PATIENCE_S:.0f} s for {what}")


def stats(world: World) -> dict[str, Any]:
    return keeper_client.stats(world.paths.keeper_socket)


def died_of_kill(process: subprocess.Popen[str]) -> bool:
    return process.wait(PATIENCE_S) == -9
