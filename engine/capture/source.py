"""Source text of a handler, specialised for one region: its constants, then the files under `kernels/`. Pure.

A handler is one function, `operate(words, crew)`, and four ways in: `run` (words by value, for a stream), `run_indirect` (words
in mapped memory, for a captured graph), `as_operator` (the executor calls it through its table) and `operator_address`.
`operate` has no shared memory of its own: called by the executor, it would have the addresses of the executor's.
The text is self-contained, so its digest names it in the cache.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from math import gcd
from pathlib import Path

KERNELS = Path(__file__).parent / "kernels"
WORD_COUNT = 12
# Operators of the executor stay under what `room_for_operators` (kernels/executor.cu) reserves; kernels have bounds of their own.
OPTIONS = ("--maxrregcount=96",)
PAGE_QUANTUM = 512  # a warp's lanes times 16 bytes
THREADS = 256  # of a block
SCAN_RESIDENTS = 2
_INCLUDE = re.compile(r'^#include "([a-z_]+\.cuh)"$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class HandlerSource:
    """A handler to be compiled: `text` is CUDA C++, `threads` the block size and `residents` the blocks a multiprocessor that it is for."""

    name: str
    text: str
    threads: int = 256
    residents: int = 3

    @property
    def digest(self) -> str:
        """Names this text: 16 hex digits."""
        return hashlib.blake2b(self.text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class PageShape:
    """What the page handlers of a region are specialised for.

    page_bytes    a multiple of 512
    region_bytes  any length; the last page may be short
    alignment     largest power of two up to 16 that divides the region's address
    bitmap        changed pages are marked by whoever writes them, nothing is hashed to find them
    batch         pages that one warp works on at a time, 1 to 32 (32 with a bitmap)
    hash_bits     64; fewer only to force collisions in tests
    in_flight     16-byte loads that a lane has under way at once
    residents     blocks that a multiprocessor is to hold, which bounds the registers; `make gpu` measures both
    """

    page_bytes: int
    region_bytes: int
    alignment: int = 16
    bitmap: bool = False
    batch: int = 8
    hash_bits: int = 64
    in_flight: int = 8
    residents: int = SCAN_RESIDENTS
    threads: int = THREADS

    def __post_init__(self) -> None:
        if self.page_bytes <= 0 or self.page_bytes % PAGE_QUANTUM:
            raise ValueError(f"page_bytes={self.page_bytes}: pages are multiples of {PAGE_QUANTUM} bytes")
        if self.region_bytes <= 0 or self.page_count >= 1 << 32:
            raise ValueError(
                f"a region of {self.region_bytes} bytes has {self.page_count} pages; 1 to 2**32 - 1 can be had"
            )
        if not 1 <= self.batch <= 32 or (self.bitmap and self.batch != 32):
            raise ValueError(f"batch={self.batch}: 1 to 32, and 32 with a bitmap")

    @property
    def page_count(self) -> int:
        """Pages, the short one at the end too."""
        return -(-self.region_bytes // self.page_bytes)

    @property
    def hash_mask(self) -> int:
        """Bits of the hash that count."""
        return (1 << self.hash_bits) - 1


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One group of equally shaped planes of an arena, in bytes. Row r of plane p of slot s: s*slot_stride + p*plane_stride + r*row_bytes.

    ring_rows  0: the row of position x is x (kept for ever); else x % ring_rows (a window)
    alignment  of the group's address
    """

    planes: int
    row_bytes: int
    slot_stride: int
    plane_stride: int
    ring_rows: int = 0
    alignment: int = 16

    @property
    def access(self) -> int:
        """Bytes of one access: the largest power of two up to 16 that divides every distance."""
        return gcd(16, self.row_bytes, self.slot_stride, self.plane_stride, self.alignment)


@dataclass(frozen=True, slots=True)
class RowShape:
    """What the row handlers of an arena are specialised for."""

    groups: tuple[RowGroup, ...]
    threads: int = 256

    @property
    def token_bytes(self) -> int:
        """Bytes that one token has in a frame."""
        return sum(group.planes * group.row_bytes for group in self.groups)

    def accesses(self) -> list[int]:
        """Access of each group; what lies behind a group with odd rows in a frame is no better aligned than it."""
        sizes, worst = [], 16
        for group in self.groups:
            worst = min(worst, group.access)
            sizes.append(worst)
            worst = gcd(worst, group.planes * group.row_bytes)
        return sizes


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of recurrent state: `byte_count` of each slot, slots `slot_stride` bytes apart."""

    byte_count: int
    slot_stride: int
    alignment: int = 16

    @property
    def access(self) -> int:
        """Bytes of one access."""
        return gcd(16, self.byte_count, self.slot_stride, self.alignment)


@dataclass(frozen=True, slots=True)
class StateShape:
    """What the snapshotter of a model is specialised for: all parts, in the order of the buffer."""

    parts: tuple[StatePart, ...]
    threads: int = 256

    @property
    def byte_count(self) -> int:
        """Bytes of one snapshot."""
        return sum(part.byte_count for part in self.parts)

    def accesses(self) -> list[int]:
        """Access of each part, given where it comes to lie in the buffer."""
        sizes, at = [], 0
        for part in self.parts:
            sizes.append(gcd(part.access, at))
            at += part.byte_count
        return sizes


def page_scanner(shape: PageShape) -> HandlerSource:
    """Finds and gathers changed pages."""
    return _handler("page_scan", _page_constants(shape), ["pages.cuh", "page_scan.cuh"], shape.threads, shape.residents)


def page_applier(shape: PageShape) -> HandlerSource:
    """Verifies pages and puts them back through a block table."""
    return _handler(
        "page_apply", _page_constants(shape), ["pages.cuh", "page_apply.cuh"], shape.threads, shape.residents
    )


def page_marker(shape: PageShape) -> HandlerSource:
    """Sets bits of the bitmap: for allocators that know on the host which pages they handed out."""
    return _handler("page_mark", _page_constants(shape), ["page_mark.cuh"], shape.threads, shape.residents)


def row_gatherer(shape: RowShape) -> HandlerSource:
    """Rows of token ranges -> frames."""
    return _handler("rows_gather", _row_constants(shape, scatter=False), ["rows.cuh"], shape.threads)


def row_scatterer(shape: RowShape) -> HandlerSource:
    """Frames -> rows of token ranges."""
    return _handler("rows_scatter", _row_constants(shape, scatter=True), ["rows.cuh"], shape.threads)


def snapshotter(shape: StateShape) -> HandlerSource:
    """One slot's recurrent state -> a buffer."""
    return _handler("snapshot", _state_constants(shape, restore=False), ["snapshot.cuh"], shape.threads)


