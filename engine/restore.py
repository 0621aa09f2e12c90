"""Stage *restore*: stored state of a prefix -> the arena. A slice at a time, between steps, on the engine's main thread.

What to restore is planned once, purely, from what the prefix look-up found and from measured speeds; a slice copies some
megabytes straight from the mapped store or lane into the slot. Window layers get the rows of their window only. What fails its
checksum ends the restore there and is noted; the loop plans again without it, and the answer says so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import structlog

from engine.arena import Arena, Slot
from engine.plan import UNREADABLE, Damage, Plan
from tiers.errors import Lost, StoreFailed
from tiers.layout import RootId
from tiers.prefix import Extent, PrefixFinder, Reading

log = structlog.get_logger()

_SLICE_BYTES = 96 << 20


@dataclass(slots=True)
class Speeds:
    """Measured on this machine, by this process; running means, so that they follow what happens."""

    prefill_tokens_per_s: float
    restore_bytes_per_s: float
    always_restore: bool = False

    def saw_prefill(self, token_count: int, seconds: float) -> None:
        """Take in one prefill step; small ones tell little about speed."""
        if token_count >= 32 and seconds > 0:
            self.prefill_tokens_per_s += 0.2 * (token_count / seconds - self.prefill_tokens_per_s)

    def saw_restore(self, byte_count: int, seconds: float) -> None:
        """Take in one slice of a restore."""
        if byte_count >= 1 << 20 and seconds > 0:
            self.restore_bytes_per_s += 0.2 * (byte_count / seconds - self.restore_bytes_per_s)


def worth_restoring(token_count: int, byte_count: int, speeds: Speeds) -> bool:
    """Whether putting these bytes back is expected to beat computing that many tokens."""
    if speeds.always_restore:
        return token_count > 0
    return byte_count / speeds.restore_bytes_per_s < token_count / speeds.prefill_tokens_per_s


def extension(arena: Arena, slot: Slot, goal: int) -> Plan:
    """Go on with rows only, from the slot's length to `goal`: the windows too, or those before `goal` where they don't reach.

    Recurrent state is left alone: whoever goes on from here takes a rollback point.
    """
    start, windows = slot.length, len(arena.windows) - 1
    if arena.windows_reach(slot, start) and goal - start <= arena.step_tokens:
        arena.make_room(slot, start, goal)
        return Plan(goal, start, (start,) * windows)
    return jump(arena, slot, goal, goal)


def jump(arena: Arena, slot: Slot, goal: int, end: int) -> Plan:
    """As `extension`, on the way to `end`: of windows only what is needed there, since compaction leaves no other rows of them."""
    firsts = tuple(arena.needed_from(at, end) for at in range(1, len(arena.windows)))
    return Plan(goal, slot.length, tuple(min(first, goal) for first in firsts))


@dataclass(slots=True)
class Restore:
    """A restore in progress: what `plan` takes from the tiers goes into the slot, whose first `plan.device` tokens are right.

    reused  tokens by tier; at  position up to which this has come; done  nothing is left to copy, or damage ended it
    """

    root: RootId
    namespace: str
    tokens: np.ndarray
    block_tokens: int
    plan: Plan
    damage: Damage
    reused: dict[str, int] = field(default_factory=dict)
    bad_blocks: int = 0
    seconds: float = 0.0
    overtaken: int = 0
    at: int = -1
    done: bool = False
    failed: bool = False
    without_window: bool = False  # ended where stored rows of a window have gone
    carried: int = 0

    def carry(self, earlier: Restore) -> None:
        """Go on with the accounts of a restore that met damage."""
        self.reused, self.seconds = dict(earlier.reused), earlier.seconds
        self.carried = sum(self.reused.values())

    def complete(self, slot: Slot) -> bool:
        """Everything that was planned is in place."""
        return self.done and slot.length == self.plan.goal and self.at >= self.plan.goal and not self.failed

    def slice(self, finder: PrefixFinder, arena: Arena, slot: Slot, speeds: Speeds) -> bool:
        """Copy about `_SLICE_BYTES` more; True when nothing is left to copy.

        Each slice looks the prefix up anew, in the snapshot that it reads from: what the keeper moves from the lane to
        the disk, or seals, between two slices is found where it is by then.
        """
        began = time.perf_counter()
        if self.at < 0:
            self._begin(arena, slot)
        start, length, copied = self.at, slot.length, dict[str, int]()
        try:
            with finder.reading() as read:
                self._state(read, arena, slot)
                if not self.done:
                    with arena.together():
                        self._rows(read, arena, slot, copied)
        except (Lost, StoreFailed) as error:
            self._overtaken(error, slot, start, length, copied)
        for tier, count in copied.items():
            self.reused[tier] = self.reused.get(tier, 0) + count
        seconds = time.perf_counter() - began
        self.seconds += seconds
        speeds.saw_restore((self.at - start) * arena.layout.token_bytes, seconds)
        return self.done

    def _begin(self, arena: Arena, slot: Slot) -> None:
        plan = self.plan
        slot.filling = not arena.append_only
        for window, first in enumerate(plan.firsts, 1):
            base = slot.bases[window]
            fits = plan.goal - base <= arena.capacities[window]
            extends = first == plan.device and base <= arena.needed_from(window, first) and fits
            if first < plan.goal and not extends:
                slot.bases[window] = first
        self.at = min([plan.device, *plan.firsts])

    def _state(self, read: Reading, arena: Arena, slot: Slot) -> None:
        """The recurrent state first: without it, the rows are of no use."""
        point, position = self.plan.point, self.plan.goal
        if point is None or slot.state_position == position:
            return
        try:
            arena.states.put(slot.index, read.point(point))
            slot.state_position = position
        except (Lost, StoreFailed) as error:
            self.bad_blocks += 1
            self.damage.points.add(position)
            self._give_up(f"the rollback point at {position} is damaged", error)

    def _rows(self, read: Reading, arena: Arena, slot: Slot, copied: dict[str, int]) -> None:
        plan = self.plan
        room = max(1, _SLICE_BYTES // max(1, arena.layout.token_bytes))
        found = read.find(
            self.root, self.namespace, self.tokens, limit=plan.goal, start=self.at, block_tokens=self.block_tokens
        )
        for extent in found:
            if room <= 0:
                return
            try:
                self.without_window = not self._copy(extent, read, arena, slot)
            except (Lost, StoreFailed) as error:
                self.bad_blocks += 1
                self.damage.limit = self.at
                self._give_up(f"stored state is damaged from position {self.at}", error)
                return
            if self.without_window:  # compaction has dropped them since it was planned
                self.damage.limit = self.at
                self.done = self.failed = True
                return
            room -= extent.token_count
            self.at = extent.token_end
            fresh = max(0, self.at - slot.length)
            slot.length += fresh
            if fresh:
                copied[extent.tier] = copied.get(extent.tier, 0) + fresh
        if self.at >= plan.goal:
            self.done = True
        elif room > 0:  # it has gone since it was planned
            self.damage.limit = self.at
            self.done = self.failed = True

    def _copy(self, extent: Extent, read: Reading, arena: Arena, slot: Slot) -> bool:
        """False, and nothing is copied, if rows of a window are wanted that the extent hasn't got."""
        plan = self.plan
        firsts = [max(plan.device, extent.token_start), *plan.firsts]
        wanted = [firsts[at] for at in set(arena.group_windows)]
        if not wanted or min(wanted) >= extent.token_end:
            return True  # nothing but window rows, and none of these
        in_window = any(first < extent.token_end for first in plan.firsts)
        frame, frame_tokens, take_start, take_end, groups = read(extent, windows=in_window)
        if any(
            firsts[at] < extent.token_end and not groups >> group & 1 for group, at in enumerate(arena.group_windows)
        ):
            return False
        arena.copy_in(
            slot, extent.token_start, frame, frame_tokens, (take_start, take_end), firsts=firsts, groups=groups
        )
        return True

    def _overtaken(
        self, error: Lost | StoreFailed, slot: Slot, start: int, length: int, copied: dict[str, int]
    ) -> None:
        """A writer overwrote a record of the lane while it was copied: undo the slice; it is on disk by now."""
        slot.length, self.at, self.done = length, start, False
        if self.plan.point is not None:
            slot.state_position = -1
        copied.clear()
        self.overtaken += 1
        if self.overtaken > 3:
            self.damage.limit = self.at
            overwritten = "stored state was overwritten while it was read"
            self._give_up(UNREADABLE if isinstance(error, StoreFailed) else overwritten, error)

    def _give_up(self, reason: str, error: Lost | StoreFailed) -> None:
        log.warning("restore.stopped", position=self.at, reason=reason, error=str(error))
        self.damage.reason = reason
        self.done = self.failed = True
