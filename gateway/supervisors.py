"""Those who start processes again: are they there themselves? The host agent's and `serve`'s heartbeats, on the event loop.

Answers go on without either, so it is a degraded state and no failure. Who does something about it: `serve` about its host agent
(`ops/watchdog.py`); about `serve` whoever started it. Source: docs/operations.md, "Degraded".
"""

from __future__ import annotations

import asyncio

from tiers.heartbeat import Listener
from tiers.paths import Paths

LISTEN_S = 1.0
AWAY_S = 3.0  # longer than a host agent takes to be started again

HOST_AWAY, SERVE_AWAY = "host_away", "serve_away"
HINTS = {
    HOST_AWAY: "engines that die or hang are not started again meanwhile; `serve` continues or replaces it within host.silent_limit_s",
    SERVE_AWAY: "gateway and host agent are not started again if they die; if it was stopped: `kill -CONT` that process",
}


class Supervisors:
    """Owner of what is known about them; `run` is its task. away: state -> reason, of those that are not heard."""

    def __init__(self, paths: Paths) -> None:
        self._listeners = {
            HOST_AWAY: ("the host agent", Listener(paths.beat("host"), LISTEN_S)),
            SERVE_AWAY: ("`concordia serve`", Listener(paths.beat("serve"), LISTEN_S)),
        }
        self.away: dict[str, str] = {}

    def host_speaks(self) -> bool:
        """The host agent was heard at the last look, or never yet."""
        return not self._listeners[HOST_AWAY][1].silent_s

    async def run(self) -> None:
        """Listen, for ever."""
        while True:
            self.listen()
            await asyncio.sleep(LISTEN_S)

    def listen(self) -> None:
        """One look. Whoever was never heard is not missed: a gateway may run without them."""
        self.away = {
            state: f"{who} (pid {listener.pid}) has not been heard for over {AWAY_S:g} s: stopped, stuck or dead"
            for state, (who, listener) in self._listeners.items()
            if listener.listen() >= AWAY_S
        }
