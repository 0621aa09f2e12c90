"""The engine's end of the gateway link: one unix socket, one gateway at a time, never blocking.

Polled by the step loop between steps, on the main thread. A gateway that attaches takes the place of the one before; while
none is attached, steps go on and what they say is remembered by the sequences, not here. A gateway that does not read is
cut off once `_BACKLOG_BYTES` wait for it: it attaches again and is told everything.
"""

from __future__ import annotations

import os
import selectors
import socket
from pathlib import Path

import structlog

from engine import messages as m
from engine.wire import TO_ENGINE, FrameBuffer, WireError, encode
from tiers.acceptor import Acceptor

log = structlog.get_logger()

_BACKLOG_BYTES = 64 << 20


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.frames = FrameBuffer(TO_ENGINE)
        self.out = bytearray()
        self.attached = False


class GatewayLink:
    """Listens at `path` from construction on."""

    def __init__(self, path: Path) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.unlink(missing_ok=True)
        self._listener.bind(str(temporary))
        self._listener.listen(8)
        self._listener.setblocking(False)
        self._acceptor = Acceptor(self._listener)
        os.rename(temporary, path)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._gateway: _Connection | None = None

    @property
    def attached(self) -> bool:
        """A gateway is listening."""
        return self._gateway is not None

    def poll(self, timeout_s: float) -> list[m.ToEngine]:
        """Wait up to `timeout_s` for traffic; return what arrived. An `Attach` among it makes its sender the gateway."""
        arrived: list[m.ToEngine] = []
        for key, events in self._selector.select(timeout_s):
            if key.data is None:
                self._accept()
                continue
            if events & selectors.EVENT_READ:
                arrived += self._receive(key.data)
            if events & selectors.EVENT_WRITE and key.data.sock.fileno() >= 0:
                self._flush(key.data)
        return arrived

    def send(self, message: m.Message) -> None:
        """Queue a message for the attached gateway, and write what the socket takes; dropped if there is none."""
        connection = self._gateway
        if connection is None:
            return
        connection.out += encode(message)
        self._flush(connection)
        if len(connection.out) > _BACKLOG_BYTES:
            log.warning("link.backlog", bytes=len(connection.out))
            self._drop(connection)

    def close(self) -> None:
        """Close everything; the socket file stays for whoever comes next to replace."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._acceptor.close()
        self._selector.close()

    def _accept(self) -> None:
        sock = self._acceptor.accept()
        if sock is None:
            return
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, _Connection(sock))

    def _receive(self, connection: _Connection) -> list[m.ToEngine]:
        try:
            data = connection.sock.recv(1 << 20)
            messages = connection.frames.feed(data) if data else []
        except BlockingIOError:
            return []
        except (OSError, WireError) as error:
            log.warning("link.broken", error=str(error))
            data, messages = b"", []
        if not data:
            self._drop(connection)
            return []
        accepted = []
        for message in messages:
            if isinstance(message, m.Attach):
                self._attach(connection, message)
            if self._gateway is connection:
                accepted.append(message)
        return accepted

    def _attach(self, connection: _Connection, attach: m.Attach) -> None:
        if self._gateway not in (None, connection):
            log.info("link.replaced", gateway=attach.gateway)
            self._drop(self._gateway)  # type: ignore[arg-type]
        self._gateway = connection

    def _flush(self, connection: _Connection) -> None:
        try:
            while connection.out:
                sent = connection.sock.send(memoryview(connection.out)[: 1 << 20])
                del connection.out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.out else 0)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.sock.fileno() >= 0:
            self._selector.unregister(connection.sock)
            connection.sock.close()
        if self._gateway is connection:
            self._gateway = None
