"""From where a sequence goes on: what the tiers and the device hold of its tokens, and whether putting it back pays.

Stage *place*. The plan itself is pure (engine/plan.py); this asks the tiers for what goes into it. Step thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import structlog

from engine.arena import Arena, Slot
from engine.messages import adapter_root
from engine.plan import UNREADABLE, Plan, Resident, Stored, make_plan
from engine.restore import Speeds, worth_restoring
from engine.schedule import exact_start
from engine.sequence import Sequence
from tiers.errors import StoreFailed
from tiers.layout import RootId
from tiers.prefix import PrefixFinder

log = structlog.get_logger()


def resident_part(slot: Slot, shared: int) -> Resident:
    """What of a token list's first `shared` tokens a slot holds."""
    if not shared:
        return Resident()
    live = slot.state_position if slot.state_position <= shared else -1
    return Resident(shared, tuple(slot.bases[1:]), live, frozenset(at for at in slot.points if at <= shared))


@dataclass(slots=True)
class Lookup:
    """`root` is that of the model without an adapter; `prefill_chunk`: prompts are cut at its multiples."""

    finder: PrefixFinder
    arena: Arena
    speeds: Speeds
    root: RootId
    block_tokens: int
    prefill_chunk: int

    def root_of(self, sequence: Sequence) -> RootId:
        """What the sequence's state depends on: the model's root, or that of its adapter over it."""
        return RootId(adapter_root(self.root, sequence.submit.adapter))

    def stored(self, sequence: Sequence, tokens: np.ndarray, limit: int, start: int = 0) -> int:
        """How much of a recovered stream the tiers hold, if they hold its first `start` tokens. It is preferred to what happens to be here.

        The dead engine's own rows continue its stream bit for bit; rows of an equal prefix that this device computed in
        steps of another shape differ in the last bits, which can turn a draw that falls on a boundary.
        """
        return self._end(self.root_of(sequence), sequence.submit.namespace, tokens, limit, start)

    def held(self, slot: Slot) -> int:
        """How much of a slot's token list the tiers hold."""
        tokens = np.ascontiguousarray(slot.tokens[: slot.length])
        return self._end(RootId(adapter_root(self.root, slot.adapter)), slot.namespace, tokens, len(tokens))

    def plan(self, sequence: Sequence, tokens: np.ndarray, limit: int, resident: Resident) -> Plan:
        """Where to go on from: on the device already, or worth restoring."""
        kinds, states = self.arena.kinds, self.arena.states
        stored = self._find(sequence, tokens, limit, resident)
        best = make_plan(kinds, resident, stored, lambda at: self._exact(sequence, at))
        if stored.unreadable and best.goal < self._exact(sequence, limit):
            best = replace(best, reason=UNREADABLE)  # it may have held what is computed now
        if best.goal <= resident.shared and not best.from_tiers:
            return best
        without = make_plan(kinds, resident, Stored(), lambda at: self._exact(sequence, at))
        byte_count = (best.goal - best.device) * self.arena.layout.token_bytes + states.state_bytes
        if worth_restoring(best.goal - without.goal, byte_count, self.speeds):
            return best
        sequence.reason = "computing is faster than restoring here"
        return without

    def _end(self, root: RootId, namespace: str, tokens: np.ndarray, limit: int, start: int = 0) -> int:
        extents = self.finder.find(root, namespace, tokens, limit=limit, block_tokens=self.block_tokens, start=start)
        return extents[-1].token_end if extents else start

    def _find(self, sequence: Sequence, tokens: np.ndarray, limit: int, resident: Resident) -> Stored:
        """What the tiers hold of a token list that was not found damaged."""
        damage, namespace, kinds = sequence.damage, sequence.submit.namespace, self.arena.kinds
        start = resident.shared if kinds.append_only else 0
        limit = min(limit, damage.limit)
        if start >= limit:
            return Stored(unreadable=bool(self.finder.unusable))
        root = self.root_of(sequence)
        try:
            with self.finder.reading() as read:
                extents = read.find(root, namespace, tokens, limit=limit, start=start, block_tokens=self.block_tokens)
                if not kinds.recurrent:
                    return Stored(extents, unreadable=bool(self.finder.unusable))
                points = read.points(root, namespace, tokens, limit=limit, block_tokens=self.block_tokens)
                left = [point for point in points if point.position not in damage.points]
                return Stored(extents, left, bool(self.finder.unusable))
        except StoreFailed as error:  # a page of the store's index is damaged
            log.error("restore.store_unusable", error=str(error))
            return Stored(unreadable=True)

    def _exact(self, sequence: Sequence, position: int) -> int:
        """Where to go on from, so that a recovery's prefill has the same bits as the first time."""
        submit = sequence.submit
        nothing_delivered = sequence.submitted_count == submit.prompt_count
        if sequence.recovering and (position < submit.prompt_count or nothing_delivered):
            start = max(0, submit.prefill_start)
            return exact_start(position, start, submit.prompt_count, self.prefill_chunk, sequence.cuts)
        return position
