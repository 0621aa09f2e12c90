"""What the gateway relies on of a host agent, held against the real one and against the one that simulations use."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, Protocol

import pytest

from engine import messages as m
from gateway.tokenizer import TextCodec
from tests.ops.test_host import Gateway, agent_settings, all_ready, paths, running, until  # noqa: F401  a fixture
from tests.simulation.cluster import HANG_BOUND_S, Cluster
from tests.simulation.virtual_time import run
from tiers.paths import Paths


class Host(Protocol):
    """A host agent of two engines and one subscriber of it. `hear` gives what the subscriber is told next."""

    async def hear(self) -> Any: ...

    def suspect(self, up: m.EngineUp) -> None: ...

    def kill(self, up: m.EngineUp) -> None: ...

    def stop(self, up: m.EngineUp) -> None: ...


class Real:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def hear(self) -> Any:
        return await self._gateway.next()

    def suspect(self, up: m.EngineUp) -> None:
        self._gateway.send(m.Suspect(up.engine, up.incarnation, "it lost touch"))

    def kill(self, up: m.EngineUp) -> None:
        os.kill(up.pid, signal.SIGKILL)

    def stop(self, up: m.EngineUp) -> None:
        os.kill(up.pid, signal.SIGSTOP)


class Simulated:
    def __init__(self, directory: Path, codec: TextCodec) -> None:
        self._cluster = Cluster(1, directory, codec, 2, 0.0)
        self._heard: asyncio.Queue[Any] = asyncio.Queue()
        self._cluster.gateway.hear = self._heard.put_nowait  # type: ignore[method-assign]
        self._cluster.gateway.see_end_of = lambda engine: None  # type: ignore[method-assign]
        self._cluster.host.subscribe()

    async def hear(self) -> Any:
        async with asyncio.timeout(60):
            return await self._heard.get()

    def suspect(self, up: m.EngineUp) -> None:
        self._cluster.host.suspect(up.engine, up.incarnation, "it lost touch")

    def kill(self, up: m.EngineUp) -> None:
        self._cluster.engines[up.engine].crash()

    def stop(self, up: m.EngineUp) -> None:
        engine = self._cluster.engines[up.engine]
        engine.hung = True
        asyncio.get_running_loop().call_later(HANG_BOUND_S, self._cluster.host.fence, engine)


async def replaced(host: Host, up: m.EngineUp, reason: str, *, from_outside: bool) -> m.EngineUp:
    """It is said to be dead, how it died, and who comes after it; that it is dead comes first."""
    heard: list[Any] = []
    while not {m.EngineGone, m.EngineUp} <= {type(news) for news in heard}:
        heard.append(await host.hear())
        assert heard[-1].engine == up.engine, "the other one goes on"
    down, gone, after = (
        next(news for news in heard if type(news) is kind) for kind in (m.EngineDown, m.EngineGone, m.EngineUp)
    )
    assert heard[0] is down
    assert (down.incarnation, down.reason) == (up.incarnation, reason)
    assert (gone.incarnation, gone.from_outside) == (up.incarnation, from_outside)
    assert after.incarnation == up.incarnation + 1
    return after


async def keeps_its_word(host: Host) -> None:
    """It names who is up; of each that dies it says so once that is certain; whoever is suspected is dead soon, or was."""
    first, other = await host.hear(), await host.hear()
    assert {first.engine, other.engine} == {"e0", "e1"}
    host.kill(first)
    second = await replaced(host, first, "killed", from_outside=True)
    host.suspect(first)
    again = await host.hear()
    while isinstance(again, m.EngineGone):  # how it died may be said again, too
        again = await host.hear()
    assert (type(again), again.incarnation) == (m.EngineDown, first.incarnation)
    host.suspect(second)
    news = await host.hear()
    while (type(news), news.incarnation) != (m.EngineDown, second.incarnation):
        assert news.incarnation == first.incarnation
        news = await host.hear()
    host.stop(other)
    while (type(news), news.engine) != (m.EngineDown, other.engine):
        news = await host.hear()
    assert (news.incarnation, news.reason) == (other.incarnation, "hung")


@pytest.mark.process
async def test_real_host_agent_keeps_its_word(paths: Paths) -> None:  # noqa: F811
    async with running(agent_settings(paths, nursery=False)) as agent:
        await until("engines", lambda: all_ready(agent))
        gateway = await Gateway.connect(paths)
        await keeps_its_word(Real(gateway))
        gateway.close()


def test_simulated_host_agent_keeps_its_word(journals: Path, codec: TextCodec, quiet: None) -> None:
    async def simulated() -> None:
        await keeps_its_word(Simulated(journals, codec))

    run(simulated())
