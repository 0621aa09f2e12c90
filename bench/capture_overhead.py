"""What does capture cost a stream?

Question  Tokens/s with capture on against capture off, at 1, 4 and 8 concurrent streams.
Regime    Demo model, one engine, so that both sides have the same process, memory and threads: rounds with and without
          `"capture": false` take turns, on-off and off-on, on the same prompts of plain English, greedy; both find the prompts
          on the device, so that their streams begin together. Rate while all streams of a round are decoding; the keeper drains
          what is captured meanwhile, and what is left of it before the next round, which would pay for it.
Baseline  not captured, the paired round next to it.
Unit      tokens/s; ratio is on / off: geometric mean over one pair of each order, so that being first counts for neither,
          then the middle of those (bench/rates.py), beside it their standard error. Wanted: at least 0.98 at each.
Seed      --seed
"""

from __future__ import annotations

import random
from typing import Any

from bench import report
from bench.driver import System, at_once, system
from bench.rates import add_pairs, decoding_rate
from bench.sse import Answer, StreamError
from bench.text import chat_prompts
from tiers import keeper_client

STREAMS = (1, 4, 8)


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    # Many short pairs, since the machine's speed changes by the second and rounds side by side share most of it; longer than the
    # keeper's own rounds (tiers.drain_interval_ms), so that captured ones pay for most of their drain.
    rounds, tokens = (28, 16) if options.quick else (48, 32)
    rows = report.Report("capture_overhead", options)
    with system(
        options.model, name="overhead", engines=1, settings={"engine": {"threads": options.threads}}
    ) as running:
        for count in STREAMS:
            pairs = [pair(running, chat_prompts(draw, count), tokens, index % 2 == 0) for index in range(rounds)]
            add_pairs(rows, f"{count} streams", pairs, ">= 0.98")
    rows.finish()


def pair(running: System, prompts: list[str], tokens: int, on_first: bool) -> tuple[float, float]:
    """(rate with capture, rate without), measured one right after the other."""
    answers(running, prompts, 1, True)
    rates, texts = {}, {}
    for capture in (on_first, not on_first):
        keeper_client.drain(running.paths.keeper_socket, sync=True)
        given = answers(running, prompts, tokens, capture)
        rates[capture] = decoding_rate(given, tokens)
        texts[capture] = [answer.text for answer in given]
    if texts[True] != texts[False]:
        raise StreamError(f"other text with capture than without: {texts}")
    return rates[True], rates[False]


def answers(running: System, prompts: list[str], tokens: int, capture: bool) -> list[Answer]:
    def ask(prompt: str) -> Answer:
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "capture": capture,
        }
        return running.stream("/v1/completions", body)

    return at_once([lambda prompt=prompt: ask(prompt) for prompt in prompts])  # type: ignore[misc]


if __name__ == "__main__":
    main()
