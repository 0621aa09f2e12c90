"""A store whose file LMDB can't read to its end: what can be read is copied into a new one, which takes its place. For `concordia repair`.

The old file is read by child processes, since a page that is missing ends in SIGBUS and a damaged one may end in anything: a child
names each key before it touches the value, and the next one goes on after the key that the last one died of; where it can't, from the
other end. Where not even its root can be read, the other one is tried, in a copy (`tiers/roots.py`).
Runs in the command's process while no keeper runs. The old file is kept aside as `.broken`.
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import lmdb
import structlog

from tiers.errors import BadBlock, StoreFailed
from tiers.free_list import free_list_problem
from tiers.group import Group
from tiers.layout import BlockId
from tiers.roots import mended_copies
from tiers.store import Store
from tiers.store_file import allocate_lock
from tiers.values import DATABASES

log = structlog.get_logger()

FRAME = struct.Struct("<cI")  # kind, bytes: K a key about to be read, V its value, E the end
COMMIT_BYTES = 16 << 20
DEATHS_LIMIT = 100_000
STUCK_S = 10  # without a key: damaged pages lead in a circle within LMDB


@dataclass(slots=True)
class Salvaged:
    """What was saved.

    lost       keys by database whose values could not be read
    cut_short  databases of which a stretch is missing
    root       which root was used, if not the one that the file names; ""
    no_root    none could be read: nothing was saved
    """

    records: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    cut_short: list[str] = field(default_factory=list)
    root: str = ""
    no_root: bool = False
    kept_aside: str = ""


def salvage(
    store_dir: Path, aside: Path, *, map_bytes: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Salvaged:
    """Make a readable store of what is left in `store_dir`. The caller holds the writer's lock. Raises StoreFailed, OSError (no room)."""
    done = Salvaged()
    target, mended = store_dir / "salvage", store_dir / "salvage-root"
    shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(mended, ignore_errors=True)
    source = _readable(store_dir, mended, map_bytes, done)
    target.mkdir(mode=0o700)
    allocate_lock(target)
    try:
        with lmdb.open(str(target), map_size=map_bytes, max_dbs=len(DATABASES) + 1, mode=0o600) as new:
            for number, name in enumerate(DATABASES):
                copy_readable(source, new, name, map_bytes, done)
                progress(number + 1, len(DATABASES))
            new.sync(True)
    except lmdb.Error as error:
        raise StoreFailed("what is left can't be copied", where=str(target), cause=str(error)) from error
    aside.mkdir(mode=0o700, exist_ok=True)
    kept = next(path for n in range(1 << 20) if not (path := aside / f"data.mdb-{n}.broken").exists())
    (store_dir / "lock.mdb").unlink(missing_ok=True)  # it tells of the old file's roots
    keep(store_dir / "data.mdb", kept)
    os.replace(target / "data.mdb", store_dir / "data.mdb")
    shutil.rmtree(target)
    shutil.rmtree(mended, ignore_errors=True)
    done.kept_aside = str(kept)
    _mend_index(store_dir, map_bytes)
    log.warning(
        "repair.salvaged", records=done.records, lost=sum(done.lost.values()), cut_short=done.cut_short, root=done.root,
        no_root=done.no_root, kept_aside=str(kept),
    )  # fmt: skip
    return done


def keep(data: Path, kept: Path) -> None:
    """Give the old file another name beside its own: killed before the new one has taken its place, it is still there."""
    try:
        os.link(data, kept)
    except OSError:  # a file system without links
        data.rename(kept)


def _readable(store_dir: Path, mended: Path, map_bytes: int, done: Salvaged) -> Path:
    """Where what is left is read from: the file as it is, or a copy whose damaged root page was made good."""
    if _has_root(store_dir, map_bytes):
        return store_dir
    for done.root, directory in mended_copies(store_dir / "data.mdb", mended):
        if _has_root(directory, map_bytes):
            return directory
    done.root, done.no_root = "", True
    return store_dir


def _has_root(directory: Path, map_bytes: int) -> bool:
    """Whether the file's root leads to the names of a store's databases."""
    return _in_child(lambda: _find_databases(directory, map_bytes))


def _find_databases(directory: Path, map_bytes: int) -> None:
    env = lmdb.open(str(directory), map_size=map_bytes, readonly=True, max_dbs=64, lock=False)
    with env.begin() as transaction:
        names = {bytes(key) for key, _ in transaction.cursor()}
    assert names >= {b"meta", b"blocks", b"children"}, "not the names of a store's databases"


def is_walkable(store_dir: Path, *, map_bytes: int) -> bool:
    """Whether LMDB finds its way through the whole file and its free pages, tried by a child process: a damaged page may be the end of
    who looks at it. Not beside a writer.

    Cost: each key, and the first and last page of each value. A store that isn't there is walkable.
    """
    if not (store_dir / "data.mdb").exists():
        return True
    return _in_child(lambda: _walk(store_dir, map_bytes))


