"""Which request is ended because engines die of it, and for which deaths none is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

from gateway import poison
from gateway.poison import Death, Deaths, Incarnation, InFlight, Inquests, Verdict, judge, suspects
from gateway.streams import StreamTable
from gateway.supervisors import Supervisors
from tests.gateway.conftest import Sse, World, chat
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.test_failover import pair
from tests.gateway.test_migration import state_is

FIRST, SECOND = Incarnation("e0", 1), Incarnation("e1", 1)
ONCE = Deaths(5, (Death(FIRST),))


def flying(stream: str, deaths: Deaths, *, position: int = 5, begun: bool = True, alone: bool = False) -> InFlight:
    return InFlight(stream, deaths, position, begun, alone, SECOND)


def test_only_deaths_without_a_token_between_count() -> None:
    deaths = Deaths().another(10, Death(FIRST)).another(10, Death(SECOND))
    assert deaths.count == 2
    assert deaths.another(11, Death(FIRST)).count == 1


def test_one_request_at_two_deaths_is_it_and_several_are_tried_alone() -> None:
    never = Deaths()
    assert suspects([flying("a", never), flying("b", ONCE)], 2) == Verdict("b")
    assert suspects([flying("a", ONCE), flying("b", ONCE)], 2) == Verdict(alone=("a", "b"))
    assert suspects([flying("a", never)], 2) == Verdict()
    assert suspects([flying("a", ONCE, position=6)], 2) == Verdict()


def test_request_that_was_not_heard_to_begin_makes_the_others_no_culprits() -> None:
    unsure = flying("b", Deaths(), begun=False)
    assert suspects([flying("a", ONCE), unsure], 2) == Verdict(alone=("a", "b"))
    assert suspects([unsure], 2) == Verdict()
    assert unsure.after.count < 1, "two engines killed at the same moment are no proof"
    unsure_before = Deaths(5, (Death(FIRST, 0.25),))
    assert suspects([flying("a", ONCE), flying("b", unsure_before)], 2) == Verdict(alone=("a", "b"))


def test_request_tried_alone_is_it_unless_another_that_can_be_was_beside_it() -> None:
    tried = flying("b", ONCE, begun=False, alone=True)
    assert suspects([flying("a", Deaths()), tried], 2) == Verdict("b")
    assert suspects([flying("a", ONCE), tried], 2) == Verdict(alone=("a",))
    assert suspects([flying("a", Deaths(), begun=False), tried], 2) == Verdict(alone=("a",))


def test_verdict_waits_until_it_is_known_how_the_engines_died() -> None:
    both = flying("a", ONCE).after
    assert judge(both, SECOND, 2) == "wait"
    one = both.heard(FIRST, from_outside=False)
    assert judge(one, SECOND, 2) == "wait"
    assert judge(one.heard(SECOND, from_outside=False), SECOND, 2) == "end"
    assert judge(one.heard(SECOND, from_outside=True), SECOND, 2) == "free"
    killed = both.heard(FIRST, from_outside=True).heard(SECOND, from_outside=False)
    assert (judge(killed, SECOND, 2), killed.count) == ("free", 1), "one death of its own is not two"


def test_suspect_tried_alone_is_not_ended_for_a_death_from_outside() -> None:
    twice = ONCE.another(5, Death(Incarnation("e0", 2))).heard(FIRST, from_outside=False)
    twice = twice.heard(Incarnation("e0", 2), from_outside=False)
    assert suspects([flying("a", twice, alone=True)], 2) == Verdict("a")
    after = flying("a", twice, alone=True).after.heard(SECOND, from_outside=True)
    assert judge(after, SECOND, 2) == "free"


def streamed(world: World) -> Coroutine[Any, Any, Sse]:
    return world.events("POST", "/v1/chat/completions", chat())


async def both_had_begun(make_world, ask=streamed) -> tuple[World, asyncio.Task[Any]]:  # type: ignore[no-untyped-def]
    """e0 had begun a stream, and when it had died, e1 had; then that died. The host agent has not said how."""
    world, e0, e1 = await pair(make_world)
    e0.allow(0)
    e1.allow(0)
    task = asyncio.create_task(ask(world))
    for engine in (e0, e1):
        await world.until(lambda engine=engine: _submitted(engine, 1))
        (sequence,) = engine.sequences.values()
        engine._start(sequence)
        await engine.kill(tell=False)
    await world.until(lambda: _suspected(world, 2))
    return world, task


async def test_both_engines_killed_from_outside_after_both_had_begun_ends_nobody(make_world) -> None:  # type: ignore[no-untyped-def]
    world, task = await both_had_begun(make_world)
    for engine in world.engines:
        world.host.gone(engine, from_outside=True)
    await world.engine("e0", 2)
    got = await task
    assert (got.finish_reason, got.errors) == ("length", [])
    assert [recovery["engine"] for recovery in got.concordia["recoveries"]] == ["e0", "e1"]


async def test_both_engines_died_by_themselves_ends_the_request(make_world) -> None:  # type: ignore[no-untyped-def]
    world, task = await both_had_begun(make_world)
    assert not task.done()
    for engine in world.engines:
        world.host.gone(engine, from_outside=False)
    assert (await task).errors[0]["code"] == "poison_request"


async def test_a_client_is_told_not_to_send_it_again(make_world) -> None:  # type: ignore[no-untyped-def]
    world, task = await both_had_begun(make_world, lambda world: world.post("/v1/chat/completions", chat(stream=False)))
    for engine in world.engines:
        world.host.gone(engine, from_outside=False)
    status, headers, answer = await task
    assert (status, answer["error"]["code"], headers["X-Should-Retry"]) == (500, "poison_request", "false")


async def test_host_agent_that_says_nothing_is_waited_for_only_so_long(make_world, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(poison, "REPORT_WAIT_S", 0.05)
    _, task = await both_had_begun(make_world)
    assert (await task).errors[0]["code"] == "poison_request"


async def test_host_agent_that_is_stopped_is_waited_for(make_world, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Everybody is stopped as engines are killed; the gateway goes on first, and the host agent much later."""
    monkeypatch.setattr(poison, "REPORT_WAIT_S", 0.01)
    looks, waited = 0, asyncio.Event()

    def silent(_: Supervisors) -> bool:
        nonlocal looks
        looks += 1
        if looks > 10:
            waited.set()
        return False

    monkeypatch.setattr(Supervisors, "host_speaks", silent)
    world, task = await both_had_begun(make_world)
    await waited.wait()
    for engine in world.engines:
        world.host.gone(engine, from_outside=True)
    await world.engine("e0", 2)
    got = await task
    assert (got.finish_reason, got.errors) == ("length", [])


