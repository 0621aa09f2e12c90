"""The gateway's port, held by `concordia serve` for as long as it serves: who connects while no gateway is there waits, and isn't refused.

`serve` binds and listens; each gateway that it starts inherits the sockets and accepts from them (`gateway/app.py`). A connection that
arrives between a gateway's death and the next one's start lies in the kernel's backlog and is answered by the next one.
Source: as systemd's socket activation does it, sd_listen_fds(3)
"""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Any

from gateway.settings import BACKLOG
from ops.errors import AlreadyRunning, ConfigError, OpsError


def check_port(host: str, port: int) -> None:
    """Raises what `bind` does, and leaves nothing bound; better now than after a model was pulled."""
    for bound in bind(host, port):
        bound.close()


def listen(host: str, port: int) -> list[socket.socket]:
    """The sockets that gateways inherit. Raises what `bind` does."""
    bound = bind(host, port)
    with contextlib.ExitStack() as undo:
        for held in bound:
            undo.enter_context(held)
        try:
            for held in bound:
                held.listen(BACKLOG)
        except OSError as error:  # somebody else had bound it as well, and listens first
            raise _taken(host, port, error) from error
        undo.pop_all()
    return bound


def bind(host: str, port: int) -> list[socket.socket]:
    """TCP sockets at every address of `host`, none of which listens yet.

    Raises AlreadyRunning (somebody has the port, or it may not be had), ConfigError (`host` isn't here), OpsError (port 0)
    """
    if port == 0:
        raise OpsError("port 0 can't be served: clients need to know the port; give one by --port")
    bound: list[socket.socket] = []
    with contextlib.ExitStack() as undo:
        try:
            addresses = dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
        except (socket.gaierror, UnicodeError) as error:  # UnicodeError: a part that is too long, or no text
            raise _other_host(host, error) from error
        missing: OSError | None = None
        for family, kind, protocol, _, address in addresses:
            try:
                bound.append(undo.enter_context(_bound(family, kind, protocol, address)))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise _taken(host, port, error) from error
                missing = error  # such as ::1 of `localhost` where there is no IPv6
        if missing is not None and not bound:
            raise _other_host(host, missing) from missing
        undo.pop_all()
    return bound


def send_away(port: list[socket.socket]) -> None:
    """End the connections that nobody has accepted: nobody will soon, and their clients are to hear of it."""
    for held in port:
        held.setblocking(False)
        with contextlib.suppress(OSError):  # BlockingIOError: no more of them
            while True:
                held.accept()[0].close()


def _bound(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _taken(host: str, port: int, error: OSError) -> AlreadyRunning:
    return AlreadyRunning(f"{host}:{port} can't be listened on ({error.strerror or error}); choose another with --port")


def _other_host(host: str, error: OSError | UnicodeError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else "no name of a host"
    return ConfigError(f"gateway.host {host!r} is no address of this machine ({reason}); choose another with --host")
