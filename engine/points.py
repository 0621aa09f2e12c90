"""Rollback points: copies of a sequence's recurrent state, so that a later request can go on from before the tip.

Taken after a step's tokens are on their way: one copy on the device, kept with the slot and thinned out; written to the lane
later, some bytes a step, whole when nothing else is to do. Taken at the ends of prefill chunks (one of them before the last
tokens of the prompt), at message boundaries, every few tokens of an answer, and at the tip when a sequence ends. Models without
recurrent state need none: `Points.wanted` is False. Main thread only. Source: docs/kinds-of-state.md, "Rollback points".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import structlog

from engine.arena import Arena, Slot
from engine.capture import Capture, Cursor
from engine.states import Snapshot
from tiers.errors import LaneFull, LaneShareFull, TooLarge
from tiers.lane_format import PointKind
from tiers.thinning import kept_points

log = structlog.get_logger()

# Bytes of points written to the lane in one step, beyond the first point: about a millisecond.
_STEP_BYTES = 4 << 20
# Points that wait for the lane; beyond that the oldest is given up (a full lane), and counted.
_WAITING = 256


def tail_cut(prompt_count: int, tail_tokens: int) -> int:
    """Where the last chunk of a prompt begins, so that a point lies at least `tail_tokens` before its end; 0: nowhere.

    At multiples of `tail_tokens`, so that prompts which differ only in their last tokens are cut alike.
    """
    return max(0, (prompt_count - tail_tokens) // tail_tokens * tail_tokens)


def message_cuts(prompt: Sequence[int], stop_tokens: Collection[int], prefill_chunk: int) -> list[int]:
    """Message boundaries at which prefill is cut: after tokens that end an answer, the last one in each chunk.

    One a chunk, so that a conversation of many short messages takes at most twice as many steps.
    """
    last = {at // prefill_chunk: at for at, token in enumerate(prompt[:-1], 1) if token in stop_tokens}
    return [at for at in last.values() if at % prefill_chunk]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A point on its way to the lane."""

    cursor: Cursor
    position: int
    snapshot: Snapshot
    namespace: str


@dataclass(slots=True)
class Points:
    """Takes, keeps and writes the points of one engine; counters since the start of the process.

    chunk_tokens   a point at its multiples in a prompt
    tail_tokens    least distance of a point before the end of a prompt
    answer_tokens  a point every so many tokens of an answer
    resident       most points kept on the device for one slot
    """

    arena: Arena
    chunk_tokens: int
    tail_tokens: int
    answer_tokens: int
    resident: int
    waiting: deque[Waiting] = field(default_factory=deque)
    taken: int = 0
    written: int = 0
    written_bytes: int = 0
    dropped: int = 0
    missing: int = 0

    @property
    def wanted(self) -> bool:
        """The model has recurrent state."""
        return self.arena.states.state_bytes > 0

    def cuts(self, prompt: Sequence[int], stop_tokens: Collection[int], prefill_chunk: int) -> tuple[int, ...]:
        """Where a prompt's prefill is cut for points, beside the ends of whole chunks; nowhere without recurrent state."""
        if not self.wanted:
            return ()
        tail = tail_cut(len(prompt), self.tail_tokens)
        return tuple(sorted({*message_cuts(prompt, stop_tokens, prefill_chunk), tail} - {0}))

    def after_prefill(
        self, slot: Slot, cursor: Cursor | None, position: int, prompt: Sequence[int], stop_tokens: Collection[int]
    ) -> None:
        """A step of prefill ended at `position`."""
        kind = PointKind.CHUNK
        if position == len(prompt) or prompt[position - 1] in stop_tokens:
            kind = PointKind.MESSAGE
        elif position == tail_cut(len(prompt), self.tail_tokens):
            kind = PointKind.PROMPT_TAIL
        elif position % self.chunk_tokens:
            return
        self._take(slot, cursor, position, kind)

    def after_decode(self, slot: Slot, cursor: Cursor | None, position: int) -> None:
        """A token of an answer was fed; `position` tokens are computed."""
        if self.wanted and position % self.answer_tokens == 0:
            self._take(slot, cursor, position, PointKind.ANSWER_TAIL)

    def at_tip(self, slot: Slot, cursor: Cursor | None) -> None:
        """The sequence ends here, if the state has not run ahead of the truth (a stop string)."""
        if slot.state_position == slot.length and slot.length not in slot.points:
            self._take(slot, cursor, slot.length, PointKind.TIP)

    def restored(self, slot: Slot) -> None:
        """The state at the slot's length came from elsewhere: keep a copy, it may be gone back to."""
        at = slot.length
        if self.wanted and at and slot.state_position == at and at not in slot.points:
            slot.points[at] = self.arena.states.take(slot.index, PointKind.CHUNK)

    def _take(self, slot: Slot, cursor: Cursor | None, position: int, kind: int) -> None:
        if not self.wanted or not position or slot.state_position != position:
            return
        snapshot = self.arena.states.take(slot.index, kind)
        self.taken += 1
        slot.points[position] = snapshot
        self._thin(slot)
        if cursor is not None:
            self.waiting.append(Waiting(cursor, position, snapshot, slot.namespace))
            if len(self.waiting) > _WAITING:
                self.waiting.popleft()
                self.dropped += 1

    def _thin(self, slot: Slot) -> None:
        kept = kept_points([(at, point.kind) for at, point in sorted(slot.points.items())], max(slot.points))
        positions = sorted(kept)[-self.resident :]
        slot.points = {at: point for at, point in slot.points.items() if at in positions}

    # ------------------------------------------------------------ to the lane

    def write(self, capture: Capture, *, everything: bool = False) -> None:
        """Write waiting points whose rows are in the lane: about `_STEP_BYTES`, at least one, or all."""
        room = _STEP_BYTES
        for _ in range(len(self.waiting)):
            if room <= 0 and not everything:
                return
            point = self.waiting.popleft()
            if point.cursor.closed or point.cursor.lost or point.position < point.cursor.start:
                continue
            if point.cursor.position < point.position or not point.cursor.opened:
                self.waiting.append(point)
                continue
            try:
                self._append(capture, point)
            except LaneShareFull:  # of this tenant; others' points go on
                self.waiting.append(point)
                continue
            except LaneFull:
                self.waiting.appendleft(point)
                return
            except TooLarge as error:
                if not self.dropped:
                    log.warning("points.too_large", error=str(error))
                self.dropped += 1
                continue
            room -= self.arena.states.state_bytes

    def cut(self, cursor: Cursor, position: int) -> None:
        """The sequence was cut back to `position`: what waits beyond it is void."""
        self.waiting = deque(p for p in self.waiting if p.cursor is not cursor or p.position <= position)

    def pending(self, cursor: Cursor) -> bool:
        """Whether points of a sequence still wait for the lane."""
        return any(point.cursor is cursor for point in self.waiting)

    def _append(self, capture: Capture, point: Waiting) -> None:
        reservation = capture.lane.reserve_point(self.arena.states.state_bytes, point.namespace)
        self.arena.states.write(point.snapshot, reservation.frame)
        reservation.commit(point.cursor.sequence, point.cursor.epoch, point.position, point.snapshot.kind)
        self.written += 1
        self.written_bytes += self.arena.states.state_bytes
