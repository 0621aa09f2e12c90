"""Hot standby: every live stream is followed by a second engine, so that a recovery finds its state on the device. Stage: resume.

Policy `hot` of the settings; on the event loop. Which engine stands by for a stream is planned purely; the rest is `following.py`.
After a failover the engine that comes back becomes the standby of what moved. A standby that has no slot left refuses, and the stream
is as well off as under `warm`: the metric `concordia_streams_unprotected` counts those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway import following, metrics

if TYPE_CHECKING:
    from gateway.dispatch import Dispatcher, Engine
    from gateway.streams import Stream

USER = "standby"


@dataclass(frozen=True, slots=True)
class StandbyView:
    """An engine that could stand by for a stream."""

    engine: str
    root: str
    load: int
    followed: int
    slots: int
    follows_it: bool


def choose_standby(views: Sequence[StandbyView], owner: str, root: str) -> str | None:
    """The engine that follows it already, else the one with most room; never the owner, nor one whose state has another form."""
    fit = [v for v in views if v.engine != owner and v.root == root and (v.follows_it or v.load + v.followed < v.slots)]
    best = min(fit, key=lambda v: (not v.follows_it, v.load + v.followed, v.engine), default=None)
    return best.engine if best else None


class Standbys:
    """Keeps the choice true as streams and engines come and go."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def placed(self, stream: Stream, engine: Engine) -> None:
        self._protect(stream, engine)

    def delivered(self, stream: Stream, now: float) -> None:
        """`Dispatcher` extends what is followed."""

    def ended(self, stream: Stream) -> None:
        """Its standby has a slot for another one now."""
        for engine in self._dispatcher.engines.values():
            following.drop(engine, stream.id, USER)
        kept = self._kept()
        for owner in self._dispatcher.engines.values():
            for other in owner.streams.values():
                if other.id not in kept:
                    self._protect(other, owner)

    def engine_changed(self, engine: Engine) -> None:
        """Up, draining or down: everybody's standby is looked at again."""
        for owner in self._dispatcher.engines.values():
            for stream in owner.streams.values() if owner.ready else ():
                self._protect(stream, owner)

    def said(self, engine: Engine, message: Any) -> None:
        """Refusals are in the state that `unprotected_count` reads."""

    def unprotected_count(self) -> int:
        """Live streams that nobody follows."""
        kept = self._kept()
        count = sum(stream not in kept for engine in self._dispatcher.engines.values() for stream in engine.streams)
        metrics.streams_unprotected.set(count)
        return count

    def _kept(self) -> set[str]:
        engines = [engine for engine in self._dispatcher.engines.values() if engine.ready]
        return {s.stream for e in engines for s in e.followed.values() if USER in s.users and not s.refused}

    def _protect(self, stream: Stream, owner: Engine) -> None:
        if stream.end is not None or owner.hello is None or not stream.spec.capture:
            return
        views = [_view(engine, stream.id) for engine in self._dispatcher.placeable()]
        choice = choose_standby(views, owner.name, owner.hello.root)
        for engine in self._dispatcher.engines.values():
            if engine.name != choice:
                following.drop(engine, stream.id, USER)
        if choice is not None:
            following.want(self._dispatcher.engines[choice], stream, USER)


def _view(engine: Engine, stream_id: str) -> StandbyView:
    assert engine.hello is not None, "an engine that can serve has said hello"
    state = engine.followed.get(stream_id)
    follows_it = state is not None and not state.refused
    followed = sum(not other.refused for other in engine.followed.values())
    return StandbyView(engine.name, engine.hello.root, len(engine.streams), followed, engine.hello.slots, follows_it)
