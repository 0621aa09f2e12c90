"""Small lanes, stores and sequences. A row's bytes follow from (position, token), so that what was restored can be checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiers.drain import Drain
from tiers.lane import LaneWriter
from tiers.layout import Layout, RootId, SequenceId
from tiers.paths import Paths
from tiers.prefix import PrefixFinder
from tiers.settings import TierSettings
from tiers.view import StoreReader

LAYOUT = Layout(((3, 16), (1, 8)))
ROOT = RootId(b"root-of-the-test")
BLOCK = 8
SETTINGS = TierSettings(
    lane_bytes=1 << 16, lane_record_count=64, block_tokens=BLOCK, store_map_bytes=64 << 20, tail_interval_ms=0
)


def sequence(name: str) -> SequenceId:
    return SequenceId(hashlib.blake2b(name.encode(), digest_size=16).digest())


def some_tokens(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


def rows(start: int, tokens: Iterable[int]) -> np.ndarray:
    """A frame of LAYOUT: the bytes of each row are a function of plane, position and token."""
    ids = np.asarray(list(tokens), np.int64)
    seeds = (np.arange(start, start + len(ids)) * 7919 + ids) & 0xFFFF
    groups = []
    for index, (planes, row) in enumerate(LAYOUT.groups):
        plane = np.arange(planes)[:, None, None] * 31 + index * 101
        groups.append(
            ((seeds[None, :, None] + plane + np.arange(row)[None, None, :] * 3) & 0xFF).astype(np.uint8).ravel()
        )
    return np.concatenate(groups)


def append_rows(
    lane: LaneWriter, name: str, start: int, tokens: np.ndarray, *, epoch: int = 1, namespace: str = ""
) -> int:
    reservation = lane.reserve_rows(LAYOUT, len(tokens), namespace)
    np.copyto(reservation.frame, rows(start, tokens))
    return reservation.commit(sequence(name), epoch, start, tokens)


def state(position: int, size: int) -> np.ndarray:
    """The bytes of a rollback point: a function of its position."""
    return ((np.arange(size) * 7 + position * 13) & 0xFF).astype(np.uint8)


def append_point(
    lane: LaneWriter, name: str, position: int, kind: int, size: int, *, epoch: int = 1, namespace: str = ""
) -> int:
    reservation = lane.reserve_point(size, namespace)
    np.copyto(reservation.frame, state(position, size))
    return reservation.commit(sequence(name), epoch, position, kind)


@dataclass
class World:
    """One installation in a temporary directory, its keeper's drain run by hand in this process."""

    paths: Paths
    settings: TierSettings = SETTINGS

    def lane(self, engine: str = "e0") -> LaneWriter:
        return LaneWriter.open(
            self.paths.lane(engine),
            lane_bytes=self.settings.lane_bytes,
            record_count=self.settings.lane_record_count,
            incarnation=1,
            busy_s=0.2,
            encryption=self.settings.lane_encryption,
        )

    def capture(
        self, lane: LaneWriter, name: str, tokens: np.ndarray, cuts: Iterable[int], *, start: int = 0, epoch: int = 1,
        stream: str | None = None, session: str = "chat", namespace: str = "default",
    ) -> None:  # fmt: skip
        """Open a sequence at `start` and append rows of `tokens` cut at `cuts`."""
        lane.append_open(sequence(name), epoch, ROOT, LAYOUT, BLOCK, namespace, session, stream or name, tokens[:start])
        for end in cuts:
            append_rows(lane, name, start, tokens[start:end], epoch=epoch, namespace=namespace)
            start = end

    def drained(self) -> Drain:
        """Drain everything, and hand over the drain with its store still open."""
        drain = Drain(self.paths, self.settings)
        drain.flush(sync=True)
        return drain

    def drain(self) -> dict[str, int]:
        """Drain everything with a keeper of its own; returns its counters."""
        drain = self.drained()
        drain.close()
        return dict(drain.counts)

    def finder(self) -> PrefixFinder:
        return PrefixFinder(StoreReader(self.paths.store, map_bytes=self.settings.store_map_bytes), self.paths.lane_dir)

    def restorable(
        self, tokens: np.ndarray, *, namespace: str = "default", limit: int | None = None, start: int = 0
    ) -> int:
        """Longest restorable position, after reading every row of it and comparing its bytes."""
        return read_all(self.finder(), tokens, namespace=namespace, limit=limit, start=start)[0]


def read_all(
    finder: PrefixFinder, tokens: np.ndarray, *, namespace: str = "default", limit: int | None = None, start: int = 0
) -> tuple[int, list[str]]:
    """(longest restorable position, tiers of its extents); every row is read and compared."""
    position, tiers = start, []
    with finder.reading() as read:
        found = read.find(
            ROOT, namespace, tokens, limit=len(tokens) if limit is None else limit, block_tokens=BLOCK, start=start
        )
        for extent in found:
            assert extent.token_start == position
            frame, count, take_start, take_end, _ = read(extent)
            assert take_end - take_start == extent.token_end - extent.token_start
            out = np.empty(LAYOUT.frame_bytes(take_end - take_start), np.uint8)
            LAYOUT.join([(frame, count, take_start, take_end)], out)
            assert np.array_equal(out, rows(extent.token_start, tokens[extent.token_start : extent.token_end]))
            position = extent.token_end
            tiers.append(extent.tier)
    return position, tiers


def flip(path: Path, offset: int, bit: int = 1) -> None:
    """Flip one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bit]))
