"""`--deterministic`: choose how an engine computes, so that a token's bits follow from its own tokens alone, and prove that they do.

Three ways. *tiles*: steps as ever, attention in tiles of fixed positions (`engine/attention.py`); for models all of whose products
are linear layers, which compute a row alike in every batch. *parts*: the same, but layers with recurrent state and experts take one
token of one sequence at a time (`engine/parts.py`). *tokens*: one token of one sequence a forward pass, where layers aren't packed.
Which holds depends on the model's own code, the dtype, and the libraries under torch, so it is tried and not believed. Main thread, once.
"""

from __future__ import annotations

import numpy as np
import structlog
import torch

from engine.arena import Arena
from engine.attention import ArenaCache, Exact
from engine.errors import UnsupportedModel
from engine.model import Model
from engine.parts import compute_in_parts, weighs

log = structlog.get_logger()

_ODD_CUTS = (1, 2, 19, 35, 36, 37, 70)
# Prefilled by the proof where each of them costs about a pass of its own: more than a tile in the way `parts`.
_FEW_TOKENS = {"parts": 20, "tokens": 8}
# Tokens that one step of these ways prefills at most, so that other streams get their turn.
_STEP_TOKENS = 16


def likely_way(model: Model) -> Exact:
    """What to try first: `tiles` unless the model has recurrent state, or weights that are no linear layer's."""
    return "parts" if model.states or any(map(weighs, model.module.modules())) else "tiles"


def prepare(model: Model, cache: ArenaCache) -> None:
    """Set the cache to the likely way; call before the model's answers are checked."""
    cache.exact = likely_way(model)
    if cache.exact == "parts":
        compute_in_parts(model, cache)


def step_tokens(exact: Exact, prefill_chunk: int) -> int:
    """Most tokens of a prefill step: a whole chunk, or an even part of one where each token costs about a pass."""
    if exact not in _FEW_TOKENS:
        return prefill_chunk
    return next(count for count in range(min(_STEP_TOKENS, prefill_chunk), 0, -1) if prefill_chunk % count == 0)


def make_exact(model: Model, arena: Arena, cache: ArenaCache, prefill_chunk: int) -> None:
    """Prove the way that the cache is set to, or go over to `tokens` and prove that. Raises UnsupportedModel if neither holds."""
    differs = difference(model, arena, cache, prefill_chunk)
    if differs and cache.exact != "tokens":
        log.info("deterministic.way_differs", way=cache.exact, by=differs)
        cache.exact = "tokens"
        differs = difference(model, arena, cache, prefill_chunk)
    if differs:
        raise UnsupportedModel(
            f"{model.name}: engine.deterministic can't be kept with dtype {str(model.dtype).removeprefix('torch.')} on "
            f"{model.device}: the bits of an answer depend on {differs}; serve it without --deterministic, or try --dtype "
            "float32 --device cpu"
        )
    log.info("deterministic.proven", way=cache.exact)


def difference(model: Model, arena: Arena, cache: ArenaCache, prefill_chunk: int) -> str:
    """Compute one token list whole, then in odd cuts and in company: what the bits of its state or logits depend on, "" for nothing."""
    chunk = min(prefill_chunk, _FEW_TOKENS.get(cache.exact, prefill_chunk))
    count = min(chunk + 5, model.context_tokens)
    last, chunk = count - 1, min(chunk, count - 4)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, model.vocab_count, (count,), generator=generator).tolist()
    try:
        alone = _compute(model, arena, cache, tokens, [0, chunk, *range(chunk + 1, count + 1)], 0)
        state = _state(arena, count)
        _compute(model, arena, cache, tokens, [0, *(cut for cut in _ODD_CUTS if cut < chunk), last], 0)
        beside = _last_in_company(model, arena, cache, tokens)
        if not np.array_equal(_state(arena, count), state):
            return "how a prompt is cut into steps, or what runs beside it"
        return "" if torch.equal(alone, beside) else "what runs beside it"
    finally:
        for slot in arena.slots[:2]:
            arena.forget(slot)


def _compute(
    model: Model, arena: Arena, cache: ArenaCache, tokens: list[int], cuts: list[int], slot: int
) -> torch.Tensor:
    """Feed tokens to an empty slot in steps that end at `cuts`; logits (1, vocab) of the last token."""
    arena.forget(arena.slots[slot])
    logits = None
    for start, end in zip(cuts, cuts[1:], strict=False):
        cache.begin([arena.slots[slot]], [start], end - start)
        logits = model.forward([tokens[start:end]], [start], cache, logits=True)
    assert logits is not None, "at least one step"
    return logits


def _state(arena: Arena, count: int) -> np.ndarray:
    """State of the first `count` tokens of slot 0, rows and then the recurrent part, uint8."""
    slot = arena.slots[0]
    first = arena.oldest(slot)
    frame = np.empty(arena.layout.frame_bytes(count - first), dtype=np.uint8)
    arena.copy_out(slot, first, count, frame)
    return np.concatenate([frame, arena.states.rows[0].cpu().numpy()])


def _last_in_company(model: Model, arena: Arena, cache: ArenaCache, tokens: list[int]) -> torch.Tensor:
    """Logits (1, vocab) of the last token, in a batch with another sequence of another length where there is a slot for it."""
    last, other = len(tokens) - 1, len(tokens) // 2
    rows, starts = [[tokens[last]]], [last]
    if len(arena.slots) > 1:
        _compute(model, arena, cache, tokens[::-1], [0, other], 1)
        rows, starts = [*rows, [tokens[other]]], [*starts, other]
    cache.begin(arena.slots[: len(rows)], starts, 1)
    logits = model.forward(rows, starts, cache, logits=True)
    assert logits is not None, "asked for logits"
    return logits[:1]
