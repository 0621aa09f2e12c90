"""Captured and durable positions of a session, its lag, and what is said while something keeps state from the disk.

A real keeper works on the gateway's directories; the test writes the lane that a fake engine has none of.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from gateway import durability, metrics, supervisors
from gateway import journal as j
from gateway.durability import failing_state
from gateway.journal_sync import JournalSync
from gateway.table_file import TableFile
from tests.gateway.conftest import World
from tests.tiers import forked
from tests.tiers.forked import Forked
from tests.tiers.sample import BLOCK, LAYOUT, ROOT, rows
from tiers import heartbeat, keeper_client, store_file
from tiers.keeper import Keeper
from tiers.lane import LaneWriter
from tiers.layout import Layout, sequence_id
from tiers.settings import TierSettings

CHAT = "/v1/chat/completions"


class KeeperProcess:
    """A keeper on a gateway's directories."""

    def __init__(self, world: World, **settings: Any) -> None:
        self._world = world
        self._settings = {
            "drain_interval_ms": 20,
            "sync_interval_ms": 20,
            "tail_interval_ms": 100,
            "block_tokens": BLOCK,
            **settings,
        }
        self._process: Forked | None = None

    def start(self) -> None:
        paths = self._world.config.paths.make()
        where = ["--data-dir", str(paths.data_dir), "--lane-dir", str(paths.lane_dir)]
        settings = json.dumps(self._settings)
        self._process = forked.parent().keeper([*where, "--orphan-s", "0", "--settings-json", settings], os.environ)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.asynccontextmanager
async def keeper_thread(world: World, **settings: Any) -> AsyncIterator[None]:
    """A keeper in a thread of this process, whose modules a test may change."""
    options = {
        "drain_interval_ms": 20,
        "sync_interval_ms": 20,
        "tail_interval_ms": 100,
        "block_tokens": BLOCK,
        **settings,
    }
    keeper = Keeper(world.config.paths.make(), TierSettings(**options), orphan_s=0)
    thread = threading.Thread(target=keeper.run)
    thread.start()
    try:
        yield
    finally:
        keeper.stop()
        await asyncio.to_thread(thread.join)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the gateway asks once a second, and of pins each fifth, is what these tests wait for."""
    monkeypatch.setattr(durability, "INTERVAL_S", 0.1)
    monkeypatch.setattr(durability, "PINS_INTERVAL_S", 0.5)


@pytest.fixture
def keeper(world: World) -> Iterator[KeeperProcess]:
    process = KeeperProcess(world)
    yield process
    process.kill()


def body(tokens: int) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens}


async def session(world: World, **expected: Any) -> dict[str, Any]:
    """The session's view once it says what is expected."""

    async def probe() -> dict[str, Any] | None:
        view = await world.get("/v1/sessions/chat")
        return view if all(view.get(key) == value for key, value in expected.items()) else None

    return dict(await world.until(probe))


async def degraded(world: World, *states: str) -> list[dict[str, Any]]:
    """What /health names as degraded, once it is what is expected: on a busy machine a keeper may seem to be away for a moment."""

    async def probe() -> list[dict[str, Any]] | None:
        rows = list((await world.get("/health"))["degraded"])
        return rows if rows and {row["state"] for row in rows} <= set(states) else None

    return list(await world.until(probe))


async def session_tokens(world: World, count: int) -> np.ndarray:
    view = await world.get("/v1/sessions/chat?tokens=1")
    return np.array(view["token_ids"][:count], np.int32)


async def capture(world: World, stream: str, count: int, *, close: bool) -> None:
    """Put a session's first tokens into a lane, as its engine would; `close`: the sequence has ended."""
    lane = LaneWriter.open(world.config.paths.lane("e0"), lane_bytes=1 << 20, record_count=64, incarnation=1)
    sequence, tokens = sequence_id(stream, 1), await session_tokens(world, count)
    lane.append_open(sequence, 1, ROOT, LAYOUT, BLOCK, "default", "chat", stream, tokens[:0])
    reservation = lane.reserve_rows(LAYOUT, count)
    np.copyto(reservation.frame, rows(0, tokens))
    reservation.commit(sequence, 1, 0, tokens)
    if close:
        lane.append_close(sequence, 1, count)
    lane.close()


