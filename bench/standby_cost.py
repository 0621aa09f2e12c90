"""What does a hot standby cost the engine that it stands by for?

Question  Tokens a second of four streams, with a second engine that follows every row of them, and with one that does nothing.
Regime    Demo model, two engines on one machine (the standby's copies compete for its cores and memory), prompts of 512 seeded token ids,
          greedy. A system of each policy runs all the time, they take turns, and are first in turns. Real processes.
Baseline  Policy `warm`, in the same run. Of the processor time: what the engine that serves takes for a token.
Unit      tokens/s while all four decode, ratio is hot / warm (middle of order-free ratios, bench/rates.py); processor ms a token, ratio is
          standby / serving engine.
Seed      --seed
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from bench import report
from bench.driver import System, at_once, request, system
from bench.rates import add_pairs, decoding_rate
from bench.sse import Answer

STREAMS = 4
PROMPT_TOKENS = 512
WARM_UP_TOKENS = 8  # the prompts are computed and stored by then


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    rows = report.Report("standby_cost", options)
    tokens, rounds = (40, 6) if options.quick else (128, 8)
    prompts = [report.random_tokens(draw, PROMPT_TOKENS) for _ in range(STREAMS)]
    pairs: list[tuple[float, float]] = []
    spent_ms: list[tuple[float, float]] = []
    with (
        system(options.model, name="warm", engines=2, settings=settings(options.threads, "warm")) as warm,
        system(options.model, name="hot", engines=2, settings=settings(options.threads, "hot")) as hot,
    ):
        for running in (warm, hot):
            answers(running, prompts, WARM_UP_TOKENS)
        for turn in range(rounds):
            rates: dict[str, float] = {}
            for running in (hot, warm) if turn % 2 else (warm, hot):
                before = processor_ms(running)
                rates[running.mark] = decoding_rate(answers(running, prompts, tokens), tokens)
                if running is hot:
                    busy = sorted(after - earlier for earlier, after in zip(before, processor_ms(running), strict=True))
                    spent_ms.append((busy[0] / tokens / STREAMS, busy[1] / tokens / STREAMS))
            pairs.append((rates[hot.mark], rates[warm.mark]))
            report.say(f"  hot {pairs[-1][0]:.1f}, warm {pairs[-1][1]:.1f} tokens/s; standby {spent_ms[-1][0]:.2f} ms")
    add_pairs(rows, f"{STREAMS} streams", pairs)
    rows.details["processor_ms_a_token"] = spent_ms
    standby, serving = (report.median([both[side] for both in spent_ms]) for side in (0, 1))
    rows.add(report.Row("processor time a token", standby, "ms", serving, standby / serving))
    rows.finish()


def settings(threads: int, policy: str) -> dict[str, dict[str, Any]]:
    return {"engine": {"threads": threads}, "gateway": {"failover": policy}}


def answers(running: System, prompts: list[list[int]], tokens: int) -> list[Answer]:
    def one(prompt: list[int]) -> Answer:
        return running.stream("/v1/completions", request(prompt, tokens, ignore_eos=True), timeout_s=600.0)

    return at_once([lambda prompt=prompt: one(prompt) for prompt in prompts], 900.0)  # type: ignore[misc]


def processor_ms(running: System) -> list[float]:
    """What each engine has used so far, user and system."""
    return [spent(running.pid(f"e{index}")) for index in range(running.engine_count)]


def spent(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
