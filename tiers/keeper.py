"""The keeper: moves records from all lanes into the store, in group commits. Stage *drain*; one process, one thread, no torch.

Every record is verified before it is stored, so bytes that went bad in a lane can't become a block with a good checksum. A
lane's tail moves only after its records are committed and synced, and taking a record twice changes nothing: killed
at any instruction, the next keeper goes on. A full disk or map costs durability, never the process: records wait in the lanes.
Source: docs/log-format.md
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np
import structlog

from tiers import failpoints, media
from tiers.base import SessionKey, session_key
from tiers.clock import SteadyClock
from tiers.compaction import (
    GRACE_S,
    MAP_SHARE,
    Budget,
    Compaction,
    Now,
    key_of,
    make_base,
    plan_folds,
    sequences_of,
    session_uses,
    tenant_bytes,
)
from tiers.errors import BadBlock, BadRecord, OtherFormat, OverBudget, StaleEpoch, StoreFailed, TierError
from tiers.export import import_slice
from tiers.keys import Locked
from tiers.lane import LaneReader, LaneRef, LaneSet, RecordHeader, RecordType, lane_size
from tiers.layout import BlockId, RootId, SequenceId, block_chain, chain_root, point_id
from tiers.lock import is_held
from tiers.pages import cached_bytes, drop_cached
from tiers.paths import Paths
from tiers.repair import ASIDE, Damaged, repair_store
from tiers.settings import TierSettings
from tiers.shrink import Shrink
from tiers.store import Group, Pin, RootInfo, Store, StreamOwner, stream_key
from tiers.track import Part, Sealed, Track, open_track

log = structlog.get_logger()

GROUP_BYTES = 16 << 20  # commits of 4 MB and more reach the disk's speed (FACTS)
GROUP_RECORDS = 2048
TRACKS_CACHED = 4096
RETRY_STORE_S = 1.0
REQUEST_LIMIT_BYTES = 8 << 20
SUPERSEDED_SCAN_LIMIT = 256
LOCK_WAIT_S = 5.0
READER_CHECK_S = 5.0
SYNC_AT_SHARE = 0.5
JOB_SLICE_S = 0.02  # of compaction between two looks at the lanes and the socket
JOB_PAUSE_S = 0.005  # between slices of what was asked for
BACKGROUND_PAUSE_S = 0.06
COLLECT_EVERY = 10  # background compactions fold each time, and collect once in so many: that looks at every base
OPS = (
    "drain",
    "stats",
    "positions",
    "forget",
    "import",
    "repair",
    "compact",
    "job",
    "sessions",
    "tenants",
    "pin",
    "remove",
    "drop_locked",
)
SNAPSHOT_LIMIT_S = 30.0  # a restore's slice takes well under a second
WAITING_SHARE = 0.25  # of a lane that rows of unfinished blocks may keep from being used again


@dataclass(slots=True)
class Batch:
    """What one group commit takes: records by lane, in order, and how far that is in each lane."""

    records: list[tuple[LaneReader, RecordHeader]] = field(default_factory=list)
    taken: dict[int, int] = field(default_factory=dict)  # lane id -> record after the last one taken
    more: bool = False  # a lane holds records beyond these


class Drain:
    """Lanes into store. Not thread-safe; the control socket is `Keeper`'s business."""

    def __init__(self, paths: Paths, settings: TierSettings) -> None:
        self._paths = paths
        self._settings = settings
        self._lanes = LaneSet(paths.lane_dir, writable_tail=True)
        self._store: Store | None = None
        self._tracks: dict[SequenceId, Track] = {}
        self._dirty: dict[SequenceId, Track] = {}
        self._waiting: dict[SequenceId, float] = {}  # since when rows of an unfinished block wait in the lane
        self._clock = SteadyClock()
        self._healthy_ms = self._clock()
        self.named: set[bytes] | None = None  # while blocks are being collected: ids that records name meanwhile
        self._reported: set[SequenceId] = set()
        self._taken: dict[int, int] = {}  # by lane id: first record that isn't taken; the tail follows after a sync
        self._synced_positions: dict[SequenceId, int] = {}  # of those that were committed since the last sync
        self._retry_at = 0.0
        self._synced_at = time.monotonic()
        self._checked_at = time.monotonic()
        self._unsynced = False
        self.failing = ""
        self._snapshots: dict[tuple[int, int], float] = {}  # open ones of all processes: when they were first seen
        self._held: set[tuple[int, int]] = set()  # those that are held for too long
        self._aged_at = -1e9
        self.cached_bytes = 0  # of the store's file, when it was looked at last
        self.counts: Counter[str] = Counter()

    def open(self) -> None:
        """Make or open the store now, so that readers find one. Raises StoreFailed."""
        self._adopt_device_lanes()
        self._open_store()

    def _adopt_device_lanes(self) -> None:
        """Lanes on a DAX device outlive a restart of the machine, their links in shared memory don't."""
        if not self._settings.lane_device:
            return
        try:
            device = media.Device.find(self._settings.lane_device)
            for link in media.adopt(self._paths.lane_dir, device, lane_size):
                log.info("drain.lane_adopted", lane=link.stem, device=str(device.path))
        except (OSError, OtherFormat) as error:
            log.error("drain.device_failed", device=self._settings.lane_device, error=str(error))

    def store(self) -> Store:
        """The open store, for compaction. Raises StoreFailed."""
        return self._open_store()

    def is_open(self, store: Store) -> bool:
        """Whether this is still the store in use: one that failed is closed and opened anew."""
        return self._store is store

    def now(self) -> Now:
        """The time, as "used last" is counted."""
        return Now(self._clock(), self._healthy_ms)

    def settle(self) -> None:
        """Take everything and free the lanes: what is deleted now doesn't come back out of a lane after a crash. Raises StoreFailed."""
        try:
            self.flush(sync=True)
        except OverBudget:
            self.sync()

    def catch_up(self) -> None:
        """Take all records that are in the lanes, or at least see what they name. Raises StoreFailed."""
        try:
            while self.step():
                pass
        except OverBudget:
            self._name_unread()

    def _name_unread(self) -> None:
        """Sequences that open in the lanes lean on blocks, before they can be taken."""
        if self.named is None:
            return
        for lane in self._lanes.scan():
            for header in lane.records(self._next(lane)):
                if header.type == RecordType.OPEN:
                    try:
                        o = lane.open_payload(header)
                    except BadRecord:
                        continue
                    tokens = np.frombuffer(o.tokens, "<i4")
                    self.named.update(block_chain(RootId(o.root), o.namespace, tokens, o.block_tokens))
                    self.named.add(header.sequence)

    # ------------------------------------------------------------ one group commit

    def step(self, *, all_tails: bool = False) -> bool:
        """Commit one group of what the lanes hold, if anything; return whether more is left. Raises StoreFailed.

        Rows of an unfinished block wait in the lane until the block is whole, so that they are written once; not for longer than
        tail_interval_ms, not when the lane fills up, and not with `all_tails`.
        """
        lanes = self._lanes.scan()
        self._drop_gone_lanes()
        batch = self._choose(lanes)
        self._add_due(lanes, all_tails and not batch.more)
        if not batch.records and not self._dirty:
            return False
        store = self._open_store()
        self._check_budget(store, batch)
        started = time.monotonic()
        counts = Counter(self.counts)
        try:
            with store.group() as group:
                for lane, header in batch.records:
                    self._take(group, lane, header)
                self._store_tails(group, all_tails and not batch.more)
        except BaseException as error:
            self._forget_uncommitted(counts)
            if isinstance(error, StoreFailed):
                self._fail(error)
            raise
        self._taken.update(batch.taken)
        self._committed(batch, group.put_bytes, started)
        if self._settings.durability == "process":
            self._free()
        elif any(lane.used_share(lane.tail, self._next(lane)) > SYNC_AT_SHARE for lane in lanes):
            self.sync()  # the lanes need the room sooner than the interval ends
        return batch.more

    def _check_budget(self, store: Store, batch: Batch) -> None:
        """Put nothing that the budget has no room for: compaction then evicts. Raises OverBudget."""
        limit = int(MAP_SHARE * store.map_bytes())
        limit = min(self._settings.disk_budget_bytes or limit, limit)
        size = sum(header.payload_bytes for _, header in batch.records)
        used = store.usage().total_bytes
        if not batch.records or used + size <= limit:
            return
        error = OverBudget("the store's budget is used up", where=str(store.path), cause=f"{used} of {limit} bytes")
        if not self.failing:
            log.error("drain.over_budget", error=str(error))
        self.failing = str(error)
        self.counts["over_budget"] += 1
        raise error

    def _drop_gone_lanes(self) -> None:
        """A lane whose file is gone takes along what waited in it: those sequences are as far as they are stored."""
        for sequence in [s for s in self._waiting if any(lane.closed for lane in _lanes_of(self._tracks[s]))]:
            del self._waiting[sequence], self._tracks[sequence]

    def _add_due(self, lanes: list[LaneReader], everything: bool) -> None:
        """Mark as dirty whose rows have waited long enough in their lanes."""
        full = {lane.lane_id for lane in lanes if self._is_filling(lane)}
        since = time.monotonic() - self._settings.tail_interval_ms / 1000
        for sequence, waits in self._waiting.items():
            track = self._tracks[sequence]
            if everything or waits <= since or any(lane.lane_id in full for lane in _lanes_of(track)):
                self._dirty[sequence] = track

    def _is_filling(self, lane: LaneReader) -> bool:
        """Whether what waits keeps too much of a lane from being used again, or the lane is to go."""
        return "~" in lane.name or lane.used_share(lane.tail, self._next(lane)) > WAITING_SHARE

    def _next(self, lane: LaneReader) -> int:
        """First record of a lane that isn't committed."""
        return max(lane.tail, self._taken.get(lane.lane_id, 0))

    def _free(self) -> None:
        """Let the lanes' tails follow what is committed and, unless durability is `process`, on the disk; not past rows that wait."""
        failpoints.reach("drain.free.before")
        for lane in self._lanes:
            number = self._next(lane)
            for sequence in self._waiting:
                for part in self._tracks[sequence].parts:
                    if isinstance(part.source, LaneRef) and part.source.lane is lane:
                        number = min(number, part.source.header.number)
            lane.advance_tail(max(number, lane.tail))
        failpoints.reach("drain.free.after")

    def _choose(self, lanes: list[LaneReader]) -> Batch:
        """Records for one group, an equal share of its bytes for each lane that has some."""
        batch = Batch()
        share = GROUP_BYTES // max(1, len(lanes))
        for lane in lanes:
            taken, size = self._next(lane), 0
            headers = lane.records(taken, GROUP_RECORDS)
            batch.more |= len(headers) == GROUP_RECORDS
            for header in headers:
                if size and size + header.payload_bytes > share:
                    batch.more = True
                    break
                batch.records.append((lane, header))
                size += header.payload_bytes
                taken = header.number + 1
            batch.taken[lane.lane_id] = taken
            if "~" in lane.name and not headers and lane.tail == taken:
                self._remove_drained(lane)
        return batch

    def _remove_drained(self, lane: LaneReader) -> None:
        """A lane that was set aside has no writer: once empty it is only memory in use."""
        media.remove(lane.path)
        log.info("drain.lane_removed", lane=lane.name)

    def _open_store(self) -> Store:
        if self._store is None:
            if time.monotonic() < self._retry_at:
                raise StoreFailed(self.failing or "the store is closed")
            try:
                self._store = Store(
                    self._paths.store, map_bytes=self._settings.store_map_bytes, durability=self._settings.durability
                )
            except StoreFailed as error:
                self._fail(error)
                raise
        return self._store

    def _fail(self, error: StoreFailed) -> None:
        """Close the store and try again after a while, from the lanes' tails.

        After an error nobody knows which pages the kernel still means to write (a failed fsync marks them clean), so nothing that wasn't
        synced is relied upon: its records are still in the lanes, and are taken again by a store that is opened anew.
        """
        self._forget_tracks()
        self.counts["store_failures"] += 1
        if not self.failing:
            log.error("drain.failed", error=str(error))
        self.failing = str(error)
        self._retry_at = time.monotonic() + RETRY_STORE_S
        if self._store is not None:
            store, self._store = self._store, None
            try:
                store.close()
            except StoreFailed:
                pass  # said already

    def _forget_uncommitted(self, counts: Counter[str]) -> None:
        """The transaction is gone: what was learnt from it is read again from the store."""
        self._forget_tracks()
        self.counts = counts

    def _forget_tracks(self) -> None:
        """Read everything again, sequences from the store and waiting rows from the lanes: taking a record twice changes nothing."""
        self._tracks.clear()
        self._dirty.clear()
        self._waiting.clear()
        self._taken.clear()

    def _committed(self, batch: Batch, put_bytes: int, started: float) -> None:
        self._unsynced = True
        if self.failing:
            log.info("drain.recovered", was=self.failing)
            self.failing = ""
            self._healthy_ms = self._clock()
        self.counts["commits"] += 1
        self.counts["records"] += len(batch.records)
        self.counts["put_bytes"] += put_bytes
        ms = round(1000 * (time.monotonic() - started), 2)
        log.debug("drain.committed", records=len(batch.records), put_bytes=put_bytes, ms=ms)
        for sequence in [s for s, track in self._tracks.items() if track.closed]:
            del self._tracks[sequence]
        spare = len(self._tracks) - TRACKS_CACHED
        for sequence in [s for s in self._tracks if s not in self._waiting][: max(0, spare)]:
            del self._tracks[sequence]

    # ------------------------------------------------------------ one record

    def _take(self, group: Group, lane: LaneReader, header: RecordHeader) -> None:
        """Put one record into the group. A record that can't be used is counted and named, and passed over."""
        try:
            if header.type == RecordType.OPEN:
                self._take_open(group, lane, header)
            elif header.type == RecordType.ROWS:
                self._take_rows(group, lane, header)
            elif header.type == RecordType.CLOSE:
                self._take_close(group, header)
            elif header.type == RecordType.POINT:
                self._take_point(group, lane, header)
            else:
                raise BadRecord("a record's entry is flipped", where=f"{lane.path.name} record {header.number}")
        except BadRecord as error:
            self.counts["bad_records"] += 1
            log.warning("drain.bad_record", error=str(error))
        except StaleEpoch as error:
            self.counts["stale_records"] += 1
            log.warning("drain.stale_epoch", error=str(error))

    def _take_open(self, group: Group, lane: LaneReader, header: RecordHeader) -> None:
        if self._track(group, header.sequence) is not None:
            return  # taken before: this is a replay
        o = lane.open_payload(header)
        self._check_epoch(group, lane, header, o.stream)
        tenant = group.tenant(chain_root(RootId(o.root), o.namespace))
        if tenant is not None and tenant.sealed and not group.keys.has(o.namespace):
            raise BadRecord(f"the key of namespace {o.namespace} isn't there", where=f"stream {o.stream}")
        group.put_root(o.root, RootInfo(o.layout, o.block_tokens, o.state_bytes))
        group.put_tenant(RootId(o.root), o.namespace)
        track = open_track(o, header.epoch)
        self._tracks[header.sequence] = self._dirty[header.sequence] = track
        if self.named is not None:
            self.named.update(block_chain(track.root, track.namespace, np.frombuffer(o.tokens, "<i4"), o.block_tokens))
            self.named.add(header.sequence)

    def _check_epoch(self, group: Group, lane: LaneReader, header: RecordHeader, stream: str) -> None:
        """Refuse what was appended under an older epoch after the newer one had begun; note a newer one.

        What the fenced engine appended before is good: its successor leans on it.
        """
        key = stream_key(stream)
        owner = group.owner(key)
        if owner is not None and header.epoch < owner.epoch and header.number >= owner.heads.get(lane.lane_id, 0):
            where = f"{lane.path.name} record {header.number}, stream {stream}"
            raise StaleEpoch(f"epoch {header.epoch} after {owner.epoch} had begun", where=where)
        if owner is None or header.epoch > owner.epoch:
            heads = {other.lane_id: other.head() for other in self._lanes if other is not lane}
            group.put_owner(key, StreamOwner(header.epoch, {**heads, lane.lane_id: header.number}))

    def _take_rows(self, group: Group, lane: LaneReader, header: RecordHeader) -> None:
        where = f"{lane.path.name} record {header.number}, sequence {header.sequence.hex()}"
        track = self._track(group, header.sequence)
        if track is None:
            self._report(header.sequence, "drain.orphan", f"rows without an OPEN record at {where}")
            return
        self._check_epoch(group, lane, header, track.stream)
        if lane.frame(header).size != track.layout.frame_bytes(header.token_count):
            raise BadRecord("a frame doesn't have its layout's size", where=where)
        self._dirty[header.sequence] = track
        source = LaneRef(lane, header)
        position = track.position
        sealed = track.add(header.token_start, header.token_end, lane.tokens(header), source)
        if sealed is None:
            text = f"rows [{header.token_start}, {header.token_end}) after {track.position} at {where}"
            self._report(header.sequence, "drain.gap", text)
            return
        self.counts["captured_bytes"] += track.layout.frame_bytes(max(0, track.position - position))
        for block in sealed:
            self._seal(group, track, header.sequence, block)

    def _take_point(self, group: Group, lane: LaneReader, header: RecordHeader) -> None:
        where = f"{lane.path.name} record {header.number}, sequence {header.sequence.hex()}"
        track = self._track(group, header.sequence)
        if track is None:
            self._report(header.sequence, "drain.orphan", f"a rollback point without an OPEN record at {where}")
            return
        self._check_epoch(group, lane, header, track.stream)
        place = track.place(header.token_end)
        if place is None:
            text = f"a rollback point at {header.token_end}, rows at {track.position}, at {where}"
            self._report(header.sequence, "drain.gap", text)
            return
        if self.named is not None:
            self.named.add(place.id)
        if group.has_point(place):
            self.counts["points_shared"] += 1
            return
        state = lane.state(header)
        if state.size != track.layout.state_bytes:
            raise BadRecord("a rollback point doesn't have its layout's size", where=where)
        self.counts["captured_bytes"] += state.size
        group.put_point(track, place, lane.point_kind(header), state)
        self.counts["points_put"] += 1

    def _take_close(self, group: Group, header: RecordHeader) -> None:
        track = self._track(group, header.sequence)
        if track is not None:
            track.closed = True
            self._dirty[header.sequence] = track

    def _track(self, group: Group, sequence: SequenceId) -> Track | None:
        track = self._tracks.get(sequence)
        if track is None:
            track = group.load_track(sequence)
            if track is not None:
                self._tracks[sequence] = track
        return track

    def _report(self, sequence: SequenceId, event: str, text: str) -> None:
        """Name a broken sequence once; count each of its records."""
        self.counts[event.removeprefix("drain.")] += 1
        if sequence not in self._reported:
            if len(self._reported) > TRACKS_CACHED:
                self._reported.clear()
            self._reported.add(sequence)
            log.warning(event, error=text)

    # ------------------------------------------------------------ blocks and tails

    def _seal(self, group: Group, track: Track, sequence: SequenceId, block: Sealed) -> None:
        """Store a block that became whole, unless it is there, and drop the tail pieces that it supersedes."""
        if self.named is not None:
            self.named.add(block.id)
        if group.good_block(block.id):
            self.counts["blocks_shared"] += 1
        else:
            try:
                self._join(group, track, block.parts, len(block.tokens) // 4)
            except BadBlock as error:
                self.counts["bad_blocks"] += 1
                log.warning("drain.bad_block", error=str(error))
                return
            failpoints.reach("drain.seal.before")
            group.put_block(track, block)
            failpoints.reach("drain.seal.after")
            self.counts["blocks_put"] += 1
        for part in block.parts:
            if isinstance(part.source, bytes):
                group.delete_tail(part.source)
        self._drop_superseded(group, sequence, block)

    def _join(self, group: Group, track: Track, parts: list[Part], token_count: int) -> None:
        """Build one frame out of parts in lanes (verified when they were taken) and on disk (verified here)."""
        out = group.frame_buffer(token_count, track.layout)
        frames: list[tuple[Any, int, int, int]] = []
        for source, count, start, end, _ in parts:
            if isinstance(source, LaneRef):
                frame = source.lane.frame(source.header, verify=False)
            else:
                frame = group.tail(source).frame
            frames.append((frame, count, start, end))
        track.layout.join(frames, out)

    def _drop_superseded(self, group: Group, sequence: SequenceId, block: Sealed) -> None:
        """Tails of ended sequences that hold nothing but the first tokens of this block."""
        by_sequence: dict[SequenceId, list[Any]] = {}
        for piece in group.tails(block.parent, limit=SUPERSEDED_SCAN_LIMIT):
            by_sequence.setdefault(piece.sequence, []).append(piece)
        for other, pieces in by_sequence.items():
            tokens = b"".join(piece.tokens for piece in pieces)
            track = self._track(group, other) if other != sequence else None
            if track is not None and track.closed and block.tokens.startswith(tokens):
                for piece in pieces:
                    group.delete_tail(piece.key)

    def _store_tails(self, group: Group, everything: bool) -> None:
        """Store what is due of each unfinished block as one piece, and how far each sequence is."""
        now = time.monotonic()
        due = now - self._settings.tail_interval_ms / 1000
        for sequence, track in self._dirty.items():
            waits = self._waiting.setdefault(sequence, now)
            full = any(self._is_filling(lane) for lane in _lanes_of(track))
            if everything or track.closed or full or waits <= due:
                self._store_tail(group, track, sequence)
            if track.stored_position == track.position:
                del self._waiting[sequence]
            state = (track.parent, track.stored_position, track.closed)
            if state != track.saved:
                before = group.progress(sequence)
                self._synced_positions.setdefault(sequence, before.position if before is not None else 0)
                group.put_progress(sequence, track, track.stored_position, self._clock())
                track.saved = state
        self._dirty.clear()

    def _store_tail(self, group: Group, track: Track, sequence: SequenceId) -> None:
        stored = sum(isinstance(part.source, bytes) for part in track.parts)
        fresh = track.parts[stored:]
        count = sum(part.token_count for part in fresh)
        if count:
            self._join(group, track, fresh, count)
            key = group.put_tail(track, sequence, track.position - count, track.tokens[-4 * count :])
            track.parts[stored:] = [Part(key, count, 0, count)]
            self.counts["tails_put"] += 1

    # ------------------------------------------------------------ on request

    def flush(self, sync: bool) -> dict[str, int]:
        """Commit everything that is in the lanes now; with `sync`, onto the disk. Returns each lane's tail. Raises StoreFailed."""
        goals = [(lane, lane.head()) for lane in self._lanes.scan()]
        while any(not lane.closed and self._next(lane) < head for lane, head in goals):
            self.step(all_tails=True)
        if self._waiting:
            self.step(all_tails=True)
        if sync:
            self.sync()
        return {lane.name: self._next(lane) for lane in self._lanes}

    def sync(self) -> None:
        """Bring what is committed onto the disk. Raises StoreFailed."""
        try:
            if self._store is not None:
                self._store.sync()
        except StoreFailed as error:
            self._fail(error)
            raise
        self._synced_at = time.monotonic()
        self._unsynced = False
        self._synced_positions.clear()
        self._free()

    def _trim_cache(self) -> None:
        """Give page cache back, as far as the budget asks for it and no process has the pages mapped."""
        limit = self._settings.memory_budget_bytes
        if not limit:
            return
        data = self._paths.store / "data.mdb"
        self.cached_bytes = cached_bytes(data)
        if self.cached_bytes > limit:
            drop_cached(data, self.cached_bytes - int(0.9 * limit))
            self.cached_bytes = cached_bytes(data)

    def _look_at_snapshots(self, store: Store) -> None:
        """Name the process that holds a snapshot for too long: pages freed since can't be used again, and the file grows."""
        now, open_now = time.monotonic(), store.snapshots()
        self._snapshots = {key: self._snapshots.get(key, now) for key in open_now}
        for (pid, number), since in self._snapshots.items():
            if now - since >= SNAPSHOT_LIMIT_S and (pid, number) not in self._held:
                self._held.add((pid, number))
                log.warning("drain.snapshot_held", pid=pid, s=round(now - since), commits_behind=open_now[pid, number])
        self._held &= self._snapshots.keys()

    def _check_store(self) -> None:
        """Free dead readers' snapshots, and notice that somebody deleted the file that is being written."""
        assert self._store is not None
        try:
            self._store.drop_dead_readers()
            self._store.check_file()
            self._look_at_snapshots(self._store)
        except StoreFailed as error:
            self._fail(error)
            raise

    def sync_if_due(self) -> None:
        """The `interval` and `turn` bound: everything committed is on the disk sync_interval_ms later. Raises StoreFailed."""
        now = time.monotonic()
        if self._store is not None and now - self._checked_at >= READER_CHECK_S:
            self._checked_at = now
            self._check_store()
            self._trim_cache()
        overdue = 1000 * (time.monotonic() - self._synced_at) >= self._settings.sync_interval_ms
        if self._unsynced and overdue and self._settings.durability != "process":
            self.sync()

    def forget(
        self, root: RootId, namespace: str, tokens: np.ndarray, session: str = "", keep_tokens: int = 0
    ) -> dict[str, int]:
        """Delete a token list's state, from its end up to the first block that something else needs as well.

        keep_tokens  of the list's beginning: what a fork that has computed nothing yet begins with
        """
        self.settle()
        store = self._open_store()
        blocks = tails = points = 0
        with store.group(freeing=True) as group:
            info = group.root(root)
            sequences = _delete_session(group, namespace, session) if session else 0
            ends = _ends(group, live_only=not session)
            if info is not None:
                chain = block_chain(root, namespace, tokens, info.block_tokens)
                packed = np.ascontiguousarray(tokens, "<i4").tobytes()
                size = 4 * info.block_tokens
                for at in range(len(chain) - 1, -1, -1):
                    if at * info.block_tokens >= keep_tokens:
                        tails += _delete_tails(group, chain[at], packed[at * size :])
                        points += _delete_points(group, chain[at], packed[at * size :])
                    is_kept = at == 0 or (at - 1) * info.block_tokens < keep_tokens or chain[at] in ends
                    if is_kept or self._in_use(group, chain[at]):
                        break
                    if group.node(chain[at]) is not None:
                        group.delete_block(chain[at - 1], packed[(at - 1) * size : at * size], chain[at])
                        blocks += 1
        self._forget_tracks()
        self._unsynced = True
        log.info("drain.forgot", blocks=blocks, tails=tails, points=points, sequences=sequences)
        return {"blocks": blocks, "tails": tails, "points": points, "sequences": sequences}

    def positions(self, sequences: list[SequenceId]) -> dict[str, tuple[int, int]]:
        """By sequence (hex): position that is committed, and position that would survive a loss of power.

        Under `process` nothing is synced on purpose, and committed is all that is promised. Unknown sequences are left out.
        """
        found: dict[str, tuple[int, int]] = {}
        promised = self._settings.durability == "process"
        with self._open_store().snapshot() as view:
            for sequence in sequences:
                progress = view.progress(sequence)
                if progress is not None:
                    stored = progress.position
                    synced = stored if promised else self._synced_positions.get(sequence, stored)
                    found[sequence.hex()] = stored, synced
        return found

    def import_slice(self, request: dict[str, Any]) -> dict[str, Any]:
        """One group commit of an exported file on this machine: {path, session, namespace, offset, index}. Raises BadFile, StoreFailed."""
        with self._open_store().group() as group:
            done = import_slice(
                group, Path(request["path"]), session=request["session"], namespace=request["namespace"],
                offset=request.get("offset", 0), index=request.get("index", 0), named=self.named,
            )  # fmt: skip
        self._unsynced = True
        if done.done:
            self.sync()
            log.info("drain.imported", session=request["session"], path=request["path"])
        return {"imported": msgspec.to_builtins(done)}

    def repair(self, damaged: list[tuple[str, bytes]]) -> dict[str, Any]:
        """Drop what is damaged and end what leans on it, in one group commit. Raises StoreFailed."""
        self.flush(sync=False)
        live = frozenset(sequence for sequence, track in self._tracks.items() if not track.closed)
        with self._open_store().group() as group:
            things = [Damaged(kind, key) for kind, key in damaged]
            done = repair_store(group, things, self._paths.store / ASIDE, live=live)
        self._forget_tracks()
        self.sync()
        log.warning("drain.repaired", dropped=done.dropped, kept_aside=len(done.kept_aside))
        return {"repaired": asdict(done) | {"recompute": [part._asdict() for part in done.recompute]}}

    def _in_use(self, group: Group, block: BlockId) -> bool:
        return bool(group.children(block, 1) or group.tails(block, limit=1) or group.points(block))

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and how far behind the lanes are."""
        lanes = {}
        for lane in self._lanes.scan():
            tail = lane.tail
            head = lane.head(tail)
            taken = max(tail, self._next(lane))
            lanes[lane.name] = {"tail": tail, "taken": taken, "head": head, "incarnation": lane.incarnation}
        stats: dict[str, Any] = {
            "lanes": lanes,
            "failing": self.failing,
            "unsynced_ms": round(1000 * (time.monotonic() - self._synced_at)) if self._unsynced else 0,
            **dict.fromkeys(COUNTERS, 0),
            **self.counts,
        }
        if self._store is not None:
            with self._store.snapshot() as view:
                stats.update(
                    {f"stored_{name}": view.count(name) for name in ("blocks", "tails", "points", "sequences")}
                )
            stats["store_bytes"] = self._store.used_bytes()
            stats["live_bytes"] = self._store.usage().total_bytes
            stats["cached_bytes"] = self.cached_bytes
            stats["budgets"] = {
                "disk": [stats["live_bytes"], self._settings.disk_budget_bytes],
                "memory": [self.cached_bytes, self._settings.memory_budget_bytes],
            }
            stats["snapshots_held"] = [pid for pid, _ in sorted(self._held)]
            stats["snapshot_lag"] = self._store.oldest_snapshot_lag()
        stats["io_write_bytes"] = _io_write_bytes()
        return stats

    # ------------------------------------------------------------ sessions

    def budget(self) -> Budget:
        """What compaction is to keep to."""
        s = self._settings
        return Budget(s.disk_budget_bytes, s.tenant_budget_bytes, s.session_ttl_s)

    def tenants(self) -> dict[str, dict[str, Any]]:
        """By namespace: what it has on the disk, {kind: [count, bytes]}, the total and its limit. Raises StoreFailed."""
        store = self._open_store()
        usage = store.usage()
        with store.snapshot() as view:
            names = {chain: tenant.namespace for chain, tenant in view.tenants()}
        found: dict[str, dict[str, Any]] = {}
        for (chain, kind), (count, size) in usage.items():
            kinds = found.setdefault(names.get(chain, ""), {"bytes": 0, "limit": self._settings.tenant_budget_bytes})
            entry = kinds.setdefault(kind, [0, 0])
            entry[0] += count
            entry[1] += size
            kinds["bytes"] += size
        return found

    def sessions(self, namespace: str | None = None, session: str | None = None) -> list[dict[str, Any]]:
        """Every stored session (or those that match): how far it is and what it takes. Raises StoreFailed."""
        found: dict[SessionKey, dict[str, Any]] = {}
        with self._open_store().snapshot() as view:
            stored = sequences_of(view, self.now())
            for use in session_uses(view, self.now()):
                if namespace in (None, use.namespace) and session in (None, use.session):
                    base = view.base(use.key)
                    found[use.key] = {
                        "namespace": use.namespace, "session": use.session, "stream": use.stream,
                        "root": base.root.hex() if base else "", "stored": base.position if base else 0,
                        "captured": base.position if base else 0, "points": len(base.points) if base else 0,
                        "bytes": use.bytes, "used_ms": use.used_ms, "live": use.live, "pinned": use.pinned,
                        "compacted": base is not None, "sequences": 0, "epoch": base.epoch if base else 0,
                    }  # fmt: skip
        for one in stored:
            entry = found.get(key_of(one.progress))
            if entry is not None:
                track = self._tracks.get(one.id)
                entry["sequences"] += 1
                entry["root"] = one.progress.root.hex()
                entry["stored"] = max(entry["stored"], one.progress.position)
                entry["captured"] = max(entry["captured"], track.position if track else one.progress.position)
                entry["epoch"] = max(entry["epoch"], one.progress.epoch)
        return sorted(found.values(), key=lambda entry: -entry["used_ms"])

    def pin(self, namespace: str, session: str, pinned: bool) -> None:
        """Never evict a session, or let it be evicted again. It need not be stored yet. Raises StoreFailed."""
        key = session_key(namespace, session)
        with self._open_store().group(freeing=True) as group:
            if pinned:
                group.put_pin(key, Pin(namespace, session))
            else:
                group.delete_pin(key)
        self._unsynced = True

    def remove(self, namespace: str, session: str, *, force: bool, dry_run: bool) -> dict[str, int]:
        """Delete a session and what only it needs. Raises ValueError (it is live, and not `force`), StoreFailed."""
        self.settle()
        key, lists = session_key(namespace, session), list[tuple[RootId, bytes]]()
        with self._open_store().snapshot() as view:
            base = view.base(key)
            if base is not None:
                lists.append((RootId(base.root), base.tokens))
            for one in sequences_of(view, self.now()):
                if key_of(one.progress) == key:
                    if one.live and not force:
                        raise ValueError(f"session {session} is live: end its streams first")
                    made = make_base(view, one.id, one.progress)
                    if made is not None:
                        lists.append((RootId(made.root), made.tokens))
        if dry_run:
            return {"token_lists": len(lists)}
        deleted: Counter[str] = Counter()
        for root, tokens in lists:
            deleted.update(self.forget(root, namespace, np.frombuffer(tokens, "<i4"), session))
        self.pin(namespace, session, False)
        return dict(deleted)

    def drop_locked(self) -> dict[str, int]:
        """Remove the names of what is sealed with keys that aren't there: the next collection frees the rest. Raises StoreFailed."""
        self.settle()
        dropped: Counter[str] = Counter()
        with self._open_store().group(freeing=True) as group:
            for key in [key for key, _ in group.scan_raw("sequences")]:
                if _is_locked(group, "sequences", key):
                    group.delete_sequence(SequenceId(key))
                    dropped["sequences"] += 1
            for key in [key for key, _ in group.scan_raw("bases")]:
                if _is_locked(group, "bases", key):
                    group.delete_base(SessionKey(key))
                    dropped["bases"] += 1
        self._unsynced = True
        log.warning("drain.dropped_locked", **dropped)
        return dict(dropped)

    def wants_compaction(self) -> bool:
        """Whether there is something to fold or to evict. Raises StoreFailed."""
        store, budget = self._open_store(), self.budget()
        usage = store.usage()
        with store.snapshot() as view:
            folds = plan_folds(
                sequences_of(view, self.now()), self.now().ms, int(1000 * self._settings.compact_after_s)
            )
            if folds or self._ttl_due(budget.ttl_s):
                return True
            tenants = tenant_bytes(view, usage) if budget.tenant_bytes else {}
        if self.counts["over_budget"] and self.failing:
            return True
        limits = [(usage.total_bytes, budget.disk_bytes), *((used, budget.tenant_bytes) for used in tenants.values())]
        return any(limit and used > 0.9 * limit for used, limit in limits)

    def _ttl_due(self, ttl_s: float) -> bool:
        """Whether sessions' age is to be looked at again, which reads every base: twenty times within the time they may live."""
        if not ttl_s or time.monotonic() - self._aged_at < ttl_s / 20:
            return False
        self._aged_at = time.monotonic()
        return True

    def close(self) -> None:
        """Let go of lanes and store, synced. Raises StoreFailed; the lanes keep what isn't on the disk."""
        try:
            if self._store is not None:
                store, self._store = self._store, None
                store.close()
                self._free()
        finally:
            self._lanes.close()


COUNTERS = (
    "commits", "records", "put_bytes", "blocks_put", "blocks_shared", "tails_put", "points_put", "points_shared",
    "captured_bytes", "over_budget", "bad_records", "bad_blocks",
    "stale_records", "orphan", "gap", "store_failures",
)  # fmt: skip


def _delete_tails(group: Group, parent: BlockId, rest: bytes) -> int:
    """Delete the unfinished blocks after `parent` that say the same as `rest`, as far as both go."""
    by_sequence: dict[SequenceId, list[Any]] = {}
    for piece in group.tails(parent):
        by_sequence.setdefault(piece.sequence, []).append(piece)
    deleted = 0
    for pieces in by_sequence.values():
        tokens = b"".join(piece.tokens for piece in pieces)
        if rest.startswith(tokens) or tokens.startswith(rest):
            for piece in pieces:
                group.delete_tail(piece.key)
                deleted += 1
    return deleted


def _delete_points(group: Group, parent: BlockId, rest: bytes) -> int:
    """Delete the rollback points in the block after `parent` that stand within `rest`."""
    deleted = 0
    for key, _ in group.points(parent):
        count = int.from_bytes(key[16:20], "big")
        if 4 * count <= len(rest) and point_id(parent, rest[: 4 * count]) == key[20:]:
            group.delete_point(key)
            deleted += 1
    return deleted


def _io_write_bytes() -> int:
    """Bytes that this process has written by system calls; 0 where the kernel doesn't say.

    Not its write_bytes: where the page cache has large folios, those count a whole one for each page that is written in it.
    """
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar:")), 0)


def _is_locked(group: Group, database: str, key: bytes) -> bool:
    """Whether a value is sealed with a key that isn't there."""
    try:
        group.keys.open(database, key, group.raw(database, key))
    except Locked:
        return True
    except BadBlock:
        pass
    return False


def _lanes_of(track: Track) -> set[LaneReader]:
    """Lanes in which rows of its unfinished block wait."""
    return {part.source.lane for part in track.parts if isinstance(part.source, LaneRef)}


def _ends(group: Group, *, live_only: bool) -> set[BlockId]:
    """Last whole blocks of what is stored: of every sequence (or of those only that aren't closed) and of every base."""
    ends: set[BlockId] = set()
    for _, raw in group.scan("sequences"):
        progress = group.decode_progress(raw)
        if not (live_only and progress.closed):
            ends.add(BlockId(progress.parent))
    for key, _ in group.scan("bases"):
        try:
            base = group.base(SessionKey(key))
        except BadBlock:
            continue
        if base is not None and base.blocks:
            ends.add(BlockId(base.blocks[-16:]))
    return ends


def _delete_session(group: Group, namespace: str, session: str) -> int:
    """Delete the sequence records that name a session, and its base."""
    group.delete_base(session_key(namespace, session))
    found = []
    for key, raw in group.scan("sequences"):
        progress = group.decode_progress(raw)
        if progress.session == session and progress.namespace == namespace:
            found.append(SequenceId(key))
    for sequence in found:
        group.delete_sequence(sequence)
    return len(found)


# ---------------------------------------------------------------- the process


class Busy(TierError):
    """The keeper does something else that excludes this."""

    hint = "Wait until it is done, then ask again"


class Job:
    """A compaction in hand: advanced in slices, looked at by number."""

    def __init__(self, number: int, compaction: Compaction, background: bool, shrink: Shrink | None = None) -> None:
        self.number = number
        self.background = background
        self.finished = False
        self.error = ""
        self._now: Compaction | Shrink = compaction
        self._counts: Counter[str] = Counter()
        self._steps = self._run(compaction, shrink)
        self._began = time.monotonic()

    def _run(self, compaction: Compaction, shrink: Shrink | None) -> Generator[None, None, None]:
        yield from compaction.run()
        if shrink is not None:
            self._counts = compaction.progress.counts
            self._now = shrink
            yield from shrink.run()

    def advance(self) -> None:
        """Work for JOB_SLICE_S at most, apart from the transaction in hand."""
        until = time.monotonic() + JOB_SLICE_S
        try:
            while time.monotonic() < until:
                next(self._steps)
                if self._now.progress.phase == "wait":
                    return
        except StopIteration:
            self.finished = True
            log.info("compact.done", s=round(time.monotonic() - self._began, 2), **self.state()["counts"])
        except (TierError, OSError) as error:
            self.finished, self.error = True, str(error)
            log.warning("compact.stopped", error=str(error))

    def cancel(self) -> None:
        """Stop where it is; what it has done stays."""
        self._steps.close()
        self.finished, self.error = True, "another compaction was asked for"

    def state(self) -> dict[str, Any]:
        """For the control socket."""
        at = self._now.progress
        counts = dict(self._counts + at.counts) if at.counts is not self._counts else dict(at.counts)
        return {
            "id": self.number, "phase": at.phase, "done": at.done, "total": at.total, "counts": counts,
            "finished": self.finished, "error": self.error, "background": self.background,
        }  # fmt: skip


class Keeper:
    """The keeper's loop: drain every drain_interval_ms, answer its control socket, end on `stop`.

    orphan_s  end by itself when nobody has held the run lock for so long (0: never); lanes are drained first
    """

    def __init__(self, paths: Paths, settings: TierSettings, *, orphan_s: float = 15.0) -> None:
        self._paths = paths
        self._settings = settings
        self._interval_s = settings.drain_interval_ms / 1000
        self._job: Job | None = None
        self._jobs = 0
        self._collected_at = time.monotonic()
        self._compacted_at = time.monotonic()
        self._orphan_s = orphan_s
        self._stopping = False
        self._lock = _take_lock(paths.store / "keeper.lock")
        self.drain = Drain(paths, settings)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._listener = _listen(paths.keeper_socket)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._held_at = self._looked_at = time.monotonic()

    def stop(self) -> None:
        """Ask `run` to end, from a signal handler or another thread."""
        self._stopping = True
        try:
            self._wake.send(b"x")
        except OSError:
            pass  # it is awake

    def run(self) -> None:
        """Until `stop`: then everything in the lanes is committed and synced once more."""
        log.info("keeper.started", store=str(self._paths.store), lanes=str(self._paths.lane_dir), pid=os.getpid())
        try:
            self.drain.open()
        except StoreFailed:
            pass  # counted and logged; tried again as soon as there is something to store
        next_drain = time.monotonic()
        while not self._stopping:
            idle = self._job is None or self._job.finished
            self._serve(max(0.0, next_drain - time.monotonic()) if idle else min(self._interval_s, self._pause_s()))
            self._work()
            if time.monotonic() >= next_drain and not self._stopping:
                more = self._tick()
                next_drain = time.monotonic() + (0 if more else self._interval_s)
        self._finish()

    def _tick(self) -> bool:
        """One regular round; whether the next is due at once."""
        more = False
        try:
            more = self.drain.step()
            self.drain.sync_if_due()
        except OverBudget:
            if self._job is None or self._job.finished:
                self._compacted_at = min(self._compacted_at, time.monotonic() - self._settings.compact_interval_s + 1)
        except StoreFailed:
            pass  # counted and logged; the records wait in the lanes
        self._look_for_host()
        return more

    # ------------------------------------------------------------ compaction, between drains

    def _pause_s(self) -> float:
        asked = self._job is not None and not self._job.background
        return JOB_PAUSE_S if asked else BACKGROUND_PAUSE_S

    def _work(self) -> None:
        """A slice of the job in hand; a new one when it is time."""
        if self._job is not None and not self._job.finished:
            self._job.advance()
            return
        interval = self._settings.compact_interval_s
        if not interval or time.monotonic() - self._compacted_at < interval:
            return
        self._compacted_at = time.monotonic()
        try:
            if self.drain.wants_compaction():
                self._start_job(self._settings.compact_after_s, GRACE_S, background=True)
        except TierError as error:
            log.warning("compact.postponed", error=str(error))

    def _start_job(
        self, settle_s: float, grace_s: float, *, dry_run: bool = False, background: bool = False, shrink: bool = False
    ) -> Job:
        if self._job is not None and not self._job.finished:
            if not self._job.background:
                raise Busy(f"compaction {self._job.number} is running")
            self._job.cancel()
        self._jobs += 1
        budget = self.drain.budget()
        collect = (
            not background or time.monotonic() - self._collected_at >= COLLECT_EVERY * self._settings.compact_interval_s
        )
        if collect:
            self._collected_at = time.monotonic()
        compaction = Compaction(
            self.drain, settle_s=settle_s, grace_s=grace_s, budget=budget, dry_run=dry_run, collect=collect
        )
        self._job = Job(self._jobs, compaction, background, Shrink(self.drain) if shrink and not dry_run else None)
        return self._job

    def _look_for_host(self) -> None:
        now = time.monotonic()
        if not self._orphan_s or now - self._looked_at < min(1.0, self._orphan_s / 4):
            return
        self._looked_at = now
        if is_held(self._paths.host_lock):
            self._held_at = now
        elif now - self._held_at > self._orphan_s:
            log.warning("keeper.orphaned", hint="no host agent holds host.lock; draining and ending")
            self._stopping = True

    def _finish(self) -> None:
        try:
            self.drain.flush(sync=True)
        except (StoreFailed, OverBudget) as error:
            log.error("keeper.undrained", error=str(error), hint="the lanes keep the rest while the machine is up")
        try:
            self.drain.close()
        except StoreFailed as error:
            log.error("keeper.unsynced", error=str(error), hint="the lanes keep the rest while the machine is up")
        self._listener.close()
        self._paths.keeper_socket.unlink(missing_ok=True)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, bytearray):
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake.close()
        self._woken.close()
        self._lock.close()
        log.info("keeper.ended")

    # ------------------------------------------------------------ control socket

    def _serve(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._woken:
                self._woken.recv(4096)
            elif key.fileobj is self._listener:
                connection, _ = self._listener.accept()
                connection.settimeout(2.0)  # a client that doesn't read its answer must not stop the drain
                self._selector.register(connection, selectors.EVENT_READ, bytearray())
            else:
                self._receive(key.fileobj, key.data)  # type: ignore[arg-type]

    def _receive(self, connection: socket.socket, buffer: bytearray) -> None:
        try:
            data = connection.recv(1 << 16)
            buffer += data
            while b"\n" in buffer:
                line, _, rest = bytes(buffer).partition(b"\n")
                buffer[:] = rest
                connection.sendall(json.dumps(self._answer(line)).encode() + b"\n")
        except OSError:
            data = b""
        if not data or len(buffer) > REQUEST_LIMIT_BYTES:
            self._selector.unregister(connection)
            connection.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            return {"ok": True, **self._do(json.loads(line))}
        except (StoreFailed, OverBudget) as error:
            return {"ok": False, "error": str(error), "retry": True}
        except Busy as error:
            return {"ok": False, "error": str(error), "retry": True, "busy": True}
        except (TierError, ValueError, KeyError, TypeError) as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "retry": False}

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op == "drain":
            sync = bool(request.get("sync", False))
            return {"durable": self.drain.flush(sync), "synced": sync}
        if op == "stats":
            return {"stats": self.drain.stats()}
        if op == "forget":
            tokens = np.array(request["tokens"], dtype=np.int32)
            root = RootId(bytes.fromhex(request["root"]))
            session, keep_tokens = request.get("session", ""), request.get("keep_tokens", 0)
            return {"deleted": self.drain.forget(root, request["namespace"], tokens, session, keep_tokens)}
        if op == "positions":
            sequences = [SequenceId(bytes.fromhex(name)) for name in request["sequences"]]
            return {"positions": self.drain.positions(sequences)}
        if op == "import":
            return self.drain.import_slice(request)
        if op == "repair":
            return self.drain.repair([(kind, bytes.fromhex(key)) for kind, key in request["damaged"]])
        return self._do_sessions(op, request)

    def _do_sessions(self, op: str, request: dict[str, Any]) -> dict[str, Any]:
        drain, namespace, session = self.drain, request.get("namespace"), request.get("session")
        if op == "compact":
            settle_s, grace_s = float(request.get("settle_s", 0)), float(request.get("grace_s", GRACE_S))
            dry_run, shrink = bool(request.get("dry_run", False)), bool(request.get("shrink", False))
            return {"job": self._start_job(settle_s, grace_s, dry_run=dry_run, shrink=shrink).state()}
        if op == "job":
            return {"job": self._job.state() if self._job is not None else None}
        if op == "sessions":
            return {"sessions": drain.sessions(namespace, session)}
        if op == "drop_locked":
            return {"dropped": drain.drop_locked()}
        if op == "tenants":
            return {"tenants": drain.tenants()}
        if op == "pin":
            drain.pin(str(request["namespace"]), str(request["session"]), bool(request.get("pinned", True)))
            return {}
        if op == "remove":
            force, dry_run = bool(request.get("force", False)), bool(request.get("dry_run", False))
            names = str(request["namespace"]), str(request["session"])
            return {"deleted": drain.remove(*names, force=force, dry_run=dry_run)}
        raise ValueError(f"unknown op {op!r}; there are {', '.join(OPS)}")


