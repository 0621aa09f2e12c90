"""/v1/sessions: list, show, fork, park and delete named sessions. Runs on the event loop; every wait has a deadline."""

from __future__ import annotations

import secrets
from typing import Any

import structlog
from aiohttp import web

from engine.messages import adapter_root, pack_tokens, unpack_tokens
from gateway import metrics, sessions
from gateway.api import CALLER, GATEWAY, Gateway, asks_all, find_session, is_set, json_response, read_body
from gateway.durability import SESSIONS_FAILING
from gateway.errors import ApiError, conflict, not_found, quoted
from gateway.forks import ForkRequest, fork_position, parse_fork
from gateway.openai_schema import check_session_id
from gateway.sessions import SessionRecord, other_choices
from gateway.streams import Stream, parse_stream_id
from gateway.tenancy import OPERATOR, Caller, own_name, whole_name
from tiers import keeper_client
from tiers.errors import TierError

log = structlog.get_logger()

PARK_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 60.0
WRITE_TIMEOUT_S = 30.0


async def list_sessions(request: web.Request) -> web.Response:
    """Those of the caller's namespace; `?all=true`: of every one that it may see."""
    gateway, caller = request.app[GATEWAY], request[CALLER]
    everything = asks_all(request)
    listed = [r for r in gateway.sessions.all() if caller.lists(r.namespace, everything)]
    data = [session_view(gateway, record, caller) for record in listed]
    return json_response({"object": "list", "data": data})


async def get_session(request: web.Request) -> web.Response:
    gateway, caller = request.app[GATEWAY], request[CALLER]
    record = find_session(request)
    view = {**session_view(gateway, record, caller), "streams": record.streams}
    if is_set(request, "tokens"):
        view["token_ids"] = unpack_tokens(_tokens(gateway, record))
    return json_response(view, headers={"X-Session-Id": view["id"]})


async def fork_session(request: web.Request) -> web.Response:
    """A new session that begins as this one does. Nothing is copied: both name the same blocks until they differ."""
    gateway, caller, record = request.app[GATEWAY], request[CALLER], find_session(request)
    wish = parse_fork(await read_body(request))
    tokens = await _fork_tokens(gateway, record, wish)
    record = find_session(request)  # it may have been deleted meanwhile
    listed = 0 if wish.stream else record.token_count
    position = fork_position(wish, unpack_tokens(tokens), gateway.admission.stop_tokens, listed)
    made_up = f"{own_name(record.session)[:110]}-fork-{secrets.token_hex(4)}"
    own = check_session_id(made_up if wish.session_id is None else wish.session_id)
    name = whole_name(record.namespace, own)
    if gateway.sessions.get(name) is not None:
        raise conflict(
            f"there is a session {caller.shown(name)!r} already; choose another session_id, or delete it first"
        )
    fork = gateway.sessions.fork(record.session, name, tokens, position)
    gateway.durability.doubt(name)
    refused = await gateway.sessions.written(WRITE_TIMEOUT_S)  # the record is all that a fork is
    if refused:
        log.warning("fork.not_written", fork=name, error=refused, hint="it is lost if the gateway is killed now")
    metrics.sessions_forked.inc()
    log.info("fork.done", session=record.session, fork=name, position=position)
    view = as_written(session_view(gateway, fork, caller), refused)
    return json_response(view, headers={"X-Session-Id": caller.shown(name)})


async def _fork_tokens(gateway: Gateway, record: SessionRecord, wish: ForkRequest) -> bytes:
    """The list to fork: that of the named stream (another choice, an earlier turn), else the session's as it is now."""
    if not wish.stream:
        return _tokens(gateway, record)
    stream_id = parse_stream_id(wish.stream)
    stream = await gateway.table.fetch(stream_id) if stream_id in record.streams else None
    if stream is None:
        raise not_found(
            f"stream: session {own_name(record.session)!r} has no stream {quoted(wish.stream)}",
            "stream_not_found",
            "stream",
        )
    return pack_tokens(stream.tokens)


def _tokens(gateway: Gateway, record: SessionRecord) -> bytes:
    """Its token list, with what it is answering right now."""
    live = [stream for stream in _live_streams(gateway, record) if stream.spec.session]
    return pack_tokens(live[-1].tokens) if live else gateway.sessions.tokens(record.session)


async def park_session(request: web.Request) -> web.Response:
    """Take it off the devices and make all of it durable."""
    gateway, caller = request.app[GATEWAY], request[CALLER]
    record = find_session(request)
    shown, turns = caller.shown(record.session), record.turns
    _check_rests(gateway, record, shown)
    slots, captured = await _free_devices(gateway, record.session)
    await _drain(gateway)
    stored = await gateway.durability.stored(record.session)
    record = find_session(request)  # meanwhile it may have been deleted, or have answered again
    _check_rests(gateway, record, shown)
    if record.turns != turns:
        raise conflict(f"session {shown!r} has answered meanwhile, and is on a device again; try again")
    if stored is None:  # all that was captured is drained
        stored = captured or record.captured
    gateway.sessions.park(record.session, stored, stored)
    log.info("park.done", session=record.session, slots_freed=slots, position=stored)
    refused = await gateway.sessions.written(WRITE_TIMEOUT_S)
    view = as_written(session_view(gateway, record, caller), refused)
    return json_response({**view, "slots_freed": slots}, headers={"X-Session-Id": shown})


