"""The gateway process: composes its parts, serves until SIGTERM, drains, exits 0. One asyncio loop (uvloop), no torch.

Start: read back live streams, bind, subscribe at the host agent, attach to engines. A SIGKILL at any point loses
nothing: the next process reads the same journals, and engines have gone on meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import structlog
import uvloop
from aiohttp import web

from gateway import (
    api,
    api_adapters,
    api_admin,
    api_answers,
    api_moves,
    api_sessions,
    api_streams,
    api_tokens,
    metrics,
)
from gateway.adapters import AdapterTable, parse_setting
from gateway.admit import Admission
from gateway.api import GATEWAY, Gateway
from gateway.chat_template import load_chat_template
from gateway.choices import Group, GroupForm, GroupTable
from gateway.config import GatewayConfig, is_loopback
from gateway.dispatch import Dispatcher
from gateway.durability import Durability
from gateway.errors import ApiError
from gateway.host_link import HostLink
from gateway.http_log import HttpLog
from gateway.http_server import Runner
from gateway.journal_sync import JournalSync
from gateway.sealing import Sealing
from gateway.sessions import SessionTable
from gateway.settings import BACKLOG
from gateway.sse import EventForm
from gateway.streams import Stream, StreamTable
from gateway.supervisors import Supervisors
from gateway.tenancy import Keys
from gateway.tokenizer import load_tokenizer, read_model_facts
from tiers import heartbeat
from tiers.keys import BadKeys, Keyring

log = structlog.get_logger()

SWEEP_INTERVAL_S = 5.0
LOOK_INTERVAL_S = 1.0
BODY_MARGIN_BYTES = 1024


class Refused(Exception):
    """The gateway won't start like this; the message says what to change."""


