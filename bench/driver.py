"""Drive a whole Concordia from outside: start it, talk to it, kill any part of it, see that nothing is left.

Used by every bench that needs real processes and by tests/system. Runs in the bench's or test's own process, imports no
torch, and touches nothing but one data directory, its lane directory and the processes that it started: each carries a
mark in its environment, so that one that changed its parent is found too. Waits are for events, with a deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from bench import scratch
from bench.ports import free_port
from bench.sse import Answer, SseConnection, StreamError, Watcher
from tiers.paths import Paths

MARK = "SYSTEM_DRIVER_MARK"
POLLED = ('"path": "/admin/engines"', '"path": "/health"')
T = TypeVar("T")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
Settings = dict[str, dict[str, Any]]


class DriverError(StreamError):
    """The system didn't do what was waited for; the message has the end of its log."""


class NotAnswered(DriverError):
    """The connection ended before there was so much as a header: nothing was promised, the request may be sent again."""


class StreamOver(DriverError):
    """Nothing is left to be computed of the stream, so no engine serves it."""


def wait_for(what: str, probe: Callable[[], T | None], timeout_s: float = 60.0, every_s: float = 0.01) -> T:
    """Call `probe` until it gives something true; DriverError when the deadline passes."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise DriverError(f"waited {timeout_s:g} s for {what}")
        time.sleep(every_s)


# ---------------------------------------------------------------- processes


# Starts every system: whoever asks for one may be a thread that ends before it.
_starter = ThreadPoolExecutor(1, thread_name_prefix="starter")


def _end_with_parent() -> None:
    """In the child: SIGTERM when the thread that started it ends, so that a killed test or bench leaves nothing."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def process_state(pid: int) -> str:
    """The letter of /proc/PID/stat ("R", "S", "T", "Z" ...), "" when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether the process exists and isn't a zombie."""
    return process_state(pid) not in ("", "Z", "X")


