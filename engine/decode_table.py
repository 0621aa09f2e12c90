"""One-token steps of a fixed shape: which slots the rows are, where they stand and what they see lies in one table on the device.

`ArenaCache` cuts views of each row's slot, so its work has another shape in every step. Here everything is addressed through the
table, a bucket of rows over a bucket of columns, so that the same launches do any step of that shape: what a CUDA graph needs. Rows
beyond the step's own repeat its last one: they compute the same and write the same to the same place, so there is no scratch slot. Columns
that a row does not see read its own newest row instead, whose weight is zero: nothing of another sequence ever comes in.
Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine import attention
from engine.arena import Arena, LayerShape, PlaneRange, Slot
from engine.attention import ArenaCache, Options, StepRows

_TOKEN, _POSITION, _SLOT, _BASES = 0, 1, 2, 3


@dataclass(slots=True)
class WindowPart:
    """What the rows of a step see of one window's buffers.

    own      (rows, 1), column of the new token
    visible  (rows, columns)
    hidden   (rows, 1, 1, columns), added to scores: 0 or -inf
    """

    own: torch.Tensor
    visible: torch.Tensor
    hidden: torch.Tensor


class TableCache(ArenaCache):
    """The cache of such steps. `fill` says what a step works on; between `start` and `finish` the model runs."""

    def __init__(self, arena: Arena, beat: Callable[[], None], layers: dict[int, LayerShape]) -> None:
        super().__init__(arena, beat, layers)
        self.device = arena.states.rows.device
        shape = (_BASES + len(arena.windows), len(arena.slots))
        on_gpu = self.device.type == "cuda"
        self._filled = torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu)
        self._table = torch.zeros(shape, dtype=torch.int64, device=self.device) if on_gpu else self._filled
        self._copied: torch.cuda.Event | None = None
        self._numbers = torch.arange(max(arena.capacities), device=self.device)
        self._flat = [group.view(-1, group.shape[-1]) for group in arena.groups]
        for planes in {*arena.keys.values(), *arena.values.values()}:
            self._plane_indices(planes)
        self._slots = self._table[_SLOT]
        self._context_tokens = 0
        self._windows: dict[int, WindowPart] = {}
        self._places: dict[int, torch.Tensor] = {}

    def fill(self, slots: list[Slot], starts: list[int], tokens: list[int], row_count: int) -> None:
        """Say what the next step works on, and send it on its way to the device. Slides windows that are at their end."""
        if self._copied is not None:
            self._copied.synchronize()  # the last table has left: this memory is free to be written
        rows = []
        for slot, start, token in zip(slots, starts, tokens, strict=True):
            self.arena.make_room(slot, start, start + 1)
            rows.append([token, start, slot.index, *slot.bases])
        rows += [rows[-1]] * (row_count - len(rows))
        self._filled[:, :row_count] = torch.tensor(rows).T
        if self._table is not self._filled:
            self._table.copy_(self._filled, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def start(self, row_count: int, context_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin a step of this shape; every row ends within `context_tokens`. Returns ids and positions, each (rows, 1)."""
        table = self._table[:, :row_count]
        self._slots, self._context_tokens = table[_SLOT], context_tokens
        self._places.clear()
        self._windows = {at: self._window(at, table) for at in set(self.arena.layer_windows.values())}
        self.rows = StepRows([], [1], 1)  # never a sequence's first token: states count
        self.rows.states = self._staged(row_count)
        attention.make_current(self)
        return table[_TOKEN][:, None], table[_POSITION][:, None]

    def finish(self) -> None:
        """The model has run: staged state goes back to its slots."""
        states = self.arena.states
        if states.state_bytes:
            states.rows.index_copy_(0, self._slots, states.staging[: len(self._slots)])
        self.recurrent = None
        self._windows, self.rows.states = {}, {}
        self._places.clear()

    def _staged(self, row_count: int) -> dict[Any, torch.Tensor]:
        states = self.arena.states
        if not states.state_bytes:
            return {}
        states.staging[:row_count].copy_(states.rows.index_select(0, self._slots))
        return {key: view[:row_count] for key, view in states.staged_views.items()}

    def _window(self, at: int, table: torch.Tensor) -> WindowPart:
        window, position = self.arena.windows[at], table[_POSITION][:, None]
        base = table[_BASES + at][:, None]
        own = position - base
        columns = self._numbers[: min(self._context_tokens, self.arena.capacities[at])]
        visible = columns <= own
        if window:
            visible &= columns > own - window
        dtype = self.arena.groups[0].dtype
        hidden = torch.zeros(visible.shape, dtype=dtype, device=self.device).masked_fill_(~visible, -torch.inf)
        return WindowPart(own, visible, hidden[:, None, None])

    # ------------------------------------------------------------ attention layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ArenaCache. Layers that derive K and V get (rows, heads, columns, dim)."""
        self.beat()
        keys, values = self.arena.keys[layer_idx], self.arena.values[layer_idx]
        own = self._windows[self.arena.layer_windows[layer_idx]].own
        for planes, states in ((keys, key_states), (values, value_states)):
            place = self._slots[:, None], self._plane_indices(planes), own
            self.arena.groups[planes.group].index_put_(place, states[:, :, 0])
        if layer_idx in self.derived:
            return self._seen(keys), self._seen(values)
        return key_states, value_states

    def _seen(self, planes: PlaneRange) -> torch.Tensor:
        """All columns of a layer's K or V: (rows, heads, columns, dim)."""
        first = self._first_rows(planes.group)
        group = self.arena.groups[planes.group]
        rows = first[:, None, :] + self._plane_indices(planes)[..., None] * group.shape[2]
        found = self._flat[planes.group].index_select(0, rows.flatten())
        return found.view(*rows.shape, group.shape[-1])

    def _first_rows(self, group: int) -> torch.Tensor:
        """By row and column, where it lies in the group's first plane: (rows, columns)."""
        if group not in self._places:
            part = self._windows[self.arena.group_windows[group]]
            _, planes, capacity, _ = self.arena.groups[group].shape
            columns = torch.where(part.visible, self._numbers[: part.visible.shape[1]], part.own)
            self._places[group] = self._slots[:, None] * (planes * capacity) + columns
        return self._places[group]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """See ArenaCache: query (rows, query_heads, 1, dim) -> (rows, 1, query_heads, value_dim)."""
        if layer not in self.derived:
            key, value = self._seen(self.arena.keys[layer]), self._seen(self.arena.values[layer])
        part = self._windows[self.arena.layer_windows[layer]]
        rows, query_heads, _, dim = query.shape
        folded = query.reshape(rows, key.shape[1], query_heads // key.shape[1], dim)
        if options.softcap is None and options.sinks is None:
            out = F.scaled_dot_product_attention(folded, key, value, attn_mask=part.hidden, scale=options.scaling)
        else:
            out = _attend_scores(folded, key, value, part.hidden, options)
        return out.reshape(rows, 1, query_heads, -1)


def _attend_scores(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, options: Options
) -> torch.Tensor:
    """Soft-capped scores and sinks; query (rows, kv_heads, shared, dim), keys and values (rows, kv_heads, columns, dim)."""
    rows, kv_heads, shared, dim = query.shape
    scale = options.scaling if options.scaling is not None else dim**-0.5
    scores = (query @ keys.transpose(2, 3) * scale).float()
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores + hidden
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, kv_heads, shared, 1).expand(rows, -1, -1, -1)
        scores = torch.cat([scores, sinks], dim=-1)
    return torch.softmax(scores, dim=-1)[..., : keys.shape[2]].to(values.dtype) @ values
