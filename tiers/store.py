"""Tier 2: LMDB on disk. Stages *drain* (Store, the keeper's only thread) and *restore* (StoreReader, any process).

Whole blocks by block id, pieces of unfinished blocks, and how far each sequence came. Values carry their own checksum,
so a flipped byte is a miss with a reason. A snapshot pins the file's old pages: never hold one across a wait. Values are
handed out as views into the map, valid inside the with-block. Source: docs/log-format.md
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import msgspec
import numpy as np
import structlog
from xxhash import xxh3_64_intdigest

from tiers import failpoints, whole_file
from tiers.base import Base, SessionKey, pack_base, unpack_base
from tiers.errors import BadBlock, OtherFormat, StoreFailed
from tiers.keys import Keyring, Locked, is_sealed
from tiers.layout import ALL_GROUPS, BlockId, Layout, PointId, RootId, SequenceId, block_id, chain_root, point_id
from tiers.pages import populate_read
from tiers.settings import Durability
from tiers.track import Part, PointPlace, Sealed, Track, common_tokens

log = structlog.get_logger()

STORE_VERSION = 2
VALUE_MAGIC = b"CBLK"
VALUE_VERSION = 2
READABLE_VERSIONS = (1, 2)
KIND_BLOCK, KIND_TAIL, KIND_POINT = 1, 2, 3
# magic, version, kind, checksum of all that follows | token count, token start, parent, root, block tokens,
# and a last field: absent groups of a block, kind of a rollback point
VALUE = struct.Struct("<4sHHQII16s16sII")
CHECKED_FROM = 16
LMDB_PAGE_HEADER = 16  # a large value starts this far into its first page
CHILD_TOKENS_BYTES = 400  # LMDB keys are 511 bytes at most
# What small things are known of a block, so that its pages are touched only by who wants its frame:
# parent, tenant (its chain's root), token_end, mask of absent groups, bytes of its value.
NODE = struct.Struct("<16s16sIIQ")
# May follow: the bytes at the frame's beginning that hold the rows without a window, their checksum, mask of their groups.
LEADING = struct.Struct("<QQI4x")
V1_DATABASES = (b"meta", b"roots", b"blocks", b"children", b"tails", b"sequences", b"streams")
DATABASES = (*V1_DATABASES, b"nodes", b"tenants", b"points", b"states", b"bases", b"pins")
PAGE = 4096
FREE_PAGES_BYTES = 128 << 20  # of its own pages that a file must have free to be written to on a full disk
PAGES_PER_BYTE = 1.1  # pages of a file to bytes that are counted: room for its trees
OVERFLOW_BYTES = 2000  # a value longer than about half a page has pages of its own
FREE_DISK_RESERVE_BYTES = 64 << 20  # below this nothing is put, so that deletes still find room


class Progress(msgspec.Struct, frozen=True):
    """How far one sequence is in the store: whole blocks up to `parent` (ending at block_start), tail pieces up to `position`."""

    root: bytes
    namespace: str
    session: str
    stream: str
    epoch: int
    parent: bytes
    block_start: int
    position: int
    closed: bool
    used_ms: int = 0  # since 1970; 0 in version 1


class Pin(msgspec.Struct, frozen=True):
    """A session that is never evicted."""

    namespace: str
    session: str


class RootInfo(msgspec.Struct, frozen=True):
    """What frames of a state fingerprint look like; entries as in Layout.from_entries."""

    layout: list[tuple[int, ...]]
    block_tokens: int
    state_bytes: int = 0

    @property
    def shape(self) -> Layout:
        return Layout.from_entries(self.layout, self.state_bytes)


class Tenant(msgspec.Struct, frozen=True):
    """Whose blocks a chain's root stands for. sealed: what is stored for it is encrypted, and must not be written otherwise."""

    root: bytes
    namespace: str
    sealed: bool = False


class Leading(NamedTuple):
    """The beginning of a frame that can be verified alone: all that a restore wants of a block before the windows."""

    byte_count: int
    checksum: int
    groups: int


class Node(NamedTuple):
    """What is known of a block without touching it. `groups`: mask of those that its frame has."""

    parent: BlockId
    tenant: BlockId
    token_end: int
    groups: int
    value_bytes: int
    leading: Leading | None = None


class PointEntry(msgspec.Struct, frozen=True):
    """A stored rollback point without its state: kind (PointKind), position, size of its value, tenant (its chain's root)."""

    kind: int
    position: int
    value_bytes: int
    tenant: bytes


class StreamOwner(msgspec.Struct, frozen=True):
    """Newest epoch of a stream, and how long each lane was when that epoch began: older records before that were no trespass."""

    epoch: int
    heads: dict[int, int]


class Value(NamedTuple):
    """A verified block, tail piece or rollback point; `frame` (a point's state) is a read-only view into the map."""

    token_count: int
    token_start: int
    parent: BlockId
    root: RootId
    tokens: bytes
    frame: np.ndarray
    last: int

    @property
    def groups(self) -> int:
        """Mask of the groups that a block's frame has."""
        return ALL_GROUPS & ~self.last


class TailPiece(NamedTuple):
    """A piece of an unfinished block, not verified."""

    key: bytes
    sequence: SequenceId
    token_start: int
    tokens: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode_progress = msgspec.msgpack.Decoder(Progress).decode
_decode_root = msgspec.msgpack.Decoder(RootInfo).decode
_decode_owner = msgspec.msgpack.Decoder(StreamOwner).decode
_decode_tenant = msgspec.msgpack.Decoder(Tenant).decode
_decode_pin = msgspec.msgpack.Decoder(Pin).decode
_decode_point = msgspec.msgpack.Decoder(PointEntry).decode


def frame_offset(token_count: int) -> int:
    """Where the frame starts in a value: 64-byte aligned in memory when the value has pages of its own."""
    return ((LMDB_PAGE_HEADER + VALUE.size + 4 * token_count + 63) & -64) - LMDB_PAGE_HEADER


def pack_value(
    out: np.ndarray,
    kind: int,
    track_root: RootId,
    block_tokens: int,
    parent: bytes,
    token_start: int,
    tokens: bytes,
    last: int = 0,
) -> None:
    """Fill in header, tokens and checksum around the frame that `out` (a whole value) already holds.

    last  mask of a block's absent groups, kind of a rollback point
    """
    count = len(tokens) // 4
    offset = frame_offset(count)
    head = bytearray(offset)
    VALUE.pack_into(
        head, 0, VALUE_MAGIC, VALUE_VERSION, kind, 0, count, token_start, parent, track_root, block_tokens, last
    )
    head[VALUE.size : VALUE.size + len(tokens)] = tokens
    out[:offset] = np.frombuffer(head, np.uint8)
    out[8:16] = np.frombuffer(xxh3_64_intdigest(out[CHECKED_FROM:].data).to_bytes(8, "little"), np.uint8)


