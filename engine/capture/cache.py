"""Compiled handlers on disk: one file by source, architecture and compiler. Written whole or not at all; a torn one is compiled again.

The file is the machine code and, behind it, what the assembler said of registers and memory (JSON), its length, and a checksum.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from engine.capture.nvrtc import Machine, Usage
from engine.capture.source import HandlerSource

_TAIL = struct.Struct("<8sQQ")  # magic, bytes of JSON, checksum of all before
_MAGIC = b"CONCHAND"


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code, and what each of its kernels takes."""

    image: bytes
    usage: dict[str, Usage]


@dataclass(slots=True)
class HandlerCache:
    """Handlers under one directory, which is made when first needed. Any process and thread may share it."""

    directory: Path
    hits: int = 0
    misses: int = 0

    def get(self, source: HandlerSource, target: str, compile_it: Callable[[HandlerSource], Machine]) -> Compiled:
        """The compiled handler, from disk if it is there. `target` names architecture and compiler (`sm_90-nvrtc12.9`)."""
        path = self.directory / f"{source.name}-{source.digest}-{target}.handler"
        found = _read(path)
        if found is not None:
            self.hits += 1
            return found
        self.misses += 1
        machine = compile_it(source)
        compiled = Compiled(machine.image, machine.usage())
        try:
            _write(path, compiled)
        except OSError:
            # A cache that cannot be written (full or read-only disk) costs a second at the next start, nothing else.
            pass
        return compiled


def _read(path: Path) -> Compiled | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < _TAIL.size:
        return None
    magic, note_bytes, checksum = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    body = data[: -_TAIL.size]
    if magic != _MAGIC or note_bytes > len(body) or xxh3_64_intdigest(body) != checksum:
        return None
    note = json.loads(body[len(body) - note_bytes :])
    return Compiled(body[: len(body) - note_bytes], {name: Usage(**usage) for name, usage in note.items()})


def _write(path: Path, compiled: Compiled) -> None:
    note = json.dumps({name: asdict(usage) for name, usage in compiled.usage.items()}).encode()
    body = compiled.image + note
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(body + _TAIL.pack(_MAGIC, len(note), xxh3_64_intdigest(body)))
    partial.replace(path)
