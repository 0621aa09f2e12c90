"""Engines die, hang, lose their sockets or send nonsense: clients see one stream without a gap or a repeat."""

from __future__ import annotations

import asyncio

import pytest
import structlog.testing

from engine import messages as m
from gateway import membership
from gateway.failover import Recovering, loss_of
from tests.gateway.conftest import World, chat
from tests.gateway.fake_engine import FakeEngine

PROMPT_COUNT = len("<user>Hello\n<assistant>")


async def pair(make_world, **options) -> tuple[World, FakeEngine, FakeEngine]:  # type: ignore[no-untyped-def]
    world = await make_world(**options)
    return world, await world.engine("e0"), await world.engine("e1")


async def test_killed_at_every_token_of_an_answer(make_world) -> None:  # type: ignore[no-untyped-def]
    world, engine, spare = await pair(make_world)
    body = chat(stream_options={"include_usage": True})
    want = await world.events("POST", "/v1/chat/completions", body)
    for k in range(11):
        engine.kill_at = PROMPT_COUNT + k
        got = await world.events("POST", "/v1/chat/completions", body)
        assert got.ids == want.ids
        assert got.text == want.text, f"killed after token {k + 1}"
        assert got.finish_reason == want.finish_reason
        assert got.chunks[-1]["usage"] == want.chunks[-1]["usage"]
        (recovery,) = got.concordia["recoveries"]
        assert (recovery["engine"], recovery["to_engine"], recovery["reason"]) == (engine.name, spare.name, "killed")
        parts = ("detect_ms", "fence_ms", "wait_ms", "restore_ms", "force_ms", "next_token_ms")
        assert recovery["gap_ms"] == pytest.approx(sum(recovery[part] for part in parts), abs=0.02)
        assert [c.split()[1] for c in got.comments] == ["recovery", "recovered"]
        submit = spare.submits[-1]
        assert submit.prompt_count == PROMPT_COUNT
        assert len(m.unpack_tokens(submit.tokens)) == PROMPT_COUNT + k + 1
        assert submit.prefill_start == 0
        engine, spare = spare, await world.engine(engine.name, engine.incarnation + 1)


async def test_killed_before_the_first_token_and_twice_in_one_answer(make_world) -> None:  # type: ignore[no-untyped-def]
    world, e0, e1 = await pair(make_world)
    want = await world.events("POST", "/v1/chat/completions", chat())
    e0.allow(0)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat()))
    await world.until(lambda: submitted(e0, 2))
    e1.kill_at = PROMPT_COUNT + 4
    await e0.kill()
    e0 = await world.engine("e0", 2)
    got = await task
    assert got.events[:-2] == [(k, d.replace(want_id(want), want_id(got))) for k, d in renamed(want, got)][:-2]
    assert [r["engine"] for r in got.concordia["recoveries"]] == ["e0", "e1"]
    assert got.concordia["recoveries"][0]["position"] == PROMPT_COUNT
    assert got.text == want.text


def want_id(sse) -> str:  # type: ignore[no-untyped-def]
    return sse.headers["X-Stream-Id"]


def renamed(want, got) -> list[tuple[int, str]]:  # type: ignore[no-untyped-def]
    created = (want.chunks[0]["created"], got.chunks[0]["created"])
    return [(k, data.replace(f'"created":{created[0]}', f'"created":{created[1]}')) for k, data in want.events]


async def submitted(engine: FakeEngine, count: int) -> bool:
    return len(engine.submits) >= count


async def test_no_engine_alive_waits_with_keepalives_until_one_is_back(make_world) -> None:  # type: ignore[no-untyped-def]
    world, e0, e1 = await pair(make_world, keepalive_s=0.05)
    e0.kill_at = PROMPT_COUNT + 3
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat()))
    await e1.kill()
    await world.until(lambda: not_healthy(world))
    await asyncio.sleep(0.15)
    await world.engine("e1", 2)
    got = await task
    assert got.finish_reason == "length"
    assert got.ids == list(range(15))
    assert "keep-alive" in got.comments
    assert got.concordia["recoveries"][0]["wait_ms"] > 100


async def not_healthy(world: World) -> bool:
    async with world.http.get("/health") as response:
        return response.status == 503


