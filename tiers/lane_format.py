"""What a lane is made of, to the byte: header page, directory entries, record types, and reading them. Pure; no file is touched.

A file of one header page, one page of the keeper's, a directory of 128-byte entries and a ring of payloads.
Source: docs/log-format.md
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from tiers.lane_seal import Where
from tiers.layout import SequenceId, is_possible

PAGE = 4096
LANE_MAGIC = b"CONCLANE"
LANE_VERSION = 2
SEALED_VERSION = 3  # of a lane that may hold sealed records, and of their entries
READABLE_VERSIONS = (1, 2, 3)
SEALED = 0x8000  # in an entry's type: the payload is sealed
ENTRY_MAGIC = 0x43455243  # b"CREC"
ENTRY_VERSION = 2
ENTRY_BYTES = 128
DIRECTORY_OFFSET = 2 * PAGE
ALIGN = 64
POINT_HEAD_BYTES = 64  # u32 kind of the point, then zeros; the state comes after it, aligned

# Page 0: magic, version, entry bytes, record count, ring bytes, lane id, then a checksum of those.
GEOMETRY = struct.Struct("<8sIIQQQ")
# 8-byte words, by index from the start of the file.
GEOMETRY_CHECK_WORD = GEOMETRY.size // 8
LANE_ID_WORD = 4
INCARNATION_WORD = 16
RESERVED_WORD = (
    24  # end of the newest reservation, monotonic bytes: what lies a ring's length below it may be overwritten
)
TAIL_WORD = PAGE // 8  # the keeper's page: first record that is not freed
TAIL_COPY_WORD = TAIL_WORD + 1  # the same with its bits inverted; 0 as long as no keeper has said it twice
ALL_BITS = (1 << 64) - 1
# Entry: magic, version, type, number, epoch, sequence, token_start, token_end, payload offset, payload bytes, payload checksum
ENTRY = struct.Struct("=IHHQQ16sIIQQQ")
CHECKSUM_BYTES = 8  # the entry's last field is the payload's, what follows it that of the entry's bytes before it
CHECKED_BYTES = ENTRY.size + CHECKSUM_BYTES
COMMIT = ENTRY_BYTES // 8 - 1  # word: record number + 1, last written
entry_view = np.dtype([("body", "V120"), ("commit", "<u8")])


class RecordType(IntEnum):
    BAD = 0  # committed, but its entry is flipped: nothing in it can be trusted; never written
    OPEN = 1
    ROWS = 2
    CLOSE = 3
    POINT = 4


class PointKind(IntEnum):
    """Why a rollback point was taken."""

    CHUNK = 1  # end of a prefill chunk
    MESSAGE = 2  # message boundary, or the end of the prompt
    PROMPT_TAIL = 3  # before the last tokens of a prompt
    TIP = 4
    ANSWER_TAIL = 5  # within an answer, every so many tokens: one lies before its last ones


class RecordHeader(NamedTuple):
    """A committed entry. payload_offset is monotonic; its place in the ring is payload_offset % lane_bytes."""

    number: int
    type: int
    epoch: int
    sequence: SequenceId
    token_start: int
    token_end: int
    payload_offset: int
    payload_bytes: int
    checksum: int
    sealed: bool = False

    @property
    def where(self) -> Where:
        """What a sealed payload is bound to."""
        return Where(self.type, self.epoch, self.sequence, self.token_start, self.token_end)

    @property
    def token_count(self) -> int:
        return self.token_end - self.token_start


class OpenPayload(msgspec.Struct, frozen=True):
    """Payload of an OPEN record, msgpack: everything that later records of the sequence lean on.

    layout       [planes, row_bytes, window] a group; version 1 had no window
    tokens       int32 little-endian of [0, token_start); token_start is a multiple of block_tokens
    state_bytes  of one rollback point; 0 in version 1
    """

    root: bytes
    layout: list[tuple[int, ...]]
    block_tokens: int
    namespace: str
    session: str
    stream: str
    token_start: int
    tokens: bytes
    state_bytes: int = 0

    def __post_init__(self) -> None:
        if not is_possible(self.layout, self.block_tokens, self.state_bytes):
            raise ValueError("a layout that no state can have")


encode_open = msgspec.msgpack.Encoder().encode
decode_open = msgspec.msgpack.Decoder(OpenPayload).decode


def padded(size: int) -> int:
    """`size` rounded up to a multiple of 64."""
    return (size + ALIGN - 1) & -ALIGN


def tokens_bytes(token_count: int) -> int:
    """Bytes of the token part of a ROWS payload: what stands before its frame."""
    return padded(4 * token_count)


def least_tail(said: int, copy: int) -> int:
    """The tail of the two words that say it. One that was flipped may have records taken twice, never passed over or written over."""
    return min(said, copy ^ ALL_BITS)


def tails_agree(said: int, copy: int) -> bool:
    """Whether neither was flipped, as far as can be told: one is the other inverted, or was never written."""
    return not copy or said == copy ^ ALL_BITS


def data_offset(record_count: int) -> int:
    """Where the ring starts in the file."""
    return DIRECTORY_OFFSET + ((record_count * ENTRY_BYTES + PAGE - 1) & -PAGE)


def parse_entry(raw: bytes, number: int, lane_bytes: int = 1 << 62) -> RecordHeader:
    """The header in the committed entry of record `number`; type BAD if the entry is torn or flipped, or says what can't be."""
    magic, version, kind, found, epoch, sequence, start, end, offset, size, checksum = ENTRY.unpack_from(raw)
    sealed, kind = bool(kind & SEALED), kind & ~SEALED
    whole = xxh3_64_intdigest(raw[: ENTRY.size]) == int.from_bytes(raw[ENTRY.size : ENTRY.size + 8], "little")
    if (
        not whole
        or magic != ENTRY_MAGIC
        or version not in READABLE_VERSIONS
        or found != number
        or sealed != (version == SEALED_VERSION)
    ):
        possible = False
    else:
        # A right checksum over wrong numbers was written by a bug or by somebody else; a reader must not walk off with them.
        possible = (
            start <= end and size <= lane_bytes and (kind != RecordType.ROWS or tokens_bytes(end - start) <= size)
        )
    if not possible:
        return RecordHeader(number, RecordType.BAD, 0, SequenceId(bytes(16)), 0, 0, 0, 0, 0)
    return RecordHeader(number, kind, epoch, SequenceId(sequence), start, end, offset, size, checksum, sealed)


