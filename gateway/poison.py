"""Which request kills engines? Stage: resume; the rules are pure, `Inquests` applies them on the event loop.

The same request in flight at several deaths, without a token of it between, is ended, so that its neighbours go on. Only deaths
that engines may have died of by themselves count. What kind a death was, the host agent says a moment after the death itself
(`EngineGone`), so a request that would be ended waits for it: an operator who kills two engines at once ends nobody's answer. Only
time counts in which both could speak: neither this process nor the host agent was stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import structlog

if TYPE_CHECKING:
    from gateway.streams import Stream, StreamTable

log = structlog.get_logger()

UNSURE_WEIGHT = 0.25  # of a death at which the engine was not heard to have begun the request
REPORT_WAIT_S = 3.0  # for the host agent's word, which takes milliseconds as a rule; without it a death counts
SLICE_S = 0.5  # of that wait
SILENCE_LIMIT_S = 60.0  # for one that stays stopped; `serve` continues or replaces it long before


class Incarnation(NamedTuple):
    """One life of an engine."""

    engine: str
    number: int


@dataclass(frozen=True, slots=True)
class Death:
    """Of an engine that had a request. told: how it died is known, or nobody said so in time."""

    of: Incarnation
    weight: float = 1
    told: bool = False


@dataclass(frozen=True, slots=True)
class Deaths:
    """Engines that died while they worked on a request, without a token of it between: `position` is where it stood."""

    position: int = -1
    deaths: tuple[Death, ...] = ()

    @property
    def count(self) -> float:
        return sum(death.weight for death in self.deaths)

    @property
    def untold(self) -> bool:
        """How one of them died isn't known yet."""
        return any(not death.told for death in self.deaths)

    def among(self, of: Incarnation) -> bool:
        return any(death.of == of for death in self.deaths)

    def another(self, position: int, death: Death) -> Deaths:
        """One more, at this position; a token in between clears the request of the earlier ones."""
        return Deaths(position, (*self.deaths, death) if position == self.position else (death,))

    def heard(self, of: Incarnation, *, from_outside: bool) -> Deaths:
        """How one of them died: what came from outside is taken back."""
        others = tuple(death for death in self.deaths if death.of != of or not from_outside)
        return replace(self, deaths=tuple(replace(d, told=True) if d.of == of else d for d in others))


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
    lost: Incarnation

    @property
    def after(self) -> Deaths:
        weight = 1 if self.begun or self.alone else UNSURE_WEIGHT
        return self.deaths.another(self.position, Death(self.lost, weight))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of the requests in flight at a death: the one that is ended, and those that are tried again one at a time."""

    poison: str = ""
    alone: tuple[str, ...] = ()


def suspects(in_flight: Sequence[InFlight], limit: int) -> Verdict:
    """Who killed it? The only request that can have been it at `limit` deaths; of several, each is tried on its own.

    One that was tried like that is it, unless beside it was another that can have been: that one is to be tried, too.
    """
    often = [request for request in in_flight if request.after.count >= limit]
    doubtful = [request for request in in_flight if request not in often and _doubtful(request, limit)]
    tried = [request for request in often if request.alone]
    others = [request for request in (*often, *doubtful) if request not in tried]
    if len(tried) == 1 and not others:
        return Verdict(tried[0].stream)
    if not tried and len(often) == 1 and not doubtful:
        return Verdict(often[0].stream)
    return Verdict(alone=tuple(request.stream for request in others)) if often else Verdict()


def _doubtful(request: InFlight, limit: int) -> bool:
    """It may not have begun this time, or was there often enough and may not have begun each time."""
    return (not request.begun and not request.alone) or len(request.after.deaths) >= limit


def judge(deaths: Deaths, last: Incarnation, limit: int) -> Literal["wait", "end", "free"]:
    """What becomes of a request that was found guilty at the death of `last`, by what is known of its deaths now."""
    if not deaths.among(last):
        return "free"
    if deaths.untold:
        return "wait"
    return "end" if deaths.count >= limit else "free"


class Inquests:
    """Requests that were found guilty, until it is known how their engines died. Owned by the dispatcher.

    end          ends a stream with an error
    free         has the dispatcher place again what it may
    host_speaks  whether the host agent is heard
    """

    def __init__(
        self,
        table: StreamTable,
        limit: int,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        end: Callable[[Stream], None],
        free: Callable[[], None],
    ) -> None:
        self._table = table
        self._limit = limit
        self._spawn = spawn
        self._end = end
        self._free = free
        self.host_speaks: Callable[[], bool] = lambda: True
        self._open: dict[str, Incarnation] = {}  # by stream: the death at which it was found guilty

    def holds(self, stream: Stream) -> bool:
        """It goes to no engine for now."""
        return stream.id in self._open

    def drop(self, stream: Stream) -> None:
        """It ended."""
        self._open.pop(stream.id, None)

    def engine_died(self, lost: Incarnation, streams: Sequence[Stream]) -> None:
        """Count it against the live streams that it had; who is found guilty is held.

        One that was cancelled a moment ago may have been it as well, and then nobody else is found guilty.
        """
        in_flight = {s.id: _in_flight(s, lost) for s in streams}
        live = {s.id: s for s in streams if s.end is None}
        if not live:
            return
        verdict = suspects(list(in_flight.values()), self._limit)
        for stream in live.values():
            stream.deaths = in_flight[stream.id].after
            stream.alone = stream.alone or stream.id in verdict.alone
        if verdict.poison in live:
            self._open[verdict.poison] = lost
            log.warning("recover.suspected", stream=verdict.poison, engine=lost.engine, incarnation=lost.number)
        self._spawn(self._wait_for_word(lost))

    async def _wait_for_word(self, lost: Incarnation) -> None:
        """In slices: one that took much longer this process was stopped in, and has not read yet what was said meanwhile."""
        loop, listened_s, waited_s = asyncio.get_running_loop(), 0.0, 0.0
        while listened_s < REPORT_WAIT_S and waited_s < SILENCE_LIMIT_S:
            begun, slice_s = loop.time(), min(SLICE_S, REPORT_WAIT_S)
            await asyncio.sleep(slice_s)
            waited_s += slice_s
            if loop.time() - begun < 2 * slice_s and self.host_speaks():
                listened_s += slice_s
        self.heard(lost, from_outside=False)

    def heard(self, lost: Incarnation, *, from_outside: bool) -> None:
        """How an engine died, or that nobody says so."""
        for stream in list(self._table.live.values()):
            if stream.deaths.among(lost):
                stream.deaths = stream.deaths.heard(lost, from_outside=from_outside)
                if from_outside and stream.deaths.count < self._limit:
                    stream.alone = False
                self._close(stream)
        self._free()

    def _close(self, stream: Stream) -> None:
        last = self._open.get(stream.id)
        act = "wait" if last is None else judge(stream.deaths, last, self._limit)
        if act == "wait":
            return
        del self._open[stream.id]
        if act == "end":
            self._end(stream)
        else:
            log.info("recover.cleared", stream=stream.id, deaths=stream.deaths.count)


def _in_flight(stream: Stream, lost: Incarnation) -> InFlight:
    begun = stream.begun_epoch == stream.epoch
    return InFlight(stream.id, stream.deaths, len(stream.tokens), begun, stream.alone, lost)
