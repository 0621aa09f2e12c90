"""The keeper: the only process that writes the store. It drains lanes, compacts between drains, answers a socket; no torch.

Stages *drain* (`tiers/drain.py`, `tiers/assemble.py`) and *compact* (`tiers/keeper_jobs.py`); what is asked of it is in
`tiers/keeper_operations.py`. Killed at any instruction, the next keeper goes on. Source: docs/log-format.md
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np
import structlog

from tiers.acceptor import EXHAUSTED, Acceptor
from tiers.base import SessionKey
from tiers.compaction import GRACE_S
from tiers.drain import Drain
from tiers.errors import NoRoom, OverBudget, StoreFailed, TierError
from tiers.heartbeat import BEAT_S, Beating
from tiers.keeper_jobs import Busy, Jobs
from tiers.keeper_operations import Operations
from tiers.layout import RootId, SequenceId
from tiers.lock import is_held, is_named, take
from tiers.offline import keeper_lock
from tiers.paths import Paths
from tiers.rebuild import from_wire
from tiers.settings import TierSettings

log = structlog.get_logger()

REQUEST_LIMIT_BYTES = 64 << 20  # token lists of a hundred sessions of 100,000 tokens
LOCK_WAIT_S = 5.0
LOCK_LOOK_S = 1.0
OPS = (
    "drain",
    "stats",
    "positions",
    "forget",
    "import",
    "repair",
    "mend",
    "stored",
    "compact",
    "job",
    "copy",
    "sessions",
    "tenants",
    "pin",
    "pins",
    "remove",
    "drop_locked",
)


class Keeper:
    """The keeper's loop: drain every drain_interval_ms, answer its control socket, end on `stop`.

    orphan_s  end by itself when nobody has held the run lock for so long (0: never); lanes are drained first
    """

    def __init__(self, paths: Paths, settings: TierSettings, *, orphan_s: float = 15.0) -> None:
        self._paths = paths
        self._interval_s = settings.drain_interval_ms / 1000
        self._orphan_s = orphan_s
        self._stopping = False
        self._lock = _take_lock(keeper_lock(paths))
        self._drain = Drain(paths, settings)
        self._operations = Operations(self._drain)
        self._jobs = Jobs(self._drain)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._listener = _listen(paths.keeper_socket)
        self._acceptor = Acceptor(self._listener)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._held_at = self._looked_at = self._lock_seen_at = time.monotonic()
        self._beating = Beating(paths.beat("keeper"))
        self._hindered = ""  # what kept the last round from its work

    def stop(self) -> None:
        """Ask `run` to end, from a signal handler or another thread."""
        self._stopping = True
        try:
            self._wake.send(b"x")
        except OSError:
            pass  # it is awake

    def run(self) -> None:
        """Until `stop`: then everything in the lanes is committed and synced once more."""
        log.info("keeper.started", store=str(self._paths.store), lanes=str(self._paths.lane_dir), pid=os.getpid())
        try:
            self._drain.open()
        except StoreFailed:
            pass  # counted and logged; tried again as soon as there is something to store
        next_drain = time.monotonic()
        while not self._stopping:
            self._beating.turn()
            until_drain_s = max(0.0, next_drain - time.monotonic())
            self._serve(min(BEAT_S, until_drain_s if self._jobs.idle else min(self._interval_s, self._jobs.pause_s())))
            self._jobs.work()
            if time.monotonic() >= next_drain and not self._stopping:
                more = self._tick()
                next_drain = time.monotonic() + (0 if more else self._interval_s)
        self._finish()

    def _tick(self) -> bool:
        """One regular round; whether the next is due at once."""
        more, hindered = False, ""
        try:
            more = self._step()
            self._drain.sync_if_due()
            if self._drain.is_crowded():
                self._jobs.hurry()
        except StoreFailed:
            pass  # counted and logged; the records wait in the lanes
        except OSError as error:
            hindered = str(error)
        try:
            self._look_for_host()
            self._keep_lock()
        except OSError as error:
            hindered = str(error)
        self._say_hindered(hindered)
        return more

    def _say_hindered(self, error: str) -> None:
        """Something can't be opened or looked at just now, for want of descriptors maybe: the next round tries again."""
        if error and error != self._hindered:
            log.error("keeper.hindered", error=error, hint="the lanes keep what isn't stored yet; it is tried again")
        self._hindered = error

    def _step(self) -> bool:
        """A group of records; where there is no room for it, a compaction comes soon. Raises StoreFailed."""
        try:
            return self._drain.step()
        except (OverBudget, NoRoom):
            self._jobs.hurry()
            return False

    def _keep_lock(self) -> None:
        """Was its file deleted, with the store's directory maybe? Commands must find that this keeper holds it."""
        now, path = time.monotonic(), keeper_lock(self._paths)
        if now - self._lock_seen_at < LOCK_LOOK_S:
            return
        self._lock_seen_at = now
        if path.parent.is_dir() and not is_named(self._lock.fileno(), path):
            fresh = open(path, "a+")
            if take(fresh, 0):
                self._lock, fresh = fresh, self._lock
                log.error(
                    "keeper.lock_made", path=str(path), hint="it was deleted: nothing but Concordia may write there"
                )
            fresh.close()

    def _look_for_host(self) -> None:
        now = time.monotonic()
        if not self._orphan_s or now - self._looked_at < min(1.0, self._orphan_s / 4):
            return
        self._looked_at = now
        if is_held(self._paths.host_lock):
            self._held_at = now
        elif now - self._held_at > self._orphan_s:
            log.warning("keeper.orphaned", hint="no host agent holds host.lock; draining and ending")
            self._stopping = True

    def _finish(self) -> None:
        try:
            self._drain.flush(sync=True)
        except (StoreFailed, OverBudget, OSError) as error:
            log.error("keeper.undrained", error=str(error), hint="the lanes keep the rest while the machine is up")
        try:
            self._drain.close()
        except StoreFailed as error:
            log.error("keeper.unsynced", error=str(error), hint="the lanes keep the rest while the machine is up")
        self._acceptor.close()
        self._listener.close()
        self._paths.keeper_socket.unlink(missing_ok=True)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, bytearray):
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake.close()
        self._woken.close()
        self._lock.close()
        log.info("keeper.ended")

    # ------------------------------------------------------------ control socket

    def _serve(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._woken:
                self._woken.recv(4096)
            elif key.fileobj is self._listener:
                connection = self._acceptor.accept()
                if connection is not None:
                    connection.settimeout(2.0)  # a client that doesn't read its answer must not stop the drain
                    self._selector.register(connection, selectors.EVENT_READ, bytearray())
            else:
                self._receive(key.fileobj, key.data)  # type: ignore[arg-type]

    def _receive(self, connection: socket.socket, buffer: bytearray) -> None:
        try:
            data = connection.recv(1 << 16)
            buffer += data
            while b"\n" in data and b"\n" in buffer:
                line, _, rest = bytes(buffer).partition(b"\n")
                buffer[:] = rest
                connection.sendall(json.dumps(self._answer(line)).encode() + b"\n")
        except OSError:
            data = b""
        if not data or len(buffer) > REQUEST_LIMIT_BYTES:
            self._selector.unregister(connection)
            connection.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            return {"ok": True, **self._do(json.loads(line))}
        except (StoreFailed, OverBudget) as error:
            return {"ok": False, "error": error.reason, "hint": error.hint, "retry": True}
        except Busy as error:
            return {"ok": False, "error": error.reason, "hint": error.hint, "retry": True, "busy": True}
        except TierError as error:
            said = f"{type(error).__name__}: {error.reason}"
            return {"ok": False, "error": said, "hint": error.hint, "retry": False}
        except OSError as error:  # of a file that the request names, or that something is kept in
            said = f"{error.filename or self._paths.data_dir}: {error.strerror or error}"
            return {"ok": False, "error": said, "retry": error.errno in EXHAUSTED}
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:  # of what is asked for
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "retry": False}

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op == "drain":
            sync = bool(request.get("sync", False))
            return {"durable": self._drain.flush(sync), "synced": sync}
        if op == "stats":
            return {"stats": self._drain.stats()}
        if op == "forget":
            tokens = np.array(request["tokens"], dtype=np.int32)
            root = RootId(bytes.fromhex(request["root"]))
            session, keep_tokens = request.get("session", ""), request.get("keep_tokens", 0)
            return {"deleted": self._operations.forget(root, request["namespace"], tokens, session, keep_tokens)}
        if op == "positions":
            sequences = [SequenceId(bytes.fromhex(name)) for name in request["sequences"]]
            return {"positions": self._drain.positions(sequences)}
        if op == "import":
            return self._operations.import_slice(request)
        if op == "repair":
            damaged = [(kind, bytes.fromhex(key)) for kind, key in request["damaged"]]
            return self._operations.repair(damaged, from_wire(request.get("lists", ())))
        if op == "mend":
            bases = [SessionKey(bytes.fromhex(key)) for key in request["bases"]]
            return self._operations.mend(bases, from_wire(request.get("lists", ())))
        if op == "stored":
            return self._operations.stored(from_wire(request["lists"]))
        return self._do_sessions(op, request)

    def _do_sessions(self, op: str, request: dict[str, Any]) -> dict[str, Any]:
        operations, namespace, session = self._operations, request.get("namespace"), request.get("session")
        if op == "compact":
            settle_s, grace_s = float(request.get("settle_s", 0)), float(request.get("grace_s", GRACE_S))
            dry_run, shrink = bool(request.get("dry_run", False)), bool(request.get("shrink", False))
            return {"job": self._jobs.start(settle_s, grace_s, dry_run=dry_run, shrink=shrink).state()}
        if op == "job":
            if "cancel" in request:
                self._jobs.cancel(int(request["cancel"]))
            return {"job": self._jobs.state()}
        if op == "copy":
            if request.get("cancel"):
                self._jobs.cancel_copy()
            if "path" not in request:
                return {"job": self._jobs.copy_state()}
            limit_bytes_s = 1e6 * float(request.get("limit_mb_s", 0))
            return {"job": self._jobs.start_copy(Path(request["path"]), limit_bytes_s).state()}
        if op == "sessions":
            return {"sessions": operations.sessions(namespace, session)}
        if op == "drop_locked":
            return {"dropped": operations.drop_locked()}
        if op == "tenants":
            return {"tenants": operations.tenants()}
        if op == "pin":
            operations.pin(str(request["namespace"]), str(request["session"]), bool(request.get("pinned", True)))
            return {}
        if op == "pins":
            return {"pins": operations.pins()}
        if op == "remove":
            force, dry_run = bool(request.get("force", False)), bool(request.get("dry_run", False))
            names = str(request["namespace"]), str(request["session"])
            return {"deleted": operations.remove(*names, force=force, dry_run=dry_run)}
        raise ValueError(f"unknown op {op!r}; there are {', '.join(OPS)}")


