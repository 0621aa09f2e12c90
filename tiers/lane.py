"""The lane: one engine's log in shared memory. Stage *append* (LaneWriter, engine's step thread) and its readers (keeper, engines).

A file of one header page, one page of the keeper's, a directory of 128-byte entries and a ring of payloads. One writer,
many readers, no locks between them: payload first, then the entry, then the entry's commit word (record number + 1),
so that a reader that sees the word sees the record; each entry and each payload also has a checksum. A reader that finds no
commit word has found the end of the log. A record is freed when the keeper moves the tail past it.
Source: docs/log-format.md
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import structlog
from xxhash import xxh3_64_intdigest

from tiers import failpoints, media
from tiers.behind import Behind, Prepare, Publish
from tiers.errors import BadRecord, LaneBusy, LaneFull, OtherFormat, TooLarge
from tiers.keys import Keyring
from tiers.lane_seal import LaneOpener, LaneSealer, Shape, Where
from tiers.layout import Layout, RootId, SequenceId
from tiers.lock import is_held
from tiers.media import Place
from tiers.pages import populate_read
from tiers.settings import LaneEncryption, LaneFlush
from tiers.shares import LaneShares

log = structlog.get_logger()

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
SHARED_BYTES = (
    512 << 10
)  # of a frame: from here on copying and summing it takes longer than handing it over to another thread
DELETED = " (deleted)"  # added to the name of a lane whose file is gone
OPENED_BYTES = 32 << 20  # of sealed frames that a reader keeps opened
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
# Entry: magic, version, type, number, epoch, sequence, token_start, token_end, payload offset, payload bytes, payload checksum
ENTRY = struct.Struct("=IHHQQ16sIIQQQ")
ENTRY_CHECK = ENTRY.size // 8  # word: checksum of the entry's bytes before it
COMMIT = ENTRY_BYTES // 8 - 1  # word: record number + 1, last written
_entry_view = np.dtype([("body", "V120"), ("commit", "<u8")])


class RecordType(IntEnum):
    BAD = 0  # committed, but its entry is flipped: nothing in it can be trusted; never written
    OPEN = 1
    ROWS = 2
    CLOSE = 3
    POINT = 4


class PointKind(IntEnum):
    """Why a rollback point was taken."""

    CHUNK = 1  # end of a prefill chunk
    MESSAGE = 2  # message boundary
    PROMPT_TAIL = 3  # before the last tokens of a prompt
    TIP = 4
    ANSWER_TAIL = 5  # before the last tokens of an answer


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


_encode_open = msgspec.msgpack.Encoder().encode
_decode_open = msgspec.msgpack.Decoder(OpenPayload).decode


def padded(size: int) -> int:
    """`size` rounded up to a multiple of 64."""
    return (size + ALIGN - 1) & -ALIGN


def tokens_bytes(token_count: int) -> int:
    """Bytes of the token part of a ROWS payload: what stands before its frame."""
    return padded(4 * token_count)


# ---------------------------------------------------------------- write


Fill = Callable[[np.ndarray], object]  # copies rows into a frame


class Reservation:
    """Room for one ROWS record at the end of the lane. Fill `frame`, then `commit`; a new reservation drops an older one.

    frame    writable uint8, flat, `layout.frame_bytes(token_count)` long: memory of the lane itself
    payload  the same, with the token part before it
    offset   of the payload, monotonic
    """

    __slots__ = ("frame", "namespace", "offset", "payload", "token_count", "_lane", "_tokens")

    def __init__(
        self, lane: LaneWriter, offset: int, token_count: int, payload: np.ndarray, frame_start: int, namespace: str
    ) -> None:
        self._lane = lane
        self.namespace = namespace
        self.offset = offset
        self.payload = payload
        self._tokens = payload[:frame_start]
        self.token_count = token_count
        self.frame = payload[frame_start:]

    def put_tokens(self, tokens: Any) -> None:
        """Write the ids of the record's tokens: int32 array or list, token_count long."""
        count = self.token_count
        packed = np.ascontiguousarray(tokens, dtype="<i4")
        assert packed.size == count, f"{packed.size} tokens for {count} rows"
        self._tokens[: 4 * count] = packed.view(np.uint8)
        self._tokens[4 * count :] = 0

    def commit(self, sequence: SequenceId, epoch: int, token_start: int, tokens: Any) -> int:
        """Publish the rows of [token_start, token_start + token_count) and return the record's number.

        tokens  ids of those positions, int32 array or list, token_count long
        Cost    one checksum pass over the payload (10 GB/s and more, releases the GIL), no system call. A frame of SHARED_BYTES and
                more is summed and published by the writer's second thread, as a rule: `LaneWriter.settle` waits for it
        """
        lane, payload, end = self._lane, self.payload, token_start + self.token_count
        lane._take(self)
        self.put_tokens(tokens)
        if lane.shares_out(self.frame.size):
            failpoints.reach("append.payload.after")
            return lane._share(
                self, sequence, epoch, token_start, lambda: xxh3_64_intdigest(payload.data), at_once=True
            )
        return lane._commit(RecordType.ROWS, sequence, epoch, token_start, end, self.offset, payload)


