"""POST /v1/chat/completions and /v1/completions. Stages: admit, then deliver; on the event loop.

Streamed or not, a request is a stream: it has an id, a journal and an end, and can be resumed by cursor.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from aiohttp import web

from gateway import metrics
from gateway.api import CALLER, GATEWAY, STREAM, Gateway, error_response, json_response, read_body, stream_headers
from gateway.choices import Group
from gateway.delivery import serve_events
from gateway.errors import ApiError, overloaded, unavailable
from gateway.grammar import constrained
from gateway.journal import GroupSpec, StreamSpec
from gateway.sse import end_error
from gateway.streams import Stream

log = structlog.get_logger()

# Tokenizing this much takes some 30 ms: longer bodies are tokenized beside the event loop.
LONG_BODY_BYTES = 64 << 10


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, "chat")


async def completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, "text")


async def _answer(request: web.Request, kind: str) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    body = await read_body(request)
    specs, group_spec = await _admit(
        gateway, kind, body, request.headers.get("X-Session-Id"), request[CALLER].namespace
    )
    _check_room(gateway, len(specs), sum(len(spec.prompt) for spec in specs) // 4)
    streams = [gateway.table.open(spec) for spec in specs]
    answered = gateway.groups.open(group_spec, streams) if group_spec else streams[0]
    request[STREAM] = answered.id
    firsts = answered.firsts if isinstance(answered, Group) else streams
    prompt_tokens = sum(stream.prompt_count for stream in firsts)
    metrics.prompt_tokens.inc(prompt_tokens)
    log.debug(
        "admit.accepted", stream=answered.id, kind=kind, session=specs[0].session or None, streams=len(streams),
        prompt_tokens=prompt_tokens, streamed=specs[0].streamed,
    )  # fmt: skip
    if specs[0].session:
        gateway.sessions.begin_turn(streams[0], [stream.id for stream in streams[1:]])
    for stream in streams:
        gateway.dispatcher.submit(stream)
    try:
        if specs[0].streamed:
            keepalive_s, headers = gateway.config.gateway.keepalive_s, stream_headers(answered)
            return await serve_events(request, answered, form_of(gateway, answered), headers, keepalive_s=keepalive_s)
        return await _whole(gateway, answered)
    finally:
        client_left(gateway, answered)


async def _admit(
    gateway: Gateway, kind: str, body: bytes, session: str | None, namespace: str
) -> tuple[list[StreamSpec], GroupSpec | None]:
    """Parse and tokenize; a long prompt or a grammar on a thread, so that it holds up nobody else's tokens (both free the GIL)."""
    parsed = gateway.admission.parse(kind, body)
    if len(body) < LONG_BODY_BYTES and not constrained(parsed):
        return gateway.admission.specs(parsed, session, namespace)
    return await asyncio.to_thread(gateway.admission.specs, parsed, session, namespace)


def _check_room(gateway: Gateway, count: int, prompt_tokens: int) -> None:
    if gateway.draining:
        raise unavailable("the gateway is shutting down; try again at the next one", "draining")
    dispatcher, settings = gateway.dispatcher, gateway.config.gateway
    waiting, limit = dispatcher.waiting_count(), settings.max_waiting
    if waiting + count > limit:
        raise _no_room(gateway, f"{waiting} requests wait already, at most {limit} may (gateway.max_waiting)", waiting)
    tokens, token_limit = dispatcher.waiting_tokens(), settings.max_waiting_tokens
    if tokens + prompt_tokens > token_limit and waiting:
        said = f"requests of {tokens} tokens wait already, at most {token_limit} may (gateway.max_waiting_tokens)"
        raise _no_room(gateway, said, waiting)


def _no_room(gateway: Gateway, said: str, waiting: int) -> ApiError:
    """Busy engines come to it by themselves (429); without an engine that takes streams somebody has to look (503)."""
    retry_after_s = gateway.dispatcher.retry_after_s(waiting)
    if gateway.dispatcher.can_serve:
        return overloaded(f"{said}; try again later", retry_after_s)
    return unavailable(f"no engine can serve now, and {said}; see /admin/engines", "no_engine", retry_after_s)


class _Waiter:
    """A reader that wants the end only."""

    def __init__(self, stream: Stream | Group) -> None:
        self.over: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        self._stream = stream
        self.advance()

    def advance(self) -> None:
        if self._stream.end is not None and not self.over.done():
            self.over.set_result(None)

    def comment(self, text: str) -> None:
        """There is nowhere to say it."""

    def fail(self, status: int, code: str, message: str) -> None:
        if not self.over.done():
            self.over.set_result(ApiError(status, message, code=code))


async def _whole(gateway: Gateway, stream: Stream | Group) -> web.Response:
    """Wait for the end; the answer as one JSON object."""
    waiter = _Waiter(stream)
    stream.add_reader(waiter)
    try:
        await waiter.over
    finally:
        stream.drop_reader(waiter)
    error = waiter.over.result()
    if error is not None:
        return error_response(error, stream_headers(stream))
    failed = stream.failure if isinstance(stream, Group) else stream if stream.failed else None
    if failed is not None:
        return error_response(end_error(failed), stream_headers(stream))
    return json_response(form_of(gateway, stream).answer(stream), headers=stream_headers(stream))


def form_of(gateway: Gateway, stream: Stream | Group) -> Any:
    """What renders it."""
    return gateway.group_form if isinstance(stream, Group) else gateway.form


def parts_of(stream: Stream | Group) -> list[Stream]:
    """The streams that it is made of."""
    return stream.streams if isinstance(stream, Group) else [stream]


def client_left(gateway: Gateway, stream: Stream | Group) -> None:
    """A stream that nobody reads ends, unless it is stored or the gateway itself is going."""
    if stream.end is None and not stream.readers and not stream.stored and not gateway.draining:
        for part in parts_of(stream):
            if not part.readers:
                gateway.dispatcher.cancel(part, "disconnected")