def is_marked(pid: int, mark: str) -> bool:
    """Whether it is a live process whose environment carries the mark."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0") and alive(pid)


def marked_processes(mark: str) -> dict[int, str]:
    """Pid and command line of every live process whose environment carries the mark."""
    found = {}
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        if is_marked(pid, mark):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                found[pid] = line.replace(b"\0", b" ").decode(errors="replace")
    return found


# ---------------------------------------------------------------- the system


@dataclass(frozen=True, slots=True)
class EngineView:
    """One row of GET /admin/engines."""

    id: str
    pid: int
    state: str
    row: dict[str, Any]

    @property
    def stats(self) -> dict[str, Any]:
        return self.row.get("stats") or {}

    @property
    def streams(self) -> list[dict[str, Any]]:
        return self.row.get("streams") or []

    @property
    def busy(self) -> bool:
        """Whether the gateway has it work on something, or its own counters (about a second old) say so."""
        return bool(self.streams or self.stats.get("running") or self.stats.get("waiting"))


class System:
    """One `concordia serve` with its own data directory, lane directory and port.

    settings    sections of concordia.toml ({"engine": {"threads": 1}, ...}), written into the data directory
    environment extra variables for the serving processes
    """

    def __init__(
        self,
        model: str | Path,
        data_dir: str | Path,
        *,
        engines: int = 2,
        settings: Settings | None = None,
        arguments: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        port: int = 0,
        api_key: str = "",
    ) -> None:
        self.model = str(model)
        self.paths = Paths.at(data_dir)
        self.engine_count = engines
        self.settings = settings or {}
        self.arguments = arguments
        self.environment = environment or {}
        self.port = port or free_port()
        self.api_key = api_key
        self.mark = uuid.uuid4().hex
        self._model_name = ""
        self.serve: subprocess.Popen[bytes] | None = None
        self.log_path = Path(str(self.paths.data_dir) + ".log")

    # ------------------------------------------------------------ life

    def command(self) -> list[str]:
        concordia = str(Path(sys.executable).with_name("concordia"))
        options = {
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--data-dir": str(self.paths.data_dir),
            "--model": self.model,
            "--engines": str(self.engine_count),
            "--device": "cpu",
        }
        return [concordia, "serve", *(part for pair in options.items() for part in pair), *self.arguments]

    def spawn(self) -> None:
        """Start `concordia serve` and return at once."""
        assert self.serve is None or self.serve.poll() is not None, "it runs already"
        self.paths.data_dir.mkdir(parents=True, exist_ok=True)
        self.paths.config.write_text(toml_text(self.settings))
        environment = {**os.environ, **self.environment, MARK: self.mark}
        if self.api_key:
            environment["CONCORDIA_API_KEY"] = self.api_key
        with open(self.log_path, "ab") as log:
            self.serve = _starter.submit(
                subprocess.Popen,
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # one prctl, no lock that another thread could hold
            ).result()

    def start(self, timeout_s: float = 180.0) -> System:
        """Start and wait until every engine can serve."""
        self.spawn()
        self.wait_ready(timeout_s=timeout_s)
        return self

    def wait_ready(self, engines: int | None = None, timeout_s: float = 120.0, every_s: float = 0.05) -> None:
        """Wait until /health is 200 and that many engines (default: all) are ready."""
        wanted = self.engine_count if engines is None else engines
        self.wait(
            f"{wanted} ready engines",
            lambda: len(self.ready_engines()) >= wanted and self.healthy(),
            timeout_s,
            every_s,
        )

    def wait(self, what: str, probe: Callable[[], T | None], timeout_s: float = 60.0, every_s: float = 0.02) -> T:
        """`wait_for` that also fails at once when `serve` ends, and shows the log's end."""

        def checked() -> T | None:
            if self.serve is not None and self.serve.poll() is not None:
                raise DriverError(f"serve ended with {self.serve.returncode} while waiting for {what}")
            return probe()

        try:
            return wait_for(what, checked, timeout_s, every_s)
        except StreamOver:
            raise
        except DriverError as error:
            raise DriverError(f"{error}; end of {self.log_path}:\n{self.log_tail()}") from None

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, wait for the graceful end, assert that no process is left; return the exit status."""
        assert self.serve is not None, "not started"
        if self.serve.poll() is None:
            self.serve.send_signal(signal.SIGTERM)
        try:
            status = self.serve.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DriverError(f"serve did not end on SIGTERM in {timeout_s:g} s:\n{self.log_tail()}") from None
        wait_for("an end of every process", lambda: not self.processes(), 60.0, 0.02)
        return status

    def kill_all(self) -> None:
        """SIGKILL every process of this system, as a crash of the whole would, and wait until all are gone."""
        for pid in sorted(self.processes(), key=lambda pid: self.serve is None or pid != self.serve.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.serve is not None:
            self.serve.wait(60.0)
        wait_for("the death of every process", self._nothing_left, 60.0, 0.02)

    def _nothing_left(self) -> bool:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not self.processes()

    def close(self, keep_data: bool = False) -> None:
        """End whatever still runs (hard) and remove lanes, and the data directory unless it is kept."""
        if self.processes() or (self.serve is not None and self.serve.poll() is None):
            self.kill_all()
        shutil.rmtree(self.paths.lane_dir, ignore_errors=True)
        if not keep_data:
            shutil.rmtree(self.paths.data_dir, ignore_errors=True)

    def log_tail(self, line_count: int = 40) -> str:
        """The log's last lines, without those about this driver's own polling."""
        if not self.log_path.exists():
            return ""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if not any(path in line for path in POLLED)][-line_count:])

    # ------------------------------------------------------------ processes

    def processes(self) -> dict[int, str]:
        """Every live process of this system: pid and command line."""
        return marked_processes(self.mark)

    def pid(self, name: str) -> int:
        """Pid of "serve", or what the pid file of "gateway", "host", "keeper", "nursery", "e0" says; 0 if dead."""
        if name == "serve":
            return self.serve.pid if self.serve else 0
        try:
            pid = int(json.loads(self.paths.pid_file(name).read_text())["pid"])
        except (OSError, ValueError, KeyError):
            return 0
        return pid if is_marked(pid, self.mark) else 0

    def signal(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a named process and return its pid."""
        pid = self.pid(name)
        if not pid:
            raise DriverError(f"no live process {name}: {self.processes()}")
        os.kill(pid, number)
        return pid

    def wait_dead(self, pid: int, timeout_s: float = 30.0) -> None:
        self.wait(f"the death of {pid}", lambda: not alive(pid), timeout_s)

    # ------------------------------------------------------------ HTTP

    def headers(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {**key, **(extra or {})}

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> tuple[int, dict[str, str], Any]:
        """One plain request: status, headers (lower case), JSON body (or text where it isn't JSON)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        payload = raw if raw is not None else (None if body is None else json.dumps(body).encode())
        sent = self.headers(headers)
        if payload is not None:
            sent.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, body=payload, headers=sent)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        finally:
            connection.close()
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        return response.status, {key.lower(): item for key, item in response.getheaders()}, value

    def get(self, path: str) -> Any:
        """GET that must succeed; its JSON."""
        status, _, body = self.call("GET", path)
        if status != 200:
            raise DriverError(f"GET {path}: {status} {body}")
        return body

    def model_name(self) -> str:
        """What this system calls its model."""
        if not self._model_name:
            self._model_name = str(self.get("/v1/models")["data"][0]["id"])
        return self._model_name

    def healthy(self) -> bool:
        try:
            return self.call("GET", "/health", timeout_s=5.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def engines(self) -> list[EngineView]:
        """GET /admin/engines; empty while no gateway answers."""
        try:
            status, _, body = self.call("GET", "/admin/engines", timeout_s=5.0)
        except (OSError, http.client.HTTPException):
            return []
        if status != 200:
            return []
        rows = body if isinstance(body, list) else body.get("engines") or body.get("data") or []
        return [EngineView(str(row["id"]), int(row.get("pid") or 0), str(row.get("state")), row) for row in rows]

    def ready_engines(self) -> list[EngineView]:
        return [engine for engine in self.engines() if engine.state == "ready" and alive(engine.pid)]

    def serving_engine(self, stream_id: str = "") -> EngineView:
        """The engine that works on the stream (or the only busy one). Raises StreamOver."""

        def probe() -> EngineView | None:
            serving = [e for e in self.engines() if any(stream_id in s["stream"] for s in e.streams)]
            if not serving and stream_id and self.is_over(stream_id):
                raise StreamOver(f"stream {stream_id} has ended")
            return serving[0] if serving else None

        return self.wait(f"an engine that serves {stream_id or 'anything'}", probe, 60.0, 0.01)

    def is_over(self, stream_id: str) -> bool:
        """Whether the gateway says that nothing more is computed of the stream."""
        try:
            status, _, body = self.call("GET", "/v1/streams?all=true", timeout_s=5.0)
        except (OSError, http.client.HTTPException):
            return False
        return status == 200 and not any(stream_id in (row["id"], row["group"]) for row in body["data"])

    # ------------------------------------------------------------ streams

    def stream(
        self,
        path: str,
        body: dict[str, Any],
        *,
        headers: dict[str, str] | None = None,
        watch: Watcher | None = None,
        stop_after: int | None = None,
        timeout_s: float = 120.0,
        answer: Answer | None = None,
    ) -> Answer:
        """POST a streamed request (with usage), read it to its end; `watch` runs after each event, hangs up after `stop_after` tokens.

        Raises NotAnswered; a connection that ends later is said in the answer (`broken`).
        """
        usage = {"stream_options": {"include_usage": True}}
        body = {"model": self.model_name(), **usage, **body, "stream": True}
        return self._read("POST", path, body, headers, watch, stop_after, timeout_s, answer or Answer())

    def resume(
        self,
        answer: Answer,
        *,
        watch: Watcher | None = None,
        timeout_s: float = 120.0,
        by: Literal["header", "query"] = "header",
    ) -> Answer:
        """Go on reading a stream after the last event that `answer` has, at whatever gateway is there now."""
        last = answer.events[-1].id if answer.events else None
        path, headers = f"/v1/streams/{answer.stream_id}", {}
        if last is not None and by == "header":
            headers["Last-Event-ID"] = last
        elif last is not None:
            path += f"?from={answer.ids[-1]}"
        answer.broken = ""
        return self._read("GET", path, None, headers, watch, None, timeout_s, answer)

    def fetch(self, stream_id: str, timeout_s: float = 120.0) -> Answer:
        """A stream from its very first event."""
        path = f"/v1/streams/{stream_id}"
        return self._read("GET", path, None, None, None, None, timeout_s, Answer(stream_id=stream_id))

    def _read(
        self,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str] | None,
        watch: Watcher | None,
        stop_after: int | None,
        timeout_s: float,
        answer: Answer,
    ) -> Answer:
        answer.sent_at = time.perf_counter()
        try:
            connection = SseConnection(self.port, method, path, body, self.headers(headers), timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise NotAnswered(f"{method} {path}: {error!r}") from error
        try:
            answer.status, answer.headers = connection.status, connection.headers
            answer.stream_id = connection.headers.get("x-stream-id", answer.stream_id)
            if connection.status != 200:
                raise DriverError(f"{method} {path}: {connection.status} {connection.response.read()[:2000]!r}")
            for frame in connection.frames():
                if isinstance(frame, str):
                    answer.comments.append((frame, time.perf_counter()))
                    continue
                answer.events.append(frame)
                if watch is not None:
                    watch(answer)
                if stop_after is not None and len(answer.tokens) >= stop_after:
                    answer.broken = "hung up"
                    return answer
            if not answer.done:
                answer.broken = "body ended early"
        except (OSError, http.client.HTTPException) as error:
            answer.broken = repr(error)
        finally:
            connection.close()
        return answer


def toml_text(settings: Settings) -> str:
    """Sections of plain values as TOML; JSON literals of strings, numbers and booleans are TOML's too."""
    lines = []
    for section, values in settings.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def system(model: str | Path, *, name: str = "bench", **options: Any) -> Iterator[System]:
    """A started System in a temporary data directory, gone afterwards with everything it made."""
    with scratch.directory(name) as directory:
        running = System(model, directory / "data", **options)
        try:
            yield running.start()
        finally:
            running.close()


def request(prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    """Body of a greedy completion request that tells its usage."""
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream_options": {"include_usage": True},
        **more,
    }


def at_once(calls: list[Callable[[], T]], timeout_s: float = 300.0) -> list[T]:
    """Run calls in a thread each, started together; their results in order. The first error is raised."""
    barrier = threading.Barrier(len(calls))
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(index: int, call: Callable[[], T]) -> None:
        try:
            barrier.wait(60.0)
            results[index] = call()
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        if thread.is_alive():
            raise DriverError(f"a client thread still ran after {timeout_s:g} s")
    if errors:
        raise errors[0]
    return results
