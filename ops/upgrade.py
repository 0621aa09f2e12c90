"""A rolling upgrade: each engine drained, ended, and waited for as its next incarnation. Runs in the command's process.

The order is planned purely: idle engines first, so that the first streams that move find a new engine already. What engines are born
from goes first (the nursery; with `host` the host agent and its keeper as well: engines are adopted), the gateway last: `serve` and the
host agent start their children again with the code that is installed by then. `serve` itself stays.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from engine import pid_file
from ops.client import Client
from ops.errors import NotRunning, OpsError
from tiers.paths import Paths

POLL_S = 0.1
ALIVE = ("ready", "draining", "drained")


def in_order(rows: list[dict[str, Any]]) -> list[str]:
    """Engines of GET /admin/engines, fewest streams first."""
    return [row["id"] for row in sorted(rows, key=lambda row: (len(row.get("streams") or []), row["id"]))]


def replace_all(
    client: Client, paths: Paths, timeout_s: float, say: Callable[[str], None], *, host: bool = False,
    gateway: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every engine by its next incarnation. Raises OpsError where one can't be replaced; those before it are new by then.

    host     the host agent and its keeper, too, before the engines
    gateway  and the gateway after them: answers get its `drain_s` to end, clients of longer ones resume by cursor
    """
    rows = client.get("/admin/engines")["data"]
    if sum(row["state"] == "ready" for row in rows) < 2:
        raise OpsError("an upgrade needs at least two engines that can serve, so that streams have somewhere to go")
    if host:
        _replace(
            paths, "host", signal.SIGKILL, ("host", "keeper", "nursery"), timeout_s
        )  # SIGTERM would end the engines
        _wait_until("the gateway has found it", timeout_s, lambda: bool(_engines(client).get("host_agent")))
        say("host agent and keeper are new, the engines go on")
    else:
        _replace(paths, "nursery", signal.SIGTERM, ("nursery",), timeout_s)
    report = []
    for engine in in_order(rows):
        began = time.monotonic()
        _wait_for(client, engine, 0, timeout_s, ALIVE)  # it may have died meanwhile
        answer = client.post(f"/admin/engines/{engine}/restart", {"timeout_s": timeout_s}, timeout_s=timeout_s + 10)
        new = _wait_for(client, engine, answer["incarnation"], timeout_s)
        seconds = round(time.monotonic() - began, 2)
        report.append(
            {"engine": engine, "moved": answer["moved"], "incarnation": new["incarnation"], "seconds": seconds}
        )
        say(f"{engine}: {answer['moved']} streams moved, incarnation {new['incarnation']} serves after {seconds} s")
    if gateway:
        _replace(paths, "gateway", signal.SIGTERM, ("gateway",), timeout_s)
        _wait_until("the new gateway can serve", timeout_s, client.healthy)
        say("the gateway is new")
    return report


def _replace(paths: Paths, victim: str, number: signal.Signals, names: tuple[str, ...], timeout_s: float) -> None:
    """End a process whose parent starts the next one, and wait for the successors of all that ends with it."""
    before = {name: known.pid for name in names if (known := pid_file.read(paths.pid_file(name))) and known.alive}
    if victim not in before:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(before[victim], number)

    def replaced(name: str) -> bool:
        now = pid_file.read(paths.pid_file(name))
        return now is not None and now.alive and now.pid != before[name]

    _wait_until(f"a new {victim} is there", timeout_s, lambda: all(replaced(name) for name in before))


def _engines(client: Client) -> dict[str, Any]:
    """What the gateway says of the engines; nothing while `serve` starts another gateway."""
    try:
        return dict(client.get("/admin/engines"))
    except NotRunning:
        return {}


def _wait_until(what: str, timeout_s: float, probe: Callable[[], bool]) -> None:
    deadline = time.monotonic() + timeout_s
    while not probe():
        if time.monotonic() > deadline:
            raise OpsError(f"waited {timeout_s:g} s until {what}; see the log of `serve`")
        time.sleep(POLL_S)


def _wait_for(
    client: Client, engine: str, incarnation: int, timeout_s: float, states: tuple[str, ...] = ("ready",)
) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while True:
        row: dict[str, Any] = next((row for row in _engines(client).get("data", ()) if row["id"] == engine), {})
        if row.get("state") in states and row["incarnation"] > incarnation:
            return row
        if time.monotonic() > deadline:
            raise OpsError(
                f"{engine} is not back after {timeout_s:g} s; see the log of `serve`. The other engines go on"
            )
        time.sleep(POLL_S)
