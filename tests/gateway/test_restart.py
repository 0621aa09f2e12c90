"""The gateway is killed or drained; the next one goes on from the journals, with engines that went on or not."""

from __future__ import annotations

import asyncio
import json
import os
import time

import lmdb
import pytest

from engine import messages as m
from gateway import journal as j
from gateway import metrics
from gateway.table_file import Change, TableFile
from tests.gateway.conftest import World, chat
from tests.gateway.fake_engine import FakeEngine, token_at

PARTS = ("detect", "fence", "wait", "restore", "force", "next_token")


async def break_off(world: World, engine: FakeEngine, tokens: int, **more):  # type: ignore[no-untyped-def]
    """A stream whose gateway is killed when so many tokens have come."""
    engine.allow(tokens)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(**more)))

    async def there() -> bool:
        live = (await world.get("/v1/streams"))["data"]
        return bool(live) and live[0]["delivered_tokens"] >= tokens

    await world.until(there)
    await world.kill_gateway()
    return await task


def first_tokens() -> float:
    return metrics.registry.get_sample_value("concordia_first_token_seconds_count") or 0.0


async def test_engine_that_went_on_is_caught_up_with(world: World) -> None:
    engine, before = world.engines[0], first_tokens()
    want = await world.events("POST", "/v1/chat/completions", chat())
    sse = await break_off(world, engine, 5)
    assert sse.ids == list(range(6))
    engine.allow(4)
    await asyncio.sleep(0.02)
    await world.start_gateway()
    rest = asyncio.create_task(
        world.events("GET", f"/v1/streams/{sse.headers['X-Stream-Id']}", headers={"Last-Event-ID": "5"})
    )
    await asyncio.sleep(0.1)
    engine.allow(None)
    tail = await rest
    assert sse.text + tail.text == want.text
    assert tail.ids == list(range(6, 15))
    assert tail.concordia["recoveries"] == []
    assert tail.concordia["verdict"] == "restored"
    assert first_tokens() == 2 + before  # of those two, not another one of the gateway that went on
    assert len(engine.submits) == 2  # the reference and this one: nothing was submitted again
    whole = await world.events("GET", f"/v1/streams/{sse.headers['X-Stream-Id']}")
    assert whole.events == sse.events + tail.events


async def test_log_probabilities_are_caught_up_with_too(world: World) -> None:
    engine = world.engines[0]
    sse = await break_off(world, engine, 3, logprobs=True, top_logprobs=1)
    engine.allow(3)
    await asyncio.sleep(0.02)
    await world.start_gateway()
    engine.allow(None)
    whole = await world.events("GET", f"/v1/streams/{sse.headers['X-Stream-Id']}")
    rows = [c["logprobs"]["content"][0] for chunk in whole.chunks for c in chunk["choices"] if c["logprobs"]]
    assert len(rows) == 12
    assert all(row["logprob"] == -0.5 for row in rows)


async def test_everything_killed_a_stored_stream_goes_on_at_a_new_engine(world: World) -> None:
    engine = world.engines[0]
    want = await world.events("POST", "/v1/chat/completions", chat())
    asked_at = time.monotonic()
    sse = await break_off(world, engine, 5, session_id="s-1")
    await engine.kill()
    await asyncio.sleep(0.1)  # nothing runs
    await world.start_gateway()
    fresh = await world.engine("e0", 2)
    got = await world.events("GET", f"/v1/streams/{sse.headers['X-Stream-Id']}")
    (recovery,) = got.concordia["recoveries"]
    lost = {"engine": "e0", "to_engine": "e0", "reason": "lost with its gateway", "position": 23 + 5}
    assert lost.items() <= recovery.items()
    assert 100.0 <= recovery["detect_ms"] < recovery["gap_ms"] <= (time.monotonic() - asked_at) * 1000 + 10.0
    assert sum(recovery[f"{part}_ms"] for part in PARTS) == pytest.approx(recovery["gap_ms"], abs=0.1)
    assert got.text == want.text
    assert got.events[:6] == sse.events
    assert fresh.submits[0].epoch > engine.submits[-1].epoch
    session = await world.get("/v1/sessions/s-1")
    assert session["turns"] == 1
    assert session["tokens"] == len(engine.submits[-1].tokens) // 4 + 12


