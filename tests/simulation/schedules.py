"""Fault schedules: from a seed to a cluster, its streams, and what happens to it when."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from engine import messages as m
from gateway import journal as j
from gateway.errors import ApiError
from gateway.tokenizer import TextCodec
from tests.simulation.cluster import HANG_BOUND_S, Client, Cluster

SPAN_S = 2.5  # faults fall into it; answers take about as long


async def run_schedule(seed: int, directory: Path, codec: TextCodec, *, poison: bool = False) -> Cluster:
    """One seed from start to end. Raises AssertionError where something that must hold does not."""
    shutil.rmtree(directory, ignore_errors=True)
    import random

    draw = random.Random(seed ^ 0x5EED)
    policy = draw.choice(["cold", "warm", "hot"])
    deaths = 2 if poison else 1000
    engines = 1 if policy == "cold" else draw.randint(2, 4)
    cluster = Cluster(seed, directory, codec, engines, failover=policy, poison_deaths=deaths, spares=draw.randint(0, 2))
    poison_seed = 666_000 + seed if poison else None
    cluster.poison = poison_seed
    for engine in cluster.engines.values():
        engine.poison = poison_seed
    await asyncio.sleep(0.2)
    loop = asyncio.get_running_loop()
    count = draw.randint(1, 10)
    for index in range(count):
        loop.call_later(draw.uniform(0, 0.5 * SPAN_S), _open, cluster, index, draw.randint(5, 40), None)
    if poison_seed is not None:
        loop.call_later(draw.uniform(0.1, 0.5), _open, cluster, count, 20, poison_seed)
    faults = [] if poison else [draw.choice(FAULTS) for _ in range(draw.randint(1, 6))]
    tasks = [asyncio.create_task(_at(draw.uniform(0.0, SPAN_S), fault, cluster)) for fault in faults]
    await asyncio.sleep(SPAN_S)
    await asyncio.gather(*tasks)
    await cluster.finish()
    for client in cluster.clients.values():
        assert client.end is not None
        if client.spec.sampling.seed == poison_seed:
            assert client.end.error_code == "poison_request", client.end
        else:
            assert client.end.finish_reason in ("length", "stop"), client.end
            assert client.cursor == client.spec.max_position
    return cluster


def _open(cluster: Cluster, index: int, answer: int, seed: int | None) -> None:
    prompt = list(range(5, 5 + cluster.draw.randint(1, 60)))
    if not cluster.gateway.alive:
        asyncio.get_running_loop().call_later(0.1, _open, cluster, index, answer, seed)
        return
    spec = j.StreamSpec(
        stream=f"{index:024x}", kind="text", created=0, model="tiny", prompt=m.pack_tokens(prompt),
        sampling=m.Sampling(seed=seed if seed is not None else 1000 + index), stop=[], stop_tokens=[],
        max_position=len(prompt) + answer, stored=cluster.draw.random() < 0.5,
        session=f"s{index}" if cluster.draw.random() < 0.3 else "",
    )  # fmt: skip
    Client(cluster, spec).begin(cluster.gateway)


async def _at(delay_s: float, fault: Callable[[Cluster], Coroutine[Any, Any, None]], cluster: Cluster) -> None:
    await asyncio.sleep(delay_s)
    await fault(cluster)


# ---------------------------------------------------------------- faults


async def kill_engine(cluster: Cluster) -> None:
    cluster.engines[cluster.draw.choice(sorted(cluster.engines))].crash()


async def kill_all_engines(cluster: Cluster) -> None:
    for engine in list(cluster.engines.values()):
        engine.crash()


async def stop_engine(cluster: Cluster) -> None:
    """SIGSTOP; it wakes up before or after it was found."""
    engine = cluster.engines[cluster.draw.choice(sorted(cluster.engines))]
    if engine.dead:
        return
    engine.hung = True
    asyncio.get_running_loop().call_later(HANG_BOUND_S, cluster.host.fence, engine)
    await asyncio.sleep(cluster.draw.uniform(0.01, 3 * HANG_BOUND_S))
    engine.wake()


async def terminate_engine(cluster: Cluster) -> None:
    cluster.engines[cluster.draw.choice(sorted(cluster.engines))].drain()


async def lose_link(cluster: Cluster) -> None:
    engine = cluster.engines[cluster.draw.choice(sorted(cluster.engines))]
    if engine.link is not None:
        engine.link.lose()


async def kill_gateway(cluster: Cluster) -> None:
    if cluster.gateway.alive:
        await cluster.crash_gateway(cluster.draw.uniform(0.05, 0.5))


async def kill_host(cluster: Cluster) -> None:
    if cluster.host.up:
        cluster.host.crash(cluster.draw.uniform(0.05, 0.5))


async def migrate(cluster: Cluster) -> None:
    """A live stream to any engine; nonsense is refused."""
    live = sorted(cluster.gateway.table.live)
    if live and cluster.gateway.alive:
        stream = cluster.gateway.table.live[cluster.draw.choice(live)]
        try:
            cluster.gateway.dispatcher.moves.start(stream, cluster.draw.choice(sorted(cluster.engines)), "simulated")
        except ApiError:
            pass


async def migrate_often(cluster: Cluster) -> None:
    for _ in range(10):
        await migrate(cluster)
        await asyncio.sleep(cluster.draw.uniform(0.0, 0.1))


async def drain(cluster: Cluster) -> None:
    gateway = cluster.gateway
    name = cluster.draw.choice(sorted(cluster.engines))
    engine = gateway.dispatcher.engines.get(name)
    if engine is not None and engine.ready and gateway.alive:
        await gateway.dispatcher.moves.drain(engine, "simulated", 1.0)
        gateway.dispatcher.set_draining(engine, False)


async def refuse_follows(cluster: Cluster) -> None:
    engine = cluster.engines[cluster.draw.choice(sorted(cluster.engines))]
    engine.follow_refusal = "no_slot"
    await asyncio.sleep(cluster.draw.uniform(0.1, 1.0))
    engine.follow_refusal = ""


async def lag_captures(cluster: Cluster) -> None:
    engine = cluster.engines[cluster.draw.choice(sorted(cluster.engines))]
    engine.follow_lag = cluster.draw.randint(1, 50)
    await asyncio.sleep(cluster.draw.uniform(0.1, 1.0))
    engine.follow_lag = 0


FAULTS = [
    kill_engine, kill_engine, kill_all_engines, stop_engine, stop_engine, terminate_engine, lose_link, kill_gateway, kill_gateway,
    kill_host, migrate, migrate_often, drain, refuse_follows, lag_captures,
]  # fmt: skip
