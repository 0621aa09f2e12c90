"""The gateway's end of a unix socket to one engine. Stage: place, deliver; runs on the event loop.

A protocol without tasks or queues: what arrived in one read is handed over as one list, so that all tokens of an engine
step are journaled and sent together. Source: engine/wire.py, engine/messages.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

from engine import messages as m
from engine.wire import FROM_ENGINE, FrameBuffer, WireError, encode

HELLO_TIMEOUT_S = 10.0


class EngineLink(asyncio.Protocol):
    """One connection. `on_messages` gets all but the Hello; `on_lost` is called once, with a reason."""

    def __init__(self, on_messages: Callable[[list[Any]], None], on_lost: Callable[[str], None]) -> None:
        self._frames = FrameBuffer(FROM_ENGINE)
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._hello: asyncio.Future[m.Hello] = asyncio.get_running_loop().create_future()
        self._early: list[Any] = []  # came in one read with the Hello; wait until it has been dealt with
        self._attached = False
        self._reason = "connection closed"
        self.last_heard = time.monotonic()

    @classmethod
    async def attach(
        cls, path: str, gateway: str, on_messages: Callable[[list[Any]], None], on_lost: Callable[[str], None]
    ) -> tuple[EngineLink, m.Hello]:
        """Connect and introduce ourselves. Raises OSError or TimeoutError. Call `begin` when the Hello has been dealt with."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            _, link = await loop.create_unix_connection(lambda: cls(on_messages, on_lost), path)
            try:
                link.send(m.Attach(gateway))
                return link, await link._hello
            except BaseException:
                link.close()
                raise

    def begin(self) -> None:
        """Hand over what came with the Hello, and from now on everything at once."""
        self._attached = True
        early, self._early = self._early, []
        if early:
            self._on_messages(early)

    def send(self, message: m.Message) -> None:
        """Queue one message; dropped when the connection is gone (its loss is told by `on_lost`)."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    def close(self) -> None:
        """Close without telling `on_lost`."""
        self._on_lost = lambda reason: None
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports don't derive from it

    def data_received(self, data: bytes) -> None:
        self.last_heard = time.monotonic()
        try:
            messages = self._frames.feed(data)
        except WireError as error:
            self._reason = str(error)
            assert self._transport is not None
            self._transport.abort()
            return
        if messages and not self._hello.done() and isinstance(messages[0], m.Hello):
            self._hello.set_result(messages.pop(0))
        if not self._attached:
            self._early += messages
        elif messages:
            self._on_messages(messages)

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._reason = str(error)
        if not self._hello.done():
            self._hello.set_exception(ConnectionError(self._reason))
            self._hello.exception()
        self._on_lost(self._reason)
