"""Prove, at the start of a deterministic engine, that a token's state has the same bits however it is computed.

Whole chunks, odd cuts, single tokens and a batch of two must give the same rows and the same logits, to the bit. Whether they do
depends on the model's own code, the dtype, and the libraries under torch, so it is tried and not believed. Main thread, once.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.arena import Arena
from engine.attention import ArenaCache
from engine.errors import UnsupportedModel
from engine.model import Model

_ODD_CUTS = (1, 2, 19, 35, 36, 37, 70)


def check_exact(model: Model, arena: Arena, cache: ArenaCache, prefill_chunk: int) -> None:
    """Compute one token list in two ways. Raises UnsupportedModel if a bit differs."""
    count = min(prefill_chunk + 5, model.context_tokens)
    chunk = min(prefill_chunk, count - 4)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, model.vocab_count, (count,), generator=generator).tolist()
    whole = _compute(model, arena, cache, tokens, [0, chunk, *range(chunk + 1, count + 1)], 0)
    rows = _rows(arena, count)
    odd = [0, *(cut for cut in _ODD_CUTS if cut < chunk), count]
    again = _compute(model, arena, cache, tokens, odd, 0)
    if not np.array_equal(rows, _rows(arena, count)) or not torch.equal(whole, again):
        raise _refusal(model, "how a prompt is cut into steps")
    if len(arena.slots) > 1:
        alone, beside = _last_alone_and_beside(model, arena, cache, tokens)
        if not torch.equal(alone, beside):
            raise _refusal(model, "what runs beside it")


def _refusal(model: Model, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{model.name}: engine.deterministic can't be kept with dtype {str(model.dtype).removeprefix('torch.')} on "
        f"{model.device}: the bits of an answer depend on {what}; serve it without --deterministic, or try --dtype float32 "
        "--device cpu"
    )


def _compute(
    model: Model, arena: Arena, cache: ArenaCache, tokens: list[int], cuts: list[int], slot: int
) -> torch.Tensor:
    """Feed tokens in steps that end at `cuts`; logits (1, vocab) of the last token."""
    logits = None
    for start, end in zip(cuts, cuts[1:], strict=False):
        cache.begin([arena.slots[slot]], [start], end - start)
        logits = model.forward([tokens[start:end]], [start], cache, logits=True)
    assert logits is not None, "at least one step"
    return logits


def _rows(arena: Arena, count: int) -> np.ndarray:
    """State of the first `count` tokens of slot 0, uint8."""
    frame = np.empty(arena.layout.frame_bytes(count), dtype=np.uint8)
    arena.copy_out(arena.slots[0], 0, count, frame)
    return frame


def _last_alone_and_beside(
    model: Model, arena: Arena, cache: ArenaCache, tokens: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the last token, computed alone and in a batch with another sequence of another length."""
    last, other = len(tokens) - 1, len(tokens) // 2
    alone = _compute(model, arena, cache, tokens, [last, last + 1], 0)
    _compute(model, arena, cache, tokens[::-1], [0, other], 1)
    cache.begin(arena.slots[:2], [last, other], 1)
    beside = model.forward([[tokens[last]], [tokens[other]]], [last, other], cache, logits=True)
    assert beside is not None, "asked for logits"
    return alone, beside[:1]
