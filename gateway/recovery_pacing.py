"""In which order waiting streams go to engines, and which of them kills engines. Stages: place, resume; pure.

When an engine dies, everything that it worked on wants a place at once. No engine is given more than it has room for
(`placement.QUEUE_AHEAD` beyond its slots); the rest waits in the gateway, most urgent first: those whose client was being
answered, then other answers in progress, then those that had not begun, then new requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

UNSURE_WEIGHT = 0.25  # of a death at which the engine was not heard to have begun the request


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

    count: float = 0
    position: int = -1

    def another(self, position: int, weight: float = 1) -> Deaths:
        """One more, at this position; a token in between clears the request of the earlier ones."""
        return Deaths(self.count + weight if position == self.position else weight, position)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A request that was with an engine when it died.

    begun  the engine was heard to begin it; else it may have been dead before the request reached it
    alone  it was being tried without any other suspect
    """

    stream: str
    deaths: Deaths  # before this one
    position: int
    begun: bool
    alone: bool

    @property
    def after(self) -> Deaths:
        return self.deaths.another(self.position, 1 if self.begun or self.alone else UNSURE_WEIGHT)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of the requests in flight at a death: the one that is ended, and those that are tried again one at a time."""

    poison: str = ""
    alone: tuple[str, ...] = ()


def suspects(in_flight: Sequence[InFlight], limit: int) -> Verdict:
    """Who killed it? The only request that was there at `limit` deaths, or that was tried alone; of several, each is tried on its own."""
    often = [request for request in in_flight if request.after.count >= limit]
    unsure = [request for request in in_flight if not request.begun and not request.alone and request not in often]
    tried = [request for request in often if request.alone]
    if len(tried) == 1:
        return Verdict(tried[0].stream, tuple(request.stream for request in often if not request.alone))
    if len(often) == 1 and not unsure:
        return Verdict(often[0].stream)
    return Verdict(alone=tuple(request.stream for request in (*often, *unsure))) if often else Verdict()
