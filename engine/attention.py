"""Attention and recurrent layers of unmodified transformers models over the arena: a cache class and an attention function of ours.

The models call `ArenaCache.update` with the new K and V of a layer, then the function registered as "concordia"; layers with
convolution or recurrent state ask the same cache for it. Rows of a step are either one token of each of several sequences
(decode) or several tokens of one (a prefill chunk); each row reads its own slot, so nothing is padded and nothing is
concatenated. The name has no mask function, so the models build no masks.
Main thread only. Source: transformers' `AttentionInterface` and `cache_utils.Cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from engine import row_attention, split_attention
from engine.arena import Arena, LayerShape, PlaneRange, Slot
from engine.errors import UnsupportedModel
from engine.lean_transformers import AttentionInterface, Cache
from engine.states import StateKind, StateShape

NAME = "concordia"
# Up to this many query rows, the query heads that share a KV head are folded into rows of one call: measured faster than
# the grouped call up to 8 tokens, equal at 32 (docs/lab.md).
_FOLD_TOKENS = 16
# Tokens that are computed together when an answer's bits must not depend on what else runs.
_TILE_TOKENS = 16
# How a deterministic engine computes (engine/exactness.py); "": as is fastest.
Exact = Literal["", "tiles", "parts", "tokens"]


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
    seen: dict[tuple[Span, int], row_attention.Seen] = field(default_factory=dict)
    places: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )  # by window: slot, column; (rows, 1)
    states: dict[tuple[StateKind, int, int], torch.Tensor] = field(default_factory=dict)
    row_states: dict[int, dict[tuple[StateKind, int, int], torch.Tensor]] = field(default_factory=dict)

    def states_of(self, row: int) -> dict[tuple[StateKind, int, int], torch.Tensor]:
        """`states` of one row, (1, ...) each; views."""
        if len(self.slots) == 1:
            return self.states
        if row not in self.row_states:
            self.row_states[row] = {key: state[row : row + 1] for key, state in self.states.items()}
        return self.row_states[row]


class ModelCache(Cache):  # type: ignore[misc]
    """What the models ask any cache of ours: positions are passed explicitly and no masks are built."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.recurrent: torch.Tensor | None = (
            None  # what `get_recurrent_state` gave last, for the scan (engine/scan.py)
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Attention of one layer: query (rows, query_heads, tokens, key_dim) -> (rows, tokens, query_heads, value_dim)."""
        raise NotImplementedError

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        """The models only ask for a default."""
        return 0

    def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Only the new tokens."""
        return query_length if isinstance(query_length, int) else int(query_length.shape[0]), 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """No."""
        return False


@dataclass(frozen=True, slots=True)
class Options:
    """What a model passes to its attention function. softcap: scores become softcap * tanh(scores / softcap); sinks (query_heads,)."""

    scaling: float | None
    window: int
    softcap: float | None
    sinks: torch.Tensor | None


