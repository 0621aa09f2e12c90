"""What does a session's next turn cost after a restart, for each kind of state?

Question  Time to first token of the next turn, after every process was killed and started again.
Regime    Gemma 3 270M (windows of 512 tokens in 15 of 18 layers) at 4k and 8k, and a tiny model of each kind at 1k (tests/engine/kinds.py:
          random weights, so these say what the system costs, not the model). One engine; the turn is the session's token
          list plus NEXT_TURN_TOKENS new ones, as token ids. Client's clock.
Baseline  The same request at an engine with an empty store, which computes all of it, in the same run.
Unit      ms; ratio is recompute / resume. Wanted: at least 100 for `gemma3 4k` and `gemma3 8k`. (llama-server restores such a session in 12
          to 25 ms and then computes all of it again: ratio 1.)
Seed      --seed; --model is not used
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from bench import report
from bench.driver import System, system
from bench.recovery_gap import request
from bench.sse import Answer, StreamError
from tests.engine.kinds import SAMPLE
from tests.system.harness import build_kind
from tiers import keeper_client

GEMMA = "gemma3-270m"
GEMMA_LENGTHS = (4096, 8192)
TINY_LENGTH = 1024
NEXT_TURN_TOKENS = 8
WANTED = {"gemma3 4k": ">= 100", "gemma3 8k": ">= 100"}
# Far more than any answer takes on a busy machine.
DEADLINE_S = 900.0


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    rows = report.Report("resume_kinds", options.quick)
    repeats = 2 if options.quick else 5
    gemma = GEMMA_LENGTHS[:1] if options.quick else GEMMA_LENGTHS
    prompts = {f"gemma3 {report.length_name(n)}": report.random_tokens(draw, n) for n in gemma}
    engine = {"threads": options.threads, "slots": 2, "context_tokens": max(gemma) + 256}
    measure(rows, GEMMA, prompts, engine, repeats)
    with tempfile.TemporaryDirectory(prefix="concordia-kinds-") as directory:
        for kind, architecture in SAMPLE.items():
            tokens = [draw.randrange(3, 512) for _ in range(TINY_LENGTH)]
            model = build_kind(architecture, Path(directory))
            engine = {"threads": options.threads, "context_tokens": 2 * TINY_LENGTH}
            measure(rows, str(model), {f"{kind} 1k": tokens}, engine, repeats)
    rows.finish()


def measure(
    rows: report.Report, model: str, prompts: dict[str, list[int]], engine: dict[str, Any], repeats: int
) -> None:
    """Add one row a case."""
    settings = {"engine": engine}
    turn = [3 + index for index in range(NEXT_TURN_TOKENS)]
    with system(model, name="empty", engines=1, settings=settings) as empty:
        cold = {case: timed(empty, prompt + turn) for case, prompt in prompts.items()}
    with system(model, name="resume", engines=1, settings=settings) as running:
        for case, prompt in prompts.items():
            ours = resumes(running, case, prompt, turn, repeats)
            value, baseline = report.median([run["first_token_ms"] for run in ours]), cold[case]["first_token_ms"]
            note = f"restore {report.median([run['restore_ms'] for run in ours]):.1f} ms"
            rows.add(report.Row(case, value, "ms", baseline, baseline / value, WANTED.get(case, ""), note))
            rows.details[case] = {"cold": cold[case], "resumed": ours}


def resumes(running: System, case: str, prompt: list[int], turn: list[int], repeats: int) -> list[dict[str, float]]:
    """Store the session once, then restart everything and ask for a next turn, again and again."""
    session = case.replace(" ", "-")
    ask(running, prompt, session)
    measured = []
    for index in range(repeats):
        keeper_client.drain(running.paths.keeper_socket, sync=True)
        running.kill_all()
        running.start()
        run = timed(running, [*prompt, *turn[index:], *turn[:index]], session)
        if run["cached_tokens"] < len(prompt) - 1:
            raise StreamError(f"{case}: {run['cached_tokens']} of {len(prompt)} tokens were restored")
        measured.append(run)
        report.say(f"  {case}: {run}")
    return measured


def timed(running: System, prompt: list[int], session: str = "") -> dict[str, float]:
    """One request: time to first token by the client's clock, the engine's own times, and what was reused."""
    answer = ask(running, prompt, session)
    timing: dict[str, Any] = answer.concordia["timing"]
    return {
        "first_token_ms": 1000 * answer.first_token_s,
        "restore_ms": float(timing["restore_ms"]),
        "prefill_ms": float(timing["prefill_ms"]),
        "cached_tokens": float((answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)),
    }


def ask(running: System, prompt: list[int], session: str) -> Answer:
    headers = {"X-Session-Id": session} if session else {}
    answer = running.stream("/v1/completions", request(prompt, 2), headers=headers, timeout_s=DEADLINE_S)
    if not answer.done or answer.error:
        raise StreamError(answer.describe())
    return answer


if __name__ == "__main__":
    main()
