"""Tier 2: LMDB on disk, for its only writer, the keeper. Stage *drain*; what everyone else opens is `tiers/view.py` StoreReader.

Whole blocks by block id, pieces of unfinished blocks, and how far each sequence came (`tiers/values.py`). Opened here, upgraded,
written in group commits (`tiers/group.py`), synced, switched and closed. Source: docs/log-format.md
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import structlog

from tiers import failpoints, late_keys, whole_file
from tiers.errors import OtherFormat, StoreFailed
from tiers.free_list import free_list_problem
from tiers.group import Group, Noting, Scratch
from tiers.keys import Keyring, Locked
from tiers.layout import RootId, chain_root
from tiers.pages import start_writing
from tiers.settings import Durability
from tiers.store_file import (
    DAMAGED,
    boot_id,
    check_disk,
    create,
    extended,
    identity,
    make_directory,
    opening,
    prepare_lock,
    reach,
    set_aside_damaged,
    sync_file,
    translated,
)
from tiers.usage import Usage, measure_usage
from tiers.values import DATABASES, NODE, Tenant, decode_progress, decode_root, encode, frame_offset
from tiers.view import STORE_VERSION, VERSION_KEYS, View, check_version

log = structlog.get_logger()

FREE_PAGES_BYTES = 128 << 20  # of its own pages that a file must have free to be written to on a full disk
STORE_VERSION_TEXT = str(STORE_VERSION).encode()
PAGES_PER_BYTE = 1.1  # pages of a file to bytes that are counted: room for its trees


class Store:
    """The store for its only writer, the keeper. Opened once a process: LMDB forbids a second time.

    durability  `process`: no fsync before `sync`; else every commit reaches the disk before its root does, so a power
                loss can't damage the file, and `sync` makes the newest root reach it too.
    """

    def __init__(
        self,
        store_dir: str | os.PathLike[str],
        *,
        map_bytes: int,
        durability: Durability = "interval",
        keys: Keyring | None = None,
    ) -> None:
        self.path = Path(store_dir)
        self.keys = Keyring.from_environment() if keys is None else keys
        self.durability = durability
        self._unsafe = self.path / "unsynced"
        safe = durability != "process"
        try:
            make_directory(self.path)
            set_aside_damaged(self.path, self._unsafe)
            if not safe:
                self._unsafe.write_text(boot_id())
                sync_file(self._unsafe)  # before the first write that isn't synced
            for name in ("new", "shrink", "rescue", "salvage", "salvage-root"):
                shutil.rmtree(self.path / name, ignore_errors=True)  # of who was killed in the middle of it
            create(self.path)
        except OSError as error:
            raise StoreFailed("the store can't be made", where=str(self.path), cause=str(error)) from error
        self._map_bytes = map_bytes
        self._scratch = Scratch()
        self._file = -1
        self._usage: Usage | None = None
        self._failure = ""  # why a commit failed: what is on the disk isn't known any more
        self.touched: set[tuple[bytes, bytes]] | None = None  # while the file is being copied: what commits change
        self._open_env()

    def _open_env(self) -> None:
        safe = self.durability != "process"
        prepare_lock(self.path)
        with translated(self.path):
            whole_file.make_whole(self.path, self._map_bytes)
            self._refuse_damaged_free_list()
            self._env = lmdb.open(
                str(self.path), map_size=self._map_bytes, max_dbs=len(DATABASES), mode=0o600, metasync=False, sync=safe
            )
            if safe:
                self._env.sync(True)
                self._unsafe.unlink(missing_ok=True)
            self._env.reader_check()
            self._db = {name: self._env.open_db(name) for name in DATABASES}
            self._check_version()
            self._know_tenants()
        self._files = identity(self.path)
        self._file = os.open(self.path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)  # tells whether it has a name still

    def _refuse_damaged_free_list(self) -> None:
        """LMDB ends the process that writes such a file; readers don't look at it. Raises StoreFailed."""
        problem = free_list_problem(self.path / "data.mdb")
        if problem:
            hint = "Stop `concordia serve` and run `concordia repair`; until then nothing more is stored, and what is stored is restored"
            raise StoreFailed("the store can't be written", where=str(self.path), cause=problem, hint=hint)

    def _know_tenants(self) -> None:
        """Have the keys of all tenants at hand, and say which are missing, and what is stored openly though its key is given."""
        if self.keys:
            try:
                with self._env.begin(write=True) as txn:
                    late_keys.mark(txn, self._db, self.keys)
            except lmdb.Error as error:  # no room: the store must open all the same, so that some can be made
                log.warning(
                    "store.not_marked", path=str(self.path), error=str(error), hint="tried again when it is opened next"
                )
        with self._env.begin(buffers=True) as txn:
            view = View(txn, self._db, self.keys)
            for _, tenant in view.tenants():
                self.keys.know(tenant.namespace)
                if tenant.sealed and not self.keys.has(tenant.namespace):
                    log.error("store.key_missing", namespace=tenant.namespace, hint=Locked.hint)
            for tenant in late_keys.marked(view).values():
                log.warning(
                    "store.unsealed", namespace=tenant.namespace, hint="stored before it had a key; compaction seals it"
                )

    def take_touched(self) -> set[tuple[bytes, bytes]]:
        """(database, key) of everything that was changed since the last call, while the file is being copied."""
        assert self.touched is not None, "nothing is being copied"
        touched, self.touched = self.touched, set()
        return touched

    def switch(self, target: Path) -> None:
        """Let the file in `target`, closed and synced, take the place of this one, and go on with it. Raises StoreFailed.

        The old lock file goes first: a lock file says which root of its data file is the newest, so that it must never be
        used with another. No reader opens the store in between.
        """
        try:
            self._close_env()
            with opening(self.path, fcntl.LOCK_EX):
                failpoints.reach("compact.shrink_switch.before")
                (self.path / "lock.mdb").unlink(missing_ok=True)
                os.rename(target / "data.mdb", self.path / "data.mdb")
                failpoints.reach("compact.shrink_switch.after")
                sync_file(self.path)
        except OSError as error:
            raise StoreFailed("the store's file can't be switched", where=str(self.path), cause=str(error)) from error
        finally:
            self._open_env()

    def usage(self) -> Usage:
        """Counts and bytes on disk, by tenant (chain root) and kind. The first call looks at every small record once."""
        if self._usage is None:
            with self.snapshot() as view:
                self._usage = measure_usage(view)
        return self._usage

    def recount(self) -> None:
        """Look at every small record again before the next `usage`: something that couldn't be read was replaced."""
        self._usage = None

    def map_bytes(self) -> int:
        """Size of the map: what the file can grow to."""
        return self._env.info()["map_size"]

    def snapshots(self) -> dict[tuple[int, int], int]:
        """Open snapshots of all processes: how many commits each is behind, by (process id, snapshot number)."""
        newest = self._env.info()["last_txnid"]
        found = {}
        for line in self._env.readers().splitlines()[1:]:
            fields = line.split()
            if len(fields) == 3 and fields[2].isdigit():
                found[int(fields[0]), int(fields[2])] = newest - int(fields[2])
        return found

    def oldest_snapshot_lag(self) -> int:
        """How many commits the oldest open snapshot of any process is behind: pages freed since can't be used again."""
        return max(self.snapshots().values(), default=0)

    def _check_version(self) -> None:
        with self._env.begin(write=True) as txn:
            found = check_version(partial(txn.get, db=self._db[b"meta"]), self.path)
            if found == 1:
                _upgrade(txn, self._db)
                log.info("store.upgraded", path=str(self.path), was=1, now=STORE_VERSION)
            elif found not in (0, STORE_VERSION):
                raise OtherFormat(f"the store has version {found}, this is {STORE_VERSION}", where=str(self.path))
        try:
            with self._env.begin(write=True) as txn:
                for key in VERSION_KEYS:  # one may be missing, or be damaged
                    if txn.get(key, db=self._db[b"meta"]) != STORE_VERSION_TEXT:
                        txn.put(key, STORE_VERSION_TEXT, db=self._db[b"meta"])
        except lmdb.Error as error:  # no room: the store must open all the same, so that some can be made
            log.warning(
                "store.not_marked", path=str(self.path), error=str(error), hint="tried again when it is opened next"
            )

    @contextmanager
    def group(self, *, freeing: bool = False) -> Iterator[Group]:
        """One write transaction: committed when the block ends, dropped whole if it raises. Raises StoreFailed.

        freeing  it only makes room, so that it is let through when the disk is full
        """
        if not freeing:
            self._check_room()
        with self._noting_failure(), translated(self.path):
            with self._env.begin(write=True, buffers=True) as txn:
                noting = Noting(txn, self._db) if self.touched is not None else None
                group = Group(noting or txn, self._db, self._scratch, self.keys)
                yield group
                reach("drain.commit.before")
            if noting is not None and self.touched is not None:
                self.touched |= noting.touched
            if self._usage is not None:
                self._usage.add(group.changes)
            reach("drain.commit.after")
            extended(self._env, self.path)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """What the disk has failed at; not damaged pages, or a map without room: nothing was written then."""
        try:
            yield
        except StoreFailed as error:
            if not isinstance(error.__cause__, (*DAMAGED, lmdb.MapFullError)):
                self._failure = error.reason
            raise

    def _check_room(self) -> None:
        """A full disk doesn't matter while the file has free pages of its own."""
        try:
            check_disk(self.path)
        except StoreFailed:
            if self.used_bytes() - PAGES_PER_BYTE * self.usage().total_bytes < FREE_PAGES_BYTES:
                raise

    @contextmanager
    def snapshot(self) -> Iterator[View]:
        """A consistent view of what is committed. Raises StoreFailed."""
        with translated(self.path):
            with self._env.begin(buffers=True) as txn:
                yield View(txn, self._db, self.keys)

    def sync(self) -> None:
        """Make everything committed survive a power loss. Raises StoreFailed.

        Also where a commit has failed since it was opened, whoever made it: what the kernel has given up writing isn't written by a sync.
        """
        if self._failure:
            raise StoreFailed(self._failure)
        with translated(self.path):
            reach("drain.sync.before")
            self._env.sync(True)
            reach("drain.sync.after")

    @contextmanager
    def writing(self) -> Iterator[Callable[[], None]]:
        """A function that has the disk begin with what a commit has written so far, from another thread while the commit goes on.

        LMDB writes all pages of a commit, then waits for the disk to take them: this lets it take the first while the last are written.
        Roots are written after that wait, so nothing is promised earlier; under `process` it does nothing.
        """
        if self.durability == "process":
            yield lambda: None
            return
        file = os.open(self.path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield lambda: start_writing(file)
        finally:
            os.close(file)

    def drop_dead_readers(self) -> int:
        """Free the snapshots of killed processes, which would keep old pages from being used again."""
        with translated(self.path):
            return self._env.reader_check()

    def check_file(self) -> None:
        """Raise StoreFailed if the files that are open here are no longer those that have the names."""
        try:
            found = identity(self.path)
        except OSError:
            found = (0, 0)
        if found != self._files:
            cause = "deleted or replaced while it was open"
            raise StoreFailed("the store's file is gone", where=str(self.path), cause=cause)

    def has_file(self) -> bool:
        """Whether the file that is open here still has its name."""
        try:
            return os.stat(self.path / "data.mdb").st_ino == self._files[0]
        except OSError:
            return False

    def is_deleted(self) -> bool:
        """Whether the file that is open here has no name anywhere any more: it wasn't moved, and can't come back."""
        return self._file >= 0 and os.fstat(self._file).st_nlink == 0

    def rescue(self) -> bool:
        """Write what is in a file that was deleted to a new one: it is whole as long as it is open. Call before `close`.

        False if there is a file of that name (it was replaced), or if the new one can't be written.
        """
        data, target = self.path / "data.mdb", self.path / "rescue"
        if data.exists():
            return False
        try:
            make_directory(self.path)  # it may have been deleted, too
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(mode=0o700, parents=True)
            self._env.copy(str(target), compact=True)
            sync_file(target / "data.mdb")
            with opening(self.path, fcntl.LOCK_EX):
                (self.path / "lock.mdb").unlink(missing_ok=True)  # it tells of the old file's roots
                os.rename(target / "data.mdb", data)
                sync_file(self.path)
        except (OSError, lmdb.Error) as error:
            log.error("store.not_rescued", path=str(self.path), error=str(error))
            return False
        finally:
            shutil.rmtree(target, ignore_errors=True)
        return True

    def used_bytes(self) -> int:
        """High-water mark of the file."""
        return (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]

    def close(self) -> None:
        """Sync and close; an unsynced store is then whole again."""
        try:
            self.sync()
            self._unsafe.unlink(missing_ok=True)
        finally:
            self._close_env()

    def _close_env(self) -> None:
        self._env.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _upgrade(txn: Any, databases: dict[bytes, Any]) -> None:
    """Version 1 to 2, in one transaction and without touching a block: it lacks `nodes` and `tenants`.

    A chain that no known tenant's root leads to gets a node without one: whoever has its tokens still finds it.
    """
    roots = {bytes(key): decode_root(raw) for key, raw in txn.cursor(databases[b"roots"])}
    spaces = {decode_progress(raw).namespace for _, raw in txn.cursor(databases[b"sequences"])}
    parents: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for key, tokens in txn.cursor(databases[b"children"]):
        parents.setdefault(bytes(key[:16]), []).append((bytes(key[-16:]), bytes(tokens)))
    for root, info in roots.items():
        size = frame_offset(info.block_tokens) + info.shape.frame_bytes(info.block_tokens)
        for space in spaces:
            chain = chain_root(RootId(root), space)
            waiting = [(bytes(chain), 0)]
            if chain in parents:
                txn.put(chain, encode(Tenant(root, space)), db=databases[b"tenants"])
            while waiting:
                parent, start = waiting.pop()
                for block, tokens in parents.pop(parent, ()):
                    end = start + len(tokens) // 4
                    txn.put(block, NODE.pack(parent, chain, end, 0, size), db=databases[b"nodes"])
                    waiting.append((block, end))
    for parent, children in parents.items():
        for block, _ in children:
            txn.put(block, NODE.pack(parent, bytes(16), 0, 0, 0), db=databases[b"nodes"])
    txn.put(VERSION_KEYS[0], STORE_VERSION_TEXT, db=databases[b"meta"])
