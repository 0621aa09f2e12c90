"""A stream that another engine follows, and what a submission finds of it: the same bits without a restore."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from engine import messages as m
from engine.link import GatewayLink
from tests.engine.driver import EngineDriver, random_tokens, submit

STREAM = "f" * 24


def told(driver: EngineDriver) -> list[m.Followed]:
    return [message for message in driver.sent if isinstance(message, m.Followed)]


def follow_until(driver: EngineDriver, position: int) -> None:
    deadline = time.monotonic() + 30
    while not any(message.position >= position for message in told(driver)):
        assert time.monotonic() < deadline, told(driver)[-1:]
        driver.step()


def follow(tokens: list[int], start: int = 0, **fields: str) -> m.Follow:
    return m.Follow(STREAM, start, m.pack_tokens(tokens[start:]), **fields)


def known_tokens(driver: EngineDriver, prompt: list[int]) -> list[int]:
    return prompt + driver.tokens(STREAM)


@pytest.fixture
def pair(start_engine: Callable[..., EngineDriver]) -> tuple[EngineDriver, EngineDriver]:
    return start_engine("e0"), start_engine("e1")


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_followed_stream_goes_on_bit_for_bit_without_a_restore(pair, temperature: float) -> None:  # type: ignore[no-untyped-def]
    source, standby = pair
    prompt, sampling = random_tokens(3, 300), m.Sampling(temperature=temperature, seed=5)
    source.handle(submit("w" * 24, prompt, answer=40, sampling=sampling))
    source.run()
    want = source.tokens("w" * 24)
    source.handle(submit(STREAM, prompt, answer=40, sampling=sampling))
    source.run_until_token(STREAM, 10)
    standby.handle(follow(known_tokens(source, prompt)))
    follow_until(standby, len(prompt) + 9)
    before = len(known_tokens(source, prompt))
    source.run_until_token(STREAM, 20)
    tokens = known_tokens(source, prompt)
    standby.handle(follow(tokens, before))
    follow_until(standby, len(prompt) + 19)
    assert standby.engine.stats().followed_streams == 1
    source.close()
    standby.handle(
        submit(STREAM, tokens, answer=40, epoch=2, prompt_count=len(prompt), sampling=sampling, prefill_start=0)
    )
    standby.run()
    started = standby.started(STREAM)
    assert started.reused == {"device": len(tokens) - 1}
    assert started.recomputed == 1
    assert tokens[len(prompt) :] + standby.tokens(STREAM) == want
    assert not standby.engine.follower.follows


def test_follow_in_the_middle_of_a_prefill_takes_what_is_there(pair) -> None:  # type: ignore[no-untyped-def]
    source, standby = pair
    prompt = random_tokens(4, 900)
    standby.handle(follow(prompt))
    standby.step()
    assert told(standby)[-1].position == 0
    assert told(standby)[-1].caught_up
    source.handle(submit(STREAM, prompt))
    source.step()
    follow_until(standby, 256)
    source.run()
    follow_until(standby, 899)


def test_sequence_that_needs_a_slot_takes_the_followed_one(pair) -> None:  # type: ignore[no-untyped-def]
    source, standby = pair
    prompt = random_tokens(5, 100)
    source.handle(submit(STREAM, prompt))
    source.run()
    standby.handle(follow(prompt))
    follow_until(standby, 99)
    for number in range(4):
        standby.handle(submit(f"{number}" * 24, random_tokens(50 + number, 60), answer=4))
    standby.run()
    assert [message.refused for message in told(standby)][-1] == "no_slot"
    assert all(len(standby.tokens(f"{number}" * 24)) == 4 for number in range(4))


def test_follow_without_a_free_slot_or_with_a_gap_is_refused(pair) -> None:  # type: ignore[no-untyped-def]
    standby = pair[1]
    standby.handle(m.Follow(STREAM, 5, m.pack_tokens([1, 2])))
    assert told(standby)[-1].refused == "gap"
    standby.handle(m.Follow(STREAM, 0, m.pack_tokens([3] * 5000)))
    assert told(standby)[-1].refused == "too_long"
    for slot in standby.engine.arena.slots:
        slot.busy = True
    standby.handle(follow([1, 2, 3]))
    assert told(standby)[-1].refused == "no_slot"


def test_slot_whose_capture_lags_is_not_taken(pair) -> None:  # type: ignore[no-untyped-def]
    standby = pair[1]
    for slot in standby.engine.arena.slots:
        slot.length, slot.stored = 10, 5
    standby.handle(follow([1, 2, 3]))
    assert told(standby)[-1].refused == "no_slot"


def test_next_turn_of_a_followed_session_restores_only_what_is_new(pair) -> None:  # type: ignore[no-untyped-def]
    source, standby = pair
    prompt = random_tokens(6, 200)
    source.handle(submit(STREAM, prompt, session="s"))
    source.run()
    standby.handle(follow(prompt, session="s"))
    follow_until(standby, 199)
    standby.handle(m.Unfollow(STREAM))
    restored = standby.engine.follower.restored_tokens
    longer = known_tokens(source, prompt)
    standby.handle(m.Follow("g" * 24, 0, m.pack_tokens(longer), session="s"))
    standby.step()
    assert standby.engine.follower.restored_tokens - restored == len(longer) - 200
    standby.handle(m.Park(1, "s"))
    assert not standby.engine.follower.follows


@pytest.mark.process
def test_released_stream_goes_on_at_another_engine_bit_for_bit(pair) -> None:  # type: ignore[no-untyped-def]
    source, target = pair
    prompt, sampling = random_tokens(7, 300), m.Sampling(temperature=1.0, seed=9)
    source.handle(submit("w" * 24, prompt, answer=30, sampling=sampling))
    source.run()
    want = source.tokens("w" * 24)
    for stop_at in (1, 2, 13, 29):
        stream = f"{stop_at:024x}"
        source.handle(submit(stream, prompt, answer=30, sampling=sampling))
        source.run_until_token(stream, stop_at)
        source.handle(m.Release(stream, 1))
        released = source.sent[-1]
        tokens = prompt + source.tokens(stream)
        assert released == m.Released(stream, 1, len(tokens) - 1)
        source.run()
        assert prompt + source.tokens(stream) == tokens, "nothing is sent after the release"
        target.handle(
            submit(stream, tokens, answer=30, epoch=2, prompt_count=len(prompt), sampling=sampling, prefill_start=0)
        )
        target.run()
        assert tokens[len(prompt) :] + target.tokens(stream) == want
    source.handle(m.Release("0" * 24, 3))
    assert source.sent[-1] == m.Released("0" * 24, 3, -1)


def test_engine_told_to_end_drains_first(start_engine, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    driver = start_engine()
    monkeypatch.setattr(GatewayLink, "attached", property(lambda link: True))
    driver.handle(submit(STREAM, random_tokens(8, 40), answer=100))
    driver.run_until_token(STREAM, 2)
    driver.engine.drain()
    driver.engine._drain()
    assert any(isinstance(message, m.Draining) for message in driver.sent)
    assert not driver.engine.stopping
    driver.handle(m.Release(STREAM, 1))
    driver.engine._drain()
    assert driver.engine.stopping


def test_slot_tokens_are_the_streams(pair) -> None:  # type: ignore[no-untyped-def]
    standby = pair[1]
    standby.handle(follow([5, 6, 7]))
    slot = standby.engine.follower.follows[STREAM].slot
    assert np.array_equal(slot.tokens[:3], [5, 6, 7])
