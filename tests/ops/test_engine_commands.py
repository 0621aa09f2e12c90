"""`migrate`, `drain`, `upgrade` and the failover policies, without a running installation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner

from ops import config as configuration
from ops.cli import main
from ops.engine_commands import _move_line
from ops.errors import NotRunning
from ops.upgrade import in_order, replace_all
from tiers.paths import Paths


def test_commands_say_that_nobody_answers(tmp_path: Path) -> None:
    for command in (["migrate", "s", "e1"], ["drain", "e0"], ["upgrade"]):
        result = CliRunner().invoke(main, [*command, "--data-dir", str(tmp_path / "data"), "--port", "1"])
        assert result.exit_code == 4, (command, result.output)


def test_upgrade_begins_with_idle_engines() -> None:
    rows = [{"id": "e0", "streams": [1, 2]}, {"id": "e1", "streams": []}, {"id": "e2", "streams": [1]}]
    assert in_order(rows) == ["e1", "e2", "e0"]


def test_policy_cold_starts_no_spares(tmp_path: Path) -> None:
    flags = {"host.engines": "3", "gateway.failover": "cold", "data_dir": str(tmp_path)}
    config = configuration.load(flags)
    assert config.host_json(tmp_path, "m")["host"]["engines"] == 2
    assert config.gateway_json(tmp_path, "m")["gateway"]["spares"] == 0
    warm = configuration.load({**flags, "gateway.failover": "hot"})
    assert warm.host_json(tmp_path, "m")["host"]["engines"] == 3


def test_move_is_told_in_one_line() -> None:
    move = {"stream": "a", "from_engine": "e0", "to_engine": "e1", "carried": "tokens", "reason": "other form"}
    assert _move_line({**move, "outcome": "moved", "downtime_ms": 12.4}) == (
        "a: e0 -> e1: moved, tokens carried (other form), stood still for 12 ms"
    )
    assert _move_line({**move, "outcome": "target lost", "downtime_ms": 0.0}) == "a: e0 -> e1: target lost"


class Restarting:
    """Two engines; the second is killed while the first is replaced, and comes back some looks later."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = [
            {"id": name, "state": "ready", "incarnation": 1, "streams": []} for name in ("e0", "e1")
        ]
        self.asked: list[tuple[str, str]] = []
        self._looks = 0

    def get(self, path: str) -> dict[str, Any]:
        self._looks += 1
        if self._looks == 3:
            raise NotRunning("another gateway is started")
        if self.rows[1]["state"] == "down" and self._looks > 4:
            self.rows[1] |= {"state": "ready", "incarnation": 2}
        return {"data": [dict(row) for row in self.rows]}

    def post(self, path: str, body: Any, *, timeout_s: float) -> dict[str, Any]:
        row = next(row for row in self.rows if f"/{row['id']}/" in path)
        self.asked.append((row["id"], row["state"]))
        before = row["incarnation"]
        row["incarnation"] += 1
        self.rows[1]["state"] = "down" if row["id"] == "e0" else "ready"
        return {"moved": 0, "incarnation": before}


def test_upgrade_waits_for_an_engine_or_a_gateway_that_died_meanwhile(tmp_path: Path) -> None:
    client = Restarting()
    report = replace_all(client, Paths.at(tmp_path), 30.0, lambda text: None)  # type: ignore[arg-type]
    assert client.asked == [("e0", "ready"), ("e1", "ready")]
    assert [(row["engine"], row["incarnation"]) for row in report] == [("e0", 2), ("e1", 3)]
