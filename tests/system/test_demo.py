"""`concordia demo` that is ended from outside leaves nothing: no process, no shared memory, no directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from bench.driver import alive, wait_for
from tiers.paths import Paths


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
