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
import hashlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np
import structlog

from tiers import failpoints, media
from tiers.errors import BadBlock, BadRecord, OtherFormat, StaleEpoch, StoreFailed, TierError
from tiers.export import import_slice
from tiers.lane import LaneReader, LaneRef, LaneSet, RecordHeader, RecordType, lane_size
from tiers.layout import BlockId, RootId, SequenceId, block_chain, point_id
from tiers.lock import is_held
from tiers.paths import Paths
from tiers.repair import ASIDE, Damaged, repair_store
from tiers.settings import TierSettings
from tiers.store import Group, RootInfo, Store, StreamOwner
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


@dataclass(slots=True)
class Batch:
    """What one group commit takes: records by lane, in order, and where each lane's tail goes when it is committed."""

    records: list[tuple[LaneReader, RecordHeader]] = field(default_factory=list)
    tails: list[tuple[LaneReader, int]] = field(default_factory=list)


class Drain:
    """Lanes into store. Not thread-safe; the control socket is `Keeper`'s business."""

    def __init__(self, paths: Paths, settings: TierSettings) -> None:
        self._paths = paths
        self._settings = settings
        self._lanes = LaneSet(paths.lane_dir, writable_tail=True)
        self._store: Store | None = None
        self._tracks: dict[SequenceId, Track] = {}
        self._dirty: dict[SequenceId, Track] = {}
        self._reported: set[SequenceId] = set()
        self._taken: dict[int, int] = {}  # by lane id: first record that isn't committed; the tail follows after a sync
        self._synced_positions: dict[SequenceId, int] = {}  # of those that were committed since the last sync
        self._retry_at = 0.0
        self._synced_at = time.monotonic()
        self._checked_at = time.monotonic()
        self._unsynced = False
        self.failing = ""
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

    # ------------------------------------------------------------ one group commit

    def step(self) -> bool:
        """Commit one group of what the lanes hold, if anything; return whether more is left. Raises StoreFailed."""
        batch = self._choose(self._lanes.scan())
        if not batch.records:
            return False
        store = self._open_store()
        started = time.monotonic()
        counts = Counter(self.counts)
        try:
            with store.group() as group:
                for lane, header in batch.records:
                    self._take(group, lane, header)
                self._flush_tails(group)
        except BaseException as error:
            self._forget_uncommitted(counts)
            if isinstance(error, StoreFailed):
                self._fail(error)
            raise
        self._taken.update({lane.lane_id: number for lane, number in batch.tails})
        self._committed(batch, group.put_bytes, started)
        if self._settings.durability == "process":
            self._free()
        elif any(lane.used_share(lane.tail, self._next(lane)) > SYNC_AT_SHARE for lane, _ in batch.tails):
            self.sync()  # the lanes need the room sooner than the interval ends
        return len(batch.records) >= GROUP_RECORDS or group.put_bytes >= GROUP_BYTES

    def _next(self, lane: LaneReader) -> int:
        """First record of a lane that isn't committed."""
        return max(lane.tail, self._taken.get(lane.lane_id, 0))

    def _free(self) -> None:
        """Let the lanes' tails follow what is committed and, unless durability is `process`, on the disk."""
        failpoints.reach("drain.free.before")
        for lane in self._lanes:
            lane.advance_tail(self._next(lane))
        self._taken.clear()
        failpoints.reach("drain.free.after")

    def _choose(self, lanes: list[LaneReader]) -> Batch:
        """Records for one group, an equal share of its bytes for each lane that has some."""
        batch = Batch()
        share = GROUP_BYTES // max(1, len(lanes))
        for lane in lanes:
            first = tail = self._next(lane)
            size = 0
            for header in lane.records(tail, GROUP_RECORDS):
                if size and size + header.payload_bytes > share:
                    break
                batch.records.append((lane, header))
                size += header.payload_bytes
                tail = header.number + 1
            if tail > first:
                batch.tails.append((lane, tail))
            elif "~" in lane.name and lane.tail == first:
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
        self._taken.clear()
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
        self._tracks.clear()
        self._dirty.clear()
        self.counts = counts

    def _committed(self, batch: Batch, put_bytes: int, started: float) -> None:
        self._unsynced = True
        if self.failing:
            log.info("drain.recovered", was=self.failing)
            self.failing = ""
        self.counts["commits"] += 1
        self.counts["records"] += len(batch.records)
        self.counts["put_bytes"] += put_bytes
        ms = round(1000 * (time.monotonic() - started), 2)
        log.debug("drain.committed", records=len(batch.records), put_bytes=put_bytes, ms=ms)
        for sequence in [s for s, track in self._tracks.items() if track.closed]:
            del self._tracks[sequence]
        while len(self._tracks) > TRACKS_CACHED:
            del self._tracks[next(iter(self._tracks))]

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
        group.put_root(o.root, RootInfo(o.layout, o.block_tokens, o.state_bytes))
        group.put_tenant(RootId(o.root), o.namespace)
        track = open_track(o, header.epoch)
        self._tracks[header.sequence] = self._dirty[header.sequence] = track

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
        sealed = track.add(header.token_start, header.token_end, lane.tokens(header), source)
        if sealed is None:
            text = f"rows [{header.token_start}, {header.token_end}) after {track.position} at {where}"
            self._report(header.sequence, "drain.gap", text)
            return
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
        if group.has_point(place):
            self.counts["points_shared"] += 1
            return
        state = lane.state(header)
        if state.size != track.layout.state_bytes:
            raise BadRecord("a rollback point doesn't have its layout's size", where=where)
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

    def _flush_tails(self, group: Group) -> None:
        """Store what is new of each unfinished block as one piece, and how far each sequence is."""
        for sequence, track in self._dirty.items():
            stored = sum(isinstance(part.source, bytes) for part in track.parts)
            fresh = track.parts[stored:]
            count = sum(part.token_count for part in fresh)
            if count:
                self._join(group, track, fresh, count)
                key = group.put_tail(track, sequence, track.position - count, track.tokens[-4 * count :])
                track.parts[stored:] = [Part(key, count, 0, count)]
                self.counts["tails_put"] += 1
            before = group.progress(sequence)
            self._synced_positions.setdefault(sequence, before.position if before is not None else 0)
            group.put_progress(sequence, track)
        self._dirty.clear()

    # ------------------------------------------------------------ on request

    def flush(self, sync: bool) -> dict[str, int]:
        """Commit everything that is in the lanes now; with `sync`, onto the disk. Returns each lane's tail. Raises StoreFailed."""
        goals = [(lane, lane.head()) for lane in self._lanes.scan()]
        while any(not lane.closed and self._next(lane) < head for lane, head in goals):
            self.step()
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

    def _check_store(self) -> None:
        """Free dead readers' snapshots, and notice that somebody deleted the file that is being written."""
        assert self._store is not None
        try:
            self._store.drop_dead_readers()
            self._store.check_file()
        except StoreFailed as error:
            self._fail(error)
            raise

    def sync_if_due(self) -> None:
        """The `interval` and `turn` bound: everything committed is on the disk sync_interval_ms later. Raises StoreFailed."""
        now = time.monotonic()
        if self._store is not None and now - self._checked_at >= READER_CHECK_S:
            self._checked_at = now
            self._check_store()
        overdue = 1000 * (time.monotonic() - self._synced_at) >= self._settings.sync_interval_ms
        if self._unsynced and overdue and self._settings.durability != "process":
            self.sync()

    def forget(
        self, root: RootId, namespace: str, tokens: np.ndarray, session: str = "", keep_tokens: int = 0
    ) -> dict[str, int]:
        """Delete a token list's state, from its end up to the first block that something else needs as well.

        keep_tokens  of the list's beginning: what a fork that has computed nothing yet begins with
        """
        self.flush(sync=False)
        store = self._open_store()
        blocks = tails = points = 0
        with store.group() as group:
            info = group.root(root)
            if info is not None:
                chain = block_chain(root, namespace, tokens, info.block_tokens)
                packed = np.ascontiguousarray(tokens, "<i4").tobytes()
                size = 4 * info.block_tokens
                for at in range(len(chain) - 1, -1, -1):
                    if at * info.block_tokens >= keep_tokens:
                        tails += _delete_tails(group, chain[at], packed[at * size :])
                        points += _delete_points(group, chain[at], packed[at * size :])
                    if at == 0 or (at - 1) * info.block_tokens < keep_tokens or self._in_use(group, chain[at]):
                        break
                    if group.node(chain[at]) is not None:
                        group.delete_block(chain[at - 1], packed[(at - 1) * size : at * size], chain[at])
                        blocks += 1
            sequences = _delete_session(group, namespace, session) if session else 0
        self._tracks.clear()
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
                offset=request.get("offset", 0), index=request.get("index", 0),
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
        self._tracks.clear()
        self.sync()
        log.warning("drain.repaired", dropped=done.dropped, kept_aside=len(done.kept_aside))
        return {"repaired": asdict(done) | {"recompute": [part._asdict() for part in done.recompute]}}

    def _in_use(self, group: Group, block: BlockId) -> bool:
        live = any(track.parent == block and not track.closed for track in self._tracks.values())
        return live or bool(group.children(block, 1) or group.tails(block, limit=1) or group.points(block))

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
        return stats

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
    "bad_records", "bad_blocks",
    "stale_records", "orphan", "gap", "store_failures",
)  # fmt: skip


