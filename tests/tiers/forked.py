"""Keepers that are forked from one process which has imported them: a start costs a hundredth of what a new Python takes for its imports.

`python -m tests.tiers.forked FD` is that process. It runs `tiers.keeper.main` in a fork for each line that it reads, in the environment
that the line gives, and ends its keepers when nobody is left who could ask. It has one thread, and opens nothing of lanes and store.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from tiers import failpoints, keeper

REPOSITORY = Path(__file__).parents[2]


class Forked:
    """A keeper as `subprocess.Popen` would show it."""

    stdout = None

    def __init__(self, parent: Parent, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None or not self._ended(0) else self._reap()

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None and not self._ended(timeout):
            raise subprocess.TimeoutExpired(f"keeper {self.pid}", timeout or 0.0)
        return self._reap() if self.returncode is None else self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _ended(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))

    def _reap(self) -> int:
        self.returncode = int(self._parent.ask(reap=self.pid))
        os.close(self._handle)
        return self.returncode


class Parent:
    """This end of the process that forks. `environment` is what it is started with, for a library that is loaded into it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.tiers.forked", str(theirs.fileno())],
                cwd=REPOSITORY,
                env={**environment, "PYTHONPATH": str(REPOSITORY), "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._answers = self._channel.makefile("r")

    def keeper(self, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None = None) -> Forked:
        """A keeper with the arguments of `python -m tiers.keeper`; what it says goes to `log`, if there is one."""
        path = None if log is None else str(log.name)
        return Forked(self, int(self.ask(arguments=list(arguments), environment=dict(environment), log=path)))

    def ask(self, **request: Any) -> int:
        self._channel.sendall(json.dumps(request).encode() + b"\n")
        return int(self._answers.readline())

    def close(self) -> None:
        """End it, and what it forked."""
        self._answers.close()
        self._channel.close()
        self._process.wait(60)


@cache
def parent() -> Parent:
    """The one of this process for keepers without a library of their own; it ends with it."""
    made = Parent(os.environ)
    atexit.register(made.close)
    return made


# ---------------------------------------------------------------- the process that forks


def serve(channel: socket.socket) -> None:
    """Until the other end is closed."""
    children: set[int] = set()
    for line in channel.makefile("r"):
        request = json.loads(line)
        if "reap" in request:
            children.discard(request["reap"])
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        else:
            answer = os.fork()
            if not answer:
                be_keeper(channel, request)
            children.add(answer)
        channel.sendall(f"{answer}\n".encode())
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def be_keeper(channel: socket.socket, request: dict[str, Any]) -> None:
    """Never returns."""
    code = 1
    try:
        os.close(channel.fileno())
        if request["log"]:
            os.dup2(os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        failpoints.arm(os.environ.get(failpoints.VARIABLE))
        code = keeper.main(request["arguments"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever started it closes the other end
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
