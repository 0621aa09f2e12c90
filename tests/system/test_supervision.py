"""Who starts, watches and ends whom: `serve`, nursery, adoption, orphans, and the commands beside a running system."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.driver import System
from bench.sse import Answer
from tests.system import harness

ORPHANS_END_S = 15 + 60  # an engine waits 15 s for a host agent, and looks once a second


@pytest.fixture
def own(tiny_model: Path, tmp_path: Path) -> Iterator[System]:
    """A system of one test's own, to be damaged at will."""
    settings = {"engine": harness.ONE_THREAD, "tiers": harness.SMALL_LANES, "gateway": {"drain_s": 120}}
    system = System(tiny_model, tmp_path / "data", engines=2, settings=settings)
    try:
        yield system.start()
    finally:
        system.close()


def answers(system: System) -> bool:
    return system.call("POST", harness.CHAT, harness.chat(system, "hello", tokens=4))[0] == 200


def engine_pids(system: System) -> dict[str, int]:
    return {engine.id: engine.pid for engine in system.ready_engines()}


def concordia(system: System, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("concordia")), *arguments, "--data-dir", str(system.paths.data_dir)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s)


PROCESSES = ("gateway", "host", "keeper", "nursery", "e0", "e1")


def test_tiny_no_process_is_left_over_by_any_kill(tiny: System) -> None:
    """Whoever dies, alone or with another one: in the end there is one process of each kind, and none besides."""
    for victims in (("e0",), ("gateway",), ("keeper",), ("nursery", "e1"), ("host",), ("host", "e0", "gateway")):
        pids = {name: tiny.signal(name) for name in victims}

        def one_of_each(before: dict[str, int] = pids) -> bool:
            now = {name: tiny.pid(name) for name in PROCESSES}
            replaced = all(now[name] not in (0, pid) for name, pid in before.items())
            return replaced and set(tiny.processes()) == {tiny.pid("serve"), *now.values()}

        tiny.wait(f"one process of each kind after the death of {victims}", one_of_each, 60.0, 0.1)
        tiny.wait_ready()
    assert answers(tiny)


def test_tiny_nursery_killed_engines_go_on_and_the_next_start_finds_a_new_one(tiny: System) -> None:
    before, nursery = engine_pids(tiny), tiny.signal("nursery")
    tiny.wait("a new nursery", lambda: tiny.pid("nursery") not in (0, nursery))
    assert engine_pids(tiny) == before
    victim = tiny.signal("e0")
    tiny.wait("a new engine", lambda: tiny.pid("e0") not in (0, victim))
    tiny.wait_ready()
    assert answers(tiny)


def test_tiny_whoever_is_stopped_goes_on_and_no_client_loses_its_connection(tiny: System) -> None:
    """Gateway, host agent and nursery are stopped in mid-answer, and an engine is killed meanwhile."""
    stopped = ("gateway", "host", "nursery")
    before = {name: tiny.pid(name) for name in stopped}
    body = harness.chat(tiny, harness.prompts(seed=57, count=1)[0], tokens=100)
    want, victim = tiny.stream(harness.CHAT, body), 0

    def stop(answer: Answer) -> None:
        nonlocal victim
        for name in stopped:
            tiny.signal(name, signal.SIGSTOP)
        victim = tiny.signal("e1")

    got = tiny.stream(harness.CHAT, body, watch=harness.after(20, stop))
    harness.assert_same(got, want, "gateway, host agent and nursery stopped")
    tiny.wait("another engine", lambda: tiny.pid("e1") not in (0, victim))
    tiny.wait_ready()
    assert {name: tiny.pid(name) for name in stopped} == before


def test_tiny_everything_stopped_and_resumed_in_any_order_costs_nobody_anything(tiny: System) -> None:
    """As a frozen container is, or a machine that slept; the host agent is resumed first, and finds the others stopped."""
    names = ("host", "serve", "e0", "gateway", "keeper", "nursery", "e1")
    before = {name: tiny.pid(name) for name in names}
    body = harness.chat(tiny, harness.prompts(seed=58, count=1)[0], tokens=100)
    want = tiny.stream(harness.CHAT, body)

    def resume() -> None:
        for name in names:
            os.kill(before[name], signal.SIGCONT)
            time.sleep(0.1)

    def stop(answer: Answer) -> None:
        for name in names:
            tiny.signal(name, signal.SIGSTOP)
        timer.start()

    timer = threading.Timer(1.5, resume)
    got = tiny.stream(harness.CHAT, body, watch=harness.after(20, stop))
    timer.join()
    harness.assert_same(got, want, "everything stopped")
    assert not harness.recoveries(got)
    assert {name: tiny.pid(name) for name in names} == before
    assert answers(tiny)


def test_tiny_serve_killed_and_started_again_adopts_the_engines(tiny: System) -> None:
    before = engine_pids(tiny)
    assert tiny.serve is not None
    tiny.serve.kill()
    tiny.serve.wait(60)
    tiny.start()
    assert engine_pids(tiny) == before
    assert answers(tiny)


def test_serve_killed_for_good_leaves_no_process(own: System) -> None:
    assert own.serve is not None
    own.serve.kill()
    own.serve.wait(60)
    deadline = time.monotonic() + ORPHANS_END_S
    while own.processes():
        assert time.monotonic() < deadline, f"orphans: {own.processes()}"
        time.sleep(0.1)


def test_tiny_second_serve_is_refused_and_harms_nothing(tiny: System) -> None:
    second = concordia(tiny, "serve", "--model", tiny.model, "--port", str(tiny.port + 1))
    assert second.returncode == 5
    assert f"pid {tiny.pid('serve')}" in second.stderr
    assert answers(tiny)


def test_commands_beside_a_running_system_and_after_its_graceful_end(own: System) -> None:
    """Its terminal is closed in mid-answer: the answer is finished first; then no process, and no socket, is left."""
    assert answers(own)
    place = ("--port", str(own.port))
    shown = json.loads(concordia(own, "status", "--json", *place).stdout)
    assert {row["name"] for row in shown["processes"]} == {"serve", "gateway", "host", "keeper", "nursery", "e0", "e1"}
    assert {row["id"] for row in shown["engines"]} == {"e0", "e1"}
    assert concordia(own, "verify").returncode == 0
    body = harness.chat(own, harness.prompts(seed=56, count=1)[0], tokens=300)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # then serve ignores it, too
    closed = signal.SIGTERM if ignored else signal.SIGHUP
    end = harness.after(5, lambda answer: os.kill(own.pid("serve"), closed))
    harness.assert_whole(own.stream(harness.CHAT, body, watch=end))
    assert own.serve is not None
    assert own.serve.wait(120) == 0, own.log_tail()  # a second signal would kill what the first waits for
    assert own.stop() == 0
    assert not [path for kind in ("sock", "pid", "url") for path in own.paths.lane_dir.glob(f"*.{kind}")]
    assert concordia(own, "status", *place).returncode == 4
    verified = json.loads(concordia(own, "verify", "--json").stdout)
    assert verified["ok"]
    assert verified["checked"]["sequences"] >= 1