def run(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    try:
        uvloop.run(serve(config))
    except Refused as error:
        log.error("gateway.refused", error=str(error))
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    return 0


async def serve(config: GatewayConfig, stop: asyncio.Event | None = None) -> None:
    """The process's one task; `stop` is set by a signal, or by a test."""
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    check_listen(config)
    _raise_file_limit()
    tasks = TaskOwner()
    gateway, collector = compose(config, tasks)
    metrics.registry.register(collector)
    runner = Runner(
        make_app(gateway),
        handler_cancellation=True,
        access_log=None,
        logger=HttpLog(),
        shutdown_timeout=0.1,
        keepalive_timeout=75.0,
        auto_decompress=False,  # gateway/encodings.py
    )
    try:
        await runner.setup()
        await _listen(config, runner)
        _read_back(gateway)
        tasks.spawn(heartbeat.beat_for_ever(config.paths.beat("gateway")))
        tasks.spawn(gateway.supervisors.run())
        tasks.spawn(gateway.host.run())
        tasks.spawn(_sweep_forever(gateway))
        tasks.spawn(_look_for_files_forever(gateway))
        tasks.spawn(gateway.table.seal_late())
        tasks.spawn(gateway.sessions.watch())
        tasks.spawn(gateway.durability.run())
        tasks.spawn(gateway.durability.journals.run())
        log.info(
            "gateway.ready",
            host=config.gateway.host,
            port=config.gateway.port,
            pid=os.getpid(),
            model=config.model_name,
        )
        await _until(stop, tasks)
        await _drain(gateway)
    finally:
        gateway.draining = True
        await runner.cleanup()
        await tasks.close()
        metrics.registry.unregister(collector)
        gateway.table.close()
        gateway.groups.close()
        gateway.durability.journals.close()
        gateway.sessions.close()
        log.info("gateway.stopped", live_streams=len(gateway.table.live))


def _read_back(gateway: Gateway) -> None:
    """Streams of an earlier process, from their journals: their sessions, then those that have not ended go on."""
    ended: list[Stream] = []
    streams = gateway.table.load_live(ended.append, every=gateway.sessions.to_rebuild)
    gateway.groups.load()
    for session in gateway.sessions.read_back([*ended, *streams]):
        gateway.durability.doubt(session)
    gateway.dispatcher.resume_all(streams, gateway.host.subscribed)


def check_listen(config: GatewayConfig) -> None:
    """Beyond loopback only with a key."""
    if not is_loopback(config.gateway.host) and not config.gateway.any_key:
        raise Refused(
            f"{config.gateway.host} can be reached from other machines, so an API key is needed: "
            "set --api-key, CONCORDIA_API_KEY, api_key_file or [tenants.NAME] api_key, or listen on 127.0.0.1"
        )


def compose(config: GatewayConfig, tasks: TaskOwner) -> tuple[Gateway, metrics.EngineCollector]:
    """Build all parts; nothing runs yet."""
    identity = f"gateway-{os.getpid()}-{secrets.token_hex(3)}"
    codec = load_tokenizer(config.model_dir)
    facts = read_model_facts(config.model_dir)
    tiers = config.tiers
    journals = JournalSync(config.paths.journal_dir, durability=tiers.durability, interval_ms=tiers.sync_interval_ms)
    sealing = _sealing()
    table = StreamTable(config.paths.journal_dir, codec, journals.written, sealing)
    sessions = SessionTable(config.paths.sessions, sealing)
    host = HostLink(config.paths.host_socket, identity)
    dispatcher = Dispatcher(config.gateway, table, identity, host.suspect, host.settled, tasks.spawn)
    host.on_news = dispatcher.on_host_news
    groups = GroupTable(config.paths.journal_dir, table, journals.written, sealing)
    adapters = _adapters(config.paths.data_dir / "adapters")
    dispatcher.adapter_directory = adapters.directory
    _name_adapters(config, adapters)

    supervisors = Supervisors(config.paths)
    dispatcher.inquests.host_speaks = supervisors.host_speaks
    durability = Durability(
        config.paths.keeper_socket, table, sessions, dispatcher.engines.values, journals, lambda: supervisors.away
    )
    if tiers.durability == "turn":
        dispatcher.before_end = durability.settle

        async def settle(group: Group, tell: Callable[[], None]) -> None:
            await durability.settle(group)
            tell()

        groups.before_end = lambda group, tell: tasks.spawn(settle(group, tell))

    standbys = dispatcher.standbys
    if standbys is not None:
        standbys.pins = lambda: durability.pins
        durability.on_pins = standbys.protect_sessions

    def stream_ended(stream: Stream) -> None:
        sessions.end_turn(stream)
        durability.ended(stream)
        groups.choice_ended(stream)

    dispatcher.on_end = stream_ended
    dispatcher.on_captured = sessions.captured

    def limits() -> tuple[int, int]:
        hellos = [engine.hello for engine in dispatcher.engines.values() if engine.hello]
        contexts = [hello.context_tokens for hello in hellos] + [config.context_tokens, facts.context_tokens]
        context = min((count for count in contexts if count), default=0)
        return context, max((hello.vocab_count for hello in hellos), default=0)

    template = load_chat_template(config.model_dir)
    settings = config.gateway
    admission = Admission(
        config.model_name,
        codec,
        template,
        facts,
        settings.default_max_tokens,
        limits,
        settings.tool_form,
        adapters.names,
    )
    form = EventForm(codec)
    gateway = Gateway(
        config,
        admission,
        table,
        groups,
        adapters,
        sessions,
        dispatcher,
        host,
        supervisors,
        form,
        GroupForm(form),
        durability,
        Keys(settings.api_key, settings.tenants),
        started_at=time.time(),
    )
    return gateway, metrics.EngineCollector(lambda: api_admin.engine_rows(dispatcher.engines))


def _sealing() -> Sealing:
    """What this process was given keys for. Raises Refused."""
    try:
        return Sealing(Keyring.from_environment())
    except BadKeys as error:
        raise Refused(str(error)) from error


def _adapters(directory: Path) -> AdapterTable:
    """Raises Refused."""
    try:
        return AdapterTable(directory)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        hint = "restore it from a backup; or delete it, and load the adapters again"
        raise Refused(f"{directory / 'index.json'} can't be read: {error}; {hint}") from error


def _name_adapters(config: GatewayConfig, adapters: AdapterTable) -> None:
    """Those of the configuration. Raises Refused."""
    try:
        for name, source in parse_setting(config.adapters).items():
            adapters.add(name, adapters.keep(source))
    except (ValueError, ApiError) as error:
        raise Refused(f"engine.adapters: {error}") from error


def make_app(gateway: Gateway) -> web.Application:
    """All endpoints."""
    app = web.Application(
        middlewares=[api.answer], client_max_size=gateway.config.gateway.max_body_bytes + BODY_MARGIN_BYTES
    )
    app[GATEWAY] = gateway
    app.add_routes(
        [
            web.post("/v1/chat/completions", api_answers.chat_completions),
            web.post("/v1/completions", api_answers.completions),
            web.post("/tokenize", api_tokens.tokenize),
            web.post("/detokenize", api_tokens.detokenize),
            web.get("/v1/models", api_admin.list_models),
            web.get("/v1/models/{model:.+}", api_admin.get_model),
            web.post("/v1/load_lora_adapter", api_adapters.load_adapter),
            web.post("/v1/unload_lora_adapter", api_adapters.unload_adapter),
            web.get("/v1/streams", api_streams.list_streams),
            web.get("/v1/streams/{stream}", api_streams.get_stream),
            web.delete("/v1/streams/{stream}", api_streams.delete_stream),
            web.get("/v1/sessions", api_sessions.list_sessions),
            web.get("/v1/sessions/{session}", api_sessions.get_session),
            web.post("/v1/sessions/{session}/fork", api_sessions.fork_session),
            web.post("/v1/sessions/{session}/park", api_sessions.park_session),
            web.delete("/v1/sessions/{session}", api_sessions.delete_session),
            web.get("/admin/engines", api_admin.admin_engines),
            web.get("/admin/sessions", api_admin.admin_sessions),
            web.post("/admin/sessions/{session}", api_admin.adopt_session),
            web.post("/admin/sessions/{session}/migrate", api_moves.migrate_session),
            web.post("/admin/streams/{stream}/migrate", api_moves.migrate_stream),
            web.post("/admin/engines/{engine}/drain", api_moves.drain_engine),
            web.delete("/admin/engines/{engine}/drain", api_moves.undrain_engine),
            web.post("/admin/engines/{engine}/restart", api_moves.restart_engine),
            web.get("/health", api_admin.health),
            web.get("/metrics", api_admin.show_metrics),
        ]
    )
    return app


class TaskOwner:
    """Owner of all background tasks; one that fails ends the process, so that it is started anew and reads its journals."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.failed.done():
            self.failed.set_exception(task.exception())  # type: ignore[arg-type]

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.failed.done():
            self.failed.exception()


async def _listen(config: GatewayConfig, runner: web.AppRunner) -> None:
    host, port = config.gateway.host, config.gateway.port
    sites: list[web.BaseSite] = [
        web.SockSite(runner, socket.socket(fileno=descriptor), backlog=BACKLOG) for descriptor in config.listen_on
    ]
    try:
        for site in sites or [web.TCPSite(runner, host, port, backlog=BACKLOG, reuse_address=True)]:
            await site.start()
    except OSError as error:
        raise Refused(f"can't listen on {host}:{port}: {error.strerror or error}; choose another --port") from error


async def _until(stop: asyncio.Event, tasks: TaskOwner) -> None:
    waiting = asyncio.create_task(stop.wait())
    tasks.failed.add_done_callback(lambda _: waiting.cancel())
    try:
        await waiting
    except asyncio.CancelledError:
        if not tasks.failed.done():
            raise
        tasks.failed.result()


async def _drain(gateway: Gateway) -> None:
    """Admit nothing more; let streams that somebody reads end, up to the limit. The rest goes on in the next process."""
    gateway.draining = True
    read = [stream for stream in gateway.table.live.values() if stream.readers]
    log.info("gateway.draining", streams=len(read), limit_s=gateway.config.gateway.drain_s)
    try:
        async with asyncio.timeout(gateway.config.gateway.drain_s):
            await asyncio.gather(*(_answered(stream) for stream in read))
    except TimeoutError:
        log.warning("gateway.drain_timeout", streams=sum(stream.end is None for stream in read))


async def _answered(stream: Stream) -> None:
    """Its end is there and every reader has got it."""
    await stream.ended.wait()
    await stream.unread.wait()


async def _sweep_forever(gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(SWEEP_INTERVAL_S)
        await gateway.table.sweep(gateway.config.gateway.stream_retention_s)
        gateway.groups.sweep(gateway.config.gateway.stream_retention_s)
        gateway.adapters.sweep({stream.spec.adapter for stream in gateway.table.live.values()})


async def _look_for_files_forever(gateway: Gateway) -> None:
    """What was deleted under this process is written anew as long as it is open; the table of sessions looks by itself."""
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        await gateway.table.look_for_files()
        gateway.groups.look_for_files()
        await asyncio.to_thread(gateway.adapters.look_for_files)


def _raise_file_limit() -> None:
    """A socket and a journal for each live stream."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
