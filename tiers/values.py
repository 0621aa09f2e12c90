"""The store's format: what its databases hold, and how a value is packed and verified. Functions of bytes to values, without LMDB.

Values carry their own checksum, so a flipped byte is a miss with a reason. Source: docs/log-format.md
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from tiers.errors import BadBlock
from tiers.layout import ALL_GROUPS, BlockId, Layout, RootId, SequenceId, is_possible
from tiers.track import PointPlace

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
OVERFLOW_BYTES = 2000  # a value longer than about half a page has pages of its own


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

    def __post_init__(self) -> None:
        if not is_possible(self.layout, self.block_tokens, self.state_bytes):
            raise ValueError("a layout that no state can have")

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


encode = msgspec.msgpack.Encoder().encode
Entry = TypeVar("Entry")


def _decoder(form: type[Entry]) -> Callable[[Any], Entry]:
    """What reads a small record. They have no checksum of their own: one that can't be read raises BadBlock."""
    decode = msgspec.msgpack.Decoder(form).decode

    def checked(raw: Any) -> Entry:
        try:
            return decode(raw)
        except msgspec.MsgspecError as error:
            raise BadBlock("a stored entry can't be read", cause=str(error)) from error

    return checked


decode_progress = _decoder(Progress)
decode_root = _decoder(RootInfo)
decode_owner = _decoder(StreamOwner)
decode_tenant = _decoder(Tenant)
decode_pin = _decoder(Pin)
decode_point = _decoder(PointEntry)


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
    """A value of the `nodes` database. Raises BadBlock."""
    if len(raw) not in (NODE.size, NODE.size + LEADING.size):
        raise BadBlock("a stored entry can't be read", cause=f"it has {len(raw)} bytes")
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


def child_prefix(parent: bytes, tokens: bytes) -> bytes:
    """Start of a block's key in `children`, which orders the blocks after `parent` by tokens."""
    return parent + tokens[:CHILD_TOKENS_BYTES]


READERS: dict[str, Callable[[Any], Any]] = {  # of small records, by database: raise BadBlock
    "sequences": decode_progress,
    "roots": decode_root,
    "streams": decode_owner,
    "tenants": decode_tenant,
    "pins": decode_pin,
    "points": decode_point,
    "nodes": unpack_node,
}
