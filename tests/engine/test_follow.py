"""A stream that another engine follows, and what a submission finds of it: the same bits without a restore."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

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


@pytest.mark.process
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


def test_followed_rows_are_not_put_back_again_for_an_equal_prefix_in_another_slot(pair) -> None:  # type: ignore[no-untyped-def]
    """The standby has answered the same request before; its own rows of it are not the source's."""
    source, standby = pair
    prompt = random_tokens(3, 300)
    standby.handle(submit("w" * 24, prompt, answer=40))
    standby.run()
    source.handle(submit(STREAM, prompt, answer=40))
    source.run_until_token(STREAM, 20)
    tokens = known_tokens(source, prompt)
    standby.handle(follow(tokens[:-8]))
    follow_until(standby, len(tokens) - 9)
    source.close()
    standby.handle(submit(STREAM, tokens, answer=40, epoch=2, prompt_count=len(prompt), prefill_start=0))
    standby.run()
    assert standby.started(STREAM).reused == {"device": len(tokens) - 9, "lane": 8}
    assert tokens[len(prompt) :] + standby.tokens(STREAM) == standby.tokens("w" * 24)


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


# ---------------------------------------------------------------- idle sessions


def idle(tokens: list[int], session: str, name: str = "") -> m.Follow:
    return m.Follow(f"idle:{name or session}", 0, m.pack_tokens(tokens), session=session, idle=True)


def test_idle_session_is_followed_to_its_last_token_and_its_next_turn_restores_nothing(pair) -> None:  # type: ignore[no-untyped-def]
    source, standby = pair
    prompt = random_tokens(11, 150)
    source.handle(submit(STREAM, prompt, answer=10, session="s"))
    source.run()
    tokens = known_tokens(source, prompt)
    standby.handle(idle(tokens, "s"))
    follow_until(standby, 160)
    source.close()
    standby.handle(m.Unfollow("idle:s"))
    standby.handle(submit("n" * 24, [*tokens, 7, 8, 9], answer=5, session="s"))
    standby.run()
    started = standby.started("n" * 24)
    assert (started.verdict, started.reused, started.recomputed) == ("resident", {"device": 160}, 3)


def test_idle_follow_takes_only_room_that_is_nobodys_and_gives_way_first(pair) -> None:  # type: ignore[no-untyped-def]
    source, standby = pair
    lists = {}
    for index in range(5):
        stream, prompt = f"{index:024x}", random_tokens(20 + index, 40 + index)
        source.handle(submit(stream, prompt, answer=4, session=f"s{index}"))
        source.run()
        lists[index] = prompt + source.tokens(stream)
    standby.handle(submit("o" * 24, random_tokens(30, 50), answer=4, session="own"))
    standby.run()
    for index in range(3):
        standby.handle(idle(lists[index], f"s{index}"))
    assert len(standby.engine.follower.follows) == 3
    standby.handle(idle(lists[3], "s3"))
    assert told(standby)[-1] == m.Followed("idle:s3", 0, refused="no_slot"), "its own session stays"
    standby.handle(submit("p" * 24, random_tokens(31, 30), answer=400))
    standby.run_until_token("p" * 24, 2)
    standby.handle(follow(lists[4]))
    gave_way = [message for message in told(standby) if message.refused][-1]
    assert gave_way.stream.startswith("idle:"), "a live stream comes before an idle session"
    assert STREAM in standby.engine.follower.follows


def test_refused_or_cancelled_submission_lets_go_of_what_followed_it(pair) -> None:  # type: ignore[no-untyped-def]
    standby = pair[1]
    tokens = random_tokens(12, 30)
    for end in ("refused", "cancelled", "released"):
        standby.handle(follow(tokens))
        assert STREAM in standby.engine.follower.follows
        bad = [*tokens, 100_000] if end == "refused" else tokens
        standby.handle(submit(STREAM, bad, epoch=2))
        if end != "refused":
            standby.handle(m.Cancel(STREAM, 2) if end == "cancelled" else m.Release(STREAM, 2))
        assert not standby.engine.follower.follows, end
        assert not any(slot.busy for slot in standby.engine.arena.slots)


