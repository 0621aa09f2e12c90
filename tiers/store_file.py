"""The store's file and directory: made and switched so that a crash never leaves half of one, and LMDB's errors translated.

Source: docs/log-format.md
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import structlog

from tiers import failpoints, whole_file
from tiers.errors import NoRoom, StoreFailed

log = structlog.get_logger()

LOCK_BYTES = 8192  # of LMDB's lock file
DAMAGED = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.BadTxnError)
DAMAGED_HINT = "Its file is damaged: stop `concordia serve` and run `concordia repair`, which saves what can be read, or restore a backup"
FREE_DISK_RESERVE_BYTES = 64 << 20  # below this nothing is put, so that deletes still find room


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """LMDB's errors become StoreFailed, here and nowhere else."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise StoreFailed("the store's map is full", where=str(path), cause="store_map_bytes is used up") from error
    except lmdb.Error as error:
        raise StoreFailed("the store can't be used", where=str(path), cause=str(error), hint=hint_of(error)) from error


def hint_of(error: lmdb.Error) -> str | None:
    """What to do where pages of the file are damaged; None: what StoreFailed says."""
    return DAMAGED_HINT if isinstance(error, DAMAGED) else None


def reach(failpoint: str) -> None:
    """A failpoint whose error looks like one of LMDB's."""
    try:
        failpoints.reach(failpoint)
    except OSError as error:
        raise lmdb.DiskError(str(error)) from error


@contextmanager
def opening(path: Path, mode: int) -> Iterator[None]:
    """Hold the store's directory while its files are opened (LOCK_SH) or switched (LOCK_EX)."""
    directory = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, mode)
        yield
    finally:
        os.close(directory)


def extended(env: Any, path: Path) -> None:
    """After a commit: give the file its full length. Raises StoreFailed."""
    try:
        whole_file.extend(env, path)
    except OSError as error:
        raise StoreFailed("the store's file can't be extended", where=str(path), cause=str(error)) from error


def check_disk(path: Path) -> None:
    """Raise NoRoom if the disk is nearly full, StoreFailed if that can't be told."""
    try:
        free = os.statvfs(path)
    except OSError as error:
        raise StoreFailed("the store's directory can't be reached", where=str(path), cause=str(error)) from error
    if free.f_bavail * free.f_frsize < FREE_DISK_RESERVE_BYTES:
        cause = f"less than {FREE_DISK_RESERVE_BYTES >> 20} MB are free"
        raise NoRoom("the disk is full", where=str(path), cause=cause)


def make_directory(path: Path) -> None:
    """The store's directory and the data directory around it, for this user only. Raises OSError."""
    for directory in (path.parent, path):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def create(path: Path) -> None:
    """A new store gets its name when it can be opened, so that a loss of power never leaves half of one. Raises OSError, StoreFailed."""
    if (path / "data.mdb").exists():
        return
    draft = path / "new"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    allocate_lock(draft)
    with translated(path):
        env = lmdb.open(str(draft), mode=0o600)
        env.sync(True)
        env.close()
    os.rename(draft / "data.mdb", path / "data.mdb")
    sync_file(path)
    shutil.rmtree(draft, ignore_errors=True)


def allocate_lock(directory: Path) -> None:
    """Give LMDB's lock file its bytes before it is opened: it is written through a map, which ends in SIGBUS on a disk without room.

    Only of a database that isn't open in this process: the locks on the file would be gone. Raises OSError (no room)
    """
    path = directory / "lock.mdb"
    try:
        if path.exists() and path.stat().st_blocks * 512 >= LOCK_BYTES:
            return
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return  # a reader that may not write here: LMDB knows what to do
    try:
        os.posix_fallocate(file, 0, LOCK_BYTES)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
    finally:
        os.close(file)


def prepare_lock(store: Path) -> None:
    """`allocate_lock` for whoever opens the store. Raises StoreFailed."""
    try:
        allocate_lock(store)
    except OSError as error:
        raise StoreFailed("the store can't be opened", where=str(store), cause=str(error)) from error


def sync_file(path: Path) -> None:
    """Bring a file, or a directory's names, onto the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
        if path.is_file():
            sync_file(path.parent)
    finally:
        os.close(file)


def identity(path: Path) -> tuple[int, int]:
    """Inodes of data and lock file: who has others open looks at something that has no name any more. Raises FileNotFoundError.

    With another lock file than the writer's a reader's snapshot isn't heard of, and its pages are used again under it. 0: there is none,
    as for a moment while a file is switched.
    """
    data = os.stat(path / "data.mdb").st_ino
    try:
        return data, os.stat(path / "lock.mdb").st_ino
    except FileNotFoundError:
        return data, 0


def boot_id() -> str:
    """Another one after every start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def set_aside_damaged(path: Path, unsafe: Path) -> None:
    """A store that was being written without fsync when the machine went down can't be trusted: start an empty one."""
    if not unsafe.exists() or unsafe.read_text() == boot_id():
        return
    aside = path / "damaged"
    aside.mkdir(exist_ok=True)
    for name in ("data.mdb", "lock.mdb"):
        if (path / name).exists():
            (path / name).replace(aside / name)
    unsafe.unlink()
    log.warning("store.set_aside", path=str(aside), reason="the machine stopped before an unsynced store was synced")