async def delete_session(request: web.Request) -> web.Response:
    """End its streams, free the devices, forget its blocks (those that no other session shares), its journals and its record."""
    gateway, record = request.app[GATEWAY], find_session(request)
    for stream in _live_streams(gateway, record):
        gateway.dispatcher.cancel(stream, "cancelled")
    await _free_devices(gateway, record.session)
    forgotten = await _forget_blocks(gateway, record)
    streams = record.streams
    if len(streams) >= sessions.STREAMS_KEPT:  # there may have been more
        streams = [*streams, *await gateway.table.of_session(record.session)]
    groups = await gateway.table.groups_of(streams)
    await gateway.table.forget(streams)
    gateway.groups.forget(list(groups))
    gateway.sessions.remove(record.session)
    again = _live_streams(gateway, record)
    for stream in again:  # a turn that began meanwhile is the first one of a new session
        if stream.spec.session:
            gateway.sessions.begin_turn(stream, other_choices(stream, again))
    shown = request[CALLER].shown(record.session)
    refused = await gateway.sessions.written(WRITE_TIMEOUT_S)
    if refused:
        hint = "it is there again if the gateway is killed now"
        log.warning("sessions.not_removed", session=record.session, error=refused, hint=hint)
    body = {"id": shown, "object": "session", "deleted": True, "forgotten": forgotten, "degraded": ""}
    return json_response(as_written(body, refused), headers={"X-Session-Id": shown})


def as_written(view: dict[str, Any], refused: str) -> dict[str, Any]:
    """An answer to what has changed a session, which says so if the disk did not take that."""
    return {**view, "degraded": SESSIONS_FAILING} if refused else view


def session_view(gateway: Gateway, record: SessionRecord, caller: Caller = OPERATOR) -> dict[str, Any]:
    """A session, for people and programs; named as `caller` names it."""
    live = _live_streams(gateway, record)
    tokens, captured, durable = _positions(gateway, record, live)
    engines = [
        engine.name for engine in gateway.dispatcher.engines.values() if engine.ready and engine.holds(record.session)
    ]
    resident = bool(engines) and not record.parked
    standbys = gateway.dispatcher.standbys
    standby, standby_position = (
        standbys.standby_of(record.session, (stream.id for stream in live)) if standbys else ("", 0)
    )
    return {
        "id": caller.shown(record.session),
        "object": "session",
        "namespace": record.namespace,
        "state": "live" if live else "resident" if resident else "parked",
        "created": int(record.created),
        "last_used": int(record.last_used),
        "turns": record.turns,
        "tokens": tokens,
        "captured": captured,
        "durable": durable,
        "capture_lag": tokens - captured,
        "durable_lag": captured - durable,
        "degraded": gateway.durability.of_session(captured, durable, tokens, engines, record.namespace),
        "engines": engines,
        "standby": standby or None,
        "standby_position": standby_position,
        "live_streams": [stream.id for stream in live],
        "forked_from": caller.shown(record.forked_from) or None,
        "fork_position": record.fork_position or None,
    }


def _positions(gateway: Gateway, record: SessionRecord, live: list[Stream]) -> tuple[int, int, int]:
    """(tokens, captured, durable) of the list that the session is now: of the turn begun last, else of the one that ended last."""
    turns = [stream for stream in live if stream.spec.session]
    if not turns:
        return record.token_count, record.captured, record.durable
    return len(turns[-1].tokens), *gateway.sessions.positions(turns[-1])


def _live_streams(gateway: Gateway, record: SessionRecord) -> list[Stream]:
    return [gateway.table.live[stream_id] for stream_id in record.streams if stream_id in gateway.table.live]


async def _free_devices(gateway: Gateway, session: str) -> tuple[int, int]:
    """Slots freed, and the longest captured position."""
    try:
        answers = await gateway.dispatcher.park(session, PARK_TIMEOUT_S)
    except TimeoutError as error:
        message = f"an engine did not park session {own_name(session)!r} within {PARK_TIMEOUT_S:g} s; try again"
        raise ApiError(504, message, code="engine_timeout") from error
    return sum(a.slots for a in answers), max((a.position for a in answers), default=0)


async def _drain(gateway: Gateway) -> dict[str, Any]:
    """Everything in the lanes to disk, synced."""
    try:
        return await keeper_client.adrain(gateway.config.paths.keeper_socket, sync=True, timeout_s=DRAIN_TIMEOUT_S)
    except TierError as error:
        message = (
            f"the session is off the devices, but the keeper could not confirm that it is on disk: {error}; try again"
        )
        raise ApiError(503, message, code="keeper_unavailable") from error


def _check_rests(gateway: Gateway, record: SessionRecord, shown: str) -> None:
    """Raises ApiError."""
    live = _live_streams(gateway, record)
    if live:
        raise conflict(f"session {shown!r} is answering (stream {live[0].id}); wait for its end or delete that stream")


async def _forget_blocks(gateway: Gateway, record: SessionRecord) -> bool:
    """False if the keeper is away or the token list can't be read: the blocks stay until they are collected, and nobody can name them."""
    models = {bytes.fromhex(engine.hello.root) for engine in gateway.dispatcher.engines.values() if engine.hello}
    roots = {adapter_root(model, digest) for model in models for digest in ("", *gateway.adapters.names.values())}
    tokens = gateway.sessions.tokens(record.session)
    try:
        await _drain(gateway)
        shared = gateway.sessions.shared_with_relatives(record.session)  # a fork may have been made meanwhile
        for root in roots if tokens else ():
            await keeper_client.aforget(
                gateway.config.paths.keeper_socket,
                root,
                record.namespace,
                unpack_tokens(tokens),
                session=record.session,
                keep_tokens=shared,
            )
    except (ApiError, TierError) as error:
        log.warning("sessions.forget_failed", session=record.session, error=str(error))
        return False
    return bool(roots) and (bool(tokens) or not record.token_count)  # a damaged list names no blocks
