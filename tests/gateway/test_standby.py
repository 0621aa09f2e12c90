"""Hot standbys: who stands by for which stream, and which sessions are protected between two turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine import messages as m
from gateway.standby import IdleView, StandbyView, choose_standby, protect_idle
from tests.gateway.conftest import World, chat
from tests.gateway.fake_engine import FakeEngine

LONG = [{"role": "user", "content": "x" * 100}]


def engine(name: str, *, load: int = 0, followed: int = 0, follows_it: bool = False, root: str = "r") -> StandbyView:
    return StandbyView(name, root, load, followed, 4, follows_it)


def idle(session: str, owner: str = "e0", *, pinned: bool = False, standby: str = "", root: str = "r") -> IdleView:
    return IdleView(session, owner, root, pinned, standby)


def test_standby_is_who_follows_it_already_else_who_has_most_room() -> None:
    assert choose_standby([engine("e0"), engine("e1", load=3), engine("e2", load=1)], "e0", "r") == "e2"
    assert choose_standby([engine("e1", load=3, follows_it=True), engine("e2")], "e0", "r") == "e1"
    assert choose_standby([engine("e0"), engine("e1", load=2, followed=2)], "e0", "r") is None
    assert choose_standby([engine("e1", root="other")], "e0", "r") is None


def test_sessions_used_last_are_protected_as_far_as_limit_and_room_go() -> None:
    sessions = [idle(name) for name in "abcde"]
    assert protect_idle(sessions, [engine("e0"), engine("e1")], 3) == dict.fromkeys("abc", "e1")
    assert protect_idle(sessions, [engine("e0"), engine("e1", load=2, followed=1)], 3) == {"a": "e1"}
    assert protect_idle(sessions, [engine("e0")], 3) == {}
    assert protect_idle(sessions, [engine("e1")], 0) == {}


def test_pinned_sessions_come_first_and_do_not_count() -> None:
    sessions = [idle("a"), idle("b"), idle("p", pinned=True)]
    assert protect_idle(sessions, [engine("e1")], 1) == {"p": "e1", "a": "e1"}
    assert protect_idle(sessions, [engine("e1", load=3)], 1) == {"p": "e1"}


def test_session_stays_at_its_standby_and_never_at_its_owner() -> None:
    rooms = [engine("e1"), engine("e2", load=2)]
    assert protect_idle([idle("a", standby="e2")], rooms, 4) == {"a": "e2"}
    assert protect_idle([idle("a", "e1", standby="e1")], rooms, 4) == {"a": "e2"}
    assert protect_idle([idle("a", root="other")], rooms, 4) == {}


# ---------------------------------------------------------------- at a gateway


async def hot(make_world: Any, **settings: Any) -> tuple[World, FakeEngine, FakeEngine]:
    world = await make_world(failover="hot", **settings)
    return world, await world.engine("e0"), await world.engine("e1")


async def turn(world: World, session: str, **more: Any) -> None:
    status, _, body = await world.post(
        "/v1/chat/completions", chat(stream=False, session_id=session, messages=LONG, **more)
    )
    assert status == 200, body


async def following(world: World, name: str) -> list[str]:
    """Idle sessions that an engine follows, by what the gateway says."""
    rows = {row["id"]: row["following"] for row in (await world.get("/admin/engines"))["data"]}
    return [row["session"] for row in rows[name] if row["session"] and row["caught_up"] and not row["refused"]]


async def until_follows(world: World, name: str, *sessions: str) -> None:
    async def there() -> bool:
        return sorted(await following(world, name)) == sorted(sessions)

    await world.until(there)


async def test_idle_session_is_followed_and_its_next_turn_needs_no_restore_after_a_death(make_world) -> None:  # type: ignore[no-untyped-def]
    world, owner, standby = await hot(make_world)
    await turn(world, "s")
    await until_follows(world, "e1", "s")
    view = await world.get("/v1/sessions/s")
    assert (view["standby"], view["standby_position"]) == ("e1", view["tokens"])
    async with world.http.get("/metrics") as response:
        assert "concordia_sessions_protected 1.0" in await response.text()
    held = standby.follows["idle:s"]
    assert len(held) == len(m.unpack_tokens(owner.submits[0].tokens)) + 12, "all of it, the last token too"
    await owner.kill()

    async def inherited() -> bool:
        return not standby.follows

    await world.until(inherited)
    assert (await world.get("/v1/sessions/s"))["engines"] == ["e1"]
    back = await world.engine("e0", 2)
    await until_follows(world, "e0", "s")
    await turn(world, "s")
    assert len(standby.submits) == 1
    assert not back.submits


async def test_session_whose_last_token_its_standby_does_not_have_yet_is_not_said_to_be_protected(make_world) -> None:  # type: ignore[no-untyped-def]
    world, _, standby = await hot(make_world)
    standby.follow_lag = 1
    await turn(world, "s")
    await until_follows(world, "e1", "s")
    view = await world.get("/v1/sessions/s")
    assert (view["standby"], view["standby_position"]) == ("e1", view["tokens"] - 1)
    async with world.http.get("/metrics") as response:
        assert "concordia_sessions_protected 0.0" in await response.text()


async def test_turn_at_its_owner_is_followed_at_the_same_standby(make_world) -> None:  # type: ignore[no-untyped-def]
    world, owner, standby = await hot(make_world)
    third = await world.engine("e2")
    await turn(world, "s")
    where = (await world.until(lambda: standby_of(world, "s"))) or ""
    follower, bystander = (standby, third) if where == "e1" else (third, standby)
    owner.allow(3)
    running = asyncio.create_task(turn(world, "s"))

    async def followed_live() -> bool:
        return any(not name.startswith("idle:") for name in follower.follows)

    await world.until(followed_live)
    assert not bystander.follows
    owner.allow(None)
    await running
    await until_follows(world, where, "s")


async def standby_of(world: World, session: str) -> str | None:
    return (await world.get(f"/v1/sessions/{session}"))["standby"]


async def test_only_so_many_idle_sessions_are_followed_those_used_last(make_world) -> None:  # type: ignore[no-untyped-def]
    world, _, standby = await hot(make_world, hot_sessions=2)
    for name in ("a", "b", "c"):
        await turn(world, name)
    await until_follows(world, "e1", "b", "c")
    await turn(world, "a")
    await until_follows(world, "e1", "a", "c")
    assert sorted(standby.follows) == ["idle:a", "idle:c"]


async def test_live_streams_come_before_idle_sessions(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world(failover="hot")
    owner, standby = await world.engine("e0"), await world.engine("e1", slots=2)
    for name in ("a", "b"):
        await turn(world, name)
    await until_follows(world, "e1", "a", "b")
    owner.allow(2)
    tasks = [asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(seed=n))) for n in (1, 2)]

    async def streams_only() -> bool:
        return len(standby.follows) == 2 and not any(name.startswith("idle:") for name in standby.follows)

    await world.until(streams_only)
    owner.allow(None)
    for task in tasks:
        assert (await task).finish_reason == "length"
    await until_follows(world, "e1", "a", "b")


async def test_slot_of_a_stream_that_ended_protects_another_one_that_had_none(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world(failover="hot")
    owner, standby = await world.engine("e0"), await world.engine("e1", slots=1)
    owner.allow(2)
    tasks = [
        asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(seed=n, max_tokens=300))) for n in (1, 2)
    ]

    async def both() -> bool:
        return len(owner.submits) == 2 and len(standby.follows) == 1

    await world.until(both)
    assert "concordia_streams_unprotected 1.0" in await (await world.http.get("/metrics")).text()
    (first,) = standby.follows
    async with world.http.delete(f"/v1/streams/{first}") as response:
        assert response.status == 200
    (second,) = {submit.stream for submit in owner.submits} - {first}

    async def other() -> bool:
        return list(standby.follows) == [second]

    await world.until(other)
    assert "concordia_streams_unprotected 0.0" in await (await world.http.get("/metrics")).text()
    owner.allow(None)
    for task in tasks:
        await task


@pytest.mark.parametrize("end", ["park", "delete"])
async def test_session_that_leaves_the_devices_is_followed_no_longer(make_world, end: str) -> None:  # type: ignore[no-untyped-def]
    world, _, standby = await hot(make_world)
    await turn(world, "s")
    await until_follows(world, "e1", "s")
    if end == "park":
        await world.post("/v1/sessions/s/park", {})
    else:
        async with world.http.delete("/v1/sessions/s") as response:
            assert response.status == 200
    assert not standby.follows
    assert not await following(world, "e1")


async def test_idle_session_that_moves_to_its_standby_is_protected_by_the_other(make_world) -> None:  # type: ignore[no-untyped-def]
    world, owner, _ = await hot(make_world)
    await turn(world, "s")
    await until_follows(world, "e1", "s")
    status, _, body = await world.post("/admin/sessions/s/migrate", {"engine": "e1"})
    assert (status, body["outcome"]) == (200, "moved"), body
    assert (await world.get("/v1/sessions/s"))["engines"] == ["e1"]
    await until_follows(world, "e0", "s")
    assert "idle:s" in owner.follows


async def test_new_gateway_finds_sessions_on_their_engines_and_protects_them_again(make_world) -> None:  # type: ignore[no-untyped-def]
    world, owner, standby = await hot(make_world)
    await turn(world, "s")
    await until_follows(world, "e1", "s")
    await world.kill_gateway()
    await world.start_gateway()
    await until_follows(world, "e1", "s")
    assert (await world.get("/v1/sessions/s"))["engines"] == ["e0"], "the standby's copy doesn't make it the owner"
    await turn(world, "s")
    assert len(owner.submits) == 2
    assert not standby.submits


async def test_under_warm_nothing_is_followed(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world()
    await world.engine("e0")
    standby = await world.engine("e1")
    await turn(world, "s")
    assert not standby.follows
    assert await standby_of(world, "s") is None
