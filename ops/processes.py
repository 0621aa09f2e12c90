"""Linux process tools for `serve` and the host agent: parent-death signal, subreaper, pidfd, file locks, kept children.

`KeptProcess` runs on the asyncio loop of its owner: it starts a child, waits for it, and starts it again with growing waits
until it is stopped. Sources: prctl(2), pidfd_open(2), flock(2).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from engine import pid_file
from ops.errors import AlreadyRunning, ModelError, OpsError
from tiers.keys import FILE_VARIABLE, KEYS_VARIABLE
from tiers.lock import is_named

if TYPE_CHECKING:
    from ops.watchdog import Watchdog

log = structlog.get_logger("processes")

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies. Exits at once if it is gone already (the race prctl can't see)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def become_subreaper() -> None:
    """Orphans below this process become its children (and not init's), so that it can reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def reap(pid: int) -> int | None:
    """Collect a dead child's exit code (negative: signal); None if it isn't ours or isn't dead."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if done else None


def reap_orphans(own: frozenset[int]) -> None:
    """Collect the dead that became this process's children when their parent died. `own` are its own children: somebody waits for them.

    Not while a child is being started whose pid isn't known yet.
    """
    with contextlib.suppress(ChildProcessError):  # there is no child at all
        while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and dead.si_pid not in own:
            os.waitpid(dead.si_pid, os.WNOHANG)


def signal_pidfd(pidfd: int, number: int) -> None:
    """Send a signal through a pidfd: it can't hit a recycled pid. A process that is gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


class FileLock:
    """An flock for the life of a process; the kernel lets go of it however the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def take(self, what: str) -> FileLock:
        """Take it now or raise AlreadyRunning, naming the holder's pid."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise AlreadyRunning(f"{what} (pid {holder or 'unknown'} holds {self.path})") from error
        except OSError:
            os.close(descriptor)
            raise
        with contextlib.suppress(OSError):  # no room: then others are told of a holder whose pid isn't known
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return self

    def keep(self) -> None:
        """If its file was deleted or moved: hold another one of its name, so that others find that it is held."""
        if self._descriptor < 0 or not self.path.parent.is_dir() or is_named(self._descriptor, self.path):
            return
        lost, self._descriptor = self._descriptor, -1
        try:
            self.take("this name is another process's now")
        except (AlreadyRunning, OSError):
            self._descriptor = lost
        else:
            os.close(lost)

    async def take_soon(self, what: str, timeout_s: float) -> FileLock:
        """Like `take`, but give a holder that is about to end some time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self.take(what)
            except AlreadyRunning:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.02)

    def release(self) -> None:
        """Let go."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between restarts: first_ms, doubled with each quick death in a row, up to limit_ms."""

    first_ms: float
    limit_ms: float
    reset_s: float

    def wait_s(self, deaths_in_row: int) -> float:
        """Wait before the next start after this many deaths in a row (1: the first)."""
        return float(min(self.limit_ms, self.first_ms * 2 ** min(deaths_in_row - 1, 30)) / 1000)


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """What to run: `python -m MODULE arguments`, settings handed over by stdin.

    with_parent  it dies when its starter dies
    descriptors  open files that it inherits, under the same numbers
    bare         MODULE takes no --config-json; `arguments` tell it everything, and after them those in the settings' "arguments"
    """

    name: str
    module: str
    settings: dict[str, Any]
    arguments: tuple[str, ...] = ()
    with_parent: bool = True
    bare: bool = False
    descriptors: tuple[int, ...] = ()

    @property
    def line(self) -> list[str]:
        flags = ["--parent", str(os.getpid())] if self.with_parent else []
        flags += ["--bare"] if self.bare else []
        return [sys.executable, "-m", "ops.child", *flags, self.name, self.module, *self.arguments]

    @property
    def input(self) -> bytes:
        return json.dumps(self.settings).encode()


def times(count: int) -> str:
    """`once`, `2 times`."""
    return "once" if count == 1 else f"{count} times"


async def start_child(command: ChildCommand) -> asyncio.subprocess.Process:
    """Start a child in a session of its own: Ctrl-C on the terminal reaches `serve` alone."""
    process = await asyncio.create_subprocess_exec(
        *command.line,
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=child_environment(),
        pass_fds=command.descriptors,
    )
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(command.input)
        await process.stdin.drain()
    process.stdin.close()
    return process


def child_environment() -> dict[str, str]:
    """Environment of a child: of our own settings (which have been read, and travel as JSON) only the tenants' keys, no progress bars."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CONCORDIA_") or name in (KEYS_VARIABLE, FILE_VARIABLE)
    }
    return kept | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}


class KeptProcess:
    """A child that is started again whenever it dies, until `stop`. Its pid file is kept true."""

    def __init__(
        self,
        command: ChildCommand,
        pid_path: Path,
        backoff: Backoff,
        *,
        give_up_after: int = 0,
        fatal: tuple[int, ...] = (),
        watchdog: Watchdog | None = None,
        on_death: Callable[[int], None] = lambda deaths: None,
    ) -> None:
        self.command = command
        self.started_count = 0
        self.proved = give_up_after == 0  # once it has served, it is restarted for ever
        self._pid_path = pid_path
        self._backoff = backoff
        self._give_up_after = give_up_after
        self._fatal = fatal  # exit codes that say: starting it again won't help
        self._watchdog = watchdog
        self._on_death = on_death  # told how many there were in a row, before the wait
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._done = asyncio.Event()

    @property
    def pid(self) -> int:
        """Pid of the running child, 0 if none runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    async def run(self) -> None:
        """Start, wait, start again. Returns after `stop`. Raises OpsError if it died too often before it ever served."""
        deaths = 0
        try:
            while not self._stopping:
                started = time.monotonic()
                code = await self._run_once()
                if self._stopping:
                    break
                deaths = 1 if time.monotonic() - started > self._backoff.reset_s else deaths + 1
                if code in self._fatal or (not self.proved and deaths >= self._give_up_after):
                    error = ModelError if code == ModelError.exit_code else OpsError
                    raise error(
                        f"{self.command.name} ended {times(deaths)} before it served, exit {code}; its last lines above say why"
                    )
                wait_s = self._backoff.wait_s(deaths)
                log.warning("supervise.died", child=self.command.name, exit=code, deaths=deaths, wait_s=wait_s)
                self._on_death(deaths)
                await asyncio.sleep(wait_s)
        finally:
            self._pid_path.unlink(missing_ok=True)
            self._done.set()

    async def _run_once(self) -> int | None:
        """Its exit code; None if the system can't start a process now: no memory, too many processes or files."""
        try:
            self._process = await start_child(self.command)
        except OSError as error:
            log.error("supervise.not_started", child=self.command.name, error=str(error), hint="it is tried again")
            return None
        self.started_count += 1
        try:
            pid_file.write(self._pid_path, pid=self._process.pid, incarnation=self.started_count)
        except OSError as error:  # shared memory is full: that ends nobody
            hint = "free some: until it is started again `concordia status` can't tell of it"
            log.error("supervise.pid_not_written", child=self.command.name, error=str(error), hint=hint)
        log.info("supervise.started", child=self.command.name, pid=self._process.pid)
        watching = asyncio.create_task(self._watch(self._process.pid))
        try:
            return await self._process.wait()
        finally:
            watching.cancel()

    async def _watch(self, pid: int) -> None:
        """Wake or kill it if it stands still."""
        watchdog = self._watchdog
        while watchdog is not None:
            await asyncio.sleep(watchdog.look_s)
            finding = watchdog.look(pid)
            if finding is None:
                continue
            saying_at = time.monotonic()
            log.warning(
                "supervise.hung",
                child=self.command.name,
                pid=pid,
                cause=finding.cause,
                limit_s=finding.limit_s,
                signal=finding.cure.name,
            )
            # What holds up this line (a paused terminal, a pipe that nobody reads) holds up the child as well.
            if time.monotonic() - saying_at < watchdog.look_s:
                self.signal(finding.cure)
                watchdog.signalled(pid)
            else:
                log.info(
                    "supervise.spared", child=self.command.name, pid=pid, why="what holds up the log may hold it up"
                )

    def signal(self, number: int) -> None:
        """Send a signal to the child, if one runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, timeout_s: float) -> bool:
        """SIGTERM, wait, then SIGKILL. True if it ended by itself in time."""
        self._stopping = True
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait()
        except TimeoutError:
            log.warning("supervise.killed", child=self.command.name, waited_s=timeout_s)
            self.signal(signal.SIGKILL)
            await self._wait()
            return False
        return True

    async def _wait(self) -> None:
        if self._process is not None:
            await self._process.wait()
