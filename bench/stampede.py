"""When an engine with 32 sessions dies, when is the first one back, and when the last?

Question  SIGKILL of an engine that answers 32 streams: each client's wait for its next token; the shortest and the longest.
Regime    Demo model, two engines with 32 slots, prompts of 256 seeded token ids, greedy; killed once all are answered. Real processes.
Baseline  Recompute, in the same run: from sending the 32 requests to an empty store until the first and the last have a token.
Unit      ms; ratio is baseline / ours.
Seed      --seed
"""

from __future__ import annotations

import random
import threading

from bench import moving, report
from bench.driver import at_once, request, system
from bench.sse import Answer

PROMPT_TOKENS = 256


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    rows = report.Report("stampede", options)
    # One run either way: what it asks is asked of 32; the first answer lasts until the last has begun.
    count, tokens = 32, 48
    prompts = [report.random_tokens(draw, PROMPT_TOKENS) for _ in range(count)]
    settings = {"engine": {"threads": options.threads, "slots": 32}}
    waiting, killed = set(range(count)), threading.Lock()
    with system(options.model, name="stampede", engines=2, settings=settings) as running:

        def one(index: int) -> Answer:
            def watch(answer: Answer) -> None:
                if len(answer.tokens) >= 2:
                    waiting.discard(index)
                if not waiting and killed.acquire(blocking=False):
                    moving.kill_serving(running, answer)

            body = request(prompts[index], tokens, ignore_eos=True)
            return running.stream("/v1/completions", body, watch=watch, timeout_s=900.0)

        answers = at_once([lambda index=index: one(index) for index in range(count)], 1200.0)  # type: ignore[misc]
    positions = [moving.only(answer, "recoveries")["position"] - PROMPT_TOKENS for answer in answers]
    gaps = [moving.gap_before_ms(answer, position) for answer, position in zip(answers, positions, strict=True)]
    computed = [1000 * answer.first_token_s for answer in answers]
    rows.details = {"gaps_ms": gaps, "first_tokens_ms": computed}
    rows.add(report.Row(f"first of {len(gaps)}", min(gaps), "ms", min(computed), min(computed) / min(gaps)))
    rows.add(report.Row(f"last of {len(gaps)}", max(gaps), "ms", max(computed), max(computed) / max(gaps)))
    rows.finish()


if __name__ == "__main__":
    main()
