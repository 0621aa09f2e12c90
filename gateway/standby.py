"""Hot standby: live streams and idle sessions are followed by a second engine, whose device then has their state. Stage: resume.

Policy `hot` of the settings; on the event loop. Which engine stands by for what is planned purely; the rest is `following.py`.
Live streams come first: a recovery finds their state on the device. Room that is left goes to sessions between two turns, pinned ones
first, then those used last: should their engine die, their next turn needs no restore. After a failover the engine that comes back becomes
the standby of what moved. A standby that has no slot left refuses, and what it was to protect is as well off as under `warm`: the metrics
`concordia_streams_unprotected` and `concordia_sessions_protected` say how many.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine import messages as m
from gateway import following, metrics
from gateway.following import FollowState, IdleSession

if TYPE_CHECKING:
    from gateway.dispatch import Dispatcher
    from gateway.engines import Engine
    from gateway.streams import Stream

IDLE_KEPT = 256  # sessions that are remembered, so that one that is pinned later can be protected
IDLE_RETRY_S = 5.0  # until a standby that had no slot for an idle session is asked again


@dataclass(frozen=True, slots=True)
class StandbyView:
    """An engine that could stand by for a stream. followed: live streams; follows_it: the stream, or its session until now."""

    engine: str
    root: str
    load: int
    followed: int
    slots: int
    follows_it: bool

    @property
    def free(self) -> int:
        """Slots that neither its own streams nor those that it stands by for need."""
        return self.slots - self.load - self.followed


@dataclass(frozen=True, slots=True)
class IdleView:
    """A session that could be protected. standby: the engine that follows it, or followed its last turn."""

    session: str
    owner: str
    root: str
    pinned: bool
    standby: str


def choose_standby(views: Sequence[StandbyView], owner: str, root: str) -> str | None:
    """The engine that follows it already, else the one with most room; never the owner, nor one whose state has another form."""
    fit = [v for v in views if v.engine != owner and v.root == root and (v.follows_it or v.free > 0)]
    best = min(fit, key=lambda v: (not v.follows_it, -v.free, v.engine), default=None)
    return best.engine if best else None


def protect_idle(sessions: Iterable[IdleView], engines: Sequence[StandbyView], limit: int) -> dict[str, str]:
    """Session -> the engine that stands by for it: pinned ones, then `limit` others in the order given, as far as there is room."""
    chosen: dict[str, str] = {}
    taken: Counter[str] = Counter()
    others = 0
    for view in sorted(sessions, key=lambda view: not view.pinned):
        others += not view.pinned
        if others > limit:
            break
        fit = [e for e in engines if e.engine != view.owner and e.root == view.root and taken[e.engine] < e.free]
        best = min(fit, key=lambda e: (e.engine != view.standby, taken[e.engine] - e.free, e.engine), default=None)
        if best is not None:
            chosen[view.session] = best.engine
            taken[best.engine] += 1
    return chosen


class Standbys:
    """Keeps the choice true as streams, sessions and engines come and go. `pins` gives (namespace, session) of pinned ones."""

    def __init__(self, dispatcher: Dispatcher, session_limit: int) -> None:
        self._dispatcher = dispatcher
        self._session_limit = session_limit
        self._idle: OrderedDict[str, IdleSession] = OrderedDict()  # used last at the end
        self._last: dict[str, str] = {}  # idle session -> the engine that followed its last turn
        self._retry: asyncio.TimerHandle | None = None
        self.pins: Callable[[], Collection[tuple[str, str]]] = frozenset

    # ------------------------------------------------------------ what happens

    def placed(self, stream: Stream, engine: Engine) -> None:
        """Its session, if it has one, is idle no longer."""
        self._protect(stream, engine, self._wake(stream.spec.session))
        self.protect_sessions()

    def delivered(self, stream: Stream, now: float) -> None:
        """`Dispatcher` extends what is followed."""

    def ended(self, stream: Stream) -> None:
        """Its standby has a slot for another one now; its session begins to be idle."""
        standby = self._follower(stream.id)
        for engine in self._dispatcher.engines.values():
            following.drop(engine, stream.id, following.STANDBY)
        self._rest(stream, standby)
        kept = self._kept()
        for owner in self._dispatcher.engines.values():
            for other in owner.streams.values():
                if other.id not in kept:
                    self._protect(other, owner)
        self.protect_sessions()

    def engine_changed(self, engine: Engine) -> None:
        """Up, draining or down: everybody's standby is looked at again."""
        if engine.state == "down":
            self._inherit(engine.name)
        for owner in self._dispatcher.engines.values():
            for stream in owner.streams.values() if owner.ready else ():
                self._protect(stream, owner)
        self.protect_sessions()

    def said(self, engine: Engine, message: Any) -> None:
        """Refusals are in the state that `measure` reads."""

    def parked(self, session: str, but: str) -> None:
        """It leaves every device but that of one engine, if any is named; call before engines are told."""
        idle = self._idle.get(session)
        self._wake(session)
        if idle is not None and but:
            idle.owner = but
            self._idle[session] = idle

    def resident(self, engine: Engine, found: m.Resident) -> None:
        """An engine that we attached to holds this session. Of several, the one that has most of it is the owner."""
        if found.copied:
            self._last.setdefault(found.session, engine.name)
            return
        known = self._idle.get(found.session)
        if known is None or len(known.tokens) < len(found.tokens):
            self._idle[found.session] = IdleSession(
                found.session, found.namespace, found.adapter, found.tokens, engine.name
            )

    # ------------------------------------------------------------ what others see

    def measure(self) -> None:
        """Into the metrics: live streams that nobody follows, idle sessions that are on a standby as well."""
        kept = self._kept()
        engines = self._dispatcher.engines.values()
        metrics.streams_unprotected.set(sum(stream not in kept for engine in engines for stream in engine.streams))
        metrics.sessions_protected.set(sum(state.whole for _, state in self._idle_follows()))

    def standby_of(self, session: str, streams: Iterable[str] = ()) -> tuple[str, int]:
        """The engine that follows the session, live or between two turns, and how many tokens' state is there; ("", 0): none."""
        for name in (*streams, following.idle_name(session)):
            engine = self._follower(name)
            if engine:
                return engine, self._dispatcher.engines[engine].followed[name].position
        return "", 0

    # ------------------------------------------------------------ live streams

    def _kept(self) -> set[str]:
        engines = [engine for engine in self._dispatcher.engines.values() if engine.ready]
        return {
            s.stream for e in engines for s in e.followed.values() if following.STANDBY in s.users and not s.refused
        }

    def _follower(self, name: str) -> str:
        for engine in self._dispatcher.engines.values():
            state = engine.followed.get(name)
            if engine.ready and state is not None and not state.refused:
                return engine.name
        return ""

    def _protect(self, stream: Stream, owner: Engine, was: str = "") -> None:
        if stream.end is not None or owner.hello is None or not stream.spec.capture:
            return
        views = [_view(engine, stream.id, was) for engine in self._dispatcher.placeable()]
        choice = choose_standby(views, owner.name, owner.hello.root)
        for engine in self._dispatcher.engines.values():
            if engine.name != choice:
                following.drop(engine, stream.id, following.STANDBY)
        if choice is not None:
            following.want(self._dispatcher.engines[choice], stream, following.STANDBY)

    # ------------------------------------------------------------ idle sessions

    def protect_sessions(self) -> None:
        """Have those followed that are to be, and no others."""
        engines = self._dispatcher.engines
        rooms = [_view(engine) for engine in self._dispatcher.placeable()]
        chosen = protect_idle(self._idle_views(), rooms, self._session_limit)
        now = self._dispatcher.now()
        for engine, state in list(self._idle_follows(refused=True)):
            waits = state.refused and now - state.since < IDLE_RETRY_S
            if chosen.get(state.session) != engine.name:
                following.drop(engine, state.stream, following.STANDBY)
            elif waits:
                del chosen[state.session]
                self._retry_later()
        for session, name in chosen.items():
            following.want_idle(engines[name], self._idle[session], following.STANDBY, now)

    def _retry_later(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(IDLE_RETRY_S, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        self.protect_sessions()

    def _idle_follows(self, *, refused: bool = False) -> Iterable[tuple[Engine, FollowState]]:
        for engine in self._dispatcher.engines.values():
            for state in engine.followed.values():
                if state.session and following.STANDBY in state.users and (refused or not state.refused):
                    yield engine, state

    def _idle_views(self) -> list[IdleView]:
        """Those that can be protected; of those that aren't pinned no more than may be."""
        pins, found, others = self.pins(), list[IdleView](), 0
        follows = {state.session: engine.name for engine, state in self._idle_follows()}
        for idle in reversed(self._idle.values()):
            if others >= self._session_limit and not pins:
                break
            owner = self._dispatcher.engines.get(idle.owner)
            if owner is not None and owner.hello is not None and owner.state != "down":
                pinned = (idle.namespace, idle.session) in pins
                standby = follows.get(idle.session) or self._last.get(idle.session, "")
                found.append(IdleView(idle.session, idle.owner, owner.hello.root, pinned, standby))
                others += not pinned
        return found

    def _rest(self, stream: Stream, standby: str) -> None:
        """A turn has ended. A session that answers another one meanwhile is no idle one."""
        spec, owner = stream.spec, self._dispatcher.engines.get(stream.engine)
        if not spec.session or not spec.capture or stream.failed or owner is None or not owner.ready:
            return
        if self._dispatcher.is_answering(spec.session):
            return
        tokens = owner.residents[stream.id].tokens if stream.id in owner.residents else b""
        if tokens:
            self._idle.pop(spec.session, None)
            self._idle[spec.session] = IdleSession(spec.session, spec.namespace, spec.adapter, tokens, owner.name)
            self._last[spec.session] = standby
        while len(self._idle) > IDLE_KEPT:
            self._forget(next(iter(self._idle)))

    def _wake(self, session: str) -> str:
        """No longer idle. The engine that followed it, if any."""
        name = following.idle_name(session)
        standby = self._follower(name) if session else ""
        for engine in self._dispatcher.engines.values() if session else ():
            following.drop(engine, name, following.STANDBY)
        self._forget(session)
        return standby

    def _forget(self, session: str) -> None:
        self._idle.pop(session, None)
        self._last.pop(session, None)

    def _inherit(self, lost: str) -> None:
        """Sessions of a dead engine belong to their standbys now; those that had none are on no device."""
        for idle in [idle for idle in self._idle.values() if idle.owner == lost]:
            name = following.idle_name(idle.session)
            heir = self._dispatcher.engines.get(self._follower(name))
            position = heir.followed[name].position if heir is not None else 0
            if heir is None or not position:
                self._wake(idle.session)
                continue
            following.drop(heir, name, following.STANDBY)
            heir.keep(name, idle.namespace, idle.session, idle.tokens[: 4 * position])
            idle.owner = heir.name


def _view(engine: Engine, stream_id: str = "", was: str = "") -> StandbyView:
    assert engine.hello is not None, "an engine that can serve has said hello"
    state = engine.followed.get(stream_id)
    follows_it = (state is not None and not state.refused) or engine.name == was
    followed = sum(not other.refused and not other.session for other in engine.followed.values())
    return StandbyView(engine.name, engine.hello.root, len(engine.streams), followed, engine.hello.slots, follows_it)
