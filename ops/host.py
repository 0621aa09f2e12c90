"""Host agent: one per machine. Starts, watches, fences and restarts engines; keeps keeper and nursery running; tells gateways.

Process of its own (`python -m ops.host`, started by `serve`), one asyncio loop, one named thread per engine that blocks on the robust
mutex in its status page. An engine is dead when its main thread is gone (mutex, then pidfd) and hung when `ops/hang.py` says so of its
silence; either way it gets SIGKILL, and `EngineDown` is sent only when it is dead for certain: fence, then restore.
When this process dies, keeper and nursery die with it, engines go on, and the next host agent adopts them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from engine import messages, pid_file, wire
from engine.status_page import StatusPage
from ops.deaths import OomKills, from_outside, look_at_end
from ops.errors import ModelError, OpsError
from ops.hang import HangJudge, Hung, look_at
from ops.processes import (
    Backoff,
    ChildCommand,
    FileLock,
    KeptProcess,
    become_subreaper,
    child_environment,
    reap,
    signal_pidfd,
    times,
)
from ops.settings import HostSettings
from ops.watchdog import Watchdog
from tiers.heartbeat import beat_for_ever
from tiers.paths import Paths

log = structlog.get_logger("host")

SERVING = ("ready", "draining")  # states of a page; an adopted engine may be about to end
POLL_S = 0.01  # state of a page, or of the nursery's child, that is about to change
REAP_LOOKS = 500  # until the nursery has noticed what the host agent has noticed
NURSERY_TIMEOUT_S = 120.0  # it imports torch first; half a minute on a slow disk
HOPELESS_STARTS = 4  # of one engine, before any has served: the model or the settings are wrong
QUICK_RESTARTS = 5
STOOD_STILL_S = 1.0  # this process itself: it was stopped, or starved
RESTART_LOOK_S = 0.05
SUBSCRIBER_BUFFER_BYTES = 1 << 20
# Nobody waits for it: lanes hold what it doesn't drain, it computes for long at a time, and someone may hold it while they copy the store.
KEEPER_PATIENCE = 12
DEATHS_KEPT = 64  # told to a gateway that subscribes: it may have been away


@dataclass(frozen=True, slots=True)
class Down:
    """How an incarnation ended."""

    reason: str
    detect_ms: float
    fence_ms: float
    cause: str = ""


class NurseryAway(Exception):
    """The nursery can't be asked now; start engines without it or try again."""


