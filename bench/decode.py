"""Is a stream through all of Concordia as fast as transformers alone?

Question  Tokens/s of 1, 4 and 8 concurrent streams through the gateway, against transformers' own `generate`.
Regime    Demo model, float32, one engine, capture on; short chat prompts that no store has seen, greedy, the same token
          ids on both sides, same number of torch threads; whole requests: prompt processing included on both sides.
Baseline  `generate` on the same prompts as one left-padded batch, in a process of its own that has the model loaded and
          is warm; the two sides take turns, each first in every second round.
Unit      tokens/s over all streams; ratio is the median over rounds of ours / generate. Wanted: at least 1.0 at each.
Seed      --seed
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import report
from bench.driver import System, at_once, request, system
from bench.model import model_directory
from bench.sse import Answer
from bench.text import chat_prompts

STREAMS = (1, 4, 8)


class Generate:
    """The baseline's process: `bench/decode_baseline.py`, one JSON line each way a batch."""

    def __init__(self, model: Path, threads: int) -> None:
        command = [sys.executable, "-m", "bench.decode_baseline", str(model), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the baseline process ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    rounds, tokens = (3, 64) if options.quick else (7, 96)
    rows = report.Report("decode", options)
    baseline = Generate(model_directory(options.model), options.threads)
    settings = {"engine": {"threads": options.threads, "dtype": "float32"}}
    try:
        with system(options.model, name="decode", engines=1, settings=settings) as running:
            measure(running, baseline, chat_prompts(draw, 1), 8, True)  # both sides have run once
            for count in STREAMS:
                pairs = [
                    measure(running, baseline, chat_prompts(draw, count), tokens, index % 2 == 0)
                    for index in range(rounds)
                ]
                rows.details[str(count)] = pairs
                ours, theirs = (report.median([pair[side] for pair in pairs]) for side in (0, 1))
                ratio = report.median([mine / other for mine, other in pairs])
                rows.add(report.Row(f"{count} streams", ours, "tokens/s", theirs, ratio, ">= 1.0"))
    finally:
        baseline.close()
    rows.finish()


def measure(
    running: System, baseline: Generate, texts: list[str], tokens: int, ours_first: bool
) -> tuple[float, float]:
    """(our tokens/s, generate's tokens/s) on the same prompts, one right after the other."""
    prompts = baseline.ask({"render": texts})["prompts"]
    if ours_first:
        mine = streamed(running, prompts, tokens)
        return mine, generated(baseline, prompts, tokens)
    other = generated(baseline, prompts, tokens)
    return streamed(running, prompts, tokens), other


def streamed(running: System, prompts: list[list[int]], tokens: int) -> float:
    def ask(prompt: list[int]) -> Answer:
        return running.stream("/v1/completions", request(prompt, tokens))

    answers = at_once([lambda prompt=prompt: ask(prompt) for prompt in prompts])  # type: ignore[misc]
    start = min(answer.sent_at for answer in answers)
    end = max(answer.tokens[-1].at for answer in answers)
    return sum(answer.usage["completion_tokens"] for answer in answers) / (end - start)


def generated(baseline: Generate, prompts: list[list[int]], tokens: int) -> float:
    done = baseline.ask({"generate": prompts, "tokens": tokens})
    return done["token_count"] / done["seconds"]


if __name__ == "__main__":
    main()
