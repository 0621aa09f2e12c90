"""Whether a .gguf file is one and is whole: told from its header in milliseconds, before anything is imported to convert it.

Runs in the command's process. Source: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ops.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_START_BYTES = 24  # magic, version, both counts
_LEAST_TENSOR_BYTES, _LEAST_KEY_BYTES = 24, 13
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by type of a value
_DEPTH_LIMIT = _DIMENSION_LIMIT = 8
# (values, bytes) of a block by type of a tensor; of others the size isn't checked.
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84), 11: (256, 110),
    12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50),
    20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8),
    29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip


class _Cut(Exception):
    """The header goes beyond the file's end, or holds what no header holds."""


def check(file: Path) -> None:
    """Raise ModelError, which says what is wrong, unless the header is whole and the file as long as it says. Raises OSError."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        start = opened.read(_START_BYTES)
        if start[:4] != MAGIC:
            found = f"it begins with {start[:4]!r}" if start else "it is empty"
            raise ModelError(f"{file} is no GGUF file: {found}")
        if len(start) < _START_BYTES:
            raise ModelError(f"{file} is cut: it ends after {size} bytes, within its header")
        order = "<" if struct.unpack_from("<I", start, 4)[0] & 0xFFFF else ">"
        version, tensors, keys = struct.unpack_from(f"{order}IQQ", start, 4)
        if version not in VERSIONS:
            raise ModelError(f"{file} is a GGUF file of version {version}; versions 2 and 3 can be read")
        if tensors * _LEAST_TENSOR_BYTES + keys * _LEAST_KEY_BYTES > size:
            raise ModelError(
                f"{file} is cut or damaged: {size} bytes can't hold the {tensors} tensors and {keys} keys of its header"
            )
        if not tensors:
            raise ModelError(f"{file} holds no weights: its header counts no tensors")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check_length(file, _Header(data, order), tensors, keys)


def _check_length(file: Path, header: _Header, tensors: int, keys: int) -> None:
    try:
        alignment = header.pass_keys(keys)
        end = max(header.tensor_end() for _ in range(tensors))
    except _Cut:
        raise ModelError(
            f"{file} is cut or damaged: its header doesn't end within its {len(header.data)} bytes"
        ) from None
    whole = -(-header.at // alignment) * alignment + end
    if whole > len(header.data):
        raise ModelError(
            f"{file} is cut: it has {len(header.data)} bytes, and its tensors end at {whole}; fetch it again"
        )


@dataclass(slots=True)
class _Header:
    """What is read of a header, from `at` on. order: `<` or `>`."""

    data: mmap.mmap
    order: str
    at: int = _START_BYTES

    def pass_keys(self, count: int) -> int:
        """Pass over all keys and values; returns the alignment of the tensors' data, in bytes."""
        alignment = 32
        for _ in range(count):
            key, kind = self._text(), self._number("I")
            begin = self.at
            self._pass_value(kind, 0)
            if key == b"general.alignment" and kind == 4:
                alignment = struct.unpack_from(f"{self.order}I", self.data, begin)[0] or alignment
        return alignment

    def tensor_end(self) -> int:
        """Pass over one tensor's entry; returns where its data ends, counted from where the data of all begins."""
        self._text()
        dimensions = self._number("I")
        if dimensions > _DIMENSION_LIMIT:
            raise _Cut
        shape = [self._number("Q") for _ in range(dimensions)]
        kind, offset = self._number("I"), self._number("Q")
        values, size = BLOCKS.get(kind, (1, 0))
        return offset + prod(shape) // values * size

    def _pass_value(self, kind: int, depth: int) -> None:
        if kind == _STRING:
            self._text()
        elif kind == _ARRAY and depth < _DEPTH_LIMIT:
            inner, count = self._number("I"), self._number("Q")
            if inner in _SCALAR_BYTES:
                self._pass(count * _SCALAR_BYTES[inner])
                return
            for _ in range(count):
                self._pass_value(inner, depth + 1)
        elif kind in _SCALAR_BYTES:
            self._pass(_SCALAR_BYTES[kind])
        else:
            raise _Cut

    def _text(self) -> bytes:
        length = self._number("Q")
        begin = self.at
        self._pass(length)
        return self.data[begin : self.at]

    def _number(self, form: str) -> int:
        begin = self.at
        self._pass(struct.calcsize(f"={form}"))
        return int(struct.unpack_from(self.order + form, self.data, begin)[0])

    def _pass(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise _Cut
