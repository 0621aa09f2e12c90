"""The timeline of a recovery, from the last sign of life of the lost engine to the next delivered token. Pure arithmetic on clocks.

    last heard ── detect ── noticed ── fence ── certain ── wait ── submitted ── restore ── started ── force ── fed ── next token

An engine that was lost together with its gateway was last heard when that one last wrote of the stream. The next gateway notices
as it reads the journal, and is certain once the engines that run have said what they work on.

The parts add up to the gap. Times are seconds of CLOCK_MONOTONIC. What carries a recovery out is `dispatch.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from gateway.journal import Lost, Recovery
from gateway.streams import Stream

WITH_GATEWAY = "lost with its gateway"  # the reason, where nobody was there to see how


@dataclass(frozen=True, slots=True)
class Loss:
    """The death of one engine, known for certain.

    last_heard  last message from it, or its last heartbeat if that was later
    noticed     first sign of the death that reached us or the host agent
    certain     it is fenced: its streams may go on elsewhere
    """

    engine: str
    reason: str
    last_heard: float
    noticed: float
    certain: float


def loss_of(
    engine: str, reason: str, *, heard: float, link_lost: float, told: float, detect_ms: float, fence_ms: float
) -> Loss:
    """Put together what the host agent said (detect_ms 0: it can't know) and what the link showed (link_lost 0: still open)."""
    noticed = told - fence_ms / 1000
    if link_lost:
        noticed = min(noticed, link_lost)
    alive = max(heard, noticed - detect_ms / 1000) if detect_ms else heard
    return Loss(engine, reason, min(alive, noticed), noticed, told)


@dataclass(frozen=True, slots=True)
class Recovering:
    """A stream between losing its engine and its next token."""

    loss: Loss
    position: int
    to_engine: str = ""
    submitted: float = 0.0
    started: float = 0.0
    force_ms: float = 0.0
    restored_tokens: int = 0
    forced_tokens: int = 0

    def submit(self, engine: str, now: float) -> Recovering:
        return replace(self, to_engine=engine, submitted=now)

    def start(self, restored_tokens: int, now: float) -> Recovering:
        return replace(self, restored_tokens=restored_tokens, started=now)

    def force(self, token_count: int, ms: float) -> Recovering:
        return replace(self, forced_tokens=token_count, force_ms=ms)

    def cut_short(self, noticed: float) -> Recovery:
        """The record where the next loss comes before a token, with the parts that came to pass.

        That loss may have been noticed before we knew, and placed the stream there: no part is negative.
        """
        now = max(noticed, self.loss.certain, self.submitted, self.started)
        return msgspec.structs.replace(self.finish(now), cut_short=True)

    def finish(self, now: float) -> Recovery:
        """The record, once the next token is there."""
        loss = self.loss
        submitted = self.submitted or now
        started = self.started or now
        force = min(self.force_ms, (now - started) * 1000)
        return Recovery(
            engine=loss.engine,
            reason=loss.reason,
            position=self.position,
            to_engine=self.to_engine,
            gap_ms=(now - loss.last_heard) * 1000,
            detect_ms=(loss.noticed - loss.last_heard) * 1000,
            fence_ms=(loss.certain - loss.noticed) * 1000,
            wait_ms=(submitted - loss.certain) * 1000,
            restore_ms=(started - submitted) * 1000,
            force_ms=force,
            next_token_ms=(now - started) * 1000 - force,
            restored_tokens=self.restored_tokens,
            forced_tokens=self.forced_tokens,
        )


def as_written(loss: Loss, epoch_s: float) -> Lost:
    """For the journal. epoch_s: Unix time at zero of the clock."""
    return Lost(loss.engine, loss.reason, loss.last_heard + epoch_s)


def begun_before(stream: Stream, zero_s: float) -> Recovering | None:
    """The recovery that an earlier gateway had begun when it last wrote of a stream, if any. zero_s: the clock at Unix time 0."""
    if stream.lost is None:
        return None
    heard = stream.lost.at + zero_s
    placed = max(heard, stream.last_written + zero_s)
    loss = Loss(stream.lost.engine, stream.lost.reason, heard, placed, placed)
    return Recovering(loss, len(stream.tokens)).submit(stream.engine, placed)


def lost_comment(loss: Loss, position: int) -> str:
    """SSE comment at the moment of the loss."""
    return f"concordia recovery engine={loss.engine} reason={loss.reason.replace(' ', '-')} position={position}"


def recovered_comment(recovery: Recovery) -> str:
    """SSE comment when the next token is there."""
    parts = ("gap_ms", "detect_ms", "fence_ms", "wait_ms", "restore_ms", "force_ms", "next_token_ms")
    figures = " ".join(f"{name}={getattr(recovery, name):.1f}" for name in parts)
    return f"concordia recovered engine={recovery.to_engine} position={recovery.position} {figures}"
