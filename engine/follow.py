"""Following a stream that another engine works on: its state is restored from the tiers into a slot here, as it appears there.

Stage *restore*, ahead of time; on the engine's main thread, a slice between two steps. A hot standby follows what it protects,
and the target of a migration what is about to move to it. The rows are the other engine's own, read from its lane, so a stream
that goes on from them goes on bit for bit. A followed slot is room that nobody needed: a sequence that finds no idle slot takes it,
that of an idle session first. An idle session is only followed where there is room to spare.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np
import structlog

from engine import messages as m
from engine.arena import Arena, Slot
from engine.plan import Damage, Plan
from engine.restore import Restore, Speeds, extension, jump
from tiers.layout import RootId
from tiers.prefix import PrefixFinder

log = structlog.get_logger()

BUSY_SLICE_TOKENS = 64  # at once between the steps of an engine that serves; an idle one takes all that there is
BUSY_SLICE_S = 0.008  # and so long at most: under a tenth of a decode step of the demo model
LOOK_INTERVAL_S = 0.01  # between the first two looks for rows that aren't there yet
LOOK_LIMIT_S = 0.05  # and the longest that it grows to while they aren't


@dataclass(slots=True)
class Followed:
    """One stream. The slot holds the state of the first `slot.length` of its `count` known tokens."""

    stream: str
    slot: Slot
    count: int
    idle: bool = False
    next_look: float = 0.0
    look_s: float = LOOK_INTERVAL_S
    caught_up: bool = False
    told: tuple[int, bool] = (-1, False)

    @property
    def goal(self) -> int:
        """Up to where there can be rows: a live stream's last token is computed by the step that gives the next one."""
        return self.count if self.idle else max(0, self.count - 1)

    @property
    def behind(self) -> bool:
        """Something may be there to be restored."""
        return self.slot.length < self.goal


