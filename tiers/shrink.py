"""Copying the store's file while it is in use, without holding a snapshot: to shrink it (copy, verify, switch) or for a backup.

Stage *compact*; the keeper's thread, in slices.

LMDB's file never gets smaller, so its records are copied in order into a new one, each verified on the way. What the drain changes
meanwhile is noted and copied again; at the end, between two drains, the last of it, and the new file takes the name of the old one.
Readers in other processes go on with the old file until their snapshot ends, and open the new one for the next.
Killed at any instruction, the old file or the new one is there, whole. Source: docs/log-format.md
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import structlog

from tiers import whole_file
from tiers.base import unpack_base
from tiers.compaction import Drained, Progressing
from tiers.errors import BadBlock, StoreFailed
from tiers.keys import Locked
from tiers.late_keys import UNSCRUBBED
from tiers.store import Store
from tiers.store_file import FREE_DISK_RESERVE_BYTES, allocate_lock, translated
from tiers.values import DATABASES, KIND_BLOCK, KIND_POINT, KIND_TAIL, unpack_value

log = structlog.get_logger()

BATCH_BYTES = 8 << 20
BATCH_KEYS = 512
FEW = 64  # changes that are copied in the last step, while the drain waits
ROUNDS = 20
KINDS = {b"blocks": KIND_BLOCK, b"tails": KIND_TAIL, b"states": KIND_POINT}


class Shrink:
    """One run. Counts: copied_records, copied_bytes, bad_records (copied as they are), freed_bytes."""

    def __init__(self, drain: Drained, *, limit_bytes_s: float = 0.0) -> None:
        self._drain = drain
        self._limit_bytes_s = limit_bytes_s
        self._paced_bytes, self._began = 0, time.monotonic()
        self.progress = Progressing()

    def run(self) -> Iterator[None]:
        """Do it, one small piece at each `next`; closing the generator leaves the store as it was. Raises StoreFailed."""
        self._drain.settle()
        store = self._drain.store()
        before, target = store.used_bytes(), store.path / "shrink"
        try:
            yield from self._make(store, target)
            self.progress.at("switch")
            store.switch(target)
            with store.group(freeing=True) as group:
                group.delete_raw("meta", UNSCRUBBED)  # the new file has no pages of what was stored openly
            self.progress.counts["freed_bytes"] = before - store.used_bytes()
            self.progress.at("done")
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def _make(self, store: Store, target: Path) -> Iterator[None]:
        """The copy, whole and synced, of the moment at which this ends."""
        if store.touched is not None:
            raise StoreFailed("the store is being copied already", where=str(store.path), cause="a backup or a shrink")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(mode=0o700)
        self._check_room(store, target)
        store.touched = set()
        try:
            with translated(target):  # not every file system can hold a database
                yield from self._fill(store, _Copy(str(target), store.map_bytes()))
        finally:
            if self._drain.is_open(store):
                store.touched = None

    def _fill(self, store: Store, copy: _Copy) -> Iterator[None]:
        try:
            yield from self._copy_all(store, copy)
            yield from self._verify(store, copy)
            yield from self._catch_up(store, copy)
            self._apply(store, copy, store.take_touched())
            self._compare(store, copy)
            copy.close(sync=True)
        finally:
            copy.close(sync=False)

    def _pace(self, size: int) -> Iterator[None]:
        """After `size` bytes: let the keeper go on with other work, for as long as the copy is ahead of its bound."""
        self._paced_bytes += size
        yield
        self.progress.is_paced = True
        while self._limit_bytes_s and time.monotonic() - self._began < self._paced_bytes / self._limit_bytes_s:
            yield
        self.progress.is_paced = False

    def _check_room(self, store: Store, target: Path) -> None:
        free = os.statvfs(target)
        needed = store.usage().total_bytes + FREE_DISK_RESERVE_BYTES
        if free.f_bavail * free.f_frsize < needed:
            cause = f"{needed >> 20} MB are needed for the copy"
            raise StoreFailed("there is no room to copy the store", where=str(target), cause=cause)

    def _copy_all(self, store: Store, copy: _Copy) -> Iterator[None]:
        with store.snapshot() as view:
            total = sum(view.count(name.decode()) for name in DATABASES)
        self.progress.at("copy", total)
        for name in DATABASES:
            after = b""
            while True:
                with store.snapshot() as view, copy.write() as txn:
                    size = count = 0
                    for key, value in view.scan_raw(name.decode(), after, BATCH_KEYS):
                        self._check(store, name, key, value)
                        txn.put(key, value, append=True, db=copy.databases[name])
                        after, size, count = key, size + len(value), count + 1
                        if size >= BATCH_BYTES:
                            break
                self.progress.done += count
                self.progress.counts["copied_records"] += count
                self.progress.counts["copied_bytes"] += size
                yield from self._pace(size)
                if not count:
                    break

    def _check(self, store: Store, name: bytes, key: bytes, value: Any) -> None:
        """A record that is damaged is copied as it is: repairing is not this job's business. Without its key it can't be told."""
        try:
            if name in KINDS:
                unpack_value(store.keys.open(name.decode(), key, value), KINDS[name], "")
            elif name == b"bases":
                unpack_base(store.keys.open("bases", key, value), "")
        except Locked:
            pass
        except BadBlock as error:
            self.progress.counts["bad_records"] += 1
            log.warning("shrink.bad_record", database=name.decode(), key=key.hex(), error=str(error))

    def _verify(self, store: Store, copy: _Copy) -> Iterator[None]:
        """Read the copy again, as a reader would."""
        bad = self.progress.counts["bad_records"]
        self.progress.at("verify", sum(copy.count(name) for name in KINDS))
        found = 0
        for name, kind in KINDS.items():
            after = b""
            while True:
                with copy.read() as txn, txn.cursor(db=copy.databases[name]) as cursor:
                    more = cursor.set_range(after + b"\0") if after else cursor.first()
                    count = size = 0
                    while more and size < BATCH_BYTES and count < BATCH_KEYS:
                        try:
                            key, value = bytes(cursor.key()), cursor.value()
                            unpack_value(store.keys.open(name.decode(), key, value), kind, "")
                        except Locked:
                            pass
                        except BadBlock:
                            found += 1
                        after, size, count = bytes(cursor.key()), size + len(cursor.value()), count + 1
                        more = cursor.next()
                self.progress.done += count
                yield from self._pace(size)
                if not count:
                    break
        if found > bad:
            raise StoreFailed("the copy of the store is damaged", where=str(store.path), cause=f"{found - bad} records")

    def _catch_up(self, store: Store, copy: _Copy) -> Iterator[None]:
        for _ in range(ROUNDS):
            touched = store.take_touched()
            self._apply(store, copy, touched)
            yield
            if len(touched) < FEW:
                return

    def _apply(self, store: Store, copy: _Copy, touched: set[tuple[bytes, bytes]]) -> None:
        """Bring what was changed since into the copy."""
        waiting = sorted(touched)
        while waiting:
            with store.snapshot() as view, copy.write() as txn:
                size = 0
                while waiting and size < BATCH_BYTES:
                    name, key = waiting.pop()
                    value = view.raw(name.decode(), key)
                    if value is None:
                        txn.delete(key, db=copy.databases[name])
                    else:
                        self._check(store, name, key, value)
                        txn.put(key, value, db=copy.databases[name])
                        size += len(value)

    def _compare(self, store: Store, copy: _Copy) -> None:
        with store.snapshot() as view:
            for name in DATABASES:
                if view.count(name.decode()) != copy.count(name):
                    cause = f"{name.decode()}: {copy.count(name)} of {view.count(name.decode())}"
                    raise StoreFailed("the copy of the store isn't complete", where=str(store.path), cause=cause)


class Duplicate(Shrink):
    """The same copy for somebody else: the new directory `target` with `data.mdb` in it. As of the moment at which it ends.

    limit_bytes_s  of reading, for copying and verifying together; 0: as fast as the keeper's other work lets it
    """

    def __init__(self, drain: Drained, target: Path, *, limit_bytes_s: float = 0.0) -> None:
        super().__init__(drain, limit_bytes_s=limit_bytes_s)
        self._target = target

    def run(self) -> Iterator[None]:
        """As `Shrink.run`; the store's file stays as it is. Closing the generator leaves nothing behind."""
        self._drain.settle()
        try:
            yield from self._make(self._drain.store(), self._target)
            (self._target / "lock.mdb").unlink(missing_ok=True)
        except BaseException:
            shutil.rmtree(self._target, ignore_errors=True)
            raise
        self.progress.at("done")


