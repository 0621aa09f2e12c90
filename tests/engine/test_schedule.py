"""What the next step does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.points import message_cuts
from engine.schedule import choose, cut_after, exact_start
from engine.sequence import Sequence
from tests.engine.driver import submit


def sequence(prompt: int, computed: int, generated: int = 0, finish: str = "") -> Sequence:
    made = Sequence.of(submit("s", [5] * (prompt + generated), prompt_count=prompt))
    made.computed, made.finish = computed, finish
    return made


def test_nothing_to_do() -> None:
    assert choose([], 0, 256).kind == "idle"
    assert choose([sequence(4, 5, generated=1, finish="stop")], 0, 256).kind == "idle"


def test_prefill_ends_at_the_next_cut_or_with_the_prompt() -> None:
    action = choose([sequence(1000, 300)], 0, 256)
    assert (action.kind, action.start, action.end) == ("prefill", 300, 512)
    assert choose([sequence(400, 300)], 0, 256).end == 400


def test_decode_takes_turns_with_prefill() -> None:
    both = [sequence(10, 10, generated=1), sequence(1000, 0)]
    assert choose(both, 256, 256).kind == "decode"
    assert choose(both, 0, 256).kind == "prefill"


def test_short_prompts_go_first_while_they_fit_into_one_chunk() -> None:
    waiting = [sequence(10, 10, generated=1), sequence(60, 0)]
    assert choose(waiting, 180, 256).kind == "prefill"
    assert choose(waiting, 200, 256).kind == "decode"


def test_forced_and_sampled_rows_share_a_step() -> None:
    rows = [sequence(10, 10, generated=1), sequence(10, 12, generated=9)]
    assert choose(rows, 0, 256).rows == tuple(rows)


def test_a_finished_sequence_still_feeds_its_last_token() -> None:
    assert choose([sequence(10, 10, generated=1, finish="length")], 0, 256).kind == "decode"


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 512))
def test_cuts_do_not_depend_on_where_a_prefill_began(start: int, more: int, chunk: int) -> None:
    prompt = start + more
    cuts = set()
    at = start
    while at < prompt:
        at = cut_after(at, prompt, chunk)
        cuts.add(at)
    assert cuts == {c for c in range(chunk, prompt, chunk) if c > start} | {prompt}


@pytest.mark.parametrize(
    ("position", "prefill_start", "prompt", "expected"),
    [
        (0, 0, 600, 0),
        (300, 0, 600, 256),
        (512, 0, 600, 512),
        (599, 0, 600, 512),
        (600, 0, 600, 512),
        (512, 0, 512, 256),
        (330, 300, 600, 300),
        (200, 300, 600, 200),
        (520, 300, 600, 512),
    ],
)
def test_a_recovery_begins_at_a_cut_of_the_first_time(
    position: int, prefill_start: int, prompt: int, expected: int
) -> None:
    assert exact_start(position, prefill_start, prompt, 256) == expected


def test_prefill_is_also_cut_where_a_point_is_wanted() -> None:
    assert cut_after(0, 1000, 256, (100, 300)) == 100
    assert cut_after(100, 1000, 256, (100, 300)) == 256
    assert cut_after(256, 1000, 256, (100, 300)) == 300
    assert exact_start(290, 0, 1000, 256, (100, 300)) == 256
    assert exact_start(310, 0, 1000, 256, (100, 300)) == 300


def test_messages_cut_once_a_chunk_and_never_at_the_prompts_end() -> None:
    prompt = [9] * 100
    for at in (10, 20, 64, 70, 99):
        prompt[at - 1] = 2
    assert message_cuts([*prompt, 2], {2}, 64) == [20, 99]
    assert message_cuts(prompt, set(), 64) == []
