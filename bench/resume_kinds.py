"""What does a session's next turn cost after a restart, for each kind of state?

Question  Time to first token of the next turn, after every process was killed and started again.
Regime    Gemma 3 270M (windows of 512 tokens in 15 of 18 layers) at 4k and 8k, and a tiny model of each kind at 1k (tests/engine/kinds.py:
          random weights, so these say what the system costs, not the model; three of them in a quick run). One engine; the turn is
          the session's token list plus NEXT_TURN_TOKENS new ones, as token ids. The session was compacted before, as the keeper does
          with those that nobody used for tiers.compact_after_s. Client's clock.
Baseline  The same request at the same engine while its store is empty, which computes all of it and keeps nothing.
Unit      ms; ratio is recompute / resume. Wanted: at least 100 for `gemma3 4k` and `gemma3 8k`. (llama-server restores such a session in 12
          to 25 ms and then computes all of it again: ratio 1.)
Seed      --seed; --model is not used
"""

from __future__ import annotations

import random
from typing import Any

from bench import report, scratch
from bench.driver import system
from bench.resume_after_restart import resumes, timed
from bench.sse import StreamError
from tests.engine.kinds import SAMPLE
from tests.system.harness import build_kind

GEMMA = "gemma3-270m"
GEMMA_LENGTHS = (4096, 8192)
TINY_LENGTH = 1024
NEXT_TURN_TOKENS = 8
QUICK_KINDS = ("window", "linear", "recurrent")
WANTED = {"gemma3 4k": ">= 100", "gemma3 8k": ">= 100"}


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    rows = report.Report("resume_kinds", options)
    repeats, tiny_repeats = (2, 1) if options.quick else (5, 3)
    prompts = {f"gemma3 {report.length_name(n)}": report.random_tokens(draw, n) for n in GEMMA_LENGTHS}
    engine = {"threads": options.threads, "slots": 2, "context_tokens": max(GEMMA_LENGTHS) + 256}
    measure(rows, GEMMA, prompts, engine, repeats)
    with scratch.directory("kinds") as directory:
        for kind in QUICK_KINDS if options.quick else SAMPLE:
            architecture = SAMPLE[kind]
            tokens = [draw.randrange(3, 512) for _ in range(TINY_LENGTH)]
            model = build_kind(architecture, directory)
            engine = {"threads": options.threads, "context_tokens": 2 * TINY_LENGTH}
            measure(rows, str(model), {f"{kind} 1k": tokens}, engine, tiny_repeats)
    rows.finish()


def measure(
    rows: report.Report, model: str, prompts: dict[str, list[int]], engine: dict[str, Any], repeats: int
) -> None:
    """Add one row a case."""
    settings = {"engine": engine}
    turn = [3 + index for index in range(NEXT_TURN_TOKENS)]
    turns = [[*turn[index:], *turn[:index]] for index in range(repeats)]
    with system(model, name="resume", engines=1, settings=settings) as running:
        cold = {case: timed(running, prompt + turn, capture=False) for case, prompt in prompts.items()}
        if any(run["cached_tokens"] for run in cold.values()):
            raise StreamError(f"nothing should have been stored: {cold}")
        for case, prompt in prompts.items():
            ours = resumes(running, case, prompt, turns, compact=True)
            value, baseline = report.median([run["first_token_ms"] for run in ours]), cold[case]["first_token_ms"]
            note = f"restore {report.median([run['restore_ms'] for run in ours]):.1f} ms"
            rows.add(report.Row(case, value, "ms", baseline, baseline / value, WANTED.get(case, ""), note))
            rows.details[case] = {"cold": cold[case], "resumed": ours}


if __name__ == "__main__":
    main()
