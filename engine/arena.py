"""The engine's device memory for attention state: one preallocated region, cut into slots of one sequence each.

Every layer's K and V of one head is a plane; a slot is (planes, tokens, head_dim) for each group of equally shaped planes,
so attention reads each head's rows contiguously, and what a step wrote for a token range is one strided slice. Measured on
the demo model at 7k tokens of context, decode took 89 ms a step in this layout, 115 to 146 with a layer's heads side by
side in a row, 122 to 164 with one row per token over all layers (docs/lab.md). Main thread only.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.memory import allocate
from tiers.layout import Layout

# Frames that are restored lie in read-only maps; they are only ever the source of a copy.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores for a token: K and V of `heads` heads."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class PlaneRange:
    """Where a layer's K or V lies: planes [start, end) of a group."""

    group: int
    start: int
    end: int


@dataclass(slots=True)
class Slot:
    """Room for one sequence. `tokens[:length]` are those whose state is in the arena, `stored` of them also in a tier.

    captured is False while a sequence that asked not to be captured works in it; adapter is the digest of what it was computed with.
    """

    index: int
    tokens: np.ndarray  # (context_tokens,) int32
    length: int = 0
    stored: int = 0
    namespace: str = ""
    session: str = ""
    captured: bool = True
    busy: bool = False
    last_used: int = 0
    adapter: str = ""

    def common_prefix(self, tokens: np.ndarray) -> int:
        """Count of leading tokens that this slot shares with a token list."""
        count = min(self.length, len(tokens))
        differing = np.nonzero(self.tokens[:count] != tokens[:count])[0]
        return int(differing[0]) if differing.size else count


@dataclass(slots=True)
class Arena:
    """All slots of one engine. Build with `Arena.allocate`."""

    layout: Layout
    groups: list[torch.Tensor]  # one a group: (slots, planes, context_tokens, dim)
    keys: list[PlaneRange]  # by layer
    values: list[PlaneRange]
    slots: list[Slot]
    context_tokens: int
    key_views: list[list[torch.Tensor]] = field(default_factory=list)  # [slot][layer] (heads, context_tokens, dim)
    value_views: list[list[torch.Tensor]] = field(default_factory=list)

    @classmethod
    def allocate(
        cls, layers: list[LayerShape], slot_count: int, context_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Arena:
        """Reserve memory for `slot_count` sequences of `context_tokens`; pages are touched on first use (see `prefault`)."""
        dims = sorted({dim for layer in layers for dim in (layer.key_dim, layer.value_dim)})
        plane_counts = [0] * len(dims)
        keys: list[PlaneRange] = []
        values: list[PlaneRange] = []
        for layer in layers:
            for ranges, dim in ((keys, layer.key_dim), (values, layer.value_dim)):
                group = dims.index(dim)
                start = plane_counts[group]
                plane_counts[group] = start + layer.heads
                ranges.append(PlaneRange(group, start, start + layer.heads))
        groups = [
            allocate((slot_count, planes, context_tokens, dim), dtype, device)
            for planes, dim in zip(plane_counts, dims, strict=True)
        ]
        layout = Layout(tuple((planes, dim * dtype.itemsize) for planes, dim in zip(plane_counts, dims, strict=True)))
        slots = [Slot(i, np.zeros(context_tokens, dtype=np.int32)) for i in range(slot_count)]
        arena = cls(layout, groups, keys, values, slots, context_tokens)
        arena.key_views = [[arena._plane(i, r) for r in keys] for i in range(slot_count)]
        arena.value_views = [[arena._plane(i, r) for r in values] for i in range(slot_count)]
        return arena

    def _plane(self, slot: int, planes: PlaneRange) -> torch.Tensor:
        return self.groups[planes.group][slot, planes.start : planes.end]

    def prefault(self, token_count: int) -> None:
        """Touch the first slots' memory for `token_count` tokens, so that a restore does not wait for page faults."""
        for slot in range(min(len(self.slots), -(-token_count // self.context_tokens))):
            for group in self.groups:
                group[slot].zero_()

    def rows_at(self, slot: Slot, position: int) -> list[int]:
        """By group, the row of the slot's buffer that holds a position."""
        return [position] * len(self.groups)

    def copy_out(self, slot: Slot, start: int, end: int, frame: np.ndarray) -> None:
        """State of [start, end) -> `frame` (uint8, layout order, writable)."""
        for group, target in zip(self.groups, self._typed(frame, end - start), strict=True):
            target.copy_(group[slot.index, :, start:end])

    def copy_in(self, slot: Slot, start: int, frame: np.ndarray, token_count: int, take: tuple[int, int]) -> None:
        """Tokens [take) of a frame of `token_count` tokens -> state of the slot from `start` on."""
        count = take[1] - take[0]
        for group, source in zip(self.groups, self._typed(frame, token_count), strict=True):
            group[slot.index, :, start : start + count].copy_(source[:, take[0] : take[1]])

    def copy_prefix(self, source: Slot, target: Slot, token_count: int) -> None:
        """State of the first `token_count` tokens of one slot -> another."""
        target.stored = min(source.stored, token_count)
        for group in self.groups:
            group[target.index, :, :token_count].copy_(group[source.index, :, :token_count])

    def _typed(self, frame: np.ndarray, token_count: int) -> list[torch.Tensor]:
        """A frame's groups as host tensors (planes, tokens, dim) that share its memory."""
        views = self.layout.views(frame, token_count)
        return [torch.from_numpy(view).view(group.dtype) for view, group in zip(views, self.groups, strict=True)]
