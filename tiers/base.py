"""A base: what is kept of a session once it is compacted, in one record. Stage *compact*, keeper; read by listing and export.

It names everything that restoring the session needs: tokens, whole blocks, the tail pieces of its last block, rollback points.
What no base and no sequence names is freed. The bytes of a base carry a checksum; its format is in docs/log-format.md.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, NewType

import msgspec
from xxhash import xxh3_64_intdigest

from tiers.errors import BadBlock
from tiers.layout import BlockId

SessionKey = NewType("SessionKey", bytes)  # 16 bytes

BASE_MAGIC = b"CBAS"
BASE_VERSION = 1
# magic, version, zero, checksum of all that follows
HEAD = struct.Struct("<4sHHQ")


class Base(msgspec.Struct, frozen=True):
    """One session, compacted.

    session  its name; "" for a stream without a session, which `stream` then names
    tokens   int32 little-endian of [0, position)
    blocks   ids (16 bytes each) of its whole blocks, first to last
    tail     sequence id under which the tail pieces after the last block lie; b"" if there are none
    points   (position, kind, point id) of the rollback points that are kept, ascending
    used_ms  when it was last used, milliseconds since 1970
    """

    namespace: str
    session: str
    stream: str
    root: bytes
    block_tokens: int
    epoch: int
    tokens: bytes
    blocks: bytes
    tail: bytes
    points: list[tuple[int, int, bytes]]
    used_ms: int

    @property
    def position(self) -> int:
        return len(self.tokens) // 4

    @property
    def block_ids(self) -> list[BlockId]:
        return [BlockId(self.blocks[at : at + 16]) for at in range(0, len(self.blocks), 16)]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Base).decode


def session_key(namespace: str, session: str, stream: str = "") -> SessionKey:
    """Key of a session's base; a stream without a session has one of its own."""
    name = f"{namespace}\0session\0{session}" if session else f"{namespace}\0stream\0{stream}"
    return SessionKey(hashlib.blake2b(name.encode(), digest_size=16, person=b"concordia-sessn").digest())


def pack_base(base: Base) -> bytes:
    """A base as it is stored."""
    body = _encode(base)
    return HEAD.pack(BASE_MAGIC, BASE_VERSION, 0, xxh3_64_intdigest(body)) + body


def body_of(raw: Any) -> Base | None:
    """What a damaged base says, not verified: any of it may be wrong. None if it can't be read."""
    try:
        return _decode(bytes(raw[HEAD.size :]))
    except msgspec.MsgspecError:
        return None


def unpack_base(raw: Any, where: str) -> Base:
    """Verify a stored base and read it. Raises BadBlock."""
    if len(raw) < HEAD.size:
        raise BadBlock("a base is cut short", where=where)
    magic, version, zero, checksum = HEAD.unpack_from(raw)
    if magic != BASE_MAGIC or version != BASE_VERSION or zero:
        raise BadBlock("a base has no valid header", where=where)
    body = bytes(raw[HEAD.size :])
    if xxh3_64_intdigest(body) != checksum:
        raise BadBlock("a base's checksum is wrong", where=where)
    try:
        return _decode(body)
    except msgspec.MsgspecError as error:
        raise BadBlock("a base can't be read", where=where, cause=str(error)) from error
