"""Live migration, drain and upgrade with real processes: the client's stream goes on, byte for byte."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from bench.driver import StreamOver, System, alive, at_once
from bench.sse import Answer
from tests.system import conftest
from tests.system import harness as h
from tests.system.test_choices import by_choice
from tests.system.test_supervision import concordia


@pytest.fixture
def moving(tiny: System) -> System:
    """Two engines, the second with weights loaded."""
    return tiny


def other(system: System, engine: str) -> str:
    """The other engine, once the gateway has it: a new one may find them one after the other."""

    def probe() -> str:
        return next((view.id for view in system.ready_engines() if view.id != engine), "")

    return system.wait(f"an engine beside {engine}", probe)


def migrate(system: System, answer: Answer) -> Any:
    """To the other engine, if it isn't over: what the gateway says of it."""
    try:
        target = other(system, system.serving_engine(answer.stream_id).id)
    except StreamOver as error:
        return str(error)
    return system.call("POST", f"/admin/streams/{answer.stream_id}/migrate", {"engine": target})[2]


def moves(answer: Answer) -> list[dict[str, Any]]:
    return list(answer.concordia["migrations"])


def wanted(system: System, seed: int, mode: dict[str, Any], tokens: int) -> tuple[dict[str, Any], Answer]:
    body = h.chat(system, h.prompts(seed=seed, count=1)[0], mode, tokens=tokens)
    return body, system.stream(h.CHAT, body)


@pytest.mark.timeout(240)
def test_tiny_stream_moves_at_every_token_of_its_answer(moving: System) -> None:
    """One stream for each token, which is asked to move when that token has come.

    `tests/engine/test_follow.py` stops at exactly each token; here processes go on while they are asked.
    """
    body, want = wanted(moving, 51, h.SAMPLED, 64)
    results: list[Any] = []
    moved = 0
    for position in range(24):
        act = h.after(position, lambda answer: results.append(migrate(moving, answer)))
        got = moving.stream(h.CHAT, body, watch=act)
        h.assert_same(got, want, f"moved after {position} tokens")
        moved += bool(moves(got))
        assert not h.recoveries(got)
    assert moved, f"all were over before they could move: {results}"


@pytest.mark.parametrize("mode", h.MODES)
def test_tiny_stream_moves_to_and_fro_all_along_its_answer(moving: System, mode: str) -> None:
    body, want = wanted(moving, 51, h.MODES[mode], 240)
    results: list[Any] = []

    def watch(answer: Answer) -> None:
        if len(answer.tokens) % 40 == 20:
            results.append(migrate(moving, answer))

    got = h.until(lambda answer: len(moves(answer)) >= 3, moving, lambda: moving.stream(h.CHAT, body, watch=watch))
    h.assert_same(got, want, mode)
    assert {move["carried"] for move in moves(got)} == {"state"}
    assert not h.recoveries(got)


def test_tiny_choices_and_grammars_move_like_any_stream(moving: System) -> None:
    """Each choice of `n` is a stream of its own; where an answer stands in its grammar follows from its tokens."""
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 200}}, "required": ["name"]}
    rule = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    prompt = h.prompts(seed=64, count=1)[0]
    body = h.chat(moving, prompt, h.SAMPLED, tokens=150, response_format=rule)
    want = moving.stream(h.CHAT, body)
    results: list[Any] = []

    def move_once() -> Answer:
        return moving.stream(h.CHAT, body, watch=h.after(20, lambda answer: results.append(migrate(moving, answer))))

    h.assert_same(h.until(moves, moving, move_once), want, "moved within a grammar")

    several = h.chat(moving, prompt, h.SAMPLED, tokens=120, n=3)
    want = moving.stream(h.CHAT, several)
    refusals: list[tuple[int, str]] = []

    def move_each(answer: Answer) -> None:
        path = f"/admin/streams/{answer.stream_id}/migrate"
        status, _, refusal = moving.call("POST", path, {"engine": "e0"})
        refusals.append((status, refusal["error"]["message"]))
        for engine in [view for view in moving.engines() if view.streams]:
            target = other(moving, engine.id)
            for stream in engine.streams:
                path = f"/admin/streams/{stream['stream']}/migrate"
                results.append(moving.call("POST", path, {"engine": target}, timeout_s=30.0)[2])

    got = h.until(
        lambda answer: any(choice["migrations"] for choice in answer.concordia["choices"]),
        moving,
        lambda: moving.stream(h.CHAT, several, watch=h.after(30, move_each)),
    )
    status, message = refusals[-1]
    assert status == 409 and "move them one by one" in message, refusals
    assert got.done, got.describe()
    assert by_choice(got) == by_choice(want)


