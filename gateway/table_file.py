"""DATA/sessions of a running gateway: two databases of LMDB. The thread `sessions` writes; the event loop reads.

An open file is whole even if it was deleted, so `look` writes it anew then. The same is done with other values in it (`rewrite`): free
pages of the old file hold what they held until they are used again. A crash leaves the old file or the new one.
One whose pages are damaged would end whoever opens it; it is set aside before, with what can be read of it in its place (`mend`).
Source: docs/log-format.md, "Stream journals" and "Encryption at rest"
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import structlog

from gateway import metrics
from tiers.salvage import Salvaged, copy_readable, is_walkable, keep
from tiers.store_file import allocate_lock, identity, make_directory, opening, sync_file

log = structlog.get_logger()

DATABASES = ("records", "tokens")
MAP_BYTES = 1 << 36  # sparse
GROUP_BYTES = 16 << 20  # of one commit of a copy
CLOSED = -1, -1  # in place of the inodes of an open file
ASIDE = "damaged-*.mdb"  # beside the file: what was damaged
TO_REBUILD = "rebuild"  # a file beside it: what journals tell is still to be added
DEATHS_LIMIT = 100  # child processes that may die of a damaged file: some 10 ms each

Change = tuple[str, bytes, bytes | None]  # database, key, value; None: delete it
Changed = Callable[[str, bytes, bytes], tuple[bytes, bytes]]


def as_they_are(database: str, key: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Key and value of a record in the new file."""
    return key, value


def mend(directory: Path) -> None:
    """Before it is opened: a file that LMDB can't read to its end is kept under another name, and what can be read takes its place.

    Cost    of one that is whole: 25 ms for 1,000 sessions of 8,000 tokens, about what loading it takes
    Raises  OSError, lmdb.Error (no room for it)
    """
    data, draft, saved = directory / "data.mdb", directory / "new", Salvaged()
    if is_walkable(directory, map_bytes=MAP_BYTES):
        return
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    allocate_lock(draft)
    with lmdb.open(str(draft), map_size=MAP_BYTES, max_dbs=len(DATABASES), mode=0o600) as new:
        for name in DATABASES:
            copy_readable(directory, new, name.encode(), MAP_BYTES, saved, deaths_limit=DEATHS_LIMIT)
        new.sync(True)
    aside = next(path for n in range(1 << 20) if not (path := directory / ASIDE.replace("*", str(n))).exists())
    (directory / TO_REBUILD).touch(mode=0o600)
    with opening(directory, fcntl.LOCK_EX):
        keep(data, aside)
        (directory / "lock.mdb").unlink(missing_ok=True)
        os.replace(draft / "data.mdb", data)
        sync_file(directory)
    shutil.rmtree(draft)
    log.error(
        "sessions.set_aside", path=str(aside), saved=saved.records, cut_short=saved.cut_short,
        hint="it could not be read to its end; look at the disk. Sessions are made anew from what could be, and from the journals",
    )  # fmt: skip


