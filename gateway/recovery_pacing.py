"""In which order waiting streams go to engines. Stages: place, resume; pure.

When an engine dies, everything that it worked on wants a place at once. No engine is given more than it has room for
(`placement.QUEUE_AHEAD` beyond its slots); the rest waits in the gateway, most urgent first: those whose client was being
answered, then other answers in progress, then those that had not begun, then new requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """A stream that waits for a place. `order` is its turn among equals."""

    stream: str
    order: int
    placed_before: bool
    answered: bool  # some of its tokens were delivered
    read: bool  # a client is there

    @property
    def rank(self) -> int:
        """0 is the most urgent."""
        if not self.placed_before:
            return 3
        if not self.answered:
            return 2
        return 0 if self.read else 1


def in_order(waiting: Iterable[Waiting]) -> list[str]:
    """Stream ids, most urgent first."""
    return [entry.stream for entry in sorted(waiting, key=lambda entry: (entry.rank, entry.order))]
