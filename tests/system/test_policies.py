"""Every failover policy with 1, 8 and 32 streams: engines killed, killed twice, stopped, the gateway killed, everything killed.

Each answer must be what it is when nothing happens. One system a policy, shared by all cases.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.driver import StreamOver, System, at_once
from bench.sse import Answer
from tests.system import conftest
from tests.system import harness as h

TOKENS = 24
COUNTS = (1, 8, 32)
Act = Callable[[System, Answer], Any]


def policy_system(policy: str) -> Any:
    @pytest.fixture(scope="module")
    def started(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
        # Engines die of signals here, again and again: that is no request's fault.
        more = {"gateway": {"failover": policy, "spares": 0 if policy == "cold" else 1, "poison_deaths": 1000}}
        engines = 1 if policy == "cold" else 2
        yield from conftest.running(tiny_model, tmp_path_factory.mktemp(policy), engines, sections=more)

    return started


cold_system, warm_system, hot_system = (policy_system(policy) for policy in ("cold", "warm", "hot"))


@pytest.fixture(params=["cold", "warm", "hot"])
def any_policy(request: pytest.FixtureRequest) -> System:
    return conftest.settled_or_new(request.getfixturevalue(f"{request.param}_system"))


@pytest.fixture
def hot(hot_system: System) -> System:
    return conftest.settled_or_new(hot_system)


# ---------------------------------------------------------------- what happens


def kill(system: System, answer: Answer) -> None:
    h.kill_serving(system, answer.stream_id)


def stop(system: System, answer: Answer) -> None:
    h.kill_serving(system, answer.stream_id, signal.SIGSTOP)


def kill_gateway(system: System, answer: Answer) -> None:
    system.signal("gateway")


def kill_everything(system: System, answer: Answer) -> None:
    system.kill_all()
    system.start()


CASES: dict[str, dict[int, Act]] = {
    "killed": {8: kill},
    "killed twice": {5: kill, 16: kill},
    "stopped": {8: stop},
    "gateway killed": {8: kill_gateway},
    "everything killed": {8: kill_everything},
}


class Trouble:
    """Acts once at each of the given tokens, when the first of all answers has so many and isn't over yet."""

    def __init__(self, system: System, acts: dict[int, Act]) -> None:
        self._system = system
        self._acts = {at: (act, threading.Lock()) for at, act in acts.items()}

    def __call__(self, answer: Answer) -> None:
        act, once = self._acts.get(len(answer.tokens), (None, None))
        if act is not None and once is not None and once.acquire(blocking=False):
            try:
                act(self._system, answer)
            except StreamOver:
                once.release()


def streams(system: System, count: int, watch: Callable[[Answer], None] | None = None) -> list[Answer]:
    """Some are on their way when the first has its tokens, others may not even have been asked for."""
    bodies = [h.chat(system, text, tokens=TOKENS, store=True) for text in h.prompts(seed=54, count=count)]
    return at_once([lambda body=body: h.to_its_end(system, h.CHAT, body, watch) for body in bodies])  # type: ignore[misc]


undisturbed: dict[int, list[Answer]] = {}


def check(system: System, count: int, case: str) -> None:
    if count not in undisturbed:  # the same at every installation of this model
        undisturbed[count] = streams(system, count)

    def disturbed() -> list[Answer]:
        got = streams(system, count, Trouble(system, CASES[case]))
        for number, (want, answer) in enumerate(zip(undisturbed[count], got, strict=True)):
            h.assert_same(answer, want, f"{case}, stream {number} of {count}")
        return got

    hit = case in ("killed", "killed twice", "stopped")
    h.until(lambda got: not hit or any(map(h.recoveries, got)), system, disturbed)


@pytest.mark.parametrize("count", COUNTS)
def test_tiny_streams_go_on_whatever_dies(any_policy: System, count: int) -> None:
    for case in ("killed", "killed twice", "stopped", "gateway killed"):
        check(any_policy, count, case)


@pytest.mark.timeout(240)
def test_tiny_everything_killed_amid_many_streams(hot: System) -> None:
    check(hot, 32, "everything killed")


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", COUNTS)
def test_tiny_everything_killed_under_each_policy(any_policy: System, count: int) -> None:
    for _ in range(3):
        check(any_policy, count, "everything killed")


