"""Where a stream goes: to its state, else to the least loaded engine that isn't a spare."""

from __future__ import annotations

from dataclasses import replace

from engine.messages import pack_tokens
from gateway.placement import EngineView, choose, common_prefix

IDLE = EngineView("e0", load=0, slots=8, resident_count=0, resident_prefix=0)


def test_no_engine_is_no_choice() -> None:
    assert choose([], 1) is None


def test_only_engine_serves_even_as_a_spare() -> None:
    assert choose([IDLE], 1) == "e0"


def test_least_loaded_without_spares_first_name_when_equal() -> None:
    views = [replace(IDLE, load=2), replace(IDLE, engine="e1", load=1), replace(IDLE, engine="e2", load=1)]
    assert choose(views, 0) == "e1"


def test_spare_is_left_idle_while_the_other_is_loaded() -> None:
    assert choose([replace(IDLE, load=7), replace(IDLE, engine="e1")], 1) == "e0"


def test_engine_in_use_stays_the_active_one_after_a_failover() -> None:
    assert choose([IDLE, replace(IDLE, engine="e1", resident_count=3)], 1) == "e1"


def test_session_goes_where_it_is_even_to_a_spare_under_load() -> None:
    views = [replace(IDLE, load=1), replace(IDLE, engine="e1", load=9, resident_prefix=400, holds_session=True)]
    assert choose(views, 1) == "e1"


def test_longest_prefix_wins_unless_its_engine_is_full_or_it_is_short() -> None:
    other = replace(IDLE, load=0, resident_prefix=100)
    assert choose([other, replace(IDLE, engine="e1", load=3, resident_prefix=200)], 0) == "e1"
    assert choose([other, replace(IDLE, engine="e1", load=8, resident_prefix=200)], 0) == "e0"
    assert choose([IDLE, replace(IDLE, engine="e1", load=3, resident_prefix=8)], 0) == "e0"


def test_common_prefix_counts_tokens() -> None:
    a, b = pack_tokens([1, 2, 3, 4]), pack_tokens([1, 2, 4])
    assert (common_prefix(a, b), common_prefix(a, a), common_prefix(a, b""), common_prefix(b, pack_tokens([2]))) == (
        2,
        4,
        0,
        0,
    )
