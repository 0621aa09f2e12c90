"""Several choices of one request at real processes: killed while they are made, each is what it would have been."""

from __future__ import annotations

import os
import signal
from typing import Any

import openai
import pytest

from bench.driver import System
from bench.sse import Answer
from tests.system import harness as h

COUNT = 4
TOKENS = 16


def by_choice(answer: Answer) -> dict[int, tuple[str, str]]:
    """Text and finish reason of each choice."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in answer.events:
        for choice in event.body.get("choices") or []:
            index = choice["index"]
            texts[index] = texts.get(index, "") + (choice["delta"].get("content") or "")
            reasons[index] = choice["finish_reason"] or reasons.get(index, "")
    return {index: (text, reasons[index]) for index, text in texts.items()}


def assert_numbered(answer: Answer) -> None:
    assert answer.done, answer.describe()
    assert answer.ids == list(range(len(answer.ids)))


@pytest.mark.timeout(280)
def test_tiny_killed_while_four_choices_are_made(tiny: System) -> None:
    body = h.chat(tiny, h.prompts(seed=71, count=1)[0], h.SAMPLED, tokens=TOKENS, n=COUNT)
    want = tiny.stream(h.CHAT, body)
    assert_numbered(want)
    assert len({text for text, _ in by_choice(want).values()}) == COUNT, "seeds of choices differ"
    recovered = 0

    def kill(answer: Answer) -> None:
        for engine in [engine for engine in tiny.engines() if engine.streams][:1]:  # none if it is over already
            os.kill(engine.pid, signal.SIGKILL)

    for events in range(0, COUNT * TOKENS, 9):
        for _ in range(h.TRIES):
            h.settled(tiny)
            got = tiny.stream(h.CHAT, body, watch=h.after(events, kill))
            assert_numbered(got)
            assert by_choice(got) == by_choice(want), f"killed after {events} events"
            assert h.counts(got) == h.counts(want)
            if any(choice["recoveries"] for choice in got.concordia["choices"]):
                recovered += 1
                break
    assert recovered >= 3, "most kills must have hit the answer"


def test_official_client_with_n(tiny: System) -> None:
    api = openai.OpenAI(base_url=f"http://127.0.0.1:{tiny.port}/v1", api_key="-", max_retries=0)
    options: dict[str, Any] = {
        "model": tiny.model_name(), "messages": [{"role": "user", "content": "Three of them."}],
        "max_tokens": 8, "seed": 5, "n": 3,
    }  # fmt: skip
    whole = api.chat.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in api.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    best = api.completions.create(model=options["model"], prompt="Once", max_tokens=4, n=1, best_of=3, seed=1)
    assert len(best.choices) == 1
