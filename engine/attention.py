"""Attention of unmodified transformers models over the arena: a cache class and an attention function of ours.

The models call `ArenaCache.update` with the new K and V of a layer, then the function registered as "concordia". Rows of a
step are either one token of each of several sequences (decode) or several tokens of one (a prefill chunk); each row reads
its own slot, so nothing is padded and nothing is concatenated. The name has no mask function, so the models build no masks.
Main thread only. Source: transformers' `AttentionInterface` and `cache_utils.Cache`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from engine import split_attention
from engine.arena import Arena, LayerShape, PlaneRange, Slot
from engine.errors import UnsupportedModel

NAME = "concordia"
# Up to this many query rows, the query heads that share a KV head are folded into rows of one call: measured faster than
# the grouped call up to 8 tokens, equal at 32 (docs/lab.md).
_FOLD_TOKENS = 16
# Tokens that are computed together when an answer's bits must not depend on what else runs.
_TILE_TOKENS = 16


class Span(NamedTuple):
    """New tokens [start, end) of one row, and how far back a token of a layer sees: `window` tokens, 0 for all."""

    start: int
    end: int
    window: int

    @property
    def first(self) -> int:
        """The oldest position that any of the tokens sees."""
        return max(0, self.start + 1 - self.window) if self.window else 0


@dataclass(slots=True)
class StepRows:
    """What the running step works on: `token_count` new tokens for each (slot, start)."""

    slots: list[Slot]
    starts: list[int]
    token_count: int
    masks: dict[Span, torch.Tensor] = field(default_factory=dict)
    folded_masks: dict[tuple[Span, int, int], torch.Tensor | None] = field(default_factory=dict)
    places: tuple[torch.Tensor, torch.Tensor] | None = None  # slot and position of each row, (rows, 1)


class ArenaCache(Cache):  # type: ignore[misc]
    """The cache object handed to the model. `begin` sets the rows of a step; `beat` is called once a layer."""

    def __init__(self, arena: Arena, beat: Callable[[], None], *, deterministic: bool = False) -> None:
        super().__init__(layers=[])
        self.arena = arena
        self.beat = beat
        self.deterministic = deterministic
        self.rows = StepRows([], [], 0)
        self._planes: dict[PlaneRange, torch.Tensor] = {}

    def begin(self, slots: list[Slot], starts: list[int], token_count: int) -> None:
        """Announce the next forward pass, and make this cache the one that the attention function reads."""
        global _current
        self.rows = StepRows(slots, starts, token_count)
        _current = self

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows into the slots. key_states (rows, heads, tokens, key_dim), value_states likewise; returned as they came."""
        self.beat()
        count = self.rows.token_count
        if count == 1 and len(self.rows.slots) > 1:
            self._write_rows(self.arena.keys[layer_idx], key_states)
            self._write_rows(self.arena.values[layer_idx], value_states)
            return key_states, value_states
        for row, (slot, start) in enumerate(zip(self.rows.slots, self.rows.starts, strict=True)):
            self.arena.key_views[slot.index][layer_idx][:, start : start + count] = key_states[row]
            self.arena.value_views[slot.index][layer_idx][:, start : start + count] = value_states[row]
        return key_states, value_states

    def _write_rows(self, planes: PlaneRange, states: torch.Tensor) -> None:
        """One token of every row in one call: states (rows, heads, 1, dim) -> (slot, plane, position) of the arena."""
        group = self.arena.groups[planes.group]
        if self.rows.places is None:
            slots = torch.tensor([slot.index for slot in self.rows.slots], device=group.device)[:, None]
            self.rows.places = slots, torch.tensor(self.rows.starts, device=group.device)[:, None]
        slots, positions = self.rows.places
        group.index_put_((slots, self._plane_indices(planes), positions), states[:, :, 0])

    def _plane_indices(self, planes: PlaneRange) -> torch.Tensor:
        """The planes of a layer's K or V as an index (1, heads)."""
        if planes not in self._planes:
            device = self.arena.groups[planes.group].device
            self._planes[planes] = torch.arange(planes.start, planes.end, device=device)[None]
        return self._planes[planes]

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        """Positions are passed explicitly; the models only ask for a default."""
        return 0

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """No masks are built."""
        return 0, 0