class ArenaCache(ModelCache):
    """The cache object handed to the model. `begin` sets the rows of a step, `end` finishes it; `beat` is called once a layer.

    exact     how a deterministic engine computes
    row_begins  called with a row's index before what is computed of that row alone; with None when all rows are computed again
    """

    def __init__(
        self, arena: Arena, beat: Callable[[], None], layers: dict[int, LayerShape], *, exact: Exact = ""
    ) -> None:
        super().__init__()
        self.arena = arena
        self.beat = beat
        self.exact = exact
        self.row_begins: Callable[[int | None], None] = lambda row: None
        self.derived = {index for index, shape in layers.items() if shape.derived}
        self._row_sizes = {(shape.key_dim, shape.value_dim) for shape in layers.values()}
        self.rows = StepRows([], [], 0)
        self._planes: dict[PlaneRange, torch.Tensor] = {}

    @property
    def by_rows(self) -> tuple[bool, str]:
        """Whether few rows are computed by a kernel of ours (engine/row_attention.py), and if they should be and aren't, why."""
        on_host = all(group.device.type == "cpu" and group.dtype == torch.float32 for group in self.arena.groups)
        return row_attention.used_for(self._row_sizes) if on_host and not self.exact else (False, "")

    def begin(self, slots: list[Slot], starts: list[int], token_count: int) -> None:
        """Announce the next forward pass, and make this cache the one that the attention function reads."""
        for slot, start in zip(slots, starts, strict=True):
            self.arena.make_room(slot, start, start + token_count)
        self.rows = StepRows(slots, starts, token_count)
        self.rows.states = self.arena.states.gather([slot.index for slot in slots])
        make_current(self)

    @contextmanager
    def only(self, row: int, token: int) -> Iterator[None]:
        """For the block, the step is one token of one row; recurrent state is that of the whole step."""
        step = self.rows
        self.rows = StepRows([step.slots[row]], [step.starts[row] + token], 1, states=step.states_of(row))
        try:
            yield
        finally:
            self.rows = step

    def end(self) -> None:
        """The forward pass is over: recurrent state goes back to its slots."""
        self.arena.states.scatter([slot.index for slot in self.rows.slots])
        self.recurrent = None
        for slot, start in zip(self.rows.slots, self.rows.starts, strict=True):
            slot.state_position = start + self.rows.token_count

    # ------------------------------------------------------------ attention layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows into the slots. key_states (rows, heads, tokens, key_dim), value_states likewise.

        Returned as they came, save for layers that derive K and V from them: those get all rows that they attend to.
        """
        self.beat()
        rows, window = self.rows, self.arena.layer_windows[layer_idx]
        count = rows.token_count
        if count == 1 and len(rows.slots) > 1:
            self._write_rows(self.arena.keys[layer_idx], window, key_states)
            self._write_rows(self.arena.values[layer_idx], window, value_states)
        else:
            for row, (slot, start) in enumerate(zip(rows.slots, rows.starts, strict=True)):
                at = start - slot.bases[window]
                self.arena.key_views[slot.index][layer_idx][:, at : at + count] = key_states[row]
                self.arena.value_views[slot.index][layer_idx][:, at : at + count] = value_states[row]
        if layer_idx in self.derived:
            size = self.arena.windows[window]
            return self._context(self.arena.key_views, layer_idx, size), self._context(
                self.arena.value_views, layer_idx, size
            )
        return key_states, value_states

    def _write_rows(self, planes: PlaneRange, window: int, states: torch.Tensor) -> None:
        """One token of every row in one call: states (rows, heads, 1, dim) -> (slot, plane, column) of the arena."""
        group, rows = self.arena.groups[planes.group], self.rows
        if window not in rows.places:
            slots = torch.tensor([slot.index for slot in rows.slots], device=group.device)[:, None]
            columns = [at - slot.bases[window] for slot, at in zip(rows.slots, rows.starts, strict=True)]
            rows.places[window] = slots, torch.tensor(columns, device=group.device)[:, None]
        slots, places = rows.places[window]
        group.index_put_((slots, self._plane_indices(planes), places), states[:, :, 0])

    def _plane_indices(self, planes: PlaneRange) -> torch.Tensor:
        """The planes of a layer's K or V as an index (1, heads)."""
        if planes not in self._planes:
            device = self.arena.groups[planes.group].device
            self._planes[planes] = torch.arange(planes.start, planes.end, device=device)[None]
        return self._planes[planes]

    def _context(self, views: list[dict[int, torch.Tensor]], layer: int, window: int) -> torch.Tensor:
        """All rows that the step attends to, (rows, heads, longest context, dim), shorter contexts padded with zeros."""
        rows = []
        for row, (slot, start) in enumerate(zip(self.rows.slots, self.rows.starts, strict=True)):
            low, high = self._columns(row, layer, Span(start, start + self.rows.token_count, window))
            rows.append(views[slot.index][layer][:, low:high])
        if len(rows) == 1:
            return rows[0][None]
        longest = max(row.shape[1] for row in rows)
        context = rows[0].new_zeros(len(rows), rows[0].shape[0], longest, rows[0].shape[2])
        for index, given in enumerate(rows):
            context[index, :, : given.shape[1]] = given
        return context

    def _columns(self, row: int, layer: int, span: Span) -> tuple[int, int]:
        """Columns of the layer's buffer that a row of the step attends to."""
        base = self.rows.slots[row].bases[self.arena.layer_windows[layer]]
        return span.first - base, span.end - base

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Each row over its own slot; key and value count only for layers that derive them."""
        rows, derived, plain = self.rows, layer in self.derived, options.softcap is None and options.sinks is None
        outputs = []
        for row, (slot, start) in enumerate(zip(rows.slots, rows.starts, strict=True)):
            span = Span(start, start + rows.token_count, options.window)
            if self.exact in ("tiles", "parts"):
                given = (key[row], value[row]) if derived else None
                outputs.append(self._attend_tiles(layer, slot, query[row], given, span, options))
                continue
            if derived:
                context = span.end - span.first
                keys, values = key[row, :, :context], value[row, :, :context]
            else:
                low, high = self._columns(row, layer, span)
                keys = self.arena.key_views[slot.index][layer][:, low:high]
                values = self.arena.value_views[slot.index][layer][:, low:high]
            if not plain:
                mask = _mask(rows, span, query.device) if rows.token_count > 1 else None
                outputs.append(_attend_scores(query[row], keys, values, mask, options))
            elif rows.token_count > _FOLD_TOKENS:
                mask = _mask(rows, span, query.device)
                outputs.append(_attend_grouped(query[row], keys, values, mask, options.scaling))
            elif self.exact:
                outputs.append(_attend_folded(query[row], keys, values, rows, span, options.scaling))
            else:
                outputs.append(_attend_few(query[row], keys, values, rows, span, options.scaling))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).transpose(1, 2)

    def _attend_tiles(
        self,
        layer: int,
        slot: Slot,
        query: torch.Tensor,
        given: tuple[torch.Tensor, torch.Tensor] | None,
        span: Span,
        options: Options,
    ) -> torch.Tensor:
        """Attention whose bits depend on a token's position and what came before it, not on the step that computes it.

        A product's bits depend on its shape, not on what stands in the other rows. So tokens are computed in tiles of fixed
        absolute positions, over all keys that any position of the tile sees, under the whole tile's mask: a decoded token, one of
        a prefill chunk and one that is computed again after a crash pass through the same shapes. A masked key adds exact zeros.

        query (query_heads, tokens, dim); given: keys and values from `span.first` on, of layers that derive them
        Returns (1, query_heads, tokens, value_dim)
        """
        outputs = []
        for begin in range(span.start // _TILE_TOKENS * _TILE_TOKENS, span.end, _TILE_TOKENS):
            tile = Span(begin, min(begin + _TILE_TOKENS, self.arena.context_tokens), span.window)
            low, high = max(span.start, tile.start), min(span.end, tile.end)
            padded = query.new_zeros(query.shape[0], tile.end - tile.start, query.shape[2])
            padded[:, low - tile.start : high - tile.start] = query[:, low - span.start : high - span.start]
            keys, values = self._tile_rows(layer, slot, given, span, tile)
            if options.softcap is None and options.sinks is None:
                out = _attend_folded(padded, keys, values, self.rows, tile, options.scaling)
            else:
                out = _attend_scores(padded, keys, values, _mask(self.rows, tile, query.device), options)
            outputs.append(out[:, :, low - tile.start : high - tile.start])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _tile_rows(
        self, layer: int, slot: Slot, given: tuple[torch.Tensor, torch.Tensor] | None, span: Span, tile: Span
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (kv_heads, tile.end - tile.first, dim).

        Where there are no rows nobody looks: before a window that was restored, and after the end.
        """
        if given is not None:
            first = span.first - tile.first
            return _fitted(given[0], -first, tile), _fitted(given[1], -first, tile)
        low = tile.first - slot.bases[self.arena.layer_windows[layer]]
        views = self.arena.key_views[slot.index][layer], self.arena.value_views[slot.index][layer]
        high = low + tile.end - tile.first
        if low >= 0 and high <= views[0].shape[1]:
            return views[0][:, low:high], views[1][:, low:high]
        return _fitted(views[0], low, tile), _fitted(views[1], low, tile)

    # ------------------------------------------------------------ layers with recurrent state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the step continues sequences: the first chunk of one starts from nothing."""
        return self.rows.starts[0] > 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Last inputs of the convolution, (rows, channels, kernel); the models shift new ones in, in place."""
        self.beat()
        return self.rows.states["conv", layer_idx, state_idx] if self.rows.starts[0] else None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Take in new inputs (rows, channels, tokens); returned with what the convolution must see before them."""
        kept = self.rows.states["conv", layer_idx, state_idx]
        size = kept.shape[-1]
        if self.rows.starts[0]:
            full = torch.cat([kept, conv_states], dim=-1)
        else:
            full = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        kept.copy_(full[..., -size:])
        return full

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """(rows, ...) as the layer left it; None for a layer that has only a convolution."""
        state = self.rows.states.get(("recurrent", layer_idx, state_idx)) if self.rows.starts[0] else None
        self.recurrent = state
        return state

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Replace the state (rows, ...)."""
        state = self.rows.states["recurrent", layer_idx, state_idx]
        state.copy_(recurrent_states)
        return state


class ProbeCache(ModelCache):
    """Records what each layer stores, from one forward pass; keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers_seen: dict[int, LayerShape] = {}
        self.states: list[StateShape] = []
        self._given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self) -> None:
        """Make this cache the one that the attention function reads."""
        make_current(self)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note the shape."""
        if key_states.shape[1] != value_states.shape[1]:
            raise UnsupportedModel(
                f"layer {layer_idx} stores K of {key_states.shape[1]} heads, V of {value_states.shape[1]}"
            )
        self._given[layer_idx] = key_states, value_states
        self.layers_seen[layer_idx] = LayerShape(key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        return key_states, value_states

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Note the window, and whether K and V are what was stored."""
        if layer not in self.layers_seen:
            raise UnsupportedModel(
                f"attention layer {layer} reads K and V that it does not store: shared caches are unknown here"
            )
        stored, (given_key, given_value) = self.layers_seen[layer], self._given[layer]
        derived = key is not given_key or value is not given_value
        self.layers_seen[layer] = LayerShape(stored.heads, stored.key_dim, stored.value_dim, options.window, derived)
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Nothing was seen yet."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """None yet."""
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """None yet."""
        return None

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Note the shape."""
        size = conv_kernel_size or conv_states.shape[-1]
        self.states.append(
            StateShape(layer_idx, state_idx, "conv", (*conv_states.shape[1:-1], size), conv_states.dtype)
        )
        return F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Note the shape."""
        shape = tuple(recurrent_states.shape[1:])
        self.states.append(StateShape(layer_idx, state_idx, "recurrent", shape, recurrent_states.dtype))
        return recurrent_states


_current: ModelCache | None = None


def make_current(cache: ModelCache) -> None:
    """From now on the attention function reads this cache."""
    global _current
    _current = cache


def current() -> ModelCache:
    """The cache that the last step was announced to."""
    assert _current is not None, "begin was not called"
    return _current


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
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    options = Options(scaling, sliding_window or 0, softcap, s_aux)
    return current().attend(layer, query, key, value, options), None


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


def _fitted(rows: torch.Tensor, low: int, tile: Span) -> torch.Tensor:
    """Columns [low, low + the tile's) of rows (heads, columns, dim) as a copy; zeros where there are none."""
    fitted = rows.new_zeros(rows.shape[0], tile.end - tile.first, rows.shape[2])
    begin, end = max(0, low), min(rows.shape[1], low + fitted.shape[1])
    fitted[:, begin - low : end - low] = rows[:, begin:end]
    return fitted


def _attend_few(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: StepRows, span: Span, scaling: float | None
) -> torch.Tensor:
    """Few tokens of one row, by the fastest kernel there is for them. Shapes as in `_attend_grouped`."""
    query_heads, count, dim = query.shape
    shared = query_heads // keys.shape[0]
    folded = query.reshape(keys.shape[0], shared * count, dim)
    if not row_attention.takes(folded, keys, values):
        return _attend_folded(query, keys, values, rows, span, scaling)
    if (span, shared) not in rows.seen:
        lows = [
            max(0, token + 1 - span.window - span.first) if span.window else 0 for token in range(span.start, span.end)
        ]
        highs = [token + 1 - span.first for token in range(span.start, span.end)]
        rows.seen[span, shared] = row_attention.seen(lows * shared, highs * shared)
    out = row_attention.attend(folded, keys, values, rows.seen[span, shared], scaling)
    return out.reshape(1, query_heads, count, -1)


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


def _attend_scores(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, options: Options
) -> torch.Tensor:
    """As `_attend_grouped`, with soft-capped scores and sinks: a sink takes its share of the softmax and gives no value."""
    query_heads, count, dim = query.shape
    kv_heads = keys.shape[0]
    shared = query_heads // kv_heads
    scale = options.scaling if options.scaling is not None else dim**-0.5
    scores = query.reshape(kv_heads, shared * count, dim) @ keys.transpose(1, 2) * scale
    scores = scores.reshape(query_heads, count, -1).float()
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        scores = torch.cat([scores, options.sinks.float()[:, None, None].expand(-1, count, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]].to(values.dtype)
    out = weights.reshape(kv_heads, shared * count, -1) @ values
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
