from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.lane_format import PointKind
from tiers.thinning import MESSAGE, RATIO, kept_points

ENTRIES = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 5)), max_size=120)


def test_message_is_the_kind_that_lanes_write() -> None:
    assert PointKind.MESSAGE == MESSAGE


def test_nothing_to_keep() -> None:
    assert kept_points([], 100) == set()
    assert kept_points([(101, 1)], 100) == set()


def test_the_tip_and_one_before_it_are_kept() -> None:
    assert kept_points([(100, 4), (99, 1), (98, 1)], 100) >= {100, 99}


def test_distances_grow_geometrically() -> None:
    assert kept_points([(p, 1) for p in range(0, 1024)], 1024) == {
        1024 - d for d in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    }


def test_more_message_boundaries_stay() -> None:
    plain = kept_points([(p, 1) for p in range(0, 1000, 100)], 1000)
    assert len(kept_points([(p, 2) for p in range(0, 1000, 100)], 1000)) > len(plain)


@given(ENTRIES, st.integers(0, 5000))
def test_few_are_kept_and_always_what_a_rollback_needs(entries: list[tuple[int, int]], tip: int) -> None:
    kept = kept_points(entries, tip)
    usable = {position for position, _ in entries if position <= tip}
    assert kept <= usable and len(kept) <= 50
    if any(position < tip for position in usable):
        assert max(p for p in usable if p < tip) in kept and min(usable) in kept
    assert (tip in kept) == (tip in usable)


@pytest.mark.process
@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(0, 3000))
def test_thinning_again_and_again_still_covers_every_rollback(steps: list[int], back: int) -> None:
    """As the tip moves on, with what was dropped gone for good: a point lies within RATIO times the distance rolled back."""
    have: set[tuple[int, int]] = set()
    tip = 0
    for step in steps:
        have.add((tip, 1))
        tip += step
        kept = kept_points(have, tip)
        have = {entry for entry in have if entry[0] in kept}
    target = tip - min(back, tip)
    distance = tip - max(position for position, _ in have if position <= target)
    assert distance <= max(RATIO * (tip - target), 60 + (tip - target))
