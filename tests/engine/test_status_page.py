"""The page tells of life and death."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.status_page import StatusPage, start_ticks

CHILD = """
import sys, time
from pathlib import Path
from engine.status_page import StatusPage
page = StatusPage.create(Path(sys.argv[1]), 7)
page.set_state("ready")
page.count_step()
print("up", flush=True)
while True:
    page.beat()
    time.sleep(0.005)
"""


@pytest.fixture
def engine(tmp_path: Path):
    path = tmp_path / "e0.status"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout and child.stdout.readline() == "up\n"
    yield child, path
    child.kill()
    child.wait()


def test_the_page_names_its_process(engine) -> None:
    child, path = engine
    page = StatusPage.open(path)
    assert (page.pid, page.incarnation, page.state, page.step_count) == (child.pid, 7, "ready", 1)
    assert page.start_ticks == start_ticks(child.pid) != 0


def test_a_living_engine_is_not_reported_dead(engine) -> None:
    assert StatusPage.open(engine[1]).wait_for_death(0.05) is False


def test_every_watcher_is_told_of_a_death(engine) -> None:
    child, path = engine
    told: list[bool] = []
    pages = [StatusPage.open(path) for _ in range(3)]
    threads = [threading.Thread(target=lambda p=page: told.append(p.wait_for_death(20.0))) for page in pages]
    for thread in threads:
        thread.start()
    os.kill(child.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(20.0)
    assert told == [True, True, True]
    assert StatusPage.open(path).wait_for_death(0.0) is True


def test_a_stopped_engine_no_longer_beats(engine) -> None:
    child, path = engine
    page = StatusPage.open(path)
    os.kill(child.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while page.beat_age_ms() < 100 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert page.beat_age_ms() >= 100
    assert page.wait_for_death(0.0) is False


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no page")
    with pytest.raises(ValueError, match="not a status page"):
        StatusPage.open(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        StatusPage.open(tmp_path / "none")


def test_bound_is_learned_from_the_longest_silence_and_fades(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [1_000_000_000]
    monkeypatch.setattr("engine.status_page.time.monotonic_ns", lambda: now_ns[0])
    page = StatusPage.create(tmp_path / "e0.status", 1)

    def step(silence_ms: float) -> None:
        now_ns[0] += int(silence_ms * 1e6)
        page.count_step()

    now_ns[0] += 5_000_000_000  # loading
    page.set_state("ready")
    assert page.hang_bound_ms == 10_000, "first steps may take long"
    for _ in range(20):
        step(2)
    assert page.hang_bound_ms == pytest.approx(8, rel=0.05)
    step(100)
    assert page.hang_bound_ms == pytest.approx(400, rel=0.01)
    for _ in range(700):
        step(2)
    assert 150 < page.hang_bound_ms < 250
    step(60_000)
    assert page.hang_bound_ms == 30_000, "there is a limit"


def test_fenced_engine_finds_out(tmp_path: Path) -> None:
    page = StatusPage.create(tmp_path / "e0.status", 1)
    assert not page.fenced
    StatusPage.open(tmp_path / "e0.status").fence()
    assert page.fenced


WRITER = """
import sys
from pathlib import Path
from engine.status_page import StatusPage
page = StatusPage.create(Path(sys.argv[1]), 1)
page.set_state("ready")
print("up", flush=True)
while True:
    page.set_state("ready") if sys.argv[2] == "states" else page.count_step()
"""


@pytest.mark.parametrize("writes", ["states", "steps"])
def test_a_watcher_never_reads_a_word_that_is_half_written(tmp_path: Path, writes: str) -> None:
    path, began = tmp_path / "e0.status", time.monotonic()
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(path), writes], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout and child.stdout.readline() == "up\n"
        page, steps = StatusPage.open(path), 0
        for _ in range(60_000):
            if writes == "states":
                seen = page.state, page.hang_bound_ms
                assert seen == ("ready", 10_000), "these never change"
            else:
                last, steps = steps, page.step_count
                assert steps >= last, "they only grow"
            age_ms = page.beat_age_ms()
            assert age_ms < (time.monotonic() - began) * 1000, "a beat from before it was started"
    finally:
        child.kill()
        child.wait()


def test_no_room_for_it_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        StatusPage.create(tmp_path / "e0.status", 1)
    assert not (tmp_path / "e0.status").exists()
