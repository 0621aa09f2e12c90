"""Rates of streams that decode together, and what is made of the ratios of two sides that took turns."""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

import pytest

from bench import rates, report
from bench.sse import Answer, Event, StreamError


def answer(times: list[float], **more: Any) -> Answer:
    """One whose tokens came at these times; `more` goes into its last chunk."""
    tokens = [
        Event(str(index), json.dumps({"choices": [{"text": "x"}]}), at) for index, at in enumerate(times, start=1)
    ]
    last = {"usage": {"completion_tokens": len(times)}, **more}
    return Answer(events=[*tokens, Event("98", json.dumps(last), times[-1]), Event("99", "[DONE]", times[-1])])


def test_a_rate_is_the_same_whichever_stream_is_read_first() -> None:
    """Eight streams, a step every 0.1 s: 80 tokens/s, also where a step's tokens are read in another order each time."""
    draw = random.Random(1)
    for begins in ([0] * 8, [0, 1, 2, 3, 4, 5, 6, 7]):
        streams = [[0.1 * (begin + step) + draw.uniform(0, 1e-3) for step in range(24)] for begin in begins]
        assert rates.decoding_rate([answer(times) for times in streams], 24) == pytest.approx(80, rel=0.01)


@pytest.mark.parametrize(
    "more",
    [
        {"error": {"message": "engine lost"}},
        {"concordia": {"recoveries": [{"reason": "killed"}]}},
        {"concordia": {"migrations": [{"to_engine": "e1"}]}},
        {"usage": {"completion_tokens": 7}},
    ],
    ids=["error", "recovery", "migration", "fewer tokens"],
)
def test_an_answer_that_is_not_whole_makes_no_rate(more: dict[str, Any]) -> None:
    times = [0.1 * step for step in range(8)]
    assert rates.decoding_rate([answer(times)], 8) == pytest.approx(10)
    with pytest.raises(StreamError, match="8 tokens from one engine"):
        rates.decoding_rate([answer(times), answer(times, **more)], 8)
    torn = answer(times)
    torn.events.pop()
    with pytest.raises(StreamError, match="8 tokens from one engine"):
        rates.decoding_rate([torn], 8)


def test_streams_that_did_not_decode_together_make_no_rate() -> None:
    with pytest.raises(StreamError, match="together"):
        rates.decoding_rate([answer([0.0, 0.1, 0.2]), answer([0.2, 0.3, 0.4])], 3)


def test_being_first_counts_for_neither_side() -> None:
    """The side that is first takes 10% longer, as where it computes the prompts."""
    pairs = [(90.0, 100.0), (100.0, 90.0), (90.0, 100.0), (100.0, 90.0)]
    assert rates.order_free(pairs) == pytest.approx([1.0, 1.0])
    with pytest.raises(ValueError, match="shorter"):
        rates.order_free(pairs[:3])


def test_the_middle_is_moved_alike_by_outliers_to_either_side_and_scatters_less_than_the_median() -> None:
    usual = [0.97, 0.98, 0.99, 1.0, 1.01]
    assert rates.middle([*usual, 50.0]) == pytest.approx(0.995, abs=0.006)
    assert rates.middle([*usual, 0.02]) == pytest.approx(0.985, abs=0.006)
    assert rates.middle(usual) * rates.middle([1 / ratio for ratio in usual]) == pytest.approx(1)
    draw = random.Random(2)
    samples = [[draw.lognormvariate(0, 0.03) for _ in range(5)] for _ in range(2000)]
    scatter = {find: statistics.stdev(map(find, samples)) for find in (rates.middle, statistics.median)}
    assert scatter[rates.middle] < 0.9 * scatter[statistics.median]


def test_a_row_of_pairs_says_its_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    result = report.Report("some", report.arguments("", []))
    rates.add_pairs(result, "4 streams", [(99.0, 100.0), (101.0, 100.0), (103.0, 100.0), (101.0, 100.0)], ">= 0.98")
    (row,) = result.rows
    assert (row.value, row.baseline) == (101, 100) and row.ratio == pytest.approx(1.01, abs=1e-3)
    assert row.note == "+- 0.01"
    rates.add_pairs(result, "one ratio", [(99.0, 100.0), (101.0, 100.0)])
    assert not result.rows[1].note, "one ratio tells nothing of its error"
