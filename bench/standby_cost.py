"""What does a hot standby cost the engine that it stands by for?

Question  Tokens a second of four streams, with a second engine that follows every row of them, and with one that does nothing.
Regime    Demo model, two engines on one machine (the standby's copies compete for its cores and memory), prompts of 512 seeded token ids,
          greedy; the two policies take turns. Real processes.
Baseline  Policy `warm`, in the same run.
Unit      tokens/s while all four decode; ratio is hot / warm.
Seed      --seed
"""

from __future__ import annotations

import random
from typing import Any

from bench import report
from bench.driver import System, at_once, request, system
from bench.rates import decoding_rate
from bench.sse import Answer

STREAMS = 4
PROMPT_TOKENS = 512


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    tokens, rounds = (48, 2) if options.quick else (128, 3)
    prompts = [report.random_tokens(draw, PROMPT_TOKENS) for _ in range(STREAMS)]
    found: dict[str, list[float]] = {"warm": [], "hot": []}
    for _ in range(rounds):
        for policy, rates in found.items():
            settings: Any = {"engine": {"threads": options.threads}, "gateway": {"failover": policy}}
            with system(options.model, name=policy, engines=2, settings=settings) as running:
                rates.append(rate(running, prompts, tokens))
                report.say(f"  {policy}: {rates[-1]:.1f} tokens/s")
    rows = report.Report("standby_cost", options.quick)
    rows.details = found
    hot, warm = report.median(found["hot"]), report.median(found["warm"])
    rows.add(report.Row(f"{STREAMS} streams", hot, "tokens/s", warm, hot / warm))
    rows.finish()


def rate(running: System, prompts: list[list[int]], tokens: int) -> float:
    def one(prompt: list[int]) -> Answer:
        return running.stream("/v1/completions", request(prompt, tokens), timeout_s=600.0)

    return decoding_rate(at_once([lambda prompt=prompt: one(prompt) for prompt in prompts], 900.0))  # type: ignore[misc]


if __name__ == "__main__":
    main()
