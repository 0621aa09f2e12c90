"""Models, health, metrics and the operator's view. Runs on the event loop; reads only."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
from aiohttp import web

from gateway import metrics
from gateway.api import GATEWAY, json_response
from gateway.api_sessions import session_view
from gateway.dispatch import Engine
from gateway.errors import not_found


async def list_models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_model(request)]})


async def get_model(request: web.Request) -> web.Response:
    name = request.match_info["model"]
    if name != request.app[GATEWAY].config.model_name:
        raise not_found(
            f"model: there is no model {name!r} here; GET /v1/models lists what is served", "model_not_found", "model"
        )
    return json_response(_model(request))


async def health(request: web.Request) -> web.Response:
    """200 when a request sent now would be served, else 503 with the reason."""
    gateway = request.app[GATEWAY]
    ready = [engine.name for engine in gateway.dispatcher.engines.values() if engine.ready]
    status = "draining" if gateway.draining else "ok" if ready else "no engine can serve yet"
    body = {
        "status": status,
        "engines_ready": ready,
        "host_agent": gateway.host.connected,
        "live_streams": len(gateway.table.live),
        "uptime_s": round(time.time() - gateway.started_at, 1),
        "pid": os.getpid(),
    }
    return json_response(body, 200 if status == "ok" else 503)


async def show_metrics(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    metrics.streams_live.set(len(gateway.table.live))
    metrics.streams_waiting.set(gateway.dispatcher.waiting_count())
    return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def admin_engines(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    engines = sorted(gateway.dispatcher.engines.values(), key=lambda engine: engine.name)
    return json_response(
        {"object": "list", "host_agent": gateway.host.connected, "data": [_engine(e) for e in engines]}
    )


async def admin_sessions(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    data = [{**session_view(gateway, record), "streams": record.streams} for record in gateway.sessions.all()]
    return json_response({"object": "list", "data": data})


def engine_rows(engines: dict[str, Engine]) -> list[tuple[str, bool, dict[str, float]]]:
    """For the metrics: engine, can serve, its own figures."""
    return [(engine.name, engine.ready, msgspec.to_builtins(engine.stats)) for engine in engines.values()]


def _model(request: web.Request) -> dict[str, Any]:
    gateway = request.app[GATEWAY]
    return {
        "id": gateway.config.model_name,
        "object": "model",
        "created": int(gateway.started_at),
        "owned_by": "concordia",
        "max_model_len": gateway.admission.context_tokens,
    }


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
        "state": engine.state,
        "epoch": engine.incarnation,
        "incarnation": engine.incarnation,
        "device": hello.device if hello else None,
        "dtype": hello.dtype if hello else None,
        "model": hello.model if hello else None,
        "root": hello.root if hello else None,
        "context_tokens": hello.context_tokens if hello else None,
        "sessions": sorted({session for session, _ in engine.residents.values() if session}),
        "streams": streams,
        "stats": msgspec.to_builtins(engine.stats),
    }