def _take_lock(path: Path) -> TextIO:
    """Only one keeper works on a store. A killed one's lock may take a moment to go."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = open(path, "a+")
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= deadline:
                lock.close()
                raise SystemExit(f"another keeper works on {path.parent}; use another --data-dir") from None
            time.sleep(0.05)


def _listen(path: Path) -> socket.socket:
    """The control socket. A stale file is a killed keeper's: the lock says that there is no other."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    os.chmod(path, 0o600)
    listener.listen(16)
    return listener


def _keep_large_buffers() -> None:
    """Let malloc reuse LMDB's page buffers instead of mapping and unmapping each: half the CPU of a commit (FACTS)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, its maximum
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def _write_pid_file(path: Path, incarnation: int) -> None:
    start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    text = json.dumps({"pid": os.getpid(), "start_ticks": start_ticks, "incarnation": incarnation})
    draft = path.with_suffix(".pid.new")
    draft.write_text(text)
    draft.replace(path)


def _configure_log(log_format: str, level: str) -> None:
    render: Any = structlog.processors.JSONRenderer()
    if log_format == "console" or (log_format == "auto" and sys.stderr.isatty()):
        render = structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def main(argv: list[str] | None = None) -> int:
    """`python -m tiers.keeper`: run a keeper until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="tiers.keeper", description="Drain lanes into the store.")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--lane-dir", default=None)
    parser.add_argument("--settings-json", default="{}", help="fields of TierSettings that differ from the defaults")
    parser.add_argument("--incarnation", type=int, default=0)
    parser.add_argument("--orphan-s", type=float, default=15.0, help="end when host.lock is free for so long; 0: never")
    parser.add_argument("--log-format", choices=("auto", "json", "console"), default="auto")
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(argv)
    if not structlog.is_configured():  # under `serve` the log is set up before
        _configure_log(options.log_format, options.log_level)
    _keep_large_buffers()
    paths = Paths.at(options.data_dir, options.lane_dir).make()
    settings = msgspec.convert(json.loads(options.settings_json), TierSettings)
    keeper = Keeper(paths, settings, orphan_s=options.orphan_s)
    _write_pid_file(paths.pid_file("keeper"), options.incarnation)
    signal.signal(signal.SIGTERM, lambda *_: keeper.stop())
    signal.signal(signal.SIGINT, lambda *_: keeper.stop())
    keeper.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
