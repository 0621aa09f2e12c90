"""Shared memory in huge pages: a lane's file made of them, and mapped so that the processor sees them. Stage *append*, at its start.

In pages of 4 KB a copy into a ring that is larger than the processor's caches waits for address translations: 111 us for 1 MB, in pages
of 2 MB 97 to 103 (docs/lab.md). `MADV_COLLAPSE` (Linux 6.1) makes them of pages that are there, whatever shmem_enabled says, unless that
is `deny`. Where the kernel can't, or has no memory in one piece, pages stay as they were: nothing but speed depends on it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

HUGE_BYTES = 2 << 20
LEAST_BYTES = 8 << 20  # a smaller file isn't worth the system calls
# Collapsed at once: each call waits for all processors, and finds what was just allocated in their caches.
PIECE_BYTES = 32 << 20
_MADV_COLLAPSE = 25
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value


def allocate(file: int, size: int) -> None:
    """Give an empty file `size` bytes, in huge pages as far as there are any. Raises OSError ENOSPC, before it takes any if it can tell."""
    room = os.fstatvfs(file)
    if room.f_blocks > 0 and room.f_bavail * room.f_frsize < size:
        raise OSError(errno.ENOSPC, f"{size} bytes are wanted, {room.f_bavail * room.f_frsize} are free")
    os.ftruncate(file, size)
    map_, shift = None, 0
    if size >= LEAST_BYTES:
        with suppress(OSError):  # address space is scarce
            map_, shift = aligned(file, size, 0, writable=True)
    try:
        for at in range(0, size, PIECE_BYTES):
            piece = min(PIECE_BYTES, size - at)
            os.posix_fallocate(file, at, piece)
            if map_ is not None:
                _collapse(map_, shift + at, piece)
    finally:
        if map_ is not None:
            map_.close()


def aligned(file: int, size: int, offset: int, *, writable: bool, populate: bool = False) -> tuple[mmap.mmap, int]:
    """Map `size` bytes of a file from `offset` on, shared, at an address that lets huge pages be used as such.

    Returns  a mapping, and where in it the file's bytes begin: what lies around them is address space without memory
    Raises   OSError
    """
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = mmap.mmap(-1, size + HUGE_BYTES, flags=flags, prot=prot)
    start = np.frombuffer(room, np.uint8).ctypes.data
    shift = (offset - start) % HUGE_BYTES
    shared = mmap.MAP_SHARED | _MAP_FIXED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    if libc.mmap(start + shift, size, prot, shared, file, offset) == _FAILED:
        code = ctypes.get_errno()
        room.close()
        raise OSError(code, os.strerror(code))
    return room, shift


def can_collapse(directory: Path) -> bool:
    """Whether a file in this directory can be given huge pages. Makes one, of 2 MB, to find out."""
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, HUGE_BYTES)
        map_, shift = aligned(file.fileno(), HUGE_BYTES, 0, writable=True)
        try:
            return _collapse(map_, shift, HUGE_BYTES)
        finally:
            map_.close()


def huge_bytes(path: Path) -> int:
    """How much of this process's mappings of a file is in huge pages as the processor sees them."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=5)
        if "-" in head[0] and not head[0].endswith(":"):
            inside = len(head) > 5 and head[5] == str(path)
        elif inside and head[0] in ("ShmemPmdMapped:", "FilePmdMapped:"):
            found += int(head[1]) << 10
    return found


def _collapse(map_: mmap.mmap, at: int, size: int) -> bool:
    """Whether all of it is in huge pages now, but for what is less than one at its end."""
    whole = size // HUGE_BYTES * HUGE_BYTES
    try:
        if whole:
            map_.madvise(_MADV_COLLAPSE, at, whole)
    except OSError:  # an older kernel, or no memory in one piece
        return False
    return True
