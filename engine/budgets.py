"""Which idle slots go from the device so that a tenant keeps within its memory. Pure: slots and sizes in, slots out.

What is resident is a cache: the state of an idle slot is in the tiers, and is restored from there. So only idle slots whose whole
state is captured go; a tenant whose live sequences alone take more is over its budget, visibly, until they end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from engine.arena import Slot


def slots_over_budget(
    slots: Sequence[Slot], namespace: str, limit: int, bytes_of: Callable[[Slot], int], coming_bytes: int = 0,
    needed: Collection[int] = (),
) -> list[Slot]:  # fmt: skip
    """Idle slots of a tenant to empty, least recently used first, until its state takes at most `limit` bytes.

    bytes_of      of one slot's state
    coming_bytes  that a sequence which is being placed will add
    needed        indexes of slots that must stay
    """
    own = [slot for slot in slots if slot.namespace == namespace and slot.length]
    excess = sum(bytes_of(slot) for slot in own) + coming_bytes - limit
    chosen = []
    for slot in sorted(own, key=lambda slot: slot.last_used):
        if excess <= 0:
            break
        if not slot.busy and slot.index not in needed and slot.lag_tokens <= 0:
            chosen.append(slot)
            excess -= bytes_of(slot)
    return chosen