async def test_time_that_the_gateway_was_stopped_for_is_no_silence_of_the_host_agent(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(poison, "REPORT_WAIT_S", 0.02)
    loop, stopped_s = asyncio.get_running_loop(), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + stopped_s)
    looks = 0

    def speaks() -> bool:
        nonlocal looks
        looks += 1
        return True

    nobody = cast(StreamTable, SimpleNamespace(live={}))
    inquests = Inquests(nobody, 2, asyncio.create_task, lambda stream: None, lambda: None)
    inquests.host_speaks = speaks
    work = asyncio.create_task(inquests._wait_for_word(FIRST))
    await asyncio.sleep(0)
    stopped_s = 60.0
    await work
    assert looks == 1, "of the slice after it, the only one that counts"


async def test_next_suspect_is_tried_as_soon_as_the_one_before_is_cleared(make_world, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(poison, "REPORT_WAIT_S", 1000.0)
    monkeypatch.setattr("gateway.dispatch.SETTLE_S", 0.0)
    world, e0, e1 = await pair(make_world)
    e0.allow(0)
    e1.allow(0)
    bodies = [chat(seed=n + 1) for n in range(2)]
    tasks = [asyncio.create_task(world.events("POST", "/v1/chat/completions", body)) for body in bodies]
    for engine in (e0, e1):
        await world.until(lambda engine=engine: _submitted(engine, 2))
        for sequence in engine.sequences.values():
            engine._start(sequence)
        await engine.kill(from_outside=False)
    last = await world.engine("e0", 2, budget=0)
    await world.until(lambda: _submitted(last, 1))
    assert len(last.submits) == 1, "one at a time"
    last.allow(1)
    await world.until(lambda: _submitted(last, 2))
    last.allow(None)
    for task in tasks:
        assert (await task).finish_reason == "length"


async def test_request_cancelled_as_its_engine_died_may_have_been_it(make_world) -> None:  # type: ignore[no-untyped-def]
    world, e0, e1 = await pair(make_world)
    e0.allow(0)
    e1.allow(0)
    bodies = [chat(seed=n + 1, store=True) for n in range(2)]
    gone, neighbour = [asyncio.create_task(world.events("POST", "/v1/chat/completions", body)) for body in bodies]
    for engine in (e0, e1):
        await world.until(lambda engine=engine: _submitted(engine, 2))
        for sequence in engine.sequences.values():
            engine._start(sequence)
        world.host.confirm_suspects = engine is e0
        await engine.kill(from_outside=False, tell=engine is e0)
    await world.until(lambda: state_is(world, "e1", "lost"))
    async with world.http.delete(f"/v1/streams/{e0.submits[0].stream}") as response:
        assert response.status == 200
    world.host.down(e1, "killed")
    world.host.gone(e1, from_outside=False)
    await world.engine("e0", 2)
    assert (await neighbour).finish_reason == "length"
    await gone


async def _suspected(world: World, count: int) -> bool:
    return len(world.host.suspects) >= count


async def _submitted(engine: FakeEngine, count: int) -> bool:
    return len(engine.submits) >= count


async def test_poison_request_is_ended_and_its_neighbours_go_on(make_world) -> None:  # type: ignore[no-untyped-def]
    world, e0, e1 = await pair(make_world)
    poison_seed = 666
    e0.allow(3)
    e0.step_s = e1.step_s = 0.01
    neighbours = [asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(seed=n + 1))) for n in range(3)]
    await world.until(lambda: _submitted(e0, 3))
    e0.poison = e1.poison = poison_seed
    poison = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(seed=poison_seed)))
    await world.until(lambda: _submitted(e0, 4))
    engines = {"e0": e0, "e1": e1}

    async def keep_alive() -> None:
        while True:
            for name, engine in list(engines.items()):
                if engine.dead:
                    engines[name] = await world.engine(name, engine.incarnation + 1, step_s=0.01)
                    engines[name].poison = poison_seed
            await asyncio.sleep(0.005)

    keeper = asyncio.create_task(keep_alive())
    e0.allow(None)
    try:
        got = await poison
        assert got.errors[0]["code"] == "poison_request"
        assert "engines died while they computed this request" in got.errors[0]["message"]
        for answer in await asyncio.gather(*neighbours):
            assert answer.finish_reason == "length"
            assert answer.ids == list(range(15))
    finally:
        keeper.cancel()
    deaths = sum(engine.dead for engine in world.engines)
    assert 2 <= deaths <= 5
