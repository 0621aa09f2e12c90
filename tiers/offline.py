"""The keeper's place taken by a command, while no keeper runs: recover, repair, import and export on an idle data directory.

Runs in the command's process. The same lock as the keeper's: two writers never meet, and a keeper that is started meanwhile waits.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tiers.drain import Drain
from tiers.errors import BadRecord, StoreBusy
from tiers.keys import BadKeys
from tiers.lane_format import RecordHeader, RecordType
from tiers.lane_reader import LaneReader, LaneSet
from tiers.lane_seal import LockedRecord
from tiers.lock import is_held
from tiers.paths import Paths
from tiers.settings import TierSettings
from tiers.view import StoreReader


def keeper_lock(paths: Paths) -> Path:
    """The file whose holder is the store's writer."""
    return paths.store / "keeper.lock"


def owned(paths: Paths) -> str:
    """Who owns the data directory now: `keeper`, `host agent` (it is about to start one), or "" for nobody."""
    if is_held(keeper_lock(paths)):
        return "keeper"
    return "host agent" if is_held(paths.host_lock) else ""


@contextmanager
def writer_lock(paths: Paths) -> Iterator[None]:
    """Be the store's only writer for as long as the with-block lasts. Raises StoreBusy."""
    owner = owned(paths)
    if owner:
        who = "keeper, or a command in its place," if owner == "keeper" else owner
        raise StoreBusy(f"a {who} is at work", where=str(paths.data_dir))
    keeper_lock(paths).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(keeper_lock(paths), "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreBusy("a keeper was just started", where=str(paths.data_dir)) from error
        yield


@contextmanager
def offline_drain(paths: Paths, settings: TierSettings, *, without_keys: bool = False) -> Iterator[Drain]:
    """A drain of this process, synced and closed when the with-block ends. Raises StoreBusy, StoreFailed, BadKeys.

    without_keys  also if a tenant's key isn't given while records wait in lanes: those of that tenant are passed over
    """
    with writer_lock(paths):
        drain = Drain(paths, settings)
        try:
            drain.open()
            if not without_keys and any(waiting(paths).values()):
                _need_keys(drain)
            yield drain
        finally:
            drain.close()


def _need_keys(drain: Drain) -> None:
    with drain.store().snapshot() as view:
        missing = {
            tenant.namespace for _, tenant in view.tenants() if tenant.sealed and not view.keys.has(tenant.namespace)
        }
    if missing:
        raise BadKeys(f"the store is sealed for {', '.join(sorted(missing))}, and that key isn't given")
    lanes = LaneSet(drain.paths.lane_dir, keys=view.keys)
    try:
        for lane in lanes.scan():
            for header in lane.records(lane.tail):
                if header.sealed:
                    _need_key(lane, header)
    finally:
        lanes.close()


def _need_key(lane: LaneReader, header: RecordHeader) -> None:
    """Raises BadKeys if a record is sealed with a key that isn't given; a damaged one is the drain's to name."""
    try:
        if header.type == RecordType.OPEN:
            lane.open_payload(header)
        elif header.type == RecordType.ROWS:
            lane.tokens(header)
    except LockedRecord as error:
        raise BadKeys("a record in a lane is sealed, and its key isn't given", where=error.where) from error
    except BadRecord:
        pass


@dataclass(slots=True)
class Recovered:
    """What `recover` brought from the lanes to the disk. `sessions`: (session, stream) -> position that is on disk now."""

    lanes: dict[str, int] = field(default_factory=dict)
    record_count: int = 0
    bad_record_count: int = 0
    lost_record_count: int = 0
    put_bytes: int = 0
    blocks_put: int = 0
    sessions: dict[tuple[str, str], int] = field(default_factory=dict)


def waiting(paths: Paths) -> dict[str, int]:
    """Records by lane that are not in the store yet. Reads only; may run beside a keeper."""
    lanes = LaneSet(paths.lane_dir)
    counts = {lane.name: lane.head() - lane.tail for lane in lanes.scan()}
    lanes.close()
    return counts


def recover(
    paths: Paths, settings: TierSettings, progress: Callable[[int, int], None] = lambda done, total: None
) -> Recovered:
    """Drain every lane to the disk and sync, as the next keeper would. Doing it again changes nothing.

    progress  called with records done and to do
    Raises    StoreBusy (a keeper does it anyway), StoreFailed (disk or map full: the lanes keep the rest)
    """
    found = Recovered(lanes={name: count for name, count in waiting(paths).items() if count})
    total = sum(found.lanes.values())
    sequences = _sequences(paths)
    with offline_drain(paths, settings) as drain:
        progress(0, total)
        while drain.step():
            progress(drain.counts["records"], total)
        drain.flush(sync=True)
        found.record_count = drain.counts["records"]
        found.bad_record_count = drain.counts["bad_records"] + drain.counts["bad_blocks"]
        found.lost_record_count = drain.counts["orphan"] + drain.counts["gap"] + drain.counts["stale_records"]
        found.put_bytes, found.blocks_put = drain.counts["put_bytes"], drain.counts["blocks_put"]
    progress(total, total)
    _name_sessions(paths, settings, sequences, found)
    return found


def _sequences(paths: Paths) -> set[bytes]:
    """Sequences that have records waiting."""
    lanes = LaneSet(paths.lane_dir)
    try:
        records = [header for lane in lanes.scan() for header in lane.records(lane.tail)]
    finally:
        lanes.close()
    return {header.sequence for header in records if header.type != RecordType.BAD}


def _name_sessions(paths: Paths, settings: TierSettings, sequences: set[bytes], found: Recovered) -> None:
    store = StoreReader(paths.store, map_bytes=settings.store_map_bytes)
    with store.snapshot() as view:
        for key, raw in view.scan("sequences"):
            if key in sequences:
                progress = view.decode_progress(raw)
                found.sessions[progress.session, progress.stream] = progress.position
    store.close()


def open_names(paths: Paths) -> dict[bytes, tuple[str, str]]:
    """(session, stream) of every sequence whose OPEN record still waits in a lane."""
    names: dict[bytes, tuple[str, str]] = {}
    lanes = LaneSet(paths.lane_dir)
    for lane in lanes.scan():
        for header in lane.records(lane.tail):
            if header.type == RecordType.OPEN:
                try:
                    opened = lane.open_payload(header)
                except BadRecord:
                    continue
                names[header.sequence] = opened.session, opened.stream
    lanes.close()
    return names
