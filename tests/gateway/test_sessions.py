"""A session's positions are those of the list that it is now: durable <= captured <= tokens, whatever turns came and went."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import msgspec
import pytest
from structlog.testing import capture_logs

from engine.messages import pack_tokens
from gateway import table_file
from gateway.sealing import Sealing
from gateway.sessions import SessionFile, SessionRecord, SessionTable, _open_tokens, _read_record, checked, whole
from gateway.table_file import TableFile
from tiers.errors import BadBlock


@pytest.fixture
def table(tmp_path: Path) -> Iterator[SessionTable]:
    table = SessionTable(tmp_path)
    yield table
    table.close()


def turn(table: SessionTable, name: str, tokens: list[int]) -> Any:
    """A stream of session "s" that has begun; its list is whole already."""
    spec = SimpleNamespace(session="s", namespace="default")
    stream = SimpleNamespace(id=name, spec=spec, tokens=tokens, token_count=8, captured=0, end=None)
    table.begin_turn(stream)
    return stream


def end(table: SessionTable, stream: Any) -> None:
    stream.end = "stop"
    table.end_turn(stream)


def positions(table: SessionTable) -> tuple[int, int, int]:
    record = table.get("s")
    assert record is not None
    return record.token_count, record.captured, record.durable


def test_of_two_turns_at_once_the_session_is_the_one_that_ended_last(table: SessionTable) -> None:
    longer, shorter = turn(table, "a", list(range(86))), turn(table, "b", list(range(500, 576)))
    longer.captured, shorter.captured = 85, 75
    end(table, longer)
    table.progressed(longer, 85)
    assert positions(table) == (86, 85, 85)
    end(table, shorter)
    assert positions(table) == (76, 75, 0), "its list shares nothing with the other"
    table.captured(longer)
    table.progressed(longer, 85)
    assert positions(table) == (76, 75, 0), "what is heard of the other's list is not about this one"
    table.progressed(shorter, 75)
    assert positions(table) == (76, 75, 75)


def test_a_shorter_turn_keeps_what_its_list_shares(table: SessionTable) -> None:
    first = turn(table, "a", list(range(62)))
    first.captured = 61
    end(table, first)
    table.progressed(first, 61)
    second = turn(table, "b", [*range(40), *range(900, 908)])
    assert table.positions(second) == (40, 40), "said while it is live, before anybody has heard of it"
    second.captured = 47
    assert table.positions(second) == (47, 40)
    end(table, second)
    assert positions(table) == (48, 47, 40)


def test_what_the_store_has_is_captured_too(table: SessionTable) -> None:
    table.adopt(SessionRecord("s", 1.0, 1.0, token_count=47, captured=32, durable=32), pack_tokens(list(range(47))))
    table.found_stored("s", 41)
    assert positions(table) == (47, 41, 41)
    table.found_stored("s", 16)
    assert positions(table) == (47, 16, 16), "the lanes were drained before it could be evicted"


def test_parked_is_never_further_than_its_list(table: SessionTable) -> None:
    table.adopt(SessionRecord("s", 1.0, 1.0, token_count=76), pack_tokens(list(range(76))))
    table.park("s", 85, 85)
    assert positions(table) == (76, 76, 76)


@pytest.mark.parametrize(("written", "read"), [((38, 35, 38), (38, 38, 38)), ((76, 85, 61), (76, 76, 61))])
def test_positions_of_an_older_version_are_put_right(
    tmp_path: Path, written: tuple[int, int, int], read: tuple[int, int, int]
) -> None:
    table = SessionTable(tmp_path)
    count, captured, durable = written
    table.adopt(
        SessionRecord("s", 1.0, 1.0, token_count=count, captured=captured, durable=durable),
        pack_tokens(list(range(count))),
    )
    table.close()
    file = SessionFile(tmp_path)
    (record,) = file.all()
    assert (record.token_count, record.captured, record.durable) == read
    file.close()
    again = SessionTable(tmp_path)
    assert positions(again) == read
    again.close()


@pytest.mark.parametrize("how", ["file", "lock file", "directory", "moved", "replaced"])
def test_a_table_that_was_deleted_is_written_anew(tmp_path: Path, how: str) -> None:
    directory = tmp_path / "data" / "sessions"
    table = SessionTable(directory)
    table.adopt(SessionRecord("a", 1.0, 1.0, token_count=4), pack_tokens([1, 2, 3, 4]))
    table.close()
    file = TableFile(directory)
    if how == "directory":
        shutil.rmtree(tmp_path / "data")
    elif how == "moved":
        directory.rename(tmp_path / "elsewhere")
    elif how == "replaced":
        shutil.copyfile(directory / "data.mdb", tmp_path / "copy")
        (tmp_path / "copy").replace(directory / "data.mdb")
    else:
        (directory / ("lock.mdb" if how == "lock file" else "data.mdb")).unlink()
    file.write([("records", b"b", b"x"), ("tokens", b"b", b"y")])
    with capture_logs() as logs:
        file.look()
        file.look()
    assert [entry["event"] for entry in logs] == ([] if how == "lock file" else ["sessions.file_gone"])
    assert file.read("tokens", b"b") == (b"b", b"y"), "it goes on in the new one"
    file.write([("records", b"b", None), ("tokens", b"b", None)])
    file.close()
    beside = SessionFile(directory)
    assert beside.tokens("a") == pack_tokens([1, 2, 3, 4]) and [r.session for r in beside.all()] == ["a"]
    beside.close()
    assert {path.name for path in directory.iterdir()} == {"data.mdb", "lock.mdb"}


def test_a_table_that_the_disk_refuses_goes_on_and_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TableFile(tmp_path / "sessions")
    file.write([("tokens", b"a", b"1")])
    shutil.rmtree(tmp_path / "sessions")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(TableFile, "_copy", refuse)
        with capture_logs() as logs:
            file.look()
    assert [entry["event"] for entry in logs] == ["sessions.file_gone", "sessions.not_rewritten"]
    assert "No space left" in file.trouble
    file.write([("tokens", b"b", b"2")])
    file.look()
    file.look()
    assert not file.trouble
    file.close()
    again = TableFile(tmp_path / "sessions")
    assert list(again.items("tokens")) == [(b"a", b"1"), (b"b", b"2")]
    again.close()


RECORD, LIST = SessionRecord("s", 1.0, 1.0, token_count=4, turns=1000), pack_tokens([1, 2, 3, 4])


def test_every_flipped_bit_of_a_value_is_found() -> None:
    for database, value in (("records", msgspec.msgpack.encode(RECORD)), ("tokens", LIST)):
        good = checked(value)
        assert whole(good) == value
        for bit in range(8 * len(good)):
            flipped = bytearray(good)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises((BadBlock, msgspec.MsgspecError)):
                if database == "records":
                    _read_record(Sealing(), b"s", bytes(flipped))
                else:
                    _open_tokens(lambda *_: (b"s", bytes(flipped)), Sealing(), RECORD)  # noqa: B023


@pytest.mark.parametrize("database", ["records", "tokens"])
def test_a_value_that_was_changed_is_named_and_one_of_an_older_version_is_read(tmp_path: Path, database: str) -> None:
    table = SessionTable(tmp_path)
    table.adopt(RECORD, LIST)
    table.close()
    older = {"records": msgspec.msgpack.encode(RECORD), "tokens": LIST}[database]
    for value in (older, checked(older)[:-1] + b"x"):
        file = TableFile(tmp_path)
        file.write([(database, b"s", value)])
        file.close()
        beside = SessionFile(tmp_path)
        beside.read_lists()
        bad = value is not older
        assert [*beside.bad, *beside.bad_lists] == ["s"] * bad
        assert bad or beside.tokens("s") == LIST
        beside.close()
    again = SessionTable(tmp_path)
    assert not again.tokens("s")
    assert (again.get("s") is None) == (database == "records")
    again.close()


def leaf_keys(page: bytes) -> list[bytes]:
    """Of a page of LMDB's that is a leaf. Source: lmdb's mdb.c, MDB_page and MDB_node."""
    if page[10] != 2:
        return []
    nodes = [int.from_bytes(page[at : at + 2], "little") for at in range(16, int.from_bytes(page[12:14], "little"), 2)]
    return [page[at + 8 : at + 8 + int.from_bytes(page[at + 6 : at + 8], "little")] for at in nodes]


@pytest.mark.parametrize("how", ["cut", "no database", "a page"])
def test_a_table_that_can_not_be_read_is_set_aside_and_what_can_be_is_saved(tmp_path: Path, how: str) -> None:
    table = SessionTable(tmp_path)
    for number in range(100):
        table.adopt(SessionRecord(f"s{number}", 1.0, 1.0, token_count=4), LIST)
    table.close()
    data = tmp_path / "data.mdb"
    raw = data.read_bytes()
    pages = [raw[at : at + 4096] for at in range(0, len(raw), 4096)]
    some = b"".join(b"x" * 4096 if b"s50" in leaf_keys(page) else page for page in pages)
    data.write_bytes({"cut": raw[: 3 * 4096], "no database": b"x" * 20_000, "a page": some}[how])
    with capture_logs() as logs:
        again = SessionTable(tmp_path)
    assert [entry["event"] for entry in logs] == ["sessions.set_aside"]
    assert (how == "a page") <= len(again.all()) < 100
    assert again.to_rebuild and [path.name for path in again.damaged] == ["damaged-0.mdb"]
    again.adopt(RECORD, LIST)
    again.close()
    last = SessionTable(tmp_path)
    assert last.to_rebuild, "nobody has read the journals"
    assert not last.read_back([]) and last.tokens("s") == LIST
    last.close()
    (tmp_path / "damaged-0.mdb").unlink()
    whole = SessionTable(tmp_path)
    assert not whole.to_rebuild and not whole.damaged
    whole.close()


async def test_a_mark_that_can_not_be_removed_ends_no_writer(tmp_path: Path) -> None:
    (tmp_path / "rebuild").mkdir()
    table = SessionTable(tmp_path)
    table.read_back([])
    assert await table.written(5) == ""
    table.adopt(RECORD, LIST)
    table.close()
    again = SessionTable(tmp_path)
    assert again.tokens("s") == LIST
    again.close()


def test_a_table_whose_environment_is_done_for_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the disk failed at a root page LMDB takes nothing more, until it is opened anew."""
    monkeypatch.setattr("gateway.sessions.LOOK_S", 0.01)
    table = SessionTable(tmp_path)
    real, first = table._file.write, table._file._environment

    def write(changes: Any) -> None:
        if table._file._environment is first:
            raise lmdb.PanicError("Update of meta page failed")
        real(changes)

    monkeypatch.setattr(table._file, "write", write)
    table.adopt(RECORD, LIST)
    table.close()
    beside = SessionFile(tmp_path)
    assert beside.tokens("s") == LIST
    beside.close()


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", ["lock.mdb", "data.mdb"])
def test_a_table_without_room_for_its_lock_file_is_read_and_opened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = TableFile(tmp_path)
    file.write([("tokens", b"a", b"1")])
    (tmp_path / name).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(table_file, "allocate_lock", no_room)
        file.look()
        assert file.read("tokens", b"a") == (b"a", b"1")
    file.look()
    file.write([("tokens", b"b", b"2")])
    file.close()
    again = TableFile(tmp_path)
    assert list(again.items("tokens")) == [(b"a", b"1"), (b"b", b"2")]
    again.close()


