"""Streams to engines and tokens back. Stages: place, deliver, resume; the gateway's heart, on the event loop, never waits.

Every submission is a resume: the full token list goes to the engine that placement chose, under an epoch that only grows.
Engine lost: nothing moves until it is dead for certain (`membership.py`); then its streams are placed again.
What has an old epoch, or a position that is known, is dropped; a position that comes too early means a new submission.
Source: docs/path-of-a-token.md, "A recovery, on the same path".
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from engine import messages as m
from gateway import failover, following, metrics, placement
from gateway import journal as j
from gateway.awake import AwakeTimer
from gateway.engines import Engine
from gateway.membership import Membership, World
from gateway.migration import Moves
from gateway.poison import Incarnation, Inquests
from gateway.recovery_pacing import Waiting, in_order
from gateway.settings import GatewaySettings
from gateway.standby import Standbys
from gateway.streams import Stream, StreamTable

log = structlog.get_logger()

SETTLE_S = 0.25  # after the host agent answered: engines that are up have been named by then
DRAIN_LIMIT_S = 60.0  # an engine that drains ends by itself long before
# What a stream fails with, by the code of its refusal; others are bugs, 500.
STATUS_OF_CODE = {
    "too_long": 400, "bad_token": 400, "bad_grammar": 400, "bad_adapter": 400, "cancelled": 410, "no_engine": 503,
}  # fmt: skip


class Dispatcher:
    """Which engine works on what."""

    def __init__(
        self,
        settings: GatewaySettings,
        table: StreamTable,
        gateway: str,
        suspect: Callable[[str, int, str], None],
        settled: Callable[[str, int], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        world: World = World(),
    ) -> None:
        self._settings = settings
        self._table = table
        self._spawn = spawn
        self._world = world
        membership = Membership(self, gateway, suspect, settled, spawn, world)
        self.engines = membership.engines
        self.on_host_news = membership.heard
        self.pending: dict[str, Stream] = {}
        self.on_end: Callable[[Stream], None] = lambda stream: None
        # An answer that is complete waits for this.
        self.before_end: Callable[[Stream], Coroutine[Any, Any, None]] | None = None
        self.adapter_directory: Callable[[str], Path] = Path
        self.on_captured: Callable[[Stream], None] = lambda stream: None
        self.moves = Moves(self)
        self.standbys = Standbys(self, settings.hot_sessions) if settings.failover == "hot" else None
        self.inquests = Inquests(table, settings.poison_deaths, spawn, self._end_poison, self._place_pending)
        self._watchers: list[Moves | Standbys] = [self.moves, *([self.standbys] if self.standbys else [])]
        self._settled = True
        self._read_back_at = self._named_at = 0.0  # streams of an earlier process; those that engines go on with
        self._engines_changed = asyncio.Event()

    # ------------------------------------------------------------ what requests do

    def submit(self, stream: Stream) -> None:
        """Place a stream: at once, or as soon as an engine is up."""
        if stream.end is None and not stream.finish:
            self.pending[stream.id] = stream
            self._place_pending()

    def give(self, stream: Stream, engine: Engine | None) -> None:
        """To this engine, whatever else waits; None: to any."""
        if engine is None or not engine.ready:
            self.submit(stream)
        else:
            self._send(stream, engine, m.pack_tokens(stream.tokens))

    def cancel(self, stream: Stream, cause: str) -> None:
        """End a stream between steps; what was delivered stays. One whose prompt isn't scored yet fails: it has no answer to cut short."""
        if stream.end is None:
            self._cancel_at_engine(stream, -1)
            said = "the request was ended before its prompt's log probabilities were computed; send it again"
            refused = m.Refused(stream.id, stream.epoch, "cancelled", said) if stream.lacks_scores else None
            self._end(stream, "stop", cause, refused)

    def waiting_count(self) -> int:
        """Live streams that no engine has started."""
        return sum(stream.started is None for stream in self._table.live.values())

    def retry_after_s(self, waiting: int) -> int:
        """When a place may be free: each slot takes a guess of two seconds an answer."""
        slots = sum(engine.hello.slots for engine in self._ready() if engine.hello) or 1
        return max(1, min(60, 2 * waiting // slots))

    def waiting_tokens(self) -> int:
        """Their tokens."""
        return sum(len(stream.tokens) for stream in self._table.live.values() if stream.started is None)

    @property
    def can_serve(self) -> bool:
        return bool(self.placeable())

    def placeable(self) -> list[Engine]:
        """Engines that take streams now."""
        return [engine for engine in self.engines.values() if engine.placeable]

    def now(self) -> float:
        """CLOCK_MONOTONIC, or what stands for it in a simulation."""
        return self._world.clock()

    def is_answering(self, session: str) -> bool:
        """Some stream of the session is live."""
        return any(stream.spec.session == session for stream in self._table.live.values())

    def set_draining(self, engine: Engine, draining: bool) -> None:
        """Whether an engine takes streams."""
        if engine.draining != draining:
            engine.draining = draining
            log.info("drain.begun" if draining else "drain.undone", engine=engine.name, streams=len(engine.streams))
            self._changed(engine)
            self._place_pending()

    def _changed(self, engine: Engine) -> None:
        self._engines_changed.set()
        for watcher in self._watchers:
            watcher.engine_changed(engine)

    async def park(self, session: str, timeout_s: float, but: str = "") -> list[m.Parked]:
        """Take a session off every engine that may hold it (all `but` one). Raises TimeoutError."""
        if self.standbys is not None:
            self.standbys.parked(session, but)
        asked = []
        for engine in [engine for engine in self._ready() if engine.name != but]:
            engine.forget(session)
            following.parked(engine, session)
            asked.append(engine.ask(lambda number: m.Park(number, session)))
        if self.standbys is not None:
            self.standbys.protect_sessions()
        async with asyncio.timeout(timeout_s):
            answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, m.Parked)]

    async def load_adapter(self, digest: str, timeout_s: float) -> list[str]:
        """Have every engine load an adapter; returns what those say that can't. Raises TimeoutError."""
        directory = str(self.adapter_directory(digest))
        asked = [
            (engine, engine.ask(lambda number: m.LoadAdapter(number, digest, directory))) for engine in self._ready()
        ]
        async with asyncio.timeout(timeout_s):
            await asyncio.wait([future for _, future in asked])
        answers = [(engine, future.result()) for engine, future in asked if future.exception() is None]
        for engine, answer in answers:
            if not answer.error:
                engine.adapters.add(digest)
        return [answer.error for _, answer in answers if answer.error]

    def unload_adapter(self, digest: str) -> None:
        """Have every engine forget an adapter when its streams have ended."""
        for engine in self._ready():
            engine.adapters.discard(digest)
            engine.send(m.UnloadAdapter(digest))

    # ------------------------------------------------------------ streams of an earlier process

    def resume_all(self, streams: list[Stream], host_answered: asyncio.Event) -> None:
        """Take over streams read back from their journals: engines that know them are asked first."""
        self._read_back_at = self.now()
        for stream in streams:
            if stream.finish:
                self._finish(stream)
                continue
            if not stream.stored:
                AwakeTimer(self._settings.resume_grace_s, partial(self._expire, stream))
            stream.recovery = failover.begun_before(stream, self._read_back_at - time.time())
            self._wait(stream)
            log.info("resume.read_back", stream=stream.id, tokens=stream.token_count, stored=stream.stored)
        self._settled = False
        self._spawn(self._settle(host_answered))

    async def _settle(self, host_answered: asyncio.Event) -> None:
        """Once the engines that are up had the chance to name their streams, the others are submitted again."""
        await host_answered.wait()
        await asyncio.sleep(SETTLE_S)
        self._named_at = self.now()
        while not self.can_serve or any(engine.state == "connecting" for engine in self.engines.values()):
            self._engines_changed.clear()
            await self._engines_changed.wait()
        self._settled = True
        self._place_pending()

    def _expire(self, stream: Stream) -> None:
        if stream.end is None and not stream.readers:
            self.cancel(stream, "expired")

    # ------------------------------------------------------------ placing

    def _ready(self) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.ready]

    def _send(self, stream: Stream, engine: Engine, tokens: bytes) -> None:
        now = self.now()
        self._stop_waiting(stream)
        self._find_lost_with_gateway(stream)
        stream.resumed = False
        if stream.epoch == 0:
            stream.waited_ms = (time.monotonic() - stream.opened_at) * 1000
        lost = failover.as_written(stream.recovery.loss, time.time() - now) if stream.recovery is not None else None
        stream.record(j.Placed(stream.epoch + 1, engine.name, engine.incarnation, lost))
        if stream.recovery is not None:
            stream.recovery = stream.recovery.submit(engine.name, now)
        engine.streams[stream.id] = stream
        engine.remember(stream, tokens)
        following.claimed(engine, stream.id)
        for watcher in self._watchers:  # first: what is followed of its session here is to be idle when it is submitted
            watcher.placed(stream, engine)
        if stream.spec.adapter and stream.spec.adapter not in engine.adapters:
            engine.adapters.add(stream.spec.adapter)
            engine.send(m.LoadAdapter(0, stream.spec.adapter, str(self.adapter_directory(stream.spec.adapter))))
        engine.send(
            m.Submit(
                stream=stream.id,
                epoch=stream.epoch,
                tokens=tokens,
                prompt_count=stream.prompt_count,
                sampling=stream.spec.sampling,
                stop_tokens=stream.spec.stop_tokens,
                max_position=stream.spec.max_position,
                namespace=stream.spec.namespace,
                session=stream.spec.session,
                prefill_start=stream.started.prefill_start if stream.started else -1,
                grammar=stream.spec.grammar,
                capture=stream.spec.capture,
                adapter=stream.spec.adapter,
                scored=len(stream.scored) if stream.spec.scored else -1,
            )
        )
        log.debug("place.submitted", stream=stream.id, engine=engine.name, epoch=stream.epoch, tokens=len(tokens) // 4)

    def _wait(self, stream: Stream) -> None:
        """For a place: with no engine up to the limit, with engines that are full as long as it takes."""
        self.pending[stream.id] = stream
        if self.can_serve:
            self._stop_timer(stream)
        elif stream.timer is None:
            stream.timer = AwakeTimer(self._settings.engine_wait_s, partial(self._give_up, stream))
            log.info("place.waiting", stream=stream.id, limit_s=self._settings.engine_wait_s)

    def _stop_waiting(self, stream: Stream) -> None:
        self.pending.pop(stream.id, None)
        self.inquests.drop(stream)
        self._stop_timer(stream)

    def _stop_timer(self, stream: Stream) -> None:
        if stream.timer is not None:
            stream.timer.cancel()
            stream.timer = None

    def _give_up(self, stream: Stream) -> None:
        """Clients are told; a stored stream still waits for an engine, any other ends."""
        stream.timer = None
        if stream.end is not None:
            return
        message = f"no engine could serve for {self._settings.engine_wait_s:g} s; see /admin/engines and try again"
        log.error("place.gave_up", stream=stream.id, stored=stream.stored)
        if stream.stored:
            for reader in tuple(stream.readers):
                reader.fail(503, "no_engine", message)
        else:
            self._end(stream, "error", "error", m.Refused(stream.id, stream.epoch, "no_engine", message))

    def _place_pending(self) -> None:
        """Most urgent first, as far as engines have room; with no engine at all the clocks of the waiting begin to run."""
        if not self.can_serve:
            for stream in self.pending.values():
                self._wait(stream)
            return
        for stream_id in self._pending_in_order():
            waiting = self.pending.get(stream_id)
            if waiting is not None and not self._place(waiting):
                return

    def _pending_in_order(self) -> list[str]:
        return in_order(
            Waiting(stream.id, order, stream.epoch > 0, stream.token_count > 0, bool(stream.readers))
            for order, stream in enumerate(self.pending.values())
            if (self._settled or not stream.resumed) and not self.inquests.holds(stream)
        )

    def _place(self, stream: Stream) -> bool:
        """False if no engine has room."""
        if stream.alone and any(s.alone for engine in self.engines.values() for s in engine.streams.values()):
            return True  # later: one suspect at a time
        tokens = m.pack_tokens(stream.tokens)
        views = [engine.view(tokens, stream) for engine in self.placeable()]
        choice = placement.choose(views, self._settings.spares)
        if choice is None:
            self._wait(stream)
            return False
        self._send(stream, self.engines[choice], tokens)
        return True

    def _find_lost_with_gateway(self, stream: Stream) -> None:
        """A stream of an earlier process that its engine does not go on with: that one was lost, and nobody there to see it."""
        engine = self.engines.get(stream.engine)
        lives = engine is not None and engine.ready and engine.incarnation == stream.incarnation
        if stream.resumed and stream.epoch > 0 and not lives:
            heard = min(stream.last_written - time.time() + self.now(), self._read_back_at)
            certain = max(self._read_back_at, self._named_at)
            self._begin_recovery(
                stream, failover.Loss(stream.engine, failover.WITH_GATEWAY, heard, self._read_back_at, certain)
            )

    # ------------------------------------------------------------ engines come and go

    def engine_attached(self, engine: Engine, hello: m.Hello) -> None:
        """It serves: what it works on is taken over, and what waits is placed. A drain that the gateway before began goes on."""
        engine.draining = hello.drained
        for live in hello.streams:
            self._take_over(engine, live)
        for resident in hello.residents:
            self._find_resident(engine, resident)
        assert engine.link is not None, "attached"
        engine.link.begin()
        self._changed(engine)
        for stream in self.pending.values():
            self._stop_timer(stream)
        self._place_pending()
        if engine.draining:
            self._spawn(self._drain(engine, "drain"))

    def engine_out_of_touch(self, engine: Engine) -> None:
        """Not dead for certain yet: nothing moves, but it gets nothing more either."""
        self._changed(engine)
        self._place_pending()

    def _take_over(self, engine: Engine, live: m.LiveStream) -> None:
        """A stream that the engine goes on with since before we attached: adopt it, or tell it to stop."""
        stream = self._table.live.get(live.stream)
        tokens = m.unpack_tokens(live.tokens)
        # One that is complete only waits for its end.
        if (
            stream is None
            or stream.finish
            or live.epoch < stream.epoch
            or (stream.engine != engine.name and live.epoch == stream.epoch)
        ):
            if not live.finish:
                self._cancel_epoch(engine, live.stream, live.epoch)
            return
        known = len(stream.tokens)
        if tokens[:known] != stream.tokens or (live.finish and len(tokens) == known):
            # Other tokens than were promised, or an end that the journal knows nothing of: computed again.
            log.warning("resume.taken_back", stream=stream.id, engine=engine.name, known=known, theirs=len(tokens))
            self._cancel_epoch(engine, live.stream, live.epoch)
            stream.epoch = max(stream.epoch, live.epoch)
            self.submit(stream)
            return
        self._stop_waiting(stream)
        stream.resumed = False
        stream.record(j.Placed(live.epoch, engine.name, engine.incarnation, stream.lost))
        engine.streams[stream.id] = stream
        engine.remember(stream, live.tokens)
        # The engine says again all that it said of this stream: what is new among it is delivered like any other token.
        log.info("resume.attached", stream=stream.id, engine=engine.name, known=known, to_catch_up=len(tokens) - known)

    def _find_resident(self, engine: Engine, resident: m.Resident) -> None:
        """A session that lies on the device since before we attached: its next turn goes there, unless it is a standby's copy."""
        if resident.copied:
            engine.copies[resident.session] = resident.tokens
        else:
            engine.keep(following.idle_name(resident.session), resident.namespace, resident.session, resident.tokens)
        if self.standbys is not None and not self.is_answering(resident.session):
            self.standbys.resident(engine, resident)

    def engine_died(self, engine: Engine, loss: failover.Loss) -> None:
        """For certain: its streams go on elsewhere."""
        self._changed(engine)
        # One whose answer is complete needs no engine any more, only its end.
        streams, engine.streams = [s for s in engine.streams.values() if not s.finish], {}
        engine.residents.clear()
        following.lost(engine)
        log.warning("recover.engine_down", engine=engine.name, reason=loss.reason, streams=len(streams))
        for stream in streams:
            if stream.end is None:
                self._begin_recovery(stream, loss)
        if loss.reason != "exited":
            had = [*streams, *engine.cancelled_lately(loss.noticed)]
            self.inquests.engine_died(Incarnation(engine.name, engine.incarnation), had)
        self.pending.update({stream.id: stream for stream in streams if stream.end is None})
        self._place_pending()

    def engine_gone(self, gone: m.EngineGone) -> None:
        """How an engine died."""
        self.inquests.heard(Incarnation(gone.engine, gone.incarnation), from_outside=gone.from_outside)

    def _end_poison(self, stream: Stream) -> None:
        """A request that engines die of is ended, so that its neighbours go on."""
        count, position = math.ceil(stream.deaths.count), len(stream.tokens)
        metrics.poison_requests.inc()
        log.error(
            "recover.poison", stream=stream.id, session=stream.spec.session or None, deaths=count, position=position
        )
        message = (
            f"{count} engines died while they computed this request at position {position} (gateway.poison_deaths); "
            "it is not tried again: change it, and look into the engines' log for the cause"
        )
        self._end(stream, "error", "poison", m.Refused(stream.id, stream.epoch, "poison_request", message))

    def _begin_recovery(self, stream: Stream, loss: failover.Loss) -> None:
        if stream.recovery is not None:  # lost again before the next token
            stream.record(stream.recovery.cut_short(loss.noticed))
        stream.recovery = failover.Recovering(loss, len(stream.tokens))
        stream.comment(failover.lost_comment(loss, len(stream.tokens)))

    # ------------------------------------------------------------ what engines say

    def engine_said(self, engine: Engine, messages: list[Any]) -> None:
        """All that one read brought; tokens of a stream are journaled and sent once."""
        fresh: dict[str, list[m.Output]] = {}
        for message in messages:
            match message:
                case m.Step():
                    for output in message.outputs:
                        fresh.setdefault(output.stream, []).append(output)
                    continue
                case m.Captured():
                    self._on_captured(engine, message)
                    continue
            self._deliver_all(engine, fresh)
            fresh = {}
            self._on_message(engine, message)
        self._deliver_all(engine, fresh)

    def _on_message(self, engine: Engine, message: Any) -> None:
        match message:
            case m.Started():
                self._on_started(engine, message)
            case m.Forced():
                stream = self._current(engine, message.stream, message.epoch)
                if stream is not None:
                    self._on_forced(stream, message)
            case m.Scored():
                stream = self._current(engine, message.stream, message.epoch)
                if stream is not None:
                    self._on_scored(engine, stream, message)
            case m.Refused():
                stream = self._current(engine, message.stream, message.epoch)
                if stream is not None and not self.moves.refused(stream, engine):
                    self._end(stream, "error", "error", message)
            case m.Followed() | m.Released():
                if isinstance(message, m.Followed):
                    following.heard(engine, message, self._table.live.get(message.stream))
                for watcher in self._watchers:
                    watcher.said(engine, message)
            case m.Draining():
                self._spawn(self._drain(engine, "the engine was told to end"))
            case m.AdapterReady() if not message.request:
                if message.error:
                    log.error("adapter.refused", engine=engine.name, error=message.error)
            case m.Parked() | m.AdapterReady():
                engine.answered(message.request, message)
            case m.Stats():
                engine.stats, engine.tenants = message.stats, message.tenants

    async def _drain(self, engine: Engine, why: str) -> None:
        await self.moves.drain(engine, why, DRAIN_LIMIT_S)

    def _current(self, engine: Engine, stream_id: str, epoch: int) -> Stream | None:
        """The stream, if this engine works on it under its newest epoch."""
        stream = engine.streams.get(stream_id)
        return stream if stream is not None and stream.end is None and stream.epoch == epoch else None

    def _on_started(self, engine: Engine, message: m.Started) -> None:
        stream = self._current(engine, message.stream, message.epoch)
        if stream is None:
            return
        stream.begun_epoch = stream.epoch
        restored = sum(message.reused.values())
        if stream.recovery is not None:
            stream.recovery = stream.recovery.start(restored, self.now())
        if stream.started is None:
            metrics.verdicts.labels(message.verdict).inc()
            for tier, count in message.reused.items():
                metrics.cached_tokens.labels(tier).inc(count)
            stream.record(
                j.StartedRecord(
                    message.verdict,
                    message.reason,
                    message.reused,
                    message.recomputed,
                    message.prefill_start,
                    round(stream.waited_ms + message.wait_ms, 3),
                    round(message.restore_ms, 3),
                )  # fmt: skip
            )
        log.debug(
            "place.started", stream=stream.id, engine=engine.name, verdict=message.verdict, reason=message.reason,
            reused=message.reused, recomputed=message.recomputed, restore_ms=message.restore_ms,
        )  # fmt: skip

    def _on_forced(self, stream: Stream, message: m.Forced) -> None:
        if stream.recovery is not None:
            stream.recovery = stream.recovery.force(message.token_count, message.ms)
        elif not stream.token_count and stream.epoch == stream.started_epoch:
            stream.prefill_ms = round(message.ms, 3)

    def _on_scored(self, engine: Engine, stream: Stream, message: m.Scored) -> None:
        """Journal what is new of the prompt's log probabilities."""
        known = message.position - 1, len(stream.scored)
        if known[0] > known[1]:
            metrics.gaps_refused.inc()
            log.error("deliver.gap", stream=stream.id, expected=known[1] + 1, got=message.position)
            self._resubmit(engine, stream)
        elif fresh := message.rows[known[1] - known[0] :]:
            stream.record(j.Scored(fresh))

    def _on_captured(self, engine: Engine, message: m.Captured) -> None:
        for stream_id, epoch, position in message.positions:
            stream = self._table.find(stream_id)
            if stream is not None and stream.epoch == epoch:
                stream.captured = position
                self.on_captured(stream)

    def _deliver_all(self, engine: Engine, fresh: dict[str, list[m.Output]]) -> None:
        if not fresh:
            return
        begun = time.perf_counter()
        for stream_id, outputs in fresh.items():
            stream = engine.streams.get(stream_id)
            if stream is not None:
                self._deliver_new(engine, stream, outputs)
        metrics.step_deliver_s.observe(time.perf_counter() - begun)

    def _deliver_new(self, engine: Engine, stream: Stream, outputs: list[m.Output]) -> None:
        """Drop what is old or known; what comes too early means that something was lost on the way."""
        position = len(stream.tokens)
        accepted = []
        for output in outputs:
            if output.epoch != stream.epoch or output.position < position or stream.finish or stream.end is not None:
                metrics.duplicate_tokens.inc()
            elif output.position > position:
                metrics.gaps_refused.inc()
                log.error("deliver.gap", stream=stream.id, expected=position, got=output.position)
                self._resubmit(engine, stream)
                break
            else:
                accepted.append(output)
                position += 1
        if accepted:
            self._deliver(stream, accepted, accepted[-1].finish)

    def _deliver(self, stream: Stream, outputs: list[m.Output], finish: str) -> None:
        """Journal, then send."""
        now = self.now()
        recovered = None
        cleared, stream.alone = stream.alone, False
        for watcher in self._watchers:
            watcher.delivered(stream, now)
        if stream.recovery is not None:
            recovered = self._end_recovery(stream, now)
        logprobs: list[m.TokenLogprobs | None] = []
        if stream.spec.sampling.logprobs >= 0:
            logprobs = [output.logprobs for output in outputs]
        tokens = m.pack_tokens([output.token for output in outputs])
        if not stream.first_token_at and not stream.last_written:  # an earlier gateway admitted what was read back
            stream.first_token_at = now
            metrics.first_token_s.observe(now - stream.opened_at)
        prefill_ms = 0.0 if stream.token_count else stream.prefill_ms
        stream.record(j.Tokens(len(stream.tokens), tokens, finish, logprobs, prefill_ms))
        metrics.delivered_tokens.inc(len(outputs))
        if recovered is not None:
            stream.comment(failover.recovered_comment(recovered))
        for engine in self._ready():
            following.delivered(engine, stream)
        if stream.finish:
            if stream.stopped_by_text:
                self._cancel_at_engine(stream, len(stream.tokens))
            self._finish(stream)
        else:
            stream.advance_readers()
        if cleared:
            self._place_pending()  # the next suspect's turn

    def _end_recovery(self, stream: Stream, now: float) -> j.Recovery:
        recovery: j.Recovery = stream.recovery.finish(now)
        stream.recovery = None
        stream.record(recovery)
        metrics.recoveries.labels(recovery.reason).inc()
        if recovery.reason != failover.WITH_GATEWAY:
            metrics.recovery_gap_s.observe(recovery.gap_ms / 1000)
        log.info(
            "recover.done", stream=stream.id, lost=recovery.engine, engine=recovery.to_engine, reason=recovery.reason,
            position=recovery.position, gap_ms=round(recovery.gap_ms, 1), detect_ms=round(recovery.detect_ms, 1),
            fence_ms=round(recovery.fence_ms, 1), restore_ms=round(recovery.restore_ms, 1),
            force_ms=round(recovery.force_ms, 1), next_token_ms=round(recovery.next_token_ms, 1),
            restored_tokens=recovery.restored_tokens, forced_tokens=recovery.forced_tokens,
        )  # fmt: skip
        return recovery

    # ------------------------------------------------------------ ends

    def _finish(self, stream: Stream) -> None:
        """An answer is complete: end it, once it is as durable as is asked for."""
        if self.before_end is None:
            self._end(stream, stream.finish, _cause(stream))
        else:
            self._spawn(self._end_after(self.before_end(stream), stream))

    async def _end_after(self, durable: Coroutine[Any, Any, None], stream: Stream) -> None:
        await durable
        self._end(stream, stream.finish, _cause(stream))

    def _resubmit(self, engine: Engine, stream: Stream) -> None:
        """The engine lost the thread of this stream: the same again under a new epoch."""
        self._cancel_at_engine(stream, -1)
        engine.streams.pop(stream.id, None)
        self.submit(stream)

    def _cancel_at_engine(self, stream: Stream, keep_position: int) -> None:
        engine = self.engines.get(stream.engine)
        if engine is not None and engine.streams.get(stream.id) is stream:
            self._cancel_epoch(engine, stream.id, stream.epoch, keep_position)

    def _cancel_epoch(self, engine: Engine, stream_id: str, epoch: int, keep_position: int = -1) -> None:
        if engine.link is not None:
            engine.link.send(m.Cancel(stream_id, epoch, keep_position))

    def _end(self, stream: Stream, finish_reason: str, cause: str, refused: m.Refused | None = None) -> None:
        """Last record, last events."""
        if stream.end is not None:
            return
        end = j.End(finish_reason, cause, time.time())
        if refused is not None:
            status = STATUS_OF_CODE.get(refused.code, 500)
            end = j.End(finish_reason, cause, time.time(), status, refused.code, refused.message)
        self._stop_waiting(stream)
        engine = self.engines.get(stream.engine)
        if engine is not None and engine.streams.pop(stream.id, None) is not None:
            engine.remember(stream, m.pack_tokens(stream.tokens))
            if not stream.finish:
                engine.cancel(stream, self.now())
        stream.record(end)
        self._table.retire(stream)
        metrics.streams_ended.labels(cause).inc()
        self._log_end(stream, cause)
        stream.advance_readers()
        stream.ended.set()
        for watcher in self._watchers:
            watcher.ended(stream)
        self.on_end(stream)
        self._place_pending()

    def _log_end(self, stream: Stream, cause: str) -> None:
        now = time.monotonic()
        log.info(
            "deliver.ended", stream=stream.id, session=stream.spec.session or None, engine=stream.engine, cause=cause,
            prompt_tokens=stream.prompt_count, completion_tokens=stream.token_count,
            cached_tokens=stream.usage()["prompt_tokens_details"]["cached_tokens"],
            verdict=stream.started.verdict if stream.started else None, recoveries=len(stream.recoveries),
            first_token_ms=round((stream.first_token_at - stream.opened_at) * 1000) if stream.first_token_at else None,
            ms=round((now - stream.opened_at) * 1000),
        )  # fmt: skip


def _cause(stream: Stream) -> str:
    """Of the end of an answer that is complete."""
    return "stop_string" if stream.stopped_by_text else stream.finish
