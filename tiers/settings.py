"""The tiers' own section of the configuration. `ops/config.py` fills it; nothing here reads the environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LaneFlush = Literal["auto", "always", "never"]
Durability = Literal["process", "interval", "turn"]


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Lane, store and keeper.

    lane_bytes         size of one engine's lane, bytes of data ring
    lane_record_count  entries of a lane's directory of record headers
    lane_device        a /dev/dax* device for the lanes (CXL or persistent memory); "": files in the lane directory
    lane_flush         `auto` flush records on DAX media only; `always` also msync files elsewhere (slow); `never`
    block_tokens       tokens in one content-addressed block
    drain_interval_ms  how long the keeper gathers records before a group commit
    tail_interval_ms   how long rows of an unfinished block may wait in the lane for the block to become whole, so that they are
                       written once; what a power loss takes grows by it. `turn` and a park write them at once. 0: never wait
    durability         of store and stream journals: `process` page cache only; `interval` fsync every sync_interval_ms; `turn` also before
                       an answer ends
    store_map_bytes    size of the LMDB map (sparse; costs address space only); four fifths of it are used at most
    disk_budget_bytes  what the store may take of the disk; from nine tenths on, sessions least recently used are evicted. 0: no limit
    tenant_budget_bytes  the same for each namespace by itself
    memory_budget_bytes  page cache of the store's file: beyond it, pages that no process has mapped are given back. 0: the kernel decides
    session_ttl_s      a session that wasn't used for so long is evicted; 0: never
    compact_after_s    a session that wasn't used for so long becomes a base: superseded branches, rollback points and windows go
    compact_interval_s  how often the keeper looks whether there is something to compact; 0: only on command
    """

    lane_bytes: int = 512 << 20
    lane_record_count: int = 1 << 16
    lane_device: str = ""
    lane_flush: LaneFlush = "auto"
    block_tokens: int = 32
    drain_interval_ms: int = 500
    tail_interval_ms: int = 5000
    durability: Durability = "interval"
    sync_interval_ms: int = 1000
    store_map_bytes: int = 1 << 40
    disk_budget_bytes: int = 0
    tenant_budget_bytes: int = 0
    memory_budget_bytes: int = 0
    session_ttl_s: float = 0.0
    compact_after_s: float = 600.0
    compact_interval_s: float = 60.0