def snapshot_restorer(shape: StateShape) -> HandlerSource:
    """A buffer -> one slot's recurrent state."""
    return _handler("snapshot_restore", _state_constants(shape, restore=True), ["snapshot.cuh"], shape.threads)


def executor(threads: int = 256) -> HandlerSource:
    """The persistent executor and the kernel that posts a task from a stream."""
    text = f"constexpr unsigned THREADS = {threads};\n" + _inlined("executor.cu")
    return HandlerSource("executor", text, threads)


def _page_constants(shape: PageShape) -> list[str]:
    return [
        _constant("u64", "PAGE_BYTES", shape.page_bytes),
        _constant("u64", "REGION_BYTES", shape.region_bytes),
        _constant("u64", "PAGE_COUNT", shape.page_count),
        _constant("u32", "ACCESS", shape.alignment),
        _constant("u64", "HASH_MASK", shape.hash_mask),
        _constant("u32", "BATCH", shape.batch),
        _constant("bool", "BITMAP", shape.bitmap),
        _constant("u32", "MOST_IN_FLIGHT", shape.in_flight),
    ]


def _row_constants(shape: RowShape, *, scatter: bool) -> list[str]:
    lines = [
        _constant("u32", "GROUP_COUNT", len(shape.groups)),
        _constant("bool", "SCATTER", scatter),
        "template <u32 G> struct Group;",
    ]
    for index, (group, access) in enumerate(zip(shape.groups, shape.accesses(), strict=True)):
        members = {
            "planes": group.planes,
            "row_bytes": group.row_bytes,
            "slot_stride": group.slot_stride,
            "plane_stride": group.plane_stride,
            "ring_rows": group.ring_rows,
        }
        lines.append(_struct(f"Group<{index}>", members, access))
    return lines


def _state_constants(shape: StateShape, *, restore: bool) -> list[str]:
    lines = [
        _constant("u32", "PART_COUNT", len(shape.parts)),
        _constant("bool", "RESTORE", restore),
        "template <u32 P> struct Part;",
    ]
    for index, (part, access) in enumerate(zip(shape.parts, shape.accesses(), strict=True)):
        lines.append(_struct(f"Part<{index}>", {"bytes": part.byte_count, "slot_stride": part.slot_stride}, access))
    return lines


def _constant(kind: str, name: str, value: int) -> str:
    suffix = "" if kind == "bool" else "u" if kind == "u32" else "ull"
    return f"constexpr {kind} {name} = {str(value).lower()}{suffix};"


def _struct(name: str, members: dict[str, int], access: int) -> str:
    body = " ".join(f"static {_constant('u64', key, value)}" for key, value in members.items())
    return f"template <> struct {name} {{ {body} static {_constant('u32', 'access', access)} }};"


def _handler(name: str, constants: list[str], files: list[str], threads: int, residents: int = 3) -> HandlerSource:
    parameters = ", ".join(f"u64 w{i}" for i in range(WORD_COUNT))
    values = ", ".join(f"w{i}" for i in range(WORD_COUNT))
    bounds = f"__launch_bounds__({threads}, {residents})"
    text = "\n".join(
        [
            _inlined("common.cuh"),
            "namespace handler {",
            *constants,
            *(_inlined(file) for file in files),
            "}",
            f'extern "C" __global__ void {bounds} run({parameters}) {{',
            f"    const u64 words[WORD_COUNT] = {{{values}}};",
            "    handler::operate(words, grid_crew());",
            "}",
            # One body for the two ways that do not mind a call.
            "__device__ __noinline__ void call(const u64* words, Crew crew) { handler::operate(words, crew); }",
            f'extern "C" __global__ void {bounds} run_indirect(const u64* task) {{',
            # The words lie in the host's memory: read once a block, not once a thread.
            "    __shared__ u64 words[WORD_COUNT];",
            "    if (threadIdx.x < WORD_COUNT) words[threadIdx.x] = load_relaxed(task + threadIdx.x);",
            "    __syncthreads();",
            "    call(words, grid_crew());",
            "}",
            "__device__ void as_operator(const u64* words) { call(words, block_crew()); }",
            'extern "C" __global__ void operator_address(u64* out) { *out = reinterpret_cast<u64>(&as_operator); }',
            "",
        ]
    )
    return HandlerSource(name, text, threads, residents)


@cache
def _inlined(file: str) -> str:
    """A file of `kernels/` with what it includes from there put in its place."""
    text = (KERNELS / file).read_text().replace("#pragma once\n", "")
    return _INCLUDE.sub(lambda match: _inlined(match.group(1)), text)