def test_tiny_move_while_the_gateway_is_restarted_again_and_again(moving: System) -> None:
    body, want = wanted(moving, 65, h.SAMPLED, 400)
    body = {**body, "store": True}

    moved: list[str] = []

    def move_and_kill(answer: Answer) -> None:
        for engine in moving.engines():  # none, if the answer was complete before the new gateway was there
            if any(answer.stream_id in stream["stream"] for stream in engine.streams):
                moved.append(other(moving, engine.id))
                mover = threading.Thread(target=attempt, args=(moving, answer.stream_id, moved[-1]), daemon=True)
                mover.start()
        moving.signal("gateway")

    got = h.until(lambda _: moved, moving, lambda: moving.stream(h.CHAT, body, watch=h.after(20, move_and_kill)))
    for _ in range(2):
        if got.done:
            break
        moving.wait("a gateway", moving.healthy)
        got = moving.resume(got, watch=h.after(len(got.tokens) + 40, move_and_kill))
    while not got.done:
        moving.wait("a gateway", moving.healthy)
        got = moving.resume(got)
    h.assert_same(got, want, "gateway restarted during moves")


def test_tiny_session_is_moved_by_the_command_live_and_idle(moving: System) -> None:
    body, want = wanted(moving, 60, h.GREEDY, 300)
    place = ("--port", str(moving.port))
    done: list[Any] = []

    def move(answer: Answer) -> None:
        target = other(moving, moving.get("/v1/sessions/traveller")["engines"][0])
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


@pytest.mark.parametrize("victim", ["source", "target", "gateway", "keeper"])
def test_tiny_move_while_somebody_is_killed(moving: System, victim: str) -> None:
    """The keeper is stopped instead, and stays so until the answer is complete."""
    body, want = wanted(moving, 52, h.GREEDY, 200)
    body = {**body, "store": True}
    number = signal.SIGSTOP if victim == "keeper" else signal.SIGKILL
    hit: list[int] = []

    def move_and_kill(answer: Answer) -> None:
        source = moving.serving_engine(answer.stream_id).id
        target = other(moving, source)
        mover = threading.Thread(target=lambda: attempt(moving, answer.stream_id, target))
        mover.start()
        hit.append(moving.signal({"source": source, "target": target}.get(victim, victim), number))

    try:
        got = h.until(lambda _: hit, moving, lambda: moving.stream(h.CHAT, body, watch=h.after(30, move_and_kill)))
        while not got.done:
            moving.wait("a gateway", moving.healthy)
            got = moving.resume(got)
    finally:
        if number == signal.SIGSTOP and hit:
            os.kill(hit[0], signal.SIGCONT)
    h.assert_same(got, want, f"{victim} hit during the move")


def attempt(system: System, stream_id: str, target: str) -> None:
    """The move itself may fail with whoever is killed."""
    try:
        system.call("POST", f"/admin/streams/{stream_id}/migrate", {"engine": target})
    except (OSError, http.client.HTTPException):
        pass


def test_tiny_move_while_the_keeper_stands_still(moving: System) -> None:
    body, want = wanted(moving, 53, h.GREEDY, 300)

    def run() -> Answer:
        return moving.stream(h.CHAT, body, watch=h.after(40, lambda answer: migrate(moving, answer)))

    keeper = moving.signal("keeper", signal.SIGSTOP)
    try:
        got = h.until(moves, moving, run)
    finally:
        os.kill(keeper, signal.SIGCONT)
    h.assert_same(got, want, "keeper stopped")


def streams(system: System, count: int, tokens: int, watch: Callable[[Answer], None] | None = None) -> list[Answer]:
    texts = h.prompts(seed=54, count=count)
    bodies = [h.chat(system, text, tokens=tokens) for text in texts]
    return at_once([lambda body=body: system.stream(h.CHAT, body, watch=watch) for body in bodies])  # type: ignore[misc]


def test_tiny_drain_under_load_moves_every_stream(moving: System) -> None:
    want = streams(moving, 6, 150)

    def run() -> tuple[list[Answer], dict[str, Any]]:
        reports: list[Any] = []

        @h.once
        def drain(answer: Answer) -> None:
            engine = moving.serving_engine(answer.stream_id).id
            reports.append((engine, moving.call("POST", f"/admin/engines/{engine}/drain", {})[2]))

        got = streams(moving, 6, 150, lambda answer: drain(answer) if len(answer.tokens) == 20 else None)
        engine, report = reports[0]
        assert moving.call("DELETE", f"/admin/engines/{engine}/drain")[2]["state"] == "ready"
        assert report["left"] == 0, report
        return got, report

    got, _ = h.until(lambda result: result[1]["moved"], moving, run)
    for before, after in zip(want, got, strict=True):
        h.assert_same(after, before, "drained")
        assert not h.recoveries(after)


