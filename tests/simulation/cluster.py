"""A whole Concordia in one loop and in virtual time: the real dispatcher, journals, moves and standbys over fakes of the rest.

Everything random is drawn from one seed: who dies when, how long messages and detections take. The engines are those of
tests/gateway/fake_engine.py over links without sockets; tests/simulation/test_contract.py holds them to what the real ones do.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import messages as m
from gateway import journal as j
from gateway.app import TaskOwner
from gateway.dispatch import Dispatcher
from gateway.membership import World
from gateway.settings import GatewaySettings
from gateway.streams import Stream, StreamTable
from gateway.tokenizer import TextCodec
from tests.gateway.fake_engine import FakeEngine, token_at

STEP_S = 0.02
HANG_BOUND_S = 0.3


class Link:
    """The gateway's end of a link to one engine: both directions in order, each message after a while."""

    def __init__(
        self, engine: Engine, on_messages: Callable[[list[Any]], None], on_lost: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._early: list[Any] | None = []
        self._loop = asyncio.get_running_loop()
        self._last = {"in": 0.0, "out": 0.0}
        self.closed = False
        self.last_heard = self._loop.time()

    def _later(self, direction: str, act: Callable[[], None]) -> None:
        delay_s = self._engine.cluster.latency() + self._engine.slow_s
        at = max(self._loop.time() + delay_s, self._last[direction] + 1e-6)  # timers of one time have no order
        self._last[direction] = at
        self._loop.call_at(at, act)

    def begin(self) -> None:
        early, self._early = self._early or [], None
        if early:
            self._on_messages(early)

    def send(self, message: m.Message) -> None:
        if not self.closed:
            self._later("out", lambda: self._engine.arrived(self, message))

    def receive(self, message: m.Message) -> None:
        """The engine sent it."""
        self._later("in", lambda: self._arrived(message))

    def _arrived(self, message: m.Message) -> None:
        if self.closed:
            return
        self.last_heard = self._loop.time()
        if self._early is not None:
            self._early.append(message)
        else:
            self._on_messages([message])

    def close(self) -> None:
        self.closed = True

    def lose(self) -> None:
        """The other end is gone."""
        self._later("in", self._lost)

    def _lost(self) -> None:
        if not self.closed:
            self.closed = True
            self._on_lost("connection closed")


class Engine(FakeEngine):
    """A fake engine over `Link`s. It can hang (nothing happens in it until it is woken or fenced)."""

    def __init__(self, cluster: Cluster, name: str, incarnation: int) -> None:
        super().__init__(name, incarnation, Path("/nowhere"), step_s=STEP_S)
        self.cluster = cluster
        self.hung = False
        self.draining = False
        self.from_outside = False  # what it died of, once it is dead
        self.slow_s = 0.0  # that each message to or from it takes longer
        self.refuse_move_of = ""  # stream that it refuses once, when a move submits it here
        self.waiting: list[tuple[Link, m.Message]] = []
        self.computing: dict[str, float] = {}  # streams that it has begun, and when they have their first token
        self.link: Link | None = None
        self.task = asyncio.get_running_loop().create_task(self._run())

    def attach(self, on_messages: Any, on_lost: Any) -> tuple[Link, m.Hello]:
        if self.dead or self.hung:
            raise ConnectionRefusedError("nobody accepts")
        if self.link is not None:
            self.link.lose()
        self.link = Link(self, on_messages, on_lost)
        hello: list[Any] = []
        self.send = hello.append  # type: ignore[method-assign]
        self._hello()
        del self.send  # type: ignore[method-assign]
        for message in hello[1:]:
            self.send(message)
        if self.draining:
            self.send(m.Draining())
        return self.link, hello[0]

    def send(self, message: m.Message) -> None:
        if self.link is not None and not self.dead:
            self.link.receive(message)

    def arrived(self, link: Link, message: m.Message) -> None:
        if self.dead or link is not self.link:
            return
        if self.hung:
            self.waiting.append((link, message))
            return
        if isinstance(message, m.Submit):
            self.cluster.submitted(self, message)
            if self.refuses(message):
                self.refuse_move_of = ""
                self._unfollow(message.stream)
                self.send(m.Refused(message.stream, message.epoch, "failed", "refused on purpose"))
                return
        self._take(message, None)  # type: ignore[arg-type]
        if isinstance(message, m.Shutdown):
            self.end()

    def refuses(self, submit: m.Submit) -> bool:
        move = self.cluster.gateway.dispatcher.moves.moves.get(submit.stream)
        asked = submit.stream == self.refuse_move_of and move is not None
        return asked and (move.phase, move.target) == ("resuming", self.name)  # type: ignore[union-attr]

    async def _step(self, active: list[Any]) -> None:
        if self.hung:
            self._work.clear()
            await self._work.wait()
            return
        now = asyncio.get_running_loop().time()
        for sequence in active:
            if sequence.started is None:
                self._start(sequence)
                self.computing[sequence.submit.stream] = now + self.cluster.draw.choice([0.0, 0.0, 0.03])
        ready = [sequence for sequence in active if self.computing[sequence.submit.stream] <= now]
        if ready:
            await super()._step(ready)

    def wake(self) -> None:
        """SIGCONT."""
        self.hung = False
        waiting, self.waiting = self.waiting, []
        for link, message in waiting:
            self.arrived(link, message)
        self._work.set()

    def repeat(self) -> None:
        """Says again all that it said of its streams."""
        if not self.hung:
            for sequence in self.sequences.values():
                if sequence.started:
                    self.send(sequence.started)
                    self.send(m.Step(sequence.outputs))

    def drain(self) -> None:
        """SIGTERM."""
        if not self.dead and not self.draining and not self.hung:
            self.draining = True
            self.send(m.Draining())
            asyncio.get_running_loop().create_task(self._end_when_empty())

    async def _end_when_empty(self) -> None:
        deadline = asyncio.get_running_loop().time() + 8.0
        while not self.dead and asyncio.get_running_loop().time() < deadline:
            if not any(not sequence.finish for sequence in self.sequences.values()):
                break
            await asyncio.sleep(0.05)
        self.end()

    def end(self) -> None:
        if not self.dead:
            self.from_outside = True
            self.die()
            self.cluster.host.noticed(self, "exited")
            self.cluster.gateway.see_end_of(self)

    async def kill(self, reason: str = "killed", *, tell: bool = True, from_outside: bool = True) -> None:
        """FakeEngine's own faults (poison) end here."""
        self.crash(from_outside=from_outside)

    def crash(self, *, from_outside: bool = True) -> None:
        """It is killed, or dies of itself."""
        if not self.dead:
            self.from_outside = from_outside
            self.die()
            self.cluster.host.noticed(self, "killed")
            self.cluster.gateway.see_end_of(self)

    def die(self) -> None:
        self.dead = True
        if self.link is not None:
            self.link.lose()
        self._work.set()


class Host:
    """The host agent: learns of deaths after a while, fences what hangs, starts the next incarnation, tells the gateway."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.up = True
        self.known: dict[str, tuple[int, bool]] = {}  # engine -> (incarnation, alive), as far as it knows
        self._loop = asyncio.get_running_loop()
        self._last = 0.0

    def noticed(self, engine: Engine, reason: str) -> None:
        self._loop.call_later(self._cluster.draw.uniform(0.0005, 0.02), self._certain, engine, reason)

    def _certain(self, engine: Engine, reason: str) -> None:
        if not self.up:
            self._loop.call_later(0.1, self._certain, engine, reason)
        elif self.known.get(engine.name) == (engine.incarnation, True):
            self.known[engine.name] = (engine.incarnation, False)
            self._tell(m.EngineDown(engine.name, engine.incarnation, reason, 1.0, 0.1))
            self._bury(engine)
            self._loop.call_later(self._cluster.draw.uniform(0.05, 1.0), self.start, engine.name)

    def _bury(self, engine: Engine) -> None:
        """How it died is told a while later: at once, or when its memory has been freed."""
        gone = m.EngineGone(engine.name, engine.incarnation, None, engine.from_outside)
        self._loop.call_later(self._cluster.draw.choice([0.0, 0.01, 0.6]), self._tell, gone)

    def start(self, name: str) -> None:
        """The next incarnation."""
        if not self.up:
            self._loop.call_later(0.1, self.start, name)
            return
        incarnation = self.known.get(name, (0, False))[0] + 1
        self.known[name] = (incarnation, True)
        engine = self._cluster.engines[name] = self._cluster.new_engine(name, incarnation)
        self._tell(self._up(engine))

    def fence(self, engine: Engine) -> None:
        """A look at an engine that hangs: fenced if it still does."""
        if not self.up:
            self._loop.call_later(0.1, self.fence, engine)
        elif engine.hung and not engine.dead:
            engine.from_outside = True  # SIGSTOP
            engine.die()
            self._certain(engine, "hung")

    def suspect(self, name: str, incarnation: int, reason: str) -> None:
        self._loop.call_later(self._cluster.latency(), self._suspected, name, incarnation)

    def _suspected(self, name: str, incarnation: int) -> None:
        if not self.up:
            self._loop.call_later(0.1, self._suspected, name, incarnation)
            return
        engine = self._cluster.engines[name]
        if engine.incarnation == incarnation and not engine.dead:
            engine.die()
            self._certain(engine, "killed")
        elif self.known[name] != (incarnation, True):
            self._tell(m.EngineDown(name, incarnation, "killed", 0.0, 0.0))

    def subscribe(self) -> None:
        """A gateway came: it is told of every engine that is up."""
        if not self.up:
            self._loop.call_later(0.1, self.subscribe)
            return
        for engine in self._cluster.engines.values():
            if self.known.get(engine.name) == (engine.incarnation, True):
                self._tell(self._up(engine))
        self._loop.call_later(self._cluster.latency(), self._cluster.gateway.host_answered.set)

    def repeat(self) -> None:
        """Says again who is up, and of whom it knows that they died."""
        for name, (incarnation, alive) in self.known.items():
            if alive and self._cluster.engines[name].incarnation == incarnation:
                self._tell(self._up(self._cluster.engines[name]))
            dead = incarnation - 1 if alive else incarnation
            if dead:
                self._tell(m.EngineDown(name, dead, "killed", 0.0, 0.0))

    def crash(self, away_s: float) -> None:
        self.up = False
        self._loop.call_later(away_s, self._back)

    def _back(self) -> None:
        self.up = True
        self.subscribe()

    def _up(self, engine: Engine) -> m.EngineUp:
        return m.EngineUp(engine.name, engine.incarnation, 0, f"{engine.name}:{engine.incarnation}")

    def _tell(self, news: m.FromHost) -> None:
        gateway = self._cluster.gateway
        self._last = max(self._loop.time() + self._cluster.latency(), self._last + 1e-6)  # in order
        self._loop.call_at(self._last, gateway.hear, news)


class Gateway:
    """One gateway process."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.alive = True
        self.tasks = TaskOwner()
        self.host_answered = asyncio.Event()
        self.table = StreamTable(cluster.directory, cluster.codec)
        world = World(asyncio.get_running_loop().time, cluster.attach, False)
        self.dispatcher = Dispatcher(
            cluster.settings, self.table, "simulated", cluster.host.suspect, lambda name, incarnation: None,
            self.tasks.spawn, world,
        )  # fmt: skip
        if cluster.durable_s:
            self.dispatcher.before_end = self._settle
        if self.dispatcher.standbys is not None:
            self.dispatcher.standbys.pins = lambda: cluster.pins
        self.dispatcher.resume_all(self.table.load_live(), self.host_answered)
        self._last = 0.0

    def hear(self, news: m.FromHost) -> None:
        if self.alive:
            self.dispatcher.on_host_news(news)

    async def _settle(self, stream: Stream) -> None:
        """An answer that is complete is made durable before it ends."""
        await asyncio.sleep(self._cluster.draw.uniform(0.0, self._cluster.durable_s))

    def see_end_of(self, engine: Engine) -> None:
        """A pidfd: often before the host agent says anything."""
        down = m.EngineDown(engine.name, engine.incarnation, "killed", 0.0, 0.0)
        asyncio.get_running_loop().call_later(self._cluster.draw.uniform(0.0005, 0.02), self.hear, down)

    async def crash(self) -> None:
        """SIGKILL: files stay as they are."""
        self.alive = False
        for engine in self.dispatcher.engines.values():
            if engine.link is not None:
                engine.link.close()
        for stream in self.table.live.values():
            if stream.timer is not None:
                stream.timer.cancel()
        for journal in self.table._journals():
            journal.release()
        await self.tasks.close()


class Client:
    """Reads one stream with a cursor, comes back when the gateway did; every token must be the one that any engine draws there."""

    def __init__(self, cluster: Cluster, spec: j.StreamSpec) -> None:
        self.spec = spec
        self.cursor = len(m.unpack_tokens(spec.prompt))
        self.end: j.End | None = None
        self.on_end: Callable[[Client], None] = lambda client: None
        self._cluster = cluster
        self._stream: Stream | None = None
        cluster.clients[spec.stream] = self

    def begin(self, gateway: Gateway) -> None:
        stream = gateway.table.open(self.spec)
        self.follow(gateway, stream)
        gateway.dispatcher.submit(stream)

    def follow(self, gateway: Gateway, stream: Stream | None = None) -> None:
        stream = stream or gateway.table.find(self.spec.stream)
        assert stream is not None, f"the gateway lost {self.spec.stream}"
        self._stream = stream
        stream.add_reader(self)
        self.advance()

    def advance(self) -> None:
        stream = self._stream
        assert stream is not None
        seed = self.spec.sampling.seed
        assert len(stream.tokens) >= self.cursor, "a delivered token was taken back"
        for position in range(self.cursor, len(stream.tokens)):
            assert stream.tokens[position] == token_at(seed, position), f"another token at {position}"
        self.cursor = len(stream.tokens)
        if stream.end is not None and self.end is None:
            self.end = stream.end
            stream.drop_reader(self)
            self.on_end(self)

    @property
    def tokens(self) -> list[int]:
        """All that it has of its stream."""
        assert self._stream is not None
        return self._stream.tokens

    def comment(self, text: str) -> None:
        pass

    def fail(self, status: int, code: str, message: str) -> None:
        raise AssertionError(f"{self.spec.stream}: {status} {code} {message}")


class Cluster:
    """All of it. `draw` decides everything that chance decides.

    durable_s  that an answer waits at most before it ends (durability `turn`); 0: not at all
    """

    def __init__(
        self, seed: int, directory: Path, codec: TextCodec, engine_count: int, durable_s: float, **settings: Any
    ) -> None:
        self.draw = random.Random(seed)
        self.directory = directory
        self.codec = codec
        self.settings = GatewaySettings(**{"engine_wait_s": 1e6, "poison_deaths": 1000, **settings})
        self.poison: int | None = None
        self.epochs: dict[str, int] = {}
        self.clients: dict[str, Client] = {}
        self.engines: dict[str, Engine] = {}
        self.pins: frozenset[tuple[str, str]] = frozenset()
        self.opening = 0  # streams that will be opened yet
        self.durable_s = durable_s
        self.host = Host(self)
        self.gateway = Gateway(self)
        for index in range(engine_count):
            self.host.start(f"e{index}")
        self.host.subscribe()

    def latency(self) -> float:
        return self.draw.uniform(0.0001, 0.004)

    def new_engine(self, name: str, incarnation: int) -> Engine:
        engine = Engine(self, name, incarnation)
        engine.slots = self.draw.choice([2, 4, 8])
        engine.poison = self.poison
        return engine

    async def attach(self, path: str, gateway: str, on_messages: Any, on_lost: Any) -> tuple[Link, m.Hello]:
        await asyncio.sleep(self.latency())
        name, _, incarnation = path.partition(":")
        engine = self.engines[name]
        if engine.incarnation != int(incarnation):
            raise ConnectionRefusedError("another incarnation is there by now")
        return engine.attach(on_messages, on_lost)

    def submitted(self, engine: Engine, submit: m.Submit) -> None:
        """Every submission that reaches an engine: an epoch has one owner."""
        known = self.epochs.get(submit.stream, 0)
        assert submit.epoch > known, f"{submit.stream}: epoch {submit.epoch} at {engine.name} after {known}"
        assert len(submit.tokens) // 4 < submit.max_position, f"{submit.stream} is complete; {engine.name} is given it"
        self.epochs[submit.stream] = submit.epoch

    async def crash_gateway(self, away_s: float) -> None:
        await self.gateway.crash()
        await asyncio.sleep(away_s)
        self.gateway = Gateway(self)
        self.host.subscribe()
        for client in self.clients.values():
            if client.end is None:
                self._back(client)

    def _back(self, client: Client) -> None:
        if self.gateway.table.find(client.spec.stream) is not None:
            client.follow(self.gateway)
        else:  # its last records were written, its end not heard
            stream = self.gateway.table._read(self.gateway.table._path(client.spec.stream))
            assert stream is not None and stream.end is not None, f"{client.spec.stream} is lost"
            client.follow(self.gateway, stream)

    # ------------------------------------------------------------ what must hold

    async def finish(self, limit_s: float = 600.0) -> None:
        """Every stream ends; then nothing is left anywhere."""
        deadline = asyncio.get_running_loop().time() + limit_s
        while self.opening or any(client.end is None for client in self.clients.values()):
            assert asyncio.get_running_loop().time() < deadline, self.describe()
            await asyncio.sleep(0.1)
        await asyncio.sleep(30.0)  # deaths are told, engines are back, drains are over
        self.assert_nothing_is_left()
        await self.gateway.crash()

    def describe(self) -> str:
        open_streams = [
            (s.id, s.state, s.engine, s.epoch, len(s.tokens), s.spec.max_position)
            for s in self.gateway.table.live.values()
        ]
        engines = [
            (e.name, e.state, e.incarnation, e.draining, list(e.streams))
            for e in self.gateway.dispatcher.engines.values()
        ]
        fakes = [(e.name, e.incarnation, e.dead, e.hung, len(e.sequences)) for e in self.engines.values()]
        pending = list(self.gateway.dispatcher.pending)
        return f"streams that never end: {open_streams}; engines {engines}; really {fakes}; pending {pending}"

    def assert_nothing_is_left(self) -> None:
        dispatcher = self.gateway.dispatcher
        assert not self.gateway.table.live
        assert not dispatcher.pending
        assert not dispatcher.moves.moves
        for engine in dispatcher.engines.values():
            assert not engine.streams, f"{engine.name} is thought to work on {list(engine.streams)}"
            live = [state.stream for state in engine.followed.values() if not state.session]
            assert not live, f"{engine.name} is thought to follow {live}"
        protected = [s.session for e in dispatcher.engines.values() for s in e.followed.values() if not s.refused]
        limit = self.settings.hot_sessions if self.settings.failover == "hot" else 0
        unpinned = [session for session in protected if ("default", session) not in self.pins]
        assert len(set(protected)) == len(protected), f"protected twice: {protected}"
        assert len(unpinned) <= limit, f"{unpinned} are protected, at most {limit} may be"
        for fake in self.engines.values():
            if not fake.dead:
                busy = [s.submit.stream for s in fake.sequences.values() if not s.finish]
                assert not busy, f"{fake.name} still computes {busy}"
                known = dispatcher.engines[fake.name].followed.values()
                thought = sorted(state.stream for state in known if not state.refused)
                assert sorted(fake.follows) == thought, f"{fake.name} follows {list(fake.follows)}, thought {thought}"
        for client in self.clients.values():
            assert client._stream is not None
            assert client._stream.journal is None or j.is_closed(client._stream.journal.path), (
                "a journal isn't finished"
            )
