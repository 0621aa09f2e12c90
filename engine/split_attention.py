"""Attention of few query rows over a long context, cut into pieces so that every thread has as much to do. CPU.

torch's kernel gives each KV head to one thread: with three heads on two threads, one of them idles for a third of the time. Here
each piece of the context is attended to alone, as a batch of that kernel, and the pieces are joined by the logarithms of their sums.
How a context is cut depends on its length and on the thread count alone, so that a position has the same bits whenever it is
computed. Source: the joining rule of Flash-Decoding (Dao et al., 2023); gains in docs/lab.md.
"""

from __future__ import annotations

import math

import torch

# Below this many positions the join costs more than the idle thread.
_LEAST_CONTEXT = 1024
_MOST_PIECES = 8


def piece_count(kv_heads: int, keys: torch.Tensor, values: torch.Tensor) -> int:
    """Into how many pieces to cut keys, values (kv_heads, context, dim): 1 where cutting doesn't help or can't be done."""
    if keys.device.type != "cpu" or keys.shape[1] < _LEAST_CONTEXT or keys.shape[2] != values.shape[2]:
        return 1
    threads = torch.get_num_threads()
    return min(_MOST_PIECES, threads // math.gcd(kv_heads, threads))


def piece_mask(mask: torch.Tensor | None, context: int, pieces: int, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask (rows, context) that is added to the scores -> (pieces, 1, rows, piece length); None if nothing is hidden.

    Where the context doesn't divide, neighbouring pieces overlap, and the first of the two does not see the overlap.
    """
    step, length = _cut(context, pieces)
    if mask is None:
        if length == step:
            return None
        mask = torch.zeros(1, context, dtype=dtype)
    cut = torch.stack([mask[:, piece * step : piece * step + length] for piece in range(pieces)])
    cut[:-1, :, step:] = -torch.inf
    return cut[:, None]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    pieces: int,
) -> torch.Tensor:
    """Attention of all rows over the whole context.

    query (kv_heads, rows, dim); keys, values (kv_heads, context, dim); mask as `piece_mask` made it
    Returns (kv_heads, rows, dim)
    """
    step, length = _cut(keys.shape[1], pieces)
    outputs, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.expand(pieces, *query.shape),
        _overlapping(keys, step, length, pieces),
        _overlapping(values, step, length, pieces),
        0.0,
        False,
        attn_mask=mask,
        scale=scaling,
    )
    shares = torch.softmax(sums, dim=0).to(outputs.dtype)
    return (outputs * shares[..., None]).sum(0)


def _cut(context: int, pieces: int) -> tuple[int, int]:
    """(step from one piece's start to the next, length of each piece)."""
    step = context // pieces
    return step, context - (pieces - 1) * step


def _overlapping(rows: torch.Tensor, step: int, length: int, pieces: int) -> torch.Tensor:
    """(heads, context, dim) -> a view (pieces, heads, length, dim)."""
    heads, _, dim = rows.shape
    head_stride, row_stride, dim_stride = rows.stride()
    return rows.as_strided((pieces, heads, length, dim), (step * row_stride, head_stride, row_stride, dim_stride))
