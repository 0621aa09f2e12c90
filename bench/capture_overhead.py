"""What does capture cost a stream?

Question  Tokens/s with capture on against capture off, at 1, 4 and 8 concurrent streams.
Regime    Demo model, one engine, so that both sides have the same process, memory and threads: rounds with and without
          `"capture": false` take turns, on-off and off-on, on the same prompts of plain English, greedy. Rate while all
          streams of a round are decoding; the keeper drains what is captured meanwhile.
Baseline  not captured, the paired round next to it.
Unit      tokens/s; ratio is on / off: geometric mean over one pair of each order, so that being first counts for neither,
          then the median of those. Wanted: at least 0.98 at each.
Seed      --seed
"""

from __future__ import annotations

import random
from typing import Any

from bench import report
from bench.driver import System, at_once, system
from bench.rates import add_pairs, decoding_rate
from bench.sse import Answer
from bench.text import chat_prompts

STREAMS = (1, 4, 8)


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    rounds, tokens = (10, 24) if options.quick else (24, 48)
    rows = report.Report("capture_overhead", options)
    with system(
        options.model, name="overhead", engines=1, settings={"engine": {"threads": options.threads}}
    ) as running:
        for count in STREAMS:
            pairs = [
                pair(running, chat_prompts(draw, count), tokens, on_first=index % 2 == 0) for index in range(rounds)
            ]
            add_pairs(rows, f"{count} streams", pairs, ">= 0.98")
    rows.finish()


def pair(running: System, prompts: list[str], tokens: int, on_first: bool) -> tuple[float, float]:
    """(rate with capture, rate without), measured one right after the other."""
    rates = {capture: rate(running, prompts, tokens, capture) for capture in (on_first, not on_first)}
    return rates[True], rates[False]


def rate(running: System, prompts: list[str], tokens: int, capture: bool) -> float:
    """Tokens/s over all streams, from when the last has begun until the first has ended."""

    def ask(prompt: str) -> Answer:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
            "capture": capture,
        }
        return running.stream("/v1/chat/completions", body)

    return decoding_rate(at_once([lambda prompt=prompt: ask(prompt) for prompt in prompts]))  # type: ignore[misc]


if __name__ == "__main__":
    main()
