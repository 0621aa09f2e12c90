"""Live migration: a stream moves to another engine while it goes on. Stage: migrate; on the event loop.

    precopy ── the target follows the source's state while the source decodes, until what is missing is small
    stopping ─ the source stops at a token boundary and captures all of it (`Release` -> `Released`)
    resuming ─ the epoch moves, the target is given the whole token list, and finds nearly all of it on its device
    over ───── its first token is there; or the move was given up, and the stream runs where it ran

`decide` is pure and knows no hosts, only what was heard of the target. A target that refuses or dies before the stop leaves the source
undisturbed; after it, the stream goes back. Where the two keep state in another form (dtype, layout, model) nothing is copied:
the token list alone moves, and the answer says so.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import structlog

from engine import messages as m
from gateway import following, metrics, placement
from gateway import journal as j
from gateway.errors import ApiError, conflict, not_found, quoted

if TYPE_CHECKING:
    from gateway.dispatch import Dispatcher
    from gateway.engines import Engine
    from gateway.streams import Stream

log = structlog.get_logger()

CLOSE_TOKENS = 8  # so many missing rows are restored within a step's time
PRECOPY_LIMIT_S = 20.0
LOOK_INTERVAL_S = 0.05
DRAIN_AT_ONCE = 4  # moves of a drain that run at the same time

Phase = Literal["precopy", "stopping", "resuming", "over"]
Act = Literal["wait", "stop", "abandon"]


@dataclass(frozen=True, slots=True)
class MoveView:
    """What a decision rests on."""

    tokens: int
    answered: bool  # some of the answer was delivered: it decodes
    followed: int
    caught_up: bool
    refused: str
    carries_state: bool
    source_up: bool
    target_up: bool
    ended: bool
    elapsed_s: float


def decide(view: MoveView) -> tuple[Act, str]:
    """What to do in the precopy, and why. Pure."""
    if view.ended:
        return "abandon", "ended"
    if not view.source_up:
        return "abandon", "source lost"
    if not view.target_up:
        return "abandon", "target lost"
    if not view.carries_state:
        return "stop", ""
    if view.refused:
        return "abandon", f"target refused: {view.refused}"
    missing = view.tokens - view.followed
    if view.caught_up and (missing <= CLOSE_TOKENS or not view.answered):
        return "stop", ""
    if view.elapsed_s > PRECOPY_LIMIT_S:
        return "stop", "the copy did not catch up; the rest is restored after the stop"
    return "wait", ""


@dataclass(slots=True)
class Move:
    """One stream on its way. `outcome` is "moved" or why it was not."""

    stream: Stream
    source: str
    target: str
    why: str
    carries_state: bool
    began: float
    done: asyncio.Future[Move]
    phase: Phase = "precopy"
    reason: str = ""
    last_token: float = 0.0  # of the source; or when the move began
    copied_tokens: int = 0
    outcome: str = ""
    downtime_ms: float = 0.0

    def view(self) -> dict[str, Any]:
        return {
            "stream": self.stream.id,
            "session": self.stream.spec.session or None,
            "from_engine": self.source,
            "to_engine": self.target,
            "outcome": self.outcome,
            "carried": "state" if self.carries_state else "tokens",
            "reason": self.reason or None,
            "copied_tokens": self.copied_tokens,
            "downtime_ms": round(self.downtime_ms, 3),
        }


class Moves:
    """All migrations of this gateway."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.moves: dict[str, Move] = {}
        self._idle_moves: dict[str, str] = {}  # session -> target

    # ------------------------------------------------------------ what operators ask for

    def start(self, stream: Stream, target_name: str, why: str) -> Move:
        """Begin to move a live stream. Raises ApiError if it can't be begun."""
        source, target = self.check(stream, target_name)
        assert source.hello is not None and target.hello is not None, "ready engines have said hello"
        same = source.hello.root == target.hello.root and stream.spec.capture
        now = self._dispatcher.now()
        move = Move(stream, source.name, target.name, why, same, now, _future(), last_token=now)
        if not same:
            move.reason = (
                "its state is not captured" if not stream.spec.capture else "the engines keep state in another form"
            )
        self.moves[stream.id] = move
        log.info("migrate.begun", stream=stream.id, source=source.name, target=target.name, why=why, carries_state=same)
        if same:
            following.want(target, stream, following.MOVE)
        asyncio.get_running_loop().call_later(PRECOPY_LIMIT_S + LOOK_INTERVAL_S, self._time_is_up, move)
        self._look(move)
        return move

    def check(self, stream: Stream, target_name: str) -> tuple[Engine, Engine]:
        """(source, target) of a move that can be begun. Raises ApiError if it can't be."""
        source = self._dispatcher.engines.get(stream.engine)
        target = self._dispatcher.engines.get(target_name)
        if target is None:
            raise not_found(
                f"there is no engine {quoted(target_name)}; GET /admin/engines lists them", "engine_not_found"
            )
        if stream.id in self.moves:
            raise conflict(f"stream {stream.id} is being moved to {self.moves[stream.id].target} already")
        if _is_over(stream) or source is None or stream.id not in source.streams or not source.ready:
            raise conflict(f"stream {stream.id} is not running on an engine; there is nothing to move")
        if target is source:
            raise conflict(f"stream {stream.id} runs on {target_name} already")
        if not target.placeable:
            raise conflict(f"{target_name} takes no streams now (it is {target.shown_state}); choose another engine")
        return source, target

    async def move_idle(self, idle: following.IdleSession, target: Engine, timeout_s: float) -> str:
        """Put an idle session's state on the target's device and take it off all others. Returns the outcome, or raises ApiError."""
        session = idle.session
        if session in self._idle_moves:
            raise conflict(f"session {quoted(session)} is being moved to {self._idle_moves[session]} already")
        self._idle_moves[session] = target.name
        try:
            return await self._move_idle(idle, target, timeout_s)
        finally:
            del self._idle_moves[session]

    async def _move_idle(self, idle: following.IdleSession, target: Engine, timeout_s: float) -> str:
        assert target.link is not None and target.hello is not None
        session = idle.session
        holders = [e for e in self._dispatcher.engines.values() if e.ready and e is not target and e.holds(session)]
        if not holders or not idle.tokens:
            return "not resident: its next request can go to any engine"
        if all(e.hello is not None and e.hello.root != target.hello.root for e in holders):
            return "the engines keep state in another form; its next request computes it"
        state, why = following.want_idle(target, idle, following.MOVE, self._dispatcher.now()), "lost"
        try:
            async with asyncio.timeout(timeout_s):
                await state.over.wait()
        except TimeoutError:
            why = "timeout"
        following.drop(target, state.stream, following.MOVE)
        if state.refused or not state.caught_up:
            return f"target refused: {state.refused or why}"
        if self._dispatcher.is_answering(session):
            return "answering again: move it live"
        target.keep(state.stream, idle.namespace, session, idle.tokens)
        await self._dispatcher.park(session, timeout_s, but=target.name)
        return "moved"

    async def drain(self, engine: Engine, why: str, timeout_s: float) -> dict[str, Any]:
        """Take every stream of an engine elsewhere; nothing new is placed on it. What can't move stays there, and is told.

        It ends early when somebody lets the engine take streams again. `moved` and `left` together are the streams that were there,
        but for those that ended meanwhile or were recovered from a death.
        """
        self._dispatcher.set_draining(engine, True)
        deadline = self._dispatcher.now() + timeout_s
        last, tracked = "", dict[int, Move]()
        while self._dispatcher.now() < deadline:
            there = list(engine.streams.values()) if engine.ready and engine.draining else []
            leaving = self._leaving(engine)
            if not there and not leaving:
                break
            begun = [*leaving, *(move for stream in there if (move := self._drain_one(stream, why)))]
            tracked.update((id(move), move) for move in begun)
            if not begun:
                last = "no other engine has room"
                await asyncio.sleep(LOOK_INTERVAL_S)
                continue
            rest_s = deadline - self._dispatcher.now()
            if leaving:  # its target may compute for long; there may be room for others before
                rest_s = min(rest_s, LOOK_INTERVAL_S)
            await asyncio.wait([move.done for move in begun], timeout=rest_s, return_when=asyncio.FIRST_COMPLETED)
            finished = [move for move in begun if move.done.done()]
            last = next((move.outcome for move in finished if move.outcome != "moved"), last)
            if not any(move.outcome == "moved" for move in finished):
                await asyncio.sleep(LOOK_INTERVAL_S)
        moved = sum(move.outcome == "moved" or move.phase == "resuming" for move in tracked.values())
        left = len(engine.streams) if engine.ready else 0
        if left and not engine.draining:
            last = "it may take streams again"
        log.info("drain.over", engine=engine.name, why=why, moved=moved, left=left)
        return {"engine": engine.name, "moved": moved, "left": left, "reason": last if left else None}

    def _leaving(self, engine: Engine) -> list[Move]:
        """Moves whose stream the engine has let go and whose target has not answered yet: it may come back."""
        return [move for move in self.moves.values() if move.source == engine.name and move.phase == "resuming"]

    def _drain_one(self, stream: Stream, why: str) -> Move | None:
        running = self.moves.get(stream.id)
        if running is not None:
            return running
        if sum(move.phase != "over" for move in self.moves.values()) >= DRAIN_AT_ONCE:
            return None
        tokens = m.pack_tokens(stream.tokens)
        views = [engine.view(tokens, stream) for engine in self._dispatcher.placeable()]
        target = placement.choose(views, 0)
        if target is None:
            return None
        try:
            return self.start(stream, target, why)
        except ApiError as error:
            log.debug("drain.not_begun", stream=stream.id, error=error.message)
            return None

    # ------------------------------------------------------------ what happens meanwhile

    def placed(self, stream: Stream, engine: Engine) -> None:
        """The dispatcher gave it to an engine by itself: a recovery overtook the move."""
        move = self.moves.get(stream.id)
        if move is not None and move.phase != "resuming":
            self._give_up(move, "overtaken by a recovery")

    def delivered(self, stream: Stream, now: float) -> None:
        move = self.moves.get(stream.id)
        if move is None:
            return
        if move.phase == "resuming":
            self._finish(move, now)
            return
        move.last_token = now
        self._look(move)

    def ended(self, stream: Stream) -> None:
        move = self.moves.get(stream.id)
        if move is not None:
            self._give_up(move, "ended")

    def engine_changed(self, engine: Engine) -> None:
        for move in [move for move in self.moves.values() if engine.name in (move.source, move.target)]:
            if move.phase == "precopy":
                self._look(move)
            elif move.phase == "stopping" and engine.name == move.source and not engine.ready:
                self._give_up(move, "source lost; recovered")
            elif move.phase == "resuming" and engine.name == move.target and not engine.ready:
                self._give_up(move, "target lost; recovered")

    def said(self, engine: Engine, message: Any) -> None:
        move = self.moves.get(message.stream)
        if isinstance(message, m.Followed) and move is not None and engine.name == move.target:
            self._look(move)
        elif isinstance(message, m.Released):
            self._on_released(engine, message, move)

    def refused(self, stream: Stream, engine: Engine) -> bool:
        """A target that refuses the stream after the stop: it goes back. True if that was it."""
        move = self.moves.get(stream.id)
        if move is None or move.phase != "resuming" or engine.name != move.target:
            return False
        self._give_up(move, "target refused; the source goes on")
        engine.streams.pop(stream.id, None)
        source = self._dispatcher.engines.get(move.source)
        self._dispatcher.give(stream, source if source is not None and source.ready else None)
        return True

    def _look(self, move: Move) -> None:
        if move.phase != "precopy":
            return
        act, why = decide(self._view(move))
        if act == "abandon":
            self._give_up(move, why)
        elif act == "stop":
            self._stop(move, why)

    def _time_is_up(self, move: Move) -> None:
        """For the limit of time only; what is heard is looked at when it is heard."""
        self._look(move)

    def _view(self, move: Move) -> MoveView:
        stream, engines = move.stream, self._dispatcher.engines
        source, target = engines.get(move.source), engines.get(move.target)
        state = target.followed.get(stream.id) if target is not None else None
        return MoveView(
            tokens=len(stream.tokens),
            answered=stream.token_count > 0,
            followed=state.position if state else 0,
            caught_up=state.caught_up if state else False,
            refused=state.refused if state else "lost" if move.carries_state else "",
            carries_state=move.carries_state,
            source_up=source is not None and source.ready and stream.id in source.streams,
            target_up=target is not None and target.placeable,
            ended=_is_over(stream),
            elapsed_s=self._dispatcher.now() - move.began,
        )

    def _stop(self, move: Move, why: str) -> None:
        move.reason = move.reason or why
        move.phase = "stopping"
        target, source = self._dispatcher.engines[move.target], self._dispatcher.engines[move.source]
        state = target.followed.get(move.stream.id)
        move.copied_tokens = state.position if state else 0
        assert source.link is not None
        source.link.send(m.Release(move.stream.id, move.stream.epoch))

    def _on_released(self, engine: Engine, message: m.Released, move: Move | None) -> None:
        stream = engine.streams.get(message.stream)
        if stream is None or _is_over(stream) or stream.epoch != message.epoch:
            return
        engine.streams.pop(stream.id)
        engine.remember(stream, m.pack_tokens(stream.tokens))
        target = self._dispatcher.engines.get(move.target) if move is not None else None
        if move is None or target is None or not target.placeable:
            if move is not None:
                self._give_up(move, "target lost; the source goes on")
            self._dispatcher.give(stream, engine if engine.ready else None)
            return
        move.phase = "resuming"
        self._dispatcher.give(stream, target)

    # ------------------------------------------------------------ ends

    def _finish(self, move: Move, now: float) -> None:
        """The target's first token is about to be delivered."""
        move.downtime_ms = (now - move.last_token) * 1000
        move.outcome = "moved"
        move.stream.record(
            j.Migration(
                move.source,
                move.target,
                move.why,
                len(move.stream.tokens),
                "state" if move.carries_state else "tokens",
                move.reason,
                round(move.downtime_ms, 3),
                move.copied_tokens,
            )  # fmt: skip
        )
        metrics.migrations.labels("moved").inc()
        metrics.migration_downtime_s.observe(move.downtime_ms / 1000)
        log.info("migrate.done", **move.view())
        self._over(move)

    def _give_up(self, move: Move, why: str) -> None:
        move.outcome = why
        metrics.migrations.labels("ended" if why == "ended" else "given_up").inc()
        log.warning("migrate.given_up", **move.view())
        self._over(move)

    def _over(self, move: Move) -> None:
        move.phase = "over"
        self.moves.pop(move.stream.id, None)
        target = self._dispatcher.engines.get(move.target)
        if target is not None:
            following.drop(target, move.stream.id, following.MOVE)
        if not move.done.done():
            move.done.set_result(move)


def _is_over(stream: Stream) -> bool:
    """Nothing of it is left to be computed; its end may still wait until it is durable."""
    return stream.end is not None or bool(stream.finish)


def _future() -> asyncio.Future[Move]:
    return asyncio.get_running_loop().create_future()
