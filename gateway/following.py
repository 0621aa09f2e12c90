"""What engines follow on the gateway's word: streams of other engines whose state they keep on their device. Stage: restore.

Runs on the event loop. Hot standbys and migrations share this: whoever wants a stream followed names itself as a user, and an
engine follows while it has one. A target of a move is handed every delivered token at once; a standby some at a time, since waking it for
each costs the engine that serves more than restoring the last rows costs a recovery. A session between two turns is followed under
a name of its own (`idle_name`).
Source: `Follow`, `Followed` in engine/messages.py, engine/follow.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from engine import messages as m

if TYPE_CHECKING:
    from gateway.engines import Engine
    from gateway.streams import Stream

log = structlog.get_logger()

STANDBY = "standby"  # users
MOVE = "move"
STANDBY_TOKENS = 8  # that a standby is handed at once: as many rows are restored in about a millisecond


@dataclass(slots=True)
class IdleSession:
    """A session between two turns. tokens: packed, its whole list; owner: the engine that holds its state."""

    session: str
    namespace: str
    adapter: str
    tokens: bytes
    owner: str = ""


def idle_name(session: str) -> str:
    """Under which an idle session is followed; no stream has such an id."""
    return f"idle:{session}"


@dataclass(slots=True)
class FollowState:
    """One stream, or one idle session, at one engine. position: tokens whose state is there.

    session, tokens  of an idle session; empty for a live stream
    since            when the engine was asked
    """

    stream: str
    session: str = ""
    tokens: bytes = b""
    since: float = 0.0
    sent_count: int = 0
    position: int = 0
    caught_up: bool = False
    refused: str = ""
    users: set[str] = field(default_factory=set)
    over: asyncio.Event = field(default_factory=asyncio.Event)  # caught up for the first time, or refused

    @property
    def whole(self) -> bool:
        """All of an idle session is there; `caught_up` says: all that the tiers have."""
        return bool(self.session) and 4 * self.position == len(self.tokens)


def want(engine: Engine, stream: Stream, user: str) -> FollowState:
    """Have the engine follow the stream."""
    state = engine.followed.get(stream.id)
    if state is None or state.refused:
        users = state.users if state is not None else set()
        state = engine.followed[stream.id] = FollowState(stream.id, users=users)
    state.users.add(user)
    extend(engine, stream, state)
    return state


def want_idle(engine: Engine, idle: IdleSession, user: str, now: float) -> FollowState:
    """Have the engine put an idle session's state on its device and keep it there."""
    name = idle_name(idle.session)
    state = engine.followed.get(name)
    if state is None or state.refused or state.tokens != idle.tokens:
        users = state.users if state is not None else set()
        state = FollowState(name, idle.session, idle.tokens, now, len(idle.tokens) // 4, users=users)
        engine.followed[name] = state
        if engine.link is not None:
            engine.link.send(m.Follow(name, 0, idle.tokens, idle.namespace, idle.session, idle.adapter, idle=True))
    state.users.add(user)
    return state


def delivered(engine: Engine, stream: Stream) -> None:
    """Tokens were delivered: hand them on, if the engine follows the stream and it is time to."""
    state = engine.followed.get(stream.id)
    if state is not None and (MOVE in state.users or len(stream.tokens) - state.sent_count >= STANDBY_TOKENS):
        extend(engine, stream, state)


def extend(engine: Engine, stream: Stream, state: FollowState) -> None:
    """Hand on the tokens that the engine doesn't know yet."""
    count = len(stream.tokens)
    if state.refused or state.sent_count >= count or engine.link is None:
        return
    tokens = m.pack_tokens(stream.tokens[state.sent_count :])
    spec = stream.spec
    engine.link.send(m.Follow(stream.id, state.sent_count, tokens, spec.namespace, spec.session, spec.adapter))
    state.sent_count, state.caught_up = count, False


def drop(engine: Engine, stream_id: str, user: str) -> None:
    """The user needs it no longer; without users the engine lets go of its slot."""
    state = engine.followed.get(stream_id)
    if state is None:
        return
    state.users.discard(user)
    if not state.users:
        del engine.followed[stream_id]
        if engine.link is not None:
            engine.link.send(m.Unfollow(stream_id))


def claimed(engine: Engine, stream_id: str) -> None:
    """The stream was submitted there: the engine itself turned the follow into a sequence."""
    engine.followed.pop(stream_id, None)


def heard(engine: Engine, message: m.Followed, stream: Stream | None) -> None:
    """What an engine says of a follow."""
    state = engine.followed.get(message.stream)
    if state is None:
        return
    if message.refused == "gap" and stream is not None:
        state.sent_count = 0
        extend(engine, stream, state)
    elif message.refused:
        state.refused = message.refused
        state.over.set()
        log.info("follow.refused", engine=engine.name, stream=message.stream, why=message.refused)
    else:
        state.refused = ""  # it refused an earlier wish, which this one crossed
        state.position = message.position
        state.caught_up = message.caught_up
        if state.caught_up:
            state.over.set()


def parked(engine: Engine, session: str) -> None:
    """The session is to leave the device: the engine itself lets go of it."""
    state = engine.followed.pop(idle_name(session), None)
    if state is not None:
        state.refused = "parked meanwhile"
        state.over.set()


def lost(engine: Engine) -> None:
    """The engine is gone: nothing is followed there any more."""
    for state in engine.followed.values():
        state.refused = state.refused or "lost"
        state.over.set()
    engine.followed.clear()
