"""Which engines there are: announced, attached, out of touch, dead for certain. Stages: place, resume; on the event loop.

The host agent names engines and says when one is dead; a link that ends only makes an engine a suspect, and its streams stay where they
are until the host agent has fenced it, or its pidfd says that the process is gone. What follows for streams is the owner's (`dispatch.py`).
Source: docs/operations.md, "Processes".
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from engine import messages as m
from gateway import failover, metrics
from gateway.engine_link import EngineLink
from gateway.engines import Engine

log = structlog.get_logger()

CONNECT_TIMEOUT_S = 5.0
CONNECT_RETRY_S = 0.05
WORD_S = 0.02  # for the host agent, which knows of what it died and as a rule is first, before a pidfd alone counts


@dataclass(frozen=True, slots=True)
class World:
    """What a simulation replaces: the clock, how engines are reached, and whether their processes can be watched."""

    clock: Callable[[], float] = time.monotonic
    attach: Callable[..., Coroutine[Any, Any, tuple[Any, m.Hello]]] = EngineLink.attach
    watch_processes: bool = True


class Owner(Protocol):
    """Who has streams at engines, and is told what becomes of these."""

    def engine_said(self, engine: Engine, messages: list[Any]) -> None:
        """All that one read brought."""

    def engine_attached(self, engine: Engine, hello: m.Hello) -> None:
        """It serves. Nothing of what it says is heard before `engine.link.begin()`."""

    def engine_out_of_touch(self, engine: Engine) -> None:
        """Its link ended; it may live."""

    def engine_died(self, engine: Engine, loss: failover.Loss) -> None:
        """For certain."""

    def engine_gone(self, gone: m.EngineGone) -> None:
        """How an engine died. Comes after its death, once, if anybody can know it."""


class Membership:
    """All engines by name, each the newest incarnation that was announced. `heard` takes the host agent's news.

    suspect  asks the host agent to make a death certain (engine, incarnation, reason); settled  says that it is
    """

    def __init__(
        self,
        owner: Owner,
        gateway: str,
        suspect: Callable[[str, int, str], None],
        settled: Callable[[str, int], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        world: World,
    ) -> None:
        self._owner = owner
        self._gateway = gateway
        self._suspect = suspect
        self._settled = settled
        self._spawn = spawn
        self._world = world
        self.engines: dict[str, Engine] = {}

    def heard(self, news: m.FromHost) -> None:
        """What the host agent says."""
        match news:
            case m.EngineUp():
                self._up(news)
            case m.EngineSlow():
                metrics.engine_slow.labels(news.cause).inc()
                silent_ms = round(news.beat_age_ms)
                log.warning("recover.engine_slow", engine=news.engine, cause=news.cause, silent_ms=silent_ms)
            case m.EngineDown():
                engine = self.engines.get(news.engine)
                if engine is not None and engine.incarnation <= news.incarnation:
                    if news.cause and engine.state != "down":
                        metrics.engine_hangs.labels(news.cause).inc()
                    self._down(engine, news.reason, news.detect_ms, news.fence_ms)
            case m.EngineGone():
                self._owner.engine_gone(news)

    # ------------------------------------------------------------ up

    def _up(self, up: m.EngineUp) -> None:
        known = self.engines.get(up.engine)
        if known is not None and known.state != "down":
            if known.incarnation >= up.incarnation:
                return
            self._down(known, "killed", 0.0, 0.0)
        elif known is not None and known.incarnation >= up.incarnation:
            return
        engine = self.engines[up.engine] = Engine(up)
        self._spawn(self._connect(engine))

    async def _connect(self, engine: Engine) -> None:
        deadline = self._world.clock() + CONNECT_TIMEOUT_S
        while engine.state == "connecting":
            try:
                engine.link, engine.hello = await self._world.attach(
                    engine.up.socket,
                    self._gateway,
                    lambda messages: self._owner.engine_said(engine, messages),
                    lambda reason: self._link_lost(engine, reason),
                )
            except (OSError, TimeoutError) as error:
                if self._world.clock() > deadline:
                    self._link_lost(engine, f"can't attach: {error or type(error).__name__}")
                    return
                await asyncio.sleep(CONNECT_RETRY_S)
                continue
            if engine.state == "connecting":
                self._attached(engine, engine.hello)
            else:
                engine.link.close()

    def _attached(self, engine: Engine, hello: m.Hello) -> None:
        engine.state = "ready"
        if self._world.watch_processes:
            self._watch_process(engine)
        log.info(
            "place.engine_up", engine=engine.name, incarnation=engine.incarnation, pid=hello.pid, device=hello.device,
            live_streams=len(hello.streams),
        )  # fmt: skip
        self._owner.engine_attached(engine, hello)

    def _watch_process(self, engine: Engine) -> None:
        """A pidfd that is readable is certainty even when the host agent is away; opened while the link proves the pid."""
        try:
            engine.pidfd = os.pidfd_open(engine.up.pid)
        except OSError:
            return  # gone already: the link's end follows
        asyncio.get_running_loop().add_reader(engine.pidfd, self._process_gone, engine)

    def _process_gone(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(engine.pidfd)
        loop.call_later(WORD_S, self._down, engine, "killed", 0.0, 0.0)

    # ------------------------------------------------------------ down

    def _link_lost(self, engine: Engine, reason: str) -> None:
        if engine.state not in ("ready", "connecting"):
            return
        engine.state = "lost"
        engine.link_lost_at = self._world.clock()
        self._owner.engine_out_of_touch(engine)
        log.warning("recover.link_lost", engine=engine.name, incarnation=engine.incarnation, reason=reason)
        self._suspect(engine.name, engine.incarnation, reason)

    def _down(self, engine: Engine, reason: str, detect_ms: float, fence_ms: float) -> None:
        """Dead for certain."""
        if engine.state == "down":
            return
        engine.state = "down"
        self._settled(engine.name, engine.incarnation)
        now = self._world.clock()
        loss = failover.loss_of(
            engine.name, reason, heard=engine.last_heard or now, link_lost=engine.link_lost_at, told=now,
            detect_ms=detect_ms, fence_ms=fence_ms,
        )  # fmt: skip
        engine.let_go()
        metrics.engine_losses.labels(reason).inc()
        self._owner.engine_died(engine, loss)
