"""The restorable prefix: which tokens of a list can be put back, and from where. Stage *restore*, for the engine's step thread.

One look-up for every case: state in this engine's lane, in the lane of a dead engine, on disk, or partly here and partly there.
Lock-free: lanes are read while they are written, the store under one snapshot. Every frame that is handed out was
verified; a frame of a lane that is overwritten while it is being used is noticed when the with-block ends.
Source: docs/log-format.md
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal, NamedTuple, Protocol

import numpy as np
import structlog

from tiers.errors import BadBlock, BadRecord, OtherFormat, StoreFailed
from tiers.keys import Keyring
from tiers.lane_format import RecordHeader, RecordType
from tiers.lane_reader import LaneReader, LaneRef, LaneSet
from tiers.layout import ALL_GROUPS, BlockId, Layout, PointId, RootId, SequenceId, block_id, chain_root, point_id
from tiers.pages import ReadAhead
from tiers.track import Part, Track, WholeBlock, common_tokens, cut_parts, open_track
from tiers.values import Value
from tiers.view import EmptyView, View

log = structlog.get_logger()

Tier = Literal["lane", "disk"]


# A session's blocks mostly lie one after the other in the store's file, and a look-up waits for each page of its value.
READ_AHEAD_BYTES = 2 << 20
# What an extent's frame is: a record, a block (16-byte id) or a tail piece (36-byte key).
Ref = LaneRef | bytes


class Extent(NamedTuple):
    """Restorable tokens [token_start, token_end), all in one frame, at rows [take_start, take_end) of it.

    groups  mask of the layout's groups that the frame has: rows of window layers may have been dropped by compaction
    """

    tier: Tier
    token_start: int
    token_end: int
    take_start: int
    take_end: int
    frame_token_count: int
    ref: Ref
    groups: int = ALL_GROUPS

    @property
    def token_count(self) -> int:
        return self.token_end - self.token_start


class FrameSlice(NamedTuple):
    """frame: read-only uint8, flat, Layout order, of frame_token_count tokens; rows [take_start, take_end) of it are wanted.

    groups  mask of the layout's groups that the frame has, as `Layout.views` takes it
    """

    frame: np.ndarray
    frame_token_count: int
    take_start: int
    take_end: int
    groups: int = ALL_GROUPS


class PointRef(NamedTuple):
    """A rollback point that can be read: the state after the first `position` tokens. kind: a PointKind."""

    position: int
    tier: Tier
    kind: int
    ref: LaneRef | PointId


class Snapshots(Protocol):
    """What the finder needs of a store: StoreReader, or the keeper's own Store."""

    keys: Keyring

    def snapshot(self) -> AbstractContextManager[View]: ...


class LaneIndex:
    """What the lanes hold that the keeper has not freed: whole blocks by id and by parent, and unfinished blocks' tracks.

    Grows with the lanes; made anew when a tail or the store has moved on, since parts may then lie elsewhere. Bounded by the
    lanes' own size: what has been freed is not kept.
    """

    def __init__(self, lanes: LaneSet) -> None:
        self._lanes = lanes
        self._seen: dict[int, int] = {}  # lane id -> next record to index
        self._epoch: tuple[object, ...] = ()
        self._clear()

    def _clear(self) -> None:
        self._seen.clear()
        self.blocks: dict[BlockId, WholeBlock] = {}
        self.children: dict[BlockId, list[WholeBlock]] = {}
        self.tracks: dict[SequenceId, Track | None] = {}
        self.points: dict[BlockId, dict[PointId, tuple[int, int, LaneRef]]] = {}  # by parent: (count, kind, where)

    def gather(self) -> list[tuple[LaneReader, int]]:
        """The lanes and their tails, looked at before a snapshot of the store is taken: what is freed by then is in it."""
        return [(lane, lane.tail) for lane in self._lanes.scan()]

    def refresh(self, tails: list[tuple[LaneReader, int]], view: View) -> None:
        """Index what is new in the lanes."""
        epoch = (view.snapshot_number, *((lane.lane_id, tail) for lane, tail in tails))
        if epoch != self._epoch:
            self._clear()
            self._epoch = epoch
        for lane, tail in tails:
            headers = lane.records(self._seen.get(lane.lane_id, tail))
            for header in headers:
                try:
                    self._take(lane, header, view)
                except BadRecord:
                    continue  # sealed, and changed or without its key: what follows on it has a gap before it
            self._seen[lane.lane_id] = headers[-1].number + 1 if headers else self._seen.get(lane.lane_id, tail)

    def _take(self, lane: LaneReader, header: RecordHeader, view: View) -> None:
        if header.type not in (RecordType.OPEN, RecordType.ROWS, RecordType.POINT):
            return
        sequence = header.sequence
        if sequence not in self.tracks:
            self.tracks[sequence] = view.load_track(sequence)
        track = self.tracks[sequence]
        if header.type == RecordType.OPEN:
            if track is None:
                self.tracks[sequence] = _open_track(lane, header)
        elif track is not None and header.type == RecordType.POINT:
            place = track.place(header.token_end)
            if place is not None:
                entry = len(place.tokens) // 4, lane.point_kind(header), LaneRef(lane, header)
                self.points.setdefault(place.parent, {})[place.id] = entry
        elif track is not None:
            whole = track.add(header.token_start, header.token_end, lane.tokens(header), LaneRef(lane, header))
            for block in whole or ():
                if block.id not in self.blocks:
                    self.blocks[block.id] = block
                    self.children.setdefault(block.parent, []).append(block)


