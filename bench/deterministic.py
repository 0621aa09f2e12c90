"""What does it cost that an answer's bits depend on nothing but its own tokens?

Question  Tokens/s of decode with `engine.deterministic` against without, at 1, 4 and 8 concurrent streams, and of a prompt.
Regime    Demo model, one engine a system, two systems alive that differ only in that setting; they take turns, each first in
          every second round; prompts of plain English, greedy. Decode: rate while all streams of a round are decoding, a
          context of about 1k tokens each. Prompt: 2,048 tokens that nobody has seen. `recurrent`: the same with a tiny linear
          attention hybrid (tests/engine/kinds.py; contexts of 128, a prompt of 512), whose recurrent layers take each token by itself.
Baseline  not deterministic, the paired round next to it.
Unit      tokens/s; ratio is deterministic / not: geometric mean over one pair of each order, then the middle of those (bench/rates.py).
Seed      --seed
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from bench import report, scratch
from bench.driver import System, at_once, request, system
from bench.rates import add_pairs, decoding_rate, undisturbed
from bench.sse import Answer
from tests.engine.kinds import SAMPLE
from tests.system.harness import build_kind

STREAMS = (1, 4, 8)
CONTEXT_TOKENS = 1024
PROMPT_TOKENS = 2048
RECURRENT_STREAMS = (1, 4)
RECURRENT_CONTEXT_TOKENS = 128
RECURRENT_PROMPT_TOKENS = 512


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    rounds, tokens = (2, 16) if options.quick else (8, 32)
    rows = report.Report("deterministic", options)

    def draw_plain(count: int) -> list[int]:
        return report.random_tokens(draw, count)

    def draw_tiny(count: int) -> list[int]:
        return [draw.randrange(3, 512) for _ in range(count)]

    measure(
        rows, "", options.model, options.threads, draw_plain, (STREAMS, CONTEXT_TOKENS, PROMPT_TOKENS), rounds, tokens
    )
    with scratch.directory("exact") as directory:
        model = str(build_kind(SAMPLE["linear"], directory))
        sizes = (RECURRENT_STREAMS, RECURRENT_CONTEXT_TOKENS, RECURRENT_PROMPT_TOKENS)
        measure(rows, "recurrent ", model, options.threads, draw_tiny, sizes, rounds, tokens)
    rows.finish()


def measure(
    rows: report.Report,
    prefix: str,
    model: str,
    threads: int,
    draw: Callable[[int], list[int]],
    sizes: tuple[tuple[int, ...], int, int],
    rounds: int,
    tokens: int,
) -> None:
    """Rows of one model. draw: that many tokens; sizes: counts of streams, tokens of their contexts, tokens of the prompt."""
    streams, context_tokens, prompt_tokens = sizes

    def build(deterministic: bool) -> AbstractContextManager[System]:
        engine = {"threads": threads, "deterministic": deterministic}
        return system(model, name=f"det{deterministic:d}", engines=1, settings={"engine": engine})

    with build(True) as exact, build(False) as plain:
        for count in streams:
            contexts = [draw(context_tokens) for _ in range(count)]
            for running in (exact, plain):
                answers(running, contexts, 2)  # both hold the contexts before the first round
            pairs = [
                pair(exact, plain, partial(decode_rate, contexts=contexts, tokens=tokens), index)
                for index in range(rounds)
            ]
            add_pairs(rows, f"{prefix}{count} streams", pairs)
        prompts = [draw(prompt_tokens) for _ in range(rounds)]
        pairs = [pair(exact, plain, partial(prompt_rate, prompt=prompt), index) for index, prompt in enumerate(prompts)]
        add_pairs(rows, f"{prefix}prompt {report.length_name(prompt_tokens)}", pairs)


def pair(exact: System, plain: System, rate: Callable[[System], float], index: int) -> tuple[float, float]:
    """(rate of the deterministic system, of the other), one right after the other."""
    order = (exact, plain) if index % 2 == 0 else (plain, exact)
    rates = {id(running): rate(running) for running in order}
    return rates[id(exact)], rates[id(plain)]


def decode_rate(running: System, contexts: list[list[int]], tokens: int) -> float:
    """Tokens/s over all streams, from when the last has begun until the first has ended."""
    return decoding_rate(answers(running, contexts, tokens), tokens)


def answers(running: System, contexts: list[list[int]], tokens: int) -> list[Answer]:
    def ask(prompt: list[int]) -> Answer:
        return running.stream("/v1/completions", request(prompt, tokens, ignore_eos=True))

    return at_once([lambda prompt=prompt: ask(prompt) for prompt in contexts])  # type: ignore[misc]


def prompt_rate(running: System, prompt: list[int]) -> float:
    """Prompt tokens/s, as the engine reports it."""
    (answer,) = undisturbed([running.stream("/v1/completions", request(prompt, 1, ignore_eos=True))], 1)
    return len(prompt) / (answer.concordia["timing"]["prefill_ms"] / 1000)


if __name__ == "__main__":
    main()
