"""Look into a running system's store from outside: read-only, for tests that count what is stored."""

from __future__ import annotations

import lmdb

from bench.driver import System
from tiers import keeper_client


def drained(system: System) -> None:
    """Return when everything that is in the lanes now is in the store."""
    keeper_client.drain(system.paths.keeper_socket, sync=True)


def block_count(system: System) -> int:
    """Whole blocks in the store."""
    environment = lmdb.open(
        str(system.paths.store), readonly=True, lock=False, max_dbs=16, map_size=1 << 40, readahead=False
    )
    try:
        blocks = environment.open_db(b"blocks", create=False)
        with environment.begin(db=blocks) as transaction:
            return int(transaction.stat(blocks)["entries"])
    finally:
        environment.close()
