"""What an engine tells of itself once a second: counters since its start, gauges of this moment, and what each tenant takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine import messages as m

if TYPE_CHECKING:
    from engine.loop import Engine


@dataclass(slots=True)
class Counters:
    """Since the start of the process."""

    steps: int = 0
    decode_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    forced_tokens: int = 0
    restored_tokens: int = 0
    bad_blocks: int = 0
    decode_step_ms: float = 0.0


def tenant_stats(engine: Engine) -> dict[str, m.TenantStats]:
    """What each tenant takes of this engine now."""
    resident = [slot for slot in engine.arena.slots if slot.length and slot.namespace]
    names = {slot.namespace for slot in resident} | engine.evicted.keys()
    used, refused = Counter[str](), Counter[str]()
    if engine.capture:
        shares = engine.capture.lane.shares
        shares.free(engine.capture.lane.tail)
        used, refused = shares.used, shares.refused
        names |= {name for name, size in used.items() if name and size} | refused.keys()
    return {
        name: m.TenantStats(
            memory_bytes=sum(engine.arena.slot_bytes(slot) for slot in resident if slot.namespace == name),
            memory_limit=engine.tiers.tenant_limit(name, "memory"),
            evicted=engine.evicted[name],
            lane_bytes=used[name],
            lane_limit=engine.tiers.tenant_limit(name, "lane"),
            lane_refused=refused[name],
            lag_tokens=sum(s.lag_tokens for s in resident if s.namespace == name),
        )
        for name in sorted(names)
    }


def engine_stats(engine: Engine) -> m.EngineStats:
    """Counters and gauges of this moment."""
    slots, counters, capture = engine.arena.slots, engine.counters, engine.capture
    resident = [slot for slot in slots if slot.length]
    by_kernel, no_kernel = engine.cache.by_rows
    return m.EngineStats(
        running=len(engine.active),
        waiting=len(engine.waiting),
        slots=len(slots),
        slots_in_use=sum(slot.busy for slot in slots),
        resident_sessions=len({slot.session for slot in resident if slot.session}),
        resident_tokens=sum(slot.length for slot in resident),
        steps=counters.steps,
        decode_steps=counters.decode_steps,
        prefill_tokens=counters.prefill_tokens,
        decode_tokens=counters.decode_tokens,
        forced_tokens=counters.forced_tokens,
        restored_tokens=counters.restored_tokens,
        captured_bytes=capture.captured_bytes if capture else 0,
        capture_seconds=capture.seconds if capture else 0.0,
        lane_full=capture.lane_full if capture else 0,
        lanes_renewed=engine.lane_watch.renewed,
        lane_gone=int(engine.lane_watch.is_gone),
        lane_free_bytes=capture.lane.free_bytes if capture else 0,
        bad_blocks=counters.bad_blocks,
        capture_lag_tokens=sum(slot.lag_tokens for slot in resident),
        points_taken=engine.points.taken,
        points_resident=sum(len(slot.points) for slot in resident),
        points_written=engine.points.written,
        point_bytes=engine.points.written_bytes,
        points_waiting=len(engine.points.waiting),
        points_dropped=engine.points.dropped,
        points_missing=engine.points.missing,
        windows_lost=capture.windows_lost if capture else 0,
        capture_by_handlers=int(capture.by_handlers) if capture else 0,
        capture_in_two_passes=int(capture.in_two_passes) if capture else 0,
        restore_by_handlers=int(capture.restore_by == "scatter") if capture else 0,
        attention_by_kernel=int(by_kernel),
        decode_graphs=engine.graphs.recorded,
        decode_graph_steps=engine.graphs.replayed,
        prefill_tokens_per_s=engine.speeds.prefill_tokens_per_s,
        restore_bytes_per_s=engine.speeds.restore_bytes_per_s,
        decode_step_ms=counters.decode_step_ms,
        followed_streams=len(engine.follower.follows),
        followed_tokens=sum(known.slot.length for known in engine.follower.follows.values()),
        followed_restored_tokens=engine.follower.restored_tokens,
        capture_by=capture.by if capture else "",
        restore_by=capture.restore_by if capture else "",
        decode_graph=engine.graphs.state,
        attention_by=f"torch: {no_kernel}" if no_kernel else "",
    )