def geometry_bytes(record_count: int, lane_bytes: int, lane_id: int, version: int) -> bytes:
    header = GEOMETRY.pack(LANE_MAGIC, version, ENTRY_BYTES, record_count, lane_bytes, lane_id)
    return header + xxh3_64_intdigest(header).to_bytes(8, "little")


def parse_geometry(raw: bytes) -> tuple[int, int, int, int] | None:
    if len(raw) < GEOMETRY.size + 8:
        return None
    _, version, entry_bytes, record_count, lane_bytes, lane_id = GEOMETRY.unpack_from(raw)
    if not is_whole_header(raw) or version not in READABLE_VERSIONS or entry_bytes != ENTRY_BYTES:
        return None
    return record_count, lane_bytes, lane_id, version


def is_whole_header(raw: bytes) -> bool:
    """Whether these are the first bytes of a lane of any version, as they were written."""
    check = int.from_bytes(raw[GEOMETRY.size : GEOMETRY.size + 8], "little")
    return raw.startswith(LANE_MAGIC) and xxh3_64_intdigest(raw[: GEOMETRY.size]) == check


def lane_size(head: bytes) -> int:
    """Bytes of the lane whose header page is `head`; 0 if it isn't one."""
    geometry = parse_geometry(head)
    return data_offset(geometry[0]) + geometry[1] if geometry else 0
