"""Tier 0: a ring of host memory that a capture copies into without waiting, in front of the lane. Stage *capture*, engine's step thread.

For devices whose memory is copied asynchronously: the ring's memory is pinned, a copy is started into `frame`, and `commit` is
given a function that says whether the copy is complete. `append_ready` moves what is complete into the lane, in order. Where
there is no CUDA the memory is plain and every copy is complete at once. It has the interface of LaneWriter, so a capture need
not know which it has.
Source: docs/log-format.md
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiers.errors import LaneFull, TooLarge
from tiers.lane import LaneWriter
from tiers.lane_format import ALIGN, PointKind
from tiers.layout import Layout, RootId, SequenceId
from tiers.shares import LaneShares

Ready = Callable[[], bool]


def _at_once() -> bool:
    return True


@dataclass(slots=True)
class _Staged:
    """A record that waits: `append` puts it into the lane; it takes up [.., end) of the ring."""

    append: Callable[[], object]
    ready: Ready
    end: int


class StagedFrame:
    """Room in the ring for one record. Start a copy into `frame`, then `commit`; a new reservation drops an older one.

    frame  writable uint8, flat: memory of the ring
    """

    __slots__ = ("frame", "token_count", "_append", "_ring", "_end")

    def __init__(
        self,
        ring: StagingRing,
        frame: np.ndarray,
        end: int,
        token_count: int,
        append: Callable[..., Callable[[], object]],
    ) -> None:
        self.frame, self.token_count = frame, token_count
        self._ring, self._end, self._append = ring, end, append

    def commit(self, *what: Any, ready: Ready = _at_once) -> None:
        """As the commit of a lane's reservation, with the same arguments. `ready`: whether the copy into `frame` is complete."""
        assert self._ring._reservation is self, "this reservation was dropped by a newer one or committed before"
        self._ring._reservation = None
        self._ring._stage(self._append(self.frame, *what), ready, self._end)


class StagingRing:
    """`memory` as a ring of frames on their way to `lane`. Not thread-safe: one thread captures.

    memory  uint8, flat, a multiple of 64 bytes; pinned for CUDA
    """

    def __init__(self, lane: LaneWriter, memory: np.ndarray) -> None:
        assert memory.dtype == np.uint8 and memory.ndim == 1 and memory.size % ALIGN == 0, (
            "a flat ring of 64-byte units"
        )
        self.lane = lane
        self._memory = memory
        self._staged: deque[_Staged] = deque()
        self._reservation: StagedFrame | None = None
        self._head = self._tail = 0  # monotonic bytes

    @property
    def lane_bytes(self) -> int:
        """The most that a record may rely on: the smaller of ring and lane."""
        return min(self._memory.size, self.lane.lane_bytes)

    @property
    def shares(self) -> LaneShares:
        """The lane's."""
        return self.lane.shares

    @property
    def free_bytes(self) -> int:
        """Room in the lane; what is staged will need some of it."""
        return max(0, self.lane.free_bytes - (self._head - self._tail))

    @property
    def waiting(self) -> int:
        """Records that are staged and not in the lane yet."""
        return len(self._staged)

    def reserve_rows(self, layout: Layout, token_count: int, namespace: str = "") -> StagedFrame:
        """Room for the rows of `token_count` tokens. Raises LaneFull (retry after copies completed or a drain), TooLarge.

        A tenant beyond its share of the lane holds up what is staged after its record, so that records keep their order.
        """

        def append(
            frame: np.ndarray, sequence: SequenceId, epoch: int, start: int, tokens: Any
        ) -> Callable[[], object]:
            kept = np.array(tokens, dtype="<i4")

            def put() -> object:
                reservation = self.lane.reserve_rows(layout, token_count, namespace)
                np.copyto(reservation.frame, frame)
                return reservation.commit(sequence, epoch, start, kept)

            return put

        return self._reserve(layout.frame_bytes(token_count), token_count, append)

    def reserve_point(self, state_bytes: int, namespace: str = "") -> StagedFrame:
        """Room for one rollback point's state. As `reserve_rows`."""

        def append(
            frame: np.ndarray, sequence: SequenceId, epoch: int, position: int, kind: PointKind
        ) -> Callable[[], object]:
            def put() -> object:
                reservation = self.lane.reserve_point(state_bytes, namespace)
                np.copyto(reservation.frame, frame)
                return reservation.commit(sequence, epoch, position, kind)

            return put

        return self._reserve(state_bytes, 0, append)

    def append_open(
        self, sequence: SequenceId, epoch: int, root: RootId, layout: Layout, block_tokens: int, namespace: str,
        session: str, stream: str, prefix_tokens: np.ndarray,
    ) -> None:  # fmt: skip
        """As LaneWriter.append_open, after what is staged."""
        prefix = np.array(prefix_tokens, dtype="<i4")
        said = (sequence, epoch, root, layout, block_tokens, namespace, session, stream, prefix)
        self._stage(lambda: self.lane.append_open(*said), _at_once, self._head)

    def append_close(self, sequence: SequenceId, epoch: int, token_end: int) -> None:
        """As LaneWriter.append_close, after what is staged."""
        self._stage(lambda: self.lane.append_close(sequence, epoch, token_end), _at_once, self._head)

    def _reserve(self, size: int, token_count: int, append: Callable[..., Callable[[], object]]) -> StagedFrame:
        self._reservation = None
        ring, room = self._memory.size, -(-size // ALIGN) * ALIGN
        if room > self.lane_bytes:
            raise TooLarge(f"a frame of {size} bytes", where="the staging ring", cause=f"it has {ring}")
        start = self._head
        if start % ring + room > ring:  # contiguous: skip to the start of the ring
            start += ring - start % ring
        if start + room - self._tail > ring:
            self.append_ready()
        if start + room - self._tail > ring:
            raise LaneFull(f"no room to stage {size} bytes", cause=f"{len(self._staged)} records wait")
        place = start % ring
        self._reservation = StagedFrame(self, self._memory[place : place + size], start + room, token_count, append)
        return self._reservation

    def _stage(self, append: Callable[[], object], ready: Ready, end: int) -> None:
        self._head = end
        self._staged.append(_Staged(append, ready, end))
        self.append_ready()

    def append_ready(self) -> int:
        """Move records whose copies are complete into the lane, in order, as far as it has room; returns how many still wait."""
        while self._staged and self._staged[0].ready():
            try:
                self._staged[0].append()
            except LaneFull:
                break
            self._tail = self._staged.popleft().end
        if not self._staged:
            self._tail = self._head
        return len(self._staged)

    def close(self) -> None:
        """Let the lane go; what is staged and not appended is lost to the tiers, and the arena still holds it."""
        self._staged.clear()
        self._reservation = None
        self.lane.close()
