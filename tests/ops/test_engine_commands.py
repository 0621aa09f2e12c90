"""`migrate`, `drain`, `upgrade` and the failover policies, without a running installation."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from ops import config as configuration
from ops.cli import main
from ops.engine_commands import _move_line
from ops.upgrade import in_order


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
