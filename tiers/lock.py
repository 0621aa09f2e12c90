"""Locks on files (flock): taken by a writer, whose predecessor may still be dying; asked about by who must not outlive the holder."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import TextIO

from tiers.errors import FileBusy

RETRY_S = 0.01


def is_held(path: str | os.PathLike[str] | int) -> bool:
    """Whether any process holds an flock on `path`, or on the file that is open as a descriptor.

    A probing flock could make the holder's own attempt fail; this can't.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return False
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == wanted:
            return True
    return False


def is_named(file: int, path: str | os.PathLike[str]) -> bool:
    """Whether an open file is still the one of this name: not deleted, moved or replaced."""
    mine = os.fstat(file)
    try:
        named = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)


def take(file: int | TextIO, timeout_s: float) -> bool:
    """Hold an exclusive flock on an open file, within `timeout_s`; False if another process keeps it.

    A killed holder's lock goes late, after the kernel has freed its memory.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(RETRY_S)


def hold(path: Path) -> int:
    """Open a file, made if need be, as the only one who writes it: a descriptor, held until it is closed. Raises FileBusy, OSError.

    Where the file system has no locks, nobody is kept away.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_mine = is_named(file, path)  # else its writer has just given it another name
    except BlockingIOError:
        is_mine = False
    except OSError:
        return file
    if not is_mine:
        os.close(file)
        raise FileBusy("another process is writing it", where=str(path))
    return file
