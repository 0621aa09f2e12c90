"""The drain: moves records from all lanes into the store, in group commits. Stage *drain*; the keeper's main thread, no torch.

A lane's tail moves only after its records are committed and synced, and taking a record twice changes nothing: killed
at any instruction, the next keeper goes on. A full disk or map costs durability, never the process: records wait in the lanes.
What a record adds to its sequence is `tiers/assemble.py`. Source: docs/log-format.md
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from tiers import failpoints, media
from tiers.assemble import Assembly
from tiers.base import SessionKey
from tiers.clock import SteadyClock
from tiers.compaction import EVICT_FROM, MAP_SHARE, Budget, Held, Now, tenant_bytes
from tiers.errors import BadRecord, NoRoom, OtherFormat, OverBudget, StoreFailed
from tiers.keys import Keyring
from tiers.lane_format import RecordHeader, RecordType, lane_size, padded
from tiers.lane_reader import LaneReader, LaneSet
from tiers.layout import RootId, SequenceId, block_chain
from tiers.pages import cached_bytes, drop_cached
from tiers.paths import Paths
from tiers.rebuild import TokenList, mend_all
from tiers.repair import ASIDE, mend_lanes
from tiers.settings import TierSettings
from tiers.store import PAGES_PER_BYTE, Store
from tiers.store_file import FREE_DISK_RESERVE_BYTES
from tiers.track import Track
from tiers.view import View

log = structlog.get_logger()

GROUP_BYTES = 16 << 20  # commits of 4 MB and more reach the disk's speed
FIRST_GROUP_BYTES = 4 << 20  # of a burst: while it is committed, more is made ready
GROUP_RECORDS = 2048
PUSH_BYTES = 4 << 20  # a group of so many is worth a thread that has the disk begin early
RETRY_STORE_S = 1.0
READER_CHECK_S = 5.0
CROWDED_CHECK_S = 10.0
DELETED_SAID_S = 600.0
SYNC_AT_SHARE = 0.5
SNAPSHOT_LIMIT_S = 30.0  # a restore's slice takes well under a second
SNAPSHOTS_SHOWN = 16
# Of what is live: a file that grew by more while a snapshot was held is copied.
GROWN_BYTES, GROWN_SHARE = 256 << 20, 0.25
WAITING_SHARE = 0.25  # of a lane that rows of unfinished blocks may keep from being used again
COUNTERS = (
    "commits", "records", "put_bytes", "blocks_put", "blocks_shared", "tails_put", "points_put", "points_shared",
    "captured_bytes", "over_budget", "bad_records", "bad_blocks", "bases_rebuilt",
    "stale_records", "orphan", "gap", "store_failures", "store_lost", "store_rescued",
)  # fmt: skip


@dataclass(slots=True)
class Snapshot:
    """An open one of some process, as it was first seen. `is_held`: for too long."""

    pid: int
    since: float
    used_bytes: int  # of the store's file
    commits_behind: int = 0
    is_held: bool = False


@dataclass(slots=True)
class Batch:
    """What one group commit takes: records by lane, in order, and how far that is in each lane."""

    records: list[tuple[LaneReader, RecordHeader]] = field(default_factory=list)
    taken: dict[int, int] = field(default_factory=dict)  # lane id -> record after the last one taken
    more: bool = False  # a lane holds records beyond these


class Drain:
    """Lanes into store. Not thread-safe; the control socket is `Keeper`'s business."""

    def __init__(self, paths: Paths, settings: TierSettings) -> None:
        self.paths = paths
        self.settings = settings
        self._keys = Keyring.from_environment()
        self._lanes = LaneSet(paths.lane_dir, writable_tail=True, keys=self._keys)
        self._store: Store | None = None
        self._clock = SteadyClock()
        self._healthy_ms = self._clock()
        self.counts: Counter[str] = Counter()
        self._assembly = Assembly(self._lanes, self.counts, settings.tail_interval_ms, self._clock)
        self._taken: dict[int, int] = {}  # by lane id: first record that isn't taken; the tail follows after a sync
        self._retry_at = 0.0
        self._synced_at = time.monotonic()
        self._checked_at = self._crowded_at = time.monotonic()
        self._unsynced = False
        self.failing = ""
        self.deleted = ""  # what became of a store's file that was deleted, for a while after it
        self._deleted_at = 0.0
        self._is_away = False  # the store's directory was moved while it was open, and may come back
        self._snapshots: dict[tuple[int, int], Snapshot] = {}  # open ones of all processes
        self.cached_bytes = 0  # of the store's file, when it was looked at last
        self.bad_bases: set[SessionKey] = set()  # that could not be made again
        self._began_ms = self._clock()
        self._losses = 0
        self.mended_lanes: dict[str, str] = {}  # what was done about lanes that could not be read, when it was opened
        self.held: list[Held] = []  # budgets that the last eviction could not keep

    def open(self) -> None:
        """Make or open the store now, so that readers find one. Raises StoreFailed."""
        self._adopt_device_lanes()
        try:
            self._open_store()
        finally:  # a lane is to be drained also when the store can be opened later only
            self.mended_lanes = self.mend_lanes()

    def _adopt_device_lanes(self) -> None:
        """Lanes on a DAX device outlive a restart of the machine, their links in shared memory don't."""
        if not self.settings.lane_device:
            return
        try:
            device = media.Device.find(self.settings.lane_device)
            for link in media.adopt(self.paths.lane_dir, device, lane_size):
                log.info("drain.lane_adopted", lane=link.stem, device=str(device.path))
        except (OSError, OtherFormat) as error:
            log.error("drain.device_failed", device=self.settings.lane_device, error=str(error))

    def mend_lanes(self, *, set_aside: bool = False) -> dict[str, str]:
        """As `tiers.repair.mend_lanes`, of this installation. Raises OSError."""
        s, aside = self.settings, self.paths.store / ASIDE
        return mend_lanes(self.paths.lane_dir, s.lane_record_count, s.lane_bytes, aside, set_aside=set_aside)

    @property
    def named(self) -> set[bytes] | None:
        """While blocks are being collected: ids that records name meanwhile."""
        return self._assembly.named

    @named.setter
    def named(self, named: set[bytes] | None) -> None:
        self._assembly.named = named

    @property
    def tracks(self) -> dict[SequenceId, Track]:
        """Sequences in hand; others are as far as they are stored."""
        return self._assembly.tracks

    def store(self) -> Store:
        """The open store, for compaction. Raises StoreFailed."""
        return self._open_store()

    def is_open(self, store: Store) -> bool:
        """Whether this is still the store in use: one that failed is closed and opened anew."""
        return self._store is store

    def now(self) -> Now:
        """The time, as "used last" is counted."""
        return Now(self._clock(), self._healthy_ms)

    def note_loss(self) -> None:
        """Something that was stored is stored no more: whoever remembers positions is to ask again."""
        self._losses += 1

    def mend_bases(self, keys: Iterable[SessionKey], lists: Iterable[TokenList] = ()) -> list[SessionKey]:
        """Make damaged bases again; returns those that can't be. Raises StoreFailed."""
        store, keys = self._open_store(), list(keys)
        made, left = mend_all(store, self.paths.store / ASIDE, keys, lists)
        self.bad_bases = (self.bad_bases - set(keys)) | set(left)
        self.counts["bases_rebuilt"] += len(made)
        if made:
            store.recount()
            self.note_loss()  # a base may be shorter than it was
            self.owe_sync()
        return left

    def settle(self) -> None:
        """Take everything and free the lanes: what is deleted now doesn't come back out of a lane after a crash. Raises StoreFailed."""
        try:
            self.flush(sync=True)
        except (OverBudget, NoRoom):  # deleting is what makes room
            self.sync()

    def catch_up(self) -> None:
        """Take all records that are in the lanes, or at least see what they name. Raises StoreFailed."""
        try:
            while self.step():
                pass
        except (OverBudget, NoRoom):
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
        self._mend_tails(lanes)
        self._assembly.drop_gone_lanes()
        batch = self._choose(lanes)
        self._assembly.add_due(lanes, all_tails and not batch.more, self._is_filling)
        if not batch.records and not self._assembly.dirty:
            return False
        store = self._open_store()
        self._check_budget(store, batch)
        started = time.monotonic()
        counts = Counter(self.counts)
        try:
            with self._assembly.ahead as ahead, store.group() as group:
                for lane, header in batch.records:
                    self._assembly.take(group, lane, header)
                self._assembly.store_tails(group, all_tails and not batch.more, self._is_filling)
                following = _select(lanes, batch.taken, GROUP_BYTES).records if batch.more else []
                if following or group.put_bytes >= PUSH_BYTES:
                    ahead.start(store, following, self.tracks)
                else:
                    ahead.forget()
        except BaseException as error:
            self._forget_uncommitted(counts)
            if isinstance(error, NoRoom):
                self._say_failing(error)
            elif isinstance(error, StoreFailed):
                self._fail(error)
            raise
        self._taken.update(batch.taken)
        self._committed(batch, group.put_bytes, started)
        if self.settings.durability == "process":
            self._free()
        elif any(lane.used_share(lane.tail, self._next(lane)) > SYNC_AT_SHARE for lane in lanes):
            self.sync()  # the lanes need the room sooner than the interval ends
        return batch.more

    def _mend_tails(self, lanes: list[LaneReader]) -> None:
        """A tail that was damaged would have records passed over, or none found any more: all are taken again instead."""
        for lane in lanes:
            is_possible = lane.has_possible_tail
            if is_possible and lane.tails_agree:
                continue
            log.error("drain.tail_mended", lane=lane.name, was=lane.tail, hint="nothing but Concordia may write there")
            lane.mend_tail()
            if not is_possible:
                self.forget_tracks()

    def _check_budget(self, store: Store, batch: Batch) -> None:
        """Put nothing that the budget has no room for: compaction then evicts. Raises OverBudget."""
        limit = int(MAP_SHARE * store.map_bytes())
        limit = min(self.settings.disk_budget_bytes or limit, limit)
        size = sum(header.payload_bytes for _, header in batch.records)
        used = store.usage().total_bytes
        if not batch.records or used + size <= limit:
            return
        error = OverBudget("the store's budget is used up", where=str(store.path), cause=f"{used} of {limit} bytes")
        if not self.failing:
            log.error("drain.over_budget", error=str(error))
        self.failing = error.reason
        self.counts["over_budget"] += 1
        raise error

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
            number = self._assembly.first_waiting(lane, self._next(lane))
            lane.advance_tail(max(number, lane.tail))
        failpoints.reach("drain.free.after")

    def _choose(self, lanes: list[LaneReader]) -> Batch:
        """Records for one group. Lanes that were set aside and are drained go."""
        starts = {lane.lane_id: self._next(lane) for lane in lanes}
        batch = _select(lanes, starts, GROUP_BYTES if self._assembly.ahead.is_ready else FIRST_GROUP_BYTES)
        for lane in lanes:
            if "~" in lane.name and lane.tail == starts[lane.lane_id] == batch.taken[lane.lane_id]:
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
            begun_anew = self._is_away and not (self.paths.store / "data.mdb").exists()
            try:
                self._store = Store(
                    self.paths.store,
                    map_bytes=self.settings.store_map_bytes,
                    durability=self.settings.durability,
                    keys=self._keys,
                )
            except StoreFailed as error:
                self._fail(error)
                raise
            self._is_away = False
            if begun_anew:
                self._say_gone(kept=False)
        return self._store

    def _fail(self, error: StoreFailed) -> None:
        """Close the store and try again after a while, from the lanes' tails.

        After an error nobody knows which pages the kernel still means to write (a failed fsync marks them clean), so nothing that wasn't
        synced is relied upon: its records are still in the lanes, and are taken again by a store that is opened anew.
        """
        self.forget_tracks()
        self.note_loss()  # it may have been the file that is gone
        self._say_failing(error)
        self._retry_at = time.monotonic() + RETRY_STORE_S
        if self._store is not None:
            store, self._store = self._store, None
            self._look_for_file(store)
            try:
                store.close()
            except StoreFailed:
                pass  # said already

    def _say_failing(self, error: StoreFailed) -> None:
        self.counts["store_failures"] += 1
        if not self.failing:
            log.error("drain.failed", error=str(error))
        self.failing = error.reason

    def _look_for_file(self, store: Store) -> None:
        """Was the file deleted, alone or with its directories? Then what is in it is written to a new one, if that can be."""
        if store.has_file():
            return
        if not store.path.exists() and not store.is_deleted():
            self._is_away = True
            return
        self._say_gone(kept=store.rescue())

    def _say_gone(self, *, kept: bool) -> None:
        """Count and log it; `stats` says it as long as somebody may want to know."""
        what = "rescued" if kept else "lost"
        self.counts[f"store_{what}"] += 1
        self._deleted_at = time.monotonic()
        self.deleted = (
            "the store's file was deleted while it was open; what was in it has been written to a new one"
            if kept
            else "the store's file was deleted, moved or replaced while it was open; what was only in it is computed again"
        )
        log.error(f"drain.store_{what}", path=str(self.paths.store), hint="nothing but Concordia may write there")

    def _forget_uncommitted(self, counts: Counter[str]) -> None:
        """The transaction is gone: what was learnt from it is read again from the store."""
        self.forget_tracks()
        self.counts.clear()
        self.counts.update(counts)

    def forget_tracks(self) -> None:
        """Read everything again, sequences from the store and waiting rows from the lanes: taking a record twice changes nothing."""
        self._assembly.forget()
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
        self._assembly.trim()

    # ------------------------------------------------------------ on request

    def flush(self, sync: bool) -> dict[str, int]:
        """Commit everything that is in the lanes now; with `sync`, onto the disk. Returns each lane's tail. Raises StoreFailed."""
        lanes = self._lanes.scan()
        self._mend_tails(lanes)
        goals, reached = [(lane, lane.head()) for lane in lanes], None
        while left := [self._next(lane) for lane, head in goals if not lane.closed and self._next(lane) < head]:
            if left == reached:
                break  # what was there is no more: somebody else wrote into a lane
            reached = left
            self.step(all_tails=True)
        if self._assembly.is_waiting:
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
        self._assembly.synced_positions.clear()
        self._free()

    def _trim_cache(self) -> None:
        """Give page cache back, as far as the budget asks for it and no process has the pages mapped."""
        limit = self.settings.memory_budget_bytes
        if not limit:
            return
        data = self.paths.store / "data.mdb"
        self.cached_bytes = cached_bytes(data)
        if self.cached_bytes > limit:
            drop_cached(data, self.cached_bytes - int(0.9 * limit))
            self.cached_bytes = cached_bytes(data)

    def _look_at_snapshots(self, store: Store) -> None:
        """Name the process that holds a snapshot for too long: pages freed since can't be used again, and the file grows."""
        now, open_now = time.monotonic(), store.snapshots()
        self._snapshots = {
            key: self._snapshots.get(key) or Snapshot(key[0], now, store.used_bytes()) for key in open_now
        }
        for key, snapshot in self._snapshots.items():
            snapshot.commits_behind = open_now[key]
            if now - snapshot.since >= SNAPSHOT_LIMIT_S and not snapshot.is_held:
                snapshot.is_held = True
                log.warning(
                    "drain.snapshot_held", pid=snapshot.pid, s=round(now - snapshot.since), commits_behind=open_now[key],
                    hint="the process is stopped or stuck; if the file grows by it, it is left behind in a copy",
                )  # fmt: skip

    def grows_by_snapshot(self) -> bool:
        """Whether the file has grown by a lot while somebody held a snapshot: only a new file can use its free pages again."""
        if self._store is None:
            return False
        limit = max(GROWN_BYTES, GROWN_SHARE * self._store.usage().total_bytes)
        used = self._store.used_bytes()
        grown = [s for s in self._snapshots.values() if s.is_held and used - s.used_bytes > limit]
        for snapshot in grown:
            log.warning("drain.snapshot_left_behind", pid=snapshot.pid, grown_bytes=used - snapshot.used_bytes)
        return bool(grown)

    def _snapshot_rows(self, store: Store) -> list[dict[str, Any]]:
        """Open snapshots of other processes, oldest first."""
        self._look_at_snapshots(store)
        now = time.monotonic()
        found = sorted(self._snapshots.values(), key=lambda s: s.since)
        return [
            {"pid": s.pid, "age_s": round(now - s.since, 1), "commits_behind": s.commits_behind}
            for s in found
            if s.pid != os.getpid()
        ][:SNAPSHOTS_SHOWN]

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

    def owe_sync(self) -> None:
        """Something was committed in another way than by `step`: it is to be synced like what is drained."""
        self._unsynced = True

    def sync_if_due(self) -> None:
        """The `interval` and `turn` bound: everything committed is on the disk sync_interval_ms later. Raises StoreFailed."""
        now = time.monotonic()
        if self._store is not None and now - self._checked_at >= READER_CHECK_S:
            self._checked_at = now
            self._check_store()
            self._trim_cache()
        overdue = 1000 * (time.monotonic() - self._synced_at) >= self.settings.sync_interval_ms
        if self._unsynced and overdue and self.settings.durability != "process":
            self.sync()

    def positions(self, sequences: list[SequenceId]) -> dict[str, tuple[int, int]]:
        """By sequence (hex): position that is committed, and position that would survive a loss of power.

        Under `process` nothing is synced on purpose, and committed is all that is promised. Unknown sequences are left out.
        """
        found: dict[str, tuple[int, int]] = {}
        promised = self.settings.durability == "process"
        with self._open_store().snapshot() as view:
            for sequence in sequences:
                progress = view.progress(sequence)
                if progress is not None:
                    stored = progress.position
                    synced = stored if promised else self._assembly.synced_positions.get(sequence, stored)
                    found[sequence.hex()] = stored, synced
        return found

    def lane_bytes(self, view: View) -> Counter[str]:
        """By namespace: what records that are not freed take of all lanes. "" stands for sequences that nobody knows."""
        names: dict[SequenceId, str] = {}
        total: Counter[str] = Counter()
        for lane in self._lanes.scan():
            for header in lane.records(lane.tail):
                if header.payload_bytes:
                    if header.sequence not in names:
                        names[header.sequence] = self._namespace(view, lane, header)
                    total[names[header.sequence]] += padded(header.payload_bytes)
        return total

    def _namespace(self, view: View, lane: LaneReader, header: RecordHeader) -> str:
        track = self.tracks.get(header.sequence)
        if track is not None:
            return track.namespace
        progress = view.progress(header.sequence)
        if progress is not None:
            return progress.namespace
        try:
            return lane.open_payload(header).namespace if header.type == RecordType.OPEN else ""
        except BadRecord:
            return ""

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
            "deleted": self.deleted if time.monotonic() - self._deleted_at < DELETED_SAID_S else "",
            "losses": [self._began_ms, self._losses],
            "bad_bases": sorted(key.hex() for key in self.bad_bases),
            "unsynced_ms": round(1000 * (time.monotonic() - self._synced_at)) if self._unsynced else 0,
            **dict.fromkeys(COUNTERS, 0),
            **self.counts,
        }
        if self._store is not None:
            with self._store.snapshot() as view:
                stats.update(
                    {f"stored_{name}": view.count(name) for name in ("blocks", "tails", "points", "sequences")}
                )
                stats["tenants"] = {
                    name: [size, self.settings.tenant_limit(name, "disk")]
                    for name, size in tenant_bytes(view, self._store.usage()).items()
                }
            stats["store_bytes"] = self._store.used_bytes()
            stats["live_bytes"] = self._store.usage().total_bytes
            stats["cached_bytes"] = self.cached_bytes
            stats["budgets"] = {
                "disk": [stats["live_bytes"], self.disk_limit(self._store)],
                "memory": [self.cached_bytes, self.settings.memory_budget_bytes],
            }
            stats["held"] = self._still_held(stats["budgets"]["disk"], stats["tenants"])
            stats["snapshots"] = self._snapshot_rows(self._store)
            stats["snapshots_held"] = sorted(s.pid for s in self._snapshots.values() if s.is_held)
            stats["snapshot_lag"] = self._store.oldest_snapshot_lag()
        stats["io_write_bytes"] = _io_write_bytes()
        return stats

    def _still_held(self, disk: list[int], tenants: dict[str, list[int]]) -> list[dict[str, Any]]:
        """Budgets that could not be kept when sessions were evicted last, and are nine tenths full now."""
        found = []
        for held in self.held:
            used, limit = tenants.get(held.namespace, [0, 0]) if held.namespace else disk
            if limit and used > EVICT_FROM * limit:
                found.append({"tenant": held.namespace, "used": used, "limit": limit})
        return found

    def is_crowded(self) -> bool:
        """Whether sessions should be evicted now, not when it is the background's turn. Looks every few seconds."""
        now = time.monotonic()
        if self._store is None or now - self._crowded_at < CROWDED_CHECK_S:
            return False
        self._crowded_at = now
        return self._store.usage().total_bytes > EVICT_FROM * self.disk_limit(self._store)

    def disk_limit(self, store: Store) -> int:
        """As the function of that name, of the open store."""
        return disk_limit(self.settings, store.path, store.used_bytes(), store.map_bytes())

    def budget(self) -> Budget:
        """What compaction is to keep to."""
        s = self.settings
        limit = self.disk_limit(self._store) if self._store is not None else s.disk_budget_bytes
        own = {name: s.tenant_limit(name, "disk") for name in s.tenants}
        return Budget(limit, s.tenant_budget_bytes, s.session_ttl_s, own)

    def close(self) -> None:
        """Let go of lanes and store, synced. Raises StoreFailed; the lanes keep what isn't on the disk."""
        try:
            if self._store is not None:
                store, self._store = self._store, None
                store.close()
                self._free()
        finally:
            self._assembly.ahead.close()
            self._lanes.close()


