"""The lane's writer: one engine's log in shared memory. Stage *append*, the engine's step thread.

One writer, many readers (`tiers/lane_reader.py`), no locks between them: payload first, then the entry, then the entry's commit word
(record number + 1), so that a reader that sees the word sees the record; each entry and each payload also has a checksum. A record is
freed when the keeper moves the tail past it. What lies where: `tiers/lane_format.py`; making and locking files: `tiers/lane_files.py`.
Source: docs/log-format.md
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from xxhash import xxh3_64_intdigest

from tiers import failpoints, media
from tiers.copy_sum import Memory, copy, copy_and_sum
from tiers.errors import BadRecord, LaneFull, TooLarge
from tiers.keys import Keyring
from tiers.lane_files import close_map, lock_writer, make_device_lane, make_lane, usable_lane
from tiers.lane_format import (
    CHECKED_BYTES,
    CHECKSUM_BYTES,
    COMMIT,
    DIRECTORY_OFFSET,
    ENTRY,
    ENTRY_BYTES,
    ENTRY_MAGIC,
    ENTRY_VERSION,
    INCARNATION_WORD,
    LANE_VERSION,
    PAGE,
    POINT_HEAD_BYTES,
    RESERVED_WORD,
    SEALED,
    SEALED_VERSION,
    TAIL_COPY_WORD,
    TAIL_WORD,
    OpenPayload,
    RecordHeader,
    RecordType,
    data_offset,
    encode_open,
    entry_view,
    least_tail,
    padded,
    parse_entry,
    tokens_bytes,
)
from tiers.lane_header import log_end
from tiers.lane_reader import LaneReader
from tiers.lane_seal import LaneSealer, Shape, Where
from tiers.layout import Layout, RootId, SequenceId
from tiers.settings import LaneEncryption, LaneFlush
from tiers.shares import LaneShares

log = structlog.get_logger()

_TOKEN = np.dtype("<i4")


def _put_tokens(payload: memoryview, tokens: Any, token_count: int) -> int:
    """Begin a record of rows with the ids of its tokens; returns the bytes that they take, a multiple of 64."""
    packed, size = np.asarray(tokens, _TOKEN).tobytes(), tokens_bytes(token_count)
    assert len(packed) == 4 * token_count, f"{len(packed) // 4} tokens for {token_count} rows"
    payload[:size] = packed.ljust(size, b"\0")
    return size


class Reservation:
    """Room for one ROWS record at the end of the lane. Fill `frame`, then `commit`; a new reservation drops an older one.

    frame   writable uint8, flat, `layout.frame_bytes(token_count)` long: memory of the lane itself
    offset  of the payload, monotonic; size: its bytes
    """

    __slots__ = ("frame", "namespace", "offset", "size", "token_count", "_lane", "_payload")

    def __init__(self, lane: LaneWriter, offset: int, token_count: int, size: int, namespace: str) -> None:
        place, tokens = offset % lane.lane_bytes, tokens_bytes(token_count)
        self._lane = lane
        self.size = size
        self.namespace = namespace
        self.offset = offset
        self.token_count = token_count
        self._payload = lane._payloads[place : place + size]
        self.frame = lane.ring[place + tokens : place + size]

    def commit(self, sequence: SequenceId, epoch: int, token_start: int, tokens: Any) -> int:
        """Publish the rows of [token_start, token_start + token_count) and return the record's number.

        tokens  ids of those positions, int32 array or list, token_count long
        Cost    one checksum pass over the payload (10 GB/s and more, releases the GIL), no system call
        """
        lane, end = self._lane, token_start + self.token_count
        lane._take(self)
        _put_tokens(self._payload, tokens, self.token_count)
        return lane._append(RecordType.ROWS, sequence, epoch, token_start, end, self.offset, self.size)


class PointReservation:
    """Room for one POINT record at the end of the lane. Fill `frame`, then `commit`; a new reservation drops an older one.

    frame  writable uint8, flat, `state_bytes` long, aligned to 64 bytes: memory of the lane itself
    """

    __slots__ = ("frame", "namespace", "_lane", "_offset", "_payload")

    def __init__(self, lane: LaneWriter, offset: int, size: int, namespace: str) -> None:
        self._lane = lane
        self.namespace = namespace
        self._offset = offset
        self._payload = lane._payload(offset, size)
        self.frame = self._payload[POINT_HEAD_BYTES:]

    def commit(self, sequence: SequenceId, epoch: int, position: int, kind: int) -> int:
        """Publish the state of a sequence after its first `position` tokens and return the record's number.

        kind  a PointKind
        The sequence's rows up to `position` were appended before (or `position` is its start).
        """
        lane, payload = self._lane, self._payload
        lane._take(self)
        payload[:POINT_HEAD_BYTES] = 0
        payload[:4] = np.frombuffer(int(kind).to_bytes(4, "little"), np.uint8)
        return lane._append(RecordType.POINT, sequence, epoch, position, position, self._offset, payload.size)


class SealedReservation:
    """As Reservation or PointReservation, for a tenant whose payloads are sealed. `frame` is memory of this process, not of the lane.

    token_count  0: a rollback point
    """

    __slots__ = ("frame", "namespace", "token_count", "_lane", "_offset", "_shape")

    def __init__(self, lane: LaneWriter, offset: int, shape: Shape, namespace: str, token_count: int) -> None:
        self._lane, self._offset, self._shape, self.namespace = lane, offset, shape, namespace
        self.token_count = token_count
        self.frame = np.empty(shape.large_bytes, np.uint8)

    def commit(self, sequence: SequenceId, epoch: int, position: int, what: Any) -> int:
        """Seal and publish, and return the record's number. what: ids of the tokens from `position` on, or a point's kind."""
        lane, size = self._lane, self._shape.payload_bytes
        lane._take(self)
        assert lane.sealer is not None
        if self.token_count:
            kind, small = RecordType.ROWS, np.ascontiguousarray(what, dtype="<i4").view(np.uint8)
            assert small.size == 4 * self.token_count, f"{small.size // 4} tokens for {self.token_count} rows"
        else:
            kind, small = RecordType.POINT, np.frombuffer(int(what).to_bytes(4, "little"), np.uint8)
        end = position + self.token_count
        where = Where(kind, epoch, sequence, position, end)
        lane.sealer.seal(lane._payload(self._offset, size), self._shape, self.namespace, where, small, self.frame)
        return lane._append(kind | SEALED, sequence, epoch, position, end, self._offset, size)


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
        self._map, self._memory = place.memory(writable=True)
        self._words = self._memory.cast("Q")
        self._flush = media.flusher(place, self._memory, flush)
        self._data = data_offset(record_count)  # where the ring starts
        self._payloads = self._memory[self._data : self._data + lane_bytes]
        self._ring = np.frombuffer(self._payloads, dtype=np.uint8)
        self._ring_address = self._ring.ctypes.data
        self._reserved: list[AnyReservation] = []  # in the order of their places
        self._before_reuse: Callable[[], None] | None = None
        self._words[INCARNATION_WORD] = incarnation
        self._head, self._head_bytes = self._find_head()
        # The first record that isn't freed, and where its payload begins: no lower than a ring below the head.
        self._oldest = -1, max(0, self._head_bytes - lane_bytes)
        self._reserved_bytes = self._find_reserved()

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
        lane_id = usable_lane(path, lane_bytes, record_count, version, busy_s)
        if lane_id is None:
            make = make_device_lane if device else make_lane
            lane_id = make(path, lane_bytes, record_count, version, device)
        file = lock_writer(path, busy_s)
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
        entries = np.frombuffer(self._memory, entry_view, self.record_count, DIRECTORY_OFFSET)
        number = log_end(entries, self.tail)
        last = self._entry(number - 1) if number else None
        if last is None or last.type == RecordType.BAD:
            # No entry to lean on: the newest reservation is above every payload that was ever written.
            return number, padded(self._words[RESERVED_WORD])
        return number, last.payload_offset + padded(last.payload_bytes)

    def _find_reserved(self) -> int:
        """End of the newest reservation; the furthest that it can have been, if the word that says so was damaged."""
        said, furthest = self._words[RESERVED_WORD], self._tail_bytes(self.tail) + self.lane_bytes
        return said if self._head_bytes <= said <= furthest else furthest

    def _entry(self, number: int) -> RecordHeader | None:
        at = self._entry_offset(number)
        if self._words[(at >> 3) + COMMIT] != number + 1:
            return None
        return parse_entry(self._raw_entry(number), number, self.lane_bytes)

    def _raw_entry(self, number: int) -> bytes:
        at = self._entry_offset(number)
        return bytes(self._memory[at : at + ENTRY_BYTES])

    def _entry_offset(self, number: int) -> int:
        return DIRECTORY_OFFSET + (number % self.record_count) * ENTRY_BYTES

    @property
    def head(self) -> int:
        """Number of the next record."""
        return self._head

    @property
    def tail(self) -> int:
        """First record that the keeper has not freed."""
        return least_tail(self._words[TAIL_WORD], self._words[TAIL_COPY_WORD])

    @property
    def free_bytes(self) -> int:
        """Bytes of the ring that no unfreed record uses. A payload is contiguous, so a little less can be had in one piece."""
        return self.lane_bytes - (self._head_bytes - self._tail_bytes(self.tail))

    @property
    def ring(self) -> np.ndarray:
        """The memory of all payloads (uint8): for a device that writes frames in place to register."""
        return self._ring

    def _tail_bytes(self, tail: int) -> int:
        """Where the payload of the first record begins that isn't freed: what lies before it may be written over."""
        if tail >= self._head:
            return self._head_bytes
        if tail != self._oldest[0]:
            # Not freed, so this writer has not reused its slot. While it is damaged, no more than what it was known to be.
            header = parse_entry(self._raw_entry(tail), tail, self.lane_bytes)
            if header.type != RecordType.BAD:
                self._oldest = tail, header.payload_offset
        return self._oldest[1]

    def reserve_rows(self, layout: Layout, token_count: int, namespace: str = "") -> Reservation | SealedReservation:
        """Room for the rows of `token_count` tokens. Raises LaneFull (retry after a drain), TooLarge (never fits).

        namespace  whose they are: for `shares`, and for whom they are sealed
        """
        if self._is_sealed(namespace):
            return self._reserve_sealed(4 * token_count, layout.frame_bytes(token_count), namespace, token_count)
        size = tokens_bytes(token_count) + layout.frame_bytes(token_count)
        reservation = Reservation(self, self._reserve(size, namespace), token_count, size, namespace)
        self._reserved = [reservation]
        return reservation

    def append_rows(
        self, layout: Layout, sequence: SequenceId, epoch: int, token_start: int, tokens: Any,
        pieces: Sequence[Memory], namespace: str = "",
    ) -> int:  # fmt: skip
        """Put the rows of `tokens` at the end of the lane, and return the record's number. Raises as `reserve_rows`.

        pieces  what the frame consists of, one behind another, as `Arena.host_rows` gives it and `copy_and_sum` takes it
        Cost    one pass that copies and sums, no system call
        """
        count = len(tokens)
        if self._is_sealed(namespace):
            reservation = self.reserve_rows(layout, count, namespace)
            copy(pieces, reservation.frame)
            return reservation.commit(sequence, epoch, token_start, tokens)
        size = tokens_bytes(count) + layout.frame_bytes(count)
        offset = self._reserve(size, namespace)
        place = offset % self.lane_bytes
        start = _put_tokens(self._payloads[place : place + size], tokens, count)
        payload = Memory(self._ring[place : place + size], self._ring_address + place)
        checksum = copy_and_sum(pieces, payload, start)
        return self._append(RecordType.ROWS, sequence, epoch, token_start, token_start + count, offset, size, checksum)

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
            size = tokens_bytes(token_count) + layout.frame_bytes(token_count)
            try:
                offset = self._room(size, namespace, self._head + len(made), end, taken[namespace])
            except (LaneFull, TooLarge):
                break
            made.append(Reservation(self, offset, token_count, size, namespace))
            taken[namespace] += padded(size)
            end = offset + padded(size)
        if made:
            self._reserved, self._before_reuse = list(made), before_reuse
        return made

    def holds(self, reservation: AnyReservation) -> bool:
        """Whether it can still be committed."""
        return reservation in self._reserved  # none is equal to another

    def reserve_point(self, state_bytes: int, namespace: str = "") -> PointReservation | SealedReservation:
        """Room for one rollback point's state. As `reserve_rows`."""
        if self._is_sealed(namespace):
            return self._reserve_sealed(4, state_bytes, namespace, 0)
        size = POINT_HEAD_BYTES + state_bytes
        reservation = PointReservation(self, self._reserve(size, namespace), size, namespace)
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
        body = encode_open(said)
        if self._is_sealed(namespace):
            assert self.sealer is not None
            name, where = namespace.encode(), Where(RecordType.OPEN, epoch, sequence, token_start, token_start)
            shape = Shape.of(len(name), len(body), None)
            size = shape.payload_bytes
            offset = self._reserve(size, namespace)
            self.sealer.seal(self._payload(offset, size), shape, namespace, where, body, name=name)
            kind = RecordType.OPEN | SEALED
            return self._append(kind, sequence, epoch, token_start, token_start, offset, size)
        offset = self._reserve(len(body), namespace)
        self._payload(offset, len(body))[:] = np.frombuffer(body, dtype=np.uint8)
        return self._append(RecordType.OPEN, sequence, epoch, token_start, token_start, offset, len(body))

    def _is_sealed(self, namespace: str) -> bool:
        return self.sealer is not None and self.sealer.seals(namespace)

    def _reserve_sealed(
        self, small_bytes: int, large_bytes: int, namespace: str, token_count: int
    ) -> SealedReservation:
        shape = Shape.of(0, small_bytes, large_bytes)
        offset = self._reserve(shape.payload_bytes, namespace)
        reservation = SealedReservation(self, offset, shape, namespace, token_count)
        self._reserved = [reservation]
        return reservation

    def append_close(self, sequence: SequenceId, epoch: int, token_end: int) -> int:
        """End a sequence: no more rows follow, and its truth ends at token_end. Raises LaneFull."""
        return self._append(RecordType.CLOSE, sequence, epoch, token_end, token_end, self._reserve(0), 0)

    def _reserve(self, payload_bytes: int, namespace: str = "") -> int:
        """Room for the next record, as `_room`; what was reserved before is dropped."""
        self._let_go()
        self._reserved_for = namespace
        return self._room(payload_bytes, namespace, self._head, self._head_bytes)

    def _payload(self, offset: int, size: int) -> np.ndarray:
        place = offset % self.lane_bytes
        return self._ring[place : place + size]

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

    def _room(self, payload_bytes: int, namespace: str, number: int, offset: int, reserved_bytes: int = 0) -> int:
        """Offset of record `number`'s payload, at or after `offset`; `reserved_bytes` are its tenant's that are reserved before it."""
        size, ring, words = padded(payload_bytes), self.lane_bytes, self._words
        if size > ring:
            raise TooLarge(f"a record of {payload_bytes} bytes", where=str(self.path), cause=f"the ring has {ring}")
        place = offset % ring
        if place + size > ring:  # a payload is contiguous: skip to the start of the ring
            offset += ring - place
        tail = self.tail
        if offset + size - self._tail_bytes(tail) > ring or number - tail >= self.record_count - 1:
            raise LaneFull(
                f"no room for {payload_bytes} bytes", where=str(self.path), cause=f"{self._head - tail} records wait"
            )
        self.shares.check(namespace, size, tail, reserved_bytes)
        # Whoever reads what this reservation overwrites must be able to tell, and a stale lap's entry must not be taken for ours.
        words[RESERVED_WORD] = self._reserved_bytes = max(offset + size, self._reserved_bytes)
        words[(self._entry_offset(number) >> 3) + COMMIT] = 0
        failpoints.reach("append.payload.before")
        return offset

    def _append(
        self, kind: int, sequence: SequenceId, epoch: int, start: int, end: int, offset: int, size: int,
        checksum: int | None = None,
    ) -> int:  # fmt: skip
        """Let readers see a record whose payload stands; returns its number. One that they can't see (a flush failed) was never there."""
        failpoints.reach("append.payload.after")
        number, place = self._head, offset % self.lane_bytes
        version = SEALED_VERSION if kind & SEALED else ENTRY_VERSION
        if checksum is None:
            checksum = xxh3_64_intdigest(self._payloads[place : place + size])
        body = ENTRY.pack(ENTRY_MAGIC, version, kind, number, epoch, sequence, start, end, offset, size, checksum)
        try:
            self._publish(number, body, place, size)
        except BaseException:
            self._let_go()
            if self._is_published(number):
                self._enter(number, offset, size)
            raise
        self._enter(number, offset, size)
        return number

    def _publish(self, number: int, body: bytes, place: int, size: int) -> None:
        at, flush = self._entry_offset(number), self._flush
        self._memory[at : at + CHECKED_BYTES] = body + xxh3_64_intdigest(body).to_bytes(CHECKSUM_BYTES, "little")
        if flush is not None and size:
            flush(self._data + place, size)
        failpoints.reach("append.commit_word.before")
        # Commit word last, one aligned 8-byte store: a reader that sees it sees the record.
        self._words[(at >> 3) + COMMIT] = number + 1
        if flush is not None:
            flush(at, ENTRY_BYTES)
        failpoints.reach("append.commit_word.after")

    def _enter(self, number: int, offset: int, size: int) -> None:
        """The record has its number and its room."""
        self._head, self._head_bytes = number + 1, offset + padded(size)
        self.shares.charge(number, self._reserved_for, padded(size))

    def _is_published(self, number: int) -> bool:
        return self._words[(self._entry_offset(number) >> 3) + COMMIT] == number + 1

    def is_gone(self) -> bool:
        """Whether the file was deleted, moved or replaced: what is appended is lost when keeper and writer are. A system call or two."""
        mine = os.fstat(self._file)
        try:
            named = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        return (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        """Let the lane go. Views handed out by reservations keep the mapping alive until they are dropped."""
        self._let_go()
        fcntl.flock(self._file, fcntl.LOCK_UN)  # by hand: the mapping may hold a duplicate of the descriptor
        os.close(self._file)
        self._words.release()
        del self._ring, self._payloads
        close_map(self._map, self._memory)
