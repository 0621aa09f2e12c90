"""Lanes as files and device ranges: made whole or not at all, found again, set aside, locked by their writer. Stage *append*, at its start.

Source: docs/log-format.md
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from pathlib import Path

import structlog

from tiers import huge_pages, lock, media
from tiers.errors import LaneBusy, OtherFormat
from tiers.lane_format import data_offset, geometry_bytes, lane_size
from tiers.lane_header import header_problem, mend, read_geometry

log = structlog.get_logger()


def usable_lane(path: Path, lane_bytes: int, record_count: int, version: int, busy_s: float) -> int | None:
    """Id of the existing lane if it can be continued, after making good what is damaged, or setting aside one that can't be."""
    if not path.exists():
        return None
    lock = lock_writer(path, busy_s)
    try:
        mended = mend(path, record_count, lane_bytes)
        if mended:
            log.warning("lane.mended", lane=path.stem, what=mended)
        geometry = read_geometry(media.place_of(path))
        problem = header_problem(path)
    except (OtherFormat, FileNotFoundError) as error:  # of a link: it can't be read, or its device isn't there
        geometry, problem = None, str(error)
    finally:
        os.close(lock)
    if geometry is not None and geometry[:2] == (record_count, lane_bytes) and geometry[3] == version:
        return geometry[2]
    if geometry is None:
        log.warning("lane.discarded", lane=path.stem, reason=problem or "a lane of a later version")
        media.remove(path)
        return None
    aside = path.with_name(f"{path.stem}~{geometry[2]:x}.lane")
    path.rename(aside)
    log.info("lane.set_aside", lane=path.stem, aside=aside.name, reason="other geometry or version")
    return None


def make_lane(path: Path, lane_bytes: int, record_count: int, version: int, device: str = "") -> int:
    """Allocate and prefault a new lane; it gets its name only when whole, so nobody sees half a lane."""
    draft = path.with_name(path.name + ".new")
    lane_id = secrets.randbits(63)
    size = data_offset(record_count) + lane_bytes
    file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        huge_pages.allocate(file, size)  # ENOSPC now rather than SIGBUS in mid-capture
        os.pwrite(file, geometry_bytes(record_count, lane_bytes, lane_id, version), 0)
        os.rename(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
    return lane_id


def make_device_lane(path: Path, lane_bytes: int, record_count: int, version: int, device: str) -> int:
    """A new lane in a free range of a DAX device, and `path` as the link to it. Raises OSError ENOSPC, OtherFormat."""
    found = media.Device.find(device)
    lane_id = secrets.randbits(63)
    start = data_offset(record_count)
    with media.allocation(path.parent):
        place = found.free_place(start + lane_bytes, lane_size, media.linked(path.parent, found))
        if place is None:
            raise OSError(errno.ENOSPC, f"no free range of {start + lane_bytes} bytes on the device", device)
        with place.map_head(start, writable=True) as head:
            head[:start] = bytes(start)  # whatever lay here before: no record of it may look committed
            head[media.OWNER_OFFSET : media.OWNER_OFFSET + media.OWNER_BYTES] = media.owner_of(path.parent)
            header = geometry_bytes(record_count, lane_bytes, lane_id, version)
            head[: len(header)] = header
        media.write_link(path, place)
    return lane_id


def lock_writer(path: Path, busy_s: float) -> int:
    """Open `path` and hold it as its writer. Raises LaneBusy if another one has it for `busy_s`."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if not lock.take(file, busy_s):
        os.close(file)
        raise LaneBusy("another process writes this lane", where=str(path))
    return file


def close_map(map_: mmap.mmap, memory: memoryview) -> None:
    try:
        memory.release()
        map_.close()
    except BufferError:
        pass  # views are still out; the mapping goes with the last of them
