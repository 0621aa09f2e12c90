"""How long from deciding to act until a handler has begun, and what a resident block takes from the rest of the device.

Question  Time from writing a task into the executor's ring until the host sees the handler's first write, against a launch and against
          a graph replay of the same handler; the executor's share of the device; its effect on a running matrix product.
Regime    A handler that writes 16 bytes into mapped memory, which the host watches; the executor resident and polling.
Unit      microseconds, medians by the host's clock; ratio is baseline / ours. The matrix product: slowdown, wanted under 1.02.
"""

from __future__ import annotations

import statistics
import time

import torch

from bench.gpu.lab import Lab, Row
from engine.capture import source
from engine.capture.driver import constant_words
from engine.capture.executor import NOTHING, Executor, ExecutorOptions, unsupported
from engine.capture.launch import ExecutorLaunch, GraphLaunch, Launcher, SideStream
from engine.capture.source import StatePart, StateShape

_ROUNDS = 200
_LONGEST_S = 10.0


def measure(lab: Lab) -> list[Row]:
    """Ways to begin, then the effect on others."""
    rounds = 20 if lab.quick else _ROUNDS
    stream = _until_begun(lab, SideStream(lab.driver), rounds)
    graph = _until_begun(lab, GraphLaunch(lab.driver), rounds)
    if reason := unsupported():
        return [
            Row("trigger", "a launch", stream * 1e6, "us"),
            Row("trigger", "a graph replay", graph * 1e6, "us"),
            Row("trigger", "executor", 0.0, "", note=reason[:100]),
        ]
    executor = Executor(lab.driver, ExecutorOptions(lease_ms=200, idle_us=100_000, poll_ns=100))
    try:
        empty = _round_trip(executor, rounds)
        ring = _until_begun(lab, ExecutorLaunch(executor), rounds, keep=True)
        slowdown = _beside(lab, executor)
    finally:
        executor.close()
    share = 1 / lab.driver.multiprocessors
    return [
        Row("trigger", "ring write to handler start, against a launch", ring * 1e6, "us", stream * 1e6, stream / ring, "> 1"),
        Row("trigger", "ring write to handler start, against a graph replay", ring * 1e6, "us", graph * 1e6, graph / ring, "> 1"),
        Row("trigger", "an empty task, there and back", empty * 1e6, "us"),
        Row("trigger", "executor's share of the multiprocessors", share * 100, "%", note=f"left: {executor.left_because}"),
        slowdown,
    ]  # fmt: skip


def _until_begun(lab: Lab, launcher: Launcher, rounds: int, *, keep: bool = False) -> float:
    """Median time until the host sees what the smallest snapshot writes first."""
    module = lab.driver.load(source.snapshotter(StateShape((StatePart(16, 16),))))
    state, out = (lab.driver.mapped_buffer(256) for _ in range(2))
    bases = constant_words(lab.driver, [state.address])
    wrote, seen = state.array("<u8", 1), out.array("<u8", 1)
    samples = []
    try:
        for turn in range(1, rounds + 4):
            wrote[0] = turn
            began = time.perf_counter()
            ticket = launcher.launch(module, (bases.address, 0, out.address), 1)
            while seen[0] != turn:
                assert time.perf_counter() - began < _LONGEST_S, "the handler did not begin"
                if not lab.on_gpu:
                    time.sleep(0)  # what stands in for a device wants the interpreter
            samples.append(time.perf_counter() - began)
            ticket.wait()
    finally:
        if not keep:
            launcher.close()
    return statistics.median(samples[3:])


def _round_trip(executor: Executor, rounds: int) -> float:
    """Median time of a task that does nothing, until its commit word is seen."""
    samples = []
    for _ in range(rounds + 3):
        began = time.perf_counter()
        executor.submit(NOTHING, ()).wait()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples[3:])


def _beside(lab: Lab, executor: Executor) -> Row:
    """A matrix product alone, and with the executor resident."""
    side = 8192 if lab.on_gpu else 64
    left = torch.randn(side, side, device=lab.device, dtype=torch.bfloat16 if lab.on_gpu else torch.float32)
    right, out = left.clone(), torch.empty_like(left)

    def product() -> None:
        torch.matmul(left, right, out=out)

    executor.stop()
    alone = lab.median_s(product)
    beside = lab.median_s(product, before=lambda: executor.submit(NOTHING, ()).wait())
    return Row(
        "trigger", "matrix product beside the executor", beside * 1e6, "us", alone * 1e6, beside / alone, "<= 1.02"
    )
