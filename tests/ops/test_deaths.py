"""Of which deaths an engine is innocent, and what /proc says of a process that dies."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from ops.deaths import OOM_READINGS, OomKills, from_outside, look_at_end


@pytest.mark.parametrize(
    ("reason", "cause", "exit_code", "outside"),
    [
        ("killed", "", -signal.SIGKILL, True),
        ("killed", "", -signal.SIGTERM, True),
        ("killed", "", -signal.SIGSEGV, False),
        ("killed", "", -signal.SIGABRT, False),
        ("killed", "", 1, False),
        ("killed", "", None, False),
        ("device error", "", 70, False),
        ("exited", "", 0, True),
        ("hung", "blocked", -signal.SIGKILL, False),
        ("hung", "stopped", -signal.SIGKILL, True),
    ],
)
def test_signals_that_nobody_sends_himself_come_from_outside(
    reason: str, cause: str, exit_code: int | None, outside: bool
) -> None:
    assert from_outside(reason, cause, exit_code, fenced=reason == "hung", out_of_memory=False) == outside


def test_fence_and_kernel_short_of_memory_are_not_outside() -> None:
    assert not from_outside("killed", "", -signal.SIGKILL, fenced=True, out_of_memory=False)
    assert not from_outside("killed", "", -signal.SIGKILL, fenced=False, out_of_memory=True)


def test_oom_kill_counts_for_some_seconds() -> None:
    now, count = [0.0], [7]
    kills = OomKills(lambda: count[0], lambda: now[0])
    assert not kills.lately
    count[0] = 8
    assert kills.lately
    for _ in range(OOM_READINGS):
        assert kills.lately
        now[0] += 1.0
        kills.note()
        kills.note()
    assert not kills.lately


def test_unknown_count_is_no_proof_that_nobody_was_killed() -> None:
    assert OomKills(lambda: None).lately


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_dead_process_shows_what_it_died_of_until_it_is_reaped(number: signal.Signals) -> None:
    process = subprocess.Popen(["sleep", "60"])
    assert look_at_end(process.pid) == (True, None)
    process.send_signal(number)
    deadline = time.monotonic() + 20.0
    while look_at_end(process.pid)[0]:
        assert time.monotonic() < deadline
    assert look_at_end(process.pid) == (False, -number)
    process.wait()
    assert look_at_end(process.pid) == (False, None)
