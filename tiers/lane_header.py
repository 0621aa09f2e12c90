"""A lane's header page, tail and commit words: read, checked, and made good again where they were damaged.

Entries carry numbers and checksums of their own, so that what they stand in can be told from them: without that one flipped bit would
cost all that waits in the lane. By a writer before it goes on in a lane, by the keeper when it first sees one, by `concordia repair`.
Source: docs/log-format.md, "Torn tail"
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from tiers import media
from tiers.errors import OtherFormat
from tiers.lane_format import (
    ALL_BITS,
    CHECKED_BYTES,
    COMMIT,
    DIRECTORY_OFFSET,
    ENTRY_BYTES,
    GEOMETRY,
    LANE_ID_WORD,
    LANE_VERSION,
    PAGE,
    READABLE_VERSIONS,
    SEALED_VERSION,
    RecordType,
    data_offset,
    entry_view,
    geometry_bytes,
    is_whole_header,
    least_tail,
    parse_entry,
    parse_geometry,
)
from tiers.media import Place

NUMBER_OFFSET = 8  # in an entry
LOOK = 128  # records behind the end of which none may be there: a damaged page of the directory holds 32
NUMBER_LIMIT = np.uint64(1 << 62)  # no lane comes so far


def read_geometry(place: Place) -> tuple[int, int, int, int] | None:
    """(record count, ring bytes, lane id, version) of the lane at `place`; None if there is no lane that can be read."""
    geometry = parse_geometry(place.head(PAGE))
    return geometry if geometry is not None and _fits(place, *geometry[:2]) else None


def header_problem(lane: Path) -> str:
    """Why nothing of a lane can be read; "" if it can be, or is a later version's. Raises FileNotFoundError."""
    try:
        place = media.place_of(lane)
    except OtherFormat as error:
        return error.what
    if read_geometry(place) is not None or _is_of_later_version(place):
        return ""
    return "the lane's header page is damaged, or its file was cut"


def log_end(entries: np.ndarray, number: int) -> int:
    """Number after the last committed record of a lane with this directory (of `entry_view`), searched from `number`.

    Records are committed in order: where words were flipped, a whole record that is committed after them says that theirs are there.
    And a flipped word makes no record of what an older lap has left in its slot.
    """
    commits, count, start, step = entries["commit"], len(entries), number, 2 * LOOK
    while True:
        numbers = np.arange(number, number + min(step, count), dtype=np.uint64)
        found = commits[(numbers % np.uint64(count)).astype(np.intp)] == numbers + np.uint64(1)
        run = int(found.argmin()) if not found.all() else len(found)
        if run == len(found):
            number, step = number + run, 2 * step
            continue
        after = np.flatnonzero(found[run:])[::-1]
        last = next((int(at) for at in after if _is_whole(entries, number + run + int(at))), None)
        if last is not None:
            number += run + last + 1
        else:
            number += run
            if not run or len(found) - run >= LOOK:
                break
    while number > start and _is_left_over(entries, number - 1):
        number -= 1
    return number


def _is_left_over(entries: np.ndarray, number: int) -> bool:
    """Whether the slot of a record that its commit word says is there holds what was there before it, if anything."""
    entry = entries[number % len(entries)].tobytes()
    return not any(entry[:CHECKED_BYTES]) or parse_entry(entry, number - len(entries)).type != RecordType.BAD


def is_possible_tail(entries: np.ndarray, tail: int) -> bool:
    """Whether a lane with this directory (of `entry_view`) can have this tail: the record before it is the last that was freed.

    Or it is what a damaged tail is given, before which there is no record any more.
    """
    commits = entries["commit"]
    if tail:
        return bool(commits[(tail - 1) % len(commits)] == tail) or tail == oldest_record(entries)
    return bool(commits[0] <= 1 or commits[-1] < commits[0] - 1)  # the directory wasn't gone through yet


def oldest_record(entries: np.ndarray) -> int:
    """The first of the records that the directory holds one after another up to the newest. Taking a record twice changes nothing."""
    commits = entries["commit"].copy()
    slots, count = np.arange(len(commits), dtype=np.uint64), np.uint64(len(commits))
    words = commits[(commits > 0) & (commits < NUMBER_LIMIT) & ((commits - np.uint64(1)) % count == slots)]
    numbers = np.sort(words.astype(np.int64) - 1)
    if not len(numbers):
        return 0
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 2) + 1)  # one word may be flipped within a run
    runs.sort(key=len, reverse=True)
    return next((int(run[0]) for run in runs if any(_is_whole(entries, int(number)) for number in run)), 0)


