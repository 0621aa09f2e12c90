"""Whether the store's file has the pages that its root counts: the map of a file that was cut ends in SIGBUS, not in an error.

LMDB may leave the last pages of a file unwritten when nothing uses them, so a short file isn't proof of damage. The writer has
a child process walk everything once, which may die of it, and then extends the file; readers refuse a short one until then.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lmdb

from tiers.errors import StoreFailed


def missing_bytes(env: Any, path: Path) -> int:
    """How many bytes the file of an open store lacks of what its newest root counts."""
    wanted = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    return max(0, wanted - os.stat(path / "data.mdb").st_size)


def refuse_short(env: Any, path: Path) -> None:
    """Raise StoreFailed if the file is short."""
    missing = missing_bytes(env, path)
    if missing:
        cause = f"{missing} bytes are missing at its end"
        hint = "Stop `concordia serve` and run `concordia repair`, which keeps what can be read, or restore a backup"
        raise StoreFailed("the store's file is cut short", where=str(path), cause=cause, hint=hint)


def extend(env: Any, path: Path) -> None:
    """Give the file its full length: after a commit, so that it is never short."""
    missing = missing_bytes(env, path)
    if missing:
        os.truncate(path / "data.mdb", os.stat(path / "data.mdb").st_size + missing)


def make_whole(path: Path, map_bytes: int) -> None:
    """Before the writer opens a store: extend its file if it is short and still readable to its last key. Raises StoreFailed."""
    if os.stat(path / "data.mdb").st_size == 0:
        return  # LMDB makes a new one of it
    env = lmdb.open(str(path), map_size=map_bytes, readonly=True, max_dbs=32, lock=False)
    try:
        short = missing_bytes(env, path) > 0
    finally:
        env.close()
    if not short:
        return
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
            _walk(path, map_bytes)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    env = lmdb.open(str(path), map_size=map_bytes, readonly=True, max_dbs=32, lock=False)
    try:
        if status:
            refuse_short(env, path)
        extend(env, path)
    finally:
        env.close()


def _walk(path: Path, map_bytes: int) -> None:
    env = lmdb.open(str(path), map_size=map_bytes, readonly=True, max_dbs=32, lock=False)
    with env.begin(buffers=True) as txn:
        for name in [bytes(key) for key, _ in txn.cursor()]:
            for _, value in txn.cursor(env.open_db(name, txn=txn, create=False)):
                bytes(value)
