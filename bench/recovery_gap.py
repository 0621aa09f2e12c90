"""How long does a client wait for its next token when the engine that serves it is killed?

Question  SIGKILL of the serving engine to the next delivered token, on the client's clock, by length of context; and
          the parts of that gap, as the answer's `concordia.recoveries` reports them.
Regime    Demo model, one stream, two engines on one machine, greedy; prompt of seeded random token ids; the kill comes
          after the eighth token; median of several kills. Every process is real; the text is the one without a kill.
Baseline  Cold, in the same run: an engine process started from scratch until it can serve (no nursery, empty store;
          median), plus time to first token of a context of that length that nothing is stored of.
Unit      ms; ratio is cold / ours. Wanted: under 300 ms plus the copy, ratio of at least 100 at 4k.
Seed      --seed
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

from bench import report
from bench.driver import System, request, system
from bench.sse import Answer, StreamError

LENGTHS = {256: "", 1024: "", 4096: ">= 100", 7168: ""}
QUICK_LENGTHS = (256, 4096)
KILL_AFTER_TOKENS = 8
ANSWER_TOKENS = 16
PARTS = ("detect_ms", "fence_ms", "wait_ms", "restore_ms", "force_ms", "next_token_ms")


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    lengths = QUICK_LENGTHS if options.quick else tuple(LENGTHS)
    prompts = {length: report.random_tokens(draw, length) for length in lengths}
    rows = report.Report("recovery_gap", options)
    starts, cold = measure_cold(options, prompts)
    ours = measure_kills(options, prompts, kills=3 if options.quick else 7)
    rows.details = {"cold_start_s": starts, "cold_first_token_s": cold, "kills": ours}
    for length in lengths:
        gap = report.median([kill["gap_ms"] for kill in ours[length]])
        baseline = 1000 * (report.median(starts) + cold[length])
        parts = {part: report.median([kill.get(part, 0.0) for kill in ours[length]]) for part in PARTS}
        note = ", ".join(f"{name.removesuffix('_ms')} {value:.0f}" for name, value in parts.items())
        name = report.length_name(length)
        rows.add(report.Row(name, gap, "ms", baseline, baseline / gap, LENGTHS[length], note))
    rows.finish()


# ---------------------------------------------------------------- ours


def measure_kills(options: Any, prompts: dict[int, list[int]], kills: int) -> dict[int, list[dict[str, float]]]:
    """Per length: gap and parts of each kill."""
    settings = {"engine": {"threads": options.threads}, "host": {"restart_limit_ms": 500}}
    measured: dict[int, list[dict[str, float]]] = {}
    with system(options.model, name="gap", engines=2, settings=settings) as running:
        for length, prompt in prompts.items():
            body = request(prompt, ANSWER_TOKENS)
            running.stream("/v1/completions", body)  # the prompt is stored now; what follows finds it
            whole = running.stream("/v1/completions", body).text
            measured[length] = [one_kill(running, body, whole) for _ in range(kills)]
            report.say(f"  {length}: gaps {[round(kill['gap_ms']) for kill in measured[length]]} ms")
    return measured


def one_kill(running: System, body: dict[str, Any], whole: str) -> dict[str, float]:
    """Gap and parts. whole: the text without a kill. Raises StreamError for another one, and without exactly one recovery."""
    running.wait_ready()
    killed: list[float] = []

    def watch(answer: Answer) -> None:
        if not killed and len(answer.tokens) >= KILL_AFTER_TOKENS:
            pid = running.serving_engine(answer.stream_id).pid
            killed.append(time.perf_counter())
            os.kill(pid, signal.SIGKILL)

    answer = running.stream("/v1/completions", body, watch=watch)
    recoveries = answer.concordia.get("recoveries") or []
    if not answer.done or len(recoveries) != 1:
        raise StreamError(f"one recovery was expected: {recoveries} {answer.describe()}")
    if answer.text != whole:
        raise StreamError(f"{whole!r} without a kill, {answer.text!r} with one")
    position = recoveries[0]["position"] - len(body["prompt"])  # first token that the new engine delivered
    return {"gap_ms": 1000 * (answer.tokens[position].at - killed[0]), **{p: recoveries[0][p] for p in PARTS}}


# ---------------------------------------------------------------- cold


def measure_cold(options: Any, prompts: dict[int, list[int]]) -> tuple[list[float], dict[int, float]]:
    """Seconds from a killed engine to a new one that was started from scratch, and to first token at each length."""
    settings = {"engine": {"threads": options.threads}, "host": {"nursery": False}}
    with system(options.model, name="cold", engines=1, settings=settings) as running:
        starts = [start_from_scratch(running) for _ in range(2 if options.quick else 5)]
        report.say(f"  cold start: {[round(start, 2) for start in starts]} s")
        first = {}
        for length, prompt in prompts.items():
            answer = running.stream("/v1/completions", request(prompt, 2))
            if answer.usage["prompt_tokens_details"]["cached_tokens"]:
                raise StreamError(f"nothing should have been stored: {answer.describe()}")
            first[length] = answer.first_token_s
            report.say(f"  cold, {length} tokens: first token after {first[length]:.2f} s")
    return starts, first


def start_from_scratch(running: System) -> float:
    pid = running.ready_engines()[0].pid
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    running.wait("a new engine", lambda: [e for e in running.ready_engines() if e.pid != pid], 120.0)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
