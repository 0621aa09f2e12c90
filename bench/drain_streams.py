"""What does it take to empty an engine with 16 streams, and what do their clients notice?

Question  `POST /admin/engines/{id}/drain` in the middle of 16 answers: how long until the engine works on nothing and can be ended,
          and the longest wait for a token that any of the clients saw meanwhile.
Regime    Demo model, two engines with 16 slots, 16 streams of 128 prompt tokens and 96 tokens of answer, greedy; the engine acts
          once each has 6 tokens. The same 16 requests three times: drained, killed, left alone. Real processes.
Baseline  Until empty: letting the answers end, from the same moment on, in the run that is left alone. Longest wait: the engine killed
          at that moment. Both are what an operator without a drain would do.
Unit      ms; ratio is baseline / ours. Beside it the longest wait against an ordinary token of these streams (ratio is ours / a token).
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
from bench.sse import Answer, StreamError

ACT_AFTER_TOKENS = 6
STREAMS = 16
PROMPT_TOKENS = 128
ANSWER_TOKENS = 96


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    rows = report.Report("drain_streams", options)
    prompts = [report.random_tokens(draw, PROMPT_TOKENS) for _ in range(STREAMS)]
    settings = {"engine": {"threads": options.threads, "slots": STREAMS}, "host": {"restart_limit_ms": 500}}
    empty_ms: list[float] = []
    reports: list[Any] = []

    def drain(running: System, answer: Answer) -> None:
        engine, began = running.serving_engine(answer.stream_id).id, time.perf_counter()
        reports.append(running.call("POST", f"/admin/engines/{engine}/drain", {"timeout_s": 300.0}, timeout_s=310.0)[2])
        empty_ms.append(1000 * (time.perf_counter() - began))
        running.call("DELETE", f"/admin/engines/{engine}/drain")

    with system(options.model, name="drain", engines=2, settings=settings) as running:
        alone, at = run(running, prompts, lambda answer: None)
        ends_ms = 1000 * (max(answer.events[-1].at for answer in alone) - at)
        drained, _ = run(running, prompts, lambda answer: in_background(drain, running, answer))
        running.wait("the end of the drain", lambda: bool(empty_ms), 310.0)
        running.wait_ready()
        killed, _ = run(running, prompts, lambda answer: moving.kill_serving(running, answer))
    rows.details = {"drain": reports, "waits_ms": {"drained": longest(drained), "killed": longest(killed)}}
    note = f"{reports[0]['moved']} moved, {reports[0]['left']} left"
    rows.add(report.Row(f"{STREAMS} streams, until empty", empty_ms[0], "ms", ends_ms, ends_ms / empty_ms[0], "", note))
    ours, theirs = max(longest(drained)), max(longest(killed))
    rows.add(report.Row(f"{STREAMS} streams, longest wait", ours, "ms", theirs, theirs / ours))
    token = report.median([moving.token_ms(answer) for answer in alone])
    rows.add(report.Row(f"{STREAMS} streams, longest wait / token", ours, "ms", token, ours / token))
    rows.finish()


def in_background(act: Callable[..., None], *given: Any) -> None:
    threading.Thread(target=act, args=given, daemon=True).start()


def longest(answers: list[Answer]) -> list[float]:
    """Of each stream, the longest wait from the token on at which something can have happened."""
    return [max(moving.gaps_ms(answer)[ACT_AFTER_TOKENS - 1 :]) for answer in answers]


def run(running: System, prompts: list[list[int]], act: Callable[[Answer], Any]) -> tuple[list[Answer], float]:
    """All requests at once; `act` runs once, when each has its tokens. The answers, and when that was (perf_counter)."""
    waiting, acted = set(range(len(prompts))), threading.Lock()
    at: list[float] = []

    def one(index: int) -> Answer:
        def watch(answer: Answer) -> None:
            if len(answer.tokens) >= ACT_AFTER_TOKENS:
                waiting.discard(index)
            if not waiting and acted.acquire(blocking=False):
                at.append(time.perf_counter())
                act(answer)

        body = request(prompts[index], ANSWER_TOKENS, ignore_eos=True)
        return running.stream("/v1/completions", body, watch=watch, timeout_s=600.0)

    answers = at_once([lambda index=index: one(index) for index in range(len(prompts))], 900.0)  # type: ignore[misc]
    if broken := [answer.describe() for answer in answers if not answer.done or answer.error]:
        raise StreamError(f"whole answers were expected: {broken}")
    return answers, at[0]


if __name__ == "__main__":
    main()
