"""Stage *capture*: what a step changed -> the engine's lane. Right after the step, on the engine's main thread.

A capture never blocks a step: when the lane is full the position stays behind, the arena still holds what is missing, and
the next capture takes up from there. A sequence's records begin at a block boundary, so the keeper never needs another
sequence's rows to finish a block.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import structlog

from engine.arena import Arena, Range, Slot
from engine.messages import adapter_root
from tiers import copy_sum
from tiers.errors import LaneFull, LaneShareFull, TooLarge
from tiers.lane import LaneWriter, Reservation, SealedReservation
from tiers.layout import RootId, SequenceId, sequence_id

if TYPE_CHECKING:
    from engine.capture.device_rows import DeviceRows

log = structlog.get_logger()

# Largest record, in tokens: bounds the room that a lane must have free, and the time of one copy.
_RECORD_TOKENS = 512


@dataclass(slots=True)
class Cursor:
    """How far one sequence's state is in the lane: [start, position) of it, once `opened`.

    lost  nothing more can be captured: rows of window layers were overwritten on the device before the lane had room, or the lane
          is smaller than a record
    """

    sequence: SequenceId
    epoch: int
    stream: str
    start: int
    position: int
    opened: bool = False
    closed: bool = False
    lost: bool = False


@dataclass(slots=True)
class Capture:
    """The engine's writing end of its lane, and counters.

    rows     on a GPU, the handlers that gather rows; without them the framework copies
    without  on a GPU, why there are no handlers
    """

    lane: LaneWriter
    arena: Arena
    root: RootId
    block_tokens: int
    captured_bytes: int = 0
    seconds: float = 0.0
    lane_full: int = 0
    rows: DeviceRows | None = None
    without: str = ""
    windows_lost: int = 0
    record_tokens: int = field(init=False)
    _reserved: dict[tuple[int, int, int], Reservation] = field(default_factory=dict)  # by slot and range

    def __post_init__(self) -> None:
        # A small lane must take several records, or a full one would never have room again.
        quarter = self.lane.lane_bytes // 4
        self.record_tokens = max(1, min(_RECORD_TOKENS, quarter // max(1, self.arena.layout.token_bytes)))

    @property
    def by_handlers(self) -> bool:
        """Whether the device's handlers gather rows, not the framework's copies."""
        return self.rows is not None and not self.rows.failed

    @property
    def in_two_passes(self) -> bool:
        """On a CPU: whether records are copied first and summed afterwards, since the kernel that does both is missing."""
        return self.rows is None and bool(self.arena.words) and bool(copy_sum.without())

    @property
    def by(self) -> str:
        """How rows get off the device, with the reason if it could be done better; on a CPU "" as a rule."""
        if self.rows is None:
            if self.arena.words:
                return f"copy, then checksum: {copy_sum.without()}" if self.in_two_passes else ""
            return f"copy: {self.without}" if self.without else ""
        if self.rows.failed:
            return f"copy: {self.rows.failed}"
        return f"{self.rows.way}, through tier 0: {self.rows.lane}" if self.rows.lane else self.rows.way

    @property
    def restore_by(self) -> str:
        """As `by`, for frames on their way back."""
        if self.rows is None:
            return f"copy: {self.without}" if self.without else ""
        return f"copy: {self.rows.restore.failed}" if self.rows.restore.failed else "scatter"

    def cursor(self, stream: str, epoch: int, stored: int) -> Cursor:
        """Begin a sequence whose first `stored` tokens are in the lane or the store already."""
        if self.rows is not None:
            self.rows.drop_gathered()
        sequence = sequence_id(stream, epoch)
        start = stored // self.block_tokens * self.block_tokens
        return Cursor(sequence, epoch, stream, start, start)

    def ahead(self, captures: list[tuple[Cursor, Slot, int]]) -> None:
        """Announce a step's captures, each with the position that it will go to: on a GPU one launch gathers them all."""
        if self.rows is None or self.rows.gathered():
            return
        began = time.perf_counter()
        self.rows.ahead(self.ranges(captures))
        self.seconds += time.perf_counter() - began

    def before_step(self, captures: list[tuple[Cursor, Slot, int]]) -> list[Range]:
        """As `ranges`, for a step that may gather its rows itself; nothing where none does."""
        return self.ranges(captures) if self.rows is not None and self.rows.recordable() else []

    def ranges(self, captures: list[tuple[Cursor, Slot, int]]) -> list[Range]:
        """The first record of each of a step's captures, as `advance` will cut it, with its place in the lane if it is filled there."""
        found = [
            (cursor, Range(slot, cursor.position, min(end, cursor.position + self._most_tokens(slot))))
            for cursor, slot, end in captures
            if not cursor.lost and self.arena.oldest(slot) <= cursor.position < end
        ]
        self._reserved.clear()
        if self.rows is None or not self.rows.reaches_lane or not all(cursor.opened for cursor, _ in found):
            return [item for _, item in found]
        wanted = [(item.end - item.start, item.slot.namespace) for _, item in found]
        places = self.lane.reserve_rows_together(self.arena.layout, wanted, self.rows.leave_lane)
        for (_, item), place in zip(found, places, strict=False):
            self._reserved[(item.slot.index, item.start, item.end)] = place
        frames = [*(place.frame for place in places), *[None] * (len(found) - len(places))]
        return [item._replace(frame=frame) for (_, item), frame in zip(found, frames, strict=True)]

    def advance(self, cursor: Cursor, slot: Slot) -> bool:
        """Copy the slot's state from the cursor to the slot's length; False if the lane had no room for all of it."""
        if cursor.lost or (cursor.position >= slot.length and cursor.opened):
            return True
        if cursor.position < min(self.arena.oldest(slot), slot.length):
            self._lose(cursor, slot)
            return True
        began = time.perf_counter()
        try:
            self._open(cursor, slot)
            while cursor.position < slot.length:
                self._append(cursor, slot, min(slot.length, cursor.position + self._most_tokens(slot)))
        except LaneShareFull as error:
            if self.lane.shares.refused[slot.namespace] % 1000 == 1:
                log.warning("capture.share_full", tenant=slot.namespace, stream=cursor.stream, error=str(error))
            return False
        except LaneFull:
            self.lane_full += 1
            if self.lane_full == 1 or self.lane_full % 1000 == 0:
                log.warning("capture.lane_full", stream=cursor.stream, position=cursor.position, times=self.lane_full)
            return False
        except TooLarge as error:  # the tokens that it began with, or one token's rows: there will never be room
            cursor.lost, slot.captured = True, False
            log.warning("capture.too_large", stream=cursor.stream, error=str(error))
            return True
        finally:
            self.seconds += time.perf_counter() - began
        return True

    def _most_tokens(self, slot: Slot) -> int:
        """Tokens of one record: a small share of the lane must take several, too."""
        share = self.lane.shares.limit_of(slot.namespace)
        if not share:
            return self.record_tokens
        return max(1, min(self.record_tokens, share // 4 // max(1, self.arena.layout.token_bytes)))

    def close(self, cursor: Cursor) -> None:
        """Say that the sequence ends at its cursor, so that the keeper can forget it."""
        if cursor.opened and not cursor.closed:
            try:
                self.lane.append_close(cursor.sequence, cursor.epoch, cursor.position)
                cursor.closed = True
            except LaneFull:
                self.lane_full += 1

    def renew(self, lane: LaneWriter) -> None:
        """Go on in another lane; the old one is let go of, for the keeper to drain."""
        old, self.lane = self.lane, lane
        self._reserved.clear()
        if self.rows is not None:
            self.rows.move_lane(lane.ring)
        old.close()

    def begin_again(self, cursor: Cursor, held: int) -> None:
        """Capture a sequence once more behind the first `held` tokens, which the tiers have: the lane that it was in is gone."""
        cursor.start = cursor.position = min(held, cursor.position) // self.block_tokens * self.block_tokens
        cursor.opened = False

    def let_go(self) -> None:
        """Close the lane; handlers first, which may have its memory registered."""
        if self.rows is not None:
            self.rows.close()
            self.rows = None
        self.lane.close()

    def _lose(self, cursor: Cursor, slot: Slot) -> None:
        cursor.lost, slot.captured = True, False  # nothing of it lags any more: what is missing will be in no tier
        self.windows_lost += 1
        log.warning(
            "capture.window_lost", stream=cursor.stream, captured=cursor.position, oldest=self.arena.oldest(slot),
            reason="the lane was full for longer than the window layers' buffers last",
        )  # fmt: skip

    def _open(self, cursor: Cursor, slot: Slot) -> None:
        if cursor.opened:
            return
        self.lane.append_open(
            cursor.sequence,
            cursor.epoch,
            RootId(adapter_root(self.root, slot.adapter)),
            self.arena.layout,
            self.block_tokens,
            slot.namespace,
            slot.session,
            cursor.stream,
            np.ascontiguousarray(slot.tokens[: cursor.start]),
        )
        cursor.opened = True

    def _append(self, cursor: Cursor, slot: Slot, end: int) -> None:
        start = cursor.position
        layout, tokens = self.arena.layout, slot.tokens[start:end]
        if self.rows is None and self.arena.words:
            rows = self.arena.host_rows(slot, start, end)
            self.lane.append_rows(layout, cursor.sequence, cursor.epoch, start, tokens, rows, slot.namespace)
        else:
            promised = self._reserved.pop((slot.index, start, end), None)
            if promised is not None and self.lane.holds(promised):
                reservation: Reservation | SealedReservation = promised
            else:
                reservation = self.lane.reserve_rows(layout, end - start, slot.namespace)
            (self.arena if self.rows is None else self.rows).copy_out(slot, start, end, reservation.frame)
            reservation.commit(cursor.sequence, cursor.epoch, start, tokens)
        cursor.position = end
        self.captured_bytes += layout.frame_bytes(end - start)
