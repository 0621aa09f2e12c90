"""Records that a second thread publishes: seen in order and whole, dropped if that fails, never seen if the writer dies before."""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial

import numpy as np
import pytest

from tests.tiers.sample import LAYOUT, World, append_rows, rows, sequence, some_tokens
from tiers import failpoints
from tiers import lane as lane_file
from tiers.behind import Behind
from tiers.errors import LaneFull
from tiers.lane import LaneReader, LaneWriter, RecordType

LARGE = 300  # tokens: 16,800 bytes of rows


def with_thread(world: World) -> LaneWriter:
    """A writer that leaves large records to its thread, on a machine with one core as well."""
    lane = world.lane()
    lane._behind = lane._behind or Behind()
    return lane


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_file, "BEHIND_BYTES", 10_000)


def reader_of(world: World) -> LaneReader:
    return LaneReader.open(world.paths.lane("e0"), writable_tail=True)


def test_large_and_small_records_are_published_in_order(world: World) -> None:
    lane, keeper = with_thread(world), reader_of(world)
    counts = [LARGE, 1, LARGE, LARGE + 9, 3]
    for index, count in enumerate(counts):
        assert append_rows(lane, "a", index, some_tokens(count, index)) == index
    assert lane.append_close(sequence("a"), 1, 9) == len(counts)
    found = keeper.records(0)
    assert [header.type for header in found] == [*[RecordType.ROWS] * len(counts), RecordType.CLOSE]
    for index, count in enumerate(counts):
        assert np.array_equal(keeper.frame(found[index]), rows(index, some_tokens(count, index)))


def test_settle_waits_for_the_last_one(world: World) -> None:
    lane, keeper = with_thread(world), reader_of(world)
    for lap in range(200):
        append_rows(lane, "a", lap, some_tokens(LARGE, lap))
        lane.settle()
        (header,) = keeper.records(keeper.tail)
        assert np.array_equal(keeper.frame(header), rows(lap, some_tokens(LARGE, lap)))
        keeper.advance_tail(lane.head)


def test_room_is_known_while_a_record_is_being_published(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entry isn't there yet, and a stale lap's lies in its place."""
    lane, keeper, may_go_on = with_thread(world), reader_of(world), threading.Event()
    for lap in range(world.settings.lane_record_count):
        append_rows(lane, "a", lap, some_tokens(1))
        keeper.advance_tail(lane.head)
    publish = lane._publish

    def late(*what: object) -> None:
        may_go_on.wait(60)
        publish(*what)  # type: ignore[arg-type]

    monkeypatch.setattr(lane, "_publish", late)
    append_rows(lane, "a", 0, some_tokens(LARGE))
    assert keeper.records(keeper.tail) == []
    size = lane_file.padded(lane_file.tokens_bytes(LARGE) + LAYOUT.frame_bytes(LARGE))
    assert lane.free_bytes == lane.lane_bytes - size
    lane.reserve_rows(LAYOUT, LARGE)  # the next one may be filled meanwhile
    with pytest.raises(LaneFull):
        lane.reserve_rows(LAYOUT, 3 * LARGE)
    may_go_on.set()
    lane.settle()
    assert len(keeper.records(keeper.tail)) == 1


def test_record_that_can_not_be_published_is_dropped_and_said(world: World) -> None:
    lane, keeper = with_thread(world), reader_of(world)
    append_rows(lane, "a", 0, some_tokens(LARGE))
    lane.settle()
    failpoints.arm("append.commit_word.before:1:EIO")
    append_rows(lane, "a", 1, some_tokens(LARGE, 1))
    with pytest.raises(OSError, match="Input/output error"):
        append_rows(lane, "a", 2, some_tokens(LARGE, 2))
    assert lane.head == 1
    assert append_rows(lane, "a", 1, some_tokens(LARGE, 3)) == 1
    lane.settle()
    assert [header.token_start for header in keeper.records(0)] == [0, 1]
    assert np.array_equal(keeper.frame(keeper.records(0)[1]), rows(1, some_tokens(LARGE, 3)))


@pytest.mark.parametrize(("place", "left"), [("append.commit_word.before", 1), ("append.commit_word.after", 2)])
def test_killed_in_the_thread_leaves_only_whole_records(place: str, left: int, world: World) -> None:
    child = os.fork()
    if child == 0:
        try:
            lane = with_thread(world)
            append_rows(lane, "a", 0, some_tokens(LARGE, 0))
            lane.settle()
            failpoints.arm(place)
            append_rows(lane, "a", 1, some_tokens(LARGE, 1))
            append_rows(lane, "a", 2, some_tokens(LARGE, 2))
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    keeper = reader_of(world)
    found = keeper.records(0)
    assert len(found) == left
    assert all(np.array_equal(keeper.frame(h), rows(n, some_tokens(LARGE, n))) for n, h in enumerate(found))
    lane = with_thread(world)
    assert append_rows(lane, "a", left, some_tokens(LARGE, left)) == left
    lane.settle()
    assert len(keeper.records(0)) == left + 1


def test_work_is_done_once_and_in_order_whoever_does_it() -> None:
    """The two threads meet at every instruction, sooner or later."""
    behind, done, by, interval = Behind(), list[int](), set[str](), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(lap: int) -> None:
        done.append(lap)
        by.add(threading.current_thread().name)

    try:
        for lap in range(20_000):
            behind.start(partial(work, lap))
            for _ in range(lap % 7):
                pass
            assert behind.wait() is None
            assert len(done) == lap + 1
    finally:
        sys.setswitchinterval(interval)
    behind.end()
    assert done == list(range(20_000)) and len(by) == 2


def test_closing_waits_for_what_is_being_published(world: World) -> None:
    lane = with_thread(world)
    append_rows(lane, "a", 0, some_tokens(LARGE))
    lane.close()
    assert len(reader_of(world).records(0)) == 1
