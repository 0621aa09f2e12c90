"""Records that two threads fill: seen in order and whole, dropped if that fails, never seen if the writer dies before."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from itertools import cycle, repeat
from typing import Any

import numpy as np
import pytest

from tests.tiers.sample import LAYOUT, World, rows, sequence, some_tokens
from tiers import failpoints
from tiers import lane as lane_file
from tiers.behind import LINE_LIMIT, SAMPLES, TRY_LIMIT, Behind, Pace
from tiers.errors import LaneFull
from tiers.lane import LaneWriter
from tiers.lane_format import RecordType
from tiers.lane_reader import LaneReader

LARGE = 300  # tokens: 16,800 bytes of rows


def with_thread(world: World) -> LaneWriter:
    """A writer that leaves large records to its thread, on a machine with one core as well."""
    lane = world.lane()
    lane._behind = lane._behind or Behind()
    return lane


def append(lane: LaneWriter, start: int, tokens: np.ndarray, namespace: str = "") -> int:
    """Rows of the sequence `a`."""

    def fill(frame: np.ndarray) -> None:
        np.copyto(frame, rows(start, tokens))

    return lane.append_rows(LAYOUT, sequence("a"), 1, start, tokens, fill, namespace)


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_file, "SHARED_BYTES", 10_000)


def reader_of(world: World) -> LaneReader:
    return LaneReader.open(world.paths.lane("e0"), writable_tail=True)


def test_large_and_small_records_are_published_in_order(world: World) -> None:
    lane, keeper = with_thread(world), reader_of(world)
    counts = [LARGE, 1, LARGE, LARGE + 9, 3]
    for index, count in enumerate(counts):
        assert append(lane, index, some_tokens(count, index)) == index
    assert lane.append_close(sequence("a"), 1, 9) == len(counts)
    found = keeper.records(0)
    assert [header.type for header in found] == [*[RecordType.ROWS] * len(counts), RecordType.CLOSE]
    for index, count in enumerate(counts):
        assert np.array_equal(keeper.frame(found[index]), rows(index, some_tokens(count, index)))


def test_settle_waits_for_the_last_one(world: World) -> None:
    lane, keeper = with_thread(world), reader_of(world)
    for lap in range(200):
        append(lane, lap, some_tokens(LARGE, lap))
        lane.settle()
        (header,) = keeper.records(keeper.tail)
        assert np.array_equal(keeper.frame(header), rows(lap, some_tokens(LARGE, lap)))
        keeper.advance_tail(lane.head)


def test_room_is_known_while_a_record_is_being_published(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entry isn't there yet, and a stale lap's lies in its place."""
    lane, keeper, may_go_on = with_thread(world), reader_of(world), threading.Event()
    for lap in range(world.settings.lane_record_count):
        append(lane, lap, some_tokens(1))
        keeper.advance_tail(lane.head)
    publish = lane._publish

    def late(*what: object) -> None:
        may_go_on.wait(60)
        publish(*what)  # type: ignore[arg-type]

    monkeypatch.setattr(lane, "_publish", late)
    append(lane, 0, some_tokens(LARGE))
    assert keeper.records(keeper.tail) == []
    size = lane_file.padded(lane_file.tokens_bytes(LARGE) + LAYOUT.frame_bytes(LARGE))
    assert lane.free_bytes == lane.lane_bytes - size
    lane.reserve_rows(LAYOUT, LARGE)  # the next one may be filled meanwhile
    with pytest.raises(LaneFull):
        lane.reserve_rows(LAYOUT, 3 * LARGE)
    may_go_on.set()
    lane.settle()
    assert len(keeper.records(keeper.tail)) == 1