def _open_track(lane: LaneReader, header: RecordHeader) -> Track | None:
    try:
        return open_track(lane.open_payload(header), header.epoch)
    except BadRecord:
        return None


class Reading:
    """One look at lanes and store. Got from `PrefixFinder.reading()`; frames it hands out live as long as its with-block."""

    def __init__(self, view: View, index: LaneIndex, ahead: ReadAhead) -> None:
        self._view = view
        self._index = index
        self._lane_frames: dict[LaneRef, np.ndarray] = {}
        self._ahead = ahead
        self._shapes: dict[bytes, Layout | None] = {}  # by root
        ahead.begin()

    def find(
        self, root: RootId, namespace: str, tokens: np.ndarray, *, limit: int, block_tokens: int, start: int = 0
    ) -> list[Extent]:
        """Extents that cover exactly [start, P), in order, where P <= limit is the longest restorable position.

        tokens  the whole token list, int32; start: what is resident already (its blocks aren't looked for)
        Returns an empty list if nothing beyond start can be restored
        Cost    about 3 us a block when the store's index is cached; no payload is touched
        """
        self._view.keys.know(namespace)
        packed = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        parent, at, limit = chain_root(root, namespace), 0, min(limit, len(tokens))
        extents: list[Extent] = []
        while at + block_tokens <= limit:
            block = packed[4 * at : 4 * (at + block_tokens)]
            child = block_id(parent, block)
            if at + block_tokens > start:
                whole = self._index.blocks.get(child)
                if whole is not None:
                    _append(extents, whole.parts, at, start)
                elif (node := self._view.node(child)) is not None:
                    skip = max(start - at, 0)
                    end = at + block_tokens
                    extents.append(Extent("disk", at + skip, end, skip, block_tokens, block_tokens, child, node.groups))
                else:
                    break
            parent, at = child, at + block_tokens
        rest = packed[4 * at : 4 * min(limit, at + block_tokens)]
        if rest:
            _append(extents, self._longest_match(parent, rest, block_tokens), at, start)
        return extents

    def _longest_match(self, parent: BlockId, rest: bytes, block_tokens: int) -> list[Part]:
        """Parts for the most first tokens of `rest` that anything stored after `parent` begins with."""
        best, best_parts = 0, list[Part]()
        for tokens, parts in self._candidates(parent, rest, block_tokens):
            shared = common_tokens(tokens, rest)
            if shared > best:
                best, best_parts = shared, parts
        return cut_parts(best_parts, 0, best)

    def _candidates(self, parent: BlockId, rest: bytes, block_tokens: int) -> Iterator[tuple[bytes, list[Part]]]:
        """(tokens, parts) of what follows `parent`: blocks and unfinished blocks, in lanes and on disk."""
        for whole in self._index.children.get(parent, ()):
            yield whole.tokens, whole.parts
        for track in self._index.tracks.values():
            if track is not None and track.parent == parent:
                yield track.tokens, track.parts
        child = self._view.best_child(parent, rest)
        if child is not None:
            block, shared = child
            node = self._view.node(block)
            yield rest[: 4 * shared], [Part(block, block_tokens, 0, shared, node.groups if node else ALL_GROUPS)]
        yield from self._stored_tails(parent)

    def _stored_tails(self, parent: BlockId) -> Iterator[tuple[bytes, list[Part]]]:
        sequence, tokens, parts, position = None, b"", list[Part](), -1
        for piece in self._view.tails(parent):
            if piece.sequence != sequence:
                if parts:
                    yield tokens, parts
                sequence, tokens, parts, position = piece.sequence, b"", [], piece.token_start
            count = len(piece.tokens) // 4
            if count and piece.token_start == position:
                tokens += piece.tokens
                parts.append(Part(piece.key, count, 0, count))
                position += count
        if parts:
            yield tokens, parts

    def __call__(self, extent: Extent, *, windows: bool = True) -> FrameSlice:
        """The verified frame of an extent: memory of the lane or of the store's map, valid until the with-block ends.

        windows  whether rows of window layers are wanted; without them, a stored block's are neither read nor given
        Raises BadBlock: restore what came before it, and compute again from extent.token_start
        """
        if not windows and extent.groups == ALL_GROUPS and isinstance(extent.ref, bytes) and len(extent.ref) == 16:
            rows = self._view.leading(BlockId(extent.ref))
            if rows is not None and self._is_whole_leading(rows) and self._is_frame_of(extent, rows):
                self._ahead.after(rows.frame)
                return FrameSlice(rows.frame, rows.token_count, extent.take_start, extent.take_end, rows.groups)
        try:
            frame = self._lane_frame(extent.ref) if isinstance(extent.ref, LaneRef) else self._stored_frame(extent)
        except (BadRecord, BadBlock) as error:
            span = f"tokens [{extent.token_start}, {extent.token_end})"
            raise BadBlock(error.what, where=f"{span}, {error.where}", cause=error.cause) from error
        return FrameSlice(frame, extent.frame_token_count, extent.take_start, extent.take_end, extent.groups)

    def _is_whole_leading(self, rows: Value) -> bool:
        """Whether the rows have all groups without a window, and no others: no checksum says so of a node's mask."""
        if rows.root not in self._shapes:
            info = self._view.root(rows.root)
            self._shapes[rows.root] = info.shape if info is not None else None
        shape = self._shapes[rows.root]
        return shape is not None and rows.groups == shape.leading_groups

    def _is_frame_of(self, extent: Extent, value: Value) -> bool:
        """Whether a frame has the length and the place that it was found under: what leads to it has no checksum."""
        place = extent.token_start - extent.take_start
        return (value.token_count, value.token_start) == (extent.frame_token_count, place)

    def _lane_frame(self, ref: LaneRef) -> np.ndarray:
        frame = self._lane_frames.get(ref)
        if frame is None:
            frame = self._lane_frames[ref] = ref.lane.frame(ref.header)
        return frame

    def _stored_frame(self, extent: Extent) -> np.ndarray:
        ref = extent.ref
        assert isinstance(ref, bytes)
        value = self._view.block(BlockId(ref)) if len(ref) == 16 else self._view.tail(ref)
        if not self._is_frame_of(extent, value):
            cause = f"{value.token_count} tokens from {value.token_start} on"
            raise BadBlock("a stored frame has another length or place", where=ref.hex(), cause=cause)
        self._ahead.after(value.frame)
        if len(ref) == 16 and value.groups != extent.groups:
            raise BadBlock("a stored frame has other groups", where=ref.hex())
        return value.frame

    def points(
        self, root: RootId, namespace: str, tokens: np.ndarray, *, limit: int, block_tokens: int
    ) -> list[PointRef]:
        """Rollback points on the way of `tokens` at positions <= limit, ascending; at most one a position.

        Found by token content alone: another sequence's point on an equal prefix counts.
        Cost    about 5 us a block; no state is touched
        """
        packed = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        parent, limit = chain_root(root, namespace), min(limit, len(tokens))
        found: list[PointRef] = []
        for at in range(0, limit + 1, block_tokens):
            rest = packed[4 * at : 4 * min(limit, at + block_tokens)]
            found.extend(self._points_after(parent, at, rest, block_tokens))
            parent = block_id(parent, packed[4 * at : 4 * (at + block_tokens)])
        return found

    def _points_after(self, parent: BlockId, at: int, rest: bytes, block_tokens: int) -> list[PointRef]:
        found: dict[int, PointRef] = {}
        for key, entry in self._view.points(parent):
            count, point = int.from_bytes(key[16:20], "big"), PointId(key[20:])
            if 4 * count <= len(rest) and point_id(parent, rest[: 4 * count]) == point:
                found[count] = PointRef(at + count, "disk", entry.kind, point)
        for point, (count, kind, ref) in self._index.points.get(parent, {}).items():
            if 4 * count <= len(rest) and point_id(parent, rest[: 4 * count]) == point:
                found[count] = PointRef(at + count, "lane", kind, ref)
        return [found[count] for count in sorted(found) if count < block_tokens]

    def point(self, ref: PointRef) -> np.ndarray:
        """The verified state of a rollback point: uint8, read-only, valid until the with-block ends. Raises BadBlock."""
        if not isinstance(ref.ref, LaneRef):
            return self._view.point(ref.ref).frame
        try:
            state = ref.ref.lane.state(ref.ref.header)
        except BadRecord as error:
            raise BadBlock(
                error.what, where=f"rollback point {ref.position}, {error.where}", cause=error.cause
            ) from error
        self._lane_frames[ref.ref] = state  # `check` asks whether it was overwritten meanwhile
        return state

    def check(self) -> None:
        """Raise BadBlock if a lane frame that was handed out has been overwritten since: what was copied from it is void."""
        for ref in self._lane_frames:
            if not ref.lane.intact(ref.header):
                where = f"{ref.lane.name} record {ref.header.number}"
                raise BadBlock("a lane's record was overwritten while it was being restored", where=where)


