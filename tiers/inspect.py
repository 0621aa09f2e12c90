"""What lies in a lane or in the store, record by record, for `concordia inspect`. Reads only, beside a running keeper or without one.

Every row is checked as a restore would check it; a bad one is shown as bad and the listing goes on. One snapshot of the store is taken
for every few blocks, so that the store's file doesn't grow meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiers.base import Base, SessionKey, session_key
from tiers.errors import BadBlock, BadRecord
from tiers.keys import Locked
from tiers.lane_format import RecordHeader, RecordType
from tiers.lane_reader import LaneReader
from tiers.lane_seal import LockedRecord
from tiers.layout import BlockId, PointId, RootId, SequenceId, chain_root
from tiers.values import Progress
from tiers.verify import base_chain, whole_bases
from tiers.view import StoreReader, View

BATCH = 64


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """Geometry and ends of a lane. Counts of records, sizes in bytes."""

    path: str
    lane_id: str
    incarnation: int
    lane_bytes: int
    record_count: int
    tail: int
    head: int


@dataclass(frozen=True, slots=True)
class RecordRow:
    """One record. state: `ok`, `bad: …`, or `not checked`; freed: the keeper has it in the store."""

    number: int
    type: str
    epoch: int
    sequence: str
    session: str
    stream: str
    token_start: int
    token_end: int
    payload_offset: int
    payload_bytes: int
    freed: bool
    state: str


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One thing of a stored sequence: a block, a tail piece or a rollback point."""

    kind: str
    id: str
    token_start: int
    token_end: int
    bytes: int
    state: str


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """How far one sequence is stored; `compacted`: it is a session's base, and `sequence` the base's key."""

    sequence: str
    session: str
    stream: str
    namespace: str
    root: str
    epoch: int
    block_start: int
    position: int
    closed: bool
    compacted: bool = False


def lane_facts(path: Path) -> LaneFacts:
    """A lane's header. Raises OtherFormat, FileNotFoundError."""
    lane = LaneReader.open(path)
    try:
        tail = lane.tail
        lane_id = f"{lane.lane_id:016x}"
        return LaneFacts(
            str(path), lane_id, lane.incarnation, lane.lane_bytes, lane.record_count, tail, lane.head(tail)
        )
    finally:
        lane.close()


def lane_records(
    path: Path, *, from_number: int | None = None, limit: int = 1 << 30, freed: bool = False, check: bool = True
) -> Iterator[RecordRow]:
    """Rows of a lane's committed records.

    from_number  first record; default the tail, or with `freed` the oldest that has not been overwritten
    freed        freed records, too, as far as the ring still holds them
    """
    lane = LaneReader.open(path)
    try:
        names: dict[bytes, tuple[str, str]] = {}
        tail = lane.tail
        start = max(0, lane.head(tail) - lane.record_count) if freed else tail
        for header in lane.records(start) if not freed else _written(lane, start, tail):
            row = _record_row(lane, header, tail, names, check)
            if from_number is not None and header.number < from_number:
                continue
            if limit <= 0:
                return
            limit -= 1
            yield row
    finally:
        lane.close()


def _written(lane: LaneReader, start: int, tail: int) -> Iterator[RecordHeader]:
    """Records from `start` on whose slot and payload still stand, the freed ones included."""
    for number in range(start, tail):
        for header in lane.records(number, 1):
            if lane.intact(header):
                yield header
    yield from lane.records(tail)


def _record_row(
    lane: LaneReader, header: RecordHeader, tail: int, names: dict[bytes, tuple[str, str]], check: bool
) -> RecordRow:
    state = "ok" if check else "not checked"
    try:
        if header.type == RecordType.BAD:
            raise BadRecord("its entry is flipped")
        if header.type == RecordType.OPEN:
            opened = lane.open_payload(header)
            names[header.sequence] = opened.session, opened.stream
        elif check:
            lane.payload(header)
    except LockedRecord:
        state = "locked"
    except BadRecord as error:
        state = f"bad: {error.what}"
    session, stream = names.get(header.sequence, ("", ""))
    known = header.type in set(RecordType)
    return RecordRow(
        header.number, RecordType(header.type).name if known else str(header.type), header.epoch, header.sequence.hex(),
        session, stream, header.token_start, header.token_end, header.payload_offset, header.payload_bytes,
        header.number < tail, state,
    )  # fmt: skip


# ---------------------------------------------------------------- store


