"""Journals onto the disk: when, in which mode, and what a disk that refuses is told."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from gateway import journal as j
from gateway.journal_sync import JournalSync
from gateway.streams import StreamTable
from gateway.tokenizer import TokenIdText
from tests.gateway.test_journal import records, spec


class Calls:
    """Syncs and positioned writes, by file name; syncs fail while `broken`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[str] = []
        self.rewritten: dict[str, bytes] = {}
        self.broken = False
        fdatasync, fsync, pwrite = os.fdatasync, os.fsync, os.pwrite

        def name(file: int) -> str:
            return Path(os.readlink(f"/proc/self/fd/{file}")).name

        def sync(file: int) -> None:
            if self.broken:
                raise OSError(errno.EIO, "Input/output error")
            self.synced.append(name(file))
            fdatasync(file)

        def sync_all(file: int) -> None:
            self.synced.append(name(file))
            fsync(file)

        def write(file: int, data: bytes, at: int) -> int:
            self.rewritten[name(file)] = data
            return pwrite(file, data, at)

        monkeypatch.setattr(os, "fdatasync", sync)
        monkeypatch.setattr(os, "fsync", sync_all)
        monkeypatch.setattr(os, "pwrite", write)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


async def test_what_was_written_is_synced_once_and_new_names_with_it(tmp_path: Path, calls: Calls) -> None:
    sync = JournalSync(tmp_path, durability="interval")
    a, b = (j.Journal(tmp_path / f"{name}.journal", written=sync.written) for name in "ab")
    a.append(*records()[:3])
    b.append(*records()[:1])
    assert await sync.sync()
    assert sorted(calls.synced) == sorted(["a.journal", "b.journal", tmp_path.name])
    calls.synced.clear()
    assert await sync.sync()
    b.append(records()[1])
    assert await sync.sync()
    assert calls.synced == ["b.journal"]
    sync.close()


async def test_process_mode_never_syncs(tmp_path: Path, calls: Calls) -> None:
    sync = JournalSync(tmp_path, durability="process")
    j.Journal(tmp_path / "a.journal", written=sync.written).append(*records())
    assert await sync.sync()
    await sync.run()  # it has nothing to do
    sync.close()
    assert calls.synced == []


async def test_failed_sync_is_said_and_its_bytes_are_written_again(tmp_path: Path, calls: Calls) -> None:
    """The kernel has marked the pages clean: to sync once more would promise what is not on the disk."""
    sync = JournalSync(tmp_path, durability="turn")
    path = tmp_path / "a.journal"
    journal = j.Journal(path, written=sync.written)
    journal.append(*records()[:4])
    calls.broken = True
    assert not await sync.sync([path])
    calls.broken, calls.rewritten = False, {}
    assert await sync.sync()
    assert calls.rewritten == {"a.journal": path.read_bytes()}
    calls.rewritten = {}
    assert await sync.sync([path])
    assert calls.rewritten == {}
    sync.close()


async def test_a_new_name_that_another_sync_has_failed_at_is_not_taken_for_certain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync of all is under way as an answer ends: it has taken over the directory's, and the disk refuses that."""
    sync = JournalSync(tmp_path, durability="turn")
    path = tmp_path / "a.journal"
    j.Journal(path, written=sync.written).append(*records())

    def refuse(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", refuse)
        assert await asyncio.gather(sync.sync(), sync.sync([path])) == [False, False]
    assert await sync.sync([path])
    sync.close()


def test_directory_of_journals_that_was_deleted_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "data" / "journal" / "s.journal"
    journal = j.Journal(path)
    journal.append(*records())
    assert journal.backlog_bytes == 0 and path.stat().st_size > 0
    journal.release()


async def test_journal_that_is_deleted_meanwhile_is_no_failure(tmp_path: Path) -> None:
    sync = JournalSync(tmp_path, durability="interval")
    j.Journal(tmp_path / "a.journal", written=sync.written).append(*records())
    (tmp_path / "a.journal").unlink()
    assert await sync.sync()
    sync.close()


def test_end_without_its_mark_is_an_end(tmp_path: Path) -> None:
    """Killed between the two writes: the stream is over, and nobody waits for it."""
    table = StreamTable(tmp_path, TokenIdText())
    stream = table.open(spec())
    for record in records()[1:]:
        stream.record(record)
    table.close()
    again = StreamTable(tmp_path, TokenIdText())
    assert again.load_live() == [] and not again.live
    assert j.is_closed(tmp_path / f"{spec().stream}.journal")
    again.close()
