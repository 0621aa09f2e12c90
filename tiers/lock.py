"""Whether somebody holds an flock on a file, without taking part in it: asked by whoever must not outlive the holder."""

from __future__ import annotations

import os
from pathlib import Path


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