def test_tiny_engine_told_to_end_leaves_its_streams_to_the_other(moving: System) -> None:
    body, want = wanted(moving, 55, h.SAMPLED, 250)
    ended: list[int] = []

    def end(answer: Answer) -> None:
        ended.append(h.kill_serving(moving, answer.stream_id, signal.SIGTERM))

    got = h.until(moves, moving, lambda: moving.stream(h.CHAT, body, watch=h.after(30, end)))
    h.assert_same(got, want, "SIGTERM")
    assert not h.recoveries(got)
    moving.wait_dead(ended[-1])


def test_tiny_stopped_engine_that_wakes_up_finds_itself_replaced(moving: System) -> None:
    """SIGSTOP, failover, SIGCONT: nothing of it reaches anybody."""
    body, want = wanted(moving, 56, h.GREEDY, 200)
    stopped: list[int] = []

    def stop(answer: Answer) -> None:
        stopped.append(h.kill_serving(moving, answer.stream_id, signal.SIGSTOP))

    def run() -> Answer:
        stop_once, woken = h.after(30, stop), list[int]()

        def watch(answer: Answer) -> None:
            stop_once(answer)
            if not woken and any("recovered" in text for text, _ in answer.comments):
                woken.append(stopped[-1])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stopped[-1], signal.SIGCONT)

        return moving.stream(h.CHAT, body, watch=watch)

    got = h.until(h.recoveries, moving, run)
    h.assert_same(got, want, "stopped, replaced, woken")
    assert [recovery["reason"] for recovery in h.recoveries(got)] == ["hung"]
    assert not alive(stopped[-1])


def test_tiny_rolling_upgrade_amid_sixteen_streams(moving: System) -> None:
    want = streams(moving, 16, 100)
    h.settled(moving)
    before = {view.id: view.row["incarnation"] for view in moving.ready_engines()}
    nursery = moving.pid("nursery")
    done: list[Any] = []
    upgrader = threading.Thread(
        target=lambda: done.append(concordia(moving, "upgrade", "--json", "--port", str(moving.port), timeout_s=150))
    )
    upgrader.start()
    got = streams(moving, 16, 100)
    upgrader.join()
    assert done[0].returncode == 0, done[0].stderr
    after = {view.id: view.row["incarnation"] for view in moving.ready_engines()}
    assert all(after[name] > before[name] for name in before)
    assert parent(moving.pid("e0")) == parent(moving.pid("e1")) == moving.pid("nursery") != nursery
    for old, new in zip(want, got, strict=True):
        h.assert_same(new, old, "upgraded")
        assert not h.recoveries(new)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def own(tiny_model: Path, tmp_path: Path) -> Iterator[System]:
    """A system of one test's own, over a model directory of its own."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    yield from conftest.running(model, tmp_path, 2, sections={"gateway": {"drain_s": 0.5}})


@pytest.mark.timeout(280)
def test_tiny_upgrade_takes_new_model_files_host_agent_and_gateway(own: System) -> None:
    """New weights: a stream in progress goes on with its tokens alone. The gateway's clients come back by cursor."""
    weights = Path(own.model) / "model.safetensors"
    tensors = load_file(weights)
    roots = {view.row["root"] for view in own.ready_engines()}
    pids = {name: own.pid(name) for name in ("gateway", "host", "keeper", "nursery", "e0", "e1")}
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
    changed = weights.with_suffix(".new")
    save_file(tensors, changed, metadata={"format": "pt"})
    body = h.chat(own, h.prompts(seed=66, count=1)[0], tokens=1700, store=True)
    done: list[Any] = []

    def upgrade() -> None:
        changed.replace(weights)
        done.append(concordia(own, "upgrade", "--host", "--gateway", "--port", str(own.port), timeout_s=150))

    upgrader = threading.Thread(target=upgrade)
    got = own.stream(h.CHAT, body, watch=h.after(5, lambda answer: upgrader.start()))
    upgrader.join()
    assert done[0].returncode == 0, done[0].stderr
    while not got.done:
        own.wait("a gateway", own.healthy)
        got = own.resume(got)
    h.assert_whole(got)
    assert not h.recoveries(got)
    h.settled(own)
    assert {view.row["root"] for view in own.ready_engines()}.isdisjoint(roots)
    assert all(own.pid(name) not in (0, pid) for name, pid in pids.items())
    assert {move["carried"] for move in moves(got)} <= {"tokens", "state"}
    assert "tokens" in {move["carried"] for move in moves(got)} or len(got.tokens) < 1700, moves(got)
