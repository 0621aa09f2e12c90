"""Live migration, drain and upgrade with real processes: the client's stream goes on, byte for byte."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.driver import System, alive, at_once
from bench.sse import Answer
from tests.system import conftest
from tests.system import harness as h
from tests.system.test_supervision import concordia


def policy_system(policy: str) -> Any:
    @pytest.fixture(scope="module")
    def started(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
        more = {"gateway": {"failover": policy, "spares": 0 if policy == "cold" else 1}}
        engines = 1 if policy == "cold" else 2
        yield from conftest.running(tiny_model, tmp_path_factory.mktemp(policy), engines, sections=more)

    return started


cold_system, warm_system, hot_system = (policy_system(policy) for policy in ("cold", "warm", "hot"))


@pytest.fixture
def moving(warm_system: System) -> System:
    """Two engines, the second with weights loaded."""
    return conftest.settled_or_new(warm_system)


@pytest.fixture(params=["cold", "warm", "hot"])
def any_policy(request: pytest.FixtureRequest) -> System:
    return conftest.settled_or_new(request.getfixturevalue(f"{request.param}_system"))


@pytest.fixture
def hot(hot_system: System) -> System:
    return conftest.settled_or_new(hot_system)


def other(system: System, engine: str) -> str:
    return next(view.id for view in system.ready_engines() if view.id != engine)


def migrate(system: System, answer: Answer) -> Any:
    target = other(system, system.serving_engine(answer.stream_id).id)
    return system.call("POST", f"/admin/streams/{answer.stream_id}/migrate", {"engine": target})[2]


def moves(answer: Answer) -> list[dict[str, Any]]:
    return list(answer.concordia["migrations"])


def wanted(system: System, seed: int, mode: dict[str, Any], tokens: int) -> tuple[dict[str, Any], Answer]:
    body = h.chat(system, h.prompts(seed=seed, count=1)[0], mode, tokens=tokens)
    return body, system.stream(h.CHAT, body)


@pytest.mark.parametrize("mode", h.MODES)
def test_tiny_stream_moves_to_and_fro_all_along_its_answer(moving: System, mode: str) -> None:
    body, want = wanted(moving, 51, h.MODES[mode], 240)
    results: list[Any] = []

    def watch(answer: Answer) -> None:
        if len(answer.tokens) % 40 == 20:
            results.append(migrate(moving, answer))

    got = moving.stream(h.CHAT, body, watch=watch)
    h.assert_same(got, want, mode)
    assert len(moves(got)) >= 3, results
    assert {move["carried"] for move in moves(got)} == {"state"}
    assert not h.recoveries(got)


def test_tiny_session_is_moved_by_the_command_live_and_idle(moving: System) -> None:
    body, want = wanted(moving, 60, h.GREEDY, 300)
    place = ("--port", str(moving.port))
    done: list[Any] = []

    def move(answer: Answer) -> None:
        target = other(moving, moving.serving_engine(answer.stream_id).id)
        done.append(concordia(moving, "migrate", "traveller", target, "--json", *place))

    headers = {"X-Session-Id": "traveller"}
    mover: list[threading.Thread] = []

    def begin(answer: Answer) -> None:
        mover.append(threading.Thread(target=move, args=(answer,)))
        mover[0].start()

    got = moving.stream(h.CHAT, body, headers=headers, watch=h.after(20, begin))
    mover[0].join(60.0)
    h.assert_same(got, want, "moved by the command")
    assert done[0].stdout or done[0].stderr
    holder = moving.call("GET", "/v1/sessions/traveller")[2]["engines"]
    target = other(moving, holder[0])
    idle = concordia(moving, "migrate", "traveller", target, *place)
    assert (idle.returncode, idle.stdout) == (0, "traveller: moved\n"), idle.stderr
    assert moving.call("GET", "/v1/sessions/traveller")[2]["engines"] == [target]
    drained = concordia(moving, "drain", target, *place)
    assert drained.stdout == f"{target}: 0 streams moved, 0 left\n"
    assert concordia(moving, "drain", target, "--undo", *place).stdout == f"{target} is ready\n"
    assert concordia(moving, "migrate", "nobody", target, *place).returncode == 1


def test_tiny_stream_moves_in_its_prefill(moving: System) -> None:
    body = h.completion(moving, h.random_tokens(57, 1500, low=3, high=512), tokens=30)
    want = moving.stream(h.COMPLETIONS, body)
    other_body = {**body, "prompt": h.random_tokens(58, 1500, low=3, high=512)}
    results: list[Any] = []
    moved = moving.stream(
        h.COMPLETIONS, other_body, watch=h.after(0, lambda answer: results.append(migrate(moving, answer)))
    )
    h.assert_whole(moved)
    assert moved.usage["completion_tokens"] == want.usage["completion_tokens"]
    again = moving.stream(h.COMPLETIONS, other_body)
    assert again.text == moved.text, results


def test_tiny_hot_standby_moves_and_takes_over(hot: System) -> None:
    """Moved to the standby, which then dies: the one that came before it stands by by then."""
    body, want = wanted(hot, 59, h.SAMPLED, 300)
    results: list[Any] = []
    move = h.after(30, lambda answer: results.append(migrate(hot, answer)))
    kill = h.after(150, lambda answer: h.kill_serving(hot, answer.stream_id))
    got = hot.stream(h.CHAT, body, watch=lambda answer: (move(answer), kill(answer))[0])
    h.assert_same(got, want, "moved, then killed")
    assert moves(got), results
    (recovery,) = h.recoveries(got)
    assert recovery["restored_tokens"] >= len(moves(got)), recovery


@pytest.mark.parametrize("victim", ["source", "target", "gateway"])
def test_tiny_move_while_somebody_is_killed(moving: System, victim: str) -> None:
    body, want = wanted(moving, 52, h.GREEDY, 200)
    body = {**body, "store": True}
    source: list[str] = []

    def move_and_kill(answer: Answer) -> None:
        source.append(moving.serving_engine(answer.stream_id).id)
        target = other(moving, source[0])
        mover = threading.Thread(target=lambda: attempt(moving, answer.stream_id, target))
        mover.start()
        moving.signal({"source": source[0], "target": target, "gateway": "gateway"}[victim])

    got = moving.stream(h.CHAT, body, watch=h.after(30, move_and_kill))
    while not got.done:
        moving.wait("a gateway", moving.healthy, 30.0)
        got = moving.resume(got)
    h.assert_same(got, want, f"{victim} killed during the move")


def attempt(system: System, stream_id: str, target: str) -> None:
    """The move itself may fail with whoever is killed."""
    try:
        system.call("POST", f"/admin/streams/{stream_id}/migrate", {"engine": target})
    except OSError:
        pass


def test_tiny_move_while_the_keeper_stands_still(moving: System) -> None:
    body, want = wanted(moving, 53, h.GREEDY, 300)
    results: list[Any] = []
    keeper = moving.signal("keeper", signal.SIGSTOP)
    try:
        got = moving.stream(h.CHAT, body, watch=h.after(40, lambda answer: results.append(migrate(moving, answer))))
    finally:
        os.kill(keeper, signal.SIGCONT)
    h.assert_same(got, want, "keeper stopped")
    assert moves(got), f"{results}\n{moving.log_tail()}"


def streams(system: System, count: int, tokens: int, watch: Callable[[Answer], None] | None = None) -> list[Answer]:
    texts = h.prompts(seed=54, count=count)
    bodies = [h.chat(system, text, tokens=tokens) for text in texts]
    return at_once([lambda body=body: system.stream(h.CHAT, body, watch=watch) for body in bodies])  # type: ignore[misc]


undisturbed: dict[int, list[Answer]] = {}


@pytest.mark.parametrize("count", [1, 8, 32])
def test_tiny_engine_of_many_streams_killed(any_policy: System, count: int) -> None:
    moving = any_policy
    if count not in undisturbed:  # the same at every installation of this model
        undisturbed[count] = streams(moving, count, 30)
        h.settled(moving)
    want = undisturbed[count]
    killed = threading.Event()

    def kill_once(answer: Answer) -> None:
        if len(answer.tokens) == 10 and not killed.is_set():
            killed.set()
            h.kill_serving(moving, answer.stream_id)

    got = streams(moving, count, 30, kill_once)
    for before, after in zip(want, got, strict=True):
        h.assert_same(after, before, f"one of {count}")
    assert sum(bool(h.recoveries(answer)) for answer in got) >= 1


def test_tiny_drain_under_load_moves_every_stream(moving: System) -> None:
    want = streams(moving, 6, 150)
    h.settled(moving)
    begun = threading.Event()
    reports: list[Any] = []

    def drain_once(answer: Answer) -> None:
        if len(answer.tokens) == 20 and not begun.is_set():
            begun.set()
            engine = moving.serving_engine(answer.stream_id).id
            reports.append((engine, moving.call("POST", f"/admin/engines/{engine}/drain", {})[2]))

    got = streams(moving, 6, 150, drain_once)
    engine, report = reports[0]
    assert report["left"] == 0, report
    assert report["moved"] >= 1, report
    assert moving.call("DELETE", f"/admin/engines/{engine}/drain")[2]["state"] == "ready"
    for before, after in zip(want, got, strict=True):
        h.assert_same(after, before, "drained")
        assert not h.recoveries(after)


def test_tiny_engine_told_to_end_leaves_its_streams_to_the_other(moving: System) -> None:
    body, want = wanted(moving, 55, h.SAMPLED, 250)
    ended: list[int] = []

    def end(answer: Answer) -> None:
        ended.append(h.kill_serving(moving, answer.stream_id, signal.SIGTERM))

    got = moving.stream(h.CHAT, body, watch=h.after(30, end))
    h.assert_same(got, want, "SIGTERM")
    assert moves(got), got.concordia
    assert not h.recoveries(got)
    moving.wait_dead(ended[0])


def test_tiny_stopped_engine_that_wakes_up_finds_itself_replaced(moving: System) -> None:
    """SIGSTOP, failover, SIGCONT: nothing of it reaches anybody."""
    body, want = wanted(moving, 56, h.GREEDY, 200)
    stopped: list[int] = []

    def stop(answer: Answer) -> None:
        stopped.append(h.kill_serving(moving, answer.stream_id, signal.SIGSTOP))

    def wake(answer: Answer) -> None:
        try:
            os.kill(stopped[0], signal.SIGCONT)
        except ProcessLookupError:
            pass

    first, second = h.after(30, stop), h.after(60, wake)
    got = moving.stream(h.CHAT, body, watch=lambda answer: (first(answer), second(answer))[0])
    h.assert_same(got, want, "stopped, replaced, woken")
    assert [recovery["reason"] for recovery in h.recoveries(got)] == ["hung"]
    assert not alive(stopped[0])


def test_tiny_rolling_upgrade_amid_sixteen_streams(moving: System) -> None:
    want = streams(moving, 16, 100)
    h.settled(moving)
    before = {view.id: view.row["incarnation"] for view in moving.ready_engines()}
    done: list[Any] = []
    upgrader = threading.Thread(
        target=lambda: done.append(concordia(moving, "upgrade", "--json", "--port", str(moving.port)))
    )
    upgrader.start()
    got = streams(moving, 16, 100)
    upgrader.join(90.0)
    assert done[0].returncode == 0, done[0].stderr
    after = {view.id: view.row["incarnation"] for view in moving.ready_engines()}
    assert all(after[name] > before[name] for name in before)
    for old, new in zip(want, got, strict=True):
        h.assert_same(new, old, "upgraded")
        assert not h.recoveries(new)
