"""How fast does a record get into the lane, against one copy of the same bytes?

Question  Bandwidth of `LaneWriter.append_rows` (room, rows, both checksums, commit word), from 23 KB to 4 MB.
Regime    One writer in this process, no keeper beside it; the ring is warm, in shared memory, and is freed before it is
          full. It lies in pages of 2 MB where the kernel has them (`tiers.huge_pages`; `lane_huge_bytes` of the saved result).
          Eight records in a row, as when an engine catches up. A frame is one piece of ordinary memory, as a capture of
          contiguous rows would be. Both sides alternate; they go round regions of the same size, so that neither finds its
          target in the processor's cache.
Baseline  as many memcpys of the frame into warm shared memory as any program maps it (pages of 4 KB), one thread.
Unit      GB/s, of medians; ratio is append / memcpy (wanted at 1 MB: at least 0.8)
Seed      of the frames' bytes
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np

from bench import report, scratch
from tiers.copy_sum import Memory
from tiers.huge_pages import huge_bytes
from tiers.lane import LaneWriter
from tiers.lane_reader import LaneReader
from tiers.layout import Layout, RootId, SequenceId
from tiers.paths import SHARED_MEMORY

SIZES = {"23 KB": 23 << 10, "64 KB": 64 << 10, "256 KB": 256 << 10, "1 MB": 1 << 20, "4 MB": 4 << 20}
RING_BYTES = 256 << 20
BURST = 8
WARM_UP = 10
SEQUENCE = SequenceId(bytes(16))


def main() -> None:
    options = report.arguments(__doc__)
    repeats = 40 if options.quick else 200
    rows = report.Report("append", options)
    with scratch.directory("append", SHARED_MEMORY) as directory:
        path = directory / "e0.lane"
        lane = LaneWriter.open(path, lane_bytes=RING_BYTES, record_count=1 << 16, incarnation=1)
        keeper = LaneReader.open(path, writable_tail=True)
        warm = shared(directory / "warm", RING_BYTES)
        rows.details["lane_huge_bytes"] = huge_bytes(path)
        for case, size in SIZES.items():
            appended, copied = measure(lane, keeper, warm, size, repeats, options.seed)
            want = ">= 0.8" if case == "1 MB" else ""
            rows.add(report.Row(case, size / appended, "GB/s", size / copied, copied / appended, want))
            rows.details[case] = {"append_ns": appended, "memcpy_ns": copied}
        del warm
        keeper.close()
        lane.close()
    rows.finish()


def measure(
    lane: LaneWriter, keeper: LaneReader, warm: np.ndarray, size: int, repeats: int, seed: int
) -> tuple[float, float]:
    """Median nanoseconds of an append and of a memcpy of `size` bytes."""
    layout = Layout(((1, size),))
    frame = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    tokens, pieces = np.zeros(1, np.int32), [Memory.of(frame)]
    lane.append_open(SEQUENCE, 1, RootId(bytes(16)), layout, 32, "bench", "", "bench", tokens[:0])
    appended, copied, place, position = [], [], 0, 0
    for index in range(repeats + WARM_UP):
        if lane.free_bytes < 4 * BURST * size or index % 100 == 99:
            keeper.advance_tail(lane.head)
        began = time.perf_counter_ns()
        for _ in range(BURST):
            lane.append_rows(layout, SEQUENCE, 1, position, tokens, pieces)
            position += 1
        appended.append((time.perf_counter_ns() - began) / BURST)
        began = time.perf_counter_ns()
        for _ in range(BURST):
            place = place + size if place + 2 * size <= warm.size else 0
            np.copyto(warm[place : place + size], frame)
        copied.append((time.perf_counter_ns() - began) / BURST)
    keeper.advance_tail(lane.head)
    return report.median(appended[WARM_UP:]), report.median(copied[WARM_UP:])


def shared(path: Path, size: int) -> np.ndarray:
    """`size` bytes of shared memory, every page touched."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(file, 0, size)
    memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
    os.close(file)
    memory[:] = 1
    return memory


if __name__ == "__main__":
    main()
