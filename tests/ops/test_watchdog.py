"""Children of `serve` and the host agent that stand still. Real processes and signals."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from bench.driver import process_state
from engine import pid_file
from ops import hang, processes
from ops.processes import Backoff, ChildCommand, KeptProcess
from ops.watchdog import Watchdog
from tests.ops.test_host import until
from tiers import heartbeat

pytestmark = pytest.mark.process
LIMIT_S = 0.4


@contextlib.asynccontextmanager
async def kept(directory: Path, name: str, *, beat: bool, limit_s: float = LIMIT_S) -> AsyncIterator[KeptProcess]:
    """A child that beats once, or whose parent knows of no heartbeat."""
    path = directory / f"{name}.beat"
    command = ChildCommand(name, "tests.ops.still_child", {}, (str(path),), bare=True)
    watchdog = Watchdog(path if beat else None, limit_s, 60.0)
    child = KeptProcess(command, directory / f"{name}.pid", Backoff(10, 10, 60.0), watchdog=watchdog)
    task = asyncio.create_task(child.run())
    try:
        await until(f"the first beat of {name}", lambda: heartbeat.read(path) is not None)
        yield child
    finally:
        await child.stop(5.0)
        await task


@pytest.mark.parametrize(
    ("main", "other", "cause"), [("S", "S", "blocked"), ("S", "D", ""), ("D", "S", ""), ("S", "R", "")]
)
def test_a_child_of_which_any_thread_waits_for_the_disk_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: str, other: str, cause: str
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: next(seconds) / 2))
    monkeypatch.setattr(hang, "_thread", lambda path: (main if int(path.name) == os.getpid() else other, 0, 0))
    (tmp_path / "keeper.beat").write_bytes(struct.pack("<QQ", os.getpid(), 0))
    watchdog = Watchdog(tmp_path / "keeper.beat", 5.0, 60.0)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        found = [watchdog.look(os.getpid()) for _ in range(300)]
    finally:
        done.set()
        thread.join()
    assert {finding.cause for finding in found if finding} == ({cause} if cause else set())


class HeldUpLog:
    """As on a paused terminal, whenever somebody wants to say that the child `spared` stands still, and the first time of any other."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._told: set[str] = set()

    def __getattr__(self, level: str) -> Any:
        def say(event: str, **fields: Any) -> None:
            if event == "supervise.hung" and fields["child"] not in self._told - {"spared"}:
                self._told.add(fields["child"])
                time.sleep(LIMIT_S / 2)
            getattr(self._log, level)(event, **fields)

        return say


async def test_child_that_stands_still_is_killed_and_one_that_is_stopped_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "log", HeldUpLog(processes.log))
    with structlog.testing.capture_logs() as logs:
        async with (
            kept(tmp_path, "stuck", beat=True) as stuck,
            kept(tmp_path, "held", beat=False) as held,
            kept(tmp_path, "unwatched", beat=True, limit_s=0) as unwatched,
            kept(tmp_path, "spared", beat=True) as spared,
        ):
            pids = held.pid, unwatched.pid, spared.pid
            for pid in pids[:2]:
                os.kill(pid, signal.SIGSTOP)
            first = stuck.pid
            await until("another child", lambda: stuck.pid not in (0, first))
            await until("one that goes on", lambda: process_state(pids[0]) == "S")
            await until("a child that is spared", lambda: any(log["event"] == "supervise.spared" for log in logs))
            assert (held.pid, unwatched.pid, spared.pid) == pids
            known = pid_file.read(tmp_path / "unwatched.pid")
            assert known is not None and known.stopped
            os.kill(pids[1], signal.SIGCONT)
    hung = {(log["child"], log["cause"], log["signal"]) for log in logs if log["event"] == "supervise.hung"}
    assert hung - {("spared", "blocked", "SIGKILL")} == {
        ("stuck", "blocked", "SIGKILL"),
        ("held", "stopped", "SIGCONT"),
    }


async def test_a_child_is_started_though_there_is_no_room_for_its_pid_file_or_no_process_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, start = [errno.EAGAIN, errno.ENOMEM], processes.start_child

    async def start_late(command: ChildCommand) -> Any:
        if refused:
            raise OSError(refused[0], os.strerror(refused.pop()))
        return await start(command)

    def full(*given: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with kept(tmp_path, "child", beat=False) as child:
        monkeypatch.setattr(processes, "start_child", start_late)
        monkeypatch.setattr(processes.pid_file, "write", full)
        with structlog.testing.capture_logs() as logs:
            first = child.pid
            os.kill(first, signal.SIGKILL)
            await until("another child", lambda: child.pid not in (0, first))
            await until("a word of it", lambda: logs and logs[-1]["event"] == "supervise.started")
    events = [log["event"] for log in logs if log["log_level"] == "error"]
    assert events == ["supervise.not_started", "supervise.not_started", "supervise.pid_not_written"]


ORPHANS = """
import os, signal, sys
from ops.processes import become_subreaper, reap_orphans

become_subreaper()
own = os.fork()
if own == 0:
    signal.pause()
reading, writing = os.pipe()
parent = os.fork()
if parent == 0:
    orphan = os.fork()
    if orphan == 0:
        os.close(reading)
        signal.pause()
    os.write(writing, str(orphan).encode())
    os._exit(0)
orphan = int(os.read(reading, 20))
os.close(writing)
os.waitpid(parent, 0)
reap_orphans(frozenset((own,)))
for pid in (orphan, own):
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    reap_orphans(frozenset((own,)))
    assert os.path.exists(f"/proc/{pid}") == (pid == own)
assert os.waitpid(own, 0)[1] == signal.SIGKILL
reap_orphans(frozenset())
"""


def test_the_dead_of_a_dead_child_are_collected_and_own_children_left_to_who_waits_for_them() -> None:
    subprocess.run([sys.executable, "-c", ORPHANS], check=True, timeout=60)
