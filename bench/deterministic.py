"""What does it cost that an answer's bits depend on nothing but its own tokens?

Question  Tokens/s of decode with `engine.deterministic` against without, at 1, 4 and 8 concurrent streams, and of a prompt.
Regime    Demo model, one engine a system, two systems alive that differ only in that setting; they take turns, each first in
          every second round; prompts of plain English, greedy. Decode: rate while all streams of a round are decoding, a
          context of about 1k tokens each. Prompt: 2,048 tokens that nobody has seen.
Baseline  not deterministic, the paired round next to it.
Unit      tokens/s; ratio is deterministic / not: geometric mean over one pair of each order, then the median of those.
Seed      --seed
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from bench import report
from bench.driver import System, at_once, request, system
from bench.rates import add_pairs, decoding_rate
from bench.sse import Answer

STREAMS = (1, 4, 8)
CONTEXT_TOKENS = 1024
PROMPT_TOKENS = 2048


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    rounds, tokens = (2, 16) if options.quick else (8, 32)
    rows = report.Report("deterministic", options.quick)

    def build(deterministic: bool) -> AbstractContextManager[System]:
        engine = {"threads": options.threads, "deterministic": deterministic}
        return system(options.model, name=f"det{deterministic:d}", engines=1, settings={"engine": engine})

    with build(True) as exact, build(False) as plain:
        for count in STREAMS:
            contexts = [report.random_tokens(draw, CONTEXT_TOKENS) for _ in range(count)]
            for running in (exact, plain):
                decode_rate(running, contexts, 2)  # both hold the contexts before the first round
            pairs = [
                pair(exact, plain, partial(decode_rate, contexts=contexts, tokens=tokens), index)
                for index in range(rounds)
            ]
            add_pairs(rows, f"{count} streams", pairs)
        prompts = [report.random_tokens(draw, PROMPT_TOKENS) for _ in range(rounds)]
        pairs = [pair(exact, plain, partial(prompt_rate, prompt=prompt), index) for index, prompt in enumerate(prompts)]
        add_pairs(rows, "prompt 2k", pairs)
    rows.finish()


def pair(exact: System, plain: System, rate: Callable[[System], float], index: int) -> tuple[float, float]:
    """(rate of the deterministic system, of the other), one right after the other."""
    order = (exact, plain) if index % 2 == 0 else (plain, exact)
    rates = {id(running): rate(running) for running in order}
    return rates[id(exact)], rates[id(plain)]


def decode_rate(running: System, contexts: list[list[int]], tokens: int) -> float:
    """Tokens/s over all streams, from when the last has begun until the first has ended."""

    def ask(prompt: list[int]) -> Answer:
        return running.stream("/v1/completions", request(prompt, tokens))

    return decoding_rate(at_once([lambda prompt=prompt: ask(prompt) for prompt in contexts]))  # type: ignore[misc]


def prompt_rate(running: System, prompt: list[int]) -> float:
    """Prompt tokens/s, as the engine reports it."""
    answer = running.stream("/v1/completions", request(prompt, 1))
    return len(prompt) / (answer.concordia["timing"]["prefill_ms"] / 1000)


if __name__ == "__main__":
    main()
