"""Which slot a sequence gets, and what of it is on the device already. Pure: slots and tokens in, a choice out."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass

import numpy as np

from engine.arena import Slot


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """Use `target`; its first `shared` tokens are there already, or come from `source` if that is another slot."""

    target: Slot
    source: Slot
    shared: int


def choose_slot(
    slots: Listing[Slot], tokens: np.ndarray, namespace: str, session: str, limit: int, adapter: str = ""
) -> SlotChoice | None:
    """The slot for a token list, or None while all are busy. At most `limit` tokens are taken over.

    An idle slot is continued in place when it is the same session's, or nobody's and mostly shared; otherwise its prefix is
    copied, so that whoever left it there finds it again. Beyond that: empty slots first, then the least recently used.
    """
    idle = [slot for slot in slots if not slot.busy]
    if not idle:
        return None
    same_tenant = [
        slot
        for slot in slots
        if (slot.namespace, slot.adapter) == (namespace, adapter) and slot.length and not slot.filling
    ]
    shared = {slot.index: min(slot.common_prefix(tokens), limit) for slot in same_tenant}
    best = max(same_tenant, key=lambda slot: (shared[slot.index], not slot.busy), default=None)
    if best is None or not shared[best.index]:
        target = _replaceable(idle)
        return SlotChoice(target, target, 0)
    count = shared[best.index]
    own = best.session == session if best.session else 2 * count >= best.length
    if not best.busy and (own or len(idle) == 1):
        return SlotChoice(best, best, count)
    return SlotChoice(_replaceable([slot for slot in idle if slot is not best]), best, count)


def _replaceable(idle: list[Slot]) -> Slot:
    return min(idle, key=lambda slot: (slot.length > 0, slot.last_used, slot.index))
