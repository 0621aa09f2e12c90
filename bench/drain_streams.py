"""What do clients notice when an engine with 16 streams is drained?

Question  `POST /admin/engines/{id}/drain` in the middle of 16 answers: the longest wait for a token of any of them.
Regime    Demo model, two engines with 16 slots, 16 streams of 128 prompt tokens, greedy; drained when each has 6 tokens.
Baseline  The same engine killed at the same point, in the same run.
Unit      ms; ratio is killed / drained. Beside it the time until the drain was over, against an ordinary token.
Seed      --seed
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from bench import moving, report
from bench.driver import System, at_once, request, system
from bench.sse import Answer

ACT_AFTER_TOKENS = 6


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    streams, tokens = (4, 48) if options.quick else (16, 96)
    prompts = [report.random_tokens(draw, 128) for _ in range(streams)]
    settings = {"engine": {"threads": options.threads, "slots": 16}, "host": {"restart_limit_ms": 500}}
    seconds: list[float] = []
    reports: list[Any] = []

    with system(options.model, name="drain", engines=2, settings=settings) as running:

        def drain(answer: Answer) -> None:
            engine, began = running.serving_engine(answer.stream_id).id, time.perf_counter()
            reports.append(running.call("POST", f"/admin/engines/{engine}/drain", {})[2])
            seconds.append(time.perf_counter() - began)
            running.call("DELETE", f"/admin/engines/{engine}/drain")

        drained = run(running, prompts, tokens, lambda answer: threading.Thread(target=drain, args=(answer,)).start())
        running.wait_ready()
        killed = run(running, prompts, tokens, lambda answer: moving.kill_serving(running, answer))
    rows = report.Report("drain_streams", options.quick)
    rows.details = {"drain": reports}
    ours, theirs = (max(longest_ms(answer) for answer in answers) for answers in (drained, killed))
    rows.add(report.Row(f"{streams} streams, longest wait", ours, "ms", theirs, theirs / ours))
    token = report.median([moving.token_ms(answer) for answer in drained])
    rows.add(report.Row(f"{streams} streams, until drained", 1000 * seconds[0], "ms", token, 1000 * seconds[0] / token))
    rows.finish()


def longest_ms(answer: Answer) -> float:
    """Longest wait from the token on at which something can have happened."""
    return max(moving.gaps_ms(answer)[ACT_AFTER_TOKENS - 1 :])


def run(running: System, prompts: list[list[int]], tokens: int, act: Callable[[Answer], Any]) -> list[Answer]:
    waiting, acted = set(range(len(prompts))), threading.Lock()

    def one(index: int) -> Answer:
        def watch(answer: Answer) -> None:
            if len(answer.tokens) >= ACT_AFTER_TOKENS:
                waiting.discard(index)
            if not waiting and acted.acquire(blocking=False):
                act(answer)

        body = request(prompts[index], tokens)
        return running.stream("/v1/completions", body, watch=watch, timeout_s=600.0)

    return at_once([lambda index=index: one(index) for index in range(len(prompts))], 900.0)  # type: ignore[misc]


if __name__ == "__main__":
    main()