async def test_timing_tells_of_the_first_start_though_everything_was_killed_in_its_prefill(world: World) -> None:
    first = world.engines[0]
    first.allow(0)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(store=True)))
    await world.until(lambda: has_submits(first))
    stream, epoch = first.submits[0].stream, first.submits[0].epoch
    first.send(m.Started(stream, epoch, "restored", "", {"disk": 5}, 18, 5, 11.0, 22.0))
    await world.until(lambda: has_begun(world))
    await world.kill_gateway()
    await task
    await first.kill()
    await world.start_gateway()
    second = await world.engine("e0", 2, budget=0)
    await world.until(lambda: has_submits(second))
    second.send(m.Forced(stream, second.submits[0].epoch, 0, 333.0))
    second.allow(None)
    got = await world.events("GET", f"/v1/streams/{stream}")
    assert got.finish_reason == "length"
    timing = got.concordia["timing"]
    assert timing["wait_ms"] >= 11.0, "the engine's, and how long it waited at the gateway"
    assert (timing["restore_ms"], timing["prefill_ms"]) == (22.0, 0.0)
    assert [(r["position"], r["reason"]) for r in got.concordia["recoveries"]] == [(23, "lost with its gateway")]


async def test_each_loss_is_told_though_everything_was_killed_before_the_next_token(world: World) -> None:
    """e0 dies, e1 is to go on; everything is killed; e0 is to go on, its gateway is killed alone; that engine goes on."""
    engine, other = world.engines[0], await world.engine("e1", budget=0)
    sse = await break_off_after(world, engine, other)
    await other.kill()
    await world.start_gateway()
    third = await world.engine("e0", 2, budget=0)
    await world.until(lambda: has_submits(third))
    await world.kill_gateway()
    await world.start_gateway()
    third.allow(None)
    got = await world.events("GET", f"/v1/streams/{sse.headers['X-Stream-Id']}")
    fields = ("engine", "to_engine", "reason", "position", "cut_short")
    told = [tuple(recovery[field] for field in fields) for recovery in got.concordia["recoveries"]]
    assert told == [("e0", "e1", "killed", 28, True), ("e1", "e0", "lost with its gateway", 28, False)]
    assert all(r["gap_ms"] > 0 and min(r[f"{part}_ms"] for part in PARTS) >= 0 for r in got.concordia["recoveries"])
    assert len(third.submits) == 1


async def break_off_after(world: World, engine: FakeEngine, other: FakeEngine):  # type: ignore[no-untyped-def]
    """A stream that lost its engine after five tokens, and its gateway once another engine had it."""
    engine.allow(5)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(store=True)))

    async def five() -> bool:
        live = (await world.get("/v1/streams"))["data"]
        return bool(live) and live[0]["delivered_tokens"] >= 5

    await world.until(five)
    await engine.kill()
    await world.until(lambda: has_submits(other))
    await world.kill_gateway()
    return await task


async def has_begun(world: World) -> bool:
    return (await world.get("/v1/streams"))["data"][0]["state"] == "live"


async def test_engine_works_under_an_epoch_that_is_no_longer_ours(world: World) -> None:
    """The stream was submitted again elsewhere before the old engine attached: that one is told to stop."""
    engine = world.engines[0]
    sse = await break_off(world, engine, 5, store=True)
    del world.host.engines["e0"]
    await world.start_gateway()
    other = await world.engine("e1", budget=2)
    await world.until(lambda: has_submits(other))
    world.host.up(engine)
    await world.until(lambda: has_cancels(engine))
    assert engine.cancels[0].epoch == engine.submits[0].epoch
    other.allow(None)
    got = await world.events("GET", f"/v1/streams/{sse.headers['X-Stream-Id']}")
    assert got.finish_reason == "length"


async def has_submits(engine: FakeEngine) -> bool:
    return bool(engine.submits)


async def has_status(world: World, status: str) -> bool:
    return bool((await world.get("/health"))["status"] == status)


async def has_cancels(engine: FakeEngine) -> bool:
    return bool(engine.cancels)


