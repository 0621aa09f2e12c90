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


def window_positions(tip: int, points: Iterable[int], block_tokens: int) -> list[int]:
    """Positions of a compacted session before which the rows of window layers stay: kept points, the tip, and blocks'
    ends at geometric distances from it, so that a model without rollback points can be rolled back as well."""
    ends = kept_points(((position, 1) for position in range(block_tokens, tip + 1, block_tokens)), tip)
    return sorted({tip, *points, *ends} - {0})


def kept_windows(windows: tuple[int, ...], positions: Iterable[int], block_count: int, block_tokens: int) -> list[int]:
    """By block of a session: mask of the groups whose rows are needed, when a restore may end at any of `positions`.

    windows  by group, 0 for rows that are always needed; a window of w needs rows [position - w, position)
    """
    always = 0xFFFF_FFFF & ~sum(1 << group for group, window in enumerate(windows) if window)
    masks = [always] * block_count
    for position in positions:
        for group, window in enumerate(windows):
            if window:
                first = max(0, position - window) // block_tokens
                for block in range(first, min(block_count, -(-position // block_tokens))):
                    masks[block] |= 1 << group
    return masks