def _take_lock(path: Path) -> TextIO:
    """Only one keeper works on a store."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = open(path, "a+")
    if not take(lock, LOCK_WAIT_S):
        lock.close()
        raise SystemExit(f"another keeper works on {path.parent}; use another --data-dir")
    return lock


def _listen(path: Path) -> socket.socket:
    """The control socket. A stale file is a killed keeper's: the lock says that there is no other."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    os.chmod(path, 0o600)
    listener.listen(16)
    return listener


def _keep_large_buffers() -> None:
    """Let malloc reuse LMDB's page buffers instead of mapping and unmapping each: half the CPU of a commit."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, its maximum
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def _write_pid_file(path: Path, incarnation: int) -> None:
    """For `status`; where shared memory is full the keeper drains without it."""
    start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    text = json.dumps({"pid": os.getpid(), "start_ticks": start_ticks, "incarnation": incarnation})
    draft = path.with_suffix(".pid.new")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        log.error(
            "keeper.pid_not_written", error=str(error), hint="free shared memory: `concordia status` can't tell of it"
        )


def _configure_log(log_format: str, level: str) -> None:
    render: Any = structlog.processors.JSONRenderer()
    if log_format == "console" or (log_format == "auto" and sys.stderr.isatty()):
        render = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def main(argv: list[str] | None = None) -> int:
    """`python -m tiers.keeper`: run a keeper until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="tiers.keeper", description="Drain lanes into the store.")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--lane-dir", default=None)
    parser.add_argument("--settings-json", default="{}", help="fields of TierSettings that differ from the defaults")
    parser.add_argument("--incarnation", type=int, default=0)
    parser.add_argument("--orphan-s", type=float, default=15.0, help="end when host.lock is free for so long; 0: never")
    parser.add_argument("--log-format", choices=("auto", "json", "console"), default="auto")
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(argv)
    if not structlog.is_configured():  # under `serve` the log is set up before
        _configure_log(options.log_format, options.log_level)
    _keep_large_buffers()
    paths = Paths.at(options.data_dir, options.lane_dir).make()
    settings = msgspec.convert(json.loads(options.settings_json), TierSettings)
    keeper = Keeper(paths, settings, orphan_s=options.orphan_s)
    _write_pid_file(paths.pid_file("keeper"), options.incarnation)
    signal.signal(signal.SIGTERM, lambda *_: keeper.stop())
    signal.signal(signal.SIGINT, lambda *_: keeper.stop())
    keeper.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
