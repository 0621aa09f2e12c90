"""Case 4: a prompt that departs from what is stored is reused up to there, and answered as a cold engine would."""

from __future__ import annotations

from bench.driver import System
from tests.system import harness as h


def answer_both(demo: System, cold: System, path: str, body: dict) -> tuple[h.Answer, h.Answer]:
    got = demo.stream(path, body)
    want = cold.stream(path, {**body, "model": cold.model_name()})
    return got, want


def test_demo_prompt_whose_last_tokens_were_retokenized(demo: System, reference: System) -> None:
    """Text cut inside a word ends in other tokens than the same text going on: reuse ends before them."""
    text = h.words(seed=61, count=400) + " The most remarkable of all was the inter"
    first = demo.stream(h.COMPLETIONS, h.completion(demo, text, tokens=1))
    h.assert_whole(first)
    got, want = answer_both(demo, reference, h.COMPLETIONS, h.completion(demo, text + "nationally known", tokens=12))
    h.assert_same(got, want, "retokenized tail")
    prompt_count = first.usage["prompt_tokens"]
    assert prompt_count - 8 <= h.cached(got) < got.usage["prompt_tokens"], (got.usage, got.concordia)
    assert got.concordia["recomputed_tokens"] <= 16, got.concordia


def test_demo_message_edited_700_tokens_back(demo: System, reference: System) -> None:
    """What comes before the edit is reused, what comes after it is computed again, and the answer says so."""
    before, after = h.words(seed=62, count=320), h.words(seed=63, count=700)

    def messages(word: str) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": f"{before} {word} {after}"},
            {"role": "assistant", "content": "I see."},
            {"role": "user", "content": "What does the man do?"},
        ]

    first = demo.stream(h.CHAT, h.chat_of(demo, messages("Monday"), tokens=8), headers={"X-Session-Id": "edited"})
    h.assert_whole(first)
    body = h.chat_of(demo, messages("Friday"), tokens=12)
    got = demo.stream(h.CHAT, body, headers={"X-Session-Id": "edited"})
    want = reference.stream(h.CHAT, {**body, "model": reference.model_name()})
    h.assert_same(got, want, "message edited 700 tokens back")
    length = got.usage["prompt_tokens"]
    assert 200 <= h.cached(got) <= length - 700, (got.usage, got.concordia)
    assert got.concordia["recomputed_tokens"] >= 700
    assert got.concordia["recomputed_tokens"] <= length - 200
