"""What the gateway keeps of a tenant with a key: nothing of it is readable on the disk, and everything goes on as ever."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from engine.messages import pack_tokens
from gateway import journal as j
from gateway.choices import GroupTable
from gateway.sealing import Sealing
from gateway.sessions import SessionFile, SessionRecord, SessionTable
from gateway.streams import StreamTable, new_stream_id
from gateway.table_file import DATABASES
from gateway.tokenizer import TokenIdText
from tests.gateway.conftest import World, chat
from tests.gateway.test_journal import records, spec
from tiers.keys import KEYS_VARIABLE, Keyring, Locked

KEY = bytes.fromhex("11" * 32)
SEALED = Sealing(Keyring({"default": KEY}))
TOKENS = list(range(1000, 1300))


def on_disk(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


# ---------------------------------------------------------------- journals


def test_records_are_sealed_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    journal = j.Journal(path, seal=SEALED.of_journal("default", "a"))
    journal.append(*records())
    journal.close()
    data = path.read_bytes()
    assert [record for record, _ in j.read_records(data, SEALED.opens_journal("a"))] == records()
    assert j.is_closed(path) and pack_tokens([10, 11]) not in data and b"tiny" not in data
    with pytest.raises(Locked):
        list(j.read_records(data, Sealing(Keyring({"default": bytes(32)})).opens_journal("a")))
    with pytest.raises(Locked):
        list(j.read_records(data, Sealing().opens_journal("a")))
    assert list(j.read_records(data, SEALED.opens_journal("b"))) == [], "another stream's file isn't taken for it"


def test_every_flip_ends_the_journal_before_it(tmp_path: Path) -> None:
    frames = [j.encode(record, SEALED.of_journal("default", "a")) for record in records()]
    data = b"".join(frames)
    ends = [end for _, end in j.read_records(data, SEALED.opens_journal("a"))]
    for at in range(0, len(data), 3):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        got = [end for _, end in j.read_records(bytes(bad), SEALED.opens_journal("a"))]
        assert got == [end for end in ends if end <= at]


def test_tenants_without_a_key_are_written_as_ever() -> None:
    assert j.encode(records()[1], SEALED.of_journal("other", "a")) == j.encode(records()[1])


def test_a_common_key_is_found_by_the_namespace_in_the_record() -> None:
    data = j.encode(records()[0], Sealing(Keyring({"*": KEY})).of_journal("anybody", "a"))
    fresh = Sealing(Keyring({"*": KEY}))
    assert [record for record, _ in j.read_records(data, fresh.opens_journal("a"))] == records()[:1]


# ---------------------------------------------------------------- sessions


def test_sessions_are_sealed_forked_removed_and_read_by_commands(tmp_path: Path) -> None:
    table = SessionTable(tmp_path, SEALED)
    table.adopt(SessionRecord("the-session-name", 1.0, 1.0, token_count=300), pack_tokens(TOKENS))
    table.fork("the-session-name", "the-fork-name", table.tokens("the-session-name"), 200)
    assert table.tokens("the-fork-name") == pack_tokens(TOKENS[:200])
    table.close()
    data = on_disk(tmp_path)
    for what in (pack_tokens(TOKENS[:8]), b"the-session-name", b"the-fork-name"):
        assert what not in data
    file = SessionFile(tmp_path, sealing=SEALED)
    assert {record.session for record in file.all()} == {"the-session-name", "the-fork-name"} and file.locked == 0
    assert file.tokens("the-fork-name") == pack_tokens(TOKENS[:200])
    assert file.shared_with_relatives("the-fork-name") == 200
    file.close()
    again = SessionTable(tmp_path, SEALED)
    again.remove("the-fork-name")
    assert again.tokens("the-session-name") == pack_tokens(TOKENS)
    again.remove("the-session-name")
    again.close()
    empty = SessionTable(tmp_path, SEALED)
    assert [list(empty._file.items(name)) for name in DATABASES] == [[], []]
    empty.close()


def test_without_the_key_sessions_are_not_listed_and_not_lost(tmp_path: Path) -> None:
    table = SessionTable(tmp_path, SEALED)
    table.adopt(SessionRecord("a", 1.0, 1.0, token_count=300), pack_tokens(TOKENS))
    table.close()
    without = SessionTable(tmp_path)
    assert without.all() == []
    without.close()
    file = SessionFile(tmp_path)
    assert file.all() == [] and file.locked == 1 and file.get("a") is None
    file.close()
    keyed = SessionTable(tmp_path, SEALED)
    assert keyed.tokens("a") == pack_tokens(TOKENS)
    keyed.close()


async def test_sessions_written_before_there_was_a_key_are_sealed_when_the_gateway_starts(tmp_path: Path) -> None:
    table = SessionTable(tmp_path)
    table.adopt(SessionRecord("the-session-name", 1.0, 1.0, token_count=300), pack_tokens(TOKENS))
    table.fork("the-session-name", "the-fork-name", table.tokens("the-session-name"), 200)
    table.adopt(SessionRecord("another's", 1.0, 1.0, namespace="other", token_count=3), pack_tokens([1, 2, 3]))
    table.close()
    keyed = SessionTable(tmp_path, SEALED)
    assert not await keyed.written(60)
    data, whats = on_disk(tmp_path), (pack_tokens(TOKENS[:8]), b"the-session-name", b"the-fork-name")
    assert [what for what in whats if what in data] == [], "while it serves"
    assert b"another's" in data
    assert keyed.tokens("the-session-name") == pack_tokens(TOKENS)
    keyed.remove("the-session-name")
    keyed.close()
    again = SessionTable(tmp_path, SEALED)
    assert {record.session for record in again.all()} == {"the-fork-name", "another's"}
    assert again.tokens("the-fork-name") == pack_tokens(TOKENS[:200])
    assert again.tokens("another's") == pack_tokens([1, 2, 3])
    again.close()


async def test_journals_written_before_there_was_a_key_are_sealed_when_the_gateway_starts(tmp_path: Path) -> None:
    table = StreamTable(tmp_path, TokenIdText())
    live, ended, other = (table.open(spec(new_stream_id())) for _ in range(3))
    for stream in (live, ended, other):
        stream.record(j.Tokens(2, pack_tokens([1234567, 7654321])))
    for stream in (ended, other):
        stream.record(j.End("length", "length", 1.0))
        table.retire(stream)
    group = j.Journal(tmp_path / ("f" * 24 + ".group"))
    group.append(j.GroupSpec("f" * 24, [ended.id], 1, session="the-session-name"))
    group.close()
    table.close()
    damaged = bytearray((tmp_path / f"{other.id}.journal").read_bytes())
    damaged[-40] ^= 1
    (tmp_path / f"{other.id}.journal").write_bytes(damaged)
    path = tmp_path / f"{ended.id}.journal"
    for old in (path, tmp_path / f"{other.id}.journal"):
        os.utime(old, (1000, 1000))

    keyed = StreamTable(tmp_path, TokenIdText(), sealing=SEALED)
    (back,) = keyed.load_live()
    GroupTable(tmp_path, keyed, sealing=SEALED).load()
    await keyed.seal_late()
    back.record(j.Tokens(4, pack_tokens([1111111])))
    assert (tmp_path / f"{other.id}.journal").read_bytes() == damaged, "what can't be read to its end stays as it is"
    (tmp_path / f"{other.id}.journal").unlink()
    data = on_disk(tmp_path)
    assert pack_tokens([1234567]) not in data and pack_tokens([1111111]) not in data and b"the-session-name" not in data
    assert path.stat().st_mtime == 1000, "it expires when it would have"
    keyed.close()
    again = StreamTable(tmp_path, TokenIdText(), sealing=SEALED)
    assert [stream.tokens for stream in again.load_live()] == [[10, 11, 1234567, 7654321, 1111111]]
    whole = await again.fetch(ended.id)
    assert whole is not None and whole.tokens == ended.tokens and whole.end == ended.end
    groups = GroupTable(tmp_path, again, sealing=SEALED)
    assert await groups.fetch("f" * 24) is not None
    again.close()


async def test_without_the_key_a_group_that_has_not_ended_is_never_swept(tmp_path: Path) -> None:
    table = StreamTable(tmp_path, TokenIdText(), sealing=SEALED)
    stream = table.open(spec(new_stream_id()))
    GroupTable(tmp_path, table, sealing=SEALED).open(j.GroupSpec("f" * 24, [stream.id], 1), [stream])
    table.close()
    without = StreamTable(tmp_path, TokenIdText())
    groups = GroupTable(tmp_path, without)
    groups.load()
    groups.sweep(-10)
    without.close()
    keyed = StreamTable(tmp_path, TokenIdText(), sealing=SEALED)
    assert [back.id for back in keyed.load_live()] == [stream.id]
    groups = GroupTable(tmp_path, keyed, sealing=SEALED)
    groups.load()
    assert list(groups.live) == ["f" * 24]
    groups.close()
    keyed.close()


# ---------------------------------------------------------------- a gateway


async def test_a_gateway_with_a_key_resumes_after_a_kill_and_shows_nothing_on_disk(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, f"default = {KEY.hex()}")
    await world.kill_gateway()
    await world.start_gateway()
    engine = world.engines[0]
    body = chat(messages=[{"role": "user", "content": "a secret question"}], store=True)
    whole = await world.events("POST", "/v1/chat/completions", body, headers={"X-Session-Id": "the-session-name"})
    engine.allow(5)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", body))

    async def there() -> bool:
        live = (await world.get("/v1/streams"))["data"]
        return bool(live) and live[0]["delivered_tokens"] >= 5

    await world.until(there)
    await world.kill_gateway()
    cut = await task
    prompt = pack_tokens([4 + byte for byte in b"a secret question"])
    data = on_disk(world.config.paths.data_dir)
    assert prompt not in data and b"the-session-name" not in data
    monkeypatch.delenv(KEYS_VARIABLE)
    await world.start_gateway()
    assert (await world.get("/v1/sessions"))["data"] == []
    async with world.http.get(f"/v1/streams/{cut.headers['X-Stream-Id']}") as response:
        assert response.status == 404
    await world.kill_gateway()
    monkeypatch.setenv(KEYS_VARIABLE, f"default = {KEY.hex()}")
    engine.allow(None)
    await world.start_gateway()
    stream = cut.headers["X-Stream-Id"]
    rest = await world.events("GET", f"/v1/streams/{stream}", headers={"Last-Event-ID": str(cut.ids[-1])})
    assert cut.ids + rest.ids == whole.ids, "it goes on where the client was"
    assert [row["id"] for row in (await world.get("/v1/sessions"))["data"]] == ["the-session-name"]
    again = await world.events("GET", f"/v1/streams/{whole.headers['X-Stream-Id']}")
    assert again.events == whole.events


async def test_several_choices_are_read_back_sealed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, f"* = {KEY.hex()}")
    await world.kill_gateway()
    await world.start_gateway()
    whole = await world.events("POST", "/v1/chat/completions", chat(store=True, n=3))
    await world.kill_gateway()
    await world.start_gateway()
    again = await world.events("GET", f"/v1/streams/{whole.headers['X-Stream-Id']}")
    assert again.events == whole.events
