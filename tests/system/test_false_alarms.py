"""Real engines under load beside a noisy neighbour, for an hour: none is taken for dead or hung. Part of `make soak`.

FALSE_ALARM_MINUTES says how long (60), FALSE_ALARM_NEIGHBOURS how many busy loops run beside them (three a core; 0 where others are
busy anyway).
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bench.driver import System
from tests.system import harness as h

MINUTES = float(os.environ.get("FALSE_ALARM_MINUTES", "60"))
NEIGHBOURS = int(os.environ.get("FALSE_ALARM_NEIGHBOURS", 3 * (os.cpu_count() or 1)))
CLIENTS = 6
PAUSE_S = 0.2  # of each client between two answers


def counted(system: System, name: str) -> dict[str, float]:
    """By labels, what a counter of the gateway says."""
    text = str(system.call("GET", "/metrics")[2])
    return {labels: float(value) for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)}


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 600)
def test_tiny_no_false_alarm_beside_a_noisy_neighbour(tiny_model: Path, tmp_path: Path) -> None:
    system = System(tiny_model, tmp_path / "data", settings={"engine": h.ONE_THREAD, "tiers": h.SMALL_LANES}).start()
    before = {view.id: view.pid for view in system.ready_engines()}
    until = time.monotonic() + 60 * MINUTES
    tokens, failures = [0] * CLIENTS, list[str]()

    def client(number: int) -> None:
        """Short and long prompts, so that there are steps of every length."""
        draw = random.Random(number)
        while time.monotonic() < until:
            prompt = h.random_tokens(draw.randrange(1 << 30), draw.choice([20, 200, 1800]), low=3, high=512)
            answer = system.stream(h.COMPLETIONS, h.completion(system, prompt, tokens=draw.randint(20, 200)))
            tokens[number] += len(answer.tokens)
            if not answer.done or h.recoveries(answer):
                failures.append(answer.describe())
            time.sleep(PAUSE_S)

    noise = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NEIGHBOURS)]
    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    try:
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        slow, losses = counted(system, "concordia_engine_slow_total"), counted(system, "concordia_engine_losses_total")
        print(f"{MINUTES:g} minutes, {NEIGHBOURS} neighbours, {sum(tokens)} tokens; silences: {slow}; losses: {losses}")
        assert {view.id: view.pid for view in system.ready_engines()} == before
        assert not losses
        assert not failures, failures[:3]
    finally:
        for process in noise:
            process.kill()
            process.wait()
        system.close()
