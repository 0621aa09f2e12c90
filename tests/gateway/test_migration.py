"""Streams move between engines while they go on; what refuses or dies on the way leaves them running."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from engine import messages as m
from gateway.following import STANDBY_TOKENS
from gateway.migration import PRECOPY_LIMIT_S, MoveView, decide
from tests.gateway.conftest import World, chat
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.test_failover import PROMPT_COUNT, pair

RUNNING = {"answered": True, "followed": 0, "caught_up": False, "refused": "", "carries_state": True}
UP = {"source_up": True, "target_up": True, "ended": False, "elapsed_s": 1.0, "tokens": 100}


def act(**seen: Any) -> str:
    return decide(MoveView(**{**RUNNING, **UP, **seen}))[0]


def test_source_is_stopped_when_little_is_missing() -> None:
    assert act() == "wait"
    assert act(followed=95) == "wait"
    assert act(followed=95, caught_up=True) == "stop"
    assert act(followed=50, caught_up=True) == "wait", "the capture lags: wait for it"
    assert act(followed=50, elapsed_s=PRECOPY_LIMIT_S + 1) == "stop"


def test_prefill_stops_where_it_is_and_another_form_moves_by_its_tokens() -> None:
    assert act(answered=False, followed=0, caught_up=True) == "stop"
    assert act(carries_state=False) == "stop"


@pytest.mark.parametrize(
    "trouble", [{"source_up": False}, {"target_up": False}, {"ended": True}, {"refused": "no_slot"}]
)
def test_trouble_before_the_stop_leaves_the_source_alone(trouble: dict[str, Any]) -> None:
    assert act(followed=99, caught_up=True, **trouble) == "abandon"


async def running(world: World, source: FakeEngine, after: int = 4, **more: Any) -> tuple[asyncio.Task[Any], str]:
    """A stream of which `after` tokens are there and no more come."""
    source.allow(after)
    before = len(source.submits)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(**more)))

    async def there() -> bool:
        return len(source.submits) > before and source.budget == 0

    await world.until(there)
    stream = source.submits[-1].stream
    await world.until(lambda: has_delivered(world, after, stream))
    return task, stream


async def migrate(world: World, stream: str, engine: str) -> tuple[int, Any]:
    status, _, body = await world.post(f"/admin/streams/{stream}/migrate", {"engine": engine})
    return status, body


async def test_stream_moves_at_every_token_and_its_client_sees_one_answer(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, target = await pair(make_world)
    want = await world.events("POST", "/v1/chat/completions", chat())
    for position in range(1, 12):
        for engine in (source, target):
            engine.allow(position)
            engine.submits.clear()
        task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat()))
        source, target = await at_work(world, position, source, target)
        target.allow(None)
        status, body = await migrate(world, source.submits[0].stream, target.name)
        got = await task
        assert (status, body["outcome"], body["carried"]) == (200, "moved", "state"), body
        assert got.text == want.text
        assert got.ids == want.ids
        (migration,) = got.concordia["migrations"]
        assert (migration["from_engine"], migration["to_engine"]) == (source.name, target.name)
        assert migration["position"] == PROMPT_COUNT + position
        assert not got.concordia["recoveries"]
        assert target.submits[-1].epoch > source.submits[-1].epoch


async def has_delivered(world: World, count: int, stream: str = "") -> bool:
    rows = (await world.get("/v1/streams"))["data"]
    return any(row["delivered_tokens"] == count and stream in row["id"] for row in rows)


async def at_work(world: World, count: int, *engines: FakeEngine) -> tuple[FakeEngine, FakeEngine]:
    """The engine that was given the stream and has used up its steps, and the other one."""

    async def there() -> bool:
        return any(engine.submits and engine.budget == 0 for engine in engines)

    await world.until(there)
    await world.until(lambda: has_delivered(world, count))
    return engines if engines[0].submits else engines[::-1]  # type: ignore[return-value]


async def test_named_session_moves_with_its_live_stream(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, target = await pair(make_world)
    task, stream = await running(world, source, session_id="s")
    status, _, body = await world.post("/admin/sessions/s/migrate", {"engine": "e1"})
    assert (status, body["outcome"]) == (200, "moved")
    assert (await task).finish_reason == "length"


async def test_of_a_session_with_several_streams_those_move_that_run_elsewhere(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, tasks, streams = await two_of_a_session(make_world)
    target = await world.engine("e1", budget=None)
    target.step_s = 0.05
    assert (await migrate(world, streams[1], "e1"))[1]["outcome"] == "moved"
    status, _, body = await world.post("/admin/sessions/s/migrate", {"engine": "e1"})
    assert (status, body["outcome"], [move["stream"] for move in body["moves"]]) == (200, "moved", streams[:1])
    for task in tasks:
        assert (await task).finish_reason == "length"


async def test_of_a_session_with_several_streams_none_is_moved_if_one_can_not_be(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, tasks, streams = await two_of_a_session(make_world)
    slow, target = await world.engine("e1"), await world.engine("e2")
    slow.follow_lag = 100
    move = asyncio.create_task(migrate(world, streams[1], "e1"))
    await world.until(lambda: followed(slow, streams[1]))
    status, _, body = await world.post("/admin/sessions/s/migrate", {"engine": "e2"})
    assert (status, "is being moved to e1 already" in body["error"]["message"]) == (409, True), body
    assert not target.follows, "the first one was begun with"
    source.allow(None)
    for task in tasks:
        assert (await task).finish_reason == "length"
    assert (await move)[1]["outcome"] == "ended"


async def two_of_a_session(make_world) -> tuple[World, FakeEngine, list[asyncio.Task[Any]], list[str]]:  # type: ignore[no-untyped-def]
    """Two turns at once, in the midst of their answers on one engine."""
    world: World = await make_world()
    source = await world.engine("e0", budget=0)
    bodies = [chat(session_id="s", seed=seed) for seed in (1, 2)]
    tasks = [asyncio.create_task(world.events("POST", "/v1/chat/completions", body)) for body in bodies]

    async def both() -> bool:
        return len(source.submits) == 2

    await world.until(both)
    source.allow(2)
    streams = [submit.stream for submit in source.submits]
    for stream in streams:
        await world.until(lambda stream=stream: has_delivered(world, 2, stream))
    return world, source, tasks, streams


async def test_idle_session_moves_and_its_next_turn_goes_there(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, target = await pair(make_world)
    long = [{"role": "user", "content": "x" * 100}]
    await world.post("/v1/chat/completions", chat(stream=False, session_id="s", messages=long))
    status, _, body = await world.post("/admin/sessions/s/migrate", {"engine": "e1"})
    assert (status, body["outcome"]) == (200, "moved"), body
    assert source.parks
    assert not target.parks
    await world.post("/v1/chat/completions", chat(stream=False, session_id="s", messages=long))
    assert len(target.submits) == 1


@pytest.mark.parametrize("how", ["park", "delete"])
async def test_idle_session_moves_once_at_a_time_and_no_longer_when_it_is_parked(make_world, how: str) -> None:  # type: ignore[no-untyped-def]
    world, source, target = await pair(make_world)
    await world.post("/v1/chat/completions", chat(stream=False, session_id="s"))
    asked: list[m.Follow] = []
    target._follow = asked.append  # type: ignore[method-assign]
    move = asyncio.create_task(world.post("/admin/sessions/s/migrate", {"engine": "e1"}))

    async def is_asked() -> bool:
        return bool(asked)

    await world.until(is_asked)
    status, _, body = await world.post("/admin/sessions/s/migrate", {"engine": "e1"})
    assert (status, "is being moved to e1 already" in body["error"]["message"]) == (409, True), body
    method, path = ("POST", "/v1/sessions/s/park") if how == "park" else ("DELETE", "/v1/sessions/s")
    async with world.http.request(method, path) as response:
        await response.read()
    assert (await move)[2]["outcome"] == "target refused: parked meanwhile"


async def test_target_that_refuses_leaves_the_source_running(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, target = await pair(make_world)
    target.follow_refusal = "no_slot"
    task, stream = await running(world, source)
    status, body = await migrate(world, stream, "e1")
    assert (status, body["outcome"]) == (200, "target refused: no_slot")
    assert not source.releases
    source.allow(None)
    got = await task
    assert got.finish_reason == "length"
    assert len(source.submits) == 1


async def test_target_that_refuses_after_the_stop_gives_it_back(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, target = await pair(make_world)
    target.refuse = m.Refused("", 0, "failed", "no")
    task, stream = await running(world, source)
    _, body = await migrate(world, stream, "e1")
    assert body["outcome"] == "target refused; the source goes on"
    source.allow(None)
    got = await task
    assert got.finish_reason == "length"
    assert got.ids == list(range(15))
    assert len(source.submits) == 2


async def test_target_that_dies_in_the_copy_leaves_the_source_running(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, target = await pair(make_world)
    target.follow_lag = 400
    task, stream = await running(world, source, after=10)
    move = asyncio.create_task(migrate(world, stream, "e1"))
    await world.until(lambda: followed(target, stream))
    await target.kill()
    _, body = await move
    assert body["outcome"] == "target lost"
    source.allow(None)
    got = await task
    assert got.ids == list(range(15))
    assert len(source.submits) == 1


async def test_source_that_dies_in_the_copy_is_a_recovery(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, target = await pair(make_world)
    target.follow_lag = 400
    task, stream = await running(world, source, after=10)
    move = asyncio.create_task(migrate(world, stream, "e1"))
    await world.until(lambda: followed(target, stream))
    await source.kill()
    _, body = await move
    assert body["outcome"] == "source lost"
    got = await task
    assert got.ids == list(range(15))
    assert len(got.concordia["recoveries"]) == 1


async def followed(engine: FakeEngine, stream: str) -> bool:
    return stream in engine.follows


async def test_engine_with_another_form_gets_the_tokens_and_the_answer_says_so(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world()
    source = await world.engine("e0")
    target = await world.engine("e1", root="11" * 16)
    task, stream = await running(world, source)
    _, body = await migrate(world, stream, "e1")
    got = await task
    assert (body["outcome"], body["carried"]) == ("moved", "tokens")
    (migration,) = got.concordia["migrations"]
    assert (migration["carried"], migration["reason"]) == ("tokens", "the engines keep state in another form")
    assert not target.follows


async def test_nonsense_is_refused(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, target = await pair(make_world)
    task, stream = await running(world, source)
    assert (await migrate(world, stream, "e7"))[0] == 404
    assert (await migrate(world, stream, "e0"))[0] == 409
    assert (await world.post("/admin/sessions/none/migrate", {"engine": "e1"}))[0] == 404
    assert (await world.post("/admin/engines/e9/drain", {}))[0] == 404
    assert (await world.post(f"/admin/streams/{stream}/migrate", {"motor": "e1"}))[0] == 400
    source.allow(None)
    await task
    assert (await migrate(world, stream, "e1"))[0] == 409


async def test_drain_moves_every_stream_and_nothing_new_comes(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, target = await pair(make_world)
    source.allow(2)
    tasks = [asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(seed=n + 1))) for n in range(6)]
    await world.until(lambda: submitted(source, 6))
    status, _, body = await world.post("/admin/engines/e0/drain", {})
    assert (status, body["moved"], body["left"]) == (200, 6, 0), body
    for task in tasks:
        assert (await task).ids == list(range(15))
    before = len(source.submits)
    await world.post("/v1/chat/completions", chat(stream=False))
    assert len(source.submits) == before
    rows = {row["id"]: row for row in (await world.get("/admin/engines"))["data"]}
    assert rows["e0"]["state"] == "drained"
    async with world.http.delete("/admin/engines/e0/drain") as response:
        assert (await response.json())["state"] == "ready"


async def test_drain_that_is_undone_leaves_the_rest_where_it_is(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, target = await pair(make_world)
    target.follow_lag = 400
    task, stream = await running(world, source, after=10)
    drain = asyncio.create_task(world.post("/admin/engines/e0/drain", {}))
    await world.until(lambda: followed(target, stream))
    async with world.http.delete("/admin/engines/e0/drain") as response:
        assert (await response.json())["state"] == "ready"
    target.follow_refusal = "no_slot"
    source.allow(None)
    got = await task
    _, _, body = await drain
    assert (body["moved"], body["left"]) == (0, 0), body
    assert got.finish_reason == "length"
    assert len(source.submits) == 1


async def test_drain_waits_for_the_answer_of_the_last_target(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, target = await pair(make_world)
    target.allow(0)
    source.allow(2)
    tasks = [asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(seed=n + 1))) for n in range(3)]
    await world.until(lambda: submitted(source, 3))
    drain = asyncio.create_task(world.post("/admin/engines/e0/drain", {}))
    await world.until(lambda: submitted(target, 3))
    _, _, early = await world.post("/admin/engines/e0/drain", {"timeout_s": 0.1})
    assert (early["moved"], early["left"]) == (3, 0), "the engine has let go of them"
    assert not drain.done(), "a target may still refuse"
    target.allow(None)
    _, _, body = await drain
    assert (body["moved"], body["left"], body["reason"]) == (3, 0, None)
    for task in tasks:
        assert (await task).ids == list(range(15))


async def test_all_drained_is_said_and_the_wait_is_counted(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world()
    await world.engine("e0")
    assert (await world.post("/admin/engines/e0/drain", {}))[2]["engines_left"] == 0
    async with world.http.get("/health") as response:
        health = await response.json()
    assert (response.status, health["status"]) == (503, "all engines that are up are drained")
    assert health["engines_drained"] == ["e0"]
    assert "concordia drain e0 --undo" in health["hint"]
    task = asyncio.create_task(world.post("/v1/chat/completions", chat(stream=False)))
    await world.until(lambda: waiting(world))
    began = time.monotonic()
    await asyncio.sleep(0.05)
    at_least_ms = (time.monotonic() - began) * 1000
    async with world.http.delete("/admin/engines/e0/drain"):
        pass
    _, _, body = await task
    assert body["concordia"]["timing"]["wait_ms"] > at_least_ms
    health = await world.get("/health")
    assert (health["status"], health["engines_drained"], health["hint"]) == ("ok", [], None)


async def waiting(world: World) -> bool:
    return bool((await world.get("/health"))["live_streams"])


async def submitted(engine: FakeEngine, count: int) -> bool:
    return len(engine.submits) >= count


async def test_drain_without_another_engine_says_what_is_left(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world()
    source = await world.engine("e0")
    task, _ = await running(world, source)
    left = asyncio.create_task(world.post("/admin/engines/e0/restart", {}))
    await world.until(lambda: state_is(world, "e0", "draining"))
    left.cancel()
    await world.until(lambda: state_is(world, "e0", "ready"))
    _, _, body = await world.post("/admin/engines/e0/drain", {"timeout_s": 0.2})
    assert (body["moved"], body["left"]) == (0, 1)
    assert "no other engine" in body["reason"]
    status, _, body = await world.post("/admin/engines/e0/restart", {"timeout_s": 0.2})
    assert status == 409
    source.allow(None)
    assert (await task).finish_reason == "length"


async def test_drain_outlives_the_gateway(make_world) -> None:  # type: ignore[no-untyped-def]
    """Killed in the midst of it: the next one takes the rest elsewhere, and places nothing there until it is undone."""
    world, source, target = await pair(make_world)
    target.follow_lag = 400
    task, stream = await running(world, source, after=10, store=True)
    drain = asyncio.create_task(world.post("/admin/engines/e0/drain", {}))
    await world.until(lambda: followed(target, stream))
    await world.kill_gateway()
    await asyncio.gather(task, drain, return_exceptions=True)
    target.follow_lag = 0
    await world.start_gateway()
    got = await world.events("GET", f"/v1/streams/{stream}")
    assert got.ids == list(range(15))
    assert [(move["to_engine"], move["why"]) for move in got.concordia["migrations"]] == [("e1", "drain")]
    await world.until(lambda: state_is(world, "e0", "drained"))
    assert (await world.post("/admin/engines/e0/restart", {}))[0] == 202
    async with world.http.delete("/admin/engines/e0/drain") as response:
        assert (await response.json())["state"] == "ready"
    await world.kill_gateway()
    await world.start_gateway()
    await world.until(lambda: state_is(world, "e0", "ready"))


async def state_is(world: World, engine: str, state: str) -> bool:
    rows = (await world.get("/admin/engines"))["data"]
    return any((row["id"], row["state"]) == (engine, state) for row in rows)


async def test_what_comes_under_an_old_epoch_counts_for_nothing(make_world) -> None:  # type: ignore[no-untyped-def]
    """From the engine that has the stream now, and from the one that had it, at a gateway that finds both."""
    world, source, target = await pair(make_world)
    task, stream = await running(world, source, store=True)
    stale = source.sequences[stream]
    target.allow(1)
    assert (await migrate(world, stream, "e1"))[1]["outcome"] == "moved"
    target.send(m.Refused(stream, 1, "failed", "late"))
    target.send(m.Captured([(stream, 2, 20), (stream, 1, 9999)]))
    await world.until(lambda: captured(world, "e1", 20))
    stale.draw()
    source.sequences[stream] = stale
    await world.kill_gateway()
    await asyncio.gather(task, return_exceptions=True)
    source.allow(0)
    await world.start_gateway()
    await world.until(lambda: cancelled(source, stream))
    target.allow(None)
    got = await world.events("GET", f"/v1/streams/{stream}")
    assert (got.finish_reason, got.ids) == ("length", list(range(15)))
    assert [submit.epoch for submit in target.submits] == [2]


async def captured(world: World, engine: str, position: int) -> bool:
    rows = (await world.get("/admin/engines"))["data"]
    (stream,) = next(row["streams"] for row in rows if row["id"] == engine)
    assert stream["captured"] <= position
    return stream["captured"] == position


async def cancelled(engine: FakeEngine, stream: str) -> bool:
    return any((cancel.stream, cancel.epoch) == (stream, 1) for cancel in engine.cancels)


async def test_a_wait_below_zero_is_refused(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world()
    await world.engine("e0")
    for path, body in (("sessions/s/migrate", {"engine": "e0"}), ("engines/e0/drain", {}), ("engines/e0/restart", {})):
        status, _, answer = await world.post(f"/admin/{path}", {**body, "timeout_s": -1})
        assert (status, answer["error"]["param"]) == (400, "timeout_s")
    assert (await world.get("/admin/engines"))["data"][0]["state"] == "ready"


async def test_engine_that_is_told_to_end_is_drained_and_a_restart_ends_it(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, target = await pair(make_world)
    task, _ = await running(world, source)
    source.send(m.Draining())
    got = await task
    assert got.concordia["migrations"][0]["why"] == "the engine was told to end"
    status, _, body = await world.post("/admin/engines/e1/restart", {})
    assert status == 202
    await world.until(lambda: stopped(target))


async def stopped(engine: FakeEngine) -> bool:
    return engine.stopped


async def test_hot_standby_follows_every_stream_and_takes_over(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, standby = await pair(make_world, failover="hot")
    task, stream = await running(world, source, STANDBY_TOKENS - 1)
    await world.until(lambda: knows(standby, stream, PROMPT_COUNT))
    source.allow(1)
    await world.until(lambda: knows(standby, stream, PROMPT_COUNT + STANDBY_TOKENS))
    row = next(r for r in (await world.get("/admin/engines"))["data"] if r["id"] == "e1")
    assert row["following"][0]["for"] == ["standby"]
    await source.kill()
    got = await task
    assert got.ids == list(range(15))
    assert not standby.follows


async def knows(standby: FakeEngine, stream: str, count: int) -> bool:
    """It was handed exactly so many tokens: it isn't woken for each."""
    return len(standby.follows.get(stream, [])) == count


async def test_standby_that_comes_back_protects_what_moved(make_world) -> None:  # type: ignore[no-untyped-def]
    world, source, standby = await pair(make_world, failover="hot")
    standby.allow(2)
    task, stream = await running(world, source)
    await source.kill()
    await world.until(lambda: submitted(standby, 1))
    again = await world.engine("e0", 2)
    await world.until(lambda: followed(again, stream))
    standby.allow(None)
    assert (await task).ids == list(range(15))
    await world.until(lambda: not_following(again))


async def not_following(engine: FakeEngine) -> bool:
    return not engine.follows
