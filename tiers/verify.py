"""Check everything that is stored: every checksum, every block's id, every record that waits in a lane. For `concordia verify`.

Read-only, beside a running keeper; takes a new snapshot every few blocks, so that the store's file doesn't grow meanwhile. A bad
block is named by session, stream and token range, as far as sequences are known that lean on it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tiers.base import Base, SessionKey
from tiers.errors import BadBlock, BadRecord
from tiers.keys import Locked
from tiers.lane_format import RecordType
from tiers.lane_header import header_problem
from tiers.lane_reader import LaneSet
from tiers.lane_seal import LockedRecord
from tiers.late_keys import count_open
from tiers.layout import BlockId, PointId, RootId, SequenceId, chain_root
from tiers.values import READERS, PointEntry, Progress, unpack_node
from tiers.view import OPENED, StoreReader, View

BATCH = 32


class Affected(NamedTuple):
    """A range of a session's tokens that can't be restored from here."""

    session: str
    stream: str
    token_start: int
    token_end: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `affected` is empty if no stored sequence leans on it."""

    kind: Literal["block", "tail", "point", "base", "entry", "lane", "record", "parent", "journal", "sessions", "store"]
    key: str
    reason: str
    affected: tuple[Affected, ...] = ()


@dataclass(slots=True)
class Checked:
    """How much `verify` has looked at."""

    blocks: int = 0
    tails: int = 0
    points: int = 0
    records: int = 0
    sequences: int = 0
    bases: int = 0
    open: int = 0  # not sealed, though the tenant's key is given: stored before it was
    locked: int = 0  # sealed with a key that isn't here: not looked at
    bytes: int = 0


def verify(
    store_path: str | os.PathLike[str],
    lane_dir: str | os.PathLike[str] | None = None,
    *,
    map_bytes: int = 1 << 40,
    checked: Checked | None = None,
    pace: Callable[[Checked], None] = lambda checked: None,
) -> Iterator[Finding]:
    """Everything that is wrong with the store and the lanes; `checked` counts along. Raises StoreFailed.

    pace  called outside of any snapshot after every few blocks: it may wait, to bound the speed, and show how far it is
    """
    counts = checked if checked is not None else Checked()
    store = StoreReader(store_path, map_bytes=map_bytes)
    try:
        bad = dict(_bad_blocks(store, counts, pace))
        yield from _name_blocks(store, bad, counts)
        yield from _bad_tails(store, counts, pace)
        yield from _bad_points(store, counts, pace)
        with store.snapshot() as view:
            counts.open = count_open(view)
        if lane_dir is not None:
            yield from _bad_records(store, lane_dir, counts)
    finally:
        store.close()


def _bad_blocks(store: StoreReader, counts: Checked, pace: Callable[[Checked], None]) -> Iterator[tuple[BlockId, str]]:
    after = b""
    while True:
        with store.snapshot() as view:
            keys = [key for key, _ in view.scan("blocks", after, BATCH)]
            for key in keys:
                try:
                    counts.bytes += view.block(BlockId(key)).frame.size
                except Locked:
                    counts.locked += 1
                except BadBlock as error:
                    yield BlockId(key), error.what
                counts.blocks += 1
        if not keys:
            return
        pace(counts)
        after = keys[-1]


def _name_blocks(store: StoreReader, bad: dict[BlockId, str], counts: Checked) -> Iterator[Finding]:
    """Findings of bad and of missing blocks, with the sessions that lean on them."""
    affected: dict[BlockId, list[Affected]] = {block: [] for block in bad}
    missing: dict[BlockId, list[Affected]] = {}
    with store.snapshot() as view:
        parents = stored_parents(view)
        if len(parents) != view.count("blocks"):
            for block in parents.keys() - bad.keys():
                if not view.has_block(block):
                    bad[block], affected[block] = "a block is gone", []
        for _, raw in view.scan("sequences"):
            counts.sequences += 1
            progress = view.decode_progress(raw)
            for block, span in _chain(view, parents, progress):
                _note(block, span, affected, parents, missing)
        bad_bases = list(_bad_entries(view, counts))
        for key, _ in view.scan_raw("bases"):
            counts.bases += 1
            try:
                base = view.base(SessionKey(key))
            except Locked:
                counts.locked += 1
                continue
            except BadBlock as error:
                bad_bases.append(Finding("base", key.hex(), error.what))
                continue
            for block, span in base_chain(base) if base is not None else ():
                _note(block, span, affected, parents, missing)
            if base is not None and base.tail and (hole := _tail_hole(view, base)) is not None:
                bad_bases.append(hole)
    yield from bad_bases
    for block, reason in bad.items():
        yield Finding("block", block.hex(), reason, tuple(affected[block]))
    for block, spans in missing.items():
        yield Finding("parent", block.hex(), "a block that others lean on is not stored", tuple(spans))