class PointReservation:
    """Room for one POINT record at the end of the lane. Fill `frame`, then `commit`; a new reservation drops an older one.

    frame  writable uint8, flat, `state_bytes` long, aligned to 64 bytes: memory of the lane itself
    """

    __slots__ = ("frame", "namespace", "_lane", "_offset", "_payload")

    def __init__(self, lane: LaneWriter, offset: int, payload: np.ndarray, namespace: str) -> None:
        self._lane = lane
        self.namespace = namespace
        self._offset = offset
        self._payload = payload
        self.frame = payload[POINT_HEAD_BYTES:]

    def commit(self, sequence: SequenceId, epoch: int, position: int, kind: int) -> int:
        """Publish the state of a sequence after its first `position` tokens and return the record's number.

        kind  a PointKind
        The sequence's rows up to `position` were appended before (or `position` is its start).
        """
        lane = self._lane
        lane._take(self)
        self._payload[:POINT_HEAD_BYTES] = 0
        self._payload[:4] = np.frombuffer(int(kind).to_bytes(4, "little"), np.uint8)
        return lane._commit(RecordType.POINT, sequence, epoch, position, position, self._offset, self._payload)


class SealedReservation:
    """As Reservation or PointReservation, for a tenant whose payloads are sealed. `frame` is memory of this process, not of the lane.

    token_count  0: a rollback point
    """

    __slots__ = ("frame", "namespace", "token_count", "_lane", "_offset", "_payload", "_shape")

    def __init__(
        self, lane: LaneWriter, offset: int, payload: np.ndarray, shape: Shape, namespace: str, token_count: int
    ) -> None:
        self._lane, self._offset, self._payload, self._shape, self.namespace = lane, offset, payload, shape, namespace
        self.token_count = token_count
        self.frame = np.empty(shape.large_bytes, np.uint8)

    def commit(self, sequence: SequenceId, epoch: int, position: int, what: Any) -> int:
        """Seal and publish, and return the record's number. what: ids of the tokens from `position` on, or a point's kind."""
        lane = self._lane
        lane._take(self)
        assert lane.sealer is not None
        if self.token_count:
            kind, small = RecordType.ROWS, np.ascontiguousarray(what, dtype="<i4").view(np.uint8)
            assert small.size == 4 * self.token_count, f"{small.size // 4} tokens for {self.token_count} rows"
        else:
            kind, small = RecordType.POINT, np.frombuffer(int(what).to_bytes(4, "little"), np.uint8)
        where = Where(kind, epoch, sequence, position, position + self.token_count)
        lane.sealer.seal(self._payload, self._shape, self.namespace, where, small, self.frame)
        return lane._commit(
            kind | SEALED, sequence, epoch, position, position + self.token_count, self._offset, self._payload
        )


AnyReservation = Reservation | PointReservation | SealedReservation


