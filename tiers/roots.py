"""LMDB's two root pages, the first of its file: copies of a store in which one that is damaged is made good. For `concordia repair`.

A root page (LMDB: meta page) has constants, the roots of two trees and the number of its commit; no checksum. Each commit writes the
older of the two, so that the other one still leads to the state before it. Commands only. Source: lmdb's mdb.c, MDB_meta.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

HEADER = struct.Struct("<QHHHH")  # page number, unused, flags, lower and upper bound (unused in a root page)
CONSTANTS = struct.Struct("<II")  # magic, version
PAGE_BYTES_OFFSET = 40  # in the first tree's record, whose place for a key size has the page size
FLAG_ROOT = 0x08
MAGIC, VERSION = 0xBEEFC0DE, 1
ROOT_BYTES = 152  # header and root; what follows in the page says nothing
PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)

AS_IT_WAS = "the page that could not be read, its constants written anew"
OTHER = "the other of its two roots; what its last commit has stored may be missing"


def mended_copies(data: Path, directory: Path) -> Iterator[tuple[str, Path]]:
    """Copies of `data` in `directory`, one at a time, with other root pages: (which root is in use then, directory).

    The one that loses nothing comes first: constants written anew over what is in the pages. Then each page in the place of the other.
    The file itself isn't written to. Raises OSError (no room)
    """
    size = data.stat().st_size
    page_bytes = _page_bytes(data)
    if size < 2 * page_bytes:
        return
    with open(data, "rb") as file:
        pages = [file.read(page_bytes) for _ in range(2)]
    seen = [pages]
    mended = [_mended(page, number, page_bytes) for number, page in enumerate(pages)]
    choices = [
        (AS_IT_WAS, mended),
        *((OTHER, [_mended(page, n, page_bytes) for n in range(2)]) for page in pages[::-1]),
    ]
    copied = False
    for what, choice in choices:
        if choice in seen:
            continue
        seen.append(choice)
        if not copied:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(mode=0o700)
            shutil.copyfile(data, directory / "data.mdb")
            copied = True
        with open(directory / "data.mdb", "r+b") as file:
            file.write(b"".join(choice))
        yield what, directory


def _mended(page: bytes, number: int, page_bytes: int) -> bytes:
    """A root page with the constants of the place `number`."""
    made = bytearray(page)
    HEADER.pack_into(made, 0, number, 0, FLAG_ROOT, 0, 0)
    CONSTANTS.pack_into(made, HEADER.size, MAGIC, VERSION)
    struct.pack_into("<I", made, PAGE_BYTES_OFFSET, page_bytes)
    return bytes(made[:ROOT_BYTES]).ljust(page_bytes, b"\0")


def _page_bytes(data: Path) -> int:
    """The page size that the file was made with: where its second root page is found, if it is; else this machine's."""
    with open(data, "rb") as file:
        head = file.read(2 * PAGE_SIZES[-1])
    magic = CONSTANTS.pack(MAGIC, VERSION)
    found = [size for size in PAGE_SIZES if head[size + HEADER.size : size + HEADER.size + len(magic)] == magic]
    return found[0] if found else os.sysconf("SC_PAGE_SIZE")
