"""/v1/streams: read any stream from a cursor, live or finished; stop one. Stage: resume; on the event loop."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from engine.messages import unpack_tokens
from gateway import metrics
from gateway.api import CALLER, GATEWAY, STREAM, asks_all, find_stream, json_response, stream_headers
from gateway.api_answers import client_left, form_of, parts_of
from gateway.choices import Group
from gateway.delivery import EVENT_HEADERS, serve_events
from gateway.errors import bad_request, quoted
from gateway.streams import Stream
from gateway.tenancy import own_name

CURSOR = re.compile(r"-?[0-9]{1,18}")


async def list_streams(request: web.Request) -> web.Response:
    """Live streams of the caller's namespace; `?all=true`: of every one that it may see."""
    caller, live = request[CALLER], request.app[GATEWAY].table.live.values()
    everything = asks_all(request)
    data = [stream_view(stream) for stream in live if caller.lists(stream.spec.namespace, everything)]
    return json_response({"object": "list", "data": data})


async def get_stream(request: web.Request) -> web.StreamResponse:
    """What comes after the cursor, as SSE; or the answer so far, as JSON."""
    gateway = request.app[GATEWAY]
    cursor = _cursor(request)
    stream = await find_stream(request)
    request[STREAM] = stream.id
    if _wants_json(request):
        view = {**form_of(gateway, stream).answer(stream), "stream": stream_view(stream)}
        return json_response(view, headers=stream_headers(stream))
    _check_end(request, stream, form_of(gateway, stream).ready_count(stream) - 1, cursor)
    if request.method == "HEAD":  # it reads nothing, so nobody leaves when it is answered
        return web.Response(headers={**stream_headers(stream), **EVENT_HEADERS})
    metrics.resumed_readers.labels(stream.state).inc()
    keepalive_s = gateway.config.gateway.keepalive_s
    try:
        return await serve_events(
            request, stream, form_of(gateway, stream), stream_headers(stream), start=cursor + 1, keepalive_s=keepalive_s
        )
    finally:
        client_left(gateway, stream)


async def delete_stream(request: web.Request) -> web.Response:
    """Stop generation. What was delivered stays readable."""
    gateway = request.app[GATEWAY]
    stream = await find_stream(request)
    request[STREAM] = stream.id
    cancelled = stream.end is None
    for part in parts_of(stream):
        gateway.dispatcher.cancel(part, "cancelled")
    view = {"id": stream.id, "object": "stream", "cancelled": cancelled, "stream": stream_view(stream)}
    return json_response(view, headers=stream_headers(stream))


def stream_view(stream: Stream | Group) -> dict[str, Any]:
    """A stream, for people and programs."""
    if isinstance(stream, Group):
        choices = [stream_view(part) for part in stream.streams]
        shared = ("kind", "created", "namespace", "model", "stored", "prompt_tokens")
        view = {
            "id": stream.id,
            "object": "stream.group",
            "state": stream.state,
            "session": own_name(stream.spec.session) or None,
        }
        return {**view, **{name: choices[0][name] for name in shared}, "choices": choices}
    return {
        "id": stream.id,
        "object": "stream",
        "kind": stream.spec.kind,
        "state": stream.state,
        "created": stream.spec.created,
        "model": stream.spec.model,
        "session": own_name(stream.spec.session) or None,
        "namespace": stream.spec.namespace,
        "stored": stream.stored,
        "group": stream.spec.group or None,
        "choice": stream.spec.choice,
        "engine": stream.engine or None,
        "epoch": stream.epoch,
        "seed": stream.spec.sampling.seed,
        "prompt_tokens": stream.prompt_count,
        "delivered_tokens": stream.token_count,
        "last_event_id": _last_event_id(stream),
        "tokens": stream.tokens[len(unpack_tokens(stream.spec.prompt)) :],
    }


def _last_event_id(stream: Stream) -> int:
    if stream.end is None:
        return stream.token_count if stream.token_count else -1
    return stream.token_count + 1 + (0 if stream.failed else 1 + stream.spec.include_usage)


def _cursor(request: web.Request) -> int:
    """The last event that the client has; -1: none. An empty header is none, as browsers send it."""
    name = _cursor_name(request)
    text = request.query["from"] if name == "from" else request.headers.get(name, "")
    if name != "from" and not text.strip():
        return -1
    if not CURSOR.fullmatch(text.strip()):
        message = f"{name}: expected the id of the last event that was seen, a number, got {text[:40]!r}"
        raise bad_request(message, name, "invalid_type")
    cursor = int(text.strip())
    if cursor < 0:
        hint = "leave it out to read from the beginning"
        raise bad_request(f"{name}: must be at least 0, got {cursor}; {hint}", name, "out_of_range")
    return cursor


def _check_end(request: web.Request, stream: Stream | Group, last: int, cursor: int) -> None:
    """Nobody has seen an event behind the last one: such a cursor is another stream's, or made up. Raises ApiError."""
    if stream.end is not None and cursor > last:
        name, hint = _cursor_name(request), "leave it out to read from the beginning"
        said = f"must be at most {last}, the last event of this stream, which has ended, got {cursor}"
        raise bad_request(f"{name}: {said}; {hint}", name, "out_of_range")


def _cursor_name(request: web.Request) -> str:
    """The header wins: a browser that comes back sends the address as it was first given, and what it has seen since in the header."""
    seen = request.headers.get("Last-Event-ID", "").strip()
    return "from" if "from" in request.query and not seen else "Last-Event-ID"


def _wants_json(request: web.Request) -> bool:
    form = request.query.get("format", "")
    if form not in ("", "json", "sse"):
        raise bad_request(f"format: expected json or sse, got {quoted(form)}", "format")
    return form == "json" or (not form and request.headers.get("Accept", "").startswith("application/json"))
