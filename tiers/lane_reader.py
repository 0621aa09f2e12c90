"""The lane's readers: the keeper, engines, commands, other hosts. Stages *drain* and *restore*; whoever maps the memory.

They take no lock: a reader that finds no commit word has found the end of the log, and asks `intact` before and after it has used
a payload in place. Only the keeper's reader moves the tail. Source: docs/log-format.md
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import structlog
from xxhash import xxh3_64_intdigest

from tiers import media
from tiers.errors import BadRecord, OtherFormat
from tiers.keys import Keyring
from tiers.lane_files import close_map
from tiers.lane_format import (
    ALL_BITS,
    DIRECTORY_OFFSET,
    ENTRY_BYTES,
    INCARNATION_WORD,
    LANE_ID_WORD,
    PAGE,
    POINT_HEAD_BYTES,
    RESERVED_WORD,
    TAIL_COPY_WORD,
    TAIL_WORD,
    OpenPayload,
    RecordHeader,
    data_offset,
    decode_open,
    entry_view,
    least_tail,
    parse_entry,
    tails_agree,
    tokens_bytes,
)
from tiers.lane_header import header_problem, is_possible_tail, log_end, oldest_record, read_geometry
from tiers.lane_seal import LaneOpener
from tiers.lock import is_held
from tiers.media import Place
from tiers.pages import populate_read

log = structlog.get_logger()

DELETED = " (deleted)"  # added to the name of a lane whose file is gone
OPENED_BYTES = 32 << 20  # of sealed frames that a reader keeps opened


class LaneReader:
    """One lane, read without locks while its writer writes. Not thread-safe; open one a thread.

    With `writable_tail` (the keeper only) the page with the tail word is mapped for writing, and nothing else.
    """

    def __init__(
        self, path: Path, inode: int, place: Place, geometry: tuple[int, int, int, int], writable_tail: bool,
        keys: Keyring | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self._is_device = place.is_device
        self._keys = keys
        self._opener: LaneOpener | None = None
        # One record may be part of many blocks, which the drain's two threads join.
        self._opened: dict[int, tuple[RecordHeader, np.ndarray]] = {}
        self._opened_lock = threading.Lock()
        self.record_count, self.lane_bytes, self.lane_id, self.version = geometry
        self.inode = inode  # not used again for another file while this one is held open
        self.closed = False
        self._map, self._memory = place.memory(writable=False)
        self._words = self._memory.cast("Q")
        self._entries = np.frombuffer(self._memory, entry_view, self.record_count, DIRECTORY_OFFSET)
        self._commits = self._entries["commit"]
        self._ring = np.frombuffer(self._memory, np.uint8, self.lane_bytes, data_offset(self.record_count))
        self._tail_map = _map_tail(place) if writable_tail else None
        self._tail_memory = memoryview(self._tail_map).cast("Q") if self._tail_map is not None else None
        self._held = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # last: what fails before it leaves no descriptor open

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, writable_tail: bool = False, keys: Keyring | None = None
    ) -> LaneReader:
        """Map the lane at `path`. keys: to open sealed records with, default this process's. Raises OtherFormat, FileNotFoundError."""
        path = Path(path)
        inode = os.stat(path).st_ino
        place = media.place_of(path)
        geometry = read_geometry(place)
        if geometry is None:
            problem = header_problem(path)
            hint = "`concordia repair` makes it good, or sets it aside" if problem else None
            raise OtherFormat(problem or "a lane of a later version", where=str(path), hint=hint)
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
        return least_tail(self._words[TAIL_WORD], self._words[TAIL_COPY_WORD])

    @property
    def incarnation(self) -> int:
        """Which start of the engine wrote last."""
        return self._words[INCARNATION_WORD]

    def head(self, from_number: int | None = None) -> int:
        """Number after the last committed record, searched from `from_number` (the tail if None)."""
        return log_end(self._entries, self.tail if from_number is None else from_number)

    def is_committed(self, number: int) -> bool:
        """Whether the commit word of record `number` stands in its slot."""
        return bool(self._commits[number % self.record_count] == number + 1)

    @property
    def has_possible_tail(self) -> bool:
        """Whether its tail agrees with its commit words; else the tail was damaged."""
        return is_possible_tail(self._entries, self.tail)

    @property
    def tails_agree(self) -> bool:
        """Whether both words that say its tail say the same, as they do but for a moment while the keeper writes them."""
        words = self._words
        return any(tails_agree(words[TAIL_WORD], words[TAIL_COPY_WORD]) for _ in range(1000))

    def mend_tail(self) -> None:
        """Give a tail that was damaged the least value that it can have had. The keeper only."""
        assert self._tail_memory is not None, "opened without writable_tail"
        self._set_tail(self.tail if self.has_possible_tail else oldest_record(self._entries))

    def records(self, from_number: int, limit: int = 1 << 30) -> list[RecordHeader]:
        """Headers of the committed records from `from_number` on, at most `limit`; type BAD where an entry is flipped."""
        return [self._header(n) for n in range(from_number, min(self.head(from_number), from_number + limit))]

    def _header(self, number: int) -> RecordHeader:
        return parse_entry(self.raw_entry(number), number, self.lane_bytes)

    def raw_entry(self, number: int) -> bytes:
        """The bytes of record `number`'s slot."""
        at = DIRECTORY_OFFSET + (number % self.record_count) * ENTRY_BYTES
        return bytes(self._memory[at : at + ENTRY_BYTES])

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
        words = self._words
        if self._is_device and words[LANE_ID_WORD] != self.lane_id:
            return False  # its range has been given to another lane
        if header.payload_offset + self.lane_bytes >= words[RESERVED_WORD]:
            return True
        # What isn't freed no reservation can reach: `reserved` was damaged.
        return tails_agree(words[TAIL_WORD], words[TAIL_COPY_WORD]) and header.number >= words[TAIL_WORD]

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
            return decode_open(payload)
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
        self._set_tail(number)

    def _set_tail(self, number: int) -> None:
        memory = self._tail_memory
        assert memory is not None
        at = TAIL_WORD if len(memory) > TAIL_COPY_WORD else 0
        memory[at], memory[at + 1] = number, number ^ ALL_BITS

    def close(self) -> None:
        """Unmap, as soon as the last view is dropped."""
        self.closed = True
        os.close(self._held)
        self._words.release()
        del self._entries, self._commits, self._ring
        if self._tail_map is not None and self._tail_memory is not None:
            close_map(self._tail_map, self._tail_memory)
        close_map(self._map, self._memory)


def _map_tail(place: Place) -> mmap.mmap:
    """The page with the tail word, for writing. Of a device no page can be mapped by itself: its first pages then."""
    if place.is_device:
        return place.map_head(2 * PAGE, writable=True)
    tail = Place(place.path, place.offset + PAGE, PAGE)
    return tail.map_head(PAGE, writable=True)


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
        except (OtherFormat, OSError) as error:
            if not path.exists():
                return
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
