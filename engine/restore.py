"""Stage *restore*: stored state of a prefix -> the arena. A slice at a time, between steps, on the engine's main thread.

What to restore is planned once, purely, from what the prefix look-up found and from measured speeds; a slice copies some
megabytes straight from the mapped store or lane into the slot. A block that fails its checksum ends the restore there:
the rest is computed again, and the answer says so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import structlog

from engine.arena import Arena, Slot
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

    def saw_prefill(self, token_count: int, seconds: float) -> None:
        """Take in one prefill step; small ones tell little about speed."""
        if token_count >= 32 and seconds > 0:
            self.prefill_tokens_per_s += 0.2 * (token_count / seconds - self.prefill_tokens_per_s)

    def saw_restore(self, byte_count: int, seconds: float) -> None:
        """Take in one slice of a restore."""
        if byte_count >= 1 << 20 and seconds > 0:
            self.restore_bytes_per_s += 0.2 * (byte_count / seconds - self.restore_bytes_per_s)


def worth_restoring(token_count: int, token_bytes: int, speeds: Speeds) -> bool:
    """Whether putting this many tokens back is expected to beat computing them."""
    restore_s = token_count * token_bytes / speeds.restore_bytes_per_s
    return restore_s < token_count / speeds.prefill_tokens_per_s


@dataclass(slots=True)
class Restore:
    """A restore in progress: the slot is to be filled from its length up to `goal` from what the tiers hold of `tokens`."""

    root: RootId
    namespace: str
    tokens: np.ndarray
    block_tokens: int
    goal: int
    reused: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    bad_blocks: int = 0
    seconds: float = 0.0
    overtaken: int = 0

    def slice(self, finder: PrefixFinder, arena: Arena, slot: Slot, speeds: Speeds) -> bool:
        """Copy about `_SLICE_BYTES` more; True when nothing is left to copy.

        Each slice looks the prefix up anew, in the snapshot that it reads from: what the keeper moves from the lane to
        the disk, or seals, between two slices is found where it is by then.
        """
        began, start = time.perf_counter(), slot.length
        copied: dict[str, int] = {}
        try:
            with finder.reading() as read:
                found = read.find(
                    self.root, self.namespace, self.tokens, limit=self.goal, start=start, block_tokens=self.block_tokens
                )
                self._copy(found, read, arena, slot, copied)
        except (Lost, StoreFailed) as error:
            self._overtaken(error, slot, start, copied)
        for tier, count in copied.items():
            self.reused[tier] = self.reused.get(tier, 0) + count
        seconds = time.perf_counter() - began
        self.seconds += seconds
        speeds.saw_restore((slot.length - start) * arena.layout.token_bytes, seconds)
        return slot.length >= self.goal

    def _copy(self, extents: list[Extent], read: Reading, arena: Arena, slot: Slot, copied: dict[str, int]) -> None:
        room = max(1, _SLICE_BYTES // arena.layout.token_bytes)
        for extent in extents:
            if room <= 0:
                return
            try:
                frame, frame_tokens, take_start, take_end, _ = read(extent)
            except (Lost, StoreFailed) as error:
                self.bad_blocks += 1
                self._give_up(slot, f"stored state is damaged from position {slot.length}", error)
                return
            count = take_end - take_start
            arena.copy_in(slot, slot.length, frame, frame_tokens, (take_start, take_end))
            slot.length += count
            room -= count
            copied[extent.tier] = copied.get(extent.tier, 0) + count
        if room > 0:
            self.goal = slot.length

    def _overtaken(self, error: Lost | StoreFailed, slot: Slot, start: int, copied: dict[str, int]) -> None:
        """A writer overwrote a record of the lane while it was copied: undo the slice; it is on disk by now."""
        slot.length = start
        copied.clear()
        self.overtaken += 1
        if self.overtaken > 3:
            self._give_up(slot, "stored state was overwritten while it was read", error)

    def _give_up(self, slot: Slot, reason: str, error: Lost | StoreFailed) -> None:
        log.warning("restore.stopped", position=slot.length, reason=reason, error=str(error))
        self.reason = reason
        self.goal = slot.length
