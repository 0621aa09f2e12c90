"""What the gateway relies on of an engine, held against the real step loop and against the fake that simulations use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from engine import messages as m
from tests.engine.conftest import drain, paths, start_engine, tiny_dir, weights  # noqa: F401  fixtures
from tests.engine.driver import random_tokens, submit
from tests.gateway.fake_engine import FakeEngine

STREAM, OTHER = "a" * 24, "b" * 24


class Subject(Protocol):
    """An engine of either kind: messages in by call, what it says in `sent`, steps on demand."""

    sent: list[Any]

    def take(self, message: m.ToEngine) -> None: ...

    def steps(self, count: int) -> None: ...


class Real:
    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.sent: list[Any] = driver.sent

    def take(self, message: m.ToEngine) -> None:
        self._driver.handle(message)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._driver.step()


class Fake:
    def __init__(self, directory: Path) -> None:
        self._engine = FakeEngine("e0", 1, directory)
        self.sent: list[Any] = []
        self._engine.send = self.sent.append  # type: ignore[method-assign]

    def take(self, message: m.ToEngine) -> None:
        self._engine._take(message, None)  # type: ignore[arg-type]

    def steps(self, count: int) -> None:
        for _ in range(count):
            active = [s for s in self._engine.sequences.values() if not s.finish]
            if active:
                asyncio.run(self._engine._step(active))


@pytest.fixture(params=["real", "fake"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    if request.param == "fake":
        return Fake(tmp_path)
    start: Callable[..., Any] = request.getfixturevalue("start_engine")
    return Real(start())


PROMPT = random_tokens(1, 20)


def outputs(engine: Subject, stream: str = STREAM) -> list[m.Output]:
    return [o for message in engine.sent if isinstance(message, m.Step) for o in message.outputs if o.stream == stream]


def sent(engine: Subject, kind: type) -> list[Any]:
    return [message for message in engine.sent if isinstance(message, kind)]


def test_started_comes_before_the_first_output_and_positions_have_no_gap(engine: Subject) -> None:
    engine.take(submit(STREAM, PROMPT, answer=6))
    engine.steps(12)
    kinds = [type(message) for message in engine.sent if isinstance(message, m.Started | m.Step)]
    assert kinds[0] is m.Started
    assert [output.position for output in outputs(engine)] == list(range(20, 26))
    assert [output.finish for output in outputs(engine)] == [""] * 5 + ["length"]
    assert {output.epoch for output in outputs(engine)} == {1}


def test_submission_of_delivered_tokens_tells_of_forced_ones_before_it_goes_on(engine: Subject) -> None:
    engine.take(submit(STREAM, PROMPT, answer=10, epoch=3, prompt_count=15, prefill_start=0))
    engine.steps(20)
    assert [output.position for output in outputs(engine)] == list(range(20, 25))
    kinds = [type(message) for message in engine.sent if isinstance(message, m.Forced | m.Step)]
    assert kinds[0] is m.Forced


def test_nothing_is_sent_after_a_cancel_or_a_release(engine: Subject) -> None:
    for stream in (STREAM, OTHER):
        engine.take(submit(stream, PROMPT, answer=50))
    engine.steps(8)
    engine.take(m.Cancel(STREAM, 1))
    engine.take(m.Release(OTHER, 1))
    counts = len(outputs(engine)), len(outputs(engine, OTHER))
    engine.steps(8)
    assert (len(outputs(engine)), len(outputs(engine, OTHER))) == counts
    (released,) = sent(engine, m.Released)
    assert released == m.Released(OTHER, 1, outputs(engine, OTHER)[-1].position)


def test_release_of_what_is_not_worked_on_is_answered_by_minus_one(engine: Subject) -> None:
    engine.take(m.Release(STREAM, 7))
    assert sent(engine, m.Released) == [m.Released(STREAM, 7, -1)]


def test_attach_is_told_everything_again(engine: Subject) -> None:
    engine.take(submit(STREAM, PROMPT, answer=50))
    engine.steps(8)
    before = outputs(engine)
    engine.sent.clear()
    engine.take(m.Attach("next"))
    (hello,) = sent(engine, m.Hello)
    (live,) = hello.streams
    assert (live.stream, live.epoch, live.prompt_count) == (STREAM, 1, 20)
    assert m.unpack_tokens(live.tokens) == PROMPT + [output.token for output in before]
    assert outputs(engine) == before
    assert sent(engine, m.Started)


def test_follow_answers_and_a_gap_is_refused(engine: Subject) -> None:
    engine.take(m.Follow(STREAM, 4, m.pack_tokens([7, 8])))
    assert sent(engine, m.Followed)[-1].refused == "gap"
    engine.take(m.Follow(STREAM, 0, m.pack_tokens(PROMPT)))
    engine.take(m.Follow(STREAM, 20, m.pack_tokens([7, 8])))
    engine.steps(3)
    told = sent(engine, m.Followed)[-1]
    assert not told.refused
    assert told.caught_up
    assert 0 <= told.position <= 22


def test_newer_epoch_takes_the_place_of_the_older(engine: Subject) -> None:
    engine.take(submit(STREAM, PROMPT, answer=50))
    engine.steps(6)
    engine.take(submit(STREAM, PROMPT, answer=50, epoch=2))
    engine.sent.clear()
    engine.steps(8)
    assert {output.epoch for output in outputs(engine)} == {2}


def test_drain_is_told_to_the_next_gateway_until_it_is_undone(engine: Subject) -> None:
    for on in (True, False):
        engine.take(m.Drained(on=on))
        engine.take(m.Attach("next"))
        assert sent(engine, m.Hello)[-1].drained == on
