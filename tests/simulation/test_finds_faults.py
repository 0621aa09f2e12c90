"""The simulation would notice: gateways that are broken on purpose fail within some tens of seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway import following, migration, poison
from gateway import journal as j
from gateway.dispatch import Dispatcher
from gateway.migration import Moves
from gateway.streams import Stream
from gateway.tokenizer import TextCodec
from tests.simulation.schedules import run_schedule
from tests.simulation.virtual_time import run

SEEDS = 150


def forgets_to_journal(patch: pytest.MonkeyPatch) -> None:
    """Sends tokens that it did not write down."""
    real = Stream.record
    patch.setattr(Stream, "record", lambda s, r: s.apply(r) if isinstance(r, j.Tokens) and not r.finish else real(s, r))


def moves_before_it_is_certain(patch: pytest.MonkeyPatch) -> None:
    """Gives the streams of an engine away when the link is lost, and again when it is dead; epochs go back."""
    real = Dispatcher._send

    def send(self: Dispatcher, stream: Stream, engine: Any, tokens: bytes) -> None:
        if stream.epoch > 1:
            stream.epoch -= 1
        real(self, stream, engine, tokens)

    patch.setattr(Dispatcher, "_send", send)


def loses_streams_of_a_dead_engine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dispatcher, "_place_pending", lambda self: None)


def never_lets_go_of_what_it_had_followed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(following, "drop", lambda engine, stream_id, user: None)


def forgets_released_streams(patch: pytest.MonkeyPatch) -> None:
    """The target is never given what the source let go of."""
    patch.setattr(Moves, "_on_released", lambda self, engine, message, move: engine.streams.pop(message.stream, None))


def gives_away_what_is_complete(patch: pytest.MonkeyPatch) -> None:
    """Moves answers that only wait until they are durable."""
    patch.setattr(migration, "_is_over", lambda stream: stream.end is not None)


def takes_every_death_for_an_engines_own(patch: pytest.MonkeyPatch) -> None:
    """Ends a request before it is known how its engines died."""
    patch.setattr(poison, "REPORT_WAIT_S", 0.0)


@pytest.mark.parametrize(
    "mutate",
    [
        forgets_to_journal,
        moves_before_it_is_certain,
        loses_streams_of_a_dead_engine,
        never_lets_go_of_what_it_had_followed,
        forgets_released_streams,
        gives_away_what_is_complete,
        takes_every_death_for_an_engines_own,
    ],
)
def test_broken_gateway_is_found(
    mutate: Callable[[pytest.MonkeyPatch], None], journals: Path, codec: TextCodec, quiet: None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        for seed in range(SEEDS):
            try:
                run(run_schedule(seed, journals, codec, poison=mutate is takes_every_death_for_an_engines_own))
            except Exception as error:
                print(f"found by seed {seed}: {type(error).__name__}: {error}"[:300])
                return
    pytest.fail(f"{SEEDS} seeds did not notice: {mutate.__doc__ or mutate.__name__}")