class ProbeCache(Cache):  # type: ignore[misc]
    """Records what each layer stores, from one forward pass; refuses models with state of another kind."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note the shape, keep nothing."""
        self.shapes[layer_idx] = LayerShape(key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        """Nothing is stored."""
        return 0

    def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Only the new tokens."""
        count = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return count, 0


_current: ArenaCache | None = None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the step's rows over their slots.

    query   (rows, query_heads, tokens, key_dim); key and value are in the arena already
    Returns (rows, tokens, query_heads, value_dim)
    Raises  UnsupportedModel for soft-capped scores and attention sinks
    """
    if softcap is not None or s_aux is not None:
        raise UnsupportedModel("attention with soft-capped scores or sinks is not supported yet")
    assert _current is not None, "ArenaCache.begin was not called"
    rows, arena, layer = _current.rows, _current.arena, int(module.layer_idx)  # type: ignore[arg-type]
    outputs = []
    for row, (slot, start) in enumerate(zip(rows.slots, rows.starts, strict=True)):
        span = Span(start, start + rows.token_count, sliding_window or 0)
        if _current.deterministic:
            views = arena.key_views[slot.index][layer], arena.value_views[slot.index][layer]
            outputs.append(_attend_tiles(query[row], *views, rows, span, scaling))
            continue
        keys = arena.key_views[slot.index][layer][:, span.first : span.end]
        values = arena.value_views[slot.index][layer][:, span.first : span.end]
        if rows.token_count > _FOLD_TOKENS:
            outputs.append(_attend_grouped(query[row], keys, values, _mask(rows, span, query.device), scaling))
        else:
            outputs.append(_attend_folded(query[row], keys, values, rows, span, scaling))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).transpose(1, 2), None


def _attend_grouped(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Many tokens of one row. query (query_heads, tokens, dim); keys, values (kv_heads, context, dim); mask (tokens, context).

    Returns (1, query_heads, tokens, value_dim)
    """
    grouped = query.shape[0] != keys.shape[0]
    return F.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, scale=scaling, enable_gqa=grouped
    )


def _attend_tiles(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: StepRows, span: Span, scaling: float | None
) -> torch.Tensor:
    """Attention whose bits depend on a token's position and what came before it, not on the step that computes it.

    A product's bits depend on its shape, not on what stands in the other rows. So tokens are computed in tiles of fixed absolute
    positions, over all keys up to the tile's end, under the whole tile's mask: a decoded token, one of a prefill chunk and one
    that is computed again after a crash pass through the same shapes. A masked key adds exact zeros.

    query (query_heads, tokens, dim); keys, values (kv_heads, context_tokens, dim): the whole slot
    Returns (1, query_heads, tokens, value_dim)
    """
    outputs = []
    for begin in range(span.start // _TILE_TOKENS * _TILE_TOKENS, span.end, _TILE_TOKENS):
        tile = Span(begin, min(begin + _TILE_TOKENS, keys.shape[1]), span.window)
        low, high = max(span.start, tile.start), min(span.end, tile.end)
        padded = query.new_zeros(query.shape[0], tile.end - tile.start, query.shape[2])
        padded[:, low - tile.start : high - tile.start] = query[:, low - span.start : high - span.start]
        seen = slice(tile.first, tile.end)
        out = _attend_folded(padded, keys[:, seen], values[:, seen], rows, tile, scaling)
        outputs.append(out[:, :, low - tile.start : high - tile.start])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _attend_folded(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: StepRows, span: Span, scaling: float | None
) -> torch.Tensor:
    """Few tokens of one row: the query heads that share a KV head become rows of one call. Shapes as in `_attend_grouped`."""
    query_heads, count, dim = query.shape
    kv_heads = keys.shape[0]
    shared = query_heads // kv_heads
    pieces = split_attention.piece_count(kv_heads, keys, values)
    mask = _folded_mask(rows, span, shared, pieces, query)
    folded = query.reshape(kv_heads, shared * count, dim)
    if pieces > 1:
        out = split_attention.attend(folded, keys, values, mask, scaling, pieces)
    else:
        out = F.scaled_dot_product_attention(folded[None], keys[None], values[None], attn_mask=mask, scale=scaling)
    return out.reshape(1, query_heads, count, -1)


def _folded_mask(rows: StepRows, span: Span, shared: int, pieces: int, query: torch.Tensor) -> torch.Tensor | None:
    """What is added to the scores of the folded rows, in the pieces' form; None if nothing is hidden. Built once a step."""
    count = span.end - span.start
    if count == 1 and pieces == 1:
        return None
    key = (span, shared, pieces)
    if key not in rows.folded_masks:
        mask = None
        if count > 1:
            hidden = ~_mask(rows, span, query.device).repeat(shared, 1)
            mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)
        if pieces > 1:
            mask = split_attention.piece_mask(mask, span.end - span.first, pieces, query.dtype)
        rows.folded_masks[key] = mask
    return rows.folded_masks[key]


def _mask(rows: StepRows, span: Span, device: torch.device) -> torch.Tensor:
    """True where a new token of [start, end) sees a position of [first, end); built once a step and window."""
    if span not in rows.masks:
        positions = torch.arange(span.first, span.end, device=device)
        queries = torch.arange(span.start, span.end, device=device)[:, None]
        mask = positions <= queries
        if span.window:
            mask &= positions > queries - span.window
        rows.masks[span] = mask
    return rows.masks[span]


AttentionInterface.register(NAME, attend)
