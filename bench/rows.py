"""Random rows of the demo model's shape, in lanes and stores of a benched installation: what the benches of the tiers share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from bench import scratch
from tiers.drain import Drain
from tiers.errors import LaneFull
from tiers.lane import LaneWriter
from tiers.layout import Layout, RootId, SequenceId
from tiers.paths import SHARED_MEMORY, Paths
from tiers.settings import TierSettings

LAYOUT = Layout(((180, 256),))  # 30 layers, 3 heads, K and V, 64 float32: 46,080 bytes a token
STATE = RootId(b"root-of-a-bench!")
BLOCK = 32


@contextmanager
def installation() -> Iterator[Paths]:
    """A data directory on the disk that holds this checkout, lanes in shared memory; both go afterwards."""
    with scratch.directory("rows", scratch.CHECKOUT) as data, scratch.directory("rows", SHARED_MEMORY) as lanes:
        yield Paths.at(data, lanes).make()


def sequence(name: str) -> SequenceId:
    return SequenceId(hashlib.blake2b(name.encode(), digest_size=16).digest())


def tokens_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


class Source:
    """Sequences of random tokens whose rows are random bytes, appended to a lane in records of `record_tokens`."""

    def __init__(self, lane: LaneWriter, seed: int, record_tokens: int = 64) -> None:
        self._lane = lane
        self._record_tokens = record_tokens
        self._rows = np.random.default_rng(seed).integers(0, 256, LAYOUT.frame_bytes(record_tokens), dtype=np.uint8)
        self.captured_bytes = 0

    def open(self, name: str, prefix: np.ndarray | None = None, session: str = "", epoch: int = 1) -> None:
        """Begin a sequence after `prefix`, whole blocks of it."""
        before = np.zeros(0, np.int32) if prefix is None else prefix
        self._lane.append_open(sequence(name), epoch, STATE, LAYOUT, BLOCK, "bench", session, name, before)

    def append(self, name: str, tokens: np.ndarray, start: int = 0, drain: Drain | None = None, epoch: int = 1) -> None:
        """Rows of tokens[start:]. A full lane is drained, if there is a drain to do it."""
        while start < len(tokens):
            end = min(len(tokens), start + self._record_tokens)
            try:
                reservation = self._lane.reserve_rows(LAYOUT, end - start)
            except LaneFull:
                if drain is None:
                    raise
                drain.flush(sync=True)
                continue
            np.copyto(reservation.frame, self._rows[: reservation.frame.size])
            reservation.frame[:8] = np.frombuffer(np.int64(start).tobytes(), np.uint8)
            reservation.commit(sequence(name), epoch, start, tokens[start:end])
            self.captured_bytes += reservation.frame.size
            start = end

    def close(self, name: str, position: int, epoch: int = 1) -> None:
        """End a sequence."""
        self._lane.append_close(sequence(name), epoch, position)


def settings(lane_bytes: int, **more: object) -> TierSettings:
    return TierSettings(lane_bytes=lane_bytes, block_tokens=BLOCK, **more)  # type: ignore[arg-type]


def writer(paths: Paths, options: TierSettings, name: str = "e0") -> LaneWriter:
    """The lane of an engine."""
    return LaneWriter.open(
        paths.lane(name), lane_bytes=options.lane_bytes, record_count=options.lane_record_count, incarnation=1
    )
