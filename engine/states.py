"""Recurrent state: one row of bytes a slot, holding every layer's convolution and recurrent tensors side by side.

A step of one sequence works on views of its slot's row, in place; a decode batch gathers its rows into a staging area in one
call and scatters them back in one. So a snapshot of a sequence is one contiguous copy, whatever the architecture keeps.
Main thread only. Source: transformers' `LinearAttentionLayer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch

_ALIGN_BYTES = 64

StateKind = Literal["conv", "recurrent"]


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of recurrent state of one sequence: `shape` without the batch."""

    layer: int
    index: int
    kind: StateKind
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def key(self) -> tuple[StateKind, int, int]:
        return self.kind, self.layer, self.index


class Snapshot(NamedTuple):
    """A copy of a sequence's whole recurrent state, (state_bytes,) uint8 on the device; never changed. kind: see points.py."""

    state: torch.Tensor
    kind: int


@dataclass(slots=True)
class StateRows:
    """All slots' recurrent state. `state_bytes` is 0 for a model that has none."""

    shapes: list[StateShape]
    state_bytes: int
    rows: torch.Tensor  # (slots, state_bytes) uint8
    staging: torch.Tensor  # likewise
    row_views: dict[tuple[StateKind, int, int], torch.Tensor] = field(default_factory=dict)  # (slots, *shape)
    staged_views: dict[tuple[StateKind, int, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def allocate(cls, shapes: list[StateShape], slot_count: int, device: torch.device) -> StateRows:
        """Reserve zeroed rows."""
        offsets, end = [], 0
        for shape in shapes:
            offsets.append(end)
            size = int(np.prod(shape.shape)) * shape.dtype.itemsize
            end += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        rows = torch.zeros(slot_count, end, dtype=torch.uint8, device=device)
        made = cls(shapes, end, rows, torch.zeros_like(rows))
        for shape, offset in zip(shapes, offsets, strict=True):
            made.row_views[shape.key] = _view(made.rows, shape, offset)
            made.staged_views[shape.key] = _view(made.staging, shape, offset)
        return made

    def gather(self, slots: list[int]) -> dict[tuple[StateKind, int, int], torch.Tensor]:
        """Tensors (rows, *shape) for a step over these slots; what it changes in them is put back by `scatter`."""
        if not self.state_bytes:
            return {}
        if len(slots) == 1:
            at = slots[0]
            return {key: view[at : at + 1] for key, view in self.row_views.items()}
        count = len(slots)
        self.staging[:count] = self.rows[torch.tensor(slots, device=self.rows.device)]
        return {key: view[:count] for key, view in self.staged_views.items()}

    def scatter(self, slots: list[int]) -> None:
        """After a step: staged rows -> their slots."""
        if self.state_bytes and len(slots) > 1:
            self.rows[torch.tensor(slots, device=self.rows.device)] = self.staging[: len(slots)]

    def copy(self, source: int, target: int) -> None:
        """One slot's state -> another's."""
        self.rows[target].copy_(self.rows[source])

    def take(self, slot: int, kind: int) -> Snapshot:
        """A copy of a slot's state."""
        return Snapshot(self.rows[slot].clone(), kind)

    def put(self, slot: int, state: torch.Tensor | np.ndarray) -> None:
        """Set a slot's state from a snapshot's bytes."""
        source = torch.from_numpy(state) if isinstance(state, np.ndarray) else state
        self.rows[slot].copy_(source)

    def write(self, snapshot: Snapshot, target: np.ndarray) -> None:
        """A snapshot's bytes -> host memory (state_bytes,) uint8."""
        torch.from_numpy(target).copy_(snapshot.state)


def _view(rows: torch.Tensor, shape: StateShape, offset: int) -> torch.Tensor:
    size = int(np.prod(shape.shape)) * shape.dtype.itemsize
    return rows[:, offset : offset + size].view(shape.dtype).unflatten(1, shape.shape)
