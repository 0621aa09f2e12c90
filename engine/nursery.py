"""Where engines are born: a process that has imported torch and transformers once and forks an engine on request.

`python -m engine.nursery --config-json '<resolved settings>'`. One thread, for life: it runs no torch operation (that would start
worker threads, and a fork copies only the calling thread) and never touches a device. So an engine starts without the seconds
of imports. Protocol on nursery.sock, one JSON object a line: {"op": "spawn", "engine": "e0", "incarnation": 3} -> {"pid": 123};
{"op": "status", "pid": 123} -> {"running": bool, "exit": code or null, negative for a signal}; {"op": "ping"} -> {"pid": own}.
Anything wrong is answered by {"error": text}. Engines outlive the nursery: each has a session of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from engine import lean_torch, pid_file
from tiers.acceptor import Acceptor
from tiers.heartbeat import BEAT_S, Beating
from tiers.paths import Paths

log = structlog.get_logger("nursery")

LINE_LIMIT_BYTES = 64 << 10
REMEMBERED_EXITS = 256

Run = Callable[[str, int, dict[str, Any]], int]


class Nursery:
    """The loop. `run` is `engine.main.run`; tests hand in something smaller."""

    def __init__(self, settings: dict[str, Any], run: Run) -> None:
        self._settings = settings
        self._digest = pid_file.settings_digest(settings)
        self._paths = Paths(Path(settings["data_dir"]), Path(settings["lane_dir"]))
        self._run = run
        self._selector = selectors.DefaultSelector()
        self._children: set[int] = set()
        self._exits: OrderedDict[int, int] = OrderedDict()
        self._stopping = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._listener = _listen(self._paths.nursery_socket)
        self._acceptor = Acceptor(self._listener)

    def serve(self) -> None:
        """Answer requests until SIGTERM or SIGINT."""
        self._watch_signals()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        beating = Beating(self._paths.beat("nursery"))
        log.info("nursery.ready", pid=os.getpid(), threads=len(os.listdir("/proc/self/task")))
        while not self._stopping:
            beating.turn()
            for key, _ in self._selector.select(BEAT_S):
                key.data(key.fileobj)
        self._paths.nursery_socket.unlink(missing_ok=True)

    def _watch_signals(self) -> None:
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # the wake-up fd carries it to the loop

    def _woken(self, wake: socket.socket) -> None:
        numbers = wake.recv(4096)
        self._stopping = self._stopping or signal.SIGTERM in numbers or signal.SIGINT in numbers
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._remember(pid, os.waitstatus_to_exitcode(status))

    def _remember(self, pid: int, code: int) -> None:
        self._children.discard(pid)
        self._exits[pid] = code
        while len(self._exits) > REMEMBERED_EXITS:
            self._exits.popitem(last=False)
        log.info("nursery.reaped", pid=pid, exit=code)

    # ------------------------------------------------------------ requests

    def _accept(self, listener: socket.socket) -> None:
        connection = self._acceptor.accept()
        if connection is None:
            return
        connection.settimeout(5.0)
        pending = bytearray()
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._read(connection, pending))

    def _read(self, connection: socket.socket, pending: bytearray) -> None:
        try:
            data = connection.recv(LINE_LIMIT_BYTES)
            pending += data
            while b"\n" in pending:
                line, _, rest = bytes(pending).partition(b"\n")
                pending[:] = rest
                connection.sendall(json.dumps(self._answer(line)).encode() + b"\n")
        except OSError:
            data = b""
        if not data or len(pending) > LINE_LIMIT_BYTES:
            self._selector.unregister(connection)
            connection.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            match request.get("op"):
                case "spawn":
                    return {"pid": self._spawn(str(request["engine"]), int(request["incarnation"]))}
                case "status":
                    pid = int(request["pid"])
                    return {"running": pid in self._children, "exit": self._exits.get(pid)}
                case "ping":
                    return {"pid": os.getpid()}
                case other:
                    return {"error": f"unknown op {other!r}; known: spawn, status, ping"}
        except (LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    # ------------------------------------------------------------ fork

    def _spawn(self, engine: str, incarnation: int) -> int:
        assert len(os.listdir("/proc/self/task")) == 1, (
            "a nursery with threads must not fork: something ran a torch operation"
        )
        _flush()
        pid = os.fork()
        if pid == 0:
            self._be_engine(engine, incarnation)
        self._children.add(pid)
        log.info("nursery.spawned", engine=engine, incarnation=incarnation, pid=pid)
        return pid

    def _be_engine(self, engine: str, incarnation: int) -> None:
        """Runs in the child and never returns."""
        code = 1
        try:
            self._let_go()
            pid_file.write(
                self._paths.pid_file(engine), pid=os.getpid(), incarnation=incarnation, settings=self._digest
            )
            structlog.contextvars.bind_contextvars(process=engine)
            code = self._run(engine, incarnation, self._settings)
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
            if not isinstance(error, SystemExit):
                traceback.print_exc()
        finally:
            _flush()
            os._exit(code)

    def _let_go(self) -> None:
        """Drop what belongs to the nursery: signals, sockets, process group."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._acceptor.close()
        self._wake_write.close()
        self._selector.close()
        os.setsid()


def _flush() -> None:
    """Nothing that waits to be written is to be written twice. What the disk refuses is lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(16)
    return listener


def set_thread_environment(threads: int) -> None:
    """Before torch is imported: its OpenMP pool gets the engine's size, numpy's BLAS starts no threads at import."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(max(1, threads))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ.setdefault(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # asking for a device must not initialise it before the fork


def import_engine(model_dir: str) -> Run:
    """Import all that an engine needs, the model's own module too, and give `engine.main.run`."""
    started = time.monotonic()
    gc.disable()  # nothing that is imported is garbage: looking for some among it takes an eighth of the time
    lean_torch.import_lean()
    from engine import main as engine_main
    from tiers import copy_sum

    copy_sum.make_ready()
    _compile_renamings()
    _know_model(Path(model_dir))
    gc.freeze()  # what is imported now is shared with the children, page by page, until somebody writes
    gc.enable()
    log.info("nursery.imported", seconds=round(time.monotonic() - started, 2))
    return engine_main.run


def _compile_renamings() -> None:
    """The thousand patterns by which transformers renames weights of all its models: half of what an engine's start would take."""
    with contextlib.suppress(ImportError):  # an engine does it itself, where transformers does it elsewhere
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("")


def _know_model(model_dir: Path) -> None:
    """The code of the model's architecture, and its vocabulary: an engine that read it would stand still meanwhile."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from engine import row_attention
    from engine.grammar import warm
    from engine.lean_transformers import lean
    from engine.model import declared_tokens

    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        with lean():
            MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        row_attention.make_ready(_row_sizes(config.get_text_config()))
        warm(model_dir, *declared_tokens(model_dir, config))
    except Exception as error:  # the engine itself will say what is wrong with the model, with the whole story
        log.warning("nursery.model_unknown", model_dir=str(model_dir), error=str(error))


def _row_sizes(config: Any) -> list[tuple[int, int]]:
    """Of the attention's keys and values, as far as the configuration tells."""
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return [(width, width)] if width else []


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns when told to stop."""
    parser = argparse.ArgumentParser(prog="python -m engine.nursery", description=__doc__)
    parser.add_argument("--config-json", required=True, help="resolved settings (ops.config.Config.engine_json)")
    settings = json.loads(parser.parse_args(argv).config_json)
    set_thread_environment(settings["engine"]["threads"])
    Nursery(settings, import_engine(settings["model_dir"])).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
