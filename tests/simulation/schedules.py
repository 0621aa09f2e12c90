"""Fault schedules: from a seed to a cluster, its streams, and what happens to it when."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from engine import messages as m
from gateway import journal as j
from gateway.errors import ApiError
from gateway.following import IdleSession
from gateway.migration import Move
from gateway.tokenizer import TextCodec
from tests.simulation.cluster import HANG_BOUND_S, Client, Cluster, Engine

LATER = 0x1A7E4  # of what came to the schedules later: earlier seeds still stand for the same
SPAN_S = 2.5  # faults fall into it; answers take about as long
SEEN: Counter[str] = Counter()  # what has come to pass in this process, by name


async def run_schedule(seed: int, directory: Path, codec: TextCodec, *, poison: bool = False) -> Cluster:
    """One seed from start to end. Raises AssertionError where something that must hold does not."""
    shutil.rmtree(directory, ignore_errors=True)
    draw = random.Random(seed ^ 0x5EED)
    policy = draw.choice(["cold", "warm", "hot"])
    deaths = 2 if poison else 1000
    engines = 1 if policy == "cold" else draw.randint(2, 4)
    later = random.Random(seed ^ LATER)
    durable_s = later.choice([0.0, 0.0, 0.2])
    cluster = Cluster(
        seed, directory, codec, engines, durable_s, failover=policy, poison_deaths=deaths, spares=draw.randint(0, 2)
    )
    poison_seed = 666_000 + seed if poison else None
    cluster.poison = poison_seed
    for engine in cluster.engines.values():
        engine.poison = poison_seed
    cluster.pins = frozenset({("default", "s0")} if draw.random() < 0.3 else ())
    await asyncio.sleep(0.2)
    count = draw.randint(1, 10)
    for index in range(count):
        _open_at(draw.uniform(0, 0.5 * SPAN_S), cluster, index, draw.randint(5, 40))
    if poison_seed is not None:
        _open_at(draw.uniform(0.1, 0.5), cluster, count, 20, seed=poison_seed)
    kinds = FROM_OUTSIDE if poison else FAULTS
    faults = [draw.choice(kinds) for _ in range(draw.randint(0 if poison else 1, 6))]
    tasks = [asyncio.create_task(_at(draw.uniform(0.0, SPAN_S), fault, cluster)) for fault in faults]
    cancels = later.choice([0, 0, 1, 3])
    tasks += [asyncio.create_task(_at(later.uniform(0.0, SPAN_S), cancel, cluster)) for _ in range(cancels)]
    await asyncio.sleep(SPAN_S)
    await asyncio.gather(*tasks)
    await cluster.finish()
    for client in cluster.clients.values():
        assert client.end is not None
        if client.spec.sampling.seed == poison_seed:
            assert client.end.error_code == "poison_request" or client.end.cause == "cancelled", client.end
        elif client.end.cause != "cancelled":
            assert client.end.finish_reason in ("length", "stop"), client.end
            assert client.cursor == client.spec.max_position
    SEEN.update(["seeds", f"policy {policy}"])
    return cluster


def _open_at(delay_s: float, cluster: Cluster, index: int, answer: int, *, seed: int | None = None) -> None:
    """A stream after a while; one of three belongs to a session that may have further turns."""
    draw = cluster.draw
    prompt = list(range(5, 5 + draw.randint(1, 60)))
    session = f"s{index}" if draw.random() < 0.3 and seed is None else ""
    turns = draw.randint(1, 3) if session else 1
    cluster.opening += 1
    sampling = m.Sampling(seed=1000 + index if seed is None else seed)
    asyncio.get_running_loop().call_later(delay_s, _open, cluster, index, prompt, answer, sampling, session, turns)


def _open(
    cluster: Cluster, index: int, prompt: list[int], answer: int, sampling: m.Sampling, session: str, turns: int
) -> None:
    if not cluster.gateway.alive:
        arguments = (cluster, index, prompt, answer, sampling, session, turns)
        asyncio.get_running_loop().call_later(0.1, _open, *arguments)
        return
    cluster.opening -= 1
    spec = j.StreamSpec(
        stream=f"{len(cluster.clients):024x}", kind="text", created=0, model="tiny", prompt=m.pack_tokens(prompt),
        sampling=sampling, stop=[], stop_tokens=[], max_position=len(prompt) + answer,
        stored=cluster.draw.random() < 0.5, session=session,
    )  # fmt: skip
    client = Client(cluster, spec)
    if turns > 1:
        cluster.opening += 1
        client.on_end = lambda client: _next_turn(client, cluster, index, sampling, session, turns - 1)
    client.begin(cluster.gateway)


def _next_turn(client: Client, cluster: Cluster, index: int, sampling: m.Sampling, session: str, turns: int) -> None:
    prompt = [*client.tokens, *range(5, 5 + cluster.draw.randint(1, 20))]
    delay_s, answer = cluster.draw.uniform(0.0, 1.0), cluster.draw.randint(2, 20)
    asyncio.get_running_loop().call_later(delay_s, _open, cluster, index, prompt, answer, sampling, session, turns)


async def _at(delay_s: float, fault: Callable[[Cluster], Coroutine[Any, Any, None]], cluster: Cluster) -> None:
    await asyncio.sleep(delay_s)
    await fault(cluster)


# ---------------------------------------------------------------- faults


async def kill_engine(cluster: Cluster) -> None:
    cluster.engines[cluster.draw.choice(sorted(cluster.engines))].crash()


async def kill_all_engines(cluster: Cluster) -> None:
    for engine in list(cluster.engines.values()):
        engine.crash()


async def kill_heirs(cluster: Cluster) -> None:
    """An engine as soon as it has begun a stream, and so whoever goes on with it: no token comes in between."""
    live = sorted(cluster.gateway.table.live)
    if not live or not cluster.gateway.alive:
        return
    stream = cluster.gateway.table.live[cluster.draw.choice(live)]
    for _ in range(3):
        epoch = stream.epoch
        for _ in range(2000):
            if stream.end is not None or stream.begun_epoch == stream.epoch > epoch:
                break
            await asyncio.sleep(0.001)
        if stream.end is None and stream.engine in cluster.engines:
            cluster.engines[stream.engine].crash()


async def stop_engine(cluster: Cluster) -> None:
    """SIGSTOP; it wakes up before or after it was found."""
    engine = cluster.engines[cluster.draw.choice(sorted(cluster.engines))]
    if not engine.dead:
        await _hang(cluster, engine)


async def _hang(cluster: Cluster, engine: Engine) -> None:
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


async def migrate(cluster: Cluster) -> Move | None:
    """A live stream to any engine; nonsense is refused."""
    live = sorted(cluster.gateway.table.live)
    if not live or not cluster.gateway.alive:
        return None
    stream = cluster.gateway.table.live[cluster.draw.choice(live)]
    try:
        move = cluster.gateway.dispatcher.moves.start(stream, cluster.draw.choice(sorted(cluster.engines)), "simulated")
    except ApiError:
        SEEN["refused: a move"] += 1
        return None
    move.done.add_done_callback(lambda done: SEEN.update([f"move: {done.result().outcome}"]))
    return move


async def migrate_often(cluster: Cluster) -> None:
    for _ in range(10):
        await migrate(cluster)
        await asyncio.sleep(cluster.draw.uniform(0.0, 0.1))


async def migrate_amid_a_fault(cluster: Cluster) -> None:
    """Something happens to one of the two, or to gateway, host agent or keeper, in each phase of the move."""
    move = await migrate(cluster)
    if move is None:
        return
    if cluster.draw.random() < 0.4:  # its state isn't there for a while: the copy takes time
        asyncio.get_running_loop().create_task(_lag(cluster, cluster.engines[move.target]))
    await asyncio.sleep(cluster.draw.choice([0.0, 0.001, 0.005, 0.01, 0.02, 0.04]))
    engine = cluster.engines[cluster.draw.choice([move.source, move.target])]
    act = cluster.draw.choice(["crash", "hang", "end", "lose", "gateway", "host", "keeper", "refuse"])
    SEEN[f"amid a move: {act}"] += 1
    if act == "crash":
        engine.crash()
    elif act == "hang" and not engine.dead:
        await _hang(cluster, engine)
    elif act == "end":
        engine.drain()
    elif act == "lose" and engine.link is not None:
        engine.link.lose()
    elif act == "refuse":
        cluster.engines[move.target].refuse_move_of = move.stream.id
    elif act in ("gateway", "host", "keeper"):
        await {"gateway": kill_gateway, "host": kill_host, "keeper": stop_keeper}[act](cluster)


async def move_idle(cluster: Cluster) -> None:
    """A session between two turns, to any engine."""
    gateway = cluster.gateway
    idle = [c for c in cluster.clients.values() if c.spec.session and c.end is not None and gateway.alive]
    target = gateway.dispatcher.engines.get(cluster.draw.choice(sorted(cluster.engines)))
    if not idle or target is None or not target.placeable:
        return
    client = cluster.draw.choice(idle)
    if gateway.dispatcher.is_answering(client.spec.session):
        return
    session = IdleSession(client.spec.session, "default", "", m.pack_tokens(client.tokens))
    try:
        SEEN[f"idle: {await gateway.dispatcher.moves.move_idle(session, target, 1.0)}"] += 1
    except ApiError:
        SEEN["refused: an idle move"] += 1
    except TimeoutError:
        SEEN["idle: not parked in time"] += 1


async def park(cluster: Cluster) -> None:
    """A session leaves every device."""
    gateway = cluster.gateway
    idle = [c.spec.session for c in cluster.clients.values() if c.spec.session and c.end is not None]
    idle = [session for session in idle if not gateway.dispatcher.is_answering(session)]
    if idle and gateway.alive:
        try:
            await gateway.dispatcher.park(cluster.draw.choice(idle), 1.0)
            SEEN["parked"] += 1
        except TimeoutError:
            SEEN["not parked in time"] += 1


async def drain(cluster: Cluster) -> None:
    gateway = cluster.gateway
    name = cluster.draw.choice(sorted(cluster.engines))
    engine = gateway.dispatcher.engines.get(name)
    if engine is not None and engine.ready and gateway.alive:
        engine.send(m.Drained(on=True))
        await gateway.dispatcher.moves.drain(engine, "simulated", 1.0)
        await asyncio.sleep(1.0)  # that it was sent may take a while to be heard
        await _undrain(cluster, name)


async def _undrain(cluster: Cluster, name: str) -> None:
    """By whatever gateway is there."""
    while True:
        gateway = cluster.gateway
        engine = gateway.dispatcher.engines.get(name) if gateway.alive else None
        if engine is not None and engine.ready:
            engine.send(m.Drained(on=False))
            gateway.dispatcher.set_draining(engine, False)
        await asyncio.sleep(1.0)
        if not cluster.engines[name].drained and cluster.gateway is gateway and gateway.alive:
            return


async def cancel(cluster: Cluster) -> None:
    """Somebody deletes a stream: one that waits for an engine, or is on its way to another, if there is one."""
    if not cluster.gateway.alive or not cluster.gateway.table.live:
        return
    dispatcher, live = cluster.gateway.dispatcher, sorted(cluster.gateway.table.live)
    moving = sorted(set(dispatcher.moves.moves).intersection(live))
    waiting = sorted(set(dispatcher.pending).intersection(live))
    chosen = next((streams for streams in (waiting, moving) if streams), live)
    stream = cluster.gateway.table.live[cluster.draw.choice(chosen)]
    SEEN[f"cancelled: {'waiting' if chosen is waiting else 'moving' if chosen is moving else 'running'}"] += 1
    dispatcher.cancel(stream, "cancelled")


async def refuse_follows(cluster: Cluster) -> None:
    engine = cluster.engines[cluster.draw.choice(sorted(cluster.engines))]
    engine.follow_refusal = "no_slot"
    await asyncio.sleep(cluster.draw.uniform(0.1, 1.0))
    engine.follow_refusal = ""


async def fill_lane(cluster: Cluster) -> None:
    """What one engine is to follow isn't there for a while, since the lane that it is to come from has no room."""
    await _lag(cluster, cluster.engines[cluster.draw.choice(sorted(cluster.engines))])


