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
    durability         `process` page cache only; `interval` fsync every sync_interval_ms; `turn` also before an answer ends
    store_map_bytes    size of the LMDB map (sparse; costs address space only)
    """

    lane_bytes: int = 512 << 20
    lane_record_count: int = 1 << 16
    lane_device: str = ""
    lane_flush: LaneFlush = "auto"
    block_tokens: int = 32
    drain_interval_ms: int = 500
    durability: Durability = "interval"
    sync_interval_ms: int = 1000
    store_map_bytes: int = 1 << 40
