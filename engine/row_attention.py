"""Attention of few query rows over a long context: keys and values are read once, at the memory's speed. CPU, float32, one thread.

A decode step, a forced token and a resumed turn of few tokens are, at length, little else than the reading of the context, which
torch's kernel does at half of the memory's speed when there are few rows (docs/lab.md). Here each block of keys and values goes through
the processor's first cache once, for all rows of its KV head. What a row gets doesn't depend on the rows beside it. The kernel
(`engine/row_kernel.py`) is made by llvmlite for this processor, once a process; what is forked has it too. Where it can't be made, and
for other dtypes, sizes and thread counts, torch's is used. Main thread only.
Source: the softmax that is carried along is that of FlashAttention (Dao et al., 2022)
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine import row_kernel
from tiers import machine_code
from tiers.machine_code import Kernel

MOST_ROWS = 48
_LOG2_E = math.log2(math.e)
_TOLERANCE = 1e-5


class Seen(NamedTuple):
    """Which columns of the context each row sees, [low, high): int32, (rows,) each. All rows see those in [all_from, all_to)."""

    lows: torch.Tensor
    highs: torch.Tensor
    all_from: int
    all_to: int


def seen(lows: list[int], highs: list[int]) -> Seen:
    """[low, high) of each row, which sees at least one column. There may be more of them in the answer: see `attend`."""
    more = _padded(len(lows)) - len(lows)
    lows, highs = lows + lows[-1:] * more, highs + highs[-1:] * more
    return Seen(torch.tensor(lows, dtype=torch.int32), torch.tensor(highs, dtype=torch.int32), max(lows), min(highs))


def takes(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `attend` can be asked: query (kv_heads, rows, key_dim), keys and values (kv_heads, context, dim)."""
    return (
        query.shape[1] <= MOST_ROWS
        and keys.dtype is torch.float32
        and keys.device.type == "cpu"
        and keys.stride(2) == values.stride(2) == 1
        and torch.get_num_threads() == 1
        and _fits(keys.shape[2], values.shape[2])
        and _kernel().call is not None
    )


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, columns: Seen, scaling: float | None
) -> torch.Tensor:
    """Softmax of the query's products with the keys, times the values. Only for what `takes` said yes to.

    query         (kv_heads, rows, key_dim) float32
    keys, values  (kv_heads, context, dim) float32, the floats of a row side by side
    scaling       of the products; None: 1 / sqrt(key_dim)
    Returns       (kv_heads, rows, value_dim) float32
    """
    call = _kernel().call
    assert call is not None, "asked for what isn't there"
    return _run(call, query, keys, values, columns, scaling)


def make_ready(sizes: Iterable[tuple[int, int]]) -> None:
    """Make the kernel, if this process hasn't got it and layers of such sizes (key_dim, value_dim) want it: 0.15 to 0.2 s."""
    if torch.get_num_threads() == 1 and any(_fits(*size) for size in sizes):
        _kernel()


def used_for(sizes: Iterable[tuple[int, int]]) -> tuple[bool, str]:
    """Whether `attend` is used for any layers of such sizes (key_dim, value_dim), and why not where only the kernel is missing."""
    if torch.get_num_threads() != 1 or not any(_fits(*size) for size in sizes):
        return False, ""
    return _kernel().call is not None, _kernel().missing


def _fits(key_dim: int, value_dim: int) -> bool:
    return key_dim % row_kernel.LANES == 0 and value_dim % row_kernel.COLUMNS == 0


def _padded(count: int) -> int:
    return -(-count // row_kernel.ROWS) * row_kernel.ROWS


@cache
def _scratch() -> torch.Tensor:
    return torch.empty(row_kernel.scratch_floats(_padded(MOST_ROWS)))


_Call = Callable[[bytes], None]  # what `row_kernel.pack` made


@cache
def _kernel() -> Kernel[_Call]:
    return machine_code.checked(
        _compile,
        _is_right,
        "a wrong answer",
        event="attention.no_kernel",
        hint="torch's is used: slower over long contexts, and as good",
    )


def _is_right(call: _Call) -> bool:
    """Whether it does what torch does, with rows that see the whole context and rows that don't."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, count, 64, generator=generator) for count in (4, 200, 200))
    lows, highs = [0, 70, 199, 0], [200, 130, 200, 1]
    hidden = [[not low <= column < high for column in range(200)] for low, high in zip(lows, highs, strict=True)]
    mask = torch.zeros(4, 200).masked_fill_(torch.tensor(hidden), -torch.inf)
    expected = F.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask)[0]
    return torch.allclose(_run(call, query, keys, values, seen(lows, highs), None), expected, atol=_TOLERANCE)


def _run(
    call: _Call,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    columns: Seen,
    scaling: float | None,
) -> torch.Tensor:
    heads, rows, key_dim = query.shape
    padded = len(columns.lows)
    query = F.pad(query, (0, 0, 0, padded - rows)) if padded > rows else query.contiguous()
    value_dim = values.shape[2]
    out = torch.empty(heads, padded, value_dim)
    scale = (key_dim**-0.5 if scaling is None else scaling) * _LOG2_E
    call(
        row_kernel.pack(
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            _scratch().data_ptr(),
            columns.lows.data_ptr(),
            columns.highs.data_ptr(),
            columns.all_from,
            columns.all_to,
            heads,
            padded,
            keys.shape[1],
            key_dim,
            value_dim,
            *keys.stride()[:2],
            *values.stride()[:2],
            scale,
        )
    )
    return out[:, :rows] if padded > rows else out


def _compile() -> _Call:
    import llvmlite.binding as llvm  # here: only engines whose models have such layers need it

    if platform.machine() == "x86_64" and not llvm.get_host_cpu_features().get("fma"):
        raise RuntimeError("this processor has no fused multiply-add")  # LLVM would call a function for each
    made: _Call = machine_code.function(row_kernel.text(), "attend", None, ctypes.c_char_p)
    return made
