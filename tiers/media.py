"""What a lane lies in: a file in shared memory, a file on a DAX or an ordinary file system, or a range of a /dev/dax* device.

A device has no files, so a lane on one is a range of it, and `<engine>.lane` in the lane directory is a link: a small file that
names device and range. Locks, names and deletion belong to that file, bytes to the device. Sizes and alignment of devices come from sysfs.
Readers only map and read: they take no lock, so a reader may be any process, or another host that maps the same memory.
Source: docs/log-format.md
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import structlog

from tiers import huge_pages
from tiers.errors import OtherFormat
from tiers.settings import LaneFlush

log = structlog.get_logger()

PAGE = 4096
LINK_MAGIC = b"CONCLINK"
MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6, 0x958458F6)  # tmpfs, ramfs, hugetlbfs (statfs(2))
SYSFS_DAX = Path("/sys/bus/dax/devices")
OWNER_OFFSET, OWNER_BYTES = 48, 16  # in a lane's header page: whose lane a range of a device is

Flush = Callable[[int, int], None]  # (first byte, bytes) of the lane -> on the medium


class _Link(msgspec.Struct, frozen=True):
    """Body of a link file, JSON after LINK_MAGIC."""

    device: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True, slots=True)
class Place:
    """`size` bytes at `offset` of the file or device `path`. `align`: what a mapping of it must be a multiple of."""

    path: Path
    offset: int
    size: int
    align: int = mmap.PAGESIZE
    is_device: bool = False

    def memory(self, *, writable: bool) -> tuple[mmap.mmap, memoryview]:
        """Map all of it, shared: a mapping and the bytes in it. A writer's pages are brought in at once (9.5 GB/s instead of 1.6)."""
        with self._opened(writable) as file:
            if not self.is_device and self.size >= huge_pages.LEAST_BYTES:
                with suppress(OSError):  # address space is scarce
                    map_, shift = huge_pages.aligned(file, self.size, self.offset, writable=writable, populate=writable)
                    return map_, memoryview(map_)[shift : shift + self.size]
            flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if writable else 0)
            map_ = self._map(file, self.size, flags, writable)
            return map_, memoryview(map_)

    def map_head(self, size: int, *, writable: bool) -> mmap.mmap:
        """Map the first `size` bytes, or as many more as the alignment asks for."""
        with self._opened(writable) as file:
            return self._map(file, min(self.size, -(-size // self.align) * self.align), mmap.MAP_SHARED, writable)

    @contextmanager
    def _opened(self, writable: bool) -> Iterator[int]:
        file = os.open(self.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            yield file
        finally:
            os.close(file)

    def _map(self, file: int, size: int, flags: int, writable: bool) -> mmap.mmap:
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(file, size, flags=flags, prot=prot, offset=self.offset)

    def head(self, size: int) -> bytes:
        """The first `size` bytes; fewer if there are fewer. A device can't be read, only mapped."""
        if not self.is_device:
            with open(self.path, "rb") as file:
                return os.pread(file.fileno(), min(size, self.size), self.offset)
        with self.map_head(size, writable=False) as head:
            return head[: min(size, self.size)]


def place_of(lane: Path) -> Place:
    """Where the bytes of the lane file `lane` are. Raises FileNotFoundError, OtherFormat (a link that can't be read)."""
    with open(lane, "rb") as file:
        start = file.read(PAGE)
        size = os.fstat(file.fileno()).st_size
    if not start.startswith(LINK_MAGIC):
        return Place(lane, 0, size)
    try:
        link = msgspec.json.decode(start[len(LINK_MAGIC) :], type=_Link)
    except msgspec.MsgspecError as error:
        raise OtherFormat("a lane's link can't be read", where=str(lane), cause=str(error)) from error
    align = link.align
    if align < PAGE or align & (align - 1) or link.offset < 0 or link.size < align or (link.offset | link.size) % align:
        raise OtherFormat("a lane's link can't be read", where=str(lane), cause="it names a range that can't be mapped")
    return Place(Path(link.device), link.offset, link.size, link.align, is_device=True)


def write_link(lane: Path, place: Place) -> None:
    """Name a range of a device `lane`. On another host: the device's name there, the same range; nothing else is needed to follow it."""
    body = LINK_MAGIC + msgspec.json.encode(_Link(str(place.path), place.offset, place.size, place.align))
    draft = lane.with_name(lane.name + ".new")
    draft.write_bytes(body)
    draft.chmod(0o600)
    draft.replace(lane)


# ---------------------------------------------------------------- ranges of a device


@dataclass(frozen=True, slots=True)
class Device:
    """A /dev/dax* device: what sysfs says of it."""

    path: Path
    size: int
    align: int

    @classmethod
    def find(cls, path: str | os.PathLike[str], sysfs: Path | None = None) -> Device:
        """Size and alignment of a device, bytes. Raises OtherFormat (sysfs doesn't know it: not a DAX device)."""
        directory = (sysfs or SYSFS_DAX) / Path(path).name
        try:
            size, align = (int((directory / name).read_text(), 0) for name in ("size", "align"))
        except (OSError, ValueError) as error:
            cause = f"no readable size and align in {directory}"
            raise OtherFormat("not a DAX device", where=str(path), cause=cause) from error
        return cls(Path(path), size, max(align, mmap.PAGESIZE))

    def place(self, offset: int, size: int) -> Place:
        """A range of it, its size rounded up to the alignment."""
        return Place(self.path, offset, -(-size // self.align) * self.align, self.align, is_device=True)

    def lanes(self, size_of: Callable[[bytes], int]) -> list[tuple[Place, bytes]]:
        """Lanes that lie on it, with their header pages. `size_of` says how large the lane with a header page is; 0: no lane."""
        found, at = [], 0
        while at + self.align <= self.size:
            head = self.place(at, self.align).head(PAGE)
            size = size_of(head)
            place = self.place(at, max(size, self.align))
            if size and at + place.size <= self.size:
                found.append((place, head))
                at += place.size
            else:
                at += self.align
        return found

    def free_place(self, size: int, size_of: Callable[[bytes], int], linked: Iterable[Place] = ()) -> Place | None:
        """The first range of at least `size` bytes in which no lane lies; None if there is none.

        linked  ranges that lanes have though their header page may be damaged
        """
        wanted, at = self.place(0, size).size, 0
        for place in sorted([*(place for place, _ in self.lanes(size_of)), *linked], key=lambda place: place.offset):
            if place.offset - at >= wanted:
                break
            at = max(at, place.offset + place.size)
        return self.place(at, size) if at + wanted <= self.size else None


@contextmanager
def allocation(lane_dir: Path) -> Iterator[None]:
    """Only one process of this installation hands out ranges of a device at a time."""
    with open(lane_dir / "device.lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def owner_of(lane_dir: Path) -> bytes:
    """What marks a lane on a device as this installation's, 16 bytes."""
    name = os.fsencode(os.path.realpath(lane_dir))
    return hashlib.blake2b(name, digest_size=OWNER_BYTES, person=b"concordia-owner").digest()


def remove(lane: Path) -> None:
    """Delete a lane. A range of a device is freed by taking its header away, so that nobody finds a lane there."""
    try:
        place = place_of(lane)
    except (FileNotFoundError, OtherFormat):
        lane.unlink(missing_ok=True)
        return
    if not place.is_device:
        lane.unlink(missing_ok=True)
        return
    with allocation(lane.parent):
        lane.unlink(
            missing_ok=True
        )  # first: a link whose range is another's soon would be worse than a range without one, which is adopted
        with suppress(FileNotFoundError), place.map_head(PAGE, writable=True) as head:
            head[:PAGE] = bytes(PAGE)


def linked(lane_dir: Path, device: Device) -> list[Place]:
    """Ranges of a device that links in a lane directory name."""
    found = (_place_or_none(lane) for lane in lane_dir.glob("*.lane"))
    return [place for place in found if place is not None and place.path == device.path]


def adopt(lane_dir: Path, device: Device, size_of: Callable[[bytes], int]) -> list[Path]:
    """Give this installation's lanes on a device their links back, when the lane directory was lost (a restart of the machine).

    They are named as lanes that were set aside: the keeper drains and removes them.
    """
    made = []
    with allocation(lane_dir):
        known = {place.offset for place in linked(lane_dir, device)}
        for place, head in device.lanes(size_of):
            mine = head[OWNER_OFFSET : OWNER_OFFSET + OWNER_BYTES] == owner_of(lane_dir)
            if mine and place.offset not in known:
                made.append(lane_dir / f"{device.path.name}~{place.offset:x}.lane")
                write_link(made[-1], place)
    return made


def _place_or_none(lane: Path) -> Place | None:
    try:
        return place_of(lane)
    except (OSError, OtherFormat):
        return None


# ---------------------------------------------------------------- flush


def flusher(place: Place, memory: memoryview, mode: LaneFlush) -> Flush | None:
    """How what is written to a mapped lane is brought onto its medium; None: it isn't, and needn't be.

    auto    through the processor's caches on DAX media (libpmem), else not: shared memory is as good as its machine
    always  also msync of a file on an ordinary file system: a system call and a disk write for each record
    never   not at all
    """
    if mode == "never":
        return None
    is_dax = place.is_device or _is_dax_file(place.path)
    if is_dax:
        persist = _libpmem_persist()
        if persist is not None:
            address = _address(memory)
            return lambda start, size: persist(address + start, size)
        if place.is_device:
            reason = "libpmem isn't installed; records survive every process, a power loss only if the platform flushes caches (eADR)"
            log.warning("lane.not_flushed", lane=str(place.path), reason=reason)
            return None
    if mode == "always" or is_dax:
        mapped: mmap.mmap = memory.obj  # type: ignore[assignment]
        shift = _address(memory) - _address(memoryview(mapped))
        return lambda start, size: _msync(mapped, shift + start, size)
    return None


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _msync(mapped: mmap.mmap, start: int, size: int) -> None:
    first = start & -mmap.PAGESIZE
    mapped.flush(first, start + size - first)


def _libpmem_persist() -> Callable[[int, int], None] | None:
    """`pmem_persist(address, bytes)` of libpmem, if it is installed."""
    for name in ("libpmem.so.1", "libpmem.so"):
        try:
            persist = ctypes.CDLL(name).pmem_persist
        except (OSError, AttributeError):
            continue
        persist.argtypes, persist.restype = (ctypes.c_void_p, ctypes.c_size_t), None
        return persist
    return None


def in_memory(lane: Path) -> bool:
    """Whether a lane of this name, there or to be made, lies in memory, and ends with the machine. False where that can't be known."""
    if lane.exists():
        try:
            if place_of(lane).is_device:
                return False
        except OtherFormat:
            pass
    result = (ctypes.c_long * 32)()
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(lane.parent), result) != 0:
        return False
    return result[0] in MEMORY_FILE_SYSTEMS


def _is_dax_file(path: Path) -> bool:
    """Whether a file is mapped without the page cache (STATX_ATTR_DAX)."""
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return False
    result = (ctypes.c_uint64 * 32)()
    if statx(-100, os.fsencode(path), 0, 0x7FF, ctypes.byref(result)) != 0:
        return False
    return bool(result[1] & 0x00200000)  # struct statx: u32 mask, u32 block size, u64 attributes
