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

from tests.tiers.sample import World
from tiers import keeper_client
from tiers.errors import KeeperAway, TierError

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 60.0
Value = TypeVar("Value")


@dataclass
class Processes:
    """What a test started."""

    all: list[subprocess.Popen[str]] = field(default_factory=list)

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
    ) -> subprocess.Popen[str]:
        """A keeper on `world`, without a host agent."""
        paths = world.paths
        return self.start(
            "-m", "tiers.keeper", "--data-dir", str(paths.data_dir), "--lane-dir", str(paths.lane_dir), "--orphan-s", "0",
            "--settings-json", json.dumps(asdict(world.settings)), env=env, log=log,
            CONCORDIA_FAILPOINT=failpoint,
        )  # fmt: skip

    def end(self) -> None:
        for process in self.all:
            if process.poll() is None:
                process.kill()
            process.wait(PATIENCE_S)
            if process.stdout is not None:
                process.stdout.close()
        self.all.clear()


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
