"""Rates of streams that decode together, and ratios of two sides that took turns."""

from __future__ import annotations

from bench import report
from bench.sse import Answer


def decoding_rate(answers: list[Answer]) -> float:
    """Tokens/s over all streams, from when the last has begun until the first has ended."""
    start = max(answer.tokens[0].at for answer in answers)
    end = min(answer.tokens[-1].at for answer in answers)
    count = sum(1 for answer in answers for event in answer.tokens if start < event.at <= end)
    return count / max(end - start, 1e-9)


def add_pairs(rows: report.Report, case: str, pairs: list[tuple[float, float]], want: str = "") -> None:
    """A row of tokens/s from (rate, rate of the baseline) pairs whose sides were first in turns."""
    rows.details[case] = pairs
    value, baseline = (report.median([pair[side] for pair in pairs]) for side in (0, 1))
    rows.add(report.Row(case, value, "tokens/s", baseline, report.median(order_free(pairs)), want))


def order_free(pairs: list[tuple[float, float]]) -> list[float]:
    """Ratios of the two sides, each from two neighbouring pairs of opposite order: being first counts for neither."""
    ratios = [ours / theirs for ours, theirs in pairs]
    return [(first * second) ** 0.5 for first, second in zip(ratios[::2], ratios[1::2], strict=True)]