def unpack_value(raw: Any, kind: int, where: str) -> Value:
    """Verify a stored value and split it. Raises BadBlock."""
    data = np.frombuffer(raw, np.uint8)
    if data.size < VALUE.size:
        raise BadBlock("a stored value is cut short", where=where)
    magic, version, found, checksum, count, start, parent, root, _, last = VALUE.unpack_from(data.data)
    if magic != VALUE_MAGIC or version not in READABLE_VERSIONS or found != kind or data.size < frame_offset(count):
        raise BadBlock("a stored value has no valid header", where=where)
    if data.size >= 1 << 16:
        populate_read(data)
    if xxh3_64_intdigest(data[CHECKED_FROM:].data) != checksum:
        raise BadBlock("a stored value's checksum is wrong", where=where)
    tokens = data[VALUE.size : VALUE.size + 4 * count].tobytes()
    return Value(count, start, BlockId(parent), RootId(root), tokens, data[frame_offset(count) :], last)


def value_tokens(raw: Any) -> bytes:
    """Token ids of a stored value, not verified; empty if its header makes no sense."""
    if len(raw) < VALUE.size:
        return b""
    count = VALUE.unpack_from(raw)[4]
    return bytes(raw[VALUE.size : VALUE.size + 4 * count]) if frame_offset(count) <= len(raw) else b""


def unpack_node(raw: Any) -> Node:
    """A value of the `nodes` database."""
    parent, tenant, end, absent, size = NODE.unpack_from(raw)
    leading = Leading(*LEADING.unpack_from(raw, NODE.size)) if len(raw) >= NODE.size + LEADING.size else None
    return Node(BlockId(parent), BlockId(tenant), end, ALL_GROUPS & ~absent, size, leading)


