"""One client that follows one stream as SSE. Stage: deliver, resume; on the event loop.

The stream calls `advance` once an engine step; it writes what is new straight to the transport, in one write. The
handler's task sleeps meanwhile; it wakes for the end, for keep-alives and for a client that is too slow. Such a client
holds at most `BUFFER_LIMIT_BYTES` here: delivery to it stops until its socket has taken what is there.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from gateway import metrics
from gateway.errors import ApiError
from gateway.streams import Reader

BUFFER_LIMIT_BYTES = 128 << 10
EVENTS_A_WRITE = 256
STALL_LIMIT_S = 600.0  # a client that took nothing for so long is gone
EVENT_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Followed(Protocol):
    """A stream, or a group of choices. `end` is something once it has ended."""

    @property
    def end(self) -> Any: ...

    def add_reader(self, reader: Reader) -> None: ...

    def drop_reader(self, reader: Reader) -> None: ...


class Form(Protocol):
    """What renders its events."""

    def ready_count(self, stream: Any) -> int: ...

    def events(self, stream: Any, start: int, end: int) -> bytes: ...


class SseReader:
    """The cursor of one client. `next` is the id of the next event."""

    def __init__(self, stream: Followed, form: Form, request: web.Request, start: int) -> None:
        self.next = start
        self.done = False
        self.stalled = False
        self.wake = asyncio.Event()
        self.last_write = time.monotonic()
        self._stream = stream
        self._form = form
        assert request.transport is not None
        self._transport = request.transport
        self._chunked = request.version >= (1, 1)

    def advance(self) -> None:
        """Write all events that there are, unless the client is behind."""
        if self.done or self.stalled:
            return
        ready = self._form.ready_count(self._stream)
        while self.next < ready:
            if self._transport.get_write_buffer_size() > BUFFER_LIMIT_BYTES:
                self._stall()
                return
            end = min(ready, self.next + EVENTS_A_WRITE)
            data = self._form.events(self._stream, self.next, end)
            self.next = end
            self._write(data)
        if self._stream.end is not None and self.next > ready:
            said = f"the stream has ended with event {ready - 1}, before the cursor {self.next - 1}"
            self.fail(400, "out_of_range", f"{said}; read it from the beginning")
        elif self._stream.end is not None:
            self._finish()

    def comment(self, text: str) -> None:
        """A line that clients ignore and people see. Dropped for a client that is behind."""
        if not self.done and not self.stalled:
            self._write(b": %b\n\n" % text.encode())

    def fail(self, status: int, code: str, message: str) -> None:
        """End without an end: no event id, so the client may come back with the last one it saw."""
        if not self.done:
            self._write(b"data: %b\n\n" % msgspec.json.encode(ApiError(status, message, code=code).body))
            self._finish()

    def _stall(self) -> None:
        self.stalled = True
        metrics.stalled_readers.inc()
        self.wake.set()

    def _finish(self) -> None:
        self.done = True
        self.wake.set()

    def _write(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        self.last_write = time.monotonic()


async def serve_events(
    request: web.Request,
    stream: Followed,
    form: Form,
    headers: dict[str, str],
    *,
    start: int = 0,
    keepalive_s: float = 5.0,
) -> web.StreamResponse:
    """Follow a stream from event `start` to its end. Cancelled when the client leaves."""
    response = web.StreamResponse(headers={**headers, **EVENT_HEADERS})
    writer = await response.prepare(request)
    assert writer is not None
    reader = SseReader(stream, form, request, start)
    stream.add_reader(reader)
    try:
        reader.advance()
        while not reader.done:
            await _sleep(reader, keepalive_s)
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the client is gone")
            if reader.stalled:
                await _catch_up(reader, writer)
            elif not reader.done and time.monotonic() - reader.last_write >= keepalive_s * 0.9:
                reader.comment("keep-alive")
        await response.write_eof()
    finally:
        stream.drop_reader(reader)
    return response


async def _sleep(reader: SseReader, keepalive_s: float) -> None:
    try:
        async with asyncio.timeout(keepalive_s):
            await reader.wake.wait()
    except TimeoutError:
        return
    reader.wake.clear()


async def _catch_up(reader: SseReader, writer: AbstractStreamWriter) -> None:
    """Wait until the client's socket has taken what is there."""
    async with asyncio.timeout(STALL_LIMIT_S):
        await writer.drain()
    reader.stalled = False
    reader.advance()
