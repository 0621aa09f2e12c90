"""From where a sequence goes on, by what is held where."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plan import Kinds, Plan, Resident, Stored, make_plan
from engine.restore import Speeds, worth_restoring
from tiers.layout import ALL_GROUPS
from tiers.prefix import Extent, PointRef

BLOCK, WINDOW = 32, 48


def needed_from(window: int, position: int) -> int:
    return max(0, min(position + 1 - WINDOW, position // BLOCK * BLOCK)) if window else 0


APPEND = Kinds((), needed_from, recurrent=False)
WINDOWED = Kinds((0b10,), needed_from, recurrent=False)
RECURRENT = Kinds((), needed_from, recurrent=True)


def extent(start: int, end: int, groups: int = ALL_GROUPS) -> Extent:
    return Extent("disk", start, end, 0, end - start, end - start, bytes(16), groups)


def stored(end: int, *, points: tuple[int, ...] = (), without_window: tuple[int, ...] = ()) -> Stored:
    """Blocks up to `end`, those that begin at `without_window` without their window rows."""
    starts = range(0, end, BLOCK)
    blocks = [extent(at, min(end, at + BLOCK), 0b01 if at in without_window else ALL_GROUPS) for at in starts]
    return Stored(blocks, [PointRef(at, "disk", 1, bytes(16)) for at in points])


def plan(kinds: Kinds, resident: Resident, held: Stored, settle: Any = lambda at: at) -> Plan:
    return make_plan(kinds, resident, held, settle)


def test_rows_alone_serve_any_position() -> None:
    assert plan(APPEND, Resident(), Stored()).goal == 0
    assert plan(APPEND, Resident(70), Stored()).goal == 70
    made = plan(APPEND, Resident(70), Stored([extent(70, 96)]))
    assert (made.goal, made.device, made.from_tiers) == (96, 70, True)


def test_a_window_on_the_device_needs_no_tier() -> None:
    made = plan(WINDOWED, Resident(300, (200,)), Stored())
    assert (made.goal, made.from_tiers, made.reason) == (300, False, "")


def test_a_window_that_has_moved_on_is_read_again() -> None:
    made = plan(WINDOWED, Resident(300, (290,)), stored(320))
    assert made.goal == 320 and made.firsts == (needed_from(1, 320),)
    made = plan(WINDOWED, Resident(300, (290,)), stored(300))
    assert (made.goal, made.device, made.firsts) == (300, 300, (253,)) and made.from_tiers


def test_a_window_that_is_nowhere_goes_back_to_one_that_is() -> None:
    made = plan(WINDOWED, Resident(), stored(320, without_window=(256, 288)))
    assert made.goal == 256 and made.reason == "nearest stored window is 64 tokens back"
    assert plan(WINDOWED, Resident(300, (290,)), Stored()).reason == "no stored window"


def test_a_recurrent_state_goes_on_from_its_own_position_or_a_point() -> None:
    device = Resident(300, live=300, points=frozenset({128, 256}))
    assert plan(RECURRENT, device, Stored()).goal == 300
    shorter = Resident(280, live=-1, points=frozenset({128, 256}))
    made = plan(RECURRENT, shorter, Stored())
    assert (made.goal, made.point, made.reason) == (256, None, "nearest rollback point is 24 tokens back")


def test_a_point_at_the_tip_serves_nobody_who_needs_less() -> None:
    made = plan(RECURRENT, Resident(), stored(299, points=(300,)))
    assert (made.goal, made.matched, made.reason) == (0, 299, "no rollback point")


def test_a_stored_point_beyond_the_device_is_taken_with_the_rows_before_it() -> None:
    device = Resident(200, live=200, points=frozenset({192}))
    made = plan(RECURRENT, device, stored(320, points=(192, 288)))
    assert made.goal == 288 and made.device == 200 and made.point is not None and made.point.position == 288


def test_only_positions_that_keep_the_first_times_cuts_serve_a_recovery() -> None:
    made = plan(RECURRENT, Resident(), stored(320, points=(256, 300)), settle=lambda at: at // 128 * 128)
    assert made.goal == 256 and made.reason == ""


@pytest.mark.parametrize("kinds", [APPEND, WINDOWED, RECURRENT])
def test_nothing_held_is_computed_from_the_start(kinds: Kinds) -> None:
    made = plan(kinds, Resident(), Stored())
    assert (made.goal, made.device, made.from_tiers, made.reason) == (0, 0, False, "")


def test_what_is_measured_decides_whether_restoring_pays() -> None:
    speeds = Speeds(prefill_tokens_per_s=1000.0, restore_bytes_per_s=1e9)
    assert worth_restoring(100, 99_000_000, speeds)
    assert not worth_restoring(100, 101_000_000, speeds)
    assert not worth_restoring(0, 0, speeds)
    for _ in range(40):
        speeds.saw_restore(1 << 20, (1 << 20) / 1e8)
    assert not worth_restoring(100, 20_000_000, speeds), "the disk has become slower"
    for _ in range(40):
        speeds.saw_prefill(256, 2.56)
    assert worth_restoring(100, 20_000_000, speeds), "so has computing"
    speeds.saw_prefill(8, 1e-6)  # of so few tokens a time says nothing
    assert worth_restoring(100, 20_000_000, speeds)
