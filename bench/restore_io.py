"""How fast is state read back from the store: hot against memory, cold against the disk?

Question  Bytes per second of a restore's reading side: found, verified (checksums), and copied to where the arena is.
Regime    1 GB of blocks of the demo model's shape in one store, committed by the keeper's code and synced; read through
          PrefixFinder in slices of 64 MB as an engine does, into memory that was touched before. Hot: all pages in the
          page cache. Cold: the file's pages dropped before each run (fdatasync, POSIX_FADV_DONTNEED) and the store opened
          anew. Sides alternate. One thread.
Baseline  hot: one memcpy of as many bytes, memory to memory. cold: preadv of a flat file of as many bytes, dropped in the same way.
Unit      GB/s; ratio is restore / baseline (wanted: hot at least 0.5, cold at least 0.8)
Seed      of tokens and rows
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from bench import report, rows
from tiers.drain import Drain
from tiers.keeper import _keep_large_buffers
from tiers.paths import Paths
from tiers.prefix import PrefixFinder
from tiers.view import StoreReader

SLICE_TOKENS = (64 << 20) // rows.LAYOUT.token_bytes // rows.BLOCK * rows.BLOCK


def main() -> None:
    options = report.arguments(__doc__)
    _keep_large_buffers()
    megabytes, repeats = (256, 3) if options.quick else (1024, 7)
    count = (megabytes << 20) // rows.LAYOUT.token_bytes // rows.BLOCK * rows.BLOCK
    result = report.Report("restore_io", options)
    tokens = rows.tokens_of(options.seed, count)
    with rows.installation() as paths:
        fill(paths, tokens, options.seed)
        flat = paths.data_dir / "flat"
        size = write_flat(flat, rows.LAYOUT.frame_bytes(count), options.seed)
        arena = np.empty(rows.LAYOUT.frame_bytes(SLICE_TOKENS), np.uint8)
        arena[:] = 1
        source = np.ones_like(arena)
        samples: dict[str, list[float]] = {"hot": [], "memcpy": [], "cold": [], "preadv": []}
        restore(paths, tokens, arena)  # everything is in the page cache after it
        for _ in range(repeats):
            samples["hot"].append(size / restore(paths, tokens, arena) / 1e9)
            samples["memcpy"].append(size / copy(source, arena, size) / 1e9)
        for _ in range(repeats):
            drop(paths.store / "data.mdb")
            samples["cold"].append(size / restore(paths, tokens, arena) / 1e9)
            drop(flat)
            samples["preadv"].append(size / read_flat(flat, arena) / 1e9)
    for case, baseline, want in (("hot", "memcpy", ">= 0.5"), ("cold", "preadv", ">= 0.8")):
        ours, theirs = report.median(samples[case]), report.median(samples[baseline])
        ratio = report.median([a / b for a, b in zip(samples[case], samples[baseline], strict=True)])
        result.add(report.Row(case, ours, "GB/s", theirs, ratio, want))
    result.details = samples
    result.finish()


def fill(paths: Paths, tokens: np.ndarray, seed: int) -> None:
    """One sequence of `tokens` in the store, on the disk."""
    settings = rows.settings(256 << 20)
    lane = rows.writer(paths, settings)
    source = rows.Source(lane, seed)
    drain = Drain(paths, settings)
    source.open("s")
    source.append("s", tokens, drain=drain)
    drain.flush(sync=True)
    drain.close()
    lane.close()
    paths.lane("e0").unlink()


def restore(paths: Paths, tokens: np.ndarray, arena: np.ndarray) -> float:
    """Seconds for reading all rows of `tokens`, slice by slice into the same memory."""
    began = time.perf_counter()
    finder = PrefixFinder(StoreReader(paths.store), paths.lane_dir)
    at = 0
    while at < len(tokens):
        with finder.reading() as read:
            goal = min(len(tokens), at + SLICE_TOKENS)
            place = 0
            for extent in read.find(rows.STATE, "bench", tokens, limit=goal, start=at, block_tokens=rows.BLOCK):
                frame = read(extent).frame
                np.copyto(arena[place : place + frame.size], frame)
                place += frame.size
        assert place == rows.LAYOUT.frame_bytes(goal - at), "the store must hold all of it"
        at = goal
    seconds = time.perf_counter() - began
    finder.close()
    finder._store.close()  # type: ignore[attr-defined]
    return seconds


def copy(source: np.ndarray, target: np.ndarray, size: int) -> float:
    """Seconds for copying `size` bytes, a slice at a time."""
    began = time.perf_counter()
    for at in range(0, size, source.size):
        part = min(source.size, size - at)
        np.copyto(target[:part], source[:part])
    return time.perf_counter() - began


def write_flat(path: Path, size: int, seed: int) -> int:
    piece = np.random.default_rng(seed).integers(0, 256, 16 << 20, dtype=np.uint8).tobytes()
    with open(path, "wb") as file:
        for at in range(0, size, len(piece)):
            file.write(piece[: size - at])
        file.flush()
        os.fdatasync(file.fileno())
    return size


def read_flat(path: Path, target: np.ndarray) -> float:
    """Seconds for reading a file with preadv, 1 MB a call."""
    file = os.open(path, os.O_RDONLY)
    began = time.perf_counter()
    at, place = 0, 0
    while (count := os.preadv(file, [target[place : place + (1 << 20)].data], at)) > 0:
        at += count
        place = (place + (1 << 20)) % (target.size - (1 << 20))
    seconds = time.perf_counter() - began
    os.close(file)
    return seconds


def drop(path: Path) -> None:
    """Have none of a file's pages in the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fdatasync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


if __name__ == "__main__":
    main()