class EngineWatch:
    """One incarnation of one engine, from the fork to its certain death. Lives on the host agent's loop."""

    def __init__(self, engine: str, incarnation: int, pid: int, paths: Paths, settings: HostSettings) -> None:
        self.engine = engine
        self.incarnation = incarnation
        self.pid = pid
        self.ready = False
        self.fenced = False  # it was alive when it was killed here
        self.exit_code: int | None = None  # negative for a signal
        self.out_of_memory = False
        self.started = time.monotonic()
        self._paths = paths
        self._settings = settings
        self._pidfd = os.pidfd_open(pid)  # raises ProcessLookupError if it is gone already
        self._page: StatusPage | None = None
        self._main_gone = asyncio.Event()  # main thread gone: nothing is sent or committed any more
        self._process_gone = asyncio.Event()  # memory freed, pid reapable
        self._suspect = asyncio.Event()
        self._awake = asyncio.Event()  # either of the two, or time to look
        self._suspect_reason = ""
        self._judge = HangJudge(
            settings.hang_floor_ms, settings.stopped_ms, settings.spin_limit_s * 1000, settings.watch_interval_ms
        )
        self.on_slow: Callable[[EngineWatch, str, float], None] = lambda watch, cause, beat_age_ms: None
        self._oom_kills = OomKills()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._on_pidfd)

    def _on_pidfd(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._process_gone.set()
        self._on_main_gone()

    def _on_main_gone(self) -> None:
        self._main_gone.set()
        self._awake.set()

    def close(self) -> None:
        """Give the pidfd back. Call when the process is gone, or when it is left to the next host agent."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)

    def suspect(self, reason: str) -> None:
        """Somebody lost touch with it: fence it."""
        self._suspect_reason = reason
        self._suspect.set()
        self._awake.set()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        signal_pidfd(self._pidfd, number)

    # ------------------------------------------------------------ start

    async def wait_ready(self) -> bool:
        """Wait until it serves. False: it died, or took too long and was killed."""
        deadline = self.started + self._settings.load_timeout_s
        while not self._main_gone.is_set():
            if self._page is None:
                self._open_page()
            if self._page is not None and self._page.state in SERVING:
                self.ready = True
                return True
            if time.monotonic() > deadline:
                log.error("watch.load_timeout", engine=self.engine, waited_s=self._settings.load_timeout_s)
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._main_gone.wait()
        await self.fence()
        return False

    def _open_page(self) -> None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            page = StatusPage.open(self._paths.status(self.engine))
            if page.pid == self.pid and page.incarnation == self.incarnation:
                self._page = page
                threading.Thread(
                    target=self._block_on_mutex,
                    args=(page,),
                    name=f"watch-{self.engine}-{self.incarnation}",
                    daemon=True,
                ).start()

    def _block_on_mutex(self, page: StatusPage) -> None:
        """Thread watch-ENGINE-INCARNATION: the kernel lets go of the mutex before it frees the process's memory."""
        while not self._process_gone.is_set():
            if page.wait_for_death(1.0):
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
                    self._loop.call_soon_threadsafe(self._on_main_gone)
                return

    # ------------------------------------------------------------ life

    async def wait_down(self) -> Down:
        """Watch until it is dead for certain."""
        page = self._page
        assert page is not None, "wait_down before wait_ready"
        interval_s = self._settings.watch_interval_ms / 1000
        while True:
            slept_at = time.monotonic()
            await self._sleep_or_news(interval_s)
            if time.monotonic() - slept_at > interval_s + STOOD_STILL_S:
                self._judge.watcher_stood_still(time.monotonic())
            self._oom_kills.note()
            if self._main_gone.is_set():
                return await self._down_after_death(page)
            if self._suspect.is_set():
                return await self._down_after_suspicion(page)
            hung = self._judge_silence(page)
            if hung is not None:
                return await self._down_after_hang(page, hung)

    def _judge_silence(self, page: StatusPage) -> Hung | None:
        """Costs a look into /proc only while the engine is silent for longer than two looks."""
        age_ms = page.beat_age_ms()
        if age_ms < 2 * self._settings.watch_interval_ms:
            self._judge.beat()
            return None
        hung = self._judge.judge(look_at(self.pid, age_ms, page.hang_bound_ms))
        cause = "" if hung else self._judge.slow()
        if cause:
            log.warning("watch.slow", engine=self.engine, incarnation=self.incarnation, cause=cause, silent_ms=age_ms)
            self.on_slow(self, cause, age_ms)
        return hung

    async def _sleep_or_news(self, interval_s: float) -> None:
        """Twenty times a second for each engine, so without a task or an exception."""
        alarm = self._loop.call_later(interval_s, self._awake.set)
        try:
            await self._awake.wait()
        finally:
            alarm.cancel()
            self._awake.clear()

    async def _down_after_death(self, page: StatusPage) -> Down:
        reason = {"failed": "device error", "draining": "exited"}.get(page.state, "killed")
        return Down(reason, 0.0, await self.fence())

    async def _down_after_suspicion(self, page: StatusPage) -> Down:
        if page.state == "draining":  # it closes its sockets as it goes; let it finish
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.stop_timeout_s):
                    await self._main_gone.wait()
        alive = not self._main_gone.is_set()
        log.warning(
            "watch.suspect", engine=self.engine, incarnation=self.incarnation, why=self._suspect_reason, alive=alive
        )
        return await self._down_after_death(page)

    async def _down_after_hang(self, page: StatusPage, hung: Hung) -> Down:
        age_ms = page.beat_age_ms()
        log.warning(
            "watch.hung", engine=self.engine, incarnation=self.incarnation, cause=hung.cause,
            beat_age_ms=round(age_ms), bound_ms=round(hung.bound_ms),
        )  # fmt: skip
        return Down("hung", age_ms, await self.fence(), hung.cause)

    async def fence(self) -> float:
        """SIGKILL, then wait until nothing of it can run; returns the milliseconds it took. Waits for ever: unfenced is alive."""
        started = time.monotonic()
        if self._page is not None:
            self._page.fence()  # should it ever run again, it finds that it was replaced
        self._look_at_its_end()
        self.signal(signal.SIGKILL)
        while not self._main_gone.is_set():
            try:
                async with asyncio.timeout(5.0):
                    await self._main_gone.wait()
            except TimeoutError:
                log.error("fence.waiting", engine=self.engine, pid=self.pid, waited_s=round(time.monotonic() - started))
        return (time.monotonic() - started) * 1000

    def _look_at_its_end(self) -> None:
        """Before SIGKILL: whether it is dying already, and of what."""
        self.fenced, self.exit_code = look_at_end(self.pid)
        self.out_of_memory = self._oom_kills.lately

    async def wait_gone(self, timeout_s: float) -> bool:
        """Wait until the process is out of the process table but for its exit code."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._process_gone.wait()
        return self._process_gone.is_set()


class Nursery:
    """Client of `engine/nursery.py`: one request, one answer, with a deadline."""

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path

    async def spawn(self, engine: str, incarnation: int) -> int:
        """Fork an engine; its pid. Waits while the nursery is still importing. Raises NurseryAway."""
        answer = await self._ask({"op": "spawn", "engine": engine, "incarnation": incarnation})
        return int(answer["pid"])

    async def exit_code(self, pid: int) -> int | None:
        """Exit code of an engine that is dead, once it has reaped it; None if it is no child of this nursery."""
        try:
            for _ in range(REAP_LOOKS):
                async with asyncio.timeout(1.0):
                    status = await self._ask({"op": "status", "pid": pid})
                if not status["running"]:
                    return status["exit"]
                await asyncio.sleep(POLL_S)
        except (NurseryAway, TimeoutError):
            pass
        return None

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(NURSERY_TIMEOUT_S):
                reader, writer = await self._connect()
                try:
                    writer.write(json.dumps(request).encode() + b"\n")
                    await writer.drain()
                    answer = json.loads(await reader.readline() or b"{}")
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError) as error:
            raise NurseryAway(f"{type(error).__name__}: {error}") from error
        if not answer or "error" in answer:
            raise NurseryAway(answer.get("error", "it closed the connection"))
        return answer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_unix_connection(str(self._socket_path))
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(0.05)


class HostAgent:
    """Owner of all tasks of the host agent. `run` returns after SIGTERM, with everything down."""

    def __init__(self, settings: dict[str, Any], *, engine_module: str = "engine.main", keeper: bool = True) -> None:
        self.settings = settings
        self.host = HostSettings(**settings["host"])
        self.paths = Paths(Path(settings["data_dir"]), Path(settings["lane_dir"]))
        self.engines = [f"e{index}" for index in range(self.host.engines)]
        self.watches: dict[str, EngineWatch] = {}
        self._engine_settings = {key: value for key, value in settings.items() if key not in ("host", "gateway")}
        self._digest = pid_file.settings_digest(self._engine_settings)
        self._engine_module = engine_module
        self._threads = {name: str(settings["engine"]["threads"]) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._lock = FileLock(self.paths.host_lock)
        self._nursery = Nursery(self.paths.nursery_socket)
        self._direct: dict[int, subprocess.Popen[bytes]] = {}
        self._subscribers: set[asyncio.StreamWriter] = set()
        self._gone: deque[messages.EngineGone] = deque(maxlen=DEATHS_KEPT)
        self._stopping = asyncio.Event()
        self._ever_served = False
        self._backoff = Backoff(self.host.restart_backoff_ms, self.host.restart_limit_ms, self.host.restart_reset_s)
        self._kept = self._kept_processes(keeper)

    def _kept_processes(self, keeper: bool) -> list[KeptProcess]:
        backoff = Backoff(200, self.host.restart_limit_ms, self.host.restart_reset_s)
        commands = [keeper_command(self._engine_settings)] if keeper else []
        if self.host.nursery:
            commands.append(ChildCommand("nursery", "engine.nursery", self._engine_settings))
        return [
            KeptProcess(command, self.paths.pid_file(command.name), backoff, watchdog=self._watchdog(command.name))
            for command in commands
        ]

    def _watchdog(self, name: str) -> Watchdog:
        patience = KEEPER_PATIENCE if name == "keeper" else 1
        return Watchdog(self.paths.beat(name), patience * self.host.silent_limit_s, patience * self.host.spin_limit_s)

    def stop(self) -> None:
        """Begin the stop; `run` returns when all is down."""
        self._stopping.set()

    async def run(self) -> None:
        """Everything, until `stop`."""
        await self._lock.take_soon("another host agent runs here", 5.0)
        become_subreaper()
        beating = asyncio.create_task(beat_for_ever(self.paths.beat("host")))
        self._clear_sockets()
        server = await asyncio.start_unix_server(self._serve_gateway, str(self.paths.host_socket))
        tasks = [asyncio.create_task(kept.run(), name=kept.command.name) for kept in self._kept]
        await self._end_foreign_engines()
        tasks += [asyncio.create_task(self._keep_engine(engine), name=engine) for engine in self.engines]
        stopping = asyncio.create_task(self._stopping.wait())
        log.info("host.ready", pid=os.getpid(), engines=len(self.engines))
        try:
            done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # none of them ends by itself but by a bug: die of it, `serve` starts the next one
        finally:
            if self._stopping.is_set():
                await self._stop_all(tasks)
            beating.cancel()
            server.close()
            self._lock.release()

    def _clear_sockets(self) -> None:
        for path in (self.paths.host_socket, self.paths.nursery_socket):
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------ engines

    async def _keep_engine(self, engine: str) -> None:
        """Adopt or start it, watch it, start it again; until the stop."""
        deaths = 0
        watch = await self._adopt(engine)
        while not self._stopping.is_set():
            if watch is None:
                watch = await self._start(engine)
            down = await self._live(watch)
            lived_s, never_serves = (
                time.monotonic() - watch.started,
                down is None and watch.exit_code == messages.EXIT_UNSUPPORTED,
            )
            watch = None
            if self._stopping.is_set():
                return
            wanted = down is not None and (down.reason == "exited" or lived_s > self.host.restart_reset_s)
            deaths = 1 if wanted else deaths + 1
            if (deaths >= HOPELESS_STARTS or never_serves) and not self._ever_served:
                self._stopping.set()  # the others end, too
                raise ModelError(f"{engine} ended {times(deaths)} before it could serve; its last lines above say why")
            await self._wait_before_restart(engine, deaths, failed_to_start=down is None)

    async def _wait_before_restart(self, engine: str, deaths: int, *, failed_to_start: bool) -> None:
        """While another engine serves, leave it the machine for its recovery first; with none, start at once.

        The wait ends as soon as the last other engine is gone, too, unless this one failed to start or dies again and again.
        """
        wait_s = self._backoff.wait_s(deaths)
        least_s = wait_s if failed_to_start else 0.0 if deaths <= QUICK_RESTARTS else min(1.0, wait_s)
        log.info("supervise.restart", engine=engine, deaths=deaths, wait_s=wait_s)
        waited_s = 0.0
        while waited_s < wait_s and not self._stopping.is_set():
            nobody_serves = not any(watch.ready for watch in self.watches.values())
            if nobody_serves and waited_s >= least_s:
                return
            await asyncio.sleep(min(RESTART_LOOK_S, wait_s - waited_s))
            waited_s += RESTART_LOOK_S

    async def _live(self, watch: EngineWatch) -> Down | None:
        """One incarnation from start to certain death; None if it never served."""
        self.watches[watch.engine] = watch
        watch.on_slow = self._tell_slow
        down = None
        if await watch.wait_ready():
            self._ever_served = True
            log.info("engine.ready", engine=watch.engine, incarnation=watch.incarnation, pid=watch.pid)
            self._tell(self._up(watch))
            down = await watch.wait_down()
            watch.ready = False
            self._tell(self._down(watch, down))
        del self.watches[watch.engine]
        event = log.info if down is not None and down.reason == "exited" else log.warning
        event(
            "engine.down",
            engine=watch.engine,
            incarnation=watch.incarnation,
            pid=watch.pid,
            reason=down.reason if down else "died before it served",
            cause=down.cause or None if down else None,
            detect_ms=round(down.detect_ms, 2) if down else None,
            fence_ms=round(down.fence_ms, 2) if down else None,
        )
        burial = asyncio.create_task(self._bury(watch, down), name=f"bury-{watch.engine}-{watch.incarnation}")
        if down is None:
            await burial  # its exit code says whether another start is worth while
        return down

    async def _bury(self, watch: EngineWatch, down: Down | None) -> None:
        """Collect what is left of a dead process (exit code, pidfd, zombie). Gateways learn how it ended as soon as that is known."""
        seen = watch.exit_code is not None
        if seen and down is not None:
            self._tell_gone(watch, down)  # now: its memory may take seconds to be freed
        await watch.wait_gone(60.0)
        popen = self._direct.pop(watch.pid, None)
        code = popen.poll() if popen is not None else reap(watch.pid)
        if code is None and self.host.nursery:
            code = await self._nursery.exit_code(watch.pid)
        if not seen:
            watch.exit_code = code
            if down is not None:
                self._tell_gone(watch, down)
        log.info("engine.gone", engine=watch.engine, incarnation=watch.incarnation, pid=watch.pid, exit=watch.exit_code)
        watch.close()

    def _tell_gone(self, watch: EngineWatch, down: Down) -> None:
        oom = watch.out_of_memory
        outside = from_outside(down.reason, down.cause, watch.exit_code, fenced=watch.fenced, out_of_memory=oom)
        gone = messages.EngineGone(watch.engine, watch.incarnation, watch.exit_code, outside)
        self._gone.append(gone)
        self._tell(gone)

    async def _start(self, engine: str) -> EngineWatch:
        while True:
            incarnation = self._next_incarnation(engine)
            self.paths.engine_socket(engine).unlink(missing_ok=True)
            try:
                return EngineWatch(engine, incarnation, await self._spawn(engine, incarnation), self.paths, self.host)
            except (NurseryAway, OSError) as error:  # OSError: no process, memory or room for it, or it is gone already
                log.warning("engine.start_failed", engine=engine, incarnation=incarnation, error=str(error))
                await asyncio.sleep(self.host.restart_backoff_ms / 1000)
            found = self._living(engine)
            if found is not None and found[0].incarnation == incarnation:
                return found[1]  # it was forked before the nursery died or fell silent, and holds the lane

    async def _spawn(self, engine: str, incarnation: int) -> int:
        if self.host.nursery:
            return await self._nursery.spawn(engine, incarnation)
        arguments = ("--engine", engine, "--incarnation", str(incarnation))
        command = ChildCommand(engine, self._engine_module, self._engine_settings, arguments, with_parent=False)
        # No pipe: that holds 64 KB, and the loop would wait for the child to read.
        with open(os.memfd_create("settings"), "w+b") as given:
            given.write(command.input)
            given.seek(0)
            popen = subprocess.Popen(
                command.line, stdin=given, start_new_session=True, env=child_environment() | self._threads
            )
        try:
            pid_file.write(self.paths.pid_file(engine), pid=popen.pid, incarnation=incarnation, settings=self._digest)
        except OSError:  # no later host agent could adopt it
            popen.kill()
            popen.wait()
            raise
        self._direct[popen.pid] = popen
        return popen.pid

    def _next_incarnation(self, engine: str) -> int:
        """One more than any that left a trace; lanes and their traces live equally long."""
        known = pid_file.read(self.paths.pid_file(engine))
        latest = known.incarnation if known else 0
        with contextlib.suppress(FileNotFoundError, ValueError):
            latest = max(latest, StatusPage.open(self.paths.status(engine)).incarnation)
        return latest + 1

    # ------------------------------------------------------------ adoption

    async def _adopt(self, engine: str) -> EngineWatch | None:
        """Take over an engine that an earlier host agent started, if it is alive and was started with the same settings."""
        found = self._living(engine)
        if found is None:
            return None
        known, watch = found
        if not self.host.adopt or known.settings != self._digest:
            log.info(
                "adopt.refused",
                engine=engine,
                pid=known.pid,
                why="other settings" if self.host.adopt else "switched off",
            )
            await self._end(watch)
            return None
        log.info("adopt.engine", engine=engine, incarnation=known.incarnation, pid=known.pid)
        return watch

    def _living(self, engine: str) -> tuple[pid_file.PidFile, EngineWatch] | None:
        """The process that the pid file names, if it is alive, and a watch of it."""
        known = pid_file.read(self.paths.pid_file(engine))
        if known is None or not known.alive:
            return None
        try:
            watch = EngineWatch(engine, known.incarnation, known.pid, self.paths, self.host)
        except ProcessLookupError:  # just now
            return None
        if known.alive:  # and the pid isn't another's by now
            return known, watch
        watch.close()
        return None

    async def _end_foreign_engines(self) -> None:
        """Engines of an earlier start with more engines than now."""
        for path in self.paths.lane_dir.glob("e*.pid"):
            engine = path.stem
            if re.fullmatch(r"e\d+", engine) and engine not in self.engines:
                found = self._living(engine)
                if found is not None:
                    await self._end(found[1])
                self._forget(engine)

    async def _end(self, watch: EngineWatch) -> None:
        """SIGTERM, then SIGKILL; returns when it is gone."""
        watch.signal(signal.SIGTERM)
        if not await watch.wait_gone(self.host.stop_timeout_s):
            log.warning("engine.killed", engine=watch.engine, pid=watch.pid, waited_s=self.host.stop_timeout_s)
            await watch.fence()
            await watch.wait_gone(30.0)
        reap(watch.pid)

    def _forget(self, engine: str) -> None:
        self.paths.pid_file(engine).unlink(missing_ok=True)
        self.paths.engine_socket(engine).unlink(missing_ok=True)

    # ------------------------------------------------------------ gateways

    async def _serve_gateway(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        buffer = wire.FrameBuffer(wire.TO_HOST)
        try:
            while data := await reader.read(1 << 16):
                for message in buffer.feed(data):
                    self._take(message, writer)
        except (ConnectionError, wire.WireError) as error:
            log.warning("host.link_lost", error=str(error))
        except asyncio.CancelledError:
            pass  # the loop ends; 3.11's streams would print a traceback for it
        finally:
            self._subscribers.discard(writer)
            writer.close()

    def _take(self, message: messages.ToHost, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, messages.Subscribe):
            log.info("host.subscribed", gateway=message.gateway)
            self._subscribers.add(writer)
            for watch in self.watches.values():
                if watch.ready:
                    writer.write(wire.encode(self._up(watch)))
            for gone in self._gone:  # it may have missed them
                writer.write(wire.encode(gone))
        else:
            self._take_suspect(message, writer)

    def _take_suspect(self, message: messages.Suspect, writer: asyncio.StreamWriter) -> None:
        watch = self.watches.get(message.engine)
        if watch is not None and watch.ready and watch.incarnation == message.incarnation:
            watch.suspect(message.reason)
        elif watch is None or watch.incarnation > message.incarnation:
            # Told already, perhaps before this gateway subscribed; say it again.
            writer.write(wire.encode(messages.EngineDown(message.engine, message.incarnation, "killed", 0.0, 0.0)))
            for gone in self._gone:
                if (gone.engine, gone.incarnation) == (message.engine, message.incarnation):
                    writer.write(wire.encode(gone))

    def _up(self, watch: EngineWatch) -> messages.EngineUp:
        return messages.EngineUp(
            watch.engine, watch.incarnation, watch.pid, str(self.paths.engine_socket(watch.engine))
        )

    def _down(self, watch: EngineWatch, down: Down) -> messages.EngineDown:
        return messages.EngineDown(
            watch.engine, watch.incarnation, down.reason, down.detect_ms, down.fence_ms, down.cause
        )

    def _tell_slow(self, watch: EngineWatch, cause: str, beat_age_ms: float) -> None:
        self._tell(messages.EngineSlow(watch.engine, watch.incarnation, cause, beat_age_ms))

    def _tell(self, message: messages.FromHost) -> None:
        frame = wire.encode(message)
        for writer in list(self._subscribers):
            if writer.transport.get_write_buffer_size() > SUBSCRIBER_BUFFER_BYTES:
                self._subscribers.discard(writer)  # it does not read: it will subscribe again
                writer.close()
            else:
                writer.write(frame)

    # ------------------------------------------------------------ stop

    async def _stop_all(self, tasks: list[asyncio.Task[None]]) -> None:
        """Engines first (they drain into their lanes), then the keeper (it drains the lanes to disk), then the nursery."""
        log.info("host.stopping", engines=len(self.watches))
        await self._end_engines()
        await self._drain_keeper()
        await asyncio.gather(*(kept.stop(self.host.stop_timeout_s) for kept in self._kept))
        await self._end_engines()  # one that was being born
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for path in (self.paths.host_socket, self.paths.nursery_socket, self.paths.keeper_socket):
            path.unlink(missing_ok=True)
        log.info("host.stopped")

    async def _end_engines(self) -> None:
        await asyncio.gather(*(self._end(watch) for watch in list(self.watches.values())))
        for engine in self.engines:
            self._forget(engine)

    async def _drain_keeper(self) -> None:
        """Everything in the lanes to disk before the keeper ends. Lanes are kept: the next start finds warm pages."""
        if not self.paths.keeper_socket.exists():
            return
        try:
            async with asyncio.timeout(self.host.stop_timeout_s):
                reader, writer = await asyncio.open_unix_connection(str(self.paths.keeper_socket))
                writer.write(b'{"op":"drain","sync":true}\n')
                answer = json.loads(await reader.readline() or b"{}")
                writer.close()
            log.info("host.drained", ok=answer.get("ok", False))
        except (OSError, TimeoutError, ValueError) as error:
            log.warning(
                "host.drain_failed",
                error=str(error),
                hint="nothing is lost: the lanes hold it, the next start drains them",
            )


def keeper_command(settings: dict[str, Any]) -> ChildCommand:
    """`python -m tiers.keeper`, which takes its settings as arguments. With many tenants they are longer than a command line may be."""
    arguments = ["--data-dir", settings["data_dir"], "--lane-dir", settings["lane_dir"]]
    log_settings = settings.get("log", {})
    arguments += [f"--log-{name}={value}" for name, value in log_settings.items()]
    more = ["--settings-json", json.dumps(settings["tiers"])]
    return ChildCommand("keeper", "tiers.keeper", {"log": log_settings, "arguments": more}, tuple(arguments), bare=True)


async def _run(settings: dict[str, Any]) -> None:
    agent = HostAgent(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    await agent.run()


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="python -m ops.host", description=__doc__)
    parser.add_argument("--config-json", required=True, help="resolved settings (ops.config.Config.host_json)")
    settings = json.loads(parser.parse_args(argv).config_json)
    try:
        asyncio.run(_run(settings))
    except OpsError as error:
        log.error("host.failed", error=str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
