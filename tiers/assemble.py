"""Records of lanes -> blocks of the store: what each adds to its sequence, which blocks become whole, what waits. Stage *assemble*.

Every record is verified before it is stored, so bytes that went bad in a lane can't become a block with a good checksum. One that can't
be used is counted, named and passed over. Source: docs/log-format.md
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog

from tiers import failpoints
from tiers.ahead import Ahead
from tiers.base import session_key
from tiers.clock import SteadyClock
from tiers.errors import BadBlock, BadRecord, StaleEpoch
from tiers.group import Group
from tiers.lane_format import RecordHeader, RecordType
from tiers.lane_reader import LaneReader, LaneRef, LaneSet
from tiers.layout import RootId, SequenceId, block_chain, chain_root
from tiers.track import Part, Track, WholeBlock, open_track
from tiers.values import RootInfo, StreamOwner, stream_key

log = structlog.get_logger()

TRACKS_CACHED = 4096
SUPERSEDED_SCAN_LIMIT = 256

IsFilling = Callable[[LaneReader], bool]  # whether what waits keeps too much of a lane from being used again


class Assembly:
    """The sequences in hand: what records make of each, and what of it goes into a group commit. Not thread-safe; `Drain` owns it.

    lanes   all lanes, for how long each is when an epoch begins
    counts  the drain's counters, of which this keeps some
    """

    def __init__(self, lanes: LaneSet, counts: Counter[str], tail_interval_ms: float, clock: SteadyClock) -> None:
        self._lanes = lanes
        self._counts = counts
        self._tail_interval_s = tail_interval_ms / 1000
        self._clock = clock
        self.tracks: dict[SequenceId, Track] = {}
        self.dirty: dict[SequenceId, Track] = {}
        self.ahead = Ahead()
        self._waiting: dict[SequenceId, float] = {}  # since when rows of an unfinished block wait in the lane
        self.named: set[bytes] | None = None  # while blocks are being collected: ids that records name meanwhile
        self._reported: set[SequenceId] = set()
        self.synced_positions: dict[SequenceId, int] = {}  # of those that were committed since the last sync

    @property
    def is_waiting(self) -> bool:
        """Whether rows of an unfinished block wait in a lane."""
        return bool(self._waiting)

    def forget(self) -> None:
        """Read everything again, sequences from the store and waiting rows from the lanes: taking a record twice changes nothing."""
        self.tracks.clear()
        self.dirty.clear()
        self._waiting.clear()
        self.ahead.forget()

    def trim(self) -> None:
        """After a commit: let go of sequences that have ended, and of more than TRACKS_CACHED."""
        for sequence in [s for s, track in self.tracks.items() if track.closed]:
            del self.tracks[sequence]
        spare = len(self.tracks) - TRACKS_CACHED
        for sequence in [s for s in self.tracks if s not in self._waiting][: max(0, spare)]:
            del self.tracks[sequence]

    def first_waiting(self, lane: LaneReader, number: int) -> int:
        """Number of the lane's first record that holds rows of an unfinished block, or `number` if that is less."""
        for sequence in self._waiting:
            for part in self.tracks[sequence].parts:
                if isinstance(part.source, LaneRef) and part.source.lane is lane:
                    number = min(number, part.source.header.number)
        return number

    def drop_gone_lanes(self) -> None:
        """A lane whose file is gone takes along what waited in it: those sequences are as far as they are stored."""
        for sequence in [s for s in self._waiting if any(lane.closed for lane in _lanes_of(self.tracks[s]))]:
            del self._waiting[sequence], self.tracks[sequence]

    def add_due(self, lanes: list[LaneReader], everything: bool, is_filling: IsFilling) -> None:
        """Mark as dirty whose rows have waited long enough in their lanes."""
        full = {lane.lane_id for lane in lanes if is_filling(lane)}
        since = time.monotonic() - self._tail_interval_s
        for sequence, waits in self._waiting.items():
            track = self.tracks[sequence]
            if everything or waits <= since or any(lane.lane_id in full for lane in _lanes_of(track)):
                self.dirty[sequence] = track

    # ------------------------------------------------------------ one record

    def take(self, group: Group, lane: LaneReader, header: RecordHeader) -> None:
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
            self._counts["bad_records"] += 1
            log.warning("drain.bad_record", error=str(error))
        except StaleEpoch as error:
            self._counts["stale_records"] += 1
            log.warning("drain.stale_epoch", error=str(error))

    def _take_open(self, group: Group, lane: LaneReader, header: RecordHeader) -> None:
        known = self._track(group, header.sequence)
        if known is not None and (known.closed or header.token_start <= known.position):
            return  # taken before: this is a replay. Beyond what is known: its engine goes on in a new lane, the old one is lost
        o = lane.open_payload(header)
        self._check_epoch(group, lane, header, o.stream)
        tenant = group.tenant(chain_root(RootId(o.root), o.namespace))
        if tenant is not None and tenant.sealed and not group.keys.has(o.namespace):
            raise BadRecord(f"the key of namespace {o.namespace} isn't there", where=f"stream {o.stream}")
        group.put_root(o.root, RootInfo(o.layout, o.block_tokens, o.state_bytes))
        group.put_tenant(RootId(o.root), o.namespace)
        track = open_track(o, header.epoch)
        self.tracks[header.sequence] = self.dirty[header.sequence] = track
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
        where = _where(lane, header)
        track = self._opened(group, lane, header, "rows")
        if track is None:
            return
        if lane.frame(header, verify=not self.ahead.is_verified(lane, header)).size != track.layout.frame_bytes(
            header.token_count
        ):
            raise BadRecord("a frame doesn't have its layout's size", where=where)
        self.dirty[header.sequence] = track
        source = LaneRef(lane, header)
        position = track.position
        whole = track.add(header.token_start, header.token_end, lane.tokens(header), source)
        if whole is None:
            text = f"rows [{header.token_start}, {header.token_end}) after {track.position} at {where}"
            self._report(header.sequence, "drain.gap", text)
            return
        self._counts["captured_bytes"] += track.layout.frame_bytes(max(0, track.position - position))
        for block in whole:
            if not self._store_block(group, track, header.sequence, block, source):
                track.end_before(block)
                return

    def _take_point(self, group: Group, lane: LaneReader, header: RecordHeader) -> None:
        where = _where(lane, header)
        track = self._opened(group, lane, header, "a rollback point")
        if track is None:
            return
        place = track.place(header.token_end)
        if place is None:
            text = f"a rollback point at {header.token_end}, rows at {track.position}, at {where}"
            self._report(header.sequence, "drain.gap", text)
            return
        if self.named is not None:
            self.named.add(place.id)
        if group.good_point(place):
            self._counts["points_shared"] += 1
            return
        state = lane.state(header)
        if state.size != track.layout.state_bytes:
            raise BadRecord("a rollback point doesn't have its layout's size", where=where)
        self._counts["captured_bytes"] += state.size
        group.put_point(track, place, lane.point_kind(header), state)
        self._counts["points_put"] += 1

    def _take_close(self, group: Group, header: RecordHeader) -> None:
        track = self._track(group, header.sequence)
        if track is not None:
            track.closed = True
            self.dirty[header.sequence] = track

    def _opened(self, group: Group, lane: LaneReader, header: RecordHeader, what: str) -> Track | None:
        """The track that a record adds `what` to; None if its sequence was never opened. Raises StaleEpoch."""
        track = self._track(group, header.sequence)
        if track is None:
            self._report(header.sequence, "drain.orphan", f"{what} without an OPEN record at {_where(lane, header)}")
            return None
        self._check_epoch(group, lane, header, track.stream)
        return track

    def _track(self, group: Group, sequence: SequenceId) -> Track | None:
        track = self.tracks.get(sequence)
        if track is None:
            track = group.load_track(sequence)
            if track is not None:
                self.tracks[sequence] = track
        return track

    def _report(self, sequence: SequenceId, event: str, text: str) -> None:
        """Name a broken sequence once; count each of its records."""
        self._counts[event.removeprefix("drain.")] += 1
        if sequence not in self._reported:
            if len(self._reported) > TRACKS_CACHED:
                self._reported.clear()
            self._reported.add(sequence)
            log.warning(event, error=text)

    # ------------------------------------------------------------ blocks and tails

    def _store_block(
        self, group: Group, track: Track, sequence: SequenceId, block: WholeBlock, newest: LaneRef
    ) -> bool:
        """Store a block that became whole, unless it is there, and drop the tail pieces that it supersedes.

        newest  the record that made it whole. Returns whether the block is stored: what waited for it may have gone bad
        """
        if self.named is not None:
            self.named.add(block.id)
        if group.good_block(block.id):
            self._counts["blocks_shared"] += 1
        else:
            value = self.ahead.value(block)
            try:
                if value is None:
                    self._join(group, track, block.parts, len(block.tokens) // 4, newest)
            except (BadBlock, BadRecord) as error:
                self._counts["bad_blocks"] += 1
                log.warning("drain.bad_block", error=str(error))
                return False
            failpoints.reach("drain.assemble.before")
            group.put_block(track, block, value)
            failpoints.reach("drain.assemble.after")
            self._counts["blocks_put"] += 1
        for part in block.parts:
            if isinstance(part.source, bytes):
                group.delete_tail(part.source)
        self._drop_superseded(group, track, sequence, block)
        return True

    def _join(
        self, group: Group, track: Track, parts: list[Part], token_count: int, newest: LaneRef | None = None
    ) -> None:
        """Build one frame out of parts in lanes and on disk, verified. Raises BadBlock, BadRecord.

        newest  a record that has just been verified; the others were when they were taken, and may have waited for long since
        """
        out = group.frame_buffer(token_count, track.layout)
        frames: list[tuple[Any, int, int, int]] = []
        for source, count, start, end, _ in parts:
            if isinstance(source, LaneRef):
                frame = source.lane.frame(source.header, verify=source != newest)
            else:
                frame = group.tail(source).frame
            frames.append((frame, count, start, end))
        track.layout.join(frames, out)

    def _drop_superseded(self, group: Group, own: Track, sequence: SequenceId, block: WholeBlock) -> None:
        """Tails of the session's ended sequences that hold nothing but the first tokens of this block.

        Other sessions keep theirs: this block goes when its own session leaves it behind.
        """
        mine = session_key(own.namespace, own.session, own.stream)
        by_sequence: dict[SequenceId, list[Any]] = {}
        for piece in group.tails(block.parent, limit=SUPERSEDED_SCAN_LIMIT):
            by_sequence.setdefault(piece.sequence, []).append(piece)
        for other, pieces in by_sequence.items():
            tokens = b"".join(piece.tokens for piece in pieces)
            track = self._track(group, other) if other != sequence else None
            if track is None or session_key(track.namespace, track.session, track.stream) != mine:
                continue
            if track.closed and block.tokens.startswith(tokens):
                for piece in pieces:
                    group.delete_tail(piece.key)

    def store_tails(self, group: Group, everything: bool, is_filling: IsFilling) -> None:
        """Store what is due of each unfinished block as one piece, and how far each sequence is."""
        now = time.monotonic()
        due = now - self._tail_interval_s
        for sequence, track in self.dirty.items():
            waits = self._waiting.setdefault(sequence, now)
            full = any(is_filling(lane) for lane in _lanes_of(track))
            if everything or track.closed or full or waits <= due:
                try:
                    self._store_tail(group, track, sequence)
                except BadRecord as error:
                    self._counts["bad_records"] += 1
                    log.warning("drain.bad_record", error=str(error))
                    track.forget_waiting()
            if track.stored_position == track.position:
                del self._waiting[sequence]
            state = (track.parent, track.stored_position, track.closed)
            if state != track.saved:
                before = group.progress(sequence)
                self.synced_positions.setdefault(sequence, before.position if before is not None else 0)
                group.put_progress(sequence, track, track.stored_position, self._clock.stamp())
                track.saved = state
        self.dirty.clear()

    def _store_tail(self, group: Group, track: Track, sequence: SequenceId) -> None:
        stored = sum(isinstance(part.source, bytes) for part in track.parts)
        fresh = track.parts[stored:]
        count = sum(part.token_count for part in fresh)
        if count:
            self._join(group, track, fresh, count)
            key = group.put_tail(track, sequence, track.position - count, track.tokens[-4 * count :])
            track.parts[stored:] = [Part(key, count, 0, count)]
            self._counts["tails_put"] += 1


def _where(lane: LaneReader, header: RecordHeader) -> str:
    return f"{lane.path.name} record {header.number}, sequence {header.sequence.hex()}"


def _lanes_of(track: Track) -> set[LaneReader]:
    """Lanes in which rows of its unfinished block wait."""
    return {part.source.lane for part in track.parts if isinstance(part.source, LaneRef)}
