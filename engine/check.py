"""Prove at start that answers from cached state are the model's own, and that state which left the device comes back as it was.

Run once, in slots 0 to 2 of the empty arena, before anything is served. A model that fails is refused with the reason: never
served wrong. Three proofs: two chunks and some decode steps against one full forward pass; a decode step after state was
copied out and into another slot, bit for bit; the same in a batch of two.
"""

from __future__ import annotations

import numpy as np
import torch

from engine import attention
from engine.arena import Arena, Slot
from engine.errors import UnsupportedModel
from engine.model import Model

# Largest difference of logits, relative to their spread, that counts as "the same model" (float32: seen below 1e-5).
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
_LEAST_TOKENS = 24
# Windows up to this are filled and passed in the check; longer ones only in the model's own tests, for the start's sake.
_LONGEST_WINDOW = 128
_DECODED = 4


def self_check(model: Model, arena: Arena, cache: attention.ArenaCache) -> None:
    """Raises UnsupportedModel if the model's answers from the arena's state differ from its own, or state does not survive a copy."""
    windows = [window for window in arena.windows if window <= _LONGEST_WINDOW]
    count = min(_LEAST_TOKENS + max(windows), model.context_tokens)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, model.vocab_count, (count,), generator=generator).tolist()
    try:
        difference = _difference(model, arena, cache, tokens)
        moved = _moved_difference(model, arena, cache, tokens)
    finally:
        for slot in arena.slots:
            arena.forget(slot)
    if not difference < _TOLERANCE[model.dtype]:
        raise UnsupportedModel(
            f"{model.name}: answers computed from cached state differ from the model's own by {difference:.2g} of their "
            "spread; this architecture keeps state that Concordia does not capture yet"
        )
    if moved:
        raise UnsupportedModel(
            f"{model.name}: a step after its state was copied out and back differs by {moved:.2g}; "
            "this architecture keeps state that Concordia does not capture yet"
        )


def _difference(model: Model, arena: Arena, cache: attention.ArenaCache, tokens: list[int]) -> float:
    """Largest difference from the model's own full forward pass, relative to the spread of its logits."""
    slot, end = arena.slots[0], len(tokens) - _DECODED
    cuts = [0, end // 2, end]
    ours = [_step(model, cache, slot, tokens, start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
    ours += [_step(model, cache, slot, tokens, position, position + 1) for position in range(end, len(tokens))]
    theirs = _own_logits(model, tokens)
    expected = theirs[[end // 2 - 1, *range(end - 1, len(tokens))]].float()
    return float((torch.cat(ours).float() - expected).abs().max() / expected.std().clamp_min(1e-6))


def _own_logits(model: Model, tokens: list[int]) -> torch.Tensor:
    """(tokens, vocab) from the model's own attention over the whole list."""
    model.module.set_attn_implementation(model.own_attention)
    try:
        with torch.inference_mode():
            return model.module(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0]
    finally:
        model.module.set_attn_implementation(attention.NAME)


def _moved_difference(model: Model, arena: Arena, cache: attention.ArenaCache, tokens: list[int]) -> float:
    """Slot 0 has seen all tokens: move its state through the host to another slot, and compare the next step of both."""
    source, end = arena.slots[0], len(tokens)
    if end >= arena.context_tokens or len(arena.slots) < 2:
        return 0.0
    target = arena.slots[1]
    first = arena.oldest(source)
    frame = np.zeros(arena.layout.frame_bytes(end - first), dtype=np.uint8)
    arena.copy_out(source, first, end, frame)
    for group, at in zip(arena.groups, arena.group_windows, strict=True):
        if (
            at == 0
        ):  # the frame begins where the last window does; earlier rows of layers that see all are there already
            group[target.index, :, :first].copy_(group[source.index, :, :first])
    target.bases = [0, *(arena.needed_from(at, end) for at in range(1, len(arena.windows)))]
    arena.copy_in(target, first, frame, end - first, (0, end - first), firsts=[first, *target.bases[1:]])
    arena.states.put(target.index, arena.states.take(source.index, 0).state.cpu().numpy())
    token = tokens[0]
    ours = _step(model, cache, source, [*tokens, token], end, end + 1)
    theirs = _step(model, cache, target, [*tokens, token], end, end + 1)
    return float((ours - theirs).abs().max())


def _step(
    model: Model, cache: attention.ArenaCache, slot: Slot, tokens: list[int], start: int, end: int
) -> torch.Tensor:
    """Logits (1, vocab) after the tokens [start, end)."""
    cache.begin([slot], [start], end - start)
    logits = model.forward([tokens[start:end]], [start], cache, logits=True)
    assert logits is not None, "logits were asked for"
    return logits
