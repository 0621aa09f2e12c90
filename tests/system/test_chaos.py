"""Everything that can be done to a running installation, in random order, while eight clients read: each answer is what it always is.

Part of `make soak`; CHAOS_MINUTES says how long (10), CHAOS_SEED which order (printed).
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.driver import DriverError, System
from bench.sse import Answer
from tests.system import conftest
from tests.system import harness as h

MINUTES = float(os.environ.get("CHAOS_MINUTES", "10"))
SEED = int(os.environ.get("CHAOS_SEED", int(time.time())))
CLIENTS = 8
ENGINES = ("e0", "e1", "e2")
NUISANCE = (OSError, http.client.HTTPException, DriverError, KeyError, IndexError, TypeError)
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 60}}, "required": ["name"]}


@pytest.fixture(params=["warm", "hot"])
def system(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Iterator[System]:
    # Engines die of signals here, again and again: that is no request's fault.
    sections = {"gateway": {"failover": request.param, "poison_deaths": 100_000, "drain_s": 0.5, "engine_wait_s": 600}}
    yield from conftest.running(tiny_model, tmp_path, len(ENGINES), sections=sections)


def bodies(system: System) -> list[dict[str, Any]]:
    rule = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    texts = h.prompts(seed=91, count=10)
    plain = [h.chat(system, text, h.MODES[mode], tokens=120) for text in texts[:4] for mode in h.MODES]
    ruled = [h.chat(system, text, h.SAMPLED, tokens=100, response_format=rule) for text in texts[4:6]]
    long = [h.completion(system, h.random_tokens(92 + at, 900, low=3, high=512), tokens=60) for at in range(2)]
    return [{**body, "store": True} for body in (*plain, *ruled, *long)]


class Chaos:
    """Acts on the system; what is refused is refused."""

    def __init__(self, system: System, draw: random.Random) -> None:
        self._system = system
        self._draw = draw
        self.done: Counter[str] = Counter()

    def act(self) -> None:
        acts = [
            self.kill,
            self.kill,
            self.stop,
            self.end,
            self.move,
            self.move,
            self.move,
            self.move_idle,
            self.drain,
            self.restart,
            self.park,
        ]
        act = self._draw.choice(acts)
        with contextlib.suppress(*NUISANCE):
            self._system.wait("an engine", self._system.ready_engines, 120.0)  # or a slow machine never gets to one
            act()
            self.done[act.__name__] += 1

    def kill(self) -> None:
        names = self._draw.choice(
            [
                ["gateway"],
                ["host"],
                ["keeper"],
                ["nursery"],
                ["e0"],
                ["e1", "gateway"],
                ["e2", "host"],
                ["e0", "e1", "e2"],
            ]
        )
        for name in names:
            self._system.signal(name)

    def stop(self) -> None:
        name = self._draw.choice([*ENGINES, "keeper"])
        pid = self._system.signal(name, signal.SIGSTOP)
        time.sleep(self._draw.uniform(0.05, 1.0))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def end(self) -> None:
        self._system.signal(self._draw.choice(ENGINES), signal.SIGTERM)

    def move(self) -> None:
        streams = [stream["stream"] for engine in self._system.engines() for stream in engine.streams]
        path = f"/admin/streams/{self._draw.choice(streams)}/migrate"
        self._system.call("POST", path, {"engine": self._draw.choice(ENGINES), "timeout_s": 5.0}, timeout_s=10.0)

    def move_idle(self) -> None:
        path = f"/admin/sessions/{self._session()}/migrate"
        self._system.call("POST", path, {"engine": self._draw.choice(ENGINES), "timeout_s": 5.0}, timeout_s=10.0)

    def park(self) -> None:
        self._system.call("POST", f"/v1/sessions/{self._session()}/park", {}, timeout_s=10.0)

    def _session(self) -> str:
        return str(self._draw.choice(self._system.get("/v1/sessions")["data"])["id"])

    def drain(self) -> None:
        path = f"/admin/engines/{self._draw.choice(ENGINES)}/drain"
        self._system.call("POST", path, {"timeout_s": self._draw.uniform(0.1, 3.0)}, timeout_s=10.0)
        self._system.call("DELETE", path, timeout_s=10.0)

    def restart(self) -> None:
        path = f"/admin/engines/{self._draw.choice(ENGINES)}/restart"
        self._system.call("POST", path, {"timeout_s": 3.0}, timeout_s=10.0)


def read(system: System, body: dict[str, Any], headers: dict[str, str], draw: random.Random) -> Answer | None:
    """To its end, hanging up and coming back at will. None if it could not be sent: then nothing was promised."""
    answer = Answer()
    try:
        system.stream(
            h.CHAT if "messages" in body else h.COMPLETIONS, body, headers=headers, answer=answer, timeout_s=60.0
        )
    except NUISANCE:
        pass
    if not answer.stream_id:
        return None
    deadline = time.monotonic() + 300.0
    while not answer.done:
        assert time.monotonic() < deadline, f"never ends: {answer.describe()}"
        hang_up = draw.random() < 0.3
        with contextlib.suppress(*NUISANCE):
            system.resume(answer, timeout_s=1.0 if hang_up else 30.0)
        time.sleep(0.1)
    return answer


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 600)
def test_tiny_answers_stay_the_same_whatever_is_done(system: System) -> None:
    print("seed", SEED)
    wanted = bodies(system)
    wants = [system.stream(h.CHAT if "messages" in body else h.COMPLETIONS, body) for body in wanted]
    until, failures, count = time.monotonic() + 60 * MINUTES, list[str](), Counter[str]()

    def client(number: int) -> None:
        draw, turn = random.Random(SEED + number), 0
        while time.monotonic() < until and not failures:
            turn += 1
            index = draw.randrange(len(wanted))
            headers = {"X-Session-Id": f"c{number}-{turn}"} if draw.random() < 0.4 else {}
            try:
                got = read(system, wanted[index], headers, draw)
                if got is None:
                    count["not sent"] += 1
                    time.sleep(0.2)
                    continue
                h.assert_same(got, wants[index], f"client {number}, turn {turn}, body {index}")
                count["whole"] += 1
                count["recovered"] += bool(h.recoveries(got))
                count["moved"] += bool(got.concordia["migrations"])
            except AssertionError as error:
                failures.append(str(error))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in clients:
        thread.start()
    chaos, draw = Chaos(system, random.Random(SEED)), random.Random(SEED - 1)
    while time.monotonic() < until and not failures:
        chaos.act()
        time.sleep(draw.uniform(0.1, 1.5))
    for thread in clients:
        thread.join()
    print(dict(count), dict(chaos.done))
    assert not failures, f"seed {SEED}: {failures[0]}\n{system.log_tail()}"
    h.settled(system)
