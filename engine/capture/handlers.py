"""The device contract: what capture asks of a device, whatever it is. `plain.py` is it on host memory, `kernels` on a GPU.

One suite of tests holds every implementation to it (tests/engine/capture/test_contract.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.capture.regions import Memory
from engine.capture.source import RowShape, StateShape


@dataclass(frozen=True, slots=True)
class Delta:
    """Pages of a region that changed, ascending.

    indices  uint32 (n,), page numbers
    hashes   uint64 (n,), the page hash of each (engine/capture/hashing.py) under `seed`
    pages    uint8 (n, page_bytes); what of the last page lies behind the region's end is zero
    """

    indices: np.ndarray
    hashes: np.ndarray
    pages: np.ndarray
    seed: int

    @property
    def byte_count(self) -> int:
        """Bytes of pages."""
        return int(self.pages.nbytes)


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a delta: how many pages were written, and the places in the delta of those that were refused."""

    count: int
    refused: list[int]


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of positions [start, end) of a slot, and the frame that they go to or come from.

    frame         uint8, flat, `frame_tokens` tokens long: groups one after another, each (planes, frame_tokens, row_bytes)
    frame_first   the token of the frame that `start` is
    frame_tokens  0: as many as the range has
    rows          first row of the range in each group's buffer; empty: the row of a position is the position (or its place in a ring)
    spans         tokens [begin, end) of the range that each group moves, None for a group that the frame does not have; empty: all
                  of each. With `rows`, the first row may be negative where the span begins later: such a row is never touched
    """

    slot: int
    start: int
    end: int
    frame: np.ndarray
    frame_first: int = 0
    frame_tokens: int = 0
    rows: tuple[int, ...] = ()
    spans: tuple[tuple[int, int] | None, ...] = ()

    @property
    def token_count(self) -> int:
        """Tokens of the range."""
        return self.end - self.start


class PageRegion(Protocol):
    """A registered region of pages whose changes are unknown until looked for, or marked by whoever writes."""

    page_count: int
    page_bytes: int

    def scan(self, *, everything: bool = False) -> Delta:
        """What changed since the last scan; all of it the first time, and with `everything`."""

    def mark(self, pages: Sequence[int]) -> None:
        """Say that pages changed; regions with a bitmap only."""

    def apply(self, delta: Delta, block_table: Sequence[int] | None = None) -> Applied:
        """Write pages back, each at block_table[its number] (at its number without one), if it matches its hash."""

    def reshape(self, memory: Memory, *, page_bytes: int | None = None, bitmap: bool | None = None) -> None:
        """The region moved, grew, or is watched another way. Takes effect between two scans; no change is missed."""


class RowRegion(Protocol):
    """A registered arena: rows per position, groups of planes."""

    def gather(self, ranges: Sequence[RowRange]) -> None:
        """Rows -> frames, all ranges together; returns when the frames can be read."""

    def scatter(self, ranges: Sequence[RowRange]) -> None:
        """Frames -> rows, all ranges together."""


class StateRegion(Protocol):
    """Registered recurrent state: parts of every slot that a step overwrites in place."""

    byte_count: int

    def save(self, slot: int) -> Any:
        """Copy a slot's state aside, now; `read` brings it to the host later."""

    def read(self, snapshot: Any) -> np.ndarray:
        """The bytes of a snapshot (uint8), parts one after another."""

    def restore(self, slot: int, state: np.ndarray) -> None:
        """Put bytes back into a slot, in the order of the stream: a step that follows sees them."""


class HandlerDevice(Protocol):
    """A device that registers memory."""

    name: str

    def pages(self, memory: Memory, page_bytes: int = 4096, *, bitmap: bool = False) -> PageRegion:
        """Register a region of pages."""

    def rows(self, groups: Sequence[Memory], shape: RowShape) -> RowRegion:
        """Register an arena; one range of memory a group."""

    def state(self, parts: Sequence[Memory], shape: StateShape) -> StateRegion:
        """Register recurrent state; one range of memory a part."""

    def close(self) -> None:
        """Let everything go."""