def _append(extents: list[Extent], parts: list[Part], token_start: int, start: int) -> None:
    """Add `parts`, the first of which begins at position token_start, without what lies before `start`."""
    for part in parts:
        token_end = token_start + part.token_count
        skip = max(start - token_start, 0)
        if skip < part.token_count:
            _append_part(extents, part.cut(skip, part.token_count), token_start + skip)
        token_start = token_end


def _append_part(extents: list[Extent], part: Part, token_start: int) -> None:
    ref, _, take_start, take_end, groups = part
    token_end = token_start + part.token_count
    if extents:
        last = extents[-1]
        if last.ref == ref and last.take_end == take_start:  # blocks of one prefill record: read it once
            take_start, token_start = last.take_start, last.token_start
            extents.pop()
    tier: Tier = "lane" if isinstance(ref, LaneRef) else "disk"
    extents.append(Extent(tier, token_start, token_end, take_start, take_end, part.frame_token_count, ref, groups))


class PrefixFinder:
    """Finds and reads restorable prefixes. One a thread; lanes and store may appear later.

    with finder.reading() as read:
        for extent in read.find(root, namespace, tokens, limit=len(tokens) - 1, block_tokens=32):
            frame, frame_token_count, take_start, take_end, groups = read(extent)  # raises BadBlock
            ...  # copy the rows into the arena
    # leaving the block raises BadBlock if a lane's writer overwrote a frame in the meantime: take none of it, find again
    """

    def __init__(self, store: Snapshots, lane_dir: str | os.PathLike[str]) -> None:
        self._store = store
        self._lanes = LaneSet(lane_dir, keys=store.keys)
        self._index = LaneIndex(self._lanes)
        self._ahead = ReadAhead(READ_AHEAD_BYTES)
        self.unusable = ""  # why the store can't be opened

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """Look at lanes and store now. Keep it short and never wait inside: an open snapshot lets the store's file grow."""
        tails = self._index.gather()
        with self._snapshot() as view:
            self._index.refresh(tails, view)
            reading = Reading(view, self._index, self._ahead)
            yield reading
            reading.check()

    @contextmanager
    def _snapshot(self) -> Iterator[View]:
        """A store that can't be opened is a tier that holds nothing; said once for each reason."""
        with ExitStack() as opened:
            try:
                view = opened.enter_context(self._store.snapshot())
                self.unusable = ""
            except (StoreFailed, OtherFormat) as error:
                if str(error) != self.unusable:
                    log.error("restore.store_unusable", error=str(error))
                self.unusable = str(error)
                view = EmptyView()
            yield view

    def find(
        self, root: RootId, namespace: str, tokens: np.ndarray, *, limit: int, block_tokens: int, start: int = 0
    ) -> list[Extent]:
        """As Reading.find, for planning: the extents can't be read any more, find them again inside `reading()`."""
        try:
            with self.reading() as reading:
                return reading.find(root, namespace, tokens, limit=limit, block_tokens=block_tokens, start=start)
        except StoreFailed as error:  # a page of the store's index is damaged
            log.error("restore.store_unusable", error=str(error))
            return []

    def close(self) -> None:
        """Unmap the lanes. The store reader is the caller's."""
        self._lanes.close()
