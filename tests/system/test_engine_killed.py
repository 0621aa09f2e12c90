"""Cases 1 and 2: the serving engine is killed at every token, in prefill, twice, with others; nobody sees it."""

from __future__ import annotations

import os
import random
import signal
import threading
from functools import partial
from typing import Any

import pytest

from bench.driver import System, alive, at_once
from bench.sse import Answer
from tests.system import harness as h

SAMPLE_SEED = 424242
TINY_TOKENS = h.ANSWER_TOKENS  # more than a block


@pytest.mark.timeout(280)
@pytest.mark.parametrize("mode", h.MODES)
def test_tiny_killed_at_every_token_of_an_answer(tiny: System, mode: str) -> None:
    prompt = h.prompts(seed=7, count=1)[0]
    body = h.chat(tiny, prompt, h.MODES[mode], tokens=TINY_TOKENS)
    want = tiny.stream(h.CHAT, body)
    h.assert_whole(want)
    assert want.usage["completion_tokens"] == TINY_TOKENS, f"choose another prompt: {want.describe()}"
    h.killed_at_every_token(tiny, h.CHAT, body, want, mode)


def killed_at(demo: System, reference: System, seed: int, mode: str, position: int) -> None:
    want = reference.stream(h.COMPLETIONS, h.story(reference, seed, h.MODES[mode]))
    assert want.usage["completion_tokens"] == h.ANSWER_TOKENS, f"choose another seed: {want.text!r}"
    body, in_time = h.story(demo, seed, h.MODES[mode]), position < len(want.tokens) - 3

    def run() -> Answer:
        return demo.stream(h.COMPLETIONS, body, watch=h.kill_at(demo, position))

    got = h.until(lambda answer: h.recoveries(answer) or not in_time, demo, run)
    h.assert_same(got, want, f"{mode}, seed {seed}, killed after {position} tokens")
    if in_time:
        assert len(h.recoveries(got)) == 1, got.concordia
        assert got.comments, "a recovery is marked by an SSE comment"
        assert h.recoveries(got)[0]["gap_ms"] > 0
    assert got.concordia.keys() >= {"verdict", "restored_tokens", "recomputed_tokens", "recoveries"}


@pytest.mark.parametrize("index", range(6))
def test_demo_killed_at_a_sample_of_tokens(demo: System, reference: System, index: int) -> None:
    draw = random.Random(SAMPLE_SEED)
    positions = draw.sample(range(h.ANSWER_TOKENS), 6)
    mode = list(h.MODES)[index % 2]
    print(f"seed {SAMPLE_SEED}: positions {positions}; this one {positions[index]}, {mode}")
    killed_at(demo, reference, SAMPLE_SEED + index, mode, positions[index])


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", h.MODES)
@pytest.mark.parametrize("position", range(h.ANSWER_TOKENS))
def test_demo_killed_at_every_token(demo: System, reference: System, position: int, mode: str) -> None:
    killed_at(demo, reference, SAMPLE_SEED, mode, position)


# ---------------------------------------------------------------- case 2


def test_demo_killed_in_prefill(demo: System, reference: System) -> None:
    """The kill is sent when the engine is seen at work and no token has come."""
    body = h.chat(demo, h.words(seed=31, count=600) + " Summarise this.", tokens=8)
    want = reference.stream(h.CHAT, {**body, "model": reference.model_name()})
    box: list[Answer] = []
    reader = threading.Thread(target=lambda: box.append(demo.stream(h.CHAT, body)))
    reader.start()
    engine = demo.wait(
        "an engine in prefill", lambda: next((e for e in demo.engines() if e.stats.get("running")), None), 60.0
    )
    h.kill_serving(demo, "", pid=engine.pid)
    reader.join(120.0)
    got = box[0]
    assert len(h.recoveries(got)) == 1, f"it was to be killed before the first token: {got.describe()}"
    h.assert_same(got, want, "killed in prefill")


