"""Killing a piece of work before each change that it makes to the file system, without a failpoint at any of them.

A forked child does the work; an audit hook counts the interpreter's own events of files that are made, written, renamed or removed, and
ends in SIGKILL at the one that is asked for.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def killed_before(change: int, work: Callable[[], object]) -> bool:
    """Do `work` in a child that is killed before its change number `change` (from 0); False if it made fewer and came to its end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _kill_self_before(change)
            work()
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the work itself failed"
    return False


def _kill_self_before(change: int) -> None:
    left, own = change, os.getpid()

    def look(event: str, given: tuple[object, ...]) -> None:
        nonlocal left
        if event in CHANGES or (event == "open" and isinstance(given[2], int) and given[2] & WRITING):
            if os.getpid() == own and left == 0:
                os.kill(own, signal.SIGKILL)
            left -= 1

    sys.addaudithook(look)
