"""In which order waiting streams go to engines, and which of them kills engines. Stages: place, resume; pure.

When an engine dies, everything that it worked on wants a place at once. No engine is given more than it has room for
(`placement.QUEUE_AHEAD` beyond its slots); the rest waits in the gateway, most urgent first: those whose client was being
answered, then other answers in progress, then those that had not begun, then new requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True, slots=True)
class Deaths:
    """Engines that died while they worked on a request, without a token of it between: `position` is where it stood."""

    count: int = 0
    position: int = -1

    def another(self, position: int) -> Deaths:
        """One more, at this position; a token in between clears the request of the earlier ones."""
        return Deaths(self.count + 1 if position == self.position else 1, position)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of the requests in flight at a death: those that are ended, and those that are tried again one at a time."""

    poison: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()


def suspects(in_flight: Sequence[tuple[str, Deaths]], limit: int) -> Verdict:
    """Who killed it? One request that was there at `limit` deaths did; of several, each is tried on its own."""
    often = [stream for stream, deaths in in_flight if deaths.count >= limit]
    if len(often) == 1:
        return Verdict(poison=(often[0],))
    return Verdict(alone=tuple(often))
