"""Who is not heard, and who only seems so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tiers import heartbeat
from tiers.heartbeat import Listener


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def listener(tmp_path: Path, clock: Clock) -> Listener:
    return Listener(tmp_path / "x.beat", 1.0, clock)


def listens(listener: Listener, clock: Clock, seconds: int) -> float:
    for _ in range(seconds):
        clock.now_s += 1
        listener.listen()
    return listener.silent_s


def test_beat_tells_who_and_when(tmp_path: Path) -> None:
    heartbeat.beat(tmp_path / "x.beat")
    beat = heartbeat.read(tmp_path / "x.beat")
    assert beat is not None
    assert beat.pid == os.getpid()
    assert 0 <= beat.age_ms < 60_000
    (tmp_path / "x.beat").write_bytes(b"short")
    assert heartbeat.read(tmp_path / "x.beat") is None


def test_silence_is_counted_from_the_last_beat(tmp_path: Path, listener: Listener, clock: Clock) -> None:
    assert listens(listener, clock, 9) == 0, "who was never heard is not missed"
    heartbeat.beat(tmp_path / "x.beat")
    assert listens(listener, clock, 5) == 4
    heartbeat.beat(tmp_path / "x.beat")
    assert listens(listener, clock, 1) == 0
    (tmp_path / "x.beat").unlink()
    assert listens(listener, clock, 3) == 3


def test_listener_that_stood_still_itself_misses_nobody(tmp_path: Path, listener: Listener, clock: Clock) -> None:
    heartbeat.beat(tmp_path / "x.beat")
    listens(listener, clock, 1)
    clock.now_s += 3600
    assert listener.listen() == 2.0
