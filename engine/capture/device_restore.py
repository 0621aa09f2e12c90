"""Stage *restore* on a GPU: frames from lane and store -> the arena's rows, by the row scatterer through pinned memory.

A frame lies in memory that the device cannot read (a lane, the store's map), and was verified by its checksum when it was
read. It is copied into one half of tier 0 while the device scatters the other half: all layers of up to 64 pieces in one launch, each
to its slot's own rows. The framework would make a copy and a launch for every group. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from engine.arena import Arena, Piece
from engine.capture.driver import Buffer
from engine.capture.errors import CaptureError
from engine.capture.handlers import RowRange
from engine.capture.kernel_device import RANGES_A_LAUNCH, KernelRows, RowList
from engine.capture.launch import Ticket

_HALF_BYTES = 16 << 20


@dataclass(slots=True)
class Half:
    """Half of tier 0: what lies in it (pieces whose frames are there), and the launch that reads it."""

    memory: Buffer
    ranges: RowList
    used: int = 0
    pieces: list[Piece] = field(default_factory=list)
    ticket: Ticket | None = None


class DeviceRestore:
    """Puts frames back into an arena by the row scatterer; see `engine.arena.Applier`."""

    def __init__(
        self, arena: Arena, rows: KernelRows, make: Callable[[int], Buffer], half_bytes: int = _HALF_BYTES
    ) -> None:
        """`make` gives mapped memory."""
        self._arena, self._rows = arena, rows
        self._half_bytes = max(half_bytes, arena.layout.token_bytes + 16)
        self._make = make
        self._halves: list[Half] = []
        self.failed = ""
        self.launches = 0

    def ready(self) -> bool:
        """Whether the scatterer puts frames back; until it is compiled, and after it failed, the framework does."""
        if self.failed:
            return False
        try:
            return self._rows.can_scatter()
        except CaptureError as error:
            self.failed = str(error)
            return False

    def put(self, piece: Piece) -> bool:
        """The rows are there after `flush`. False: not by handlers, the caller copies."""
        if not self.ready() or not self._has_halves():
            return False
        start, first = piece.start, piece.take[0]
        low = max(start, min(piece.firsts[at] for at in self._arena.group_windows))
        most = self._half_bytes // self._arena.layout.token_bytes
        views = self._arena.layout.views(piece.frame, piece.token_count, piece.groups)
        for begin in range(low, piece.end, most):
            stop = min(piece.end, begin + most)
            self._stage(piece, begin, stop, [view[:, begin - start + first : stop - start + first] for view in views])
        return True

    def flush(self) -> None:
        """Return when everything that was put is in the arena."""
        for half in self._halves:
            self._launch(half)
        for half in self._halves:
            self._settle(half)

    # ------------------------------------------------------------ pieces

    def _stage(self, piece: Piece, start: int, end: int, parts: list[np.ndarray]) -> None:
        """Copy tokens [start, end) of every group that the frame has into tier 0."""
        size = sum(part.nbytes for part in parts)
        half = self._room_for(size)
        frame = half.memory.array("u1", size, half.used)
        at = 0
        for part in parts:
            target = frame[at : at + part.nbytes].reshape(part.shape)
            np.copyto(target, part)
            at += part.nbytes
        half.used += (size + 15) & -16
        count = end - start
        half.pieces.append(replace(piece, start=start, frame=frame, token_count=count, take=(0, count)))

    def _has_halves(self) -> bool:
        """Pinned memory is taken with the first piece; without any, the framework copies."""
        if not self._halves:
            try:
                self._halves = [Half(self._make(self._half_bytes), self._rows.new_list()) for _ in range(2)]
            except CaptureError as error:
                self.failed = str(error)
        return bool(self._halves)

    def _room_for(self, size: int) -> Half:
        """The half that is filled now, with room for so many bytes more."""
        half = self._halves[0]
        if half.used + size > self._half_bytes or len(half.pieces) == RANGES_A_LAUNCH:
            self._launch(half)
            self._halves.reverse()
            half = self._halves[0]
            self._settle(half)
        return half

    def _launch(self, half: Half) -> None:
        if half.ticket is not None or not half.pieces:
            return
        if self.failed:
            self._by_framework(half)
            return
        try:
            half.ticket = self._rows.start_scatter([self._range(piece) for piece in half.pieces], half.ranges)
            self.launches += 1
        except CaptureError as error:
            self.failed = str(error)
            self._by_framework(half)

    def _settle(self, half: Half) -> None:
        """Wait until a half is free."""
        if half.ticket is not None:
            try:
                half.ticket.wait()
            except CaptureError as error:
                self.failed = str(error)
                self._by_framework(half)
        half.ticket, half.used = None, 0
        half.pieces.clear()

    def _by_framework(self, half: Half) -> None:
        """The frames are still in tier 0: the framework copies them from there."""
        for piece in half.pieces:
            self._arena.copy_in_by_framework(piece)
        half.pieces.clear()

    def _range(self, piece: Piece) -> RowRange:
        end = piece.end
        spans: list[tuple[int, int] | None] = []
        for group, window in enumerate(self._arena.group_windows):
            begin = min(end, max(piece.start, piece.firsts[window])) - piece.start
            has = bool(piece.groups >> group & 1)
            assert has or begin == piece.token_count, "a needed window's rows are missing from the frame"
            spans.append((begin, piece.token_count) if has else None)
        rows = tuple(self._arena.rows_at(piece.slot, piece.start))
        return RowRange(piece.slot.index, piece.start, end, piece.frame, rows=rows, spans=tuple(spans))
