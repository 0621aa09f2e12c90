"""From where a sequence goes on, and what has to be put back for that. Pure: what is held where, in; one plan, out.

Every kind of state has its own rule. Rows of layers that see everything: all before the position. Rows of window layers:
those in the window before it. Recurrent state: a snapshot of exactly that position, a rollback point or the live state. The
plan is the largest position for which all are to be had. A point at the tip serves nobody who needs less than the tip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tiers.prefix import Extent, PointRef

UNREADABLE = "the store can't be read"


@dataclass(frozen=True, slots=True)
class Kinds:
    """What a model keeps. needed_from(window index, position): first row of that window that going on from there needs."""

    window_groups: tuple[int, ...]  # by window after the first, mask of the groups that hold its rows
    needed_from: Callable[[int, int], int]
    recurrent: bool

    @property
    def append_only(self) -> bool:
        return not self.window_groups and not self.recurrent


@dataclass(frozen=True, slots=True)
class Resident:
    """The device's part: the first `shared` tokens are the wanted ones.

    bases   by window after the first, first position whose rows are there
    live    tokens that the recurrent state has seen; -1: unusable
    points  positions of rollback points
    """

    shared: int = 0
    bases: tuple[int, ...] = ()
    live: int = -1
    points: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Stored:
    """The tiers' part: extents in order, without a gap from `Resident.shared` or earlier on; points in ascending order.

    unreadable  the store can't be read: what it holds isn't known
    """

    extents: Sequence[Extent] = ()
    points: Sequence[PointRef] = ()
    unreadable: bool = False

    @property
    def end(self) -> int:
        return self.extents[-1].token_end if self.extents else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Go on from `goal`.

    device  tokens of it that are on the device; the rest of the append rows comes from the tiers
    firsts  by window after the first: rows [first, goal) come from the tiers; first == goal: they are on the device
    kept    tokens that the device has right, used or not: rollback points up to there stay
    point   rollback point of the tiers whose state is to be put back; None: the device has the state, or there is none
    matched longest prefix that is held anywhere, whether it can be gone on from or not
    """

    goal: int
    device: int
    firsts: tuple[int, ...] = ()
    point: PointRef | None = None
    matched: int = 0
    kept: int = 0
    reason: str = ""

    @property
    def from_tiers(self) -> bool:
        """Anything is to be restored."""
        return self.goal > self.device or self.point is not None or any(first < self.goal for first in self.firsts)


def make_plan(kinds: Kinds, resident: Resident, stored: Stored, settle: Callable[[int], int]) -> Plan:
    """The plan that goes on from the largest position.

    settle  where a sequence may go on from if state up to a position is there: at most that, and settle(settle(p)) == settle(p)
    """
    reach = max(resident.shared, stored.end)
    if kinds.append_only:
        goal = settle(reach)
        return Plan(goal, min(resident.shared, goal), matched=reach, kept=resident.shared)
    points = {point.position: point for point in stored.points}
    for position in _candidates(kinds, resident, stored, points, settle):
        plan = _feasible(kinds, resident, stored, points, position)
        if plan is not None:
            lost = settle(reach) - position
            reason = _reason(kinds, position, lost)
            return replace(plan, matched=reach, kept=resident.shared, reason=reason)
    raise AssertionError("the empty prefix needs nothing")


def _candidates(
    kinds: Kinds,
    resident: Resident,
    stored: Stored,
    points: dict[int, PointRef],
    settle: Callable[[int], int],
) -> list[int]:
    """Positions to try, largest first."""
    reach = max(resident.shared, stored.end)
    if kinds.recurrent:
        known = {*resident.points, *points, resident.live}
        return sorted({p for p in known if 0 < p <= reach and settle(p) == p} | {0}, reverse=True)
    ends = {extent.token_end for extent in stored.extents} | {extent.token_start for extent in stored.extents}
    return sorted({settle(p) for p in {reach, resident.shared, *ends}} | {0}, reverse=True)


def _feasible(
    kinds: Kinds, resident: Resident, stored: Stored, points: dict[int, PointRef], position: int
) -> Plan | None:
    """How to go on from a position; None if something for it is missing."""
    if position == 0:
        return Plan(0, 0, (0,) * len(kinds.window_groups))
    point = None
    if kinds.recurrent:
        on_device = position <= resident.shared and (position in resident.points or position == resident.live)
        point = None if on_device else points.get(position)
        if not on_device and point is None:
            return None
    firsts = []
    for at, mask in enumerate(kinds.window_groups):
        needed = kinds.needed_from(at + 1, position)
        if position <= resident.shared and resident.bases and resident.bases[at] <= needed:
            firsts.append(position)
        elif _covered(stored.extents, mask, needed, position):
            firsts.append(needed)
        else:
            return None
    return Plan(position, min(resident.shared, position), tuple(firsts), point)


def _covered(extents: Sequence[Extent], mask: int, start: int, end: int) -> bool:
    """Whether the groups of a window have rows for all of [start, end)."""
    for extent in extents:
        if extent.token_end <= start:
            continue
        if extent.token_start > start or extent.groups & mask != mask:
            return False
        start = extent.token_end
        if start >= end:
            return True
    return start >= end


def _reason(kinds: Kinds, position: int, lost: int) -> str:
    if lost <= 0:
        return ""
    what = "rollback point" if kinds.recurrent else "stored window"
    return f"nearest {what} is {lost} tokens back" if position else f"no {what}"


@dataclass(slots=True)
class Damage:
    """What a sequence's restores found damaged: not to be planned with again."""

    limit: int = 1 << 62
    points: set[int] = field(default_factory=set)
    reason: str = ""
