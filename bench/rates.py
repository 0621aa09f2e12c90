"""Rates of streams that decode together, and ratios of two sides that took turns."""

from __future__ import annotations

import math
import statistics
from itertools import combinations_with_replacement

from bench import report
from bench.sse import Answer, StreamError


def undisturbed(answers: list[Answer], token_count: int) -> list[Answer]:
    """The answers, if each is whole: so many tokens, no error, one engine all the time. Raises StreamError."""
    for answer in answers:
        moved = answer.concordia.get("recoveries") or answer.concordia.get("migrations")
        if not answer.done or answer.error or moved or answer.usage.get("completion_tokens") != token_count:
            raise StreamError(f"{token_count} tokens from one engine were expected: {answer.describe()}")
    return answers


def decoding_rate(answers: list[Answer], token_count: int) -> float:
    """Tokens/s over all streams, from when the last has begun until the first has ended.

    The sum of the streams' rates, each between its own first and last token in that time: which thread reads its token of
    a step first is chance, and would count as many tokens more or less as there are streams.
    Raises StreamError for answers that are not whole (`undisturbed`) or hardly decoded at the same time.
    """
    times = [[event.at for event in answer.tokens] for answer in undisturbed(answers, token_count)]
    start, end = max(stream[0] for stream in times), min(stream[-1] for stream in times)
    shared = [[at for at in stream if start <= at <= end] for stream in times]
    if min(map(len, shared)) < 2:
        raise StreamError(f"streams that decode together were expected: {[len(stream) for stream in shared]} tokens")
    return sum((len(stream) - 1) / (stream[-1] - stream[0]) for stream in shared)


def add_pairs(rows: report.Report, case: str, pairs: list[tuple[float, float]], want: str = "") -> None:
    """A row of tokens/s from (rate, rate of the baseline) pairs whose sides were first in turns; its note: the ratio's standard error."""
    rows.details[case] = pairs
    value, baseline = (report.median([pair[side] for pair in pairs]) for side in (0, 1))
    ratios = order_free(pairs)
    note = f"+- {statistics.stdev(ratios) / len(ratios) ** 0.5:.2g}" if len(ratios) > 1 else ""
    rows.add(report.Row(case, value, "tokens/s", baseline, middle(ratios), want, note))


def order_free(pairs: list[tuple[float, float]]) -> list[float]:
    """Ratios of the two sides, each from two neighbouring pairs of opposite order: being first counts for neither."""
    ratios = [ours / theirs for ours, theirs in pairs]
    return [(first * second) ** 0.5 for first, second in zip(ratios[::2], ratios[1::2], strict=True)]


def middle(ratios: list[float]) -> float:
    """The median of the geometric means of any two ratios, each with itself too (Hodges and Lehmann, 1963).

    Outliers move it as little to one side as to the other, up to a quarter of all; without any it scatters as their mean
    does, for which a median takes half as many again.
    """
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(report.median([(one + other) / 2 for one, other in combinations_with_replacement(logs, 2)]))
