"""The tiers' own section of the configuration. `ops/config.py` fills it; nothing here reads the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LaneFlush = Literal["auto", "always", "never"]
LaneEncryption = Literal["auto", "always"]
Durability = Literal["process", "interval", "turn"]
Budgeted = Literal["disk", "lane", "memory"]


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Budgets of one tenant, `[tenants.NAME]`. A key that is missing: as `tiers.tenant_…` says for every tenant. 0: no limit.

    disk_bytes    of the store, over all its sessions
    lane_bytes    of each engine's lane, records that wait for the keeper
    memory_bytes  of each engine's device, state that is resident
    """

    disk_bytes: int | None = None
    lane_bytes: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Lane, store and keeper.

    lane_bytes         size of one engine's lane, bytes of data ring
    lane_record_count  entries of a lane's directory of record headers
    lane_device        a /dev/dax* device for the lanes (CXL or persistent memory); "": files in the lane directory
    lane_flush         `auto` flush records on DAX media only; `always` also msync files elsewhere (slow); `never`
    lane_encryption    payloads of tenants that have a key are sealed in the lane: `auto` where it outlives the machine's memory
                       (a disk, DAX, a device), or `always`
    block_tokens       tokens in one content-addressed block
    drain_interval_ms  how long the keeper gathers records before a group commit
    tail_interval_ms   how long rows of an unfinished block may wait in the lane for the block to become whole, so that they are
                       written once; what a power loss takes grows by it. `turn` and a park write them at once. 0: never wait
    durability         of store and stream journals: `process` page cache only; `interval` fsync every sync_interval_ms; `turn` also before
                       an answer ends
    store_map_bytes    size of the LMDB map (sparse; costs address space only); four fifths of it are used at most
    disk_budget_bytes  what the store may take of the disk; from nine tenths on, sessions least recently used are evicted.
                       0: what the disk has room for, less a twentieth of it (8 GB at most) for others
    tenant_budget_bytes  the same for each tenant by itself; `[tenants.NAME]` says otherwise for one
    tenant_lane_bytes  what the records of one tenant that wait for the keeper may take of an engine's lane: beyond it nothing more of that
                       tenant is captured until there is room, the others' records have theirs. 0: no limit
    tenant_memory_bytes  what the state of one tenant's sequences may take of an engine's device: beyond it, those that are idle go
                         from there, least recently used first. 0: no limit
    memory_budget_bytes  page cache of the store's file: beyond it, pages that no process has mapped are given back. 0: the kernel decides
    session_ttl_s      a session that wasn't used for so long is evicted; 0: never
    compact_after_s    a session that wasn't used for so long becomes a base: superseded branches, rollback points and windows go
    compact_interval_s  how often the keeper looks whether there is something to compact; 0: only on command

    `tenants`, by namespace, comes from the tables `[tenants.NAME]`.
    """

    lane_bytes: int = 512 << 20
    lane_record_count: int = 1 << 16
    lane_device: str = ""
    lane_flush: LaneFlush = "auto"
    lane_encryption: LaneEncryption = "auto"
    block_tokens: int = 32
    drain_interval_ms: int = 500
    tail_interval_ms: int = 5000
    durability: Durability = "interval"
    sync_interval_ms: int = 1000
    store_map_bytes: int = 1 << 40
    disk_budget_bytes: int = 0
    tenant_budget_bytes: int = 0
    tenant_lane_bytes: int = 0
    tenant_memory_bytes: int = 0
    memory_budget_bytes: int = 0
    session_ttl_s: float = 0.0
    compact_after_s: float = 600.0
    compact_interval_s: float = 60.0
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> TierSettings:
        """From what `dataclasses.asdict` gave, as it comes out of JSON."""
        tenants = {name: TenantLimits(**limits) for name, limits in fields.get("tenants", {}).items()}
        return cls(**{**fields, "tenants": tenants})

    def tenant_limit(self, namespace: str, what: Budgeted) -> int:
        """Bytes that a tenant may take of something; 0: no limit."""
        own = self.tenants.get(namespace)
        limit = None
        if own is not None:
            limit = {"disk": own.disk_bytes, "lane": own.lane_bytes, "memory": own.memory_bytes}[what]
        if limit is None:
            limit = {
                "disk": self.tenant_budget_bytes,
                "lane": self.tenant_lane_bytes,
                "memory": self.tenant_memory_bytes,
            }[what]
        return limit