@pytest.mark.process
async def test_durable_follows_captured_without_a_park(world: World, keeper: KeeperProcess) -> None:
    keeper.start()
    status, headers, _ = await world.post(CHAT, body(8), headers={"X-Session-Id": "chat"})
    assert status == 200
    stream = headers["X-Stream-Id"]
    view = await session(world, turns=1, live_streams=[])
    count = view["tokens"] - 1  # the last token of an answer is never fed
    assert (view["captured"], view["durable"], view["durable_lag"]) == (count, 0, count), "the engine says captured"

    lane = LaneWriter.open(world.config.paths.lane("e0"), lane_bytes=1 << 20, record_count=64, incarnation=1)
    sequence = sequence_id(stream, 1)
    tokens = await session_tokens(world, count)
    lane.append_open(sequence, 1, ROOT, LAYOUT, BLOCK, "default", "chat", stream, tokens[:0])
    reservation = lane.reserve_rows(LAYOUT, count)
    np.copyto(reservation.frame, rows(0, tokens))
    reservation.commit(sequence, 1, 0, tokens)
    view = await session(world, durable=count, degraded="")
    assert (view["captured"], view["capture_lag"], view["durable_lag"]) == (count, 1, 0)
    listed = await world.get("/admin/sessions")
    assert listed["keeper"]["up"] and listed["degraded"] == []
    assert listed["data"][0]["durable"] == count
    lane.close()

    await world.kill_gateway()
    await world.start_gateway()
    view = await world.get("/v1/sessions/chat")
    assert (view["captured"], view["durable"]) == (count, count), "remembered without a new question"


@pytest.mark.process
async def test_what_the_keeper_has_evicted_is_not_called_durable_any_more(world: World) -> None:
    evicting = KeeperProcess(world, compact_interval_s=0, session_ttl_s=0.2)
    try:
        _, headers, _ = await world.post(CHAT, body(8), headers={"X-Session-Id": "chat"})
        stream = headers["X-Stream-Id"]
        count = (await session(world, turns=1, live_streams=[]))["tokens"] - 1
        await capture(world, stream, count, close=True)
        evicting.start()
        await session(world, durable=count)

        async def evicted() -> bool:
            done = await asyncio.to_thread(keeper_client.compact, world.config.paths.keeper_socket, grace_s=0)
            return bool(done.counts.get("evicted"))

        await world.until(evicted)
        view = await session(world, durable=0)
        assert (view["captured"], view["durable_lag"]) == (0, 0)
        await world.kill_gateway()
        await world.start_gateway()
        assert (await world.get("/v1/sessions/chat"))["durable"] == 0, "it is remembered"
    finally:
        evicting.kill()


@pytest.mark.process
async def test_a_keeper_that_went_away_is_seen_everywhere(world: World, keeper: KeeperProcess) -> None:
    keeper.start()

    async def up() -> bool:
        return bool((await world.get("/admin/sessions"))["keeper"]["up"])

    await world.until(up)
    keeper.kill()

    async def degraded() -> list[dict[str, Any]]:
        return list((await world.get("/health"))["degraded"])

    (row,) = await world.until(degraded)
    assert row["state"] == "keeper_away" and row["hint"] and row["since"] > 0
    assert (await world.get("/admin/engines"))["degraded"] == [row]
    async with world.http.get("/metrics") as response:
        text = await response.text()
    assert 'concordia_degraded{state="keeper_away"} 1.0' in text
    assert "concordia_keeper_up 0.0" in text
    assert (await world.post(CHAT, body(3)))[0] == 200, "answers go on"
    keeper.start()

    async def well() -> bool:
        return not (await world.get("/health"))["degraded"]

    await world.until(well)


