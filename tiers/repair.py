"""Taking damage out of the store: what fails its checksum is kept aside as `.broken` and dropped, sequences end before the hole.

By the keeper on request, or by a command while no keeper runs (`tiers/offline.py`); one group commit, so a crash in the middle
leaves the store as it was. Dropped state costs computing it again, nothing else. Damaged records of a lane are only copied aside:
the drain passes over them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from tiers import media
from tiers.base import Base, SessionKey, session_key
from tiers.errors import BadBlock, BadRecord, OtherFormat
from tiers.group import Group
from tiers.keys import Locked
from tiers.lane_format import PAGE, RecordHeader, RecordType
from tiers.lane_header import header_problem, mend_header
from tiers.lane_reader import LaneReader
from tiers.layout import BlockId, PointId, RootId, SequenceId, chain_root
from tiers.lock import is_held
from tiers.values import READERS, Progress
from tiers.verify import stored_parents, whole_bases
from tiers.view import OPENED, View

log = structlog.get_logger()

ASIDE = "broken"  # directory in DATA/store
DATABASE = {"block": "blocks", "tail": "tails", "base": "bases"}


class Damaged(NamedTuple):
    """What to drop: kind `block` (16-byte id), `tail` or `point` (36-byte key), `base` (16-byte key), or a database of small records."""

    kind: str
    key: bytes


class Recompute(NamedTuple):
    """Tokens of a stream whose state is dropped, or can't be reached any more, and is computed again when it is needed."""

    session: str
    stream: str
    token_start: int
    token_end: int


@dataclass(slots=True)
class Repaired:
    """What was done.

    kept_aside  files with the damaged bytes
    live        sequences that are still written and were left as they are
    rebuilt     keys (hex) of damaged bases that were made again
    lanes       what was done about lanes that could not be read, by file name
    """

    dropped: int = 0
    kept_aside: list[str] = field(default_factory=list)
    recompute: list[Recompute] = field(default_factory=list)
    live: int = 0
    rebuilt: list[str] = field(default_factory=list)
    lanes: dict[str, str] = field(default_factory=dict)


def repair_store(
    group: Group, damaged: Iterable[Damaged], aside: Path, *, live: frozenset[SequenceId] = frozenset()
) -> Repaired:
    """Drop what is really damaged of `damaged`, and end the sequences that lean on what isn't stored before the hole.

    aside  directory for the damaged bytes, one file each, on the disk before anything is dropped
    live   sequences that an engine still writes: their records stay, a later repair ends them
    """
    done = Repaired()
    parents = stored_parents(group)
    dropped: set[BlockId] = set()
    cut: set[SequenceId] = set()  # which have lost a tail piece
    for kind, key in damaged:
        if not _is_bad(group, kind, key):
            continue
        raw = group.raw("states", key[-16:]) if kind == "point" else group.raw(DATABASE.get(kind, kind), key)
        if raw is not None:
            done.kept_aside.append(keep_aside(aside, f"{kind}-{key.hex()}", bytes(raw)))
        if kind == "block":
            block = BlockId(key)
            group.delete_block(parents.get(block, BlockId(bytes(16))), _child_tokens(group, parents, block), block)
            dropped.add(block)
        elif kind == "point":
            group.delete_point(key)
        elif kind == "base":
            group.delete_base(SessionKey(key))
        elif kind == "tail":
            group.delete_tail(key)
            cut.add(SequenceId(key[16:32]))
        elif kind == "points":
            group.delete_point(key)
        elif kind == "nodes":  # the block can't be found without it
            block = BlockId(key)
            group.delete_block(parents.get(block, BlockId(bytes(16))), _child_tokens(group, parents, block), block)
            group.delete_raw(kind, key)
            dropped.add(block)
        else:
            group.delete_raw(kind, key)
        done.dropped += 1
    for key, progress in [(SequenceId(key), group.decode_progress(raw)) for key, raw in group.scan("sequences")]:
        ended = _before_hole(group, progress, parents, dropped)
        if ended is None:
            ended = _before_tail_hole(group, key, progress)
            if ended is not None and key not in cut and group.children(BlockId(progress.parent), 1):
                continue  # its session went on from there, in a block that has taken the place of its tail
        _end_before_hole(group, key, progress, ended, key in live, done)
    for base in list(whole_bases(group)):
        _end_base_before_hole(group, base, parents, dropped, done)
    return done


def _child_tokens(view: View, parents: dict[BlockId, BlockId], block: BlockId) -> bytes:
    """The block's tokens, from its place among its parent's children: its own value can't be trusted."""
    parent = parents.get(block, BlockId(b""))
    for key, value in view.scan("children", parent) if parent else ():
        if key[:16] != parent:
            break
        if key[-16:] == block:
            return bytes(value)
    return b""


def _is_bad(view: View, kind: str, key: bytes) -> bool:
    """Looked at again: it may have been written anew since it was found."""
    try:
        if kind == "block":
            view.block(BlockId(key))
        elif kind == "point":
            view.point(PointId(key[-16:]))
        elif kind == "base":
            view.base(SessionKey(key))
        elif kind == "tail":
            view.tail(key)
        else:
            raw = view.raw(kind, key) or b""
            READERS.get(kind, bytes)(view.keys.open(kind, key, raw) if kind in OPENED else raw)
    except Locked:
        return False  # whole, as far as anybody without its key can tell
    except BadBlock:
        return True
    return False


