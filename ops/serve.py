"""`concordia serve`: the small supervisor in the foreground. Starts gateway and host agent, starts either again when it dies.

Runs in the command's own process on one asyncio loop, holds the port for gateway after gateway, and does nothing else, so that there is
little to fail. SIGTERM, SIGINT, or SIGHUP when its terminal goes: the gateway drains (answers in progress end, or are stored and go on
after the next start), then the host agent ends engines and keeper. A second signal kills. When this process itself is killed, gateway
and host agent die with it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from engine import pid_file
from ops import cuda_lane, listening, running
from ops.client import base_url
from ops.config import Config
from ops.errors import ConfigError, ModelError, OpsError, StateRefused
from ops.models import Model
from ops.processes import Backoff, ChildCommand, FileLock, KeptProcess, become_subreaper, reap_orphans
from ops.show import Progress, counted, print_welcome
from ops.status import engine_state
from ops.watchdog import Watchdog
from tiers.errors import StoreFailed
from tiers.heartbeat import beat_for_ever
from tiers.keys import Keyring
from tiers.lock import is_held
from tiers.paths import SOCKET_PATH_BYTES, Paths
from tiers.view import StoreReader

log = structlog.get_logger("serve")

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_S = 0.2
HEALTH_TIMEOUT_S = 2.0
STOP_MARGIN_S = 5.0
QUICK_DEATHS = 4
LOCK_LOOK_S = 1.0
FATAL = (ModelError.exit_code,)
SERVED = "this data directory is being served already"


class Supervisor:
    """Gateway and host agent of one installation."""

    def __init__(self, config: Config, model_dir: Path, model_name: str, port: list[socket.socket]) -> None:
        self.config = config
        self._port = port
        self._model = Model(model_dir, model_name)
        self._paths = config.paths
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        backoff = Backoff(100, 5000, 30.0)
        host = ChildCommand("host", "ops.host", config.host_json(model_dir, model_name))
        inherited = tuple(held.fileno() for held in port)
        settings = config.gateway_json(model_dir, model_name) | {"listen_on": inherited}
        gateway = ChildCommand("gateway", "gateway", settings, descriptors=inherited)
        self._host = KeptProcess(
            host, self._paths.pid_file("host"), backoff, give_up_after=QUICK_DEATHS, fatal=FATAL,
            watchdog=self._watchdog("host"),
        )  # fmt: skip
        self._gateway = KeptProcess(
            gateway, self._paths.pid_file("gateway"), backoff, give_up_after=QUICK_DEATHS,
            watchdog=self._watchdog("gateway"), on_death=self._gateway_died,
        )  # fmt: skip

    def _gateway_died(self, deaths: int) -> None:
        """Who connects waits for the next one, but not for one that can't start."""
        if deaths >= QUICK_DEATHS:
            listening.send_away(self._port)

    def _watchdog(self, name: str) -> Watchdog:
        return Watchdog(self._paths.beat(name), self.config.host.silent_limit_s, self.config.host.spin_limit_s)

    async def run(self) -> None:
        """Everything, until a signal. Raises OpsError if a part can't be started."""
        loop = asyncio.get_running_loop()
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` asks
                loop.add_signal_handler(number, self._on_signal, number)
        lock = FileLock(self._paths.serve_lock).take(SERVED)
        try:
            become_subreaper()
            pid_file.write(self._paths.pid_file("serve"), pid=os.getpid())
            self._paths.gateway_url.write_text(base_url(self.config))
            running.note(self.config)
            beside = [
                asyncio.create_task(self._keep(lock)),
                asyncio.create_task(beat_for_ever(self._paths.beat("serve"))),
            ]
            try:
                await self._run_children()
            finally:
                for task in beside:
                    task.cancel()
        finally:
            self._remove_leftovers()
            running.forget(self._paths)
            self._paths.pid_file("serve").unlink(missing_ok=True)
            lock.release()

    async def _keep(self, lock: FileLock) -> None:
        """Whoever deletes the data directory leaves the name of the lock free; the dead of the dead are to be buried."""
        while True:
            await asyncio.sleep(LOCK_LOOK_S)
            lock.keep()
            own = frozenset((self._host.pid, self._gateway.pid))
            if 0 not in own:  # engines of a host agent that died are this process's children
                reap_orphans(own)

    def _remove_leftovers(self) -> None:
        """The address, heartbeats, and sockets whose processes are gone; an engine that goes on keeps its own."""
        self._paths.gateway_url.unlink(missing_ok=True)
        for path in self._paths.lane_dir.glob("*.beat"):
            path.unlink(missing_ok=True)
        for socket_path in self._paths.lane_dir.glob("*.sock"):
            known = pid_file.read(self._paths.pid_file(socket_path.stem))
            if known is None or not known.alive:
                socket_path.unlink(missing_ok=True)

    def _on_signal(self, number: int) -> None:
        if self._stopping.is_set():
            self._killing.set()
        log.info("serve.stopping", signal=signal.Signals(number).name, again=self._killing.is_set())
        self._stopping.set()

    async def _run_children(self) -> None:
        kept = [asyncio.create_task(part.run(), name=part.command.name) for part in (self._host, self._gateway)]
        stopping = asyncio.create_task(self._stopping.wait())
        welcome = asyncio.create_task(self._welcome())
        try:
            done, _ = await asyncio.wait([stopping, *kept], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            welcome.cancel()
            stopping.cancel()
            await self._stop_children()
            for task in kept:
                task.cancel()
            await asyncio.gather(welcome, *kept, return_exceptions=True)

    async def _stop_children(self) -> None:
        kill = asyncio.create_task(self._kill_on_second_signal())
        for held in self._port:  # the gateway has its own; after it nobody would answer
            held.close()
        await self._gateway.stop(self.config.gateway.drain_s + STOP_MARGIN_S)
        await self._host.stop(3 * self.config.host.stop_timeout_s + STOP_MARGIN_S)
        kill.cancel()

    async def _kill_on_second_signal(self) -> None:
        await self._killing.wait()
        self._gateway.signal(signal.SIGKILL)
        self._host.signal(signal.SIGKILL)
        kill_all(self.config)

    # ------------------------------------------------------------ start

    async def _welcome(self) -> None:
        """Say how far the start is, and when it serves what to try."""
        started = time.monotonic()
        with Progress("starting") as progress:
            while not await self._healthy():
                progress.say(f"starting: {self._start_state()}")
                await asyncio.sleep(POLL_S)
        self._host.proved = self._gateway.proved = True
        log.info("serve.ready", seconds=round(time.monotonic() - started, 1), url=base_url(self.config))
        with contextlib.suppress(OSError):  # nobody reads it: that ends no server
            print_welcome(base_url(self.config), self.config, self._model, seconds=time.monotonic() - started)
            sys.stdout.flush()

    async def _healthy(self) -> bool:
        if not any(engine_state(self._paths, name) == "ready" for name in self._engines()):
            return False  # no need to ask
        with contextlib.suppress(TimeoutError, OSError, ValueError, IndexError):
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                return await get_status(base_url(self.config) + "/health", self.config.gateway.any_key) == 200
        return False

    def _start_state(self) -> str:
        states = {name: engine_state(self._paths, name) for name in self._engines()}
        # Of the run before, or just now: the host agent sees to it.
        return ", ".join(f"{name} {'to be started' if state == 'dead' else state}" for name, state in states.items())

    def _engines(self) -> list[str]:
        return [f"e{index}" for index in range(self.config.started_engines)]


async def get_status(url: str, api_key: str) -> int:
    """HTTP status of a GET. By hand: a client library would be a third of what is imported here.

    Raises  OSError, ValueError, IndexError where nobody answers, or not in HTTP
    """
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        headers = [
            f"Host: {place.netloc}",
            "Connection: close",
            *([f"Authorization: Bearer {api_key}"] if api_key else []),
        ]
        writer.write("\r\n".join([f"GET {place.path} HTTP/1.1", *headers, "", ""]).encode())
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


def check_sockets(config: Config) -> None:
    """Raise ConfigError if the lane directory's name is too long for the sockets in it."""
    longest = config.paths.longest_socket_bytes
    if longest > SOCKET_PATH_BYTES:
        raise ConfigError(
            f"{config.sources['lane_dir']}: lane_dir {config.paths.lane_dir} is too long: the sockets in it would have paths of {longest} "
            f"bytes, and the kernel takes {SOCKET_PATH_BYTES}; choose a shorter --lane-dir"
        )


def check_device(config: Config) -> None:
    """Raise ConfigError if the driver has no such CUDA device. torch, which takes seconds to import, is not asked."""
    device = config.engine.device
    if not device.startswith("cuda"):
        return
    count = cuda_lane.device_count()
    if int(device.partition(":")[2] or 0) < count:
        return
    found = "there is no CUDA driver here" if count < 0 else f"the CUDA driver has {counted(count, 'device')}"
    raise ConfigError(
        f"{config.sources['engine.device']}: engine.device is {device}, but {found}; start the container with GPUs or install the driver, "
        "or serve with --device cpu"
    )


def kill_all(config: Config) -> list[int]:
    """SIGKILL every process of this installation, by its pid files; what `demo` does to it, and a second Ctrl-C. Returns the pids."""
    killed = []
    for path in sorted(config.paths.lane_dir.glob("*.pid")):
        known = pid_file.read(path)
        if known is not None and known.alive and known.pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(known.pid, signal.SIGKILL)
                killed.append(known.pid)
    return killed


def refuse_early(config: Config) -> None:
    """Refuse what can't be served before anything is made or pulled.

    Raises ConfigError (a lane directory or a device that can't be), AlreadyRunning (directory or port are taken), BadKeys,
           OtherFormat (a store of a later version), BadData (the sessions can't be read), StateRefused (a restore was interrupted)
    """
    check_sockets(config)
    check_device(config)
    lock = config.paths.serve_lock
    if is_held(lock):
        FileLock(lock).take(SERVED).release()  # raises, naming the holder, unless it has just ended
    _refuse_half_restored(config.paths)
    listening.check_port(config.gateway.host, config.gateway.port)
    Keyring.from_environment()  # raises BadKeys now rather than in every process
    from ops.installation import need_whole_sessions

    need_whole_sessions(config.paths)
    store = StoreReader(config.paths.store, map_bytes=config.tiers.store_map_bytes)
    try:
        with store.snapshot():
            pass  # raises OtherFormat: a later version's store, which no process here could use
    except StoreFailed:
        pass  # the keeper says what is wrong, and serving goes on without it
    finally:
        store.close()


def _refuse_half_restored(paths: Paths) -> None:
    from tiers.backup import DRAFT, is_half_restored

    if is_half_restored(paths):
        raise StateRefused(
            f"a restore to {paths.data_dir} was interrupted: run the same `concordia restore` again, which goes on; or, to serve what is "
            f"there, remove {paths.data_dir / DRAFT}"
        )


def serve(config: Config, model_dir: Path, model_name: str) -> None:
    """Serve until a signal of ENDING. Raises OpsError."""
    refuse_early(config)
    try:
        config.paths.make()
    except OSError as error:
        place = f"{error.filename}: {error.strerror}"
        raise OpsError(f"{place}; name directories that can be written to by --data-dir and --lane-dir") from error

    port = listening.listen(config.gateway.host, config.gateway.port)

    async def run() -> None:
        await Supervisor(config, model_dir, model_name, port).run()

    asyncio.run(run())