async def test_time_that_the_gateway_was_stopped_for_ends_no_stream_that_waits(
    make_world, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    """No engine is up when everything is stopped for longer than a stream may wait: what it has waited awake counts."""
    world = await make_world(engine_wait_s=5.0)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat()))

    async def waits() -> bool:
        return len((await world.get("/v1/streams"))["data"]) == 1

    await world.until(waits)
    loop = asyncio.get_running_loop()
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + 20.0)
    await world.engine("e0")
    assert (await task).finish_reason == "length"


async def test_no_engine_for_too_long_is_a_clear_error(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world(engine_wait_s=0.1)
    for stored in (False, True):
        status, headers, answer = await world.post("/v1/chat/completions", chat(stream=False, store=stored))
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "no_engine", "2")
    sse = await world.events("POST", "/v1/chat/completions", chat())
    assert "no engine could serve for 0.1 s" in sse.errors[0]["message"]
    assert sse.ids == [0, 1]  # opening chunk, then the error


async def test_stored_stream_outlives_the_wait_of_its_client(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world(engine_wait_s=0.1)
    sse = await world.events("POST", "/v1/chat/completions", chat(store=True))
    assert sse.errors[0]["code"] == "no_engine"
    assert sse.ids == []
    await world.engine("e0")
    got = await world.events("GET", f"/v1/streams/{sse.headers['X-Stream-Id']}")
    assert got.finish_reason == "length"


async def test_lost_link_moves_nothing_until_death_is_certain(make_world) -> None:  # type: ignore[no-untyped-def]
    world, e0, e1 = await pair(make_world)
    e0.allow(4)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat()))
    await world.until(lambda: delivered(world, 4))
    world.host.confirm_suspects = False
    await e0.kill(tell=False)
    await world.until(lambda: suspected(world))
    await asyncio.sleep(0.05)
    assert not e1.submits
    world.host.down(e0, "hung")
    got = await task
    assert got.text
    assert got.concordia["recoveries"][0]["reason"] == "hung"
    assert got.concordia["recoveries"][0]["fence_ms"] >= 0


async def suspected(world: World) -> bool:
    return bool(world.host.suspects)


async def test_suspicion_is_repeated_to_a_host_agent_that_was_away(make_world) -> None:  # type: ignore[no-untyped-def]
    world, e0, e1 = await pair(make_world)
    e0.allow(4)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat()))
    await world.until(lambda: delivered(world, 4))
    await world.host.stop()
    await e0.kill(tell=False)
    del world.host.engines["e0"]
    await world.host.start()
    got = await task
    assert got.finish_reason == "length"
    assert world.host.suspects[0].engine == "e0"