def stream_key(stream: str) -> bytes:
    """Key of a stream in the store: names may be longer than keys."""
    return hashlib.blake2b(stream.encode(), digest_size=16).digest()


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


def _delete_session(group: Group, namespace: str, session: str) -> int:
    """Delete the sequence records that name a session."""
    found = []
    for key, raw in group.scan("sequences"):
        progress = group.decode_progress(raw)
        if progress.session == session and progress.namespace == namespace:
            found.append(SequenceId(key))
    for sequence in found:
        group.delete_sequence(sequence)
    return len(found)


# ---------------------------------------------------------------- the process


class Keeper:
    """The keeper's loop: drain every drain_interval_ms, answer its control socket, end on `stop`.

    orphan_s  end by itself when nobody has held the run lock for so long (0: never); lanes are drained first
    """

    def __init__(self, paths: Paths, settings: TierSettings, *, orphan_s: float = 15.0) -> None:
        self._paths = paths
        self._interval_s = settings.drain_interval_ms / 1000
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
            self._serve(max(0.0, next_drain - time.monotonic()))
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
        except StoreFailed:
            pass  # counted and logged; the records wait in the lanes
        self._look_for_host()
        return more

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
        except StoreFailed as error:
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
        except StoreFailed as error:
            return {"ok": False, "error": str(error), "retry": True}
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
        raise ValueError(f"unknown op {op!r}; there are drain, stats, positions, forget, import and repair")


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