async def test_a_host_agent_and_a_serve_that_are_not_heard_are_seen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((supervisors, "AWAY_S"), (supervisors, "LISTEN_S"), (durability, "INTERVAL_S")):
        monkeypatch.setattr(module, name, 0.1)
    paths = world.config.paths

    async def health(*states: str) -> dict[str, Any] | None:
        said = await world.get("/health")
        return said if [row["state"] for row in said["degraded"]] == list(states) else None

    async def only_serve_is_away() -> dict[str, Any] | None:
        heartbeat.beat(paths.beat("host"))
        return await health("serve_away")

    heartbeat.beat(paths.beat("serve"))
    assert (await world.until(only_serve_is_away))["host_agent"]
    assert not (await world.until(lambda: health("host_away", "serve_away")))["host_agent"]
    assert (await world.post(CHAT, body(3)))[0] == 200, "answers go on"
    await world.until(only_serve_is_away)


@pytest.mark.parametrize(
    "said, state",
    [
        ("the disk is full at /x (less than 64 MB are free)", "disk_full"),
        ("the store can't be used at /x (mdb_txn_commit: No space left on device)", "disk_full"),
        ("the store's map is full at /x (store_map_bytes is used up)", "map_full"),
        ("the store's budget is used up at /x (90 of 80 bytes)", "over_budget"),
        ("the store can't be used at /x (Input/output error)", "store_failing"),
    ],
)
def test_what_the_keeper_says_has_a_name(said: str, state: str) -> None:
    assert failing_state(said) == state


@pytest.mark.process
async def test_a_full_map_is_said_by_session_and_its_end_too(world: World) -> None:
    small = KeeperProcess(world, store_map_bytes=1 << 20)
    try:
        _, headers, _ = await world.post(CHAT, body(8), headers={"X-Session-Id": "chat"})
        stream = headers["X-Stream-Id"]
        count = (await session(world, turns=1, live_streams=[]))["tokens"] - 1
        big = Layout(((3, 1 << 16),))  # no block of it fits the map
        lane = LaneWriter.open(world.config.paths.lane("e0"), lane_bytes=16 << 20, record_count=64, incarnation=1)
        sequence, tokens = sequence_id(stream, 1), await session_tokens(world, count)
        lane.append_open(sequence, 1, ROOT, big, BLOCK, "default", "chat", stream, tokens[:0])
        reservation = lane.reserve_rows(big, count)
        reservation.frame[:] = 1
        reservation.commit(sequence, 1, 0, tokens)
        lane.close()
        small.start()
        (row,) = await degraded(world, "map_full", "over_budget")
        state = row["state"]
        view = await session(world, degraded=state)
        assert (view["captured"], view["durable"], view["durable_lag"]) == (count, 0, count)
        async with world.http.get("/metrics") as response:
            assert f'concordia_degraded{{state="{state}"}} 1.0' in await response.text()
        small.kill()
        large = KeeperProcess(world)
        large.start()
        try:
            view = await session(world, durable=count, degraded="")
            assert not (await world.get("/health"))["degraded"]
        finally:
            large.kill()
    finally:
        small.kill()


@pytest.mark.process
async def test_a_full_disk_is_called_that_and_the_keeper_is_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _, headers, _ = await world.post(CHAT, body(8), headers={"X-Session-Id": "chat"})
    stream = headers["X-Stream-Id"]
    count = (await session(world, turns=1, live_streams=[]))["tokens"] - 1
    await capture(world, stream, count, close=False)
    with monkeypatch.context() as patched:
        patched.setattr(store_file, "FREE_DISK_RESERVE_BYTES", 1 << 60)
        async with keeper_thread(world):
            (row,) = await degraded(world, "disk_full")
            assert row["reason"].count("disk is full") == 1
            assert "free disk space" in row["hint"] and "stays in the lanes" not in row["reason"]
            shown = (await world.get("/admin/sessions"))["keeper"]
            assert shown["up"] and "disk is full" in shown["failing"]
            async with world.http.get("/metrics") as response:
                text = await response.text()
            assert 'concordia_degraded{state="disk_full"} 1.0' in text and "concordia_keeper_up 1.0" in text
            assert 'concordia_degraded{state="keeper_away"} 0.0' in text
            patched.undo()
            await session(world, durable=count, degraded="")
            assert not (await world.get("/health"))["degraded"]


