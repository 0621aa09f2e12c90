"""Is a stream through all of Concordia as fast as transformers alone?

Question  Tokens/s of 1, 4 and 8 concurrent streams through the gateway, against transformers' own `generate`.
Regime    Demo model, float32, one engine, capture on; short chat prompts that differ from their system message on, so that no
          store has anything of them but the template's first tokens; greedy, the same token ids and the same number of new tokens
          on both sides, same number of torch threads; whole requests: prompt processing included on both sides.
Baseline  `generate` on the same prompts as one left-padded batch, in a process of its own that has the model loaded and
          is warm; the two sides take turns, each first in every second round.
Unit      tokens/s over all streams; ratio is the median over rounds of ours / generate. Wanted: at least 1.0 at each. Of how many
          streams the text is the same on both sides is told beside it: products of other shapes have other last bits, so where two
          tokens are all but equally likely the texts part.
Seed      --seed
"""

from __future__ import annotations

import json
import random
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import report
from bench.driver import System, at_once, request, system
from bench.model import model_directory
from bench.rates import undisturbed
from bench.sse import Answer, StreamError
from bench.text import chat_prompts

STREAMS = (1, 4, 8)
MOST_FOUND_TOKENS = 8  # the template's first tokens, and a few by chance


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
        self._process.kill()
        self._process.communicate()


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    rounds, tokens = (3, 64) if options.quick else (7, 96)
    rows = report.Report("decode", options)
    baseline = Generate(model_directory(options.model), options.threads)
    settings = {"engine": {"threads": options.threads, "dtype": "float32"}}
    try:
        with system(options.model, name="decode", engines=1, settings=settings) as running:
            measure(running, baseline, conversations(draw, 1), 8, True)  # both sides have run once
            for count in STREAMS:
                found = [
                    measure(running, baseline, conversations(draw, count), tokens, index % 2 == 0)
                    for index in range(rounds)
                ]
                rows.details[str(count)] = found
                ours, theirs = (report.median([one[side] for one in found]) for side in (0, 1))
                ratio = report.median([mine / other for mine, other, _ in found])
                note = f"same text {sum(same for *_, same in found)} of {count * rounds}"
                rows.add(report.Row(f"{count} streams", ours, "tokens/s", theirs, ratio, ">= 1.0", note))
    finally:
        baseline.close()
    rows.finish()


def conversations(draw: random.Random, count: int) -> list[list[dict[str, str]]]:
    """Chat messages; what the system is told begins with letters drawn for it alone."""
    names = ["".join(draw.choices(string.ascii_lowercase, k=8)) for _ in range(count)]
    return [
        [{"role": "system", "content": f"{name} is your name."}, {"role": "user", "content": text}]
        for name, text in zip(names, chat_prompts(draw, count), strict=True)
    ]


def measure(
    running: System, baseline: Generate, chats: list[list[dict[str, str]]], tokens: int, ours_first: bool
) -> tuple[float, float, int]:
    """(our tokens/s, generate's tokens/s, streams with the same text) on the same prompts, one right after the other."""
    prompts = baseline.ask({"render": chats})["prompts"]
    sides: dict[bool, tuple[float, list[str]]] = {}
    for ours in (ours_first, not ours_first):
        sides[ours] = streamed(running, prompts, tokens) if ours else generated(baseline, prompts, tokens)
    (mine, texts), (other, texts_of_generate) = sides[True], sides[False]
    return mine, other, sum(one == another for one, another in zip(texts, texts_of_generate, strict=True))


def streamed(running: System, prompts: list[list[int]], tokens: int) -> tuple[float, list[str]]:
    """Tokens/s and texts. Raises StreamError for answers that are not whole or had their prompts from a store."""

    def ask(prompt: list[int]) -> Answer:
        return running.stream("/v1/completions", request(prompt, tokens, ignore_eos=True))

    answers = undisturbed(at_once([lambda prompt=prompt: ask(prompt) for prompt in prompts]), tokens)  # type: ignore[misc]
    found = max(answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    if found > MOST_FOUND_TOKENS:
        raise StreamError(f"{found} tokens of a prompt were found in a store")
    start = min(answer.sent_at for answer in answers)
    end = max(answer.tokens[-1].at for answer in answers)
    return len(prompts) * tokens / (end - start), [answer.text for answer in answers]


def generated(baseline: Generate, prompts: list[list[int]], tokens: int) -> tuple[float, list[str]]:
    done = baseline.ask({"generate": prompts, "tokens": tokens})
    return len(prompts) * tokens / done["seconds"], done["texts"]


if __name__ == "__main__":
    main()