class LaneWriter:
    """The single writer of a lane. Not thread-safe: one thread of one process appends.

    `open` continues after the last committed record of an existing file, whose warm pages are reused.
    """

    def __init__(
        self, path: Path, file: int, geometry: tuple[int, int, int], incarnation: int, flush: LaneFlush = "auto",
        shares: LaneShares | None = None, sealer: LaneSealer | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self.sealer = sealer
        self.shares = shares or LaneShares()
        self._reserved_for = ""
        self.record_count, self.lane_bytes, self.lane_id = record_count, lane_bytes, _ = geometry
        self._file = file
        place = media.place_of(path)
        self._map = place.map(writable=True)
        self._memory: memoryview = memoryview(self._map)
        self._words = self._memory.cast("Q")
        self._flush = media.flusher(place, self._memory, flush)
        data = data_offset(record_count)
        self._ring = np.frombuffer(self._memory, dtype=np.uint8, offset=data, count=lane_bytes)
        self._reserved: list[AnyReservation] = []  # in the order of their places
        self._before_reuse: Callable[[], None] | None = None
        self._behind = Behind() if len(os.sched_getaffinity(0)) > 1 else None
        self._pending: deque[tuple[int, int]] = (
            deque()
        )  # number and payload offset of records that may not be published
        self._words[INCARNATION_WORD] = incarnation
        self._head, self._head_bytes = self._find_head()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        lane_bytes: int,
        record_count: int,
        incarnation: int,
        busy_s: float = 5.0,
        device: str = "",
        flush: LaneFlush = "auto",
        shares: LaneShares | None = None,
        encryption: LaneEncryption = "auto",
        keys: Keyring | None = None,
    ) -> LaneWriter:
        """Open the lane at `path` for appending; make, allocate and prefault it if there is none of this geometry.

        device  a /dev/dax* device to make a new lane on; `path` is then a link to it. Empty: the lane is the file `path`
        flush   see `media.flusher`
        shares  what each tenant may take of it; records that wait already are counted
        encryption, keys  payloads of tenants that have a key are sealed: `auto` where the lane isn't in memory, or `always`
        A lane of another geometry that still holds records is set aside as `<name>~<n>.lane`, for the keeper to drain and remove.
        Cost    of a new file: first touch of all its pages, 0.6 GB/s; of an existing one: a mapping, well under 0.1 s a GB
        Raises  LaneBusy (a writer holds it for longer than busy_s), OSError ENOSPC (shared memory is full)
        """
        path = Path(path)
        lane_bytes = (lane_bytes + PAGE - 1) & -PAGE
        keys = Keyring.from_environment() if keys is None else keys
        sealer = LaneSealer(keys) if keys and (encryption == "always" or device or not media.in_memory(path)) else None
        version = SEALED_VERSION if sealer is not None else LANE_VERSION
        lane_id = _usable_lane(path, lane_bytes, record_count, version, busy_s)
        if lane_id is None:
            make = _make_device_lane if device else _make_lane
            lane_id = make(path, lane_bytes, record_count, version, device)
        file = _lock_writer(path, busy_s)
        lane = cls(path, file, (record_count, lane_bytes, lane_id), incarnation, flush, shares, sealer)
        lane._charge_waiting()
        log.info(
            "lane.opened",
            lane=path.stem,
            head=lane.head,
            tail=lane.tail,
            lane_bytes=lane_bytes,
            incarnation=incarnation,
            sealed=sealer is not None,
        )
        return lane

    def _charge_waiting(self) -> None:
        """Records of an earlier incarnation count for their tenants; those whose OPEN record is freed already for nobody."""
        if self.tail == self._head:
            return
        reader, names = LaneReader.open(self.path), dict[SequenceId, str]()
        for header in reader.records(self.tail):
            if header.type == RecordType.OPEN:
                try:
                    names[header.sequence] = reader.open_payload(header).namespace
                except BadRecord:
                    continue
            self.shares.charge(header.number, names.get(header.sequence, ""), padded(header.payload_bytes))
        reader.close()

    def _find_head(self) -> tuple[int, int]:
        """Number and monotonic offset after the last committed record."""
        number = self.tail
        last = self._entry(number - 1) if number else None
        while (header := self._entry(number)) is not None:
            last, number = header, number + 1
        if last is None or last.type == RecordType.BAD:
            # No entry to lean on: the newest reservation is above every payload that was ever written.
            return number, padded(self._words[RESERVED_WORD])
        return number, last.payload_offset + padded(last.payload_bytes)

    def _entry(self, number: int) -> RecordHeader | None:
        at = self._entry_offset(number)
        if self._words[(at >> 3) + COMMIT] != number + 1:
            return None
        return parse_entry(bytes(self._memory[at : at + ENTRY_BYTES]), number, self.lane_bytes)

    def _entry_offset(self, number: int) -> int:
        return DIRECTORY_OFFSET + (number % self.record_count) * ENTRY_BYTES

    @property
    def head(self) -> int:
        """Number of the next record."""
        return self._head

    @property
    def tail(self) -> int:
        """First record that the keeper has not freed."""
        return self._words[TAIL_WORD]

    @property
    def free_bytes(self) -> int:
        """Bytes of the ring that no unfreed record uses. A payload is contiguous, so a little less can be had in one piece."""
        return self.lane_bytes - (self._head_bytes - self._tail_bytes())

    @property
    def ring(self) -> np.ndarray:
        """The memory of all payloads (uint8): for a device that writes frames in place to register."""
        return self._ring

    def _tail_bytes(self) -> int:
        tail = self._words[TAIL_WORD]
        if tail >= self._head:
            return self._head_bytes
        for number, offset in self._pending:
            if tail == number:
                return offset  # its entry may not be there yet
        # Entry `tail` is not freed, so this writer has not reused its slot.
        return ENTRY.unpack_from(self._memory, self._entry_offset(tail))[8]

    def reserve_rows(self, layout: Layout, token_count: int, namespace: str = "") -> Reservation | SealedReservation:
        """Room for the rows of `token_count` tokens. Raises LaneFull (retry after a drain), TooLarge (never fits).

        namespace  whose they are: for `shares`, and for whom they are sealed
        """
        if self._is_sealed(namespace):
            return self._reserve_sealed(4 * token_count, layout.frame_bytes(token_count), namespace, token_count)
        frame_start = tokens_bytes(token_count)
        offset, payload = self._reserve(frame_start + layout.frame_bytes(token_count), namespace)
        reservation = Reservation(self, offset, token_count, payload, frame_start, namespace)
        self._reserved = [reservation]
        return reservation

    def append_rows(
        self, layout: Layout, sequence: SequenceId, epoch: int, token_start: int, tokens: Any, fill: Fill,
        namespace: str = "",
    ) -> int:  # fmt: skip
        """Reserve room for the rows of `tokens`, have `fill` copy them into it, and commit. As `reserve_rows` and its `commit`.

        fill    called once, with the frame (writable uint8, flat). For a record of SHARED_BYTES and more maybe in the writer's second
                thread, and after this has returned: then readers see it later. What it reads must stay as it is until `settle`
        Raises  also what kept an earlier record from being published: it, what came after it, and this one are dropped
        """
        count = len(tokens)
        reservation = self.reserve_rows(layout, count, namespace)
        frame = reservation.frame
        if isinstance(reservation, SealedReservation) or not self.shares_out(frame.size):
            fill(frame)
            return reservation.commit(sequence, epoch, token_start, tokens)
        self._take(reservation)
        reservation.put_tokens(tokens)
        payload = reservation.payload

        def prepare() -> int:
            fill(frame)
            failpoints.reach("append.payload.after")
            return xxh3_64_intdigest(payload.data)

        return self._share(reservation, sequence, epoch, token_start, prepare, at_once=False)

    def shares_out(self, frame_bytes: int) -> bool:
        """Whether a record's frame is so large that its work is shared with the second thread."""
        return self._behind is not None and frame_bytes >= SHARED_BYTES

    def _share(
        self, reservation: Reservation, sequence: SequenceId, epoch: int, token_start: int, prepare: Prepare, *,
        at_once: bool,
    ) -> int:  # fmt: skip
        """Have a record prepared by this thread or the one beside it, and published in its turn. As `Behind.share`."""
        assert self._behind is not None
        end, payload = token_start + reservation.token_count, reservation.payload
        publish = self._enter(RecordType.ROWS, sequence, epoch, token_start, end, reservation.offset, payload)
        self._behind.share(payload.size, prepare, publish, at_once=at_once)
        if self._behind.has_failed:
            self.settle()
        return self._head - 1

    def reserve_rows_together(
        self, layout: Layout, wanted: Sequence[tuple[int, str]], before_reuse: Callable[[], None]
    ) -> list[Reservation]:
        """Room for several records of rows one behind another, for a device that fills them all at once.

        wanted        (token count, namespace) of each
        before_reuse  called once before any other reservation, or the lane's end: what isn't committed by then must be written no more
        Returns those of the first so many of them that there is room for, up to the first that is sealed. To be committed in this
        order; one that is left out leaves a gap, and stays unused.
        """
        self._let_go()
        made: list[Reservation] = []
        taken: Counter[str] = Counter()
        end = self._head_bytes
        for token_count, namespace in wanted:
            if self._is_sealed(namespace):
                break
            frame_start = tokens_bytes(token_count)
            size = frame_start + layout.frame_bytes(token_count)
            try:
                offset, payload = self._room(size, namespace, self._head + len(made), end, taken[namespace])
            except (LaneFull, TooLarge):
                break
            made.append(Reservation(self, offset, token_count, payload, frame_start, namespace))
            taken[namespace] += padded(size)
            end = offset + padded(size)
        if made:
            self._reserved, self._before_reuse = list(made), before_reuse
        return made

    def holds(self, reservation: AnyReservation) -> bool:
        """Whether it can still be committed."""
        return any(held is reservation for held in self._reserved)

    def reserve_point(self, state_bytes: int, namespace: str = "") -> PointReservation | SealedReservation:
        """Room for one rollback point's state. As `reserve_rows`."""
        if self._is_sealed(namespace):
            return self._reserve_sealed(4, state_bytes, namespace, 0)
        offset, payload = self._reserve(POINT_HEAD_BYTES + state_bytes, namespace)
        reservation = PointReservation(self, offset, payload, namespace)
        self._reserved = [reservation]
        return reservation

    def append_open(
        self,
        sequence: SequenceId,
        epoch: int,
        root: RootId,
        layout: Layout,
        block_tokens: int,
        namespace: str,
        session: str,
        stream: str,
        prefix_tokens: np.ndarray,
    ) -> int:
        """Begin a sequence whose rows start at len(prefix_tokens), a multiple of block_tokens. Returns the record's number.

        The rows of prefix_tokens themselves are found by block id: in the store, or in a lane under another sequence.
        Raises LaneFull, TooLarge
        """
        token_start = len(prefix_tokens)
        assert token_start % block_tokens == 0, "a sequence's rows start at a block's start"
        tokens = np.ascontiguousarray(prefix_tokens, dtype="<i4").tobytes()
        said = OpenPayload(
            root, layout.entries, block_tokens, namespace, session, stream, token_start, tokens, layout.state_bytes
        )
        body = _encode_open(said)
        if self._is_sealed(namespace):
            assert self.sealer is not None
            name, where = namespace.encode(), Where(RecordType.OPEN, epoch, sequence, token_start, token_start)
            shape = Shape.of(len(name), len(body), None)
            offset, payload = self._reserve(shape.payload_bytes, namespace)
            self.sealer.seal(payload, shape, namespace, where, body, name=name)
            kind = RecordType.OPEN | SEALED
            return self._commit(kind, sequence, epoch, token_start, token_start, offset, payload)
        offset, payload = self._reserve(len(body), namespace)
        payload[:] = np.frombuffer(body, dtype=np.uint8)
        return self._commit(RecordType.OPEN, sequence, epoch, token_start, token_start, offset, payload)

    def _is_sealed(self, namespace: str) -> bool:
        return self.sealer is not None and self.sealer.seals(namespace)

    def _reserve_sealed(
        self, small_bytes: int, large_bytes: int, namespace: str, token_count: int
    ) -> SealedReservation:
        shape = Shape.of(0, small_bytes, large_bytes)
        offset, payload = self._reserve(shape.payload_bytes, namespace)
        reservation = SealedReservation(self, offset, payload, shape, namespace, token_count)
        self._reserved = [reservation]
        return reservation

    def append_close(self, sequence: SequenceId, epoch: int, token_end: int) -> int:
        """End a sequence: no more rows follow, and its truth ends at token_end. Raises LaneFull."""
        offset, payload = self._reserve(0)
        return self._commit(RecordType.CLOSE, sequence, epoch, token_end, token_end, offset, payload)

    def _reserve(self, payload_bytes: int, namespace: str = "") -> tuple[int, np.ndarray]:
        """Room for the next record; what was reserved before is dropped."""
        self._let_go()
        self._reserved_for = namespace
        return self._room(payload_bytes, namespace, self._head, self._head_bytes)

    def _let_go(self) -> None:
        """Drop what is reserved; its memory is the next record's."""
        self._reserved = []
        if self._before_reuse is not None:
            before_reuse, self._before_reuse = self._before_reuse, None
            before_reuse()

    def _take(self, reservation: AnyReservation) -> None:
        """It is about to be committed; those before it are dropped."""
        assert self.holds(reservation), "this reservation was dropped by a newer one or committed before"
        while self._reserved.pop(0) is not reservation:
            continue
        if not self._reserved:
            self._before_reuse = None
        self._reserved_for = reservation.namespace

    def _room(
        self, payload_bytes: int, namespace: str, number: int, offset: int, reserved_bytes: int = 0
    ) -> tuple[int, np.ndarray]:
        """Place and memory of record `number`, from `offset` on; `reserved_bytes` are its tenant's that are reserved before it."""
        size, ring = padded(payload_bytes), self.lane_bytes
        if size > ring:
            raise TooLarge(f"a record of {payload_bytes} bytes", where=str(self.path), cause=f"the ring has {ring}")
        place = offset % ring
        if place + size > ring:  # a payload is contiguous: skip to the start of the ring
            offset += ring - place
            place = 0
        tail = self._words[TAIL_WORD]
        if offset + size - self._tail_bytes() > ring or number - tail >= self.record_count - 1:
            raise LaneFull(
                f"no room for {payload_bytes} bytes", where=str(self.path), cause=f"{self._head - tail} records wait"
            )
        self.shares.check(namespace, size, tail, reserved_bytes)
        # Whoever reads what this reservation overwrites must be able to tell, and a stale lap's entry must not be taken for ours.
        self._words[RESERVED_WORD] = max(offset + size, self._words[RESERVED_WORD])
        self._words[(self._entry_offset(number) >> 3) + COMMIT] = 0
        failpoints.reach("append.payload.before")
        return offset, self._ring[place : place + payload_bytes]

    def _commit(
        self, kind: int, sequence: SequenceId, epoch: int, start: int, end: int, offset: int, payload: np.ndarray
    ) -> int:
        failpoints.reach("append.payload.after")
        self.settle()
        publish = self._enter(kind, sequence, epoch, start, end, offset, payload)
        try:
            publish(xxh3_64_intdigest(payload.data))
        except BaseException:
            self._drop_unpublished()
            raise
        self._pending.clear()
        return self._head - 1

    def _enter(
        self, kind: int, sequence: SequenceId, epoch: int, start: int, end: int, offset: int, payload: np.ndarray
    ) -> Publish:
        """The record has its number and its room; what publishes it, given its checksum."""
        number, size = self._head, padded(payload.size)
        while self._pending and self._is_published(self._pending[0][0]):
            self._pending.popleft()
        self._pending.append((number, offset))
        self._head, self._head_bytes = number + 1, offset + size
        self.shares.charge(number, self._reserved_for, size)
        return partial(self._publish, kind, number, sequence, epoch, start, end, offset, payload.size)

    def _is_published(self, number: int) -> bool:
        return self._words[(self._entry_offset(number) >> 3) + COMMIT] == number + 1

    def _drop_unpublished(self) -> None:
        """Take back the records that readers can't see, and what their tenants were charged for them."""
        while self._pending and self._is_published(self._pending[0][0]):
            self._pending.popleft()
        if self._pending:
            self._head, self._head_bytes = self._pending[0]
            self.shares.drop(self._head)
        self._pending.clear()
        self._let_go()

    def _publish(
        self, kind: int, number: int, sequence: SequenceId, epoch: int, start: int, end: int, offset: int, size: int,
        checksum: int,
    ) -> None:  # fmt: skip
        """Let readers see a record whose payload stands. This thread, or the one beside it."""
        at = self._entry_offset(number)
        version = SEALED_VERSION if kind & SEALED else ENTRY_VERSION
        body = ENTRY.pack(ENTRY_MAGIC, version, kind, number, epoch, sequence, start, end, offset, size, checksum)
        self._memory[at : at + ENTRY.size] = body
        word = at >> 3
        self._words[word + ENTRY_CHECK] = xxh3_64_intdigest(body)
        if self._flush is not None and size:
            self._flush(data_offset(self.record_count) + offset % self.lane_bytes, size)
        failpoints.reach("append.commit_word.before")
        # Commit word last, one aligned 8-byte store: a reader that sees it sees the record.
        self._words[word + COMMIT] = number + 1
        if self._flush is not None:
            self._flush(at, ENTRY_BYTES)
        failpoints.reach("append.commit_word.after")

    def is_gone(self) -> bool:
        """Whether the file was deleted, moved or replaced: what is appended is lost when keeper and writer are. A system call or two."""
        mine = os.fstat(self._file)
        try:
            named = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        return (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino)

    def settle(self) -> None:
        """Wait until every record that was committed can be read. Raises what kept one from it: it and those after it are dropped."""
        if not self._pending or self._behind is None:
            return
        error = self._behind.wait()
        if error is not None:
            self._drop_unpublished()
            raise error
        self._pending.clear()

    def close(self) -> None:
        """Let the lane go. Views handed out by reservations keep the mapping alive until they are dropped."""
        try:
            self.settle()
        finally:
            self._let_go()
            if self._behind is not None:
                self._behind.end()
            fcntl.flock(self._file, fcntl.LOCK_UN)  # by hand: the mapping holds a duplicate of the descriptor
            os.close(self._file)
            self._words.release()
            del self._ring
            _close_map(self._map, self._memory)


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


