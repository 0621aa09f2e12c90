"""Case 6: two sessions share a system prompt of 1,500 tokens: computed once, stored once."""

from __future__ import annotations

import pytest

from bench.driver import System
from tests.system import harness as h
from tests.system.store_count import block_count, drained

SHARED_TOKENS = 1500
OWN_TOKENS = 40
BLOCK_TOKENS = 32


@pytest.mark.timeout(200)
def test_demo_second_session_computes_only_its_own_part_and_blocks_are_stored_once(
    demo: System, reference: System
) -> None:
    shared = h.random_tokens(seed=81, count=SHARED_TOKENS)
    first_own, second_own = h.random_tokens(seed=82, count=OWN_TOKENS), h.random_tokens(seed=83, count=OWN_TOKENS)
    drained(demo)
    at_start = block_count(demo)
    first = demo.stream(
        h.COMPLETIONS, h.completion(demo, shared + first_own, tokens=8), headers={"X-Session-Id": "share-1"}
    )
    h.assert_whole(first)
    h.settled(demo)
    drained(demo)
    after_first = block_count(demo)
    assert after_first - at_start >= SHARED_TOKENS // BLOCK_TOKENS
    second = demo.stream(
        h.COMPLETIONS, h.completion(demo, shared + second_own, tokens=8), headers={"X-Session-Id": "share-2"}
    )
    h.assert_whole(second)
    assert h.cached(second) >= SHARED_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS, (second.usage, second.concordia)
    assert second.concordia["recomputed_tokens"] <= OWN_TOKENS + BLOCK_TOKENS, second.concordia
    h.settled(demo)
    drained(demo)
    new_blocks = block_count(demo) - after_first
    assert new_blocks <= (OWN_TOKENS + 8) // BLOCK_TOKENS + 2, f"the second session added {new_blocks} blocks"

    want = reference.stream(h.COMPLETIONS, h.completion(reference, shared + second_own, tokens=8))
    assert second.text == want.text, "what was reused must give what a cold engine computes"


def test_tiny_shared_system_prompt_in_chat(tiny: System) -> None:
    """The same through the chat template, with names that only the list of sessions knows."""
    system_prompt = h.words(seed=84, count=300)

    def ask(session: str, question: str) -> h.Answer:
        messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": question}]
        return tiny.stream(h.CHAT, h.chat_of(tiny, messages, tokens=8), headers={"X-Session-Id": session})

    first, second = ask("chat-1", "What is salt?"), ask("chat-2", "What is a tide?")
    h.assert_whole(first)
    h.assert_whole(second)
    assert h.cached(second) > second.usage["prompt_tokens"] - 40, (second.usage, second.concordia)
