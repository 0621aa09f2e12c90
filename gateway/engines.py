"""Engines as the gateway sees them: state, link, what they work on and what their devices may hold. On the event loop.

One object an incarnation; whatever is known of it ends with it. Who makes them and declares them dead is `membership.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from engine import messages as m
from gateway import following, placement

if TYPE_CHECKING:
    from gateway.engine_link import EngineLink
    from gateway.streams import Stream

CANCEL_HEARD_S = 5.0  # longer than any step
RESIDENTS_KEPT = 4  # times the slots of an engine: token lists that it may still hold


class Held(NamedTuple):
    """A token list, packed, whose state may be on an engine's device. session: "" if it has none."""

    namespace: str
    session: str
    tokens: bytes


class Engine:
    """One incarnation of an engine, as the gateway sees it."""

    def __init__(self, up: m.EngineUp) -> None:
        self.up = up
        self.name = up.engine
        self.incarnation = up.incarnation
        self.state = "connecting"  # connecting, ready, lost (waiting for certainty), down
        self.link: EngineLink | None = None
        self.hello: m.Hello | None = None
        self.copies: dict[str, bytes] = {}  # session -> tokens whose state it had from another engine when we attached
        self.stats = m.EngineStats()
        self.tenants: dict[str, m.TenantStats] = {}
        self.streams: dict[str, Stream] = {}
        self.cancelled: dict[str, tuple[Stream, float]] = {}  # ended here lately by the gateway, and when
        self.residents: OrderedDict[str, Held] = OrderedDict()  # by stream
        self.link_lost_at = 0.0
        self.pidfd = -1
        self.asked: dict[int, asyncio.Future[Any]] = {}  # questions by number, that wait for their answer
        self._asked_count = 0
        self.adapters: set[str] = set()  # digests that it was told to load
        self.followed: dict[str, following.FollowState] = {}
        self.draining = False  # its streams are to go elsewhere, and nothing new comes

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def placeable(self) -> bool:
        """It takes streams."""
        return self.ready and not self.draining

    @property
    def shown_state(self) -> str:
        """For people: `state`, or "draining" and, when that is done, "drained"."""
        if not self.ready or not self.draining:
            return self.state
        return "draining" if self.streams else "drained"

    @property
    def last_heard(self) -> float:
        return self.link.last_heard if self.link else 0.0

    def send(self, message: m.Message) -> None:
        """To an engine that was attached; one that is gone meanwhile hears nothing."""
        assert self.link is not None, "nothing is sent to an engine before it is attached"
        self.link.send(message)

    def ask(self, question: Callable[[int], m.Message]) -> asyncio.Future[Any]:
        """Send what `question` makes of a number, and give a future of the answer; it fails with the engine."""
        self._asked_count += 1
        future = self.asked[self._asked_count] = asyncio.get_running_loop().create_future()
        self.send(question(self._asked_count))
        return future

    def answered(self, number: int, answer: m.Message) -> None:
        """What was asked under that number is answered."""
        future = self.asked.pop(number, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def let_go(self) -> None:
        """It is dead: nothing more is heard of it, questions fail."""
        if self.link is not None:
            self.link.close()
        if self.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1
        for future in self.asked.values():
            if not future.done():
                future.set_exception(ConnectionError("the engine is gone"))
        self.asked.clear()

    def remember(self, stream: Stream, tokens: bytes) -> None:
        """Its state may stay on the device."""
        self.keep(stream.id, stream.spec.namespace, stream.spec.session, tokens)

    def keep(self, key: str, namespace: str, session: str, tokens: bytes) -> None:
        """The state of a token list may be on the device from now on."""
        self.residents.pop(key, None)
        self.residents[key] = Held(namespace, session, tokens)
        limit = RESIDENTS_KEPT * (self.hello.slots if self.hello else 8)
        while len(self.residents) > limit:
            self.residents.popitem(last=False)

    def cancel(self, stream: Stream, now: float) -> None:
        """Its stream was ended before it was complete: the engine may work on it until it has heard so."""
        self.cancelled[stream.id] = stream, now
        while self.cancelled[oldest := next(iter(self.cancelled))][1] <= now - CANCEL_HEARD_S:
            del self.cancelled[oldest]

    def cancelled_lately(self, now: float) -> list[Stream]:
        """Those of which it isn't certain that the engine had heard that they are cancelled."""
        return [stream for stream, at in self.cancelled.values() if at > now - CANCEL_HEARD_S]

    def holds(self, session: str) -> bool:
        """It has worked on this session and was not told to park it."""
        return bool(session) and any(held.session == session for held in self.residents.values())

    def forget(self, session: str) -> None:
        self.copies.pop(session, None)
        for stream_id in [key for key, held in self.residents.items() if held.session == session]:
            del self.residents[stream_id]

    def view(self, tokens: bytes, stream: Stream) -> placement.EngineView:
        """Itself, as placement needs it for one request. What it holds of other tenants has no say in it."""
        session, namespace = stream.spec.session, stream.spec.namespace
        own = [held.tokens for held in self.residents.values() if held.namespace == namespace]
        prefix = max((placement.common_prefix(tokens, held) for held in own), default=0)
        if stream.id in self.followed:
            prefix = max(prefix, self.followed[stream.id].position)
        idle = self.followed.get(following.idle_name(session)) if session else None
        if idle is not None and not idle.refused:
            prefix = max(prefix, placement.common_prefix(tokens, idle.tokens[: 4 * idle.position]))
        prefix = max(prefix, placement.common_prefix(tokens, self.copies.get(session, b"")))
        slots = self.hello.slots if self.hello else 1
        return placement.EngineView(
            self.name, len(self.streams), slots, len(self.residents), prefix, self.holds(session)
        )
