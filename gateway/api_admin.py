"""Models, health, metrics and the operator's view. Runs on the event loop."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import structlog
from aiohttp import web

from engine import messages as m
from gateway import metrics
from gateway.api import CALLER, GATEWAY, Gateway, json_response, read_body
from gateway.api_sessions import WRITE_TIMEOUT_S, as_written, session_view
from gateway.engines import Engine
from gateway.errors import bad_request, conflict, not_found, quoted
from gateway.openai_schema import decode_object
from gateway.sessions import SessionRecord
from gateway.tenancy import named

log = structlog.get_logger()


async def list_models(request: web.Request) -> web.Response:
    names = [request.app[GATEWAY].config.model_name, *request.app[GATEWAY].adapters.names]
    return json_response({"object": "list", "data": [_model(request, name) for name in names]})


async def get_model(request: web.Request) -> web.Response:
    name = request.match_info["model"]
    gateway = request.app[GATEWAY]
    if name != gateway.config.model_name and name not in gateway.adapters.names:
        message = f"model: there is no model {quoted(name)} here; GET /v1/models lists what is served"
        raise not_found(message, "model_not_found", "model")
    return json_response(_model(request, name))


async def health(request: web.Request) -> web.Response:
    """200 when a request sent now would be served, else 503 with the reason."""
    gateway, caller = request.app[GATEWAY], request[CALLER]
    ready = [engine.name for engine in gateway.dispatcher.placeable()]
    drained = sorted(engine.name for engine in gateway.dispatcher.engines.values() if engine.ready and engine.draining)
    reason = "all engines that are up are drained" if drained else "no engine can serve yet"
    status = "draining" if gateway.draining else "ok" if ready else reason
    body = {
        "status": status,
        "engines_ready": ready,
        "engines_drained": drained,
        "hint": f"`concordia drain {drained[0]} --undo` lets it take streams again" if drained and not ready else None,
        "host_agent": gateway.host_agent,
        "live_streams": sum(caller.owns(stream.spec.namespace) for stream in gateway.table.live.values()),
        "degraded": [row for row in gateway.durability.rows() if not row["tenant"] or caller.owns(row["tenant"])],
        "uptime_s": round(time.time() - gateway.started_at, 1),
        "pid": os.getpid(),
    }
    return json_response(body, 200 if status == "ok" else 503)


async def show_metrics(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    metrics.streams_live.set(len(gateway.table.live))
    metrics.streams_waiting.set(gateway.dispatcher.waiting_count())
    if gateway.dispatcher.standbys is not None:
        gateway.dispatcher.standbys.measure()
    return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def admin_engines(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    engines = sorted(gateway.dispatcher.engines.values(), key=lambda engine: engine.name)
    paths = gateway.config.paths
    return json_response(
        {
            "object": "list",
            "host_agent": gateway.host_agent,
            "data_dir": str(paths.data_dir),
            "lane_dir": str(paths.lane_dir),
            "degraded": gateway.durability.rows(),
            "roots": _roots(gateway),
            "data": [_engine(engine) for engine in engines],
        }
    )


async def admin_sessions(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    data = [{**session_view(gateway, record), "streams": record.streams} for record in gateway.sessions.all()]
    keeper = gateway.durability.keeper
    body = {
        "object": "list",
        "degraded": gateway.durability.rows(),
        "keeper": {"up": keeper.up, **keeper.stats},
        "data": data,
    }
    return json_response(body)


class Imported(msgspec.Struct, frozen=True):
    """Body of POST /admin/sessions/{session}: a record as it was exported, and the packed token list.

    check  only say whether it would be taken
    """

    record: SessionRecord
    tokens: bytes
    replace: bool = False
    check: bool = False


async def adopt_session(request: web.Request) -> web.Response:
    """Take the record and the token list of a session whose state `concordia import` has put into the store."""
    gateway = request.app[GATEWAY]
    session = request[CALLER].session(request.match_info["session"])
    given: Imported = decode_object(await read_body(request), Imported)
    if len(given.tokens) % 4:
        raise bad_request("tokens: must be packed int32", code="invalid_value", param="tokens")
    if named(session)[1] != named(session, given.record.namespace)[1]:
        said = f"record.namespace: {given.record.namespace!r} is not whose session {session!r} is; name it TENANT~NAME"
        raise bad_request(said, "record.namespace")
    known = gateway.sessions.get(session)
    if known is not None and not given.replace:
        raise conflict(f"there is a session {session!r} already; import under another name, or replace it")
    if known is not None and any(stream in gateway.table.live for stream in known.streams):
        raise conflict(f"session {session!r} is answering; wait for its end")
    if given.check:
        return json_response({"id": session, "object": "session", "would_take": True})
    record = msgspec.structs.replace(
        given.record, session=session, token_count=len(given.tokens) // 4, streams=[], parked=True
    )
    gateway.sessions.adopt(record, given.tokens)
    refused = await gateway.sessions.written(WRITE_TIMEOUT_S)
    if refused:
        log.warning(
            "sessions.not_adopted", session=session, error=refused, hint="it is lost if the gateway is killed now"
        )
    view = as_written(session_view(gateway, record), refused)
    return json_response(view, 201, headers={"X-Session-Id": session})


def engine_rows(engines: dict[str, Engine]) -> list[tuple[str, bool, dict[str, float | str]]]:
    """For the metrics: engine, can serve, its own figures."""
    return [(engine.name, engine.ready, msgspec.to_builtins(engine.stats)) for engine in engines.values()]


def _model(request: web.Request, name: str) -> dict[str, Any]:
    gateway = request.app[GATEWAY]
    adapter = gateway.adapters.names.get(name)
    return {
        "id": name,
        "object": "model",
        "created": int(gateway.started_at),
        "owned_by": "concordia",
        "max_model_len": gateway.admission.context_tokens,
        **({"parent": gateway.config.model_name, "adapter": adapter} if adapter else {}),
    }


def _roots(gateway: Gateway) -> dict[str, dict[str, str]]:
    """Fingerprints (hex) that are served, the model's own and those of its adapters, with what each stands for."""
    found = {}
    for hello in [engine.hello for engine in gateway.dispatcher.engines.values() if engine.hello]:
        for name, digest in {"": "", **gateway.adapters.names}.items():
            root = m.adapter_root(bytes.fromhex(hello.root), digest).hex()
            found[root] = {"model": hello.model, "dtype": hello.dtype, "adapter": name}
    return found