def keep_aside(directory: Path, name: str, data: bytes) -> str:
    """Write damaged bytes into `directory`, synced, and return the file's path."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{name[:200]}.broken"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return str(path)


def _end_before_hole(
    group: Group, sequence: SequenceId, p: Progress, ended: Progress | None, is_live: bool, done: Repaired
) -> None:
    if ended is None or ended.position >= p.position:
        return
    done.recompute.append(Recompute(p.session, p.stream, ended.position, p.position))
    if is_live:
        done.live += 1
    elif ended.position == 0:
        group.delete_sequence(sequence)
    else:
        group.replace_progress(sequence, ended)


def _before_hole(view: View, p: Progress, parents: dict[BlockId, BlockId], dropped: set[BlockId]) -> Progress | None:
    """The sequence up to its first block that isn't stored; None if all are."""
    info = view.root(p.root)
    size = info.block_tokens if info is not None else 0
    block, end, hole = BlockId(p.parent), p.block_start, BlockId(b"")
    hole_start = -1
    while size and end > 0:
        if block in dropped or block not in parents:
            hole, hole_start = block, end - size
        if block not in parents:
            hole_start = 0  # what came before it can't be known from here
            break
        block, end = parents[block], end - size
    if hole_start < 0:
        return None
    parent = parents[hole] if hole_start else chain_root(p.root, p.namespace)  # type: ignore[arg-type]
    return msgspec.structs.replace(p, parent=parent, block_start=hole_start, position=hole_start, closed=True)


def _before_tail_hole(view: View, sequence: SequenceId, p: Progress) -> Progress | None:
    """The sequence up to the first missing piece of its unfinished block; None if none is missing."""
    track = view.load_track(sequence)
    if track is None or track.position >= p.position:
        return None
    return msgspec.structs.replace(p, position=track.position, closed=True)


def _end_base_before_hole(
    group: Group, base: Base, parents: dict[BlockId, BlockId], dropped: set[BlockId], done: Repaired
) -> None:
    """Shorten a compacted session to what can still be restored of it, or forget its base if that is nothing."""
    blocks = base.block_ids
    whole = next((n for n, block in enumerate(blocks) if block in dropped or block not in parents), len(blocks))
    position = whole * base.block_tokens
    tail = b""
    if whole == len(blocks) and base.tail:
        last = blocks[-1] if blocks else chain_root(RootId(base.root), base.namespace)
        for piece in group.tails(last, SequenceId(base.tail)):
            if piece.token_start != position:
                break
            position, tail = position + len(piece.tokens) // 4, base.tail
    points = [(at, kind, point) for at, kind, point in base.points if at <= position and _has_state(group, point)]
    if position >= base.position and len(points) == len(base.points):
        return
    key = session_key(base.namespace, base.session, base.stream)
    if position < base.position:
        done.recompute.append(Recompute(base.session, base.stream, position, base.position))
    if position:
        shorter = msgspec.structs.replace(
            base, tokens=base.tokens[: 4 * position], blocks=b"".join(blocks[:whole]), tail=tail, points=points
        )
        group.put_base(key, shorter)
    else:
        group.delete_base(key)


def _has_state(view: View, point: bytes) -> bool:
    return view.raw("states", point) is not None


# ---------------------------------------------------------------- lanes


def mend_lanes(
    lane_dir: Path, record_count: int, lane_bytes: int, aside: Path, *, set_aside: bool = False
) -> dict[str, str]:
    """Make good lanes that can't be read because their header page is damaged; what was done, by file name.

    record_count, lane_bytes  as `tiers.lane_header.mend_header` takes them
    aside      directory for the damaged bytes
    set_aside  a lane that can't be made good, and that nobody writes, is renamed `.broken`
    """
    done = {}
    for lane in sorted(lane_dir.glob("*.lane")):
        try:
            if header_problem(lane):
                done[lane.name] = _mend_lane(lane, record_count, lane_bytes, aside, set_aside)
        except FileNotFoundError:
            continue  # its engine has replaced it, or the keeper has drained it
    return {name: what for name, what in done.items() if what}


def _mend_lane(lane: Path, record_count: int, lane_bytes: int, aside: Path, set_aside: bool) -> str:
    header = _header_page(lane)
    if mend_header(lane, record_count, lane_bytes):
        try:
            keep_aside(aside, f"lane-{lane.stem}", header)
        except OSError as error:
            log.warning("lane.not_kept_aside", lane=lane.stem, error=str(error))
        log.warning("lane.mended", lane=lane.stem, what=["header page"])
        return "its header page was damaged, and was made good again: nothing in it is lost"
    if not set_aside:
        return ""
    if is_held(lane):
        return "is being written, and was left; its engine replaces it when it is started anew"
    lane.rename(lane.with_name(lane.name + ".broken"))
    return f"can't be made good, and was renamed {lane.name}.broken"


def _header_page(lane: Path) -> bytes:
    try:
        return media.place_of(lane).head(PAGE)
    except OtherFormat:
        return lane.read_bytes()[:PAGE]  # a link that leads nowhere


def damaged_records(lane: LaneReader) -> list[tuple[RecordHeader, bytes]]:
    """Damaged records that wait in a lane, each with its bytes: the entry, then the payload as far as it can be found."""
    found = []
    for header in lane.records(lane.tail):
        if header.type == RecordType.BAD:
            found.append((header, lane.raw_entry(header.number)))
            continue
        try:
            lane.payload(header)
        except BadRecord:
            if header.number >= lane.tail:  # else the keeper has taken it meanwhile, and its writer has written over it
                payload = lane.payload(header, verify=False).tobytes()
                found.append((header, lane.raw_entry(header.number) + payload))
    return found