async def test_anonymous_stream_waits_for_its_client_only_so_long(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world(resume_grace_s=0.1)
    engine = await world.engine("e0")
    sse = await break_off(world, engine, 3)
    await world.start_gateway()
    got = await world.until(lambda: finished(world, sse.headers["X-Stream-Id"]))
    assert got["concordia"]["end"] == "expired"
    assert engine.cancels


async def finished(world: World, stream_id: str):  # type: ignore[no-untyped-def]
    view = await world.get(f"/v1/streams/{stream_id}?format=json")
    return view if view["stream"]["state"] == "finished" else None


async def test_finished_streams_are_read_back_byte_for_byte(world: World) -> None:
    sse = await world.events(
        "POST", "/v1/chat/completions", chat(stream_options={"include_usage": True}, logprobs=True)
    )
    await world.kill_gateway()
    await world.start_gateway()
    again = await world.events("GET", f"/v1/streams/{sse.headers['X-Stream-Id']}")
    assert again.events == sse.events


async def test_drain_lets_answers_end_and_admits_nothing(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world(drain_s=60.0)
    engine = await world.engine("e0", budget=3)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat()))
    await world.until(lambda: has_submits(engine))
    ending = asyncio.create_task(world.end_gateway())
    await world.until(lambda: has_status(world, "draining"))
    status, _, answer = await world.post("/v1/chat/completions", chat(stream=False))
    assert (status, answer["error"]["code"]) == (503, "draining")
    engine.allow(None)
    assert (await task).finish_reason == "length"
    await asyncio.wait_for(ending, 60)


async def test_drain_is_bounded_and_the_stream_goes_on_in_the_next_process(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world(drain_s=0.1)
    engine = await world.engine("e0", budget=3)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat()))
    await world.until(lambda: delivered(world, 3))
    await asyncio.wait_for(world.end_gateway(), 60)
    sse = await task
    assert sse.finish_reason is None
    await world.start_gateway()
    engine.allow(None)
    rest = await world.events("GET", f"/v1/streams/{sse.headers['X-Stream-Id']}", params={"from": str(sse.ids[-1])})
    assert rest.finish_reason == "length"
    assert (sse.ids + rest.ids) == list(range(15))


async def test_end_that_was_only_in_the_tokens_record_is_drawn_from_it(world: World) -> None:
    """Its tokens record is in the journal, its end record is not: the new process draws the same end from it."""
    engine = world.engines[0]
    sse = await world.events("POST", "/v1/chat/completions", chat(store=True))
    await world.kill_gateway()
    path = world.config.paths.journal_dir / f"{sse.headers['X-Stream-Id']}.journal"
    data = path.read_bytes()
    ends = [end for record, end in j.read_records(data) if not isinstance(record, j.End)]
    path.write_bytes(data[: ends[-1]])
    await world.start_gateway()
    again = await world.events("GET", f"/v1/streams/{sse.headers['X-Stream-Id']}")
    assert again.events == sse.events
    assert len(engine.submits) == 1
    assert json.loads(again.events[-2][1])["concordia"]["end"] == "length"
    tokens = (await world.get(f"/v1/streams/{sse.headers['X-Stream-Id']}?format=json"))["stream"]["tokens"]
    assert tokens == [token_at(7, 23 + k) for k in range(12)]


