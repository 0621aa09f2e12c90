"""Which engine goes on with a stream. Stage: place; pure.

First the engine that holds the session or the longest prefix of its tokens, else the least loaded one that isn't a spare.
Spares are idle engines with weights loaded, kept free so that a failover meets no queue; they serve when nobody else can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PREFIX_WORTH_TOKENS = 32  # shorter than a block: nothing that another engine couldn't have at once
QUEUE_AHEAD = 2  # streams beyond its slots that an engine is given, so that it finds the next one when a slot is free


@dataclass(frozen=True, slots=True)
class EngineView:
    """What placement needs to know of an engine that can serve."""

    engine: str
    load: int  # live streams
    slots: int
    resident_count: int  # sequences whose state it may still hold
    resident_prefix: int  # tokens of this request that it may still hold
    holds_session: bool = False

    @property
    def has_room(self) -> bool:
        return self.load < self.slots + QUEUE_AHEAD


def choose(views: Sequence[EngineView], spares: int) -> str | None:
    """The engine to submit to, or None if there is none, or none with room."""
    holder = max(views, key=lambda view: (view.holds_session, view.resident_prefix, -view.load), default=None)
    if holder is None:
        return None
    wanted = holder.has_room if holder.holds_session else holder.load < holder.slots
    if holder.resident_prefix >= PREFIX_WORTH_TOKENS and wanted:
        return holder.engine
    active = [view for view in active_engines(views, spares) if view.has_room]
    if not active:
        return None
    return min(active, key=lambda view: (view.load, -view.resident_prefix, view.engine)).engine


def active_engines(views: Sequence[EngineView], spares: int) -> list[EngineView]:
    """All but the spares: those in use stay in use, so after a failover the restarted engine is the new spare."""
    count = max(1, len(views) - spares)
    return sorted(views, key=lambda view: (-view.load, -view.resident_count, view.engine))[:count]


def common_prefix(a: bytes, b: bytes) -> int:
    """How many tokens two packed lists share from the start."""
    count = min(len(a), len(b)) // 4
    left, right = np.frombuffer(a, "<i4", count), np.frombuffer(b, "<i4", count)
    different = np.flatnonzero(left != right)
    return int(different[0]) if different.size else count
