"""The gateway's subscription at the host agent: which engines are up, which are dead for certain. Runs on the event loop.

The host agent may be away or be restarted at any time: the link comes back by itself, and engines are told again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from engine import messages as m
from engine.wire import FROM_HOST, FrameBuffer, WireError, encode
from gateway import metrics

log = structlog.get_logger()

RETRY_FIRST_S = 0.05
RETRY_LIMIT_S = 1.0


class HostLink:
    """Owner of the connection; `run` is its task."""

    def __init__(self, path: Path, gateway: str) -> None:
        self._path = path
        self._gateway = gateway
        self.on_news: Callable[[m.FromHost], None] = lambda news: None
        self._writer: asyncio.StreamWriter | None = None
        self._suspects: dict[tuple[str, int], m.Suspect] = {}
        self.subscribed = asyncio.Event()

    @property
    def connected(self) -> bool:
        return self._writer is not None

    def suspect(self, engine: str, incarnation: int, reason: str) -> None:
        """Ask for the death of an incarnation to be made certain; kept and asked again until it is."""
        message = m.Suspect(engine, incarnation, reason)
        self._suspects[engine, incarnation] = message
        if self._writer is not None:
            self._writer.write(encode(message))

    def settled(self, engine: str, incarnation: int) -> None:
        """The suspicion needs no answer any more."""
        self._suspects.pop((engine, incarnation), None)

    async def run(self) -> None:
        """Stay connected until cancelled."""
        delay_s = RETRY_FIRST_S
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(str(self._path))
                delay_s = RETRY_FIRST_S
                await self._follow(reader, self._writer)
                log.warning("host_link.lost", path=str(self._path))
            except (OSError, WireError) as error:
                log.debug("host_link.retry", path=str(self._path), error=str(error))
            finally:
                metrics.host_link_up.set(0)
                if self._writer is not None:
                    self._writer.close()
                self._writer = None
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RETRY_LIMIT_S)

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameBuffer(FROM_HOST)
        writer.write(encode(m.Subscribe(self._gateway)))
        for suspect in self._suspects.values():
            writer.write(encode(suspect))
        metrics.host_link_up.set(1)
        log.info("host_link.subscribed")
        self.subscribed.set()
        while data := await reader.read(65536):
            for news in frames.feed(data):
                self.on_news(news)
