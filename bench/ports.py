"""TCP ports for the servers that tests and benches start."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_claims: list[socket.socket] = []
_SERVERS = range(10_000, 32_768)
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A TCP port that no other test or bench gets while this process lives, also while nothing listens on it.

    A port that the kernel picks is free only for a moment: any connection may leave from it while a gateway is
    still starting, or dead. So it lies below the range of those, where the machine has such ports, and a name in
    the abstract namespace, which ends with its process, keeps it. Raises OSError when a thousand are taken.
    """
    lowest_ephemeral = int(_EPHEMERAL_PORTS.read_text().split()[0])
    below = range(_SERVERS.start, min(_SERVERS.stop, lowest_ephemeral))
    for port in random.Random().sample(below if len(below) >= 1_000 else _SERVERS, 1_000):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0concordia-port-{port}")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
        else:
            _claims.append(claim)
            return port
    raise OSError("a thousand ports between 10000 and 32767 are all taken")