def _is_whole(entries: np.ndarray, number: int) -> bool:
    """Whether the entry in its slot is this record's: a flipped commit word may say another number."""
    return parse_entry(entries[number % len(entries)].tobytes(), number).type != RecordType.BAD


def mend(lane: Path, record_count: int, lane_bytes: int) -> list[str]:
    """Make good what can be; what was done, in words. Nobody may be writing the lane. Arguments as of `mend_header`."""
    done = ["header page"] if mend_header(lane, record_count, lane_bytes) else list[str]()
    try:
        place = media.place_of(lane)
    except OtherFormat:
        return done
    geometry = read_geometry(place)
    if geometry is None:
        return done
    with place.map_head(data_offset(geometry[0]), writable=True) as head:
        return done + _mend_directory(head, geometry[0])


def mend_header(lane: Path, record_count: int, lane_bytes: int) -> bool:
    """Write a lane's header anew if it can't be read; whether that was done. A writer that lives isn't disturbed.

    record_count, lane_bytes  the geometry that is meant, if what is left of its own doesn't agree with the file's size
    Raises                    FileNotFoundError
    """
    if not header_problem(lane):
        return False
    try:
        place = media.place_of(lane)
    except OtherFormat:
        return False
    own = GEOMETRY.unpack_from(place.head(PAGE).ljust(PAGE, b"\0"))
    for count, size in ((own[3], own[4]), (record_count, -(-lane_bytes // PAGE) * PAGE)):
        if 0 < count <= place.size and 0 < size <= place.size and _fits(place, count, size):
            _write_header(place, count, size)
            return True
    return False


def _is_of_later_version(place: Place) -> bool:
    head = place.head(PAGE)
    return is_whole_header(head) and GEOMETRY.unpack_from(head)[1] not in READABLE_VERSIONS


def _fits(place: Place, record_count: int, lane_bytes: int) -> bool:
    size = data_offset(record_count) + lane_bytes
    return size <= place.size if place.is_device else size == place.size


def _write_header(place: Place, record_count: int, lane_bytes: int) -> None:
    """The version follows from the entries: payloads are sealed in one alone."""
    with place.map_head(data_offset(record_count), writable=True) as head:
        entries = [_entry(head, slot) for slot in range(record_count)]
        is_sealed = any(parse_entry(entry, _number(entry)).sealed for entry in entries)
        lane_id = int.from_bytes(head[8 * LANE_ID_WORD : 8 * LANE_ID_WORD + 8], "little")
        header = geometry_bytes(record_count, lane_bytes, lane_id, SEALED_VERSION if is_sealed else LANE_VERSION)
        head[: len(header)] = header


def _entry(head: mmap.mmap, slot: int) -> bytes:
    at = DIRECTORY_OFFSET + slot * ENTRY_BYTES
    return head[at : at + ENTRY_BYTES]


def _number(entry: bytes) -> int:
    return int.from_bytes(entry[NUMBER_OFFSET : NUMBER_OFFSET + 8], "little")


def _mend_directory(head: mmap.mmap, record_count: int) -> list[str]:
    """The tail, and commit words of records after which another one is committed: theirs were written before it."""
    done = list[str]()
    entries = np.frombuffer(head, entry_view, record_count, DIRECTORY_OFFSET).copy()
    said, copy = (int.from_bytes(head[at : at + 8], "little") for at in (PAGE, PAGE + 8))
    tail = least_tail(said, copy)
    if not is_possible_tail(entries, tail):
        tail = oldest_record(entries)
        head[PAGE : PAGE + 16] = tail.to_bytes(8, "little") + (tail ^ ALL_BITS).to_bytes(8, "little")
        done.append("tail")
    numbers = np.arange(tail, log_end(entries, tail), dtype=np.uint64)
    words = entries["commit"][(numbers % np.uint64(record_count)).astype(np.intp)]
    for number in map(int, numbers[words != numbers + np.uint64(1)]):
        if _is_whole(entries, number):
            at = DIRECTORY_OFFSET + number % record_count * ENTRY_BYTES + 8 * COMMIT
            head[at : at + 8] = (number + 1).to_bytes(8, "little")
            done.append(f"commit word of record {number}")
    return done
