"""Into a log no escape sequences and no rules as wide as a screen: `make setup` and `concordia demo` without a terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ops import demo

SETUP = Path(demo.__file__).parent / "setup.sh"
# Answers as a Python whose packages for environments are missing: the script says where it is, and ends.
PYTHON = '#!/bin/sh\ncase "$*" in *ensurepip*) exit 1 ;; --version) echo Python 3.11.0 ;; esac\n'


def setup(tmp_path: Path, stdout: Any) -> subprocess.CompletedProcess[bytes]:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o700)
    return subprocess.run(
        ["bash", SETUP, tmp_path / "venv"],
        env={**os.environ, "PYTHON": str(python)},
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def test_setup_is_plain_in_a_log_and_bold_on_a_terminal(tmp_path: Path) -> None:
    said = f"environment in {tmp_path}/venv, Python 3.11.0"
    done = setup(tmp_path, subprocess.PIPE)
    assert (done.returncode, done.stdout.decode()) == (1, f"\n[setup 1/3] {said}\n")
    ours, theirs = pty.openpty()
    setup(tmp_path, theirs)
    os.close(theirs)
    assert f"\x1b[1m[setup 1/3]\x1b[0m {said}" in os.read(ours, 4096).decode()
    os.close(ours)


def test_demo_titles_are_plain_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(demo, "console", Console(file=log, width=200))
    show = demo.Show(None, None, 1, quiet=False)  # type: ignore[arg-type]
    show._title("1. An answer streams")
    assert log.getvalue() == "\n1. An answer streams\n\n"