def point_key(place: PointPlace) -> bytes:
    """Key of a rollback point in `points`."""
    return place.parent + (len(place.tokens) // 4).to_bytes(4, "big") + place.id


def stream_key(stream: str) -> bytes:
    """Key of a stream in the store: names may be longer than keys."""
    return hashlib.blake2b(stream.encode(), digest_size=16).digest()


def disk_bytes(value_bytes: int) -> int:
    """Bytes of the store's file that a value of this size takes."""
    if value_bytes <= OVERFLOW_BYTES:
        return value_bytes + 64  # key, node header and its share of a half-full page
    return -(-(value_bytes + LMDB_PAGE_HEADER) // PAGE) * PAGE


def _child_prefix(parent: bytes, tokens: bytes) -> bytes:
    return parent + tokens[:CHILD_TOKENS_BYTES]


OPENED = ("sequences", "bases", "children")  # small sealed values that a scan opens


class View:
    """One snapshot of the store. Everything it hands out is valid inside its with-block only."""

    def __init__(self, txn: Any, databases: dict[bytes, Any], keys: Keyring) -> None:
        self._txn = txn
        self._db = databases
        self.keys = keys
        self.locked = 0  # values that were passed over because their key isn't there
        self._children = databases[b"children"]
        self._nodes = databases[b"nodes"]

    @property
    def snapshot_number(self) -> int:
        """Grows with every commit."""
        return self._txn.id()

    def has_block(self, block: BlockId) -> bool:
        """Whether a block is stored. Brings its pages in: py-lmdb touches every page of a value that it looks up."""
        return self._txn.get(block, db=self._db[b"blocks"]) is not None

    def node(self, block: BlockId) -> Node | None:
        """What is known of a stored block, without touching its pages; None if it isn't stored.

        A find of 219 cached blocks took 0.7 ms through a small database and 2.1 to 2.6 ms through `has_block`.
        """
        raw = self._txn.get(block, None, self._nodes)
        return unpack_node(raw) if raw is not None else None

    def block(self, block: BlockId) -> Value:
        """A whole block, verified. Raises BadBlock."""
        where = f"block {block.hex()}"
        raw = self._txn.get(block, db=self._db[b"blocks"])
        if raw is None:
            raise BadBlock("a block is gone", where=where)
        value = unpack_value(self.keys.open("blocks", block, raw), KIND_BLOCK, where)
        if block_id(value.parent, value.tokens) != block:
            raise BadBlock("a block's tokens are not those of its id", where=where)
        return value

    def leading(self, block: BlockId) -> Value | None:
        """A block's rows without a window, verified; `last` are the groups that are left out. The others aren't looked at.

        None if they can't be had alone: then `block` gives all, or says what is wrong
        """
        node, raw = self.node(block), self._txn.get(block, db=self._db[b"blocks"])
        if node is None or node.leading is None or raw is None or len(raw) != node.value_bytes or is_sealed(raw):
            return None
        _, _, _, _, count, start, parent, root, _, _ = VALUE.unpack_from(raw)
        offset, tokens = frame_offset(count), bytes(raw[VALUE.size : VALUE.size + 4 * count])
        rows = np.frombuffer(raw, np.uint8)[offset : offset + node.leading.byte_count]
        if block_id(BlockId(parent), tokens) != block or xxh3_64_intdigest(rows.data) != node.leading.checksum:
            return None
        return Value(count, start, BlockId(parent), RootId(root), tokens, rows, ALL_GROUPS & ~node.leading.groups)

    def tail(self, key: bytes) -> Value:
        """A piece of an unfinished block, verified. Raises BadBlock."""
        where = f"tail of sequence {key[16:32].hex()} at {int.from_bytes(key[32:], 'big')}"
        raw = self._txn.get(key, db=self._db[b"tails"])
        if raw is None:
            raise BadBlock("a tail piece is gone", where=where)
        value = unpack_value(self.keys.open("tails", key, raw), KIND_TAIL, where)
        if value.parent != key[:16] or value.token_start != int.from_bytes(key[32:], "big"):
            raise BadBlock("a tail piece is not the one that was asked for", where=where)
        return value

    def best_child(self, parent: BlockId, tokens: bytes) -> tuple[BlockId, int] | None:
        """The stored block after `parent` that shares most first tokens with `tokens`, and how many; None if there is none.

        Keys are ordered by tokens, so the best is a neighbour of where `tokens` itself would stand; sealed ones are all looked at.
        """
        best: tuple[BlockId, int] | None = None
        if self.keys:
            for block in self.children(parent, limit=1 << 30):
                shared = common_tokens(self.child_tokens(parent, block) or b"", tokens)
                if shared and (best is None or shared > best[1]):
                    best = block, shared
            return best
        with self._txn.cursor(db=self._db[b"children"]) as cursor:
            after = cursor.set_range(_child_prefix(parent, tokens))
            neighbours = [(bytes(cursor.key()), bytes(cursor.value()))] if after else []
            if cursor.prev() if after else cursor.last():
                neighbours.append((bytes(cursor.key()), bytes(cursor.value())))
        for key, child_tokens in neighbours:
            shared = common_tokens(child_tokens, tokens) if key[:16] == parent else 0
            if shared and (best is None or shared > best[1]):
                best = BlockId(key[-16:]), shared
        return best

    def children(self, parent: BlockId, limit: int = 2) -> list[BlockId]:
        """Ids of blocks after `parent`, at most `limit`."""
        found: list[BlockId] = []
        with self._txn.cursor(db=self._db[b"children"]) as cursor:
            more = cursor.set_range(parent)
            while more and len(found) < limit and (key := bytes(cursor.key()))[:16] == parent:
                found.append(BlockId(key[-16:]))
                more = cursor.next()
        return found

    def tails(self, parent: BlockId, sequence: SequenceId = SequenceId(b""), limit: int = 1 << 30) -> list[TailPiece]:
        """Pieces of unfinished blocks after `parent` (of one sequence, or of all), ordered by sequence and position."""
        prefix, found = parent + sequence, list[TailPiece]()
        with self._txn.cursor(db=self._db[b"tails"]) as cursor:
            more = cursor.set_range(prefix)
            while more and len(found) < limit and (key := bytes(cursor.key())).startswith(prefix):
                start = int.from_bytes(key[32:], "big")
                found.append(TailPiece(key, SequenceId(key[16:32]), start, self._tail_tokens(key, cursor.value())))
                more = cursor.next()
        return found

    def _tail_tokens(self, key: bytes, raw: Any) -> bytes:
        try:
            return value_tokens(self.keys.open("tails", key, raw))
        except BadBlock:
            return b""

    def progress(self, sequence: SequenceId) -> Progress | None:
        """How far a sequence is stored; None also if its record is sealed and can't be opened."""
        raw = self._txn.get(sequence, db=self._db[b"sequences"])
        if raw is None:
            return None
        try:
            return _decode_progress(self.keys.open("sequences", sequence, raw))
        except BadBlock:
            self.locked += 1
            return None

    def decode_progress(self, raw: Any) -> Progress:
        """A value of the `sequences` database."""
        return _decode_progress(raw)

    def load_track(self, sequence: SequenceId) -> Track | None:
        """The track of a sequence as far as it is stored; parts of its unfinished block have their tail's key as source."""
        p = self.progress(sequence)
        info = self.root(p.root) if p is not None else None
        if p is None or info is None:
            return None
        layout = info.shape
        at, parent, root = p.block_start, BlockId(p.parent), RootId(p.root)
        track = Track(
            root, layout, info.block_tokens, p.namespace, p.session, p.stream, p.epoch, parent, at, at, p.closed
        )
        for piece in self.tails(parent, sequence):
            count = len(piece.tokens) // 4
            if piece.token_start != track.position or not count or piece.token_start + count > p.position:
                break  # a piece is missing: what follows it can't be used
            track.parts.append(Part(piece.key, count, 0, count))
            track.tokens += piece.tokens
            track.position += count
        return track

    def child_tokens(self, parent: BlockId, block: BlockId) -> bytes | None:
        """Packed token ids of a block after `parent`, without touching its pages."""
        with self._txn.cursor(db=self._children) as cursor:
            more = cursor.set_range(parent)
            while more and (key := bytes(cursor.key()))[:16] == parent:
                if key[-16:] == block:
                    try:
                        return bytes(self.keys.open("children", key, cursor.value()))
                    except BadBlock:
                        return None
                more = cursor.next()
        return None

    def chain(self, root: RootId, namespace: str, last: BlockId) -> tuple[list[BlockId], bytes] | None:
        """Ids of the whole blocks up to `last`, first to last, and their packed tokens; None if a block on the way is gone."""
        top, blocks, tokens, block = chain_root(root, namespace), list[BlockId](), list[bytes](), last
        while block != top:
            node = self.node(block)
            piece = self.child_tokens(node.parent, block) if node is not None else None
            if node is None or piece is None:
                return None
            blocks.append(block)
            tokens.append(piece)
            block = node.parent
        return blocks[::-1], b"".join(reversed(tokens))

    def base(self, key: SessionKey) -> Base | None:
        """What is kept of a compacted session. Raises BadBlock."""
        raw = self._txn.get(key, db=self._db[b"bases"])
        return unpack_base(self.keys.open("bases", key, raw), f"base {key.hex()}") if raw is not None else None

    def is_pinned(self, key: SessionKey) -> bool:
        """Whether a session is never evicted."""
        return self._txn.get(key, db=self._db[b"pins"]) is not None

    def tenants(self) -> list[tuple[bytes, Tenant]]:
        """All (chain root, tenant)."""
        return [(key, _decode_tenant(raw)) for key, raw in self.scan("tenants")]

    def pins(self) -> dict[SessionKey, Pin]:
        """All pinned sessions."""
        return {SessionKey(key): _decode_pin(raw) for key, raw in self.scan("pins")}

    def root(self, root: bytes) -> RootInfo | None:
        """Layout of a state fingerprint's frames."""
        raw = self._txn.get(root, db=self._db[b"roots"])
        return _decode_root(raw) if raw is not None else None

    def tenant(self, chain: bytes) -> Tenant | None:
        """Whose blocks the chain's root `chain` stands for."""
        raw = self._txn.get(chain, db=self._db[b"tenants"])
        return _decode_tenant(raw) if raw is not None else None

    def points(self, parent: BlockId) -> list[tuple[bytes, PointEntry]]:
        """(key, entry) of the stored rollback points in the block after `parent`, by position; no state is touched."""
        found: list[tuple[bytes, PointEntry]] = []
        with self._txn.cursor(db=self._db[b"points"]) as cursor:
            more = cursor.set_range(parent)
            while more and (key := bytes(cursor.key()))[:16] == parent:
                found.append((key, _decode_point(cursor.value())))
                more = cursor.next()
        return found

    def decode_point(self, raw: Any) -> PointEntry:
        """A value of the `points` database."""
        return _decode_point(raw)

    def has_point(self, place: PointPlace) -> bool:
        """Whether a rollback point is stored, without touching its state."""
        return self._txn.get(point_key(place), db=self._db[b"points"]) is not None

    def point(self, point: PointId) -> Value:
        """A rollback point, verified; `frame` is its state. Raises BadBlock."""
        where = f"rollback point {point.hex()}"
        raw = self._txn.get(point, db=self._db[b"states"])
        if raw is None:
            raise BadBlock("a rollback point is gone", where=where)
        value = unpack_value(self.keys.open("states", point, raw), KIND_POINT, where)
        if point_id(value.parent, value.tokens) != point:
            raise BadBlock("a rollback point's tokens are not those of its id", where=where)
        return value

    def owner(self, stream_key: bytes) -> StreamOwner | None:
        """Newest epoch of a stream."""
        raw = self._txn.get(stream_key, db=self._db[b"streams"])
        return _decode_owner(raw) if raw is not None else None

    def scan(self, database: str, after: bytes = b"", limit: int = 1 << 30) -> Iterator[tuple[bytes, Any]]:
        """(key, value) pairs of a database, from the first key greater than `after`.

        Sealed values of `sequences`, `bases` and `children` are opened; those that can't be are passed over and counted in `locked`.
        """
        for key, raw in self.scan_raw(database, after, limit):
            if database in OPENED:
                try:
                    raw = self.keys.open(database, key, raw)
                except BadBlock:
                    self.locked += 1
                    continue
            yield key, raw

    def scan_raw(self, database: str, after: bytes = b"", limit: int = 1 << 30) -> Iterator[tuple[bytes, Any]]:
        """As `scan`, with every value as it is stored."""
        with self._txn.cursor(db=self._db[database.encode()]) as cursor:
            more = cursor.set_range(after + b"\0") if after else cursor.first()
            while more and limit:
                yield bytes(cursor.key()), cursor.value()
                more, limit = cursor.next(), limit - 1

    def raw(self, database: str, key: bytes) -> Any:
        """A stored value as it lies there, not verified; None if there is none."""
        return self._txn.get(key, db=self._db[database.encode()])

    def count(self, database: str) -> int:
        """Entries of a database."""
        return self._txn.stat(self._db[database.encode()])["entries"]


class EmptyView(View):
    """The store before the keeper has made it: nothing is found."""

    snapshot_number = -1

    def __init__(self) -> None:
        self.keys = Keyring()
        self.locked = 0

    def scan_raw(self, database: str, after: bytes = b"", limit: int = 0) -> Iterator[tuple[bytes, Any]]:
        return iter(())

    def has_block(self, block: BlockId) -> bool:
        return False

    def node(self, block: BlockId) -> Node | None:
        return None

    def tenant(self, chain: bytes) -> Tenant | None:
        return None

    def child_tokens(self, parent: BlockId, block: BlockId) -> bytes | None:
        return None

    def base(self, key: SessionKey) -> Base | None:
        return None

    def is_pinned(self, key: SessionKey) -> bool:
        return False

    def points(self, parent: BlockId) -> list[tuple[bytes, PointEntry]]:
        return []

    def has_point(self, place: PointPlace) -> bool:
        return False

    def point(self, point: PointId) -> Value:
        raise BadBlock("a rollback point is gone", where=f"rollback point {point.hex()}", cause="there is no store")

    def block(self, block: BlockId) -> Value:
        raise BadBlock("a block is gone", where=f"block {block.hex()}", cause="there is no store")

    def leading(self, block: BlockId) -> Value | None:
        return None

    def tail(self, key: bytes) -> Value:
        raise BadBlock("a tail piece is gone", cause="there is no store")

    def best_child(self, parent: BlockId, tokens: bytes) -> tuple[BlockId, int] | None:
        return None

    def children(self, parent: BlockId, limit: int = 2) -> list[BlockId]:
        return []

    def tails(self, parent: BlockId, sequence: SequenceId = SequenceId(b""), limit: int = 0) -> list[TailPiece]:
        return []

    def progress(self, sequence: SequenceId) -> Progress | None:
        return None

    def root(self, root: bytes) -> RootInfo | None:
        return None

    def owner(self, stream_key: bytes) -> StreamOwner | None:
        return None

    def scan(self, database: str, after: bytes = b"", limit: int = 0) -> Iterator[tuple[bytes, Any]]:
        return iter(())

    def raw(self, database: str, key: bytes) -> Any:
        return None

    def count(self, database: str) -> int:
        return 0


# ---------------------------------------------------------------- write


class Group(View):
    """One group commit in the making. Views got from it are valid until its next put or delete."""

    def __init__(self, txn: Any, databases: dict[bytes, Any], scratch: Scratch, keys: Keyring) -> None:
        super().__init__(txn, databases, keys)
        self._scratch = scratch
        self.put_bytes = 0
        self.changes: dict[tuple[bytes, str], list[int]] = {}

    def _count(self, tenant: bytes, kind: str, count: int, size: int) -> None:
        """Note what this commit changes in the tenant's use of the disk."""
        entry = self.changes.setdefault((bytes(tenant), kind), [0, 0])
        entry[0] += count
        entry[1] += size

    def frame_buffer(self, token_count: int, layout: Layout) -> np.ndarray:
        """Memory to build the frame of the next `put_block` or `put_tail` in, without another copy."""
        return self._scratch.value(token_count, layout)[frame_offset(token_count) :]

    def good_block(self, block: BlockId) -> bool:
        """Whether a block is stored, intact and with all its groups: else it is to be put again."""
        node = self.node(block)
        if node is None or node.groups != ALL_GROUPS:
            return False
        try:
            self.block(block)
        except BadBlock as error:
            log.warning("drain.bad_block", error=str(error))
            return False
        return True

    def put_block(self, track: Track, block: Sealed) -> None:
        """Store a block whose frame was built in `frame_buffer`."""
        size = self._put(b"blocks", block.id, KIND_BLOCK, track, block.parent, block.token_start, block.tokens)
        self._put_child(track.namespace, block)
        tenant = chain_root(track.root, track.namespace)
        self._count_block(block.id, tenant, size)
        node = NODE.pack(block.parent, tenant, block.token_start + len(block.tokens) // 4, 0, size)
        self._txn.put(block.id, node + self._leading(track, len(block.tokens) // 4), db=self._db[b"nodes"])

    def _leading(self, track: Track, count: int) -> bytes:
        """What a node says of the rows without a window, in the value that was just built; nothing where values are sealed."""
        groups = track.layout.leading_groups
        if not groups or self.keys.has(track.namespace):
            return b""
        size = track.layout.frame_bytes(count, groups)
        rows = self._scratch.value(count, track.layout)[frame_offset(count) :][:size]
        return LEADING.pack(size, xxh3_64_intdigest(rows.data), groups)

    def _count_block(self, block: BlockId, tenant: bytes, size: int) -> None:
        old = self.node(block)
        if old is not None:  # it was damaged, or lacked groups
            self._count(old.tenant, "blocks", -1, -disk_bytes(old.value_bytes))
        self._count(tenant, "blocks", 1, disk_bytes(size))

    def put_frame(self, track: Track, block: Sealed, frame: np.ndarray, groups: int = ALL_GROUPS) -> None:
        """Store a block with a frame (uint8) that has the groups of the mask: one that compaction has thinned out, and is imported."""
        count, absent = len(block.tokens) // 4, ALL_GROUPS & ~groups
        value = self._scratch.room(frame_offset(count) + frame.size)
        value[frame_offset(count) :] = frame
        pack_value(
            value, KIND_BLOCK, track.root, track.block_tokens, block.parent, block.token_start, block.tokens, absent
        )
        size = self._put_sealed(track.namespace, "blocks", block.id, value.data)
        self._put_child(track.namespace, block)
        tenant, end = chain_root(track.root, track.namespace), block.token_start + count
        self._count_block(block.id, tenant, size)
        node = NODE.pack(block.parent, tenant, end, absent, size)
        self._txn.put(block.id, node, db=self._db[b"nodes"])

    def put_point(self, track: Track, place: PointPlace, kind: int, state: np.ndarray) -> None:
        """Store a rollback point; `state` is its uint8 bytes."""
        start = frame_offset(len(place.tokens) // 4)
        value = self._scratch.room(start + state.size)
        value[start:] = state
        pack_value(
            value, KIND_POINT, track.root, track.block_tokens, place.parent, place.token_start, place.tokens, kind
        )
        size = self._put_sealed(track.namespace, "states", place.id, value.data)
        position = place.token_start + len(place.tokens) // 4
        entry = PointEntry(kind, position, size, chain_root(track.root, track.namespace))
        self._txn.put(point_key(place), _encode(entry), db=self._db[b"points"])
        self._count(entry.tenant, "points", 1, disk_bytes(size))

    def put_tail(self, track: Track, sequence: SequenceId, token_start: int, tokens: bytes) -> bytes:
        """Store a piece of the unfinished block, built in `frame_buffer`, and return its key."""
        key = track.parent + sequence + token_start.to_bytes(4, "big")
        size = self._put(b"tails", key, KIND_TAIL, track, track.parent, token_start, tokens)
        self._count(chain_root(track.root, track.namespace), "tails", 1, disk_bytes(size))
        return key

    def _put(
        self, database: bytes, key: bytes, kind: int, track: Track, parent: bytes, token_start: int, tokens: bytes
    ) -> int:
        value = self._scratch.value(len(tokens) // 4, track.layout)
        pack_value(value, kind, track.root, track.block_tokens, parent, token_start, tokens)
        _reach("drain.put.before")
        size = self._put_sealed(track.namespace, database.decode(), key, value.data)
        _reach("drain.put.after")
        return size

    def _put_sealed(self, namespace: str, database: str, key: bytes, value: Any) -> int:
        """Put a value, encrypted if the namespace has a key; returns its size as stored."""
        stored = self.keys.seal(namespace, database, key, value)
        self._txn.put(key, stored, db=self._db[database.encode()])
        self.put_bytes += len(stored)
        return len(stored)

    def _put_child(self, namespace: str, block: Sealed) -> None:
        """A block's place among its parent's children, ordered by tokens; where those are to be hidden, by id."""
        if self.keys.has(namespace):
            self._put_sealed(namespace, "children", block.parent + block.id, block.tokens)
        else:
            key = _child_prefix(block.parent, block.tokens) + block.id
            self._txn.put(key, block.tokens, db=self._db[b"children"])

    def drop_groups(self, block: BlockId, groups: int) -> int:
        """Store a block again without those groups of its frame that aren't in the mask. Returns the bytes that this saves.

        Raises BadBlock
        """
        node, value = self.node(block), self.block(block)
        info = self.root(value.root)
        assert node is not None
        if info is None:
            raise BadBlock("a block's root is gone", where=f"block {block.hex()}")
        count, shape, keep = value.token_count, info.shape, value.groups & groups
        start, was = frame_offset(value.token_count), node.value_bytes
        out = self._scratch.room(start + shape.frame_bytes(count, keep))
        at = start
        for index, view in enumerate(shape.views(value.frame, count, value.groups)):
            if keep >> index & 1 and view.size:
                out[at : at + view.size] = view.reshape(-1)
                at += view.size
        absent = ALL_GROUPS & ~keep
        block_tokens = info.block_tokens
        pack_value(out, KIND_BLOCK, value.root, block_tokens, value.parent, value.token_start, value.tokens, absent)
        tenant = self.tenant(node.tenant)
        size = self._put_sealed(tenant.namespace if tenant is not None else "", "blocks", block, out.data)
        packed = NODE.pack(node.parent, node.tenant, node.token_end, absent, size)
        self._txn.put(block, packed, db=self._db[b"nodes"])
        self._count(node.tenant, "blocks", 0, disk_bytes(size) - disk_bytes(was))
        return was - size

    def put_base(self, key: SessionKey, base: Base) -> None:
        """Store a compacted session."""
        self.delete_base(key)
        size = self._put_sealed(base.namespace, "bases", key, pack_base(base))
        self._count(chain_root(RootId(base.root), base.namespace), "bases", 1, disk_bytes(size))

    def delete_base(self, key: SessionKey) -> None:
        """Remove a compacted session; what it named stays until it is collected."""
        raw = self._txn.get(key, db=self._db[b"bases"])
        if raw is None:
            return
        size = len(raw)
        self._count(base_tenant(self, key), "bases", -1, -disk_bytes(size))
        self._txn.delete(key, db=self._db[b"bases"])

    def put_pin(self, key: SessionKey, pin: Pin) -> None:
        """Never evict a session."""
        self._txn.put(key, _encode(pin), db=self._db[b"pins"])

    def delete_pin(self, key: SessionKey) -> None:
        """Let a session be evicted again."""
        self._txn.delete(key, db=self._db[b"pins"])

    def delete_owner(self, stream_key: bytes) -> None:
        """Remove the newest epoch of a stream."""
        self._txn.delete(stream_key, db=self._db[b"streams"])

    def put_progress(
        self, sequence: SequenceId, track: Track, position: int | None = None, used_ms: int | None = None
    ) -> None:
        """Store how far a sequence is.

        position  what is stored, its unfinished block included; None: all that the track has
        used_ms   when it was used last; None: now
        """
        t = track
        at = t.position if position is None else position
        used = int(1000 * time.time()) if used_ms is None else used_ms
        progress = Progress(
            t.root, t.namespace, t.session, t.stream, t.epoch, t.parent, t.block_start, at, t.closed, used
        )
        self._put_sealed(progress.namespace, "sequences", sequence, _encode(progress))

    def replace_progress(self, sequence: SequenceId, progress: Progress) -> None:
        """Say anew how far a sequence is."""
        self._put_sealed(progress.namespace, "sequences", sequence, _encode(progress))

    def put_root(self, root: bytes, info: RootInfo) -> None:
        """Store the layout of a state fingerprint."""
        if self.root(root) is None:
            self._txn.put(root, _encode(info), db=self._db[b"roots"])

    def put_tenant(self, root: RootId, namespace: str) -> None:
        """Note whose blocks a chain's root stands for."""
        chain = chain_root(root, namespace)
        known, sealed = self.tenant(chain), self.keys.has(namespace)
        if known is None or sealed > known.sealed:
            self._txn.put(chain, _encode(Tenant(root, namespace, sealed)), db=self._db[b"tenants"])

    def put_owner(self, stream_key: bytes, owner: StreamOwner) -> None:
        """Store the newest epoch of a stream."""
        self._txn.put(stream_key, _encode(owner), db=self._db[b"streams"])

    def put_child(self, parent: BlockId, tokens: bytes, block: BlockId) -> None:
        """Note a stored block's place among its parent's children."""
        node = self.node(block)
        tenant = self.tenant(node.tenant) if node is not None else None
        self._put_child(tenant.namespace if tenant is not None else "", Sealed(block, parent, 0, tokens, []))

    def delete_raw(self, database: str, key: bytes) -> None:
        """Remove a small record that nothing is counted of."""
        self._txn.delete(key, db=self._db[database.encode()])

    def delete_block(self, parent: BlockId, tokens: bytes, block: BlockId) -> None:
        """Remove a block and its place among its parent's children."""
        node = self.node(block)
        if node is not None:
            self._count(node.tenant, "blocks", -1, -disk_bytes(node.value_bytes))
        self._txn.delete(block, db=self._db[b"blocks"])
        self._txn.delete(block, db=self._db[b"nodes"])
        self._txn.delete(_child_prefix(parent, tokens) + block, db=self._db[b"children"])
        self._txn.delete(parent + block, db=self._db[b"children"])

    def delete_point(self, key: bytes) -> None:
        """Remove a rollback point, by its key in `points`."""
        raw = self._txn.get(key, db=self._db[b"points"])
        if raw is not None:
            entry = _decode_point(raw)
            self._count(entry.tenant, "points", -1, -disk_bytes(entry.value_bytes))
        self._txn.delete(key[-16:], db=self._db[b"states"])
        self._txn.delete(key, db=self._db[b"points"])

    def delete_tail(self, key: bytes) -> None:
        """Remove a piece of an unfinished block."""
        raw = self._txn.get(key, db=self._db[b"tails"])
        if raw is not None:
            self._count(tail_tenant(self, key), "tails", -1, -disk_bytes(len(raw)))
        self._txn.delete(key, db=self._db[b"tails"])

    def delete_sequence(self, sequence: SequenceId) -> None:
        """Remove what is known of a sequence; its blocks stay."""
        self._txn.delete(sequence, db=self._db[b"sequences"])


class Usage(dict[tuple[bytes, str], list[int]]):
    """[count, bytes on disk] by (tenant's chain root, kind): blocks, tails, points, bases."""

    def add(self, changes: dict[tuple[bytes, str], list[int]]) -> None:
        """Take in what a commit has changed."""
        for key, (count, size) in changes.items():
            entry = self.setdefault(key, [0, 0])
            entry[0] += count
            entry[1] += size

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.values())

    def tenant_bytes(self, chains: set[bytes]) -> int:
        """Bytes of all kinds under these chain roots."""
        return sum(size for (chain, _), (_, size) in self.items() if chain in chains)


def measure_usage(view: View) -> Usage:
    """Count all records of a snapshot, without touching a frame."""
    usage = Usage()

    def count(tenant: bytes, kind: str, size: int) -> None:
        usage.add({(bytes(tenant), kind): [1, disk_bytes(size)]})

    for _, raw in view.scan("nodes"):
        node = unpack_node(raw)
        count(node.tenant, "blocks", node.value_bytes)
    for _, raw in view.scan("points"):
        entry = view.decode_point(raw)
        count(entry.tenant, "points", entry.value_bytes)
    for key, raw in view.scan("tails"):
        count(tail_tenant(view, key), "tails", len(raw))
    for key, raw in view.scan_raw("bases"):
        count(base_tenant(view, SessionKey(key)), "bases", len(raw))
    return usage


def base_tenant(view: View, key: SessionKey) -> bytes:
    """Chain root of whose base `key` is; empty if the base can't be read."""
    try:
        base = view.base(key)
    except BadBlock:
        return b""
    return chain_root(RootId(base.root), base.namespace) if base is not None else b""


def tail_tenant(view: View, key: bytes) -> bytes:
    """Chain root of whose tail piece `key` is."""
    node = view.node(BlockId(key[:16]))
    return node.tenant if node is not None else key[:16]


class Scratch:
    """One reusable buffer in which values are built; LMDB copies it into its pages."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def value(self, token_count: int, layout: Layout) -> np.ndarray:
        """Room for a value of `token_count` tokens; the same memory every time."""
        return self.room(frame_offset(token_count) + layout.frame_bytes(token_count))

    def room(self, size: int) -> np.ndarray:
        """The first `size` bytes of the buffer; the same memory every time."""
        if self._buffer.size < size:
            self._buffer = np.empty(size, np.uint8)
        return self._buffer[:size]


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """LMDB's errors become StoreFailed, here and nowhere else."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise StoreFailed("the store's map is full", where=str(path), cause="store_map_bytes is used up") from error
    except lmdb.Error as error:
        raise StoreFailed("the store can't be used", where=str(path), cause=str(error)) from error


def _extended(env: Any, path: Path) -> None:
    try:
        whole_file.extend(env, path)
    except OSError as error:
        raise StoreFailed("the store's file can't be extended", where=str(path), cause=str(error)) from error


def _reach(failpoint: str) -> None:
    """A failpoint whose error looks like one of LMDB's."""
    try:
        failpoints.reach(failpoint)
    except OSError as error:
        raise lmdb.DiskError(str(error)) from error


def _check_disk(path: Path) -> None:
    try:
        free = os.statvfs(path)
    except OSError as error:
        raise StoreFailed("the store's directory can't be reached", where=str(path), cause=str(error)) from error
    if free.f_bavail * free.f_frsize < FREE_DISK_RESERVE_BYTES:
        cause = f"less than {FREE_DISK_RESERVE_BYTES >> 20} MB are free"
        raise StoreFailed("the disk is full", where=str(path), cause=cause)


class Store:
    """The store for its only writer, the keeper. Opened once a process: LMDB forbids a second time.

    durability  `process`: no fsync before `sync`; else every commit reaches the disk before its root does, so a power
                loss can't damage the file, and `sync` makes the newest root reach it too.
    """

    def __init__(
        self,
        store_dir: str | os.PathLike[str],
        *,
        map_bytes: int,
        durability: Durability = "interval",
        keys: Keyring | None = None,
    ) -> None:
        self.path = Path(store_dir)
        self.keys = Keyring.from_environment() if keys is None else keys
        self.durability = durability
        self._unsafe = self.path / "unsynced"
        safe = durability != "process"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _set_aside_damaged(self.path, self._unsafe)
            if not safe:
                self._unsafe.write_text(_boot_id())
                _sync_file(self._unsafe)  # before the first write that isn't synced
            shutil.rmtree(self.path / "shrink", ignore_errors=True)  # of a keeper that was killed in the middle of it
            _make_whole(self.path)
        except OSError as error:
            raise StoreFailed("the store can't be made", where=str(self.path), cause=str(error)) from error
        self._map_bytes = map_bytes
        self._scratch = Scratch()
        self._usage: Usage | None = None
        self.touched: set[tuple[bytes, bytes]] | None = None  # while the file is being copied: what commits change
        self._open_env()

    def _open_env(self) -> None:
        safe = self.durability != "process"
        with _translated(self.path):
            whole_file.make_whole(self.path, self._map_bytes)
            self._env = lmdb.open(
                str(self.path), map_size=self._map_bytes, max_dbs=len(DATABASES), mode=0o600, metasync=False, sync=safe
            )
            if safe:
                self._env.sync(True)
                self._unsafe.unlink(missing_ok=True)
            self._env.reader_check()
            self._db = {name: self._env.open_db(name) for name in DATABASES}
            self._check_version()
            self._know_tenants()
        self._inode = os.stat(self.path / "data.mdb").st_ino

    def _know_tenants(self) -> None:
        """Have the keys of all tenants at hand, and say which are missing."""
        with self._env.begin(buffers=True) as txn:
            view = View(txn, self._db, self.keys)
            for _, tenant in view.tenants():
                self.keys.know(tenant.namespace)
                if tenant.sealed and not self.keys.has(tenant.namespace):
                    log.error("store.key_missing", namespace=tenant.namespace, hint=Locked.hint)

    def take_touched(self) -> set[tuple[bytes, bytes]]:
        """(database, key) of everything that was changed since the last call, while the file is being copied."""
        assert self.touched is not None, "nothing is being copied"
        touched, self.touched = self.touched, set()
        return touched

    def switch(self, target: Path) -> None:
        """Let the file in `target`, closed and synced, take the place of this one, and go on with it. Raises StoreFailed.

        The old lock file goes first: a lock file says which root of its data file is the newest, so that it must never be
        used with another. No reader opens the store in between.
        """
        try:
            self._env.close()
            with opening(self.path, fcntl.LOCK_EX):
                failpoints.reach("compact.shrink_switch.before")
                (self.path / "lock.mdb").unlink(missing_ok=True)
                os.rename(target / "data.mdb", self.path / "data.mdb")
                failpoints.reach("compact.shrink_switch.after")
                _sync_file(self.path)
        except OSError as error:
            raise StoreFailed("the store's file can't be switched", where=str(self.path), cause=str(error)) from error
        finally:
            self._open_env()

    def usage(self) -> Usage:
        """Counts and bytes on disk, by tenant (chain root) and kind. The first call looks at every small record once."""
        if self._usage is None:
            with self.snapshot() as view:
                self._usage = measure_usage(view)
        return self._usage

    def map_bytes(self) -> int:
        """Size of the map: what the file can grow to."""
        return self._env.info()["map_size"]

    def snapshots(self) -> dict[tuple[int, int], int]:
        """Open snapshots of all processes: how many commits each is behind, by (process id, snapshot number)."""
        newest = self._env.info()["last_txnid"]
        found = {}
        for line in self._env.readers().splitlines()[1:]:
            fields = line.split()
            if len(fields) == 3 and fields[2].isdigit():
                found[int(fields[0]), int(fields[2])] = newest - int(fields[2])
        return found

    def oldest_snapshot_lag(self) -> int:
        """How many commits the oldest open snapshot of any process is behind: pages freed since can't be used again."""
        return max(self.snapshots().values(), default=0)

    def _check_version(self) -> None:
        with self._env.begin(write=True) as txn:
            found = txn.get(b"version", db=self._db[b"meta"])
            if found is None:
                txn.put(b"version", str(STORE_VERSION).encode(), db=self._db[b"meta"])
            elif int(found) == 1:
                _upgrade(txn, self._db)
                log.info("store.upgraded", path=str(self.path), was=1, now=STORE_VERSION)
            elif int(found) != STORE_VERSION:
                raise OtherFormat(f"the store has version {int(found)}, this is {STORE_VERSION}", where=str(self.path))

    @contextmanager
    def group(self, *, freeing: bool = False) -> Iterator[Group]:
        """One write transaction: committed when the block ends, dropped whole if it raises. Raises StoreFailed.

        freeing  it only makes room, so that it is let through when the disk is full
        """
        if not freeing:
            self._check_room()
        with _translated(self.path):
            with self._env.begin(write=True, buffers=True) as txn:
                noting = _Noting(txn, self._db) if self.touched is not None else None
                group = Group(noting or txn, self._db, self._scratch, self.keys)
                yield group
                _reach("drain.commit.before")
            if noting is not None and self.touched is not None:
                self.touched |= noting.touched
            if self._usage is not None:
                self._usage.add(group.changes)
            _reach("drain.commit.after")
            _extended(self._env, self.path)

    def _check_room(self) -> None:
        """A full disk doesn't matter while the file has free pages of its own."""
        try:
            _check_disk(self.path)
        except StoreFailed:
            if self.used_bytes() - PAGES_PER_BYTE * self.usage().total_bytes < FREE_PAGES_BYTES:
                raise

    @contextmanager
    def snapshot(self) -> Iterator[View]:
        """A consistent view of what is committed. Raises StoreFailed."""
        with _translated(self.path):
            with self._env.begin(buffers=True) as txn:
                yield View(txn, self._db, self.keys)

    def sync(self) -> None:
        """Make everything committed survive a power loss. Raises StoreFailed."""
        with _translated(self.path):
            _reach("drain.sync.before")
            self._env.sync(True)
            _reach("drain.sync.after")

    def drop_dead_readers(self) -> int:
        """Free the snapshots of killed processes, which would keep old pages from being used again."""
        with _translated(self.path):
            return self._env.reader_check()

    def check_file(self) -> None:
        """Raise StoreFailed if the file that is open here is no longer the one that has the name."""
        try:
            found = os.stat(self.path / "data.mdb").st_ino
        except OSError:
            found = 0
        if found != self._inode:
            cause = "deleted or replaced while it was open"
            raise StoreFailed("the store's file is gone", where=str(self.path), cause=cause)

    def used_bytes(self) -> int:
        """High-water mark of the file."""
        return (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]

    def close(self) -> None:
        """Sync and close; an unsynced store is then whole again."""
        try:
            self.sync()
            self._unsafe.unlink(missing_ok=True)
        finally:
            self._env.close()


class _Noting:
    """A write transaction that notes which keys are changed."""

    def __init__(self, txn: Any, databases: dict[bytes, Any]) -> None:
        self._txn = txn
        self._names = {id(handle): name for name, handle in databases.items()}
        self.touched: set[tuple[bytes, bytes]] = set()

    def put(self, key: bytes, value: Any, *, db: Any) -> bool:
        self.touched.add((self._names[id(db)], bytes(key)))
        return self._txn.put(key, value, db=db)

    def delete(self, key: bytes, *, db: Any) -> bool:
        self.touched.add((self._names[id(db)], bytes(key)))
        return self._txn.delete(key, db=db)

    def cursor(self, *, db: Any) -> Any:
        return self._txn.cursor(db=db)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)


@contextmanager
def opening(path: Path, mode: int) -> Iterator[None]:
    """Hold the store's directory while its files are opened (LOCK_SH) or switched (LOCK_EX)."""
    directory = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, mode)
        yield
    finally:
        os.close(directory)


class StoreReader:
    """The store for everyone else: read-only, opened at the first snapshot, and again when the file was replaced."""

    def __init__(
        self, store_dir: str | os.PathLike[str], *, map_bytes: int = 1 << 40, keys: Keyring | None = None
    ) -> None:
        self.path = Path(store_dir)
        self.keys = Keyring.from_environment() if keys is None else keys
        self._map_bytes = map_bytes
        self._env: Any = None
        self._db: dict[bytes, Any] = {}
        self._inode = 0

    @contextmanager
    def snapshot(self) -> Iterator[View]:
        """A consistent view of what is committed; an empty one if there is no store yet. Raises StoreFailed."""
        if not self._open():
            yield EmptyView()
            return
        with _translated(self.path):
            with self._env.begin(buffers=True) as txn:
                yield View(txn, self._db, self.keys)

    def _open(self) -> bool:
        try:
            if self._env is not None and os.stat(self.path / "data.mdb").st_ino == self._inode:
                return True
            with opening(self.path, fcntl.LOCK_SH):
                return self._open_again()
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _open_again(self) -> bool:
        self.close()
        inode = os.stat(self.path / "data.mdb").st_ino
        with _translated(self.path):
            env = lmdb.open(
                str(self.path), map_size=self._map_bytes, max_dbs=len(DATABASES), readonly=True, create=False
            )
            try:
                whole_file.refuse_short(env, self.path)
                self._db = {name: env.open_db(name, create=False) for name in DATABASES}
            except StoreFailed:
                env.close()
                raise
            except lmdb.NotFoundError:  # the keeper is just making it, or hasn't upgraded it yet
                env.close()
                return False
        self._env, self._inode = env, inode
        if self.keys:
            with env.begin(buffers=True) as txn:
                for _, tenant in View(txn, self._db, self.keys).tenants():
                    self.keys.know(tenant.namespace)
        return True

    def close(self) -> None:
        """Unmap. Views of a snapshot must not be used any more."""
        if self._env is not None:
            self._env.close()
            self._env = None


def _upgrade(txn: Any, databases: dict[bytes, Any]) -> None:
    """Version 1 to 2, in one transaction and without touching a block: it lacks `nodes` and `tenants`.

    A chain that no known tenant's root leads to gets a node without one: whoever has its tokens still finds it.
    """
    roots = {bytes(key): _decode_root(raw) for key, raw in txn.cursor(databases[b"roots"])}
    spaces = {_decode_progress(raw).namespace for _, raw in txn.cursor(databases[b"sequences"])}
    parents: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for key, tokens in txn.cursor(databases[b"children"]):
        parents.setdefault(bytes(key[:16]), []).append((bytes(key[-16:]), bytes(tokens)))
    for root, info in roots.items():
        size = frame_offset(info.block_tokens) + info.shape.frame_bytes(info.block_tokens)
        for space in spaces:
            chain = chain_root(RootId(root), space)
            waiting = [(bytes(chain), 0)]
            if chain in parents:
                txn.put(chain, _encode(Tenant(root, space)), db=databases[b"tenants"])
            while waiting:
                parent, start = waiting.pop()
                for block, tokens in parents.pop(parent, ()):
                    end = start + len(tokens) // 4
                    txn.put(block, NODE.pack(parent, chain, end, 0, size), db=databases[b"nodes"])
                    waiting.append((block, end))
    for parent, children in parents.items():
        for block, _ in children:
            txn.put(block, NODE.pack(parent, bytes(16), 0, 0, 0), db=databases[b"nodes"])
    txn.put(b"version", str(STORE_VERSION).encode(), db=databases[b"meta"])


def _make_whole(path: Path) -> None:
    """A new store gets its name when it can be opened, so that a loss of power never leaves half of one. Raises OSError, StoreFailed."""
    if (path / "data.mdb").exists():
        return
    draft = path / "new"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    with _translated(path):
        env = lmdb.open(str(draft), mode=0o600)
        env.sync(True)
        env.close()
    os.rename(draft / "data.mdb", path / "data.mdb")
    _sync_file(path)
    shutil.rmtree(draft, ignore_errors=True)


def _sync_file(path: Path) -> None:
    """Bring a file, or a directory's names, onto the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
        if path.is_file():
            _sync_file(path.parent)
    finally:
        os.close(file)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def _set_aside_damaged(path: Path, unsafe: Path) -> None:
    """A store that was being written without fsync when the machine went down can't be trusted: start an empty one."""
    if not unsafe.exists() or unsafe.read_text() == _boot_id():
        return
    aside = path / "damaged"
    aside.mkdir(exist_ok=True)
    for name in ("data.mdb", "lock.mdb"):
        if (path / name).exists():
            (path / name).replace(aside / name)
    unsafe.unlink()
    log.warning("store.set_aside", path=str(aside), reason="the machine stopped before an unsynced store was synced")