@pytest.mark.parametrize("count", [1, 32])
def test_tiny_engine_killed_while_it_prefills(any_policy: System, count: int) -> None:
    """The kill comes when the gateway has given it the first stream; what is computed undisturbed comes later, from what is stored."""
    system, seeds = any_policy, iter(range(1000 * count, 1_000_000, count))

    def disturbed() -> list[tuple[Answer, Answer]]:
        first_seed = next(seeds)
        prompts = [h.random_tokens(first_seed + index, 400, low=3, high=512) for index in range(count)]
        bodies = [h.completion(system, prompt, tokens=8, store=True) for prompt in prompts]
        over = threading.Event()

        def kill_first() -> None:
            while not over.wait(0.005):
                for engine in [engine for engine in system.engines() if engine.streams][:1]:
                    os.kill(engine.pid, signal.SIGKILL)
                    return

        killer = threading.Thread(target=kill_first)
        killer.start()
        got = at_once([lambda body=body: system.stream(h.COMPLETIONS, body) for body in bodies])  # type: ignore[misc]
        over.set()
        killer.join(60.0)
        h.settled(system)
        want = at_once([lambda body=body: system.stream(h.COMPLETIONS, body) for body in bodies])  # type: ignore[misc]
        return list(zip(got, want, strict=True))

    pairs = h.until(lambda pairs: any(h.recoveries(answer) for answer, _ in pairs), system, disturbed)
    for number, (answer, whole) in enumerate(pairs):
        h.assert_whole(answer)
        assert answer.text == whole.text, f"stream {number} of {count}"


# ---------------------------------------------------------------- hot


def session(system: System, name: str) -> dict[str, Any]:
    return dict(system.get(f"/v1/sessions/{name}?tokens=true"))


def test_tiny_idle_sessions_are_protected_too(hot: System) -> None:
    """Its engine dies between two turns: the next one finds all of it on the standby's device."""
    prompt = h.random_tokens(81, 300, low=3, high=512)
    named = {"X-Session-Id": "calm"}
    hot.stream(h.COMPLETIONS, h.completion(hot, prompt, tokens=40), headers=named)

    def all_there() -> dict[str, Any] | None:
        view = session(hot, "calm")
        return view if view["standby_position"] == len(view["token_ids"]) else None

    view = hot.wait("a standby that has all of it", all_there)
    (owner,) = view["engines"]
    assert view["standby"] != owner
    victim = hot.signal(owner)
    hot.wait_dead(victim)
    hot.wait("the heir", lambda: session(hot, "calm")["engines"] == [view["standby"]])
    following = [*view["token_ids"], *h.random_tokens(82, 5, low=3, high=512)]
    second = hot.stream(h.COMPLETIONS, h.completion(hot, following, tokens=8), headers=named)
    h.assert_whole(second)
    told = second.concordia
    assert (told["verdict"], told["restored_from"]["lane"], told["restored_from"]["disk"]) == ("resident", 0, 0), told
    assert told["restored_from"]["device"] == len(view["token_ids"]), told
    assert told["recomputed_tokens"] == 5, told
    h.settled(hot)
    hot.wait("another standby", lambda: session(hot, "calm")["standby"] == owner)


def test_tiny_hot_standby_moves_and_takes_over(hot: System) -> None:
    """Moved to the standby, which then dies: the one that came before it stands by by then."""
    body = h.chat(hot, h.prompts(seed=59, count=1)[0], h.SAMPLED, tokens=300)
    want = hot.stream(h.CHAT, body)

    def migrate(answer: Answer) -> None:
        source = hot.serving_engine(answer.stream_id).id
        target = next(view.id for view in hot.ready_engines() if view.id != source)
        hot.call("POST", f"/admin/streams/{answer.stream_id}/migrate", {"engine": target})

    def run() -> Answer:
        move, end = h.after(30, migrate), h.after(150, h.killer(hot))
        return hot.stream(h.CHAT, body, watch=lambda answer: (move(answer), end(answer))[0])

    got = h.until(lambda answer: answer.concordia["migrations"] and h.recoveries(answer), hot, run)
    h.assert_same(got, want, "moved, then killed")
    (recovery,) = h.recoveries(got)
    assert recovery["restored_tokens"] >= len(got.concordia["migrations"]), recovery