async def test_a_session_is_what_its_journals_say_though_its_record_was_not_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the moment between a journal and the table of sessions: a turn ended, and a session began with two choices."""
    engine, real, written, killed = world.engines[0], TableFile.write, set[bytes](), False

    def write(file: TableFile, changes: list[Change]) -> None:
        if killed:
            raise lmdb.DiskError("killed before")
        real(file, changes)
        written.update(key for _, key, _ in changes)

    async def is_written() -> bool:
        return b"old" in written

    with monkeypatch.context() as patch:
        patch.setattr(TableFile, "write", write)
        engine.allow(5)
        task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(session_id="old")))
        old = await world.until(lambda: delivered(world, 5))
        await world.until(is_written)
        killed = True
        engine.allow(None)
        await task
        engine.budget = 0
        task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(session_id="new", n=2)))
        await world.until(lambda: delivered(world, 0, 2))
        await world.kill_gateway()
        await task
    await world.start_gateway()
    row = await world.get("/v1/sessions/old")
    assert (row["turns"], row["tokens"], row["streams"]) == (1, 23 + 12, old), "of the turn that ended last"
    row = await world.get("/v1/sessions/new")
    assert (row["state"], row["turns"], len(row["live_streams"])) == ("live", 1, 2)
    engine.allow(None)
    await world.until(lambda: delivered(world, 0, 0))
    assert (await world.get("/v1/sessions/new"))["tokens"] == 23 + 12
    await world.kill_gateway()
    await world.start_gateway()
    assert [(r["id"], r["turns"]) for r in (await world.get("/v1/sessions"))["data"]] == [("new", 1), ("old", 1)]


async def test_a_table_of_sessions_that_was_damaged_is_made_anew_from_the_journals(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the gateway that runs, which ends; the next one sets it aside, and reads of all turns in the journals."""
    for name in ("old", "new", "old"):
        await world.events("POST", "/v1/chat/completions", chat(session_id=name))
    await world.post("/v1/sessions/new/fork", {"session_id": "fork"})
    before = {row["id"]: row for row in (await world.get("/v1/sessions"))["data"]}
    tokens = (await world.get("/v1/sessions/old?tokens=1"))["token_ids"]

    def damaged(file: TableFile, changes: list[Change]) -> None:
        raise lmdb.CorruptedError("Located page was wrong type")

    with monkeypatch.context() as patch:
        patch.setattr(TableFile, "write", damaged)
        await world.post("/v1/sessions/new/fork", {"session_id": "other"})
        with pytest.raises(lmdb.CorruptedError):
            await world.ended()
    data = world.config.paths.sessions / "data.mdb"
    data.write_bytes(b"x" * data.stat().st_size)
    for _ in range(2):  # the second one finds a table that is whole
        await world.start_gateway()
        (row,) = (await world.get("/health"))["degraded"]
        assert row["state"] == "sessions_damaged" and "damaged-0.mdb" in row["reason"]
        after = {row["id"]: row for row in (await world.get("/v1/sessions"))["data"]}
        assert {name: (row["turns"], row["tokens"]) for name, row in after.items()} == {
            name: (row["turns"], row["tokens"]) for name, row in before.items() if name != "fork"
        }
        assert (await world.get("/v1/sessions/old?tokens=1"))["token_ids"] == tokens
        await world.kill_gateway()
    assert not (world.config.paths.sessions / "rebuild").exists()


async def test_a_damaged_record_of_a_session_is_made_anew_from_all_of_its_journals(world: World) -> None:
    """Also from those that were closed long before the gateway died."""
    for _ in range(3):
        await world.events("POST", "/v1/chat/completions", chat(session_id="old"))
    before = await world.get("/v1/sessions/old?tokens=1")
    paths = world.config.paths
    for path in paths.journal_dir.glob("*.journal"):
        os.utime(path, (time.time() - 3600,) * 2)
    await world.events("POST", "/v1/chat/completions", chat(session_id="new"))
    await world.kill_gateway()
    with lmdb.open(str(paths.sessions), max_dbs=2) as table, table.begin(write=True) as changing:
        records = table.open_db(b"records", changing)
        flipped = bytearray(changing.get(b"old", db=records))
        flipped[-1] ^= 1
        changing.put(b"old", bytes(flipped), db=records)
    await world.start_gateway()
    after = await world.get("/v1/sessions/old?tokens=1")
    assert after["turns"] == 3
    assert {name: after[name] for name in ("streams", "token_ids")} == {
        name: before[name] for name in ("streams", "token_ids")
    }


async def delivered(world: World, tokens: int, streams: int = 1) -> list[str] | bool:
    live = (await world.get("/v1/streams"))["data"]
    there = len(live) == streams and all(row["delivered_tokens"] >= tokens for row in live)
    return there and ([row["id"] for row in live] or True)


async def test_an_answer_that_was_complete_ends_as_it_would_have(world: World) -> None:
    """Killed between its last token, which completed a stop string, and its end."""
    await world.kill_gateway()
    name = "a" * 24
    journal = j.Journal(world.config.paths.journal_dir / f"{name}.journal")
    sampling = m.Sampling(seed=3)
    journal.append(j.StreamSpec(name, "text", 1, "tiny", m.pack_tokens([10]), sampling, ["b"], [1], 20))
    journal.append(j.Placed(1, "e0", 1), j.Tokens(1, m.pack_tokens([4 + byte for byte in b"ab"])))
    journal.release()
    await world.start_gateway()
    got = await world.events("GET", f"/v1/streams/{name}")
    assert (got.text, got.finish_reason, got.concordia["end"]) == ("a", "stop", "stop_string")
