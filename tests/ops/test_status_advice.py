"""What `concordia status` advises where no gateway answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from engine import pid_file
from ops import status
from ops.config import load
from ops.installation import gateway_url
from tiers.paths import Paths


def test_advice_is_about_what_is_there(tmp_path: Path) -> None:
    paths = Paths.at(tmp_path / "data", tmp_path / "lanes")
    paths.lane_dir.mkdir()
    assert status._advice(paths) == "", "nothing runs: the usual advice"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        pid_file.write(paths.pid_file("serve"), pid=child.pid)
        assert f"(pid {child.pid}) is there" in status._advice(paths)
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert f"`kill -CONT {child.pid}` lets it go on" in status._advice(paths)
    finally:
        child.kill()
        child.communicate()
    assert status._advice(paths) == ""


def test_after_everything_was_killed_the_last_address_is_named(tmp_path: Path) -> None:
    flags = {"data_dir": str(tmp_path / "data"), "lane_dir": str(tmp_path / "lanes")}
    config = load(flags)
    assert gateway_url(config) == "http://127.0.0.1:8080"
    config.paths.lane_dir.mkdir()
    config.paths.gateway_url.write_text("http://127.0.0.1:9100\n")
    assert gateway_url(config) == "http://127.0.0.1:9100"
    assert gateway_url(load(flags | {"gateway.port": "9200"})) == "http://127.0.0.1:9200"
