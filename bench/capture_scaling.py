"""Does the cost of capturing one step depend on how long the context is?

Question  Time of one step's capture (one new token of one sequence) at 256 and at 7k tokens of context.
Regime    The engine's own arena, capture and lane code in this process, with the layer shapes of the demo model in
          float32; no model runs. Between captures 32 MB of other memory are read, as a step of the model would, so that
          neither side finds its bytes in the processor's cache. The two lengths alternate, and the whole copies lie between
          equal shares of the steps. One thread.
Baseline  case `7k / 256`: the same at 256 tokens. case `whole state 7k`: copying all of the sequence's state at 7k tokens
          into shared memory that is warm, as a snapshot of the whole would.
Unit      us; ratio is 7k / 256 (wanted: at most 1.1) and whole copy / capture of a step (median over the copies, each against
          the steps right before it; wanted: at least 200).
Seed      none: contents don't matter
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import report, scratch
from engine.arena import Arena, LayerShape, Slot
from engine.capture import Capture, Cursor
from tiers.lane import LaneWriter
from tiers.lane_reader import LaneReader
from tiers.layout import RootId
from tiers.paths import SHARED_MEMORY

SHORT, LONG, ROOM = 256, 7168, 8192
LANE_BYTES = 512 << 20


def main() -> None:
    options = report.arguments(__doc__)
    torch.set_num_threads(options.threads)
    steps, copies = (120, 5) if options.quick else (200, 15)
    rows = report.Report("capture_scaling", options)
    with scratch.directory("capture", SHARED_MEMORY) as directory:
        arena = Arena.allocate(layer_shapes(options.model), 2, ROOM, torch.float32, torch.device("cpu"))
        arena.prefault(2 * ROOM)
        short, long, whole = measure(arena, directory, steps, copies)
    rows.details = {"short_us": quartiles(short), "long_us": quartiles(long), "whole_us": whole}
    at_short, at_long, all_of_it = report.median(short), report.median(long), report.median(whole)
    shares = [report.median(long[at : at + steps]) for at in range(0, len(long), steps)]
    ratio = report.median([copy / share for copy, share in zip(whole, shares, strict=True)])
    rows.add(report.Row("7k / 256", at_long, "us", at_short, at_long / at_short, "<= 1.1"))
    rows.add(report.Row("whole state 7k", at_long, "us", all_of_it, ratio, ">= 200"))
    rows.finish()


def layer_shapes(model: str) -> list[LayerShape]:
    """Shapes of the model's attention layers, from its configuration; no weights are loaded."""
    from transformers import AutoConfig

    from bench.model import model_directory

    config: Any = AutoConfig.from_pretrained(model_directory(model), local_files_only=True)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [LayerShape(config.num_key_value_heads, width, width)] * config.num_hidden_layers


def measure(arena: Arena, directory: Path, steps: int, copies: int) -> tuple[list[float], list[float], list[float]]:
    """Microseconds of one-token captures of a short and a long sequence, alternating, and of whole copies, one after so many steps each."""
    path, frame = directory / "e0.lane", warm_frame(directory / "whole", arena.layout.frame_bytes(LONG))
    lane = LaneWriter.open(path, lane_bytes=LANE_BYTES, record_count=1 << 16, incarnation=1)
    capture = Capture(lane=lane, arena=arena, root=RootId(bytes(16)), block_tokens=32)
    pairs = [ready(capture, arena.slots[0], SHORT), ready(capture, arena.slots[1], LONG)]
    elsewhere = np.ones(32 << 20, dtype=np.uint8).view(np.int64)
    times: tuple[list[float], list[float]] = ([], [])
    whole = []
    for step in range(steps * copies):
        for samples, (cursor, slot), length in zip(times, pairs, (SHORT, LONG), strict=True):
            if slot.length >= length + 256:  # stay near the length in question
                slot.length = cursor.position = length
            elsewhere.sum()
            slot.length += 1
            began = time.perf_counter_ns()
            complete = capture.advance(cursor, slot)
            samples.append((time.perf_counter_ns() - began) / 1000)
            assert complete, "the lane must have room"
            if lane.free_bytes < LANE_BYTES // 4:
                free(path)
        if step % steps == steps - 1:
            began = time.perf_counter_ns()
            arena.copy_out(arena.slots[1], 0, LONG, frame)
            whole.append((time.perf_counter_ns() - began) / 1000)
    lane.close()
    return *times, whole


def ready(capture: Capture, slot: Slot, length: int) -> tuple[Cursor, Slot]:
    """A sequence whose first `length` tokens are captured already."""
    slot.length, slot.namespace = length, "bench"
    cursor = capture.cursor(f"bench-{length}", 1, stored=length)
    assert capture.advance(cursor, slot)
    slot.length += 1  # the first one-token record opens nothing any more
    assert capture.advance(cursor, slot)
    return cursor, slot


def free(path: Path) -> None:
    """Do what a keeper does when everything is on disk."""
    reader = LaneReader.open(path, writable_tail=True)
    records = reader.records(0)
    reader.advance_tail(records[-1].number + 1)
    reader.close()


def warm_frame(path: Path, size: int) -> np.ndarray:
    """Shared memory for a copy of everything."""
    path.touch()
    frame = np.memmap(path, dtype=np.uint8, mode="r+", shape=(size,))
    frame[:] = 1  # first touch
    return np.asarray(frame)


def quartiles(samples: list[float]) -> list[float]:
    return [report.significant(float(value)) for value in np.percentile(samples, [25, 50, 75, 99])]


if __name__ == "__main__":
    main()
