"""Journals: torn and flipped tails, a disk that refuses, the mark of the end."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from engine.messages import Sampling, TokenLogprobs, pack_tokens
from gateway import journal as j
from gateway.choices import GroupTable
from gateway.durability import Durability
from gateway.journal_sync import JournalSync
from gateway.sessions import SessionTable
from gateway.streams import StreamTable, new_stream_id, parse_stream_id
from gateway.tokenizer import TokenIdText


def spec(stream: str = "0" * 24) -> j.StreamSpec:
    return j.StreamSpec(stream, "text", 1, "tiny", pack_tokens([10, 11]), Sampling(seed=3), [], [1], 20)


def records() -> list[j.Record]:
    return [
        spec(),
        j.Placed(1, "e0", 1),
        j.StartedRecord("new", "", {"device": 1}, 1, 0),
        j.Tokens(2, pack_tokens([12])),
        j.Recovery("e0", "killed", 3, "e1", gap_ms=12.5),
        j.Tokens(3, pack_tokens([13, 14]), "length", [TokenLogprobs(-0.1), TokenLogprobs(-0.2, [(5, -1.0)])]),
        j.End("length", "length", 2.0),
    ]


def write(path: Path) -> bytes:
    journal = j.Journal(path)
    journal.append(*records())
    journal.close()
    return path.read_bytes()


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    data = write(tmp_path / "a.journal")
    assert [record for record, _ in j.read_records(data)] == records()
    assert j.is_closed(tmp_path / "a.journal")


GOLDEN_PLACED = "1f0000000200434ad70a9f29ac90d8f283a565706f636801a6656e67696e65a26530ab696e6361726e6174696f6e02"
GOLDEN_CLOSED = "00000000ff00434a510140ff939aca1d"


def test_bytes_of_a_record_do_not_change() -> None:
    """Golden bytes: a journal outlives the version that wrote it."""
    frame = j.encode(j.Placed(1, "e0", 2))
    assert frame.hex() == GOLDEN_PLACED
    assert j.CLOSED.hex() == GOLDEN_CLOSED


def test_torn_at_every_byte_gives_the_whole_records_before(tmp_path: Path) -> None:
    data = write(tmp_path / "a.journal")
    ends = [end for _, end in j.read_records(data)]
    for size in range(len(data)):
        got = [end for _, end in j.read_records(data[:size])]
        assert got == [end for end in ends if end <= size]


def test_flipped_bit_ends_the_journal_there(tmp_path: Path) -> None:
    data = write(tmp_path / "a.journal")
    seed = 20261129
    print("seed", seed)
    draw = random.Random(seed)
    ends = [end for _, end in j.read_records(data)]
    for _ in range(300):
        at = draw.randrange(ends[-1])
        bad = bytearray(data)
        bad[at] ^= 1 << draw.randrange(8)
        assert [end for _, end in j.read_records(bytes(bad))] == [end for end in ends if end <= at]


def test_stream_goes_on_behind_a_torn_tail(tmp_path: Path) -> None:
    table = StreamTable(tmp_path, TokenIdText())
    stream = table.open(spec(new_stream_id()))
    stream.record(j.Tokens(2, pack_tokens([12])))
    stream.record(j.Tokens(3, pack_tokens([13])))
    table.close()
    path = tmp_path / f"{stream.id}.journal"
    path.write_bytes(path.read_bytes()[:-3])
    for _ in range(2):  # the tail is dropped once, then everything is whole
        again = StreamTable(tmp_path, TokenIdText())
        (back,) = again.load_live()
        assert back.tokens[:3] == [10, 11, 12]
        if back.token_count == 1:
            back.record(j.Tokens(3, pack_tokens([15])))
        assert back.tokens == [10, 11, 12, 15]
        again.close()


def test_journal_without_a_whole_first_record_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / ("1" * 24 + ".journal")).write_bytes(j.encode(spec())[:-1])
    table = StreamTable(tmp_path, TokenIdText())
    assert table.load_live() == []
    assert [path.suffix for path in tmp_path.iterdir()] == [".bad"]
    table.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_disk_that_refuses_stops_no_stream_and_gets_everything_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.pwrite
    refusing = True

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if refusing:
            if len(data) > 10:
                real(fd, data[:7], offset)  # a torn piece is left behind
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    table = StreamTable(tmp_path, TokenIdText())
    stream = table.open(spec(new_stream_id()))
    stream.record(j.Tokens(2, pack_tokens([12])))
    assert stream.tokens == [10, 11, 12]
    assert stream.journal is not None and stream.journal.backlog_bytes > 0
    refusing = False
    stream.record(j.Tokens(3, pack_tokens([13]), "length"))
    stream.record(j.End("length", "length", 1.0))
    table.retire(stream)
    assert stream.journal.backlog_bytes == 0
    path = tmp_path / f"{stream.id}.journal"
    kinds = [type(record).__name__ for record, _ in j.read_records(path.read_bytes())]
    assert kinds == ["StreamSpec", "Tokens", "Tokens", "End"]
    table.close()


def test_a_deleted_directory_is_made_again_by_the_next_stream(tmp_path: Path) -> None:
    directory = tmp_path / "data" / "journal"
    table = StreamTable(directory, TokenIdText())
    shutil.rmtree(tmp_path / "data")
    with capture_logs() as logs:
        streams = [table.open(spec(new_stream_id())) for _ in range(2)]
    assert [entry["event"] for entry in logs] == ["deliver.journal_directory_made"]
    assert table.journal_troubles() == []
    table.close()
    again = StreamTable(directory, TokenIdText())
    assert {stream.id for stream in again.load_live()} == {stream.id for stream in streams}
    again.close()


def lose(path: Path, how: str) -> None:
    if how == "file deleted":
        path.unlink()
    elif how == "replaced":
        shutil.copyfile(path, path.with_suffix(".old"))
        path.with_suffix(".old").replace(path)
    elif how == "directory moved":
        path.parent.rename(path.parent.with_name("elsewhere"))
    else:
        shutil.rmtree(path.parent.parent)


@pytest.mark.parametrize("how", ["file deleted", "replaced", "directory moved", "data directory deleted"])
@pytest.mark.parametrize("state", ["live", "ended", "read back"])
async def test_a_journal_that_is_lost_is_written_anew_with_all_that_was_in_it(
    tmp_path: Path, how: str, state: str
) -> None:
    directory = tmp_path / "data" / "journal"
    table = StreamTable(directory, TokenIdText())
    stream = table.open(spec(new_stream_id()))
    path = directory / f"{stream.id}.journal"
    stream.record(j.Placed(1, "e0", 1))
    if state == "read back":
        table.close()
        table = StreamTable(directory, TokenIdText())
        (stream,) = table.load_live()
    before = path.read_bytes()
    lose(path, how)
    stream.record(j.Tokens(2, pack_tokens([12])))
    if state == "ended":
        stream.record(j.End("stop", "stop", 1.0))
        table.retire(stream)
    with capture_logs() as logs:
        await table.look_for_files()
        await table.look_for_files()
    assert [entry["event"] for entry in logs].count("deliver.journals_written_anew") == 1
    data = path.read_bytes()
    assert data.startswith(before) and j.is_closed(path) == (state == "ended")
    if state != "ended":
        stream.record(j.Tokens(3, pack_tokens([13])))
    table.close()
    again = StreamTable(directory, TokenIdText())
    assert [stream.tokens for stream in again.load_live()] == ([] if state == "ended" else [[10, 11, 12, 13]])
    again.close()


async def test_a_lost_journal_that_the_disk_refuses_is_said_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = StreamTable(tmp_path / "journal", TokenIdText())
    stream = table.open(spec(new_stream_id()))
    shutil.rmtree(tmp_path / "journal")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(j, "_copy", refuse)
        await table.look_for_files()
        stream.record(j.Tokens(2, pack_tokens([12])))
        (trouble,) = table.journal_troubles()
        assert "deleted" in trouble and "No space left" in trouble
    await table.look_for_files()
    assert table.journal_troubles() == []
    table.close()
    assert [path.suffix for path in (tmp_path / "journal").iterdir()] == [".journal"]
    again = StreamTable(tmp_path / "journal", TokenIdText())
    assert [stream.tokens for stream in again.load_live()] == [[10, 11, 12]]
    again.close()


async def test_a_forgotten_journal_is_not_written_anew(tmp_path: Path) -> None:
    table = StreamTable(tmp_path, TokenIdText())
    stream = table.open(spec(new_stream_id()))
    stream.record(j.End("stop", "stop", 1.0))
    table.retire(stream)
    await table.forget([stream.id])
    await table.look_for_files()
    table.close()
    assert list(tmp_path.iterdir()) == []


async def test_journals_that_cannot_be_written_are_a_degraded_state_until_they_are(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    table, sessions, sync = StreamTable(directory, TokenIdText()), SessionTable(tmp_path / "s"), JournalSync(directory)
    durability = Durability(tmp_path / "no keeper", table, sessions, list, sync)
    directory.rmdir()
    directory.write_text("where the directory was")
    streams = [table.open(spec(new_stream_id())) for _ in range(2)]
    streams[0].record(j.End("stop", "stop", 1.0))
    table.retire(streams[0])
    await durability.look()
    (row,) = durability.rows()
    assert row["state"] == "journal_failing" and "2 (Not a directory)" in row["reason"]
    assert durability.of_session(3, 2, 4, [], "default") == "", "it keeps no state from where it should be"
    directory.unlink()
    await table.sweep(retention_s=60)
    await durability.look()
    assert durability.rows() == []
    assert sorted(path.stem for path in directory.iterdir()) == sorted(stream.id for stream in streams)
    table.close()
    sessions.close()
    sync.close()


async def test_sweep_deletes_what_ended_too_long_ago(tmp_path: Path) -> None:
    table = StreamTable(tmp_path, TokenIdText())
    old, live = table.open(spec(new_stream_id())), table.open(spec(new_stream_id()))
    old.record(j.End("stop", "stop", 1.0))
    table.retire(old)
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    unreadable = tmp_path / f"{'a' * 24}.journal"
    unreadable.write_bytes(b"no record")
    os.utime(unreadable, (1, 1))
    assert await table.fetch(unreadable.stem) is None
    await table.sweep(retention_s=60)
    assert unreadable.with_suffix(".bad").exists(), "somebody may want to look at it"
    await table.sweep(retention_s=-60)
    assert await table.fetch(old.id) is None
    assert await table.fetch(live.id) is live
    assert [path.stem for path in tmp_path.iterdir()] == [live.id]
    table.close()


def test_stream_id_is_taken_with_or_without_the_prefix_of_an_answer() -> None:
    stream_id = new_stream_id()
    assert (
        parse_stream_id(stream_id) == parse_stream_id(f"chatcmpl-{stream_id}") == parse_stream_id(f"cmpl-{stream_id}")
    )
    for bad in ("../x", "", stream_id.upper() + "x", stream_id[:-1]):
        assert parse_stream_id(bad) is None


def ended_stream(directory: Path) -> Path:
    table = StreamTable(directory, TokenIdText())
    stream = table.open(spec(new_stream_id()))
    stream.record(j.Tokens(2, pack_tokens([12]), "length"))
    stream.record(j.End("length", "length", 1.0))
    table.retire(stream)
    table.close()
    return directory / f"{stream.id}.journal"


@pytest.mark.parametrize("missing", [1, 15])
def test_a_mark_of_the_end_that_is_torn_is_made_whole(tmp_path: Path, missing: int) -> None:
    """Else the journal would be read at every start, and never expire."""
    path = ended_stream(tmp_path)
    path.write_bytes(path.read_bytes()[:-missing])
    table = StreamTable(tmp_path, TokenIdText())
    assert table.load_live() == [] and j.is_closed(path)
    table.close()


async def test_a_journal_that_cannot_be_read_keeps_nobody_from_being_served(tmp_path: Path) -> None:
    whole = ended_stream(tmp_path)
    table = StreamTable(tmp_path, TokenIdText())
    live = table.open(spec(new_stream_id()))
    table.close()
    for suffix in ("journal", "group"):
        (tmp_path / f"{'a' * 24}.{suffix}").mkdir()  # reading it is an OSError, as on a bad sector
        (tmp_path / f"{'b' * 24}.{suffix}").symlink_to("nowhere")
    again = StreamTable(tmp_path, TokenIdText())
    with capture_logs() as logs:
        assert [stream.id for stream in again.load_live()] == [live.id]
        groups = GroupTable(tmp_path, again)
        groups.load()
    assert {entry["event"] for entry in logs} == {"resume.journal_unreadable"}
    assert await again.fetch(whole.stem) is not None and await again.fetch("a" * 24) is None
    await again.sweep(-10)
    groups.sweep(-10)
    assert not whole.exists()
    again.close()


async def test_a_disk_that_deletes_nothing_ends_no_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [ended_stream(tmp_path) for _ in range(2)]
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path == paths[0]:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    table = StreamTable(tmp_path, TokenIdText())
    with capture_logs() as logs:
        await table.sweep(-10)
    assert [entry["event"] for entry in logs] == ["deliver.not_deleted"]
    assert [path.exists() for path in paths] == [True, False]
    with pytest.raises(OSError, match="Read-only"):
        await table.forget([paths[0].stem])  # whoever asked for it is told
    table.close()


async def test_what_the_disk_refused_is_remembered_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many streams and groups end meanwhile."""
    monkeypatch.setattr("gateway.streams.RECENT_COUNT", 2)
    monkeypatch.setattr("gateway.choices.RECENT_COUNT", 2)

    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    table = StreamTable(tmp_path, TokenIdText())
    groups = GroupTable(tmp_path, table)
    names = [new_stream_id() for _ in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        for name in names:
            stream = table.open(spec(name))
            group = groups.open(j.GroupSpec(name[::-1], [name], 1), [stream])
            stream.record(j.Tokens(2, pack_tokens([12]), "length"))
            stream.record(j.End("length", "length", 1.0))
            table.retire(stream)
            group.sync()
        assert all([await table.fetch(name) for name in names])
        assert all([await groups.fetch(name[::-1]) for name in names])
    await table.sweep(1000)
    groups.sweep(1000)
    assert all(j.is_closed(path) for path in tmp_path.iterdir()) and len(list(tmp_path.iterdir())) == 10
    groups.close()
    table.close()


async def test_an_answer_whose_journal_waits_in_memory_is_not_said_to_be_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sync = JournalSync(tmp_path / "journal", durability="turn")
    table = StreamTable(tmp_path / "journal", TokenIdText(), sync.written)
    sessions = SessionTable(tmp_path / "sessions")
    durability = Durability(tmp_path / "keeper.sock", table, sessions, lambda: (), sync)
    stream = table.open(spec(new_stream_id()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        stream.record(j.Tokens(2, pack_tokens([12]), "length"))
        with capture_logs() as logs:
            await durability.settle(stream)
    (said,) = [entry["error"] for entry in logs if entry["event"] == "deliver.turn_unsynced"]
    assert "No space left" in said
    table.close()
    sync.close()
    sessions.close()
