"""Memory for an engine's arenas: on a CPU, anonymous memory that asks for huge pages.

A decode step reads every row of its contexts once, and with 4 KiB pages it waits for page tables (docs/lab.md). A process of
huge pages is also torn down sooner when it is killed. Where the kernel gives none, the memory works as any other.
"""

from __future__ import annotations

import math
import mmap

import torch

_HUGE_PAGE = 2 << 20


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros (CPU) or of anything (elsewhere); its pages are touched on first use. Lives as long as the tensor."""
    byte_count = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or byte_count < _HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, -(-byte_count // _HUGE_PAGE) * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