def _engine(engine: Engine) -> dict[str, Any]:
    hello = engine.hello
    streams = [
        {
            "stream": stream.id,
            "session": stream.spec.session or None,
            "epoch": stream.epoch,
            "captured": stream.captured,
            "delivered": len(stream.tokens),
        }
        for stream in engine.streams.values()
    ]
    return {
        "id": engine.name,
        "pid": engine.up.pid,
        "state": engine.shown_state,
        "epoch": engine.incarnation,
        "incarnation": engine.incarnation,
        "device": hello.device if hello else None,
        "dtype": hello.dtype if hello else None,
        "model": hello.model if hello else None,
        "root": hello.root if hello else None,
        "context_tokens": hello.context_tokens if hello else None,
        "capture_by": engine.stats.capture_by or None,
        "restore_by": engine.stats.restore_by or None,
        "attention_by": engine.stats.attention_by or None,
        "decode_graph": engine.stats.decode_graph or None,
        "sessions": sorted({held.session for held in engine.residents.values() if held.session}),
        "streams": streams,
        "following": [
            {
                "stream": None if s.session else s.stream,
                "session": s.session or None,
                "position": s.position,
                "caught_up": s.caught_up,
                "for": sorted(s.users),
                "refused": s.refused or None,
            }
            for s in engine.followed.values()
        ],
        "stats": msgspec.to_builtins(engine.stats),
        "tenants": msgspec.to_builtins(engine.tenants),
    }
