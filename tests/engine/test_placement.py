"""Which slot a sequence gets."""

from __future__ import annotations

import numpy as np

from engine.arena import Slot
from engine.placement import choose_slot


def slot(index: int, tokens: list[int], *, session: str = "", busy: bool = False, last_used: int = 0) -> Slot:
    array = np.zeros(64, dtype=np.int32)
    array[: len(tokens)] = tokens
    return Slot(index, array, len(tokens), len(tokens), "t" if tokens else "", session, busy=busy, last_used=last_used)


def choose(slots: list[Slot], tokens: list[int], *, session: str = "", namespace: str = "t"):
    return choose_slot(slots, np.asarray(tokens, dtype=np.int32), namespace, session, len(tokens) - 1)


def test_none_while_all_are_busy() -> None:
    assert choose([slot(0, [1], busy=True)], [1, 2]) is None


def test_an_empty_slot_for_a_new_prompt() -> None:
    choice = choose([slot(0, [9, 9], last_used=1), slot(1, [])], [1, 2, 3])
    assert choice and (choice.target.index, choice.shared) == (1, 0)


def test_a_next_turn_continues_in_place() -> None:
    choice = choose([slot(0, []), slot(1, [1, 2, 3])], [1, 2, 3, 4])
    assert choice and choice.target is choice.source and (choice.target.index, choice.shared) == (1, 3)


def test_the_last_token_is_always_computed_again() -> None:
    choice = choose([slot(0, [1, 2, 3])], [1, 2, 3])
    assert choice and choice.shared == 2


def test_a_shared_prefix_of_another_session_is_copied() -> None:
    slots = [slot(0, [1, 2, 3, 4, 5, 6], session="a"), slot(1, [])]
    choice = choose(slots, [1, 2, 3, 4, 5, 9, 9], session="b")
    assert choice and (choice.source.index, choice.target.index, choice.shared) == (0, 1, 5)


def test_a_running_sequence_is_only_copied_from() -> None:
    choice = choose([slot(0, [1, 2, 3], busy=True), slot(1, [])], [1, 2, 3, 4])
    assert choice and (choice.source.index, choice.target.index, choice.shared) == (0, 1, 3)


def test_the_own_session_is_cut_back_in_place() -> None:
    slots = [slot(0, [1, 2, 3, 4, 5, 6], session="a"), slot(1, [])]
    choice = choose(slots, [1, 9, 9], session="a")
    assert choice and choice.target is choice.source and choice.shared == 1


def test_another_tenant_shares_nothing() -> None:
    choice = choose([slot(0, [1, 2, 3]), slot(1, [])], [1, 2, 3, 4], namespace="u")
    assert choice and (choice.target.index, choice.shared) == (1, 0)


def test_the_least_recently_used_goes_first() -> None:
    slots = [slot(0, [7], last_used=5), slot(1, [8], last_used=3), slot(2, [9], busy=True)]
    choice = choose(slots, [1, 2])
    assert choice and choice.target.index == 1
