"""Gemma 3 270M past 4k tokens of context: windows of 512 tokens in 15 of 18 layers, killed, restored, rolled back.

Long: 4k tokens are prefilled on a CPU. `make soak`; the model is pulled the first time (250 MB).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.driver import System
from tests.system import harness as h
from tests.system.conftest import running, settled_or_new

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
MODEL = "gemma3-270m"
LENGTH = 4300
DEADLINE_S = 900.0
FACTS = {
    0.05: " The password of the lighthouse is copper.",
    0.5: " The name of the dog is Otto.",
    0.95: " The ship sails at nine.",
}
QUESTIONS = (" The password of the lighthouse is", " The name of the dog is", " The ship sails at")


@pytest.fixture(scope="module")
def gemma_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    command = [str(Path(sys.executable).with_name("concordia")), "pull", MODEL]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    options = {"slots": 3, "context_tokens": 5120, "prefault_tokens": 0}
    yield from running(MODEL, tmp_path_factory.mktemp("gemma"), 1, {"tiers": h.LANES}, **options)


@pytest.fixture
def gemma(gemma_system: System) -> System:
    return settled_or_new(gemma_system)


def story(count: int) -> str:
    """Seeded sentences of about `count` tokens, with a fact at 5, 50 and 95 per cent of them."""
    text = h.words(seed=81, count=count).split(". ")
    for depth in sorted(FACTS, reverse=True):
        text.insert(int(depth * len(text)), FACTS[depth].strip().rstrip("."))
    return ". ".join(text)


def ask(system: System, prompt: str, session: str = "", **options: object) -> h.Answer:
    headers = {"X-Session-Id": session} if session else {}
    body = h.completion(system, prompt, tokens=12)
    answer = system.stream(h.COMPLETIONS, body, headers=headers, timeout_s=DEADLINE_S, **options)  # type: ignore[arg-type]
    h.assert_whole(answer)
    return answer


def test_gemma_past_4k_tokens_killed_restored_and_rolled_back(gemma: System) -> None:
    text = story(LENGTH)
    first = ask(gemma, text, "story")
    length = first.usage["prompt_tokens"]
    assert length > 4096, length
    want = {question: ask(gemma, text + question).text for question in QUESTIONS}
    other = text[: len(text) // 2] + " And then everything changed, because"
    want_other = ask(gemma, other).text
    gemma.kill_all()
    h.settled(gemma.start(), timeout_s=DEADLINE_S)
    for question, answer in want.items():
        got = ask(gemma, text + question)
        assert got.text == answer, question
        assert got.concordia["verdict"] in ("restored", "resident") and h.cached(got) >= length - 2, got.concordia
    back = ask(gemma, other, "story")  # 2,000 tokens back, far beyond the window
    assert back.text == want_other
    assert h.cached(back) >= length // 2 - 200 and not back.concordia["reason"], back.concordia
    body = h.completion(gemma, text + QUESTIONS[0], tokens=12)
    killed = gemma.stream(h.COMPLETIONS, body, watch=h.kill_at(gemma, 5), timeout_s=DEADLINE_S)
    assert killed.text == want[QUESTIONS[0]]
