"""Shares of a lane: what each tenant's records take of it until the keeper frees them. Stage *append*, engine's step thread.

Without it one tenant's burst fills a lane, and everybody's capture waits for the disk. A tenant beyond its share is refused instead: its
rows stay in the arena and are caught up from there, as with a full lane. Plain bookkeeping; the lane itself knows no tenants.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from tiers.errors import LaneShareFull


class LaneShares:
    """Of one lane, for its writer. Not thread-safe.

    limit_of  bytes that a tenant's waiting records may take, by namespace; 0: no limit
    used      bytes that they take now
    refused   how often a tenant had no room
    """

    def __init__(self, limit_of: Callable[[str], int] = lambda namespace: 0) -> None:
        self.limit_of = limit_of
        self.used: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._waiting: deque[tuple[int, str, int]] = deque()

    def check(self, namespace: str, size: int, tail: int, reserved_bytes: int = 0) -> None:
        """Whether a record of `size` bytes may be appended now. A tenant of which nothing waits may always append one.

        tail            first record of the lane that isn't freed
        reserved_bytes  the tenant's that will be appended before it
        Raises          LaneShareFull (retry after a drain). What has no size, or nobody's name, is never refused
        """
        self.free(tail)
        if not namespace or not size:
            return
        limit, used = self.limit_of(namespace), self.used[namespace] + reserved_bytes
        if limit and used and used + size > limit:
            self.refused[namespace] += 1
            cause = f"{used} of {limit} bytes wait for the keeper"
            raise LaneShareFull(f"no room for {size} bytes of tenant {namespace}", cause=cause)

    def charge(self, number: int, namespace: str, size: int) -> None:
        """Record `number`, the newest, is in the lane."""
        self._waiting.append((number, namespace, size))
        self.used[namespace] += size

    def free(self, tail: int) -> None:
        """Records before `tail` take nothing any more."""
        while self._waiting and self._waiting[0][0] < tail:
            _, namespace, size = self._waiting.popleft()
            self.used[namespace] -= size