class TableFile:
    """The open file. `read` from any thread; everything else from one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.trouble = ""  # why the file isn't where it belongs, at the last look; "" if it is
        self._lock = threading.Lock()  # held while the file is switched, and while it is read beside the writer
        make_directory(directory)
        shutil.rmtree(directory / "new", ignore_errors=True)  # of a process that was killed in the middle of it
        with opening(directory, fcntl.LOCK_SH):
            self._open()

    def _open(self) -> None:
        self._files = CLOSED  # until it is open
        allocate_lock(self._directory)
        self._environment = lmdb.open(str(self._directory), map_size=MAP_BYTES, max_dbs=len(DATABASES), mode=0o600)
        self._databases = {name: self._environment.open_db(name.encode()) for name in DATABASES}
        self._files = identity(self._directory)

    def read(self, database: str, *keys: bytes) -> tuple[bytes, bytes] | None:
        """(key, value) of the first of these keys that is there."""
        with self._lock, self._environment.begin(db=self._databases[database]) as transaction:
            found = ((key, transaction.get(key)) for key in keys)
            return next(((key, bytes(value)) for key, value in found if value is not None), None)

    def items(self, database: str) -> Iterator[tuple[bytes, bytes]]:
        """All of one database, in one snapshot. Not while another thread may switch the file."""
        with self._environment.begin(db=self._databases[database]) as transaction:
            for key, value in transaction.cursor():
                yield bytes(key), bytes(value)

    def heads(self, database: str, size: int) -> Iterator[tuple[bytes, bytes]]:
        """As `items`, with the first `size` bytes of each value; the others aren't touched."""
        with self._environment.begin(db=self._databases[database], buffers=True) as transaction:
            for key, value in transaction.cursor():
                yield bytes(key), bytes(value[:size])

    def write(self, changes: Iterable[Change]) -> None:
        """All of them or none. Raises lmdb.Error."""
        with self._environment.begin(write=True) as transaction:
            for database, key, value in changes:
                _put(transaction, self._databases[database], key, value)

    def look(self) -> None:
        """Were the files deleted, moved or replaced? Then what is in them is written anew. A refusal is logged, and it is tried again."""
        found = self._found()
        if found == self._files:
            self.trouble = ""
            return
        if found[0] == self._files[0] or self._files == CLOSED:
            self.reopen()  # with a lock file again: a reader without one isn't heard of
            return
        metrics.files_deleted.labels("sessions").inc()
        log.error(
            "sessions.file_gone", path=str(self._directory), hint="it was deleted or moved, and is written anew: find out who did it"
        )  # fmt: skip
        self.rewrite(as_they_are)

    def rewrite(self, changed: Changed) -> bool:
        """Write everything to a new file, as `changed` has it, and go on with that; False if it couldn't be, which is logged."""
        draft = self._directory / "new"
        try:
            make_directory(self._directory)
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(mode=0o700)
            self._copy(draft, changed)
            self._switch(draft)
        except (OSError, lmdb.Error) as error:
            log.error("sessions.not_rewritten", path=str(self._directory), error=str(error), hint="free some room")
            self.trouble = f"its file can't be written anew: {error}"
            return False
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return True

    def close(self) -> None:
        """Everything is in the file, or in one that is written anew."""
        self.look()
        self._environment.close()

    def _found(self) -> tuple[int, int]:
        """Inodes of the files that have the names now; of those that are open if nobody can say."""
        try:
            return identity(self._directory)
        except (FileNotFoundError, NotADirectoryError):
            return 0, 0
        except OSError:
            return self._files

    def _copy(self, draft: Path, changed: Changed) -> None:
        with lmdb.open(str(draft), map_size=MAP_BYTES, max_dbs=len(DATABASES), mode=0o600, sync=False) as target:
            for name in DATABASES:
                database = target.open_db(name.encode())
                for group in _groups(changed(name, *item) for item in self.items(name)):
                    with target.begin(write=True) as transaction:
                        for key, value in group:
                            transaction.put(key, value, db=database)
            target.sync(True)

    def _switch(self, draft: Path) -> None:
        """The old lock file goes first: it says which root of its data file is the newest. Nobody opens the file in between."""
        with opening(self._directory, fcntl.LOCK_EX):
            (self._directory / "lock.mdb").unlink(missing_ok=True)
            allocate_lock(self._directory)  # where there is no room for it the old file stays open
            os.rename(draft / "data.mdb", self._directory / "data.mdb")
            sync_file(self._directory)
            with self._lock:
                self._environment.close()
                self._open()

    def reopen(self) -> None:
        """Open it anew; if it can't be, that is logged, and the next `look` tries again."""
        try:
            with opening(self._directory, fcntl.LOCK_EX), self._lock:
                allocate_lock(self._directory)
                self._environment.close()
                self._open()
        except (OSError, lmdb.Error) as error:
            self.trouble = f"its file can't be opened anew: {error}"
            log.error(
                "sessions.not_reopened",
                path=str(self._directory),
                error=str(error),
                hint="free some room; it is tried again",
            )


def _put(transaction: Any, database: Any, key: bytes, value: bytes | None) -> None:
    if value is None:
        transaction.delete(key, db=database)
    else:
        transaction.put(key, value, db=database)


def _groups(items: Iterable[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    group, size = list[tuple[bytes, bytes]](), 0
    for key, value in items:
        group.append((key, value))
        size += len(value)
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    yield group