def _read_geometry(place: Place) -> tuple[int, int, int, int] | None:
    """(record count, ring bytes, lane id, version) of the lane at `place`; None if there is no lane that can be read."""
    geometry = _parse_geometry(place.head(PAGE))
    if geometry is None:
        return None
    size = data_offset(geometry[0]) + geometry[1]
    return geometry if (size <= place.size if place.is_device else size == place.size) else None


def _parse_geometry(raw: bytes) -> tuple[int, int, int, int] | None:
    if len(raw) < GEOMETRY.size + 8:
        return None
    magic, version, entry_bytes, record_count, lane_bytes, lane_id = GEOMETRY.unpack_from(raw)
    check = int.from_bytes(raw[GEOMETRY.size : GEOMETRY.size + 8], "little")
    whole = xxh3_64_intdigest(raw[: GEOMETRY.size]) == check
    if magic != LANE_MAGIC or version not in READABLE_VERSIONS or entry_bytes != ENTRY_BYTES or not whole:
        return None
    return record_count, lane_bytes, lane_id, version


def lane_size(head: bytes) -> int:
    """Bytes of the lane whose header page is `head`; 0 if it isn't one."""
    geometry = _parse_geometry(head)
    return data_offset(geometry[0]) + geometry[1] if geometry else 0


