"""Accepting connections on a listening socket without ending of it. Keeper, nursery, engine: their loops' own threads.

Where no descriptor is left, accept fails and the connection stays waiting, so that the loop would turn without pause. So one descriptor
is held in reserve: with it whoever connects is let in and sent away at once, and may come again.
"""

from __future__ import annotations

import errno
import os
import socket

import structlog

log = structlog.get_logger()

EXHAUSTED = (errno.EMFILE, errno.ENFILE)  # no descriptor is left, to this process or to all


class Acceptor:
    """Accepts from a listening socket, which is the caller's."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._reserve = _reserve()
        self._refuses = False

    def accept(self) -> socket.socket | None:
        """The next connection; None if there is none after all: who made it has gone, or had to be sent away."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                self._send_away(error)
            return None
        self._refuses = False
        return connection

    def _send_away(self, error: OSError) -> None:
        if not self._refuses:
            log.error("accept.refused", error=str(error), hint="raise the limit on open files (`ulimit -n`)")
        self._refuses = True
        self.close()
        try:
            self._listener.accept()[0].close()
        except OSError:
            pass  # somebody else has taken the descriptor
        self._reserve = _reserve()

    def close(self) -> None:
        """Let the reserve go."""
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1


def _reserve() -> int:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
