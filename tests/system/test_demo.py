"""`concordia demo`: played to its end, and ended from outside, which leaves nothing: no process, no shared memory, no directory."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from bench.driver import alive, wait_for
from tiers.paths import Paths

DEMO_TOKENS = 96


def test_a_demo_that_is_told_to_end_cleans_up(tiny_model: Path, tmp_path: Path) -> None:
    concordia = Path(sys.executable).with_name("concordia")
    demo = subprocess.Popen(
        [concordia, "demo", "--json", "--model", tiny_model],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        (home,) = wait_for("its directory", lambda: list(tmp_path.glob("concordia-demo-*/data")))
        lane_dir = Paths.at(home).lane_dir
        pids = wait_for("a process of it", lambda: list(lane_dir.glob("*.lane")) and children(home))
        demo.send_signal(signal.SIGTERM)
        demo.send_signal(signal.SIGTERM)  # as `timeout` and `make` do
        assert demo.wait(60) == 128 + signal.SIGTERM
        assert not list(tmp_path.iterdir()) and not lane_dir.exists()
        assert not any(alive(pid) for pid in pids)
    finally:
        demo.kill()
        demo.wait()


def children(home: Path) -> list[int]:
    """Processes of the installation at `home`, by its name in their command line."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found = str(home).encode() in (entry / "cmdline").read_bytes()
            except OSError:
                continue
            pids += [int(entry.name)] if found else []
    return pids


@pytest.mark.soak  # ten seconds and more, most of it starts of processes
def test_a_demo_on_a_terminal_shows_the_whole_timeline_and_goes_on_from_disk(tiny_model: Path, tmp_path: Path) -> None:
    concordia = Path(sys.executable).with_name("concordia")
    mine, its = pty.openpty()
    termios.tcsetwinsize(its, (40, 120))
    demo = subprocess.Popen(
        [concordia, "demo", "--model", tiny_model, "--tokens", str(DEMO_TOKENS)],
        env={**os.environ, "TMPDIR": str(tmp_path), "TERM": "xterm-256color"},
        stdin=its,
        stdout=its,
        stderr=its,
    )
    os.close(its)
    try:
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(iter(lambda: read(mine), b"")).decode())
        assert demo.wait(60) == 0, shown
    finally:
        demo.kill()
        demo.wait()
        os.close(mine)
    stages = ("1. An answer streams", "SIGKILL e", "goes on after", "The same request undisturbed gives the same text")
    stages += (
        "2. Everything is killed",
        "SIGKILL to all",
        "everything is back after",
        "of them came from disk or memory",
    )
    stages += ("What the kill of the engine cost",)
    at = [shown.find(stage) for stage in stages]
    assert -1 not in at and at == sorted(at), (at, shown)
    times = dict(
        re.findall(r"^  (detect|fence|wait|restore|force|next token|all|cold restart) +([\d.]+) ms", shown, re.M)
    )
    assert times.keys() == {"detect", "fence", "wait", "restore", "force", "next token", "all", "cold restart"}, shown
    assert sum(map(float, times.values())) > 0
    prompt, cached = map(int, re.findall(r"has (\d+) prompt tokens; (\d+) of them", shown)[0])
    assert cached > prompt // 2, "the chat went on from what was stored"
    assert not list(tmp_path.iterdir()), "it cleans up"


def read(terminal: int) -> bytes:
    """What comes next; b"" at the end, which Linux tells as an error."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""
