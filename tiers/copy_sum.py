"""One pass that copies a record's rows into the lane and makes their checksum. Stage *append*, the engine's step thread.

Copied first and summed afterwards, every byte is read twice, and the lane's fill caches that nobody reads it from. Here a kernel loads
64 bytes, stores them past the caches and adds them to the sum: the XXH3-64 that xxhash makes of the same bytes. The kernel is LLVM's
text over vectors of no particular machine; llvmlite makes code for this processor of it, once a process, and what is forked has it too.
Runs that aren't multiples of 64 bytes, and short records, are copied by numpy and summed by xxhash.
Source: the specification of XXH3 (xxhash.com); figures: docs/lab.md
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from tiers import machine_code
from tiers.machine_code import Kernel

STRIPE_BYTES = 64
LEAST_BYTES = 256  # XXH3 takes up to 240 bytes in other ways
_PIECE = Struct("5q")  # address, runs, bytes from one run to the next, stripes of a run, how many bytes ahead to fetch
SHORT_RUN = 32  # stripes: of shorter runs several are fetched ahead

# What XXH3 begins with, and the secret of its unseeded form.
_START = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


class Memory(NamedTuple):
    """What is copied, or to where: an array of any dtype, of several dimensions as a rule (runs, ...), of which each run is contiguous.

    address  of its first byte. To ask numpy for it costs 25 us where a model's weights have just gone through the caches
    """

    array: np.ndarray
    address: int

    @classmethod
    def of(cls, array: np.ndarray) -> Memory:
        """Any array; one whose runs are not contiguous is copied."""
        runs = array if array.ndim > 1 else array[None]
        if not runs[0].flags.c_contiguous:
            runs = np.ascontiguousarray(runs)
        return cls(runs, runs.ctypes.data)


def copy_and_sum(pieces: Sequence[Memory], target: Memory, start: int = 0) -> int:
    """Copy memory, one piece behind another, into `target`, and return the XXH3-64 of all that lies there then.

    pieces  together as large as `target` from byte `start` on; what is before it is there already
    target  uint8, flat, contiguous. In order before whatever this thread stores afterwards
    Cost    one pass by one call that releases the GIL, if runs are multiples of 64 bytes and `target` is aligned to 64
    """
    memory, to = target
    size = memory.size
    table = _table(pieces, target, start) if size >= LEAST_BYTES and to % STRIPE_BYTES == 0 else b""
    kernel = _kernel().call if table else None
    if kernel is None:
        copy(pieces, memory[start:])
        return xxh3_64_intdigest(memory.data)
    return kernel(to, table, size)


def copy(pieces: Sequence[Memory], target: np.ndarray) -> None:
    """Copy memory, one piece behind another, into `target` (uint8, flat), which it fills."""
    at = 0
    for array, _ in pieces:
        part = target[at : at + array.nbytes]
        np.copyto(part.view(array.dtype).reshape(array.shape), array)
        at += array.nbytes
    assert at == target.size, "pieces don't fill the target"


def make_ready() -> None:
    """Make the kernel, if this process hasn't got it: 0.06 to 0.1 s, most of it the import of LLVM, and 8 MB that aren't the library's."""
    _kernel()


def without() -> str:
    """Why records are copied first and summed afterwards; "" where the kernel does both."""
    return _kernel().missing