class _Copy:
    """The new file."""

    def __init__(self, path: str, map_bytes: int) -> None:
        self._path = path
        allocate_lock(Path(path))
        self._env: Any = lmdb.open(path, map_size=map_bytes, max_dbs=len(DATABASES), mode=0o600, sync=False)
        self.databases = {name: self._env.open_db(name) for name in DATABASES}

    def write(self) -> Any:
        return _Guarded(self._path, self._env.begin(write=True, buffers=True))

    def read(self) -> Any:
        return self._env.begin(buffers=True)

    def count(self, name: bytes) -> int:
        with self._env.begin() as txn:
            return txn.stat(self.databases[name])["entries"]

    def close(self, *, sync: bool) -> None:
        if self._env is None:
            return
        env, self._env = self._env, None
        try:
            if sync:
                whole_file.extend(env, Path(self._path))
                env.sync(True)
        except lmdb.Error as error:
            raise StoreFailed("the copy of the store can't be synced", where=self._path, cause=str(error)) from error
        finally:
            env.close()


class _Guarded:
    """A transaction whose errors become StoreFailed."""

    def __init__(self, path: str, txn: Any) -> None:
        self._path, self._txn = path, txn

    def __enter__(self) -> Any:
        return self._txn.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self._txn.__exit__(kind, error, trace)
        except lmdb.Error as failure:
            raise StoreFailed("the copy can't be written", where=self._path, cause=str(failure)) from failure
        if isinstance(error, lmdb.Error):
            raise StoreFailed("the copy can't be written", where=self._path, cause=str(error)) from error
