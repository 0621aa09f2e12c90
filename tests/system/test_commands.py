"""The operator's commands on real systems: a session moves in a file, a backup is made while answers stream, lanes are drained by hand."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.driver import System, wait_for
from tests.system import conftest
from tests.system import harness as h

SETTINGS = {"engine": h.ONE_THREAD, "tiers": h.SMALL_LANES, "host": {"nursery": False}}


def concordia(system: System, *arguments: str, code: int = 0) -> Any:
    """`concordia ARGUMENTS --json` about one system, told nothing but its data directory; its JSON."""
    command = [str(Path(sys.executable).with_name("concordia")), *arguments, "--json"]
    command += ["--data-dir", str(system.paths.data_dir)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout) if done.stdout else done.stderr


def random_prompt(seed: int, count: int = 200) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 512) for _ in range(count)]


@pytest.fixture(scope="module")
def other_system(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tiny_model, tmp_path_factory.mktemp("other") / "data", engines=1, settings=SETTINGS)
    try:
        yield system.start()
    finally:
        system.close()


@pytest.fixture
def other(other_system: System) -> System:
    """Another installation than `tiny`, with one engine that is started without a nursery."""
    return conftest.settled_or_new(other_system)


@pytest.fixture
def empty(tiny_model: Path, tmp_path: Path) -> Iterator[System]:
    """An installation with nothing in it, not started."""
    system = System(tiny_model, tmp_path / "empty", engines=1, settings=SETTINGS)
    try:
        yield system
    finally:
        system.close()


def turn(system: System, session: str, tokens: list[int], count: int = 16) -> Any:
    answer = system.stream(h.COMPLETIONS, h.completion(system, tokens, tokens=count), headers={"X-Session-Id": session})
    h.assert_whole(answer)
    return answer


@pytest.mark.timeout(240)
def test_tiny_a_session_moves_in_a_file_and_its_next_turn_finds_its_tokens(
    tiny: System, other: System, tmp_path: Path
) -> None:
    prompt = random_prompt(1)
    turn(tiny, "moving", prompt)
    file = tmp_path / "moving.concordia"
    row = concordia(tiny, "export", "moving", "-o", str(file))
    assert row["tokens"] == len(prompt) + 16 and row["position"] >= row["tokens"] - 1
    assert concordia(other, "import", str(file))["position"] == row["position"]
    view = other.get("/v1/sessions/moving")
    assert (view["state"], view["tokens"], view["durable"], view["durable_lag"]) == (
        "parked", row["tokens"], row["position"], 0,
    )  # fmt: skip
    question = [*prompt, *random_prompt(2, 9)]
    there = turn(other, "moving", question)
    assert h.cached(there) >= len(prompt), there.concordia
    assert there.concordia["verdict"] in ("restored", "partial"), there.concordia
    assert "already" in concordia(other, "import", str(file), code=5)
    again = concordia(other, "import", str(file), "--as", "copy")
    assert again["blocks_there"] >= len(prompt) // 32
    assert {row["id"] for row in concordia(other, "sessions", "ls")["data"]} >= {"moving", "copy"}
    assert concordia(other, "sessions", "rm", "copy", "--yes")["data"][0]["deleted"]
    assert concordia(other, "verify")["ok"]


@pytest.mark.timeout(240)
def test_tiny_a_backup_made_while_answers_stream_is_restored_and_the_session_goes_on(
    other: System, empty: System, tmp_path: Path
) -> None:
    prompt = random_prompt(3)
    turn(other, "kept", prompt)
    made: list[Any] = []
    backup = tmp_path / "backup"
    busy = other.stream(
        h.COMPLETIONS,
        h.completion(other, random_prompt(4), tokens=400),
        headers={"X-Session-Id": "busy"},
        watch=h.after(10, lambda answer: made.append(concordia(other, "backup", str(backup)))),
    )
    h.assert_whole(busy)
    assert made and made[0]["checked"] and made[0]["files"] >= 3
    assert concordia(empty, "verify", str(backup))["ok"]
    concordia(empty, "restore", str(backup))
    assert "served" in concordia(other, "restore", str(backup), "--replace", "--yes", code=5)
    empty.start()
    again = turn(empty, "kept", [*prompt, *random_prompt(5, 9)])
    assert h.cached(again) >= len(prompt), again.concordia
    assert again.concordia["recomputed_tokens"] <= 32, again.concordia
    assert {row["id"] for row in empty.get("/v1/sessions")["data"]} >= {"kept"}
    assert concordia(empty, "verify")["ok"]


@pytest.mark.timeout(240)
def test_tiny_lanes_are_drained_after_a_crash_without_a_server(other: System) -> None:
    prompt = random_prompt(6)
    assert "does not answer" not in json.dumps(concordia(other, "recover")), "a running keeper does it"
    other.stream(
        h.COMPLETIONS,
        h.completion(other, prompt, tokens=200),
        headers={"X-Session-Id": "crashed"},
        watch=h.after(60, lambda answer: other.kill_all()),
    )
    found = concordia(other, "recover")
    assert found["by"] == "command"
    assert concordia(other, "recover")["records"] == 0, "doing it again finds nothing"
    assert concordia(other, "verify")["ok"]
    (shown,) = concordia(other, "inspect", "crashed")["sequences"]
    assert shown["position"] >= len(prompt)
    status = concordia(other, "status", code=4)
    assert status["gateway"] == "down"
    other.start()
    assert h.cached(turn(other, "crashed", prompt)) >= len(prompt) - 1


@pytest.mark.timeout(240)
def test_tiny_status_shows_lag_and_config_what_serve_was_given(other: System) -> None:
    shown = concordia(other, "config")
    assert shown["gateway.port"]["resolved"] == other.port and shown["host.engines"]["resolved"] == 1
    assert "there is no engine 'e9'; there are e0 (ready)" in concordia(other, "drain", "e9", code=1)
    turn(other, "short", random_prompt(7, 50))

    def durable() -> bool:
        view = other.get("/v1/sessions/short")
        return bool(view["durable"] and view["durable"] == view["captured"] >= view["tokens"] - 1)

    other.wait("the session on disk, without a park", durable, 60.0, 0.05)
    shown = other.wait("no lag", lambda: without_lag(concordia(other, "status")), 60.0, 0.05)
    assert (shown["gateway"], shown["sessions"]["behind"], shown["degraded"]) == ("up", [], [])
    assert shown["sessions"]["count"] >= 1
    assert shown["keeper"]["up"]


def without_lag(shown: Any) -> Any:
    """What status shows, if no session waits for the lane or the disk."""
    return shown if shown["sessions"]["capture_lag"] == shown["sessions"]["durable_lag"] == 0 else None


@pytest.mark.timeout(240)
def test_tiny_a_keeper_that_is_stopped_is_a_degraded_state(other: System) -> None:
    """Its host agent leaves it stopped for a minute; that of `tiny` would be too soon for a slow machine."""
    turn(other, "first", random_prompt(8, 40))
    keeper = other.signal("keeper", signal.SIGSTOP)
    try:
        other.wait(
            "a degraded state",
            lambda: [row["state"] for row in other.get("/health")["degraded"]] == ["keeper_away"],
            60.0,
            0.1,
        )
        turn(other, "second", random_prompt(9, 40))
        view = other.get("/v1/sessions/second")
        assert view["degraded"] == "keeper_away" or view["captured"] == 0, view
        assert concordia(other, "status")["degraded"][0]["state"] == "keeper_away"
    finally:
        other.signal("keeper", signal.SIGCONT)
    assert keeper
    other.wait("the end of it", lambda: not other.get("/health")["degraded"], 60.0, 0.1)


def test_tiny_a_second_signal_kills_what_the_first_waits_for(other: System) -> None:
    """Last, since it ends the installation."""
    assert other.serve is not None
    other.signal("gateway", signal.SIGSTOP)  # it can't drain
    other.serve.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        other.serve.wait(1.0)
    other.serve.send_signal(signal.SIGINT)
    other.serve.wait(60.0)
    wait_for("an end of every process", lambda: not other.processes(), 60.0)