async def test_a_budget_that_a_live_session_uses_up_is_said_and_holds_nothing_back(world: World) -> None:
    _, headers, _ = await world.post(CHAT, body(8), headers={"X-Session-Id": "chat"})
    stream = headers["X-Stream-Id"]
    count = (await session(world, turns=1, live_streams=[]))["tokens"] - 1
    await capture(world, stream, count, close=False)
    async with keeper_thread(world, tenant_budget_bytes=1000, compact_interval_s=0.05):
        (row,) = await degraded(world, "budget_held")
        assert row["tenant"] == "default"
        assert "1000 bytes are taken" in row["reason"] and "unpin" in row["hint"]
        await session(world, durable=count, degraded="")

        async def measured() -> bool:
            async with world.http.get("/metrics") as response:
                return 'concordia_degraded{state="budget_held"} 1.0' in await response.text()

        await world.until(measured)


async def test_a_table_of_sessions_that_can_not_be_written_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /health and the metrics, and to whoever changes a session meanwhile; without it nobody hears of it."""
    await world.post(CHAT, body(8), headers={"X-Session-Id": "chat"})
    monkeypatch.setattr("gateway.sessions.LOOK_S", 0.05)

    def refuse(*_: object) -> None:
        raise lmdb.DiskError("No space left on device")

    async def change(method: str, path: str) -> str:
        async with world.http.request(method, f"/v1/sessions/{path}") as response:
            assert response.status == 200
            return str((await response.json())["degraded"])

    with monkeypatch.context() as patched:
        patched.setattr(TableFile, "write", refuse)
        assert await change("POST", "chat/fork") == "sessions_failing"
        assert await change("DELETE", "chat") == "sessions_failing"
        (row,) = await degraded(world, "sessions_failing")
        assert "No space left" in row["reason"] and "free disk space" in row["hint"]
        async with world.http.get("/metrics") as response:
            assert 'concordia_degraded{state="sessions_failing"} 1.0' in await response.text()

    async def over() -> bool:
        return not (await world.get("/health"))["degraded"]

    await world.until(over)
    (fork,) = (await world.get("/v1/sessions"))["data"]
    assert (await change("POST", f"{fork['id']}/fork"), fork["degraded"]) == ("", "")


# ---------------------------------------------------------------- turn

MakeWorld = Callable[..., Awaitable[World]]


async def turn_world(make_world: MakeWorld) -> World:
    world = await make_world()
    await world.kill_gateway()
    world.config = dataclasses.replace(world.config, tiers=TierSettings(durability="turn", sync_interval_ms=60_000))
    await world.start_gateway()
    await world.engine("e0")
    return world


async def test_turn_has_journal_and_state_on_the_disk_before_an_answer_ends(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, done = await turn_world(make_world), list[str]()
    sync = JournalSync.sync

    async def synced(self: JournalSync, paths: Any = None) -> bool:
        (path,) = paths
        data = Path(path).read_bytes()
        done.append("journal" if b"length" in data else "too early")
        return await sync(self, paths)

    async def drained(path: Any, *, sync: bool = False, timeout_s: float = 0.0) -> dict[str, int]:
        (row,) = [row for row in (await world.get("/v1/streams"))["data"] if row["session"] == "chat"]
        done.append(f"drain {sync} {row['state']}")
        return {}

    monkeypatch.setattr(JournalSync, "sync", synced)
    monkeypatch.setattr(keeper_client, "adrain", drained)
    before = metrics.turns_unsynced._value.get()
    sse = await world.events("POST", CHAT, {**body(5), "stream": True}, headers={"X-Session-Id": "chat"})
    assert sse.finish_reason == "length"
    assert done == ["journal", "drain True live"]
    assert metrics.turns_unsynced._value.get() == before


async def test_turn_has_the_order_of_several_choices_on_the_disk_before_their_end_is_told(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, states = await turn_world(make_world), list[str]()
    sync = JournalSync.sync

    async def synced(self: JournalSync, paths: Any = None) -> bool:
        (path,) = paths
        if path.suffix == ".group":
            orders = [r.choices for r, _ in j.read_records(path.read_bytes()) if isinstance(r, j.Order)]
            shown = await world.get(f"/v1/streams/{path.stem}?format=json")
            states.append(f"{len(b''.join(orders))} {shown['stream']['state']}")
        return await sync(self, paths)

    monkeypatch.setattr(JournalSync, "sync", synced)
    sse = await world.events("POST", CHAT, {**body(5), "stream": True, "n": 2})
    assert states == [f"{2 * 7} live"]
    assert sse.ids == list(range(2 * 7 + 1))
    again = await world.events("GET", f"/v1/streams/{sse.headers['X-Stream-Id']}")
    assert again.events == sse.events


async def test_turn_has_an_answer_that_a_killed_gateway_left_without_its_end_on_the_disk_before_it_ends(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, states = await turn_world(make_world), list[str]()
    sse = await world.events("POST", CHAT, {**body(5), "stream": True, "store": True})
    await world.kill_gateway()
    stream = sse.headers["X-Stream-Id"]
    path = world.config.paths.journal_dir / f"{stream}.journal"
    data = path.read_bytes()
    path.write_bytes(data[: [end for record, end in j.read_records(data) if not isinstance(record, j.End)][-1]])
    sync = JournalSync.sync

    async def synced(self: JournalSync, paths: Any = None) -> bool:
        shown = await world.get(f"/v1/streams/{stream}?format=json")
        states.append(shown["stream"]["state"])
        return await sync(self, paths)

    monkeypatch.setattr(JournalSync, "sync", synced)
    await world.start_gateway()
    again = await world.events("GET", f"/v1/streams/{stream}")
    assert (again.events, states) == (sse.events, ["live"])


async def test_turn_ends_an_answer_without_a_keeper_and_says_so(make_world: MakeWorld) -> None:
    world = await turn_world(make_world)
    before = metrics.turns_unsynced._value.get()
    status, _, answer = await world.post(CHAT, body(5))
    assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
    assert metrics.turns_unsynced._value.get() == before + 1


@pytest.mark.process
async def test_pinned_session_is_protected_by_a_standby_though_another_was_used_later(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world(failover="hot", hot_sessions=1)
    for name in ("e0", "e1"):
        await world.engine(name)
    keeper = KeeperProcess(world)
    keeper.start()
    try:
        for name in ("old", "new"):
            status, _, _ = await world.post(CHAT, body(8), headers={"X-Session-Id": name})
            assert status == 200

        async def protected(*names: str) -> bool:
            rows = (await world.get("/admin/engines"))["data"]
            return {row["session"] for engine in rows for row in engine["following"]} == set(names)

        await world.until(lambda: protected("new"))
        await world.until(lambda: answers(world))
        keeper_client.pin(world.config.paths.keeper_socket, "default", "old")
        assert await keeper_client.apins(world.config.paths.keeper_socket) == {("default", "old")}
        await world.until(lambda: protected("new", "old"))
        keeper_client.pin(world.config.paths.keeper_socket, "default", "old", pinned=False)
        await world.until(lambda: protected("new"))
    finally:
        keeper.kill()


async def answers(world: World) -> bool:
    """The keeper does, says the gateway."""
    return bool((await world.get("/admin/sessions"))["keeper"]["up"])