def disk_limit(settings: TierSettings, path: Path, used_bytes: int, map_bytes: int) -> int:
    """Bytes of values from nine tenths of which on sessions are evicted: the budget, or what the disk has room for; four fifths
    of the map at most.

    path        the store's directory, or where it will be
    used_bytes  of its file
    """
    return min(int(MAP_SHARE * map_bytes), settings.disk_budget_bytes or disk_share(path, used_bytes))


def disk_share(path: Path, used_bytes: int) -> int:
    """What a store without a budget may have, bytes of values: what its file has and what is free, less a reserve for others.

    The reserve is a twentieth of the disk, 8 GB at most, and never more than a tenth of what there is to share; so sessions are evicted
    (from nine tenths of this on) before the disk is full.
    """
    try:
        disk = os.statvfs(path)
    except OSError:
        return 1 << 62  # nothing can be said: what is wrong with the disk is noticed by who writes
    room = used_bytes + disk.f_bavail * disk.f_frsize
    reserve = max(2 * FREE_DISK_RESERVE_BYTES, min(disk.f_blocks * disk.f_frsize // 20, 8 << 30, room // 10))
    return max(int((room - reserve) / PAGES_PER_BYTE), 1)


def _io_write_bytes() -> int:
    """Bytes that this process has written by system calls; 0 where the kernel doesn't say.

    Not its write_bytes: where the page cache has large folios, those count a whole one for each page that is written in it.
    """
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar:")), 0)


def _select(lanes: list[LaneReader], starts: dict[int, int], group_bytes: int) -> Batch:
    """Records for one group from `starts` (by lane id) on, an equal share of its bytes for each lane that has some."""
    batch = Batch()
    share = group_bytes // max(1, len(lanes))
    for lane in lanes:
        taken, size = starts[lane.lane_id], 0
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
    return batch
