"""A rolling upgrade: each engine drained, ended, and waited for as its next incarnation. Runs in the command's process.

The order is planned purely: idle engines first, so that the first streams that move find a new engine already.
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
from ops.errors import OpsError
from tiers.paths import Paths

POLL_S = 0.1


def in_order(rows: list[dict[str, Any]]) -> list[str]:
    """Engines of GET /admin/engines, fewest streams first."""
    return [row["id"] for row in sorted(rows, key=lambda row: (len(row.get("streams") or []), row["id"]))]


def replace_all(client: Client, paths: Paths, timeout_s: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every engine by its next incarnation. Raises OpsError where one can't be replaced; those before it are new by then."""
    rows = client.get("/admin/engines")["data"]
    if sum(row["state"] == "ready" for row in rows) < 2:
        raise OpsError("an upgrade needs at least two engines that can serve, so that streams have somewhere to go")
    _replace_nursery(paths, timeout_s)
    report = []
    for engine in in_order(rows):
        began = time.monotonic()
        answer = client.post(f"/admin/engines/{engine}/restart", {"timeout_s": timeout_s}, timeout_s=timeout_s + 10)
        new = _wait_for(client, engine, answer["incarnation"], timeout_s)
        seconds = round(time.monotonic() - began, 2)
        report.append(
            {"engine": engine, "moved": answer["moved"], "incarnation": new["incarnation"], "seconds": seconds}
        )
        say(f"{engine}: {answer['moved']} streams moved, incarnation {new['incarnation']} serves after {seconds} s")
    return report


def _replace_nursery(paths: Paths, timeout_s: float) -> None:
    """The host agent starts another one, with the code that is installed now."""
    old = pid_file.read(paths.pid_file("nursery"))
    if old is None or not old.alive:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(old.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while True:
        now = pid_file.read(paths.pid_file("nursery"))
        if now is not None and now.alive and now.pid != old.pid:
            return
        if time.monotonic() > deadline:
            raise OpsError(f"no new nursery after {timeout_s:g} s; see the log of `serve`")
        time.sleep(POLL_S)


def _wait_for(client: Client, engine: str, incarnation: int, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while True:
        row: dict[str, Any] = next((row for row in client.get("/admin/engines")["data"] if row["id"] == engine), {})
        if row.get("state") == "ready" and row["incarnation"] > incarnation:
            return row
        if time.monotonic() > deadline:
            raise OpsError(
                f"{engine} is not back after {timeout_s:g} s; see the log of `serve`. The other engines go on"
            )
        time.sleep(POLL_S)