def sequences(store: StoreReader, *, session: str = "", stream: str = "", sequence: bytes = b"") -> list[SequenceRow]:
    """Stored sequences of a session, of a stream, or the one of that id; all if nothing is named. Newest epoch last."""
    found = []
    with store.snapshot() as view:
        for key, raw in view.scan("sequences"):
            p = view.decode_progress(raw)
            wanted = (not session or p.session == session) and (not stream or p.stream == stream)
            if wanted and (not sequence or key == sequence):
                found.append(_sequence_row(key, p))
        for base in whole_bases(view):
            key = session_key(base.namespace, base.session, base.stream)
            wanted = (not session or base.session == session) and (not stream or base.stream == stream)
            if wanted and (not sequence or key == sequence):
                found.append(_base_row(key, base))
    return sorted(found, key=lambda row: (row.session, row.stream, row.epoch))


def _sequence_row(key: bytes, p: Progress) -> SequenceRow:
    return SequenceRow(
        key.hex(), p.session, p.stream, p.namespace, p.root.hex(), p.epoch, p.block_start, p.position, p.closed
    )


def _base_row(key: SessionKey, base: Base) -> SequenceRow:
    block_start = len(base.block_ids) * base.block_tokens
    root = base.root.hex()
    return SequenceRow(
        key.hex(), base.session, base.stream, base.namespace, root, base.epoch, block_start, base.position, True, True
    )


def stored_rows(store: StoreReader, row: SequenceRow, *, check: bool = True) -> Iterator[StoredRow]:
    """Everything of one sequence, in the order of its tokens: blocks and the rollback points after them, then the tail's pieces.

    A block that is not stored ends the way back to the first; the row says so.
    """
    base = _base(store, row)
    chain = _chain(store, row) if base is None else [(b, s.token_start, s.token_end) for b, s in base_chain(base)]
    for at in range(0, len(chain), BATCH):
        with store.snapshot() as view:
            rows = []
            for block, start, end in chain[at : at + BATCH]:
                rows += [_block_row(view, block, start, end, check), *_point_rows(view, block, check)]
        yield from rows
    with store.snapshot() as view:
        name = SequenceId(base.tail if base is not None else bytes.fromhex(row.sequence))
        parent = chain[-1][0] if chain else chain_root(RootId(bytes.fromhex(row.root)), row.namespace)
        pieces = view.tails(parent, name) if name else []
        rows = [_tail_row(view, piece.key, piece.token_start, len(piece.tokens) // 4, check) for piece in pieces]
    yield from rows


def _base(store: StoreReader, row: SequenceRow) -> Base | None:
    if not row.compacted:
        return None
    with store.snapshot() as view:
        return view.base(SessionKey(bytes.fromhex(row.sequence)))


def _chain(store: StoreReader, row: SequenceRow) -> list[tuple[BlockId, int, int]]:
    """(block, token_start, token_end) of a sequence's blocks, first one first."""
    found: list[tuple[BlockId, int, int]] = []
    with store.snapshot() as view:
        progress = view.progress(SequenceId(bytes.fromhex(row.sequence)))
        info = view.root(progress.root) if progress is not None else None
        if progress is None or info is None:
            return []
        block, end = BlockId(progress.parent), progress.block_start
        while end > 0:
            found.append((block, end - info.block_tokens, end))
            node = view.node(block)
            if node is None:
                break
            block, end = node.parent, end - info.block_tokens
    return found[::-1]


def _block_row(view: View, block: BlockId, start: int, end: int, check: bool) -> StoredRow:
    try:
        if not check:
            return StoredRow("block", block.hex(), start, end, 0, "not checked" if view.has_block(block) else "missing")
        size = view.block(block).frame.size
    except Locked:
        return StoredRow("block", block.hex(), start, end, 0, "locked")
    except BadBlock as error:
        return StoredRow("block", block.hex(), start, end, 0, f"bad: {error.what}")
    return StoredRow("block", block.hex(), start, end, size, "ok")


def _point_rows(view: View, parent: BlockId, check: bool) -> Iterator[StoredRow]:
    """Rollback points in whatever comes after a block: also those of a conversation that goes another way from there."""
    for key, entry in view.points(parent):
        size, state = entry.value_bytes, "ok" if check else "not checked"
        try:
            if check:
                size = view.point(PointId(key[-16:])).frame.size
        except Locked:
            state = "locked"
        except BadBlock as error:
            state = f"bad: {error.what}"
        yield StoredRow("point", key[-16:].hex(), entry.position, entry.position, size, state)


def _tail_row(view: View, key: bytes, start: int, count: int, check: bool) -> StoredRow:
    try:
        size = view.tail(key).frame.size if check else 0
    except Locked:
        return StoredRow("tail", key.hex(), start, start + count, 0, "locked")
    except BadBlock as error:
        return StoredRow("tail", key.hex(), start, start + count, 0, f"bad: {error.what}")
    return StoredRow("tail", key.hex(), start, start + count, size, "ok" if check else "not checked")