def _table(pieces: Sequence[Memory], target: Memory, start: int) -> bytes:
    """What the kernel is told of the pieces; empty if there is one that it can't take. What is there already is copied onto itself."""
    left, rest = divmod(target.array.size - start, STRIPE_BYTES)
    if rest or start % STRIPE_BYTES:
        return b""
    table = _PIECE.pack(target.address, 1, 0, start // STRIPE_BYTES, 0) if start else b""
    for array, address in pieces:
        runs = len(array)
        stripes, rest = divmod(array.nbytes, runs * STRIPE_BYTES)
        if rest or not stripes:
            return b""
        step = array.strides[0] if runs > 1 else 0
        table += _PIECE.pack(address, runs, step, stripes, step if stripes > SHORT_RUN else 4 * step)
        left -= runs * stripes
    assert not left, "pieces don't fill the target"
    return table


_Call = Callable[[int, bytes, int], int]  # address of the target, table of the pieces, bytes -> sum


@cache
def _kernel() -> Kernel[_Call]:
    return machine_code.checked(
        _compile,
        _is_right,
        "a wrong sum",
        event="append.no_kernel",
        hint="records are copied, then summed: slower, and as good",
    )


def _is_right(call: _Call) -> bool:
    """Whether it copies, and sums as xxhash does."""
    source = Memory.of(np.arange(1 << 8, dtype=np.uint64))
    room = Memory.of(np.zeros((1 << 11) + STRIPE_BYTES, np.uint8))
    skip, size = -room.address % STRIPE_BYTES, source.array.nbytes
    target = Memory(room.array[0, skip : skip + size], room.address + skip)
    summed = call(target.address, _table([source], target, 0), size)
    return summed == xxh3_64_intdigest(source.array.data) and target.array.tobytes() == source.array.tobytes()


def _compile() -> _Call:
    made: _Call = machine_code.function(
        _TEXT, "copy_and_sum", ctypes.c_uint64, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64
    )
    return made


_SECRET_TEXT = "".join(f"\\{byte:02x}" for byte in _SECRET)
_FENCE = "call void @llvm.x86.sse.sfence()" if platform.machine() == "x86_64" else "fence seq_cst"
_START_TEXT = ", ".join(f"i64 {word}" for word in _START)

# Stripes are mixed into eight sums with a key that moves 8 bytes a stripe; after 16 the sums are scrambled, before the next one. The
# last stripe of all has a key of its own. Runs that come are fetched meanwhile: a sixth less time at 4 to 500 rows a run. The fence: what
# is stored past the caches is otherwise in no order with the commit word.
_TEXT = f"""
@secret = private constant [192 x i8] c"{_SECRET_TEXT}"

define i64 @copy_and_sum(ptr %target, ptr %table, i64 %size) {{
entry:
  %end = getelementptr i8, ptr %target, i64 %size
  %last = getelementptr i8, ptr %end, i64 -64
  %scrambler = load <8 x i64>, ptr getelementptr (i8, ptr @secret, i64 128), align 1
  br label %piece

piece:
  %entry.p = phi ptr [ %table, %entry ], [ %entry.next, %next_piece ]
  %to.p = phi ptr [ %target, %entry ], [ %to.next, %next_piece ]
  %key.p = phi i64 [ 0, %entry ], [ %key.next, %next_piece ]
  %sums.p = phi <8 x i64> [ <{_START_TEXT}>, %entry ], [ %sums.next, %next_piece ]
  %from.p = load ptr, ptr %entry.p, align 1
  %runs.at = getelementptr i64, ptr %entry.p, i64 1
  %runs.p = load i64, ptr %runs.at, align 1
  %step.at = getelementptr i64, ptr %entry.p, i64 2
  %step = load i64, ptr %step.at, align 1
  %stripes.at = getelementptr i64, ptr %entry.p, i64 3
  %stripes = load i64, ptr %stripes.at, align 1
  %ahead.at = getelementptr i64, ptr %entry.p, i64 4
  %ahead.by = load i64, ptr %ahead.at, align 1
  br label %run

run:
  %from.r = phi ptr [ %from.p, %piece ], [ %from.run, %next_run ]
  %runs = phi i64 [ %runs.p, %piece ], [ %runs.left, %next_run ]
  %to.r = phi ptr [ %to.p, %piece ], [ %to.next, %next_run ]
  %key.r = phi i64 [ %key.p, %piece ], [ %key.next, %next_run ]
  %sums.r = phi <8 x i64> [ %sums.p, %piece ], [ %sums.next, %next_run ]
  br label %stripe

stripe:
  %from = phi ptr [ %from.r, %run ], [ %from.next, %mix ]
  %left = phi i64 [ %stripes, %run ], [ %left.next, %mix ]
  %to = phi ptr [ %to.r, %run ], [ %to.next, %mix ]
  %key.s = phi i64 [ %key.r, %run ], [ %key.next, %mix ]
  %sums.s = phi <8 x i64> [ %sums.r, %run ], [ %sums.next, %mix ]
  %is_full = icmp eq i64 %key.s, 128
  br i1 %is_full, label %scramble, label %mix

scramble:
  %shifted = lshr <8 x i64> %sums.s, splat (i64 47)
  %folded = xor <8 x i64> %sums.s, %shifted
  %keyed = xor <8 x i64> %folded, %scrambler
  %scrambled = mul <8 x i64> %keyed, splat (i64 {0x9E3779B1})
  br label %mix

mix:
  %key = phi i64 [ %key.s, %stripe ], [ 0, %scramble ]
  %sums = phi <8 x i64> [ %sums.s, %stripe ], [ %scrambled, %scramble ]
  %ahead = getelementptr i8, ptr %from, i64 %ahead.by
  call void @llvm.prefetch.p0(ptr %ahead, i32 0, i32 3, i32 1)
  %words = load <8 x i64>, ptr %from, align 1
  store <8 x i64> %words, ptr %to, align 64, !nontemporal !0
  %is_last = icmp eq ptr %to, %last
  %key.used = select i1 %is_last, i64 121, i64 %key
  %key.at = getelementptr i8, ptr @secret, i64 %key.used
  %keys = load <8 x i64>, ptr %key.at, align 1
  %mixed = xor <8 x i64> %words, %keys
  %low = and <8 x i64> %mixed, splat (i64 {0xFFFFFFFF})
  %high = lshr <8 x i64> %mixed, splat (i64 32)
  %product = mul <8 x i64> %low, %high
  %swapped = shufflevector <8 x i64> %words, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %added = add <8 x i64> %sums, %swapped
  %sums.next = add <8 x i64> %added, %product
  %key.next = add i64 %key, 8
  %to.next = getelementptr i8, ptr %to, i64 64
  %from.next = getelementptr i8, ptr %from, i64 64
  %left.next = sub i64 %left, 1
  %has_more = icmp ne i64 %left.next, 0
  br i1 %has_more, label %stripe, label %next_run

next_run:
  %from.run = getelementptr i8, ptr %from.r, i64 %step
  %runs.left = sub i64 %runs, 1
  %has_run = icmp ne i64 %runs.left, 0
  br i1 %has_run, label %run, label %next_piece

next_piece:
  %entry.next = getelementptr i8, ptr %entry.p, i64 {_PIECE.size}
  %has_piece = icmp ne ptr %to.next, %end
  br i1 %has_piece, label %piece, label %merge

merge:
  {_FENCE}
  %merger = load <8 x i64>, ptr getelementptr (i8, ptr @secret, i64 11), align 1
  %sums.keyed = xor <8 x i64> %sums.next, %merger
  %even = shufflevector <8 x i64> %sums.keyed, <8 x i64> poison, <4 x i32> <i32 0, i32 2, i32 4, i32 6>
  %odd = shufflevector <8 x i64> %sums.keyed, <8 x i64> poison, <4 x i32> <i32 1, i32 3, i32 5, i32 7>
  %even.wide = zext <4 x i64> %even to <4 x i128>
  %odd.wide = zext <4 x i64> %odd to <4 x i128>
  %products = mul <4 x i128> %even.wide, %odd.wide
  %lower = trunc <4 x i128> %products to <4 x i64>
  %upper.wide = lshr <4 x i128> %products, splat (i128 64)
  %upper = trunc <4 x i128> %upper.wide to <4 x i64>
  %merged = xor <4 x i64> %lower, %upper
  %total = call i64 @llvm.vector.reduce.add.v4i64(<4 x i64> %merged)
  %length = mul i64 %size, {0x9E3779B185EBCA87}
  %hash = add i64 %total, %length
  %hash.high = lshr i64 %hash, 37
  %hash.once = xor i64 %hash, %hash.high
  %hash.spread = mul i64 %hash.once, {0x165667919E3779F9}
  %hash.low = lshr i64 %hash.spread, 32
  %hash.twice = xor i64 %hash.spread, %hash.low
  ret i64 %hash.twice
}}

!0 = !{{i32 1}}
"""
