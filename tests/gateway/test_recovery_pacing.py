"""Who comes back first, and how many at once."""

from __future__ import annotations

import asyncio

from gateway.placement import QUEUE_AHEAD
from gateway.recovery_pacing import Waiting, in_order
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