@pytest.mark.parametrize("large", [True, False])
def test_record_that_can_not_be_published_is_dropped_with_those_after_it_and_said(large: bool, world: World) -> None:
    lane, keeper, count = with_thread(world), reader_of(world), LARGE if large else 1
    append(lane, 0, some_tokens(count), "one")
    lane.settle()
    used = dict(lane.shares.used)
    failpoints.arm("append.commit_word.before:1:EIO")
    with pytest.raises(OSError, match="Input/output error"):
        for start in (1, 2):
            append(lane, start, some_tokens(count, start), "one")
        lane.settle()
    assert lane.head == 1 and lane.shares.used == used
    assert append(lane, 1, some_tokens(count, 3)) == 1
    lane.settle()
    assert [header.token_start for header in keeper.records(0)] == [0, 1]
    assert np.array_equal(keeper.frame(keeper.records(0)[1]), rows(1, some_tokens(count, 3)))


def test_error_behind_the_commit_word_leaves_the_record_where_readers_saw_it(world: World) -> None:
    lane, keeper = with_thread(world), reader_of(world)
    failpoints.arm("append.commit_word.after:1:EIO")
    with pytest.raises(OSError, match="Input/output error"):
        append(lane, 0, some_tokens(LARGE, 0))
        lane.settle()
    assert lane.head == 1
    append(lane, 1, some_tokens(LARGE, 1))
    lane.settle()
    assert [header.token_start for header in keeper.records(0)] == [0, 1]


@pytest.mark.parametrize(("place", "left"), [("append.commit_word.before", 1), ("append.commit_word.after", 2)])
def test_killed_in_the_thread_leaves_only_whole_records(place: str, left: int, world: World) -> None:
    child = os.fork()
    if child == 0:
        try:
            lane = with_thread(world)
            append(lane, 0, some_tokens(LARGE, 0))
            lane.settle()
            failpoints.arm(place)
            append(lane, 1, some_tokens(LARGE, 1))
            append(lane, 2, some_tokens(LARGE, 2))
            lane.settle()
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    keeper = reader_of(world)
    found = keeper.records(0)
    assert len(found) == left
    assert all(np.array_equal(keeper.frame(h), rows(n, some_tokens(LARGE, n))) for n, h in enumerate(found))
    lane = with_thread(world)
    assert append(lane, left, some_tokens(LARGE, left)) == left
    lane.settle()
    assert len(keeper.records(0)) == left + 1


