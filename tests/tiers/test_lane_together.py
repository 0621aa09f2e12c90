"""Room for several records at once, as a device that fills them in one launch asks for it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tiers.sample import BLOCK, LAYOUT, ROOT, World, append_rows, rows, sequence, some_tokens
from tiers.lane import LaneWriter
from tiers.lane_reader import LaneReader
from tiers.shares import LaneShares


def begun(lane: LaneWriter, names: str) -> None:
    for name in names:
        lane.append_open(sequence(name), 1, ROOT, LAYOUT, BLOCK, "default", "chat", name, some_tokens(0))


def never() -> None:
    raise AssertionError("nothing was given to anybody else")


def test_records_reserved_together_are_filled_first_and_committed_in_order(world: World) -> None:
    lane = world.lane()
    begun(lane, "abc")
    places = lane.reserve_rows_together(LAYOUT, [(2, ""), (1, ""), (3, "")], never)
    for place, count in zip(places, (2, 1, 3), strict=True):
        place.frame[:] = rows(0, some_tokens(count))
    reader = LaneReader.open(lane.path)
    assert len(reader.records(0)) == 3, "none is seen before its commit"
    numbers = [
        place.commit(sequence(name), 1, 0, some_tokens(place.token_count))
        for name, place in zip("abc", places, strict=True)
    ]
    assert numbers == [3, 4, 5]
    for header, count in zip(reader.records(3), (2, 1, 3), strict=True):
        assert np.array_equal(reader.frame(header), rows(0, some_tokens(count)))
    append_rows(lane, "a", 2, some_tokens(1))
    assert len(reader.records(0)) == 7


def test_one_that_is_left_out_leaves_a_gap_and_no_more(world: World) -> None:
    lane = world.lane()
    begun(lane, "ab")
    first, second = lane.reserve_rows_together(LAYOUT, [(2, ""), (2, "")], never)
    second.frame[:] = rows(0, some_tokens(2))
    second.commit(sequence("b"), 1, 0, some_tokens(2))
    assert not lane.holds(first)
    with pytest.raises(AssertionError, match="dropped"):
        first.commit(sequence("a"), 1, 0, some_tokens(2))
    append_rows(lane, "a", 0, some_tokens(2))
    reader = LaneReader.open(lane.path)
    assert [bytes(header.sequence) for header in reader.records(2)] == [sequence("b"), sequence("a")]
    lane.close()
    reopened = world.lane()
    assert reopened.head == 4, "a writer after it goes on behind the last record"


def test_whoever_writes_into_them_is_told_before_they_are_somebody_elses(world: World) -> None:
    lane = world.lane()
    begun(lane, "ab")
    told: list[int] = []
    first, second = lane.reserve_rows_together(LAYOUT, [(2, ""), (2, "")], lambda: told.append(lane.head))
    first.commit(sequence("a"), 1, 0, some_tokens(2))
    assert not told and lane.holds(second)
    append_rows(lane, "a", 2, some_tokens(1))
    assert told == [3] and not lane.holds(second)
    append_rows(lane, "a", 3, some_tokens(1))
    assert told == [3], "told once"
    lane.reserve_rows_together(LAYOUT, [(1, "")], lambda: told.append(-1))
    lane.close()
    assert told == [3, -1], "and when the lane is let go of"


def test_there_are_as_many_as_there_is_room_for(world: World) -> None:
    lane = world.lane()
    begun(lane, "a")

    def dropped() -> None:
        """They are."""

    count = world.settings.lane_record_count
    places = lane.reserve_rows_together(LAYOUT, [(1, "")] * (2 * count), dropped)
    assert len(places) == count - 2, "the directory keeps one entry free"
    huge = lane.lane_bytes // LAYOUT.token_bytes
    assert len(lane.reserve_rows_together(LAYOUT, [(huge // 2, ""), (1, ""), (huge, ""), (1, "")], dropped)) == 2
    assert len(lane.reserve_rows_together(LAYOUT, [(2 * huge, "")], dropped)) == 0


def test_a_tenants_share_counts_what_is_reserved_before(world: World) -> None:
    lane = world.lane()
    begun(lane, "a")
    lane.shares = LaneShares(lambda namespace: 3 * 4096 if namespace == "small" else 0)
    size = 2048 // LAYOUT.token_bytes
    wanted = [(size, "large"), *[(size, "small")] * 20]
    places = lane.reserve_rows_together(LAYOUT, wanted, never)
    assert 1 < len(places) < 12
    used = sum(len(place.frame) for place in places if place.namespace == "small")
    assert used <= 3 * 4096
