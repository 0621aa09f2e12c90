"""The arena's rows as capture takes them."""

from __future__ import annotations

import numpy as np
import torch

from engine.arena import Arena, LayerShape


def test_host_rows_are_the_frame_and_lie_where_they_say() -> None:
    """Two groups that see all, two of a window whose buffer has moved; the slot is not the first."""
    shapes = [LayerShape(2, 16, 8), LayerShape(1, 16, 8, window=4)]
    arena = Arena.allocate(shapes, 3, 64, torch.bfloat16, torch.device("cpu"), step_tokens=8, block_tokens=4)
    for group in arena.groups:
        group.copy_(torch.randn(group.shape))
    slot = arena.slots[1]
    slot.bases[1] = 5
    pieces = arena.host_rows(slot, 7, 10)
    assert [piece.address for piece in pieces] == [piece.array.ctypes.data for piece in pieces]
    assert all(plane.flags.c_contiguous for piece in pieces for plane in piece.array)
    frame = np.zeros(arena.layout.frame_bytes(3), np.uint8)
    arena.copy_out(slot, 7, 10, frame)
    assert frame.tobytes() == b"".join(piece.array.tobytes() for piece in pieces)
    rows = [group[1, :, 7 - base : 10 - base] for group, base in zip(arena.groups, arena_bases(arena), strict=True)]
    assert frame.tobytes() == b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in rows)


def arena_bases(arena: Arena) -> list[int]:
    return [arena.slots[1].bases[window] for window in arena.group_windows]
