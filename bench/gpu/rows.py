"""Gathering a step's new rows, and what that adds to a decode step by each way to launch.

Question  Bytes/s of the row gatherer into mapped host memory, and the time that a capture adds to a decode step.
Regime    One new token of 1, 8 and 64 sequences in the shapes of an 8B and a 70B model (bfloat16, 8 KV heads of 128); a decode
          step is stood in for by matrix products of about 5 ms, captured in a graph on a GPU.
Baselines the same bytes as one copy from the device to pinned memory; the step without a capture.
Unit      GB/s (wanted: 0.9 of the copy), microseconds a step (wanted: under 1% of it).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from bench.gpu.lab import Lab, Row, gigabytes
from engine.capture import source
from engine.capture.driver import Buffer, Module, constant_words
from engine.capture.executor import Executor, ExecutorOptions, unsupported
from engine.capture.launch import ExecutorLaunch, GraphLaunch, Launcher, SideStream
from engine.capture.source import RowShape
from engine.capture.specialisations import attention_rows

_CONTEXT = 256
_MODELS = {"8B": 32, "70B": 80}
_BATCHES = (1, 8, 64)


class Gather:
    """The rows of one new token of several sequences."""

    def __init__(self, lab: Lab, layers: int, sequences: int) -> None:
        layers = max(1, layers // lab.scale)
        self.shape: RowShape = attention_rows(layers, 8, 128, _CONTEXT)
        (group,) = self.shape.groups
        self.byte_count = sequences * self.shape.token_bytes
        self.module: Module = lab.driver.load(source.row_gatherer(self.shape))
        self._arena = lab.random_bytes(sequences * group.slot_stride)
        self._bases = constant_words(lab.driver, [self._arena.data_ptr()])
        self.frames: Buffer = lab.driver.mapped_buffer(self.byte_count)
        self._items = lab.driver.mapped_buffer(32 * sequences)
        for slot in range(sequences):
            self._items.array("<u8", 1, 32 * slot)[0] = self.frames.address + slot * self.shape.token_bytes
            self._items.array("<u4", 6, 32 * slot + 8)[:] = (slot, slot % _CONTEXT, 1, 1, 0, 0)
        self.words = (self._bases.address, self._items.address, sequences)
        units = self.byte_count // 16
        self.blocks = max(1, min(-(-units // self.shape.threads), 3 * lab.driver.multiprocessors))


def measure(lab: Lab) -> list[Row]:
    """Of each shape and batch, bandwidth and the cost of each way."""
    rows = []
    for name, layers in _MODELS.items():
        for sequences in _BATCHES[:1] if lab.quick else _BATCHES:
            gather = Gather(lab, layers, sequences)
            rows.append(_bandwidth(lab, name, gather, sequences))
            rows += _added(lab, f"{name}, {sequences} sequences", gather)
    return rows


def _bandwidth(lab: Lab, name: str, gather: Gather, sequences: int) -> Row:
    def launch() -> None:
        gather.module.launch("run", lab.stream, gather.blocks, gather.shape.threads, (*gather.words, *[0] * 9))

    seconds = lab.median_s(launch)
    pinned = torch.empty(gather.byte_count, dtype=torch.uint8, pin_memory=lab.on_gpu)
    packed = lab.random_bytes(gather.byte_count)
    baseline = lab.median_s(lambda: pinned.copy_(packed, non_blocking=True))
    return Row("rows", f"{name}, {sequences} sequences, {gather.byte_count >> 10} KB", gigabytes(gather.byte_count / seconds), "GB/s",
               gigabytes(gather.byte_count / baseline), baseline / seconds, ">= 0.9", f"{seconds * 1e6:.1f} us")  # fmt: skip


def _added(lab: Lab, what: str, gather: Gather) -> list[Row]:
    """Time that a capture adds to a step, by each way to launch."""
    step = _step(lab)
    without = _per_step(lab, step, lambda: None)
    inside = max(0.0, _inside(lab, gather) - without)
    ways: dict[str, Callable[[], Launcher]] = {
        "stream": lambda: SideStream(lab.driver),
        "graph": lambda: GraphLaunch(lab.driver),
        "executor": lambda: ExecutorLaunch(Executor(lab.driver, ExecutorOptions(lease_ms=50, idle_us=20_000))),
    }
    if unsupported():
        del ways["executor"]
    case = f"{what}, added to a step"
    rows = [Row("rows", f"{case} inside its graph", inside * 1e6, "us", without * 1e6, inside / without, "<= 0.01")]
    for name, make in ways.items():
        launcher = make()
        try:
            seconds = _per_step(lab, step, lambda way=launcher: _capture(lab, gather, way))  # type: ignore[misc]
        finally:
            launcher.close()
        added = max(0.0, seconds - without)
        rows.append(Row("rows", f"{case} by {name}", added * 1e6, "us", without * 1e6, added / without, "<= 0.01"))
    return rows


def _inside(lab: Lab, gather: Gather) -> float:
    """Time of a step whose own graph has the gatherer behind it, as the engine's decode steps have it."""
    graphs = GraphLaunch(lab.driver)
    words = graphs.words()
    words.array("<u8", len(gather.words))[:] = gather.words

    def record() -> None:
        graphs.record(gather.module, gather.blocks, lab.stream, words)

    record()  # loaded before it is recorded
    lab.synchronize()
    try:
        return _per_step(lab, _step(lab, record), lambda: None)
    finally:
        graphs.close()


def _step(lab: Lab, behind: Callable[[], object] = lambda: None) -> Callable[[], object]:
    """Matrix products that take a few milliseconds, and what comes behind them; one graph on a GPU."""
    side = 4096 if lab.on_gpu else 64
    left = torch.randn(side, side, device=lab.device, dtype=torch.bfloat16 if lab.on_gpu else torch.float32)
    right, out = left.clone(), torch.empty_like(left)

    def products() -> None:
        for _ in range(20):
            torch.matmul(left, right, out=out)
        behind()

    products()
    if not lab.on_gpu:
        return products
    lab.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return graph.replay


def _capture(lab: Lab, gather: Gather, launcher: Launcher) -> None:
    """What the engine does behind a step: start, and wait for the rows before they are committed."""
    after = lab.stream.record()
    launcher.launch(gather.module, gather.words, gather.blocks, after).wait()


def _per_step(lab: Lab, step: Callable[[], object], capture: Callable[[], None]) -> float:
    """Median host time of step, wait, capture: an engine needs the logits before it can go on, with or without capture."""
    samples = []
    for turn in range(lab.rounds + 3):
        began = time.perf_counter()
        step()
        lab.synchronize()
        capture()
        if turn >= 3:
            samples.append(time.perf_counter() - began)
    return statistics.median(samples)