async def _lag(cluster: Cluster, engine: Engine) -> None:
    engine.follow_lag = cluster.draw.choice([3, 20, 10_000])
    await asyncio.sleep(cluster.draw.uniform(0.1, 1.0))
    engine.follow_lag = 0


async def stop_keeper(cluster: Cluster) -> None:
    """The lanes fill, one after the other, until it is back; then everything is caught up with."""
    engines = list(cluster.engines.values())
    for engine in engines:
        engine.follow_lag = 10_000
        await asyncio.sleep(cluster.draw.uniform(0.0, 0.2))
    await asyncio.sleep(cluster.draw.uniform(0.1, 1.0))
    for engine in engines:
        engine.follow_lag = 0


async def delay_messages(cluster: Cluster) -> None:
    """To and from one engine, by up to half a second; their order stays."""
    engine = cluster.engines[cluster.draw.choice(sorted(cluster.engines))]
    engine.slow_s = cluster.draw.uniform(0.02, 0.5)
    await asyncio.sleep(cluster.draw.uniform(0.1, 1.0))
    engine.slow_s = 0.0


async def repeat_messages(cluster: Cluster) -> None:
    """Engines and host agent say again what they have said."""
    for _ in range(cluster.draw.randint(1, 4)):
        cluster.engines[cluster.draw.choice(sorted(cluster.engines))].repeat()
        if cluster.host.up:
            cluster.host.repeat()
        await asyncio.sleep(cluster.draw.uniform(0.0, 0.1))


async def overload(cluster: Cluster) -> None:
    """Many more streams at once than there are slots."""
    for index in range(cluster.draw.randint(8, 24)):
        _open_at(0.0, cluster, 100 + index, cluster.draw.randint(1, 3))


# None of these is an engine's own doing: no request is poison for it.
HARMLESS = [
    migrate, migrate_often, move_idle, park, drain, refuse_follows, fill_lane, stop_keeper, delay_messages, repeat_messages, overload,
]  # fmt: skip
FROM_OUTSIDE = [kill_engine, kill_all_engines, kill_all_engines, kill_heirs, stop_engine, terminate_engine, *HARMLESS]
FAULTS = [
    kill_engine, kill_engine, kill_all_engines, kill_heirs, stop_engine, stop_engine, terminate_engine, lose_link, kill_gateway,
    kill_gateway, kill_host, *(6 * [migrate_amid_a_fault]), *HARMLESS,
]  # fmt: skip