def test_records_are_prepared_by_both_and_published_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two threads meet at every instruction, sooner or later."""
    monkeypatch.setattr(Pace, "took", lambda pace, seconds: None)  # nothing is too small or too slow to be shared
    behind, done, by, interval = Behind(), list[int](), set[str](), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def prepare(lap: int) -> int:
        by.add(threading.current_thread().name)
        for _ in range(lap % 7):
            pass
        return 2 * lap

    try:
        for lap in range(20_000):
            behind.share(1000, partial(prepare, lap), done.append)
            if lap % 5 > 2:
                assert behind.wait() is None
                assert len(done) == lap + 1
    finally:
        sys.setswitchinterval(interval)
    assert behind.wait() is None
    behind.end()
    assert done == list(range(0, 40_000, 2)) and len(by) == 2


def test_one_alone_is_done_by_who_waits_for_it() -> None:
    behind, by = Behind(), list[str]()
    for lap in range(3):
        behind.share(1000, lambda: by.append(threading.current_thread().name) or 7, lambda checksum: None)
        assert len(by) == lap and behind.wait() is None
    assert set(by) == {threading.current_thread().name}


def test_after_a_burst_the_thread_is_woken_for_the_first_record() -> None:
    behind, by, done = Behind(), list[str](), threading.Event()
    for _ in range(2):
        behind.share(1000, int, lambda checksum: None)
    assert behind.wait() is None
    behind.share(1000, lambda: (by.append(threading.current_thread().name), done.set(), 7)[-1], lambda checksum: None)
    assert done.wait(60) and behind.wait() is None
    assert by == ["lane-behind"]
    behind.share(1000, lambda: by.append(threading.current_thread().name) or 7, lambda checksum: None)
    assert len(by) == 1 and behind.wait() is None, "that was no burst"
    behind.end()


def test_more_than_a_few_wait_for_the_thread() -> None:
    """It stands in the first one: what comes after it is prepared, but not published, and past the limit its giver waits."""
    behind, done, in_it, may_go_on = Behind(), list[int](), threading.Event(), threading.Event()

    def slow() -> int:
        in_it.set()
        may_go_on.wait(60)
        return 0

    behind.share(1000, slow, done.append)
    behind._wake()
    assert in_it.wait(60)
    for number in range(1, LINE_LIMIT):
        behind.share(1000, partial(int, number), done.append)
    assert not done and len(behind._line) == LINE_LIMIT
    threading.Timer(0.05, may_go_on.set).start()
    behind.share(1000, partial(int, LINE_LIMIT), done.append)
    assert done == list(range(LINE_LIMIT)) and behind.wait() is None
    assert done == list(range(LINE_LIMIT + 1))
    behind.end()


def test_a_writer_that_works_alone_shares_nothing() -> None:
    behind, done, by = Behind(), list[int](), set[str]()
    behind._pace.is_alone = True
    for count in (1, 2, 3):
        behind.share(1000, lambda: by.add(threading.current_thread().name) or 1, done.append)
        assert len(done) == count
    assert behind.wait() is None and by == {threading.current_thread().name} and not behind._is_started


def bursts(pace: Pace, shared: Iterator[float], alone: Iterator[float], count: int) -> list[bool]:
    """Which of `count` bursts were done alone, when they take these times."""
    ways = []
    for _ in range(count):
        ways.append(pace.is_alone)
        pace.took(next(alone if pace.is_alone else shared))
    return ways


def test_the_faster_way_is_taken_and_the_other_one_tried_ever_more_seldom() -> None:
    for shared, alone in ((1.0, 2.0), (2.0, 1.0)):
        ways = bursts(Pace(), repeat(shared), repeat(alone), 2000)
        slower = [at for at, way in enumerate(ways) if way == (alone > shared)]
        assert len(slower) < 40, "of all bursts"
        assert sum(way == (alone > shared) for way in ways[1000:]) <= 1000 // TRY_LIMIT + 1


def test_one_burst_that_was_hindered_changes_nothing() -> None:
    noisy = cycle([1.0, 1.0, 1.0, 1.0, 50.0])
    ways = bursts(Pace(), noisy, repeat(2.0), 500)
    assert sum(ways) < 30


def test_a_core_that_comes_and_goes_is_noticed() -> None:
    pace = Pace()
    bursts(pace, repeat(5.0), repeat(2.0), 100)
    assert pace._faster_alone
    bursts(pace, repeat(1.0), repeat(2.0), SAMPLES * 2 * TRY_LIMIT)
    assert not pace._faster_alone
    bursts(pace, repeat(5.0), repeat(2.0), SAMPLES * 2 * TRY_LIMIT)
    assert pace._faster_alone


def test_what_came_before_a_failure_is_published() -> None:
    behind, done, in_it, may_go_on = Behind(), list[int](), threading.Event(), threading.Event()

    def slow() -> int:
        in_it.set()
        may_go_on.wait(60)
        return 7

    behind.share(1000, slow, done.append)
    behind._wake()
    assert in_it.wait(60)
    behind.share(1000, int, done.append)
    behind.share(1000, lambda: 1 // 0, done.append)  # by this thread, while the other one is in the first
    behind.share(1000, int, done.append)
    assert not done and not behind.has_failed
    may_go_on.set()
    assert isinstance(behind.wait(), ZeroDivisionError) and done == [7, 0]
    behind.end()


@pytest.mark.parametrize("where", ["prepare", "publish"])
def test_what_comes_after_a_failure_is_not_published(where: str) -> None:
    behind, done = Behind(), list[int]()

    def fail(*_: int) -> Any:
        raise ZeroDivisionError

    behind.share(1000, fail if where == "prepare" else int, fail if where == "publish" else done.append)
    behind.share(1000, int, done.append)
    assert isinstance(behind.wait(), ZeroDivisionError) and not done
    behind.share(1000, int, done.append)
    assert behind.wait() is None and done == [0]
    behind.end()


def test_closing_waits_for_what_is_being_published(world: World) -> None:
    lane = with_thread(world)
    append(lane, 0, some_tokens(LARGE))
    lane.close()
    assert len(reader_of(world).records(0)) == 1
