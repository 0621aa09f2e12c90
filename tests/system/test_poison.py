"""A request that kills every engine that computes it is ended; its neighbours' answers are what they always were."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

from bench.driver import System, at_once
from bench.sse import Answer
from tests.system import harness as h

LONG_PROMPT_TOKENS = 1900  # its prefill takes long enough to be hit in


def kill_whoever_computes(system: System, session: str, over: threading.Event) -> None:
    """An engine crashes a moment after it was given the session's stream, again and again."""
    killed: set[int] = set()
    while not over.is_set():
        for engine in system.engines():
            if engine.pid not in killed and any(stream["session"] == session for stream in engine.streams):
                time.sleep(0.02)  # a moment: it has begun
                killed.add(engine.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(engine.pid, signal.SIGSEGV)  # SIGKILL would be somebody's doing
        time.sleep(0.005)


def test_tiny_poison_request_is_ended_and_its_neighbours_go_on(tiny: System) -> None:
    texts = h.prompts(seed=71, count=2)
    bodies = [h.chat(tiny, text, tokens=120) for text in texts]
    want = [tiny.stream(h.CHAT, body) for body in bodies]
    h.settled(tiny)
    seeds = iter(range(72, 100))

    def run() -> list[Answer]:
        poison = h.completion(tiny, h.random_tokens(next(seeds), LONG_PROMPT_TOKENS, low=3, high=512), tokens=100)
        over = threading.Event()
        killer = threading.Thread(target=kill_whoever_computes, args=(tiny, "poison", over))
        killer.start()

        def send_poison() -> Answer:
            try:
                return tiny.stream(h.COMPLETIONS, poison, headers={"X-Session-Id": "poison"})
            finally:
                over.set()

        calls: list[Any] = [lambda body=body: tiny.stream(h.CHAT, body) for body in bodies]
        try:
            return at_once([*calls, send_poison], 110.0)
        finally:
            over.set()
            killer.join()

    *neighbours, ended = h.until(lambda answers: answers[-1].error, tiny, run)
    assert ended.error["code"] == "poison_request", ended.describe()
    for got, whole in zip(neighbours, want, strict=True):
        h.assert_same(got, whole, "beside a poison request")
    h.settled(tiny)
    h.assert_same(tiny.stream(h.CHAT, bodies[0]), want[0], "afterwards")