def _bad_entries(view: View, counts: Checked) -> Iterator[Finding]:
    """Small records that can't be read: sealed ones that don't open with their key; others have no checksum of their own."""
    for database in dict.fromkeys((*OPENED, *READERS)):
        if database == "bases":
            continue  # they have a checksum
        for key, raw in view.scan_raw(database):
            try:
                opened = view.keys.open(database, key, raw) if database in OPENED else raw
                READERS.get(database, bytes)(opened)
            except Locked:
                counts.locked += 1
            except BadBlock as error:
                yield Finding("entry", f"{database}/{key.hex()}", error.what)


def _note(
    block: BlockId, span: Affected, affected: dict[BlockId, list[Affected]], parents: dict[BlockId, BlockId],
    missing: dict[BlockId, list[Affected]],
) -> None:  # fmt: skip
    if block in affected:
        affected[block].append(span)
    elif block not in parents:
        missing.setdefault(block, []).append(span)


def _tail_hole(view: View, base: Base) -> Finding | None:
    """A base that names tail pieces of which one isn't stored."""
    at = len(base.block_ids) * base.block_tokens
    last = base.block_ids[-1] if base.blocks else chain_root(RootId(base.root), base.namespace)
    for piece in view.tails(last, SequenceId(base.tail)):
        if piece.token_start == at:
            at += len(piece.tokens) // 4
    if at >= base.position or view.locked:
        return None
    span = Affected(base.session, base.stream, at, base.position)
    return Finding("parent", base.tail.hex(), "a tail piece that a session leans on is not stored", (span,))


def base_chain(base: Base) -> Iterator[tuple[BlockId, Affected]]:
    """Blocks of a compacted session, first to last, with their token ranges."""
    size = base.block_tokens
    for index, block in enumerate(base.block_ids):
        yield block, Affected(base.session, base.stream, index * size, (index + 1) * size)


def stored_parents(view: View) -> dict[BlockId, BlockId]:
    """Parent of each block, from the small databases: a bad block's own header can't be trusted."""
    parents = {BlockId(key[-16:]): BlockId(key[:16]) for key, _ in view.scan_raw("children")}
    return parents | {BlockId(key): unpack_node(raw).parent for key, raw in view.scan("nodes")}


def _chain(view: View, parents: dict[BlockId, BlockId], progress: Progress) -> Iterator[tuple[BlockId, Affected]]:
    """Blocks of a sequence from its newest to its first, with their token ranges."""
    info = view.root(progress.root)
    size = info.block_tokens if info is not None else 0
    block, end = BlockId(progress.parent), progress.block_start
    while size and end > 0:
        yield block, Affected(progress.session, progress.stream, end - size, end)
        if block not in parents:
            return  # where the chain goes on can't be known
        block, end = parents[block], end - size


def _bad_tails(store: StoreReader, counts: Checked, pace: Callable[[Checked], None]) -> Iterator[Finding]:
    after = b""
    while True:
        findings = []
        with store.snapshot() as view:
            keys = [key for key, _ in view.scan("tails", after, BATCH)]
            for key in keys:
                counts.tails += 1
                try:
                    counts.bytes += view.tail(key).frame.size
                except Locked:
                    counts.locked += 1
                except BadBlock as error:
                    findings.append(_bad_tail(view, key, error))
        yield from findings
        if not keys:
            return
        pace(counts)
        after = keys[-1]


