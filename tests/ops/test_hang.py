"""Verdicts on silent engines: what is a hang, and what is only slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from ops.hang import HangJudge, Look, look_at


def judge(**bounds: float) -> HangJudge:
    return HangJudge(**{"floor_ms": 500, "stopped_ms": 100, "spin_ms": 5000, "interval_ms": 50, **bounds})


def verdicts(judging: HangJudge, seconds: float, *, state: str = "S", cpu: float = 0.0, **look: float) -> list[str]:
    """Look every 50 ms at an engine that has been silent since 0; `cpu` is its share of a processor."""
    found = []
    for count in range(1, int(seconds / 0.05)):
        at_s = count * 0.05
        busy_ms = at_s * 1000 * cpu
        seen = Look(at_s, at_s * 1000, look.get("bound_ms", 0.0), state, bool(look.get("runnable")), busy_ms, busy_ms)
        hung = judging.judge(seen)
        found.append(hung.cause if hung else "")
    return found


def first(found: list[str]) -> tuple[str, float]:
    index = next((index for index, cause in enumerate(found) if cause), None)
    return ("", 0.0) if index is None else (found[index], (index + 1) * 0.05)


def test_stopped_engine_is_hung_almost_at_once_whatever_its_bound() -> None:
    cause, after_s = first(verdicts(judge(), 2, state="T", bound_ms=20_000))
    assert (cause, after_s) == ("stopped", pytest.approx(0.1))


def test_blocked_engine_is_hung_after_the_floor() -> None:
    cause, after_s = first(verdicts(judge(), 2))
    assert cause == "blocked"
    assert 0.5 < after_s < 0.7


def test_bound_that_it_learned_is_kept() -> None:
    cause, after_s = first(verdicts(judge(), 4, bound_ms=2000))
    assert cause == "blocked"
    assert 2.0 < after_s < 2.2


def test_starved_engine_is_slow_and_never_hung() -> None:
    judging = judge()
    assert first(verdicts(judging, 120, state="R", runnable=True)) == ("", 0.0)
    assert judging.slow() == "starved"
    assert judging.slow() == "", "told once a silence"


def test_long_step_is_slow_until_it_has_burned_the_limit() -> None:
    judging = judge()
    assert first(verdicts(judging, 4, state="R", runnable=True, cpu=1.0)) == ("", 0.0)
    assert judging.slow() == "computing"
    cause, after_s = first(verdicts(judge(), 12, state="R", runnable=True, cpu=1.0))
    assert cause == "spinning"
    assert after_s > 5.0


def test_main_thread_that_waits_for_busy_workers_is_not_hung() -> None:
    assert first(verdicts(judge(), 3, state="S", cpu=0.9))[0] == ""


def test_disk_has_ten_times_the_time() -> None:
    cause, after_s = first(verdicts(judge(), 20, state="D"))
    assert cause == "disk"
    assert after_s > 5.0


def test_beat_forgets_what_was_held_against_it() -> None:
    judging = judge()
    assert first(verdicts(judging, 0.5)) == ("", 0.0)
    judging.beat()
    assert first(verdicts(judging, 0.5)) == ("", 0.0)


def test_time_in_which_the_watcher_itself_stood_still_does_not_count() -> None:
    judging = judge()
    judging.judge(Look(0.1, 100, 0, "S", False, 0, 0))
    assert judging.judge(Look(60.1, 60_100, 0, "S", False, 0, 0)) is None


def test_stop_is_counted_in_time_that_the_watcher_saw() -> None:
    judging = judge(stopped_ms=2000)
    judging.judge(Look(0.1, 100, 0, "T", False, 0, 0))
    assert judging.judge(Look(60.1, 60_100, 0, "T", False, 0, 0)) is None
    assert first(verdicts(judge(stopped_ms=2000), 4, state="T")) == ("stopped", pytest.approx(2.0))


def test_engine_that_is_resumed_after_its_watcher_was_is_not_hung() -> None:
    judging = judge()
    judging.watcher_stood_still(60.0)
    looks = [Look(60.0 + 0.05 * count, 60_000 + 50 * count, 0, "T", False, 0, 0) for count in range(120)]
    found = [judging.judge(look) for look in looks]
    assert next(look.at_s for look, hung in zip(looks, found, strict=True) if hung) == pytest.approx(65.0, abs=0.1)


def test_look_tells_running_sleeping_and_stopped_apart() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until(lambda: look_at(busy.pid, 0, 0).state == "R" and look_at(busy.pid, 0, 0).busy_ms > 0)
        os.kill(busy.pid, signal.SIGSTOP)
        until(lambda: look_at(busy.pid, 0, 0).state == "T")
    finally:
        busy.kill()
        busy.wait()
    assert look_at(busy.pid, 0, 0).runnable, "a process that is gone is not judged by its silence"


def until(probe) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 20
    while not probe():
        assert time.monotonic() < deadline
        time.sleep(0.01)
