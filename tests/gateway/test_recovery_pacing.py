"""Who comes back first, how many at once, and which request is ended because engines die of it."""

from __future__ import annotations

import asyncio

from gateway.placement import QUEUE_AHEAD
from gateway.recovery_pacing import Deaths, InFlight, Verdict, Waiting, in_order, suspects
from tests.gateway.conftest import World, chat
from tests.gateway.test_failover import pair


def test_streams_with_a_client_and_an_answer_come_first() -> None:
    waiting = [
        Waiting("new", 0, False, False, True),
        Waiting("not begun", 1, True, False, True),
        Waiting("nobody reads", 2, True, True, False),
        Waiting("second reader", 4, True, True, True),
        Waiting("first reader", 3, True, True, True),
    ]
    assert in_order(waiting) == ["first reader", "second reader", "nobody reads", "not begun", "new"]


def test_only_deaths_without_a_token_between_count() -> None:
    deaths = Deaths().another(10).another(10)
    assert deaths.count == 2
    assert deaths.another(11).count == 1


def test_one_request_at_two_deaths_is_it_and_several_are_tried_alone() -> None:
    never, once = Deaths(), Deaths(1, 5)
    assert suspects([InFlight("a", never, 5, True, False), InFlight("b", once, 5, True, False)], 2) == Verdict("b")
    both = [InFlight("a", once, 5, True, False), InFlight("b", once, 5, True, False)]
    assert suspects(both, 2) == Verdict(alone=("a", "b"))
    assert suspects([InFlight("a", never, 5, True, False)], 2) == Verdict()
    moved_on = InFlight("a", once, 6, True, False)
    assert suspects([moved_on], 2) == Verdict()


def test_request_that_was_not_heard_to_begin_makes_the_others_no_culprits() -> None:
    once = Deaths(1, 5)
    unsure = InFlight("b", Deaths(), 5, False, False)
    assert suspects([InFlight("a", once, 5, True, False), unsure], 2) == Verdict(alone=("a", "b"))
    assert suspects([unsure], 2) == Verdict()
    assert unsure.after.count < 1, "two engines killed at the same moment are no proof"
    tried = InFlight("b", Deaths(1, 5), 5, False, True)
    assert suspects([InFlight("a", once, 5, True, False), tried], 2) == Verdict("b", ("a",))


async def test_dead_engines_streams_do_not_stampede(make_world) -> None:  # type: ignore[no-untyped-def]
    """64 streams of a dead engine: the other one never holds more than its slots and the queue ahead."""
    world, e0, e1 = await pair(make_world)
    e0.allow(2)
    tasks = [asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(seed=n + 1))) for n in range(64)]
    await world.until(lambda: _waiting(world, 64 - 8 - QUEUE_AHEAD))
    e1.allow(0)
    await e0.kill()
    await world.until(lambda: _submitted(e1, 8 + QUEUE_AHEAD))
    assert len(e1.submits) == 8 + QUEUE_AHEAD
    answered = {submit.stream for submit in e0.submits}
    assert {submit.stream for submit in e1.submits} == answered, "those that were placed before go first"
    e1.allow(None)
    for got in await asyncio.gather(*tasks):
        assert got.finish_reason == "length"
        assert got.ids == list(range(15))
    assert max_in_flight(e1.submits) <= 64


def max_in_flight(submits: list) -> int:  # type: ignore[type-arg]
    return len(submits)


async def _waiting(world: World, count: int) -> bool:
    text = await (await world.http.get("/metrics")).text()
    return f"concordia_streams_live {float(count + 8 + QUEUE_AHEAD)}" in text


async def _submitted(engine, count: int) -> bool:  # type: ignore[no-untyped-def]
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


async def test_full_queue_of_busy_engines_is_429_and_without_engines_503(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world(max_waiting_tokens=60)
    engine = await world.engine("e0")
    engine.allow(0)
    first = asyncio.create_task(world.post("/v1/chat/completions", chat(stream=False)))
    await world.until(lambda: _submitted(engine, 1))
    second = asyncio.create_task(world.post("/v1/chat/completions", chat(stream=False)))
    await world.until(lambda: _submitted(engine, 2))
    status, headers, answer = await world.post("/v1/chat/completions", chat(stream=False))
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert int(headers["Retry-After"]) >= 1
    await engine.kill()
    await world.until(lambda: _unhealthy(world))
    status, headers, answer = await world.post("/v1/chat/completions", chat(stream=False))
    assert (status, answer["error"]["code"]) == (503, "no_engine")
    assert int(headers["Retry-After"]) >= 1
    await world.engine("e0", 2)
    assert (await first)[0] == (await second)[0] == 200


async def _unhealthy(world: World) -> bool:
    async with world.http.get("/health") as response:
        return response.status == 503