def _in_child(look: Callable[[], None]) -> bool:
    """Whether a child process comes to the end of it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _child_signals()
            look()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def _child_signals() -> None:
    """Die of what a damaged page does, silently, and of standing still."""
    for number in (signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # LMDB's own assertions
    signal.alarm(STUCK_S)


def _walk(store_dir: Path, map_bytes: int) -> None:
    assert not free_list_problem(store_dir / "data.mdb"), "who writes it would die of it"
    env = lmdb.open(str(store_dir), map_size=map_bytes, readonly=True, max_dbs=64, lock=False)
    with env.begin(buffers=True) as transaction:
        for name in [bytes(key) for key, _ in transaction.cursor()]:
            previous = b""
            for key, value in transaction.cursor(env.open_db(name, txn=transaction, create=False)):
                signal.alarm(STUCK_S)
                found = bytes(key)
                assert found > previous, "keys in a circle"
                previous = found
                if len(value):
                    value[0], value[-1]  # noqa: B018  touched


def copy_readable(
    store_dir: Path,
    new: lmdb.Environment,
    name: bytes,
    map_bytes: int,
    done: Salvaged,
    *,
    deaths_limit: int = DEATHS_LIMIT,
) -> None:
    """What can be read of one database into a new file: forwards, and from its end where forwards ends early.

    deaths_limit  child processes that may die of what they read
    """
    database = new.open_db(name)
    after, deaths = b"", 0
    while deaths < deaths_limit:
        last, died_of, ended = _take(store_dir, new, database, name, map_bytes, done, after=after)
        if ended:
            return
        deaths += 1
        if died_of and died_of != last:
            done.lost[name.decode()] = done.lost.get(name.decode(), 0) + 1
            after = died_of
            continue
        break
    done.cut_short.append(name.decode())
    before = b""
    while deaths < deaths_limit:
        last, died_of, ended = _take(store_dir, new, database, name, map_bytes, done, before=before, down_to=after)
        if ended or not died_of or died_of == last:
            return
        deaths += 1
        before = died_of


def _take(
    store_dir: Path, new: lmdb.Environment, database: Any, name: bytes, map_bytes: int, done: Salvaged, *,
    after: bytes = b"", before: bytes | None = None, down_to: bytes = b"",
) -> tuple[bytes, bytes, bool]:  # fmt: skip
    """Copy what one child can read: (last key that was copied, key that it died of, whether it came to the end)."""
    last, attempted, ended = b"", b"", False
    group: list[tuple[bytes, bytes]] = []
    size = 0
    for kind, data in _read_in_child(store_dir, name, map_bytes, after, before, down_to):
        if kind == b"K":
            attempted = data
        elif kind == b"V":
            group.append((attempted, data))
            last, attempted, size = attempted, b"", size + len(data)
            if size > COMMIT_BYTES:
                _put(new, database, group, done)
                group, size = [], 0
        else:
            ended = True
    _put(new, database, group, done)
    return last, attempted, ended


def _put(new: lmdb.Environment, database: Any, group: list[tuple[bytes, bytes]], done: Salvaged) -> None:
    with new.begin(db=database, write=True) as transaction:
        for key, value in group:
            transaction.put(key, value)
    done.records += len(group)


def _read_in_child(
    store_dir: Path, name: bytes, map_bytes: int, after: bytes, before: bytes | None, down_to: bytes
) -> Iterator[tuple[bytes, bytes]]:
    """Frames that a child sends, until it ends or dies."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            _child_signals()
            with open(writing, "wb", buffering=1 << 16) as pipe:
                _send(pipe, store_dir, name, map_bytes, after, before, down_to)
            os._exit(0)
        except BaseException:
            os._exit(1)
    os.close(writing)
    try:
        with open(reading, "rb", buffering=1 << 16) as pipe:
            while len(head := pipe.read(FRAME.size)) == FRAME.size:
                kind, length = FRAME.unpack(head)
                data = pipe.read(length)
                if len(data) < length:
                    break
                yield kind, data
    finally:
        os.waitpid(child, 0)


def _send(
    pipe: BinaryIO, store_dir: Path, name: bytes, map_bytes: int, after: bytes, before: bytes | None, down_to: bytes
) -> None:
    """In the child: name each key, then read its value."""
    env = lmdb.open(str(store_dir), map_size=map_bytes, readonly=True, max_dbs=64, lock=False, readahead=False)
    with env.begin(buffers=True) as transaction:
        try:
            database = env.open_db(name, txn=transaction, create=False)
        except lmdb.NotFoundError:
            pipe.write(FRAME.pack(b"E", 0))
            return
        cursor = transaction.cursor(database)
        if before is None:
            more = cursor.set_range(after + b"\0") if after else cursor.first()
        elif before:
            more = cursor.set_range(before) and cursor.prev()
        else:
            more = cursor.last()
        previous: bytes | None = None
        while more and (key := bytes(cursor.key())) > down_to:
            if previous is not None and (key <= previous if before is None else key >= previous):
                return  # damaged pages lead in a circle: as good as dead
            previous = key
            signal.alarm(STUCK_S)
            pipe.write(FRAME.pack(b"K", len(key)) + key)
            pipe.flush()
            value = bytes(cursor.value())
            pipe.write(FRAME.pack(b"V", len(value)) + value)
            more = cursor.prev() if before is not None else cursor.next()
    pipe.write(FRAME.pack(b"E", 0))


# ---------------------------------------------------------------- the small databases


def _mend_index(store_dir: Path, map_bytes: int) -> None:
    """Blocks that the small databases don't know are dropped, places among a parent's children are written anew."""
    store = Store(store_dir, map_bytes=map_bytes)
    try:
        after = b""
        while True:
            with store.group(freeing=True) as group:
                keys = [key for key, _ in group.scan("blocks", after, 256)]
                for key in keys:
                    _mend_block(group, BlockId(key))
            if not keys:
                return
            after = keys[-1]
    finally:
        store.close()


def _mend_block(group: Group, block: BlockId) -> None:
    node = group.node(block)
    try:
        value = group.block(block)
    except BadBlock:
        return  # found and dropped like any other
    if node is None:
        group.delete_block(value.parent, value.tokens, block)
    elif group.child_tokens(node.parent, block) is None:
        group.put_child(value.parent, value.tokens, block)
