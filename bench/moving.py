"""What the benches of failover and migration share: times between tokens as the client saw them, and acting in mid-answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from bench import report
from bench.driver import System
from bench.sse import Answer, StreamError, Watcher
from gateway.following import STANDBY_TOKENS


def gaps_ms(answer: Answer) -> list[float]:
    """Between each token and the one before, on the client's clock; the first token has none."""
    times = [event.at for event in answer.tokens]
    return [1000 * (after - before) for before, after in zip(times, times[1:], strict=False)]


def gap_before_ms(answer: Answer, position: int) -> float:
    """How long the client waited for the token at this position of the answer."""
    return gaps_ms(answer)[position - 1]


def token_ms(answer: Answer) -> float:
    """An ordinary wait for a token."""
    return report.median(gaps_ms(answer))


def once_when(ready: Callable[[Answer], bool], act: Callable[[Answer], Any]) -> Watcher:
    """A watcher that acts once, at the first token at which `ready` holds."""
    done: list[bool] = []

    def watch(answer: Answer) -> None:
        if not done and answer.tokens and ready(answer):
            done.append(True)
            act(answer)

    return watch


def kill_after(running: System, ready: Callable[[Answer], bool]) -> Watcher:
    """A watcher that kills the serving engine once, right at the token after the first at which `ready` holds.

    Who that is has been asked by then, so that the gap has no question of ours in it.
    """
    victims: list[int] = []
    done: list[bool] = []

    def watch(answer: Answer) -> None:
        if victims and not done:
            done.append(True)
            os.kill(victims[0], signal.SIGKILL)
        elif not victims and answer.tokens and ready(answer):
            victims.append(running.serving_engine(answer.stream_id).pid)

    return watch


def kill_serving(running: System, answer: Answer) -> None:
    os.kill(running.serving_engine(answer.stream_id).pid, signal.SIGKILL)


def followed(running: System, answer: Answer, lag_tokens: int = STANDBY_TOKENS + 1) -> bool:
    """Whether a standby has the stream's state on its device, but for as many tokens as it is handed at once."""
    rows = [row for engine in running.engines() for row in engine.row.get("following") or []]
    wanted = answer.stream_id.rpartition("-")[2]
    streams = [s for engine in running.engines() for s in engine.streams if s["stream"] == wanted]
    delivered = max((s["delivered"] for s in streams), default=1 << 30)
    return any(row["stream"] == wanted and row["position"] >= delivered - lag_tokens for row in rows)


def only(answer: Answer, kind: str) -> dict[str, Any]:
    """The one entry of `recoveries` or `migrations`. Raises StreamError."""
    entries = answer.concordia.get(kind) or []
    if not answer.done or len(entries) != 1:
        raise StreamError(f"one of {kind} was expected: {entries} {answer.describe()}")
    return dict(entries[0])
