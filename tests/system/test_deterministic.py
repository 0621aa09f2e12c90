"""With --deterministic an answer has the same bits whatever runs beside it and whatever dies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.driver import System, at_once
from bench.sse import Answer
from tests.system import harness as h
from tests.system.conftest import running, settled_or_new

STREAMS = 4
TOKENS = 40


@pytest.fixture(scope="module")
def exact_system(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    yield from running(tiny_model, tmp_path_factory.mktemp("exact"), 2, deterministic=True)


@pytest.fixture
def exact(exact_system: System) -> System:
    return settled_or_new(exact_system)


def bodies(system: System, mode: str) -> list[dict[str, Any]]:
    """Chats of different lengths; log-probabilities show every last bit of the logits."""
    texts = [text * (1 + 3 * index) for index, text in enumerate(h.prompts(seed=51, count=STREAMS))]
    return [h.chat(system, text, h.MODES[mode], tokens=TOKENS, logprobs=True, top_logprobs=3) for text in texts]


@pytest.mark.parametrize("mode", h.MODES)
def test_four_streams_of_a_killed_engine_end_as_each_would_alone(exact: System, mode: str) -> None:
    asked = bodies(exact, mode)
    alone = []
    for body in asked:
        alone.append(exact.stream(h.CHAT, {**body, "capture": False}))
        h.settled(exact)
    for position in (1, 12, 25):

        def run(position: int = position) -> list[Answer]:
            kill = h.once(h.killer(exact))
            return at_once([partial(exact.stream, h.CHAT, body, watch=h.after(position, kill)) for body in asked])

        together = h.until(lambda answers: any(map(h.recoveries, answers)), exact, run)
        for index, (got, want) in enumerate(zip(together, alone, strict=True)):
            h.assert_same(got, want, f"{mode}, stream {index}, killed after {position} tokens")
            assert logprobs(got) == logprobs(want), f"{mode}, stream {index}, killed after {position} tokens"


def logprobs(answer: Answer) -> list[Any]:
    return [event.body["choices"][0]["logprobs"] for event in answer.tokens]
