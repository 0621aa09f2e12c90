"""What `serve` tells the service manager that started it: ready, alive, stopping. Nothing where there is none. On `serve`'s loop.

Source: sd_notify(3), systemd.service(5) (`Type=notify`, `WatchdogSec`): datagrams to the socket that NOTIFY_SOCKET names. A manager that
isn't told `WATCHDOG=1` in time kills `serve`, and starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

SOCKET_VARIABLE = "NOTIFY_SOCKET"
TELL_S = 1.0

ALIVE, READY, STOPPING = "WATCHDOG=1", "READY=1", "STOPPING=1"


async def keep_told(state: Callable[[], str]) -> None:
    """Tell the manager the state ("", READY or STOPPING) and that the loop turns, until cancelled."""
    address = os.environ.get(SOCKET_VARIABLE, "")
    while address:
        _tell(address, f"{state()}\n{ALIVE}".lstrip())
        await asyncio.sleep(TELL_S)


def _tell(address: str, news: str) -> None:
    """A manager that is busy is told again soon; one that is gone hears nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as messenger:
        messenger.setblocking(False)
        messenger.sendto(news.encode(), "\0" + address[1:] if address.startswith("@") else address)