async def test_each_way_to_lose_an_engine_has_its_own_event_and_count(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world()
    world.host.confirm_suspects = False
    ways = {("killed", ""), ("exited", ""), ("device error", ""), ("hung", "blocked"), ("hung", "spinning")}
    before = await counts(world)
    with structlog.testing.capture_logs() as events:
        for incarnation, (reason, cause) in enumerate(sorted(ways), 1):
            engine = await world.engine("e0", incarnation)
            await engine.kill(tell=False)
            world.host._tell(m.EngineDown("e0", incarnation, reason, 1.0, 0.1, cause))
        last = await world.engine("e0", len(ways) + 1)
        world.host._tell(m.EngineSlow("e0", last.incarnation, "starved", 300.0))
        await world.until(lambda: counted(world, 'engine_slow_total{cause="starved"}', before))
    told = [event["reason"] for event in events if event["event"] == "recover.engine_down"]
    assert told == sorted(reason for reason, _ in ways)
    assert any(event["event"] == "recover.engine_slow" for event in events)
    for reason, cause in ways:
        assert await counted(world, f'engine_losses_total{{reason="{reason}"}}', before)
        assert not cause or await counted(world, f'engine_hangs_total{{cause="{cause}"}}', before)


async def test_host_agent_says_what_it_died_of_though_its_pidfd_was_first(make_world, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Without its word, the end of the process is enough."""
    world = await make_world()
    world.host.confirm_suspects = False
    for incarnation, told in ((1, True), (3, False)):
        monkeypatch.setattr(membership, "WORD_S", 60.0 if told else 0.05)
        process = await asyncio.create_subprocess_exec("sleep", "100")
        engine = await world.engine("e0", incarnation, pid=process.pid, budget=2)
        task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat()))
        await world.until(lambda engine=engine: submitted(engine, 1))
        process.kill()
        await process.wait()
        if told:
            world.host._tell(m.EngineDown("e0", incarnation, "hung", 1.0, 0.1, "blocked"))
        await world.until(lambda: lost_engine(world))
        last = await world.engine("e0", incarnation + 1)
        (recovery,) = (await task).concordia["recoveries"]
        assert recovery["reason"] == ("hung" if told else "killed")
        await last.kill()


async def lost_engine(world: World) -> bool:
    return (await world.get("/admin/engines"))["data"][0]["state"] == "down"


async def counts(world: World) -> dict[str, float]:
    text = await (await world.http.get("/metrics")).text()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("concordia_"): float(value) for name, _, value in lines}


async def counted(world: World, name: str, before: dict[str, float]) -> bool:
    """It has gone up."""
    return (await counts(world)).get(name, 0.0) > before.get(name, 0.0)


async def delivered(world: World, count: int) -> bool:
    return any(row["delivered_tokens"] >= count for row in (await world.get("/v1/streams"))["data"])


async def test_tokens_of_an_old_epoch_or_known_position_are_dropped_and_a_gap_submits_again(world: World) -> None:
    engine = world.engines[0]
    engine.allow(4)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat()))
    await world.until(lambda: delivered(world, 4))
    stream, epoch = engine.submits[0].stream, engine.submits[0].epoch
    engine.send(m.Step([m.Output(stream, epoch - 1, PROMPT_COUNT + 4, 99)]))
    engine.send(m.Step([m.Output(stream, epoch, PROMPT_COUNT + 1, 99)]))
    engine.send(m.Step([m.Output(stream, epoch, PROMPT_COUNT + 7, 99)]))
    await world.until(lambda: submitted(engine, 2))
    assert engine.submits[1].epoch > epoch
    engine.allow(None)
    got = await task
    want = await world.events("POST", "/v1/chat/completions", chat())
    assert got.text == want.text
    assert got.ids == want.ids


async def test_spare_stays_idle_and_a_session_stays_where_it_is(make_world) -> None:  # type: ignore[no-untyped-def]
    world, e0, e1 = await pair(make_world)
    for number in range(4):
        await world.post("/v1/chat/completions", chat(stream=False, session_id=f"s-{number}"))
    assert not e1.submits
    await e0.kill()
    await world.post("/v1/chat/completions", chat(stream=False, session_id="s-0"))
    await world.engine("e0", 2)
    await world.post("/v1/chat/completions", chat(stream=False, session_id="s-0"))
    assert len(e1.submits) == 2


def test_parts_of_a_recovery_add_up_to_its_gap() -> None:
    loss = loss_of("e0", "hung", heard=1.0, link_lost=0.0, told=3.0, detect_ms=1500, fence_ms=100)
    recovery = Recovering(loss, 7).submit("e1", 3.1).start(5, 3.3).force(2, 150.0).finish(3.6)
    assert recovery.gap_ms == pytest.approx(2200)  # its last beat was at 1.4
    assert (recovery.detect_ms, recovery.fence_ms) == (pytest.approx(1500), pytest.approx(100))
    assert (recovery.wait_ms, recovery.restore_ms) == (pytest.approx(100), pytest.approx(200))
    assert (recovery.force_ms, recovery.next_token_ms) == (pytest.approx(150), pytest.approx(150))


def test_link_that_ended_first_is_when_the_death_was_noticed() -> None:
    loss = loss_of("e0", "killed", heard=1.0, link_lost=1.25, told=1.5, detect_ms=0.0, fence_ms=0.5)
    assert (loss.last_heard, loss.noticed, loss.certain) == (1.0, 1.25, 1.5)


def test_a_recovery_that_the_next_loss_cuts_short_says_so_and_has_no_negative_part() -> None:
    """Both engines died at once: the second one's death was noticed before the stream was given to it."""
    loss = loss_of("e0", "killed", heard=1.0, link_lost=2.0, told=3.0, detect_ms=0.0, fence_ms=0.0)
    for placed in (Recovering(loss, 7).submit("e1", 3.1), Recovering(loss, 7).submit("e1", 3.1).start(5, 3.2)):
        recovery = placed.cut_short(2.5)
        parts = [
            getattr(recovery, f"{part}_ms") for part in ("detect", "fence", "wait", "restore", "force", "next_token")
        ]
        assert recovery.cut_short and min(parts) >= 0
        assert sum(parts) == pytest.approx(recovery.gap_ms)