def _usable_lane(path: Path, lane_bytes: int, record_count: int, version: int, busy_s: float) -> int | None:
    """Id of the existing lane if it can be continued, after setting aside one that can't."""
    if not path.exists():
        return None
    try:
        geometry = _read_geometry(media.place_of(path))
    except (OtherFormat, FileNotFoundError):
        geometry = None
    if geometry is not None and geometry[:2] == (record_count, lane_bytes) and geometry[3] == version:
        return geometry[2]
    os.close(_lock_writer(path, busy_s))
    if geometry is None:
        log.warning("lane.discarded", lane=path.stem, reason="not a lane of this version")
        media.remove(path)
        return None
    aside = path.with_name(f"{path.stem}~{geometry[2]:x}.lane")
    path.rename(aside)
    log.info("lane.set_aside", lane=path.stem, aside=aside.name, reason="other geometry or version")
    return None


def _geometry_bytes(record_count: int, lane_bytes: int, lane_id: int, version: int) -> bytes:
    header = GEOMETRY.pack(LANE_MAGIC, version, ENTRY_BYTES, record_count, lane_bytes, lane_id)
    return header + xxh3_64_intdigest(header).to_bytes(8, "little")


def _make_lane(path: Path, lane_bytes: int, record_count: int, version: int, device: str = "") -> int:
    """Allocate and prefault a new lane; it gets its name only when whole, so nobody sees half a lane."""
    draft = path.with_name(path.name + ".new")
    lane_id = secrets.randbits(63)
    size = data_offset(record_count) + lane_bytes
    file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, size)  # ENOSPC now rather than SIGBUS in mid-capture
        os.pwrite(file, _geometry_bytes(record_count, lane_bytes, lane_id, version), 0)
        os.rename(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
    return lane_id


def _make_device_lane(path: Path, lane_bytes: int, record_count: int, version: int, device: str) -> int:
    """A new lane in a free range of a DAX device, and `path` as the link to it. Raises OSError ENOSPC, OtherFormat."""
    found = media.Device.find(device)
    lane_id = secrets.randbits(63)
    start = data_offset(record_count)
    with media.allocation(path.parent):
        place = found.free_place(start + lane_bytes, lane_size)
        if place is None:
            raise OSError(errno.ENOSPC, f"no free range of {start + lane_bytes} bytes on the device", device)
        with place.map_head(start, writable=True) as head:
            head[:start] = bytes(start)  # whatever lay here before: no record of it may look committed
            head[media.OWNER_OFFSET : media.OWNER_OFFSET + media.OWNER_BYTES] = media.owner_of(path.parent)
            header = _geometry_bytes(record_count, lane_bytes, lane_id, version)
            head[: len(header)] = header
        media.write_link(path, place)
    return lane_id


def _lock_writer(path: Path, busy_s: float) -> int:
    """Open `path` and hold it as its writer. A killed writer's lock goes late, after the kernel has freed its memory: so wait a little."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    deadline = time.monotonic() + busy_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(file)
                raise LaneBusy("another process writes this lane", where=str(path)) from None
            time.sleep(0.01)


def _close_map(map_: mmap.mmap, memory: memoryview) -> None:
    try:
        memory.release()
        map_.close()
    except BufferError:
        pass  # views are still out; the mapping goes with the last of them


# ---------------------------------------------------------------- read


class LaneReader:
    """One lane, read without locks while its writer writes. Not thread-safe; open one a thread.

    With `writable_tail` (the keeper only) the page with the tail word is mapped for writing, and nothing else.
    """

    def __init__(
        self, path: Path, inode: int, place: Place, geometry: tuple[int, int, int, int], writable_tail: bool,
        keys: Keyring | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self._keys = keys
        self._opener: LaneOpener | None = None
        # One record may be part of many blocks, which the drain's two threads join.
        self._opened: dict[int, tuple[RecordHeader, np.ndarray]] = {}
        self._opened_lock = threading.Lock()
        self.record_count, self.lane_bytes, self.lane_id, self.version = geometry
        self.inode = inode  # not used again for another file while this one is held open
        self._held = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.closed = False
        self._map = place.map(writable=False)
        self._memory = memoryview(self._map)
        self._words = self._memory.cast("Q")
        self._entries = np.frombuffer(self._memory, _entry_view, self.record_count, DIRECTORY_OFFSET)
        self._commits = self._entries["commit"]
        self._ring = np.frombuffer(self._memory, np.uint8, self.lane_bytes, data_offset(self.record_count))
        self._tail_map = _map_tail(place) if writable_tail else None
        self._tail_memory = memoryview(self._tail_map).cast("Q") if self._tail_map is not None else None

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, writable_tail: bool = False, keys: Keyring | None = None
    ) -> LaneReader:
        """Map the lane at `path`. keys: to open sealed records with, default this process's. Raises OtherFormat, FileNotFoundError."""
        path = Path(path)
        inode = os.stat(path).st_ino
        place = media.place_of(path)
        geometry = _read_geometry(place)
        if geometry is None:
            raise OtherFormat("not a lane of this version", where=str(path))
        reader = cls(path, inode, place, geometry, writable_tail, keys)
        if os.stat(path).st_ino != inode:  # replaced in between
            reader.close()
            raise FileNotFoundError(errno.ENOENT, "the lane was replaced while it was opened; open it again", str(path))
        return reader

    @property
    def name(self) -> str:
        """Name of the lane: the engine's."""
        return self.path.stem

    @property
    def tail(self) -> int:
        """First record that is not freed."""
        return self._words[TAIL_WORD]

    @property
    def incarnation(self) -> int:
        """Which start of the engine wrote last."""
        return self._words[INCARNATION_WORD]

    def head(self, from_number: int | None = None) -> int:
        """Number after the last committed record, searched from `from_number` (the tail if None)."""
        number = self.tail if from_number is None else from_number
        count, step = self.record_count, 256
        while True:
            expected = np.arange(number, number + min(step, count), dtype=np.uint64)
            found = self._commits[(expected % np.uint64(count)).astype(np.intp)] == expected + np.uint64(1)
            run = int(found.argmin()) if not found.all() else len(found)
            number += run
            if run < len(found):
                return number
            step *= 2

    def records(self, from_number: int, limit: int = 1 << 30) -> list[RecordHeader]:
        """Headers of the committed records from `from_number` on, at most `limit`; type BAD where an entry is flipped."""
        return [self._header(n) for n in range(from_number, min(self.head(from_number), from_number + limit))]

    def _header(self, number: int) -> RecordHeader:
        at = DIRECTORY_OFFSET + (number % self.record_count) * ENTRY_BYTES
        return parse_entry(bytes(self._memory[at : at + ENTRY_BYTES]), number, self.lane_bytes)

    def used_share(self, start: int, end: int) -> float:
        """The larger of the shares of directory and ring that the records [start, end) take up."""
        if start >= end:
            return 0.0
        first, last = self._header(start), self._header(end - 1)
        size = last.payload_offset + last.payload_bytes - first.payload_offset
        return max((end - start) / self.record_count, min(size, self.lane_bytes) / self.lane_bytes)

    def is_finished(self) -> bool:
        """Whether the file's name is gone and nothing is left to do for it. Says so once if there is."""
        if not is_held(self._held) and self.head() == self.tail:  # in this order: a writer may append until it lets go
            return True
        if not self.path.stem.endswith(DELETED):
            hint = "the keeper drains it as long as both live; restart the engine to have a lane with a name again"
            log.error("lane.deleted", lane=self.path.stem, hint=hint)
            self.path = self.path.with_name(f"{self.path.stem}{DELETED}.lane")
        return False

    def intact(self, header: RecordHeader) -> bool:
        """Whether no reservation has reached this record's payload yet. Ask after the bytes were used, as well as before."""
        words = self._words  # the id is another one when a device's range has been given to another lane
        return header.payload_offset + self.lane_bytes >= words[RESERVED_WORD] and words[LANE_ID_WORD] == self.lane_id

    def payload(self, header: RecordHeader, *, verify: bool = True) -> np.ndarray:
        """The record's payload: read-only uint8 view of the lane's memory, valid while `intact(header)`.

        Raises BadRecord if it was overwritten meanwhile or, with `verify`, if its checksum is wrong.
        """
        place = header.payload_offset % self.lane_bytes
        view = self._ring[place : place + header.payload_bytes]
        if view.size != header.payload_bytes or not self.intact(header):
            raise BadRecord("a record was overwritten", where=self._where(header))
        if verify:
            if header.payload_bytes >= 1 << 16:
                populate_read(view)
            if xxh3_64_intdigest(view.data) != header.checksum:
                raise BadRecord("a record's checksum is wrong", where=self._where(header))
        return view

    @property
    def opener(self) -> LaneOpener:
        """What opens sealed records."""
        if self._opener is None:
            self._opener = LaneOpener(Keyring.from_environment() if self._keys is None else self._keys)
        return self._opener

    def _small(self, header: RecordHeader, small_bytes: int | None) -> bytes:
        payload = self.payload(header, verify=False)
        return self.opener.small(payload, header.where, small_bytes, self._where(header))

    def _large(self, header: RecordHeader, small_bytes: int) -> np.ndarray:
        with self._opened_lock:
            held = self._opened.get(header.number)
        if held is not None and held[0] == header:
            return held[1]
        payload = self.payload(header, verify=False)
        opened = self.opener.large(payload, header.where, small_bytes, self._where(header))
        opened.flags.writeable = False
        with self._opened_lock:
            self._opened[header.number] = header, opened
            while len(self._opened) > 1 and sum(part.nbytes for _, part in self._opened.values()) > OPENED_BYTES:
                del self._opened[next(iter(self._opened))]
        return opened

    def tokens(self, header: RecordHeader) -> bytes:
        """Token ids of a ROWS record, int32 little-endian. Not verified: the checksum covers them when the frame is read.

        Raises BadRecord if they are sealed, and were changed or can't be opened
        """
        if header.sealed:
            return self._small(header, 4 * header.token_count)
        place = header.payload_offset % self.lane_bytes
        return self._ring[place : place + 4 * header.token_count].tobytes()

    def open_payload(self, header: RecordHeader) -> OpenPayload:
        """What an OPEN record says. Raises BadRecord."""
        payload = self._small(header, None) if header.sealed else self.payload(header).data
        try:
            return _decode_open(payload)
        except msgspec.MsgspecError as error:
            raise BadRecord("an OPEN record can't be read", where=self._where(header), cause=str(error)) from error

    def frame(self, header: RecordHeader, *, verify: bool = True) -> np.ndarray:
        """The frame of a ROWS record. As `payload`; a sealed one's is opened into memory of its own, and always verified."""
        if header.sealed:
            return self._large(header, 4 * header.token_count)
        return self.payload(header, verify=verify)[tokens_bytes(header.token_count) :]

    def state(self, header: RecordHeader, *, verify: bool = True) -> np.ndarray:
        """The state bytes of a POINT record. As `frame`."""
        if header.sealed:
            return self._large(header, 4)
        return self.payload(header, verify=verify)[POINT_HEAD_BYTES:]

    def point_kind(self, header: RecordHeader) -> int:
        """The PointKind of a POINT record. As `tokens`."""
        if header.sealed:
            return int.from_bytes(self._small(header, 4), "little")
        place = header.payload_offset % self.lane_bytes
        return int.from_bytes(self._ring[place : place + 4].tobytes(), "little")

    def _where(self, header: RecordHeader) -> str:
        span = f"[{header.token_start}, {header.token_end})"
        return f"{self.path.name} record {header.number}, sequence {header.sequence.hex()}, tokens {span}"

    def advance_tail(self, number: int) -> None:
        """Free all records before `number`. The keeper only, after they are in the store."""
        assert self._tail_memory is not None, "opened without writable_tail"
        assert number >= self.tail, "a tail only moves on"
        self._tail_memory[TAIL_WORD if len(self._tail_memory) > TAIL_WORD else 0] = number

    def close(self) -> None:
        """Unmap, as soon as the last view is dropped."""
        self.closed = True
        os.close(self._held)
        self._words.release()
        del self._entries, self._commits, self._ring
        if self._tail_map is not None and self._tail_memory is not None:
            _close_map(self._tail_map, self._tail_memory)
        _close_map(self._map, self._memory)


def _map_tail(place: Place) -> mmap.mmap:
    """The page with the tail word, for writing. Of a device no page can be mapped by itself: its first pages then."""
    if place.is_device:
        return place.map_head(2 * PAGE, writable=True)
    tail = Place(place.path, place.offset + PAGE, PAGE)
    return tail.map(writable=True)


class LaneRef(NamedTuple):
    """Where a frame is: a record of a lane."""

    lane: LaneReader
    header: RecordHeader


class LaneSet:
    """Readers of all lanes in a directory, which may be empty at first; lanes of dead engines included.

    A file that was replaced is a new lane; the old one stays until `scan` finds its file gone. For the keeper (`writable_tail`) it
    stays until it is drained and has no writer any more: somebody deleted the file of a lane that is in use.
    """

    def __init__(
        self, lane_dir: str | os.PathLike[str], *, writable_tail: bool = False, keys: Keyring | None = None
    ) -> None:
        self.keys = Keyring.from_environment() if keys is None else keys
        self._lane_dir = Path(lane_dir)
        self._writable_tail = writable_tail
        self._readers: dict[int, LaneReader] = {}
        self._refused: set[Path] = set()

    def scan(self) -> list[LaneReader]:
        """Look at the directory and return the readers of the lanes that are there now, by name."""
        found: dict[int, Path] = {}
        try:
            with os.scandir(self._lane_dir) as entries:
                for entry in entries:
                    if entry.name.endswith(".lane"):
                        found[entry.inode()] = Path(entry.path)
        except FileNotFoundError:
            pass
        for inode in self._readers.keys() - found.keys():
            if not self._writable_tail or self._readers[inode].is_finished():
                self._readers.pop(inode).close()
        for inode, path in found.items():
            reader = self._readers.get(inode)
            if reader is not None:
                reader.path = path  # it may have been set aside under another name
            else:
                self._add(path)
        return sorted(self._readers.values(), key=lambda reader: reader.name)

    def _add(self, path: Path) -> None:
        try:
            reader = LaneReader.open(path, writable_tail=self._writable_tail, keys=self.keys)
        except FileNotFoundError:
            return
        except OtherFormat as error:
            if path not in self._refused:
                log.warning("lane.refused", lane=path.stem, error=str(error))
            self._refused.add(path)
            return
        self._refused.discard(path)
        self._readers[reader.inode] = reader

    def __iter__(self) -> Iterator[LaneReader]:
        return iter(list(self._readers.values()))

    def close(self) -> None:
        """Close all readers."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
