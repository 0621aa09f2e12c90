"""Seeded prompts of plain English that the demo model answers at length."""

from __future__ import annotations

import random

_THINGS = ["a lighthouse", "the tide", "an old clock", "a river", "bread", "the night sky", "a train", "a violin"]
_FORMS = ["Write a very long story about {}.", "Explain {} to a child in many words.", "Describe {} in great detail."]


def chat_prompts(draw: random.Random, count: int) -> list[str]:
    """`count` different messages; the number makes every one new to every store."""
    return [
        f"{draw.choice(_FORMS).format(draw.choice(_THINGS))} Begin with chapter {draw.randrange(10**6)}."
        for _ in range(count)
    ]
