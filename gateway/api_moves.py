"""/admin: move sessions and streams between engines, drain an engine, start it anew. Runs on the event loop; every wait has a deadline."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from engine import messages as m
from gateway.api import GATEWAY, Gateway, find_session, find_stream, json_response, read_body
from gateway.engines import Engine
from gateway.errors import ApiError, bad_request, conflict, not_found, quoted
from gateway.following import IdleSession
from gateway.migration import Move
from gateway.openai_schema import decode_object
from gateway.sessions import SessionRecord
from gateway.streams import Stream

MOVE_TIMEOUT_S = 60.0


class MoveRequest(msgspec.Struct, forbid_unknown_fields=True):
    engine: str
    timeout_s: float = MOVE_TIMEOUT_S


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    timeout_s: float = MOVE_TIMEOUT_S


async def migrate_session(request: web.Request) -> web.Response:
    """Every live stream of a session that isn't there, or else its idle state, to another engine; the streams go on."""
    gateway, wish = request.app[GATEWAY], await _body(request, MoveRequest)
    record = find_session(request)
    session = record.session
    target = _engine(gateway, wish.engine)
    live = [gateway.table.live[stream_id] for stream_id in record.streams if stream_id in gateway.table.live]
    if not live:
        if not target.placeable:
            raise conflict(f"{target.name} takes no streams now (it is {target.shown_state}); choose another engine")
        idle = await _idle(gateway, record)
        outcome = await gateway.dispatcher.moves.move_idle(idle, target, wish.timeout_s)
        return json_response({"session": session, "to_engine": target.name, "outcome": outcome, "moves": []})
    elsewhere = [stream for stream in live if stream.engine != target.name] or live
    for stream in elsewhere:  # all or none
        gateway.dispatcher.moves.check(stream, target.name)
    moves = [gateway.dispatcher.moves.start(stream, target.name, "asked for") for stream in elsewhere]
    await _wait(moves, wish.timeout_s)
    outcomes = {move.outcome for move in moves}
    outcome = outcomes.pop() if len(outcomes) == 1 else "see moves"
    body = {"session": session, "to_engine": target.name, "outcome": outcome, "moves": [move.view() for move in moves]}
    return json_response(body, headers={"X-Session-Id": session})


async def _idle(gateway: Gateway, record: SessionRecord) -> IdleSession:
    """What an engine needs to know of a session that answers nothing now. Its last turn tells the adapter."""
    last = await gateway.table.fetch(record.streams[-1]) if record.streams else None
    adapter = last.spec.adapter if last is not None else ""
    return IdleSession(record.session, record.namespace, adapter, gateway.sessions.tokens(record.session))


async def migrate_stream(request: web.Request) -> web.Response:
    """One stream, named or not. Of a request with several choices, name the choice's own stream."""
    gateway, wish = request.app[GATEWAY], await _body(request, MoveRequest)
    stream = await find_stream(request)
    if not isinstance(stream, Stream):
        choices = ", ".join(choice.id for choice in stream.streams)
        raise conflict(f"{stream.id} has several choices; move them one by one: {choices}")
    move = gateway.dispatcher.moves.start(stream, wish.engine, "asked for")
    await _wait([move], wish.timeout_s)
    return json_response(move.view())


async def drain_engine(request: web.Request) -> web.Response:
    """Its streams go elsewhere, and nothing new comes, until `undrain` or its restart; a gateway that is restarted is told of it."""
    gateway, wish = request.app[GATEWAY], await _body(request, DrainRequest)
    engine = _engine(gateway, request.match_info["engine"])
    engine.send(m.Drained(on=True))
    report = await gateway.dispatcher.moves.drain(engine, "drain", wish.timeout_s)
    placeable = sum(other.placeable for other in gateway.dispatcher.engines.values())
    return json_response({**report, "engines_left": placeable})


async def undrain_engine(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    engine = _engine(gateway, request.match_info["engine"])
    engine.send(m.Drained(on=False))
    gateway.dispatcher.set_draining(engine, False)
    return json_response({"engine": engine.name, "state": engine.shown_state})


async def restart_engine(request: web.Request) -> web.Response:
    """Drain, then end it; the host agent starts the next incarnation. Refused while a stream can't leave it."""
    gateway, wish = request.app[GATEWAY], await _body(request, DrainRequest)
    engine = _engine(gateway, request.match_info["engine"])
    before = engine.draining
    try:
        report = await gateway.dispatcher.moves.drain(engine, "restart", wish.timeout_s)
    except asyncio.CancelledError:  # whoever asked for it has left: it goes on as before
        gateway.dispatcher.set_draining(engine, before)
        raise
    if report["left"]:
        gateway.dispatcher.set_draining(engine, before)
        raise conflict(
            f"{report['left']} streams can't leave {engine.name}: {report['reason']}; it goes on as before. "
            "Start another engine, or wait for their end"
        )
    if engine.link is not None:
        engine.link.send(m.Shutdown())
    return json_response({**report, "incarnation": engine.incarnation}, 202)


async def _body(request: web.Request, form: type[Any]) -> Any:
    wish = decode_object(await read_body(request) or b"{}", form)
    if wish.timeout_s < 0:
        raise bad_request(f"timeout_s: must be at least 0, got {wish.timeout_s:g}", "timeout_s", "out_of_range")
    return wish


def _engine(gateway: Gateway, name: str) -> Engine:
    engine = gateway.dispatcher.engines.get(name)
    if engine is None:
        raise not_found(f"there is no engine {quoted(name)}; GET /admin/engines lists them", "engine_not_found")
    if not engine.ready:
        raise conflict(f"{name} can't be reached now (it is {engine.state}); try again")
    return engine


async def _wait(moves: list[Move], timeout_s: float) -> None:
    _, waiting = await asyncio.wait([move.done for move in moves], timeout=timeout_s)
    if waiting:
        raise ApiError(
            504, f"the move is not over after {timeout_s:g} s; it goes on, see /admin/engines", code="move_timeout"
        )