def test_demo_killed_twice_in_one_answer(demo: System, reference: System) -> None:
    want = reference.stream(h.COMPLETIONS, h.story(reference, 45, h.SAMPLED, tokens=40))

    def run() -> Answer:
        first, second = h.after(10, h.killer(demo)), h.after(30, h.killer(demo))
        watch = lambda answer: (first(answer), second(answer))[0]  # noqa: E731
        return demo.stream(h.COMPLETIONS, h.story(demo, 45, h.SAMPLED, tokens=40), watch=watch)

    got = h.until(lambda answer: len(h.recoveries(answer)) == 2, demo, run)
    h.assert_same(got, want, "killed after 10 and after 30 tokens")


def test_demo_both_engines_killed_at_once(demo: System, reference: System) -> None:
    """The stream waits until an engine is back."""
    want = reference.stream(h.COMPLETIONS, h.story(reference, 46, tokens=30))

    def kill_both(answer: Answer) -> None:
        for name in ("e0", "e1"):
            demo.signal(name)

    def run() -> Answer:
        return demo.stream(h.COMPLETIONS, h.story(demo, 46, tokens=30), watch=h.after(20, kill_both))

    h.assert_same(h.until(h.recoveries, demo, run), want, "both engines killed after 20 tokens")


def test_demo_engine_of_four_streams_killed(demo: System) -> None:
    """Delivered tokens never change, every stream ends as it should."""
    bodies = [h.chat(demo, text, tokens=24, store=True) for text in h.prompts(seed=34, count=4)]

    def run() -> list[Answer]:
        kill = h.once(h.killer(demo))
        return at_once([partial(demo.stream, h.CHAT, body, watch=h.after(6, kill)) for body in bodies])

    for answer in h.until(lambda answers: any(map(h.recoveries, answers)), demo, run):
        h.assert_whole(answer)
        assert answer.finish_reason in ("length", "stop")
        assert answer.usage["completion_tokens"] == 24 or answer.finish_reason == "stop"
        stored = demo.fetch(answer.stream_id)
        seen = [(event.id, event.data) for event in answer.events]
        assert [(event.id, event.data) for event in stored.events] == seen, "what was delivered changed"


def test_demo_stopped_engine_is_fenced_and_its_stream_goes_on(demo: System, reference: System) -> None:
    want = reference.stream(h.COMPLETIONS, h.story(reference, 48, tokens=24))
    stopped: list[int] = []

    def stop(answer: Answer) -> None:
        stopped.append(h.kill_serving(demo, answer.stream_id, signal.SIGSTOP))

    def run() -> Answer:
        return demo.stream(h.COMPLETIONS, h.story(demo, 48, tokens=24), watch=h.after(12, stop))

    got = h.until(h.recoveries, demo, run)
    h.assert_same(got, want, "stopped after 12 tokens")
    assert len(h.recoveries(got)) == 1, got.concordia
    assert not alive(stopped[-1]), "a hung engine is killed before its sessions go elsewhere"


def test_tiny_answer_that_is_not_streamed_survives_too(tiny: System) -> None:
    """A client that waits for the whole answer gets it, whoever computed it."""
    body = h.chat(tiny, h.prompts(seed=36, count=1)[0], tokens=400)
    _, _, want = tiny.call("POST", h.CHAT, body)

    def run() -> tuple[int, Any]:
        box: list[Any] = []
        reader = threading.Thread(target=lambda: box.append(tiny.call("POST", h.CHAT, body)))
        reader.start()
        while reader.is_alive():
            engine = next((engine for engine in tiny.engines() if engine.streams), None)
            if engine is not None:
                os.kill(engine.pid, signal.SIGKILL)
                break
            reader.join(0.005)
        reader.join(60.0)
        return box[0][0], box[0][2]

    status, got = h.until(lambda answer: answer[1]["concordia"]["recoveries"], tiny, run)
    assert status == 200, got
    assert got["choices"] == want["choices"]
    assert got["usage"]["completion_tokens"] == want["usage"]["completion_tokens"]