@dataclass(slots=True)
class Follower:
    """All that one engine follows."""

    arena: Arena
    root: RootId
    block_tokens: int
    speeds: Speeds
    follows: dict[str, Followed] = field(default_factory=dict)
    exact: dict[int, int] = field(
        default_factory=dict
    )  # slot -> leading tokens whose rows came from the tiers, in idle slots
    restored_tokens: int = 0

    # ------------------------------------------------------------ messages

    def follow(self, message: m.Follow) -> list[m.Followed]:
        """Begin, or take in more tokens; what is to be told if that can't be, or if another follow gave way to it."""
        tokens, told = np.frombuffer(message.tokens, "<i4"), list[m.Followed]()
        end = message.start + len(tokens)
        known = self.follows.get(message.stream)
        if end > self.arena.context_tokens:
            self.unfollow(message.stream)
            return [m.Followed(message.stream, 0, refused="too_long")]
        if message.start and (known is None or known.count < message.start):
            return [m.Followed(message.stream, 0, refused="gap")]
        if not message.start:
            self.unfollow(message.stream)
            slot = self._slot_for(message, tokens)
            if slot is None and not message.idle and any(other.idle for other in self.follows.values()):
                told = [gave_way for gave_way in [self.make_room()] if gave_way]
                slot = self._slot_for(message, tokens)
            if slot is None:
                return [*told, m.Followed(message.stream, 0, refused="no_slot")]
            known = self.follows[message.stream] = Followed(message.stream, slot, 0, message.idle)
        assert known is not None, "begun above"
        known.slot.tokens[message.start : end] = tokens
        known.count = end
        known.next_look, known.look_s = 0.0, LOOK_INTERVAL_S
        known.caught_up = not known.behind
        return told

    def unfollow(self, stream: str) -> Slot | None:
        """Let go of the slot; its state stays."""
        known = self.follows.pop(stream, None)
        if known is None:
            return None
        known.slot.busy = False
        self.exact[known.slot.index] = known.slot.length
        return known.slot

    def claim(self, stream: str) -> Slot | None:
        """The stream was submitted here: its slot is idle again, so that the sequence can go on in it. None if it wasn't followed."""
        return self.unfollow(stream)

    def let_go_of(self, session: str) -> None:
        """A session is parked."""
        for known in [known for known in self.follows.values() if session and known.slot.session == session]:
            self.unfollow(known.stream)

    def make_room(self) -> m.Followed | None:
        """Give up the follow that has least to lose, an idle session's before a live stream's; None if there is none."""
        known = min(self.follows.values(), key=lambda known: (not known.idle, known.slot.length), default=None)
        if known is None:
            return None
        self.unfollow(known.stream)
        log.info("follow.gave_way", stream=known.stream, position=known.slot.length)
        return m.Followed(known.stream, 0, refused="no_slot")

    def exact_count(self, slot: Slot) -> int:
        """Leading tokens of an idle slot whose rows were restored here; computing in it ends that (`used`)."""
        return min(self.exact.get(slot.index, 0), slot.length)

    def used(self, slot: Slot) -> None:
        """A sequence takes the slot over."""
        self.exact.pop(slot.index, None)

    def _slot_for(self, message: m.Follow, tokens: np.ndarray) -> Slot | None:
        # A slot with rows that no tier has yet is not free: its capture catches up from it.
        idle = [slot for slot in self.arena.slots if not slot.busy and slot.lag_tokens <= 0]
        if message.idle:  # the sessions of this engine itself are worth as much
            idle = [s for s in idle if not s.length or not s.session or s.index in self.exact]
        if not idle:
            return None
        slot = max(idle, key=lambda slot: (self._shared(slot, message, tokens), not slot.length, -slot.last_used))
        self.arena.cut(slot, self._shared(slot, message, tokens))
        slot.stored = slot.length
        slot.busy, slot.captured = True, True
        slot.namespace, slot.session, slot.adapter = message.namespace, message.session, message.adapter
        self.exact.pop(slot.index, None)
        return slot

    def _shared(self, slot: Slot, message: m.Follow, tokens: np.ndarray) -> int:
        if slot.namespace != message.namespace or slot.adapter != message.adapter:
            return 0
        return min(self.exact_count(slot), slot.common_prefix(tokens))

    # ------------------------------------------------------------ work

    def wait_s(self, limit_s: float) -> float:
        """Seconds until something is to be looked for, at most `limit_s`."""
        next_look = min((known.next_look for known in self.follows.values() if known.behind), default=math.inf)
        return min(limit_s, max(0.0, next_look - time.monotonic()))

    def step(self, finder: PrefixFinder, *, busy: bool) -> list[m.Followed]:
        """Slices of the follows that have waited longest, for a moment, and what is new to tell."""
        began = time.monotonic()
        while True:
            now = time.monotonic()
            due = [known for known in self.follows.values() if known.behind and known.next_look <= now]
            if not due:
                break
            self._restore(min(due, key=lambda known: (known.idle, known.next_look)), finder, busy)
            if not busy or time.monotonic() - began > BUSY_SLICE_S:
                break
        return [self._tell(known) for known in self.follows.values() if known.told != _state(known)]

    def _restore(self, known: Followed, finder: PrefixFinder, busy: bool) -> None:
        slot, start = known.slot, known.slot.length
        goal = min(known.goal, start + BUSY_SLICE_TOKENS) if busy else known.goal
        restore = self._slice(known, extension(self.arena, slot, goal), finder)
        if restore.without_window and slot.length == start:
            restore = self._slice(known, jump(self.arena, slot, goal, known.goal), finder)
        damage, gained = restore.damage, slot.length - start
        self.restored_tokens += gained
        known.caught_up = gained == 0 or not known.behind
        known.next_look = time.monotonic() + (0.0 if gained else known.look_s)
        known.look_s = LOOK_INTERVAL_S if gained else min(LOOK_LIMIT_S, 2 * known.look_s)
        if damage.reason:
            log.warning("follow.stopped", stream=known.stream, position=slot.length, reason=damage.reason)
            known.next_look += 1.0

    def _slice(self, known: Followed, plan: Plan, finder: PrefixFinder) -> Restore:
        slot, arena = known.slot, self.arena
        root = RootId(m.adapter_root(self.root, slot.adapter))
        tokens, start = slot.tokens[: known.count].copy(), slot.length
        restore = Restore(root, slot.namespace, tokens, self.block_tokens, plan, Damage())
        restore.slice(finder, arena, slot, self.speeds)
        slot.stored, slot.filling = slot.length, False
        for window, first in enumerate(plan.firsts, 1):
            passed_over = start < first and slot.length <= first
            if passed_over or restore.at < slot.length:  # the window's rows aren't there, or not all of them
                slot.bases[window] = max(slot.bases[window], slot.length)
        return restore

    def _tell(self, known: Followed) -> m.Followed:
        known.told = _state(known)
        return m.Followed(known.stream, *known.told)


def _state(known: Followed) -> tuple[int, bool]:
    return known.slot.length, known.caught_up
