"""Drive an `Engine` without its process: the real loop, model, arena, lane and store; messages go in and come out by call."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine import messages as m
from engine.loop import Engine
from engine.main import build
from engine.settings import EngineSettings
from engine.status_page import StatusPage
from tiers.paths import Paths
from tiers.settings import TierSettings

STOP_TOKEN = 2


@dataclass
class EngineDriver:
    """One engine over its own lane; several may share `paths`, as engines of one host do."""

    engine: Engine
    sent: list[Any] = field(default_factory=list)
    closed: bool = False

    @classmethod
    def start(
        cls, model_dir: Path, paths: Paths, name: str = "e0", lane_bytes: int = 8 << 20, **options: Any
    ) -> EngineDriver:
        paths.make()
        tiers = TierSettings(lane_bytes=lane_bytes, lane_record_count=4096, store_map_bytes=1 << 30)
        settings = {"model_dir": str(model_dir), "model_name": "tiny"}
        options.setdefault("restore", "always")  # tiny models compute as fast as a busy machine copies
        device = options.pop("device", "cpu")
        engine_options = EngineSettings(device=device, slots=4, prefault_tokens=0, **options)
        page = StatusPage.create(paths.status(name), 1)
        driver = cls(build(name, 1, settings, engine_options, tiers, paths, page))
        driver.engine.link.send = driver.sent.append  # type: ignore[method-assign, assignment]
        return driver

    def close(self) -> None:
        """As a process that was killed would: only the writer's lock is given back."""
        if self.closed:
            return
        self.closed = True
        capture = self.engine.capture
        if capture and capture.rows is not None:
            capture.let_go()  # the lane's memory may be registered with a device
        elif capture:
            capture.lane.close()
        self.engine.link.close()
        self.engine.grammars.close()
        self.engine.lookup.finder.close()

    def handle(self, *messages: m.ToEngine) -> None:
        for message in messages:
            self.engine.handle(message)

    def step(self) -> None:
        self.engine.admit()
        self.engine.step()
        self.engine.follow()

    def run(self, step_limit: int = 5000) -> None:
        """Until nothing is left to do."""
        for _ in range(step_limit):
            self.step()
            if not (self.engine.active or self.engine.waiting):
                return
        raise AssertionError(f"still busy after {step_limit} steps: {self.engine.active}")

    def run_until_done(self, timeout_s: float = 60.0) -> None:
        """As `run`, also where a grammar is compiled on its thread meanwhile."""
        deadline = time.monotonic() + timeout_s
        while self.engine.active or self.engine.waiting:
            assert time.monotonic() < deadline, f"still busy: {self.engine.active}, {self.engine.waiting}"
            self.step()

    def run_until_token(self, stream: str, count: int) -> None:
        """Until `count` tokens of a stream were sent."""
        for _ in range(5000):
            if len(self.tokens(stream)) >= count:
                return
            self.step()
        raise AssertionError(f"{stream} has only {len(self.tokens(stream))} tokens")

    def outputs(self, stream: str) -> list[m.Output]:
        return [o for s in self.sent if isinstance(s, m.Step) for o in s.outputs if o.stream == stream]

    def tokens(self, stream: str) -> list[int]:
        return [output.token for output in self.outputs(stream)]

    def started(self, stream: str) -> m.Started:
        return next(s for s in reversed(self.sent) if isinstance(s, m.Started) and s.stream == stream)


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 512, count).tolist()


def submit(stream: str, tokens: list[int], answer: int = 16, epoch: int = 1, **fields: Any) -> m.Submit:
    """A submission of `tokens`; `prompt_count` given, the rest of them was delivered already."""
    prompt_count = fields.pop("prompt_count", len(tokens))
    sampling = fields.pop("sampling", m.Sampling(temperature=0))
    stop_tokens = fields.pop("stop_tokens", [])
    return m.Submit(
        stream, epoch, m.pack_tokens(tokens), prompt_count, sampling, stop_tokens, prompt_count + answer, **fields
    )