def test_gateway_that_attaches_is_told_which_sessions_lie_here(pair) -> None:  # type: ignore[no-untyped-def]
    source, standby = pair
    prompt = random_tokens(13, 60)
    source.handle(submit(STREAM, prompt, answer=5, session="s"))
    source.run()
    tokens = known_tokens(source, prompt)
    standby.handle(idle(tokens, "s"))
    follow_until(standby, 65)
    for driver in (source, standby):
        driver.handle(m.Attach("next"))
    hellos = [next(s for s in driver.sent if isinstance(s, m.Hello)) for driver in (source, standby)]
    packed = m.pack_tokens(tokens)
    assert [hello.residents for hello in hellos] == [
        [m.Resident("s", "default", "", packed, False)],
        [m.Resident("s", "default", "", packed, True)],
    ]


# ---------------------------------------------------------------- moves


def moved(source: EngineDriver, target: EngineDriver, stream: str, prompt: list[int], known: list[int], epoch: int,
          **fields: Any) -> list[int]:  # fmt: skip
    """As the gateway does it: precopy, release, submit. `known` is the answer so far; returns what the source had by the end of it."""
    target.handle(m.Follow(stream, 0, m.pack_tokens([*prompt, *known])))
    for _ in range(3):
        target.step()
    source.handle(m.Release(stream, epoch))
    released = source.sent[-1]
    assert (released.stream, released.epoch) == (stream, epoch)
    count = len(source.tokens(stream))
    source.run()
    assert len(source.tokens(stream)) == count, "nothing is sent after the release"
    tokens = [*prompt, *known]
    target.handle(submit(stream, tokens, epoch=epoch + 1, prompt_count=len(prompt), prefill_start=0, **fields))
    return tokens


@pytest.mark.process
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_stream_moves_at_every_token_of_its_answer_bit_for_bit(pair, temperature: float) -> None:  # type: ignore[no-untyped-def]
    """One stream for each token, moved after it; then one that moves after every token, to and fro."""
    source, target = pair
    prompt, answer = random_tokens(7, 70), 32
    fields = {"answer": answer, "sampling": m.Sampling(temperature=temperature, seed=9)}
    source.handle(submit("w" * 24, prompt, **fields))
    source.run()
    want = source.tokens("w" * 24)
    for stop_at in range(1, answer):
        stream = f"{stop_at:024x}"
        source.handle(submit(stream, prompt, **fields))
        source.run_until_token(stream, stop_at)
        known = source.tokens(stream)
        assert known == want[:stop_at]
        moved(source, target, stream, prompt, known, 1, **fields)
        target.run()
        assert known + target.tokens(stream) == want, f"moved after {stop_at} tokens"
    here, there, known = source, target, list[int]()
    here.handle(submit(STREAM, prompt, **fields))
    for epoch in range(1, answer):
        here.run_until_token(STREAM, len(here.tokens(STREAM)) + 1)
        known.append(here.tokens(STREAM)[-1])
        moved(here, there, STREAM, prompt, known, epoch, **fields)
        here, there = there, here
    here.run()
    assert known + here.tokens(STREAM)[-1:] == want, "moved after every token"
    source.handle(m.Release("0" * 24, 3))
    assert source.sent[-1] == m.Released("0" * 24, 3, -1)


@pytest.mark.process
def test_stream_moves_at_every_chunk_of_its_prefill(start_engine) -> None:  # type: ignore[no-untyped-def]
    source, target = (start_engine(name, prefill_chunk=32) for name in ("e0", "e1"))
    prompt = random_tokens(14, 300)
    source.handle(submit("w" * 24, prompt, answer=8))
    source.run()
    want = source.tokens("w" * 24)
    for chunks in range(10):
        other = [*prompt[:-1], 3 + chunks]  # no two are equal, so each computes its last chunk at least
        stream = f"{chunks:024x}"
        source.engine.arena.forget(source.engine.arena.slots[0])
        source.handle(submit(stream, other, answer=8))
        for _ in range(chunks):
            source.step()
        if source.tokens(stream):
            break
        moved(source, target, stream, other, [], 1, answer=8)
        target.run()
        got = target.tokens(stream)
        source.handle(submit(f"{chunks:023x}f", other, answer=8))
        source.run()
        assert got == source.tokens(f"{chunks:023x}f"), f"moved after {chunks} chunks"
    assert len(want) == 8


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