def test_a_table_that_could_not_be_opened_again_is_once_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TableFile(tmp_path)
    file.write([("tokens", b"a", b"1")])
    (tmp_path / "lock.mdb").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(table_file.lmdb, "open", no_room)
        file.look()
    file.look()
    assert file.read("tokens", b"a") == (b"a", b"1")
    file.close()


async def test_what_the_disk_refused_is_written_when_it_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that was made meanwhile is there after a kill, and one that was deleted is gone."""
    monkeypatch.setattr("gateway.sessions.LOOK_S", 0.01)
    table = SessionTable(tmp_path)
    for name in ("a", "b"):
        table.adopt(SessionRecord(name, 1.0, 1.0, token_count=1), pack_tokens([1]))
    assert not await table.written(60)

    def refuse(*_: object) -> None:
        raise lmdb.DiskError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(table._file, "write", refuse)
        table.remove("a")
        table.adopt(SessionRecord("b", 1.0, 1.0, token_count=2), pack_tokens([2, 2]))
        table.adopt(SessionRecord("c", 1.0, 1.0, token_count=1), pack_tokens([3]))
        assert "No space left" in await table.written(60)
        assert table.tokens("c") == pack_tokens([3])
    assert not await table.written(60)
    assert {key for key, _ in table._file.items("records")} == {b"b", b"c"}, "before anybody closes it"
    table.close()
    file = SessionFile(tmp_path)
    assert [file.tokens(name) for name in ("b", "c")] == [pack_tokens([2, 2]), pack_tokens([3])]
    file.close()
