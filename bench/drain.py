"""How fast do lanes become blocks on the disk, against plain writes of the same bytes?

Question  Bytes per second of a drain: records read from the lane, checked, joined into blocks, committed and synced.
Regime    The keeper's own code in this process; the lane is filled before the clock runs, 64 tokens of the demo model's
          rows a record, and all of it is drained in group commits, durability `interval`, with a sync at the end. Drain
          and baseline alternate, each into a new file.
Baseline  sequential write of as many bytes to one file of the same disk in pieces of the size of a group commit, with an
          fdatasync after each, as a flat log with the same durability would do.
Unit      MB/s; ratio is drain / write (wanted: at least 0.8)
Seed      of tokens and rows
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from bench import report, rows
from tiers.drain import GROUP_BYTES, Drain
from tiers.keeper import _keep_large_buffers
from tiers.paths import Paths


def main() -> None:
    options = report.arguments(__doc__)
    _keep_large_buffers()
    megabytes, repeats = (128, 5) if options.quick else (448, 7)
    result = report.Report("drain", options)
    drained, written = [], []
    for index in range(repeats):
        with rows.installation() as paths:
            size, seconds = measure_drain(paths, megabytes << 20, options.seed + index)
            drained.append(size / seconds / 1e6)
            written.append(size / measure_write(paths.data_dir / "flat", size) / 1e6)
            report.say(f"  drain {drained[-1]:.0f} MB/s, write {written[-1]:.0f} MB/s")
    value, baseline = report.median(drained), report.median(written)
    ratio = report.median([ours / theirs for ours, theirs in zip(drained, written, strict=True)])
    result.add(report.Row("drain", value, "MB/s", baseline, ratio, ">= 0.8"))
    result.details = {"drain": drained, "write": written}
    result.finish()


def measure_drain(paths: Paths, size: int, seed: int) -> tuple[int, float]:
    """(bytes of frames, seconds) of draining a lane that holds about `size` bytes."""
    settings = rows.settings(size + (32 << 20))
    lane = rows.writer(paths, settings)
    source = rows.Source(lane, seed)
    count = size // rows.LAYOUT.token_bytes // 4 // rows.BLOCK * rows.BLOCK
    for index in range(4):
        source.open(f"s{index}")
        source.append(f"s{index}", rows.tokens_of(seed + index, count))
    drain = Drain(paths, settings)
    drain.open()
    began = time.perf_counter()
    drain.flush(sync=True)
    seconds = time.perf_counter() - began
    assert lane.tail == lane.head and drain.counts["blocks_put"] == 4 * count // rows.BLOCK
    drain.close()
    lane.close()
    return source.captured_bytes, seconds


def measure_write(path: Path, size: int) -> float:
    """Seconds for writing `size` bytes in pieces of a group commit, each synced."""
    piece = np.random.default_rng(1).integers(0, 256, GROUP_BYTES, dtype=np.uint8).tobytes()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    began = time.perf_counter()
    for at in range(0, size, GROUP_BYTES):
        os.write(file, piece[: size - at])
        os.fdatasync(file)
    seconds = time.perf_counter() - began
    os.close(file)
    return seconds


if __name__ == "__main__":
    main()