def _bad_tail(view: View, key: bytes, error: BadBlock) -> Finding:
    progress = view.progress(SequenceId(key[16:32]))
    start = int.from_bytes(key[32:], "big")
    affected = [Affected(progress.session, progress.stream, start, progress.position)] if progress is not None else []
    for base in whole_bases(view):
        if base.tail == key[16:32]:
            affected.append(Affected(base.session, base.stream, start, base.position))
    return Finding("tail", key.hex(), error.what, tuple(affected))


def whole_bases(view: View) -> Iterator[Base]:
    """Compacted sessions whose own record is intact."""
    for key, _ in view.scan_raw("bases"):
        try:
            base = view.base(SessionKey(key))
        except BadBlock:
            continue
        if base is not None:
            yield base


def _bad_points(store: StoreReader, counts: Checked, pace: Callable[[Checked], None]) -> Iterator[Finding]:
    after = b""
    while True:
        bad: list[tuple[bytes, PointEntry, str]] = []
        with store.snapshot() as view:
            entries = [(key, view.decode_point(raw)) for key, raw in view.scan("points", after, BATCH)]
            for key, entry in entries:
                counts.points += 1
                try:
                    counts.bytes += view.point(PointId(key[-16:])).frame.size
                except Locked:
                    counts.locked += 1
                except BadBlock as error:
                    bad.append((key, entry, error.what))
            findings = [Finding("point", key.hex(), reason, _leaning(view, key, entry)) for key, entry, reason in bad]
        yield from findings
        if not entries:
            return
        pace(counts)
        after = entries[-1][0]


def _leaning(view: View, key: bytes, entry: PointEntry) -> tuple[Affected, ...]:
    """Sequences that pass through the block in which a rollback point stands, from the point on."""
    parents, found = stored_parents(view), []
    for _, raw in view.scan("sequences"):
        progress = view.decode_progress(raw)
        if progress.position < entry.position:
            continue
        blocks = [block for block, _ in _chain(view, parents, progress)]
        if key[:16] in blocks or (key[:16] == entry.tenant and blocks[-1:] and parents.get(blocks[-1]) == entry.tenant):
            found.append(Affected(progress.session, progress.stream, entry.position, progress.position))
    for base in whole_bases(view):
        if any(point == key[-16:] for _, _, point in base.points):
            found.append(Affected(base.session, base.stream, entry.position, base.position))
    return tuple(found)


def _bad_records(store: StoreReader, lane_dir: str | os.PathLike[str], counts: Checked) -> Iterator[Finding]:
    lanes = LaneSet(lane_dir, keys=store.keys)
    names: dict[bytes, tuple[str, str]] = {}
    yield from _unreadable_lanes(Path(lane_dir))
    for lane in lanes.scan():
        if not (lane.has_possible_tail and lane.tails_agree):
            yield Finding("lane", lane.path.name, "the lane's tail is damaged: its keeper takes again what waits in it")
        for header in lane.records(lane.tail):
            counts.records += 1
            key = f"{lane.name} record {header.number}"
            try:
                if header.type == RecordType.BAD:
                    raise BadRecord("a record's entry is flipped")
                if not lane.is_committed(header.number):
                    raise BadRecord("a record's commit word is flipped")
                if header.type == RecordType.OPEN:
                    opened = lane.open_payload(header)
                    names[header.sequence] = opened.session, opened.stream
                elif header.sealed and header.type == RecordType.ROWS:
                    lane.frame(header)
                counts.bytes += lane.payload(header).size
            except LockedRecord:
                counts.locked += 1
            except BadRecord as error:
                if header.number < lane.tail:
                    continue  # the keeper has taken it meanwhile
                session, stream = names.get(header.sequence) or _names(store, header.sequence)
                span = Affected(session, stream, header.token_start, header.token_end)
                yield Finding("record", key, error.what, (span,) if stream else ())
    lanes.close()


def _unreadable_lanes(lane_dir: Path) -> Iterator[Finding]:
    for path in sorted(lane_dir.glob("*.lane")):
        try:
            problem = header_problem(path)
        except FileNotFoundError:
            continue
        if problem:
            yield Finding("lane", path.name, problem)


def _names(store: StoreReader, sequence: bytes) -> tuple[str, str]:
    with store.snapshot() as view:
        progress = view.progress(SequenceId(sequence))
    return (progress.session, progress.stream) if progress is not None else ("", "")
