"""Fakes for faults of the other side: an engine and a host agent that speak the messages, in the test's own loop.

The fake's tokens are a function of (seed, position), as the real sampler's are, so a stream that moves must not change.
It can die (`kill`: the socket closes and the host says so), hang, fall silent in mid-frame, or hold its tokens back.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import xxhash

from engine import messages as m
from engine.wire import TO_ENGINE, TO_HOST, FrameBuffer, encode

VOCAB_COUNT = 260
CONTEXT_TOKENS = 4096
ROOT = "00" * 16


def token_at(seed: int, position: int) -> int:
    """The token that any engine draws there: never below 5 (special tokens of the test tokenizer)."""
    return 5 + xxhash.xxh3_64_intdigest(f"{seed}:{position}".encode()) % (VOCAB_COUNT - 5)


class FakeSequence:
    """One submission."""

    def __init__(self, submit: m.Submit) -> None:
        self.submit = submit
        self.tokens = m.unpack_tokens(submit.tokens)
        self.finish = ""
        self.outputs: list[m.Output] = []
        self.started: m.Started | None = None
        self.script = b""  # what it says instead of drawing, a token a byte, then the end token

    def draw(self) -> m.Output:
        submit, position = self.submit, len(self.tokens)
        token = token_at(submit.sampling.seed, position)
        if self.script:
            said = position - submit.prompt_count
            token = 4 + self.script[said] if said < len(self.script) else submit.stop_tokens[0]
        self.tokens.append(token)
        if token in submit.stop_tokens:
            self.finish = "stop"
        elif position + 1 >= submit.max_position:
            self.finish = "length"
        top = [(token, -0.5), (token - 1, -1.5), (token - 2, -2.5)][: max(0, submit.sampling.logprobs)]
        logprobs = m.TokenLogprobs(-0.5, top) if submit.sampling.logprobs >= 0 else None
        output = m.Output(submit.stream, submit.epoch, position, token, self.finish, logprobs)
        self.outputs.append(output)
        return output


class FakeEngine:
    """One incarnation. `budget` bounds how many steps it makes; None is no bound."""

    def __init__(
        self, name: str, incarnation: int, directory: Path, *, step_s: float = 0.0, script: bytes = b""
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.path = directory / f"{name}-{incarnation}.sock"
        self.step_s = step_s
        self.script = script
        self.budget: int | None = None
        self.kill_at: int | None = None  # position: dies when it has sent the token there
        self.refuse: m.Refused | None = None
        self.sequences: dict[str, FakeSequence] = {}
        self.submits: list[m.Submit] = []
        self.cancels: list[m.Cancel] = []
        self.parks: list[m.Park] = []
        self.loads: list[m.LoadAdapter] = []
        self.unloads: list[str] = []
        self.adapter_error = ""
        self.follows: dict[str, list[int]] = {}
        self.idle_follows: dict[str, m.Follow] = {}
        self.kept: dict[str, m.Resident] = {}  # by session, what lies idle on the device
        self.follow_refusal = ""
        self.follow_lag = 0  # tokens that it stays behind
        self.releases: list[m.Release] = []
        self.root = ROOT
        self.slots = 8
        self.dies_scoring: int | None = None  # how many of a prompt's log probabilities it tells before it dies
        self.poison: int | None = None  # seed of a request that it dies of when it has started it
        self.dead = False
        self.stopped = False
        self.drained = False
        self.pid = os.getpid()  # as the host agent says
        self.host: FakeHost | None = None
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> FakeEngine:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))
        self._task = asyncio.create_task(self._run())
        return self

    async def kill(self, reason: str = "killed", *, tell: bool = True, from_outside: bool = True) -> None:
        """Nothing more is sent; the host agent says that it is dead, and how it died."""
        self.dead = True
        if self._writer is not None:
            self._writer.transport.abort()
        if self._server is not None:
            self._server.close()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self.host is not None and tell:
            self.host.down(self, reason)
            self.host.gone(self, from_outside=from_outside)

    def allow(self, steps: int | None) -> None:
        """Let it make so many more steps."""
        self.budget = steps
        self._work.set()

    def send(self, message: m.Message) -> None:
        if self._writer is not None and not self.dead:
            self._writer.write(encode(message))

    # ------------------------------------------------------------ messages

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameBuffer(TO_ENGINE)
        try:
            while data := await reader.read(65536):
                for message in frames.feed(data):
                    self._take(message, writer)
        except ConnectionError:
            pass
        finally:
            if self._writer is writer:
                self._writer = None
            writer.close()

    def _take(self, message: m.ToEngine, writer: asyncio.StreamWriter) -> None:
        match message:
            case m.Attach():
                if self._writer is not None:
                    self._writer.transport.abort()
                self._writer = writer
                self._hello()
            case m.Submit():
                self.submits.append(message)
                self._unfollow(message.stream)
                if self.refuse is not None:
                    self.send(m.Refused(message.stream, message.epoch, self.refuse.code, self.refuse.message))
                    return
                self.kept.pop(message.session, None)
                self.sequences[message.stream] = FakeSequence(message)
                self.sequences[message.stream].script = self.script
                while self._room() < 0 and self._give_way():
                    pass
                self._work.set()
            case m.Cancel():
                self.cancels.append(message)
                sequence = self.sequences.get(message.stream)
                if sequence is not None and sequence.submit.epoch == message.epoch:
                    del self.sequences[message.stream]
            case m.Follow():
                self._follow(message)
            case m.Unfollow():
                self._unfollow(message.stream)
            case m.Release():
                self.releases.append(message)
                sequence = self.sequences.get(message.stream)
                known = sequence is not None and sequence.submit.epoch == message.epoch and not sequence.finish
                position = len(sequence.tokens) - 1 if known and sequence is not None else -1
                if known:
                    del self.sequences[message.stream]
                self.send(m.Released(message.stream, message.epoch, position))
            case m.Shutdown():
                self.stopped = True
            case m.Drained():
                self.drained = message.on
            case m.LoadAdapter():
                self.loads.append(message)
                self.send(m.AdapterReady(message.request, self.adapter_error))
            case m.UnloadAdapter():
                self.unloads.append(message.digest)
            case m.Park():
                self.parks.append(message)
                self.kept.pop(message.session, None)
                self._unfollow(f"idle:{message.session}")
                self.kept.pop(message.session, None)
                self.send(m.Parked(message.request, 1, 42))

    def _follow(self, message: m.Follow) -> None:
        """As `engine/follow.py`, with tiers that hold everything but `follow_lag` tokens."""
        if self.follow_refusal:
            self._unfollow(message.stream)
            self.send(m.Followed(message.stream, 0, refused=self.follow_refusal))
            return
        if not message.start:
            self._unfollow(message.stream)
            full = self._room() <= 0
            if full and (message.idle or not self.idle_follows or not self._give_way()):
                self.send(m.Followed(message.stream, 0, refused="no_slot"))
                return
        known = self.follows.get(message.stream)
        if message.start and (known is None or len(known) < message.start):
            self.send(m.Followed(message.stream, 0, refused="gap"))
            return
        tokens = [*(known or [])[: message.start], *m.unpack_tokens(message.tokens)]
        self.follows[message.stream] = tokens
        if message.idle:
            self.idle_follows[message.stream] = message
        goal = len(tokens) if message.idle else len(tokens) - 1
        self.send(m.Followed(message.stream, max(0, goal - self.follow_lag), caught_up=True))

    def _room(self) -> int:
        """Slots that are left."""
        return self.slots - len(self.follows) - sum(not s.finish for s in self.sequences.values())

    def _give_way(self) -> bool:
        """As `Follower.make_room`."""
        name = min(
            self.follows, key=lambda name: (name not in self.idle_follows, len(self.follows[name])), default=None
        )
        if name is None:
            return False
        self._unfollow(name)
        self.send(m.Followed(name, 0, refused="no_slot"))
        return True

    def _unfollow(self, name: str) -> None:
        tokens, follow = self.follows.pop(name, None), self.idle_follows.pop(name, None)
        if tokens is not None and follow is not None:
            packed = m.pack_tokens(tokens)
            self.kept[follow.session] = m.Resident(follow.session, follow.namespace, follow.adapter, packed, True)

    def _hello(self) -> None:
        for name in list(self.follows):
            self._unfollow(name)
        live = [
            m.LiveStream(s.submit.stream, s.submit.epoch, m.pack_tokens(s.tokens), s.submit.prompt_count, s.finish)
            for s in self.sequences.values()
        ]
        self.send(
            m.Hello(
                self.name,
                self.incarnation,
                os.getpid(),
                self.root,
                "tiny",
                "cpu",
                "float32",
                CONTEXT_TOKENS,
                VOCAB_COUNT,
                self.slots,
                live,
                list(self.kept.values()),
                self.drained,
            )
        )
        for sequence in self.sequences.values():
            if sequence.started:
                self.send(sequence.started)
                self.send(m.Step(sequence.outputs))

    # ------------------------------------------------------------ steps

    async def _run(self) -> None:
        while not self.dead:
            self._work.clear()
            active = [s for s in self.sequences.values() if not s.finish]
            if not active or self.budget == 0:
                await self._work.wait()
                continue
            if self.budget is not None:
                self.budget -= 1
            await self._step(active)
            await asyncio.sleep(self.step_s)

    async def _step(self, active: list[FakeSequence]) -> None:
        outputs = []
        for sequence in active:
            if sequence.started is None:
                self._start(sequence)
                self._score(sequence.submit)
            if sequence.submit.sampling.seed == self.poison or self.dies_scoring is not None:
                await asyncio.sleep(0.001)
                await self.kill(from_outside=False)
                return
            outputs.append(sequence.draw())
            if sequence.finish and sequence.submit.session:
                submit, tokens = sequence.submit, m.pack_tokens(sequence.tokens)
                self.kept[submit.session] = m.Resident(submit.session, submit.namespace, submit.adapter, tokens)
        self.send(m.Step(outputs))
        captured = [(s.submit.stream, s.submit.epoch, len(s.tokens) - 1) for s in active]
        self.send(m.Captured(captured))
        if self.kill_at is not None and any(output.position >= self.kill_at for output in outputs):
            if self._writer is not None:
                await self._writer.drain()
            await asyncio.sleep(0.001)
            await self.kill()

    def _start(self, sequence: FakeSequence) -> None:
        submit = sequence.submit
        known = len(sequence.tokens) - 1
        reused = {"device": 0, "lane": known // 2, "disk": 0}
        sequence.started = m.Started(
            submit.stream, submit.epoch, "restored", "", reused, known + 1 - known // 2, 0, 0.1, 0.2
        )
        self.send(sequence.started)
        if len(sequence.tokens) > submit.prompt_count:
            self.send(m.Forced(submit.stream, submit.epoch, len(sequence.tokens) - submit.prompt_count, 0.3))

    def _score(self, submit: m.Submit) -> None:
        """Of a prompt's tokens from where they aren't known: -position, beside token 5 with -0.25."""
        if submit.scored < 0:
            return
        count = max(0, submit.sampling.logprobs)
        rows = [m.TokenLogprobs(-float(at), [(5, -0.25)][:count]) for at in range(1, submit.prompt_count)]
        told = rows[: self.dies_scoring]
        for at in range(submit.scored, len(told), 2):
            first = max(0, at - 1)  # the parts overlap
            self.send(m.Scored(submit.stream, submit.epoch, 1 + first, told[first : at + 2]))


class FakeHost:
    """A host agent that says what the test tells it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engines: dict[str, FakeEngine] = {}
        self.suspects: list[m.Suspect] = []
        self.confirm_suspects = True
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> FakeHost:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        self._writers.clear()

    def up(self, engine: FakeEngine) -> None:
        engine.host = self
        self.engines[engine.name] = engine
        self._tell(self._up_message(engine))

    def down(self, engine: FakeEngine, reason: str) -> None:
        if self.engines.get(engine.name) is engine:
            del self.engines[engine.name]
        self._tell(m.EngineDown(engine.name, engine.incarnation, reason, 0.0, 0.1))

    def gone(self, engine: FakeEngine, *, from_outside: bool) -> None:
        self._tell(m.EngineGone(engine.name, engine.incarnation, -9 if from_outside else -11, from_outside))

    def _up_message(self, engine: FakeEngine) -> m.EngineUp:
        return m.EngineUp(engine.name, engine.incarnation, engine.pid, str(engine.path))

    def _tell(self, message: m.Message) -> None:
        for writer in self._writers:
            writer.write(encode(message))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameBuffer(TO_HOST)
        try:
            while data := await reader.read(65536):
                for message in frames.feed(data):
                    if isinstance(message, m.Subscribe):
                        self._writers.add(writer)
                        for engine in self.engines.values():
                            writer.write(encode(self._up_message(engine)))
                    else:
                        self._suspected(message, writer)
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _suspected(self, message: m.Suspect, writer: asyncio.StreamWriter) -> None:
        self.suspects.append(message)
        engine = self.engines.get(message.engine)
        if self.confirm_suspects and (engine is None or engine.incarnation > message.incarnation or engine.dead):
            writer.write(encode(m.EngineDown(message.engine, message.incarnation, "killed", 0.0, 0.2)))
