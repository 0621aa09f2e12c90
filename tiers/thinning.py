"""Which rollback points of a sequence are worth keeping. Pure; the keeper asks at compaction, the engine for what it has on the device.

Geometric: with d the distance of a point from the tip, neighbours stay within a factor of RATIO of each other, so the points
kept grow with the logarithm of the context, and whoever goes back d tokens finds a point at most RATIO * d before the tip.
Thinning again as the tip moves on keeps both true: distances that grow by the same amount only come closer in ratio.
"""

from __future__ import annotations

from collections.abc import Iterable

RATIO = 2.0
MESSAGE_RATIO = 1.3  # people edit and branch at message boundaries: more of those stay
MESSAGE = 2  # PointKind.MESSAGE


def kept_points(positions_and_kinds: Iterable[tuple[int, int]], tip: int) -> set[int]:
    """Positions of the points to keep for a sequence of `tip` tokens: entries are (position, PointKind).

    Always kept: the point at the tip, the last one before it and the first of all. Points beyond the tip are not.
    """
    kinds: dict[int, int] = {}
    for position, kind in positions_and_kinds:
        if position <= tip and (kind == MESSAGE or position not in kinds):
            kinds[position] = kind
    before = sorted((position for position in kinds if position < tip), reverse=True)
    kept = before[:1]
    for index, position in enumerate(before[1:], start=1):
        is_first = index == len(before) - 1
        following = tip if is_first else tip - before[index + 1]
        ratio = MESSAGE_RATIO if kinds[position] == MESSAGE else RATIO
        if is_first or following > ratio * (tip - kept[-1]):
            kept.append(position)
    return set(kept) | ({tip} & kinds.keys())
