"""What does an answer under a JSON schema cost a token, and what does it cost the others?

Question  Tokens/s of streams that must match a schema against free ones; of free streams beside a constrained one; the mask
          alone; and what a schema that nobody has sent before adds to the first token.
Regime    Demo model, one engine; greedy; all streams of a round decode together, rounds of the sides alternate. The schema
          is a list of numbers that is long enough for the answer. `mask`: in this process, over a recorded answer of that schema, the
          matcher's mask as a tensor and the step to the next token.
Baseline  the free round next to it; for `mask`, a decode step of one free stream; for `new schema`, the first token of a free request.
Unit      tokens/s (ratio constrained / free, each from two neighbouring pairs of opposite order), us and ms (ratio baseline /
          value). Wanted: at least 0.95, and 1 for the streams beside.
Seed      --seed
"""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from bench import report
from bench.driver import System, at_once, request, system
from bench.model import model_directory
from bench.rates import add_pairs, decoding_rate
from bench.sse import Answer

CONTEXT_TOKENS = 64
WANTED = {"1 stream": ">= 0.95", "8 streams": ">= 0.95", "7 beside 1": ">= 0.98"}


def schema(seed: int = 0) -> dict[str, Any]:
    """Another one for each seed, equally hard."""
    item = {"type": "integer", "minimum": 0, "maximum": 10_000 + seed}
    return {"type": "array", "items": item, "minItems": 400, "x-guidance": {"whitespace_flexible": False}}


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    rounds, tokens = (4, 24) if options.quick else (10, 64)
    rows = report.Report("grammar", options)
    settings = {"engine": {"threads": options.threads}}
    with system(options.model, name="grammar", engines=1, settings=settings) as running:
        contexts = [report.random_tokens(draw, CONTEXT_TOKENS) for _ in range(8)]
        answered(running, contexts[:1], 4, schema())  # vocabulary read, schema compiled
        for count in (1, 8):
            pairs = [both(running, contexts[:count], tokens, index) for index in range(rounds)]
            case = f"{count} stream{'s' if count > 1 else ''}"
            add_pairs(rows, case, pairs, WANTED[case])
        pairs = [beside(running, contexts, tokens, index) for index in range(rounds)]
        add_pairs(rows, "7 beside 1", pairs, WANTED["7 beside 1"])
        fresh, free = [], []
        for index in range(rounds):
            fresh.append(first_token_ms(running, contexts[0], schema(1 + index)))
            free.append(first_token_ms(running, contexts[0], None))
    value, baseline = report.median(fresh), report.median(free)
    rows.add(report.Row("new schema", value, "ms", baseline, baseline / value))
    rows.details["new schema"] = {"fresh": fresh, "free": free}
    step_us = 1e6 / rows.rows[0].baseline
    mask_us = mask_cost_us(model_directory(options.model))
    rows.add(report.Row("mask", mask_us, "us", step_us, step_us / mask_us))
    rows.finish()


def both(running: System, contexts: list[list[int]], tokens: int, index: int) -> tuple[float, float]:
    """(constrained rate, free rate), one right after the other, in turns."""
    rates = {}
    for constrained in (True, False) if index % 2 == 0 else (False, True):
        rates[constrained] = decoding_rate(
            answered(running, contexts, tokens, schema() if constrained else None), tokens
        )
    return rates[True], rates[False]


def beside(running: System, contexts: list[list[int]], tokens: int, index: int) -> tuple[float, float]:
    """Rate of seven free streams: (beside a constrained one, beside another free one)."""
    rates = {}
    for constrained in (True, False) if index % 2 == 0 else (False, True):
        grammars = [schema() if constrained else None, *[None] * 7]
        rates[constrained] = decoding_rate(answered(running, contexts, tokens, *grammars)[1:], tokens)
    return rates[True], rates[False]


def answered(running: System, contexts: list[list[int]], tokens: int, *grammars: dict[str, Any] | None) -> list[Answer]:
    """One answer for each context, all at once; one grammar for all, or one each."""

    def ask(prompt: list[int], grammar: dict[str, Any] | None) -> Answer:
        more: dict[str, Any] = {"ignore_eos": True} if grammar is None else {"guided_json": grammar}
        return running.stream("/v1/completions", {**request(prompt, tokens), **more})

    each = list(grammars) * (len(contexts) if len(grammars) == 1 else 1)
    return at_once([lambda p=p, g=g: ask(p, g) for p, g in zip(contexts, each, strict=True)])  # type: ignore[misc]


def first_token_ms(running: System, prompt: list[int], grammar: dict[str, Any] | None) -> float:
    (answer,) = answered(running, [prompt], 2, grammar)
    return 1000 * answer.first_token_s


def mask_cost_us(directory: Path) -> float:
    """Median cost of one token: the mask, and the matcher's step."""
    from llguidance import LLMatcher, LLTokenizer

    from engine.grammar import Matcher

    config = json.loads((directory / "config.json").read_text())
    tokenizer = LLTokenizer((directory / "tokenizer.json").read_text(), n_vocab=config["vocab_size"], eos_token=2)
    grammar = LLMatcher.grammar_from_json_schema(schema())
    matcher = Matcher(LLMatcher(tokenizer, grammar), config["vocab_size"])
    times = []
    for token in tokenizer.tokenize_str(json.dumps(list(range(1, 2000, 7)), separators=(",", ":")))[:-1]:
        began = time.perf_counter()
        matcher.allowed()
        matcher.advance([token])
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


if __name__ == "__main__":
    main()
