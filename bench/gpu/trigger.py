"""How long from deciding to act until a handler has acted, and what a resident block takes from the rest of the device.

Question  Round trip of a task in the executor's ring, against a launch and a graph replay; the executor's share of the device;
          its effect on a running matrix product.
Regime    A task that does nothing, or as little as a kernel can; the executor resident and polling.
Unit      microseconds, medians by the host's clock; ratio is baseline / ours. The matrix product: slowdown, wanted under 1.02.
"""

from __future__ import annotations

import torch

from bench.gpu.lab import Lab, Row
from engine.capture import source
from engine.capture.executor import NOTHING, Executor, ExecutorOptions, unsupported
from engine.capture.launch import GraphLaunch, SideStream
from engine.capture.source import StatePart, StateShape

_ROUNDS = 200


def measure(lab: Lab) -> list[Row]:
    """Round trips, then the effect on others."""
    rounds = 20 if lab.quick else _ROUNDS
    if reason := unsupported():
        return [Row("trigger", "executor", 0.0, "", note=reason[:100])]
    executor = Executor(lab.driver, ExecutorOptions(lease_ms=200, idle_us=100_000, poll_ns=100))
    try:
        ring = lab.host_median_s(lambda: executor.submit(NOTHING, ()).wait(), rounds=rounds)
        slowdown = _beside(lab, executor)
    finally:
        executor.close()
    stream, graph = (_little(lab, way, rounds) for way in (SideStream(lab.driver), GraphLaunch(lab.driver)))
    share = 1 / lab.driver.multiprocessors
    return [
        Row("trigger", "ring, against a launch", ring * 1e6, "us", stream * 1e6, stream / ring),
        Row("trigger", "ring, against a graph replay", ring * 1e6, "us", graph * 1e6, graph / ring),
        Row(
            "trigger",
            "executor's share of the multiprocessors",
            share * 100,
            "%",
            note=f"left: {executor.left_because}",
        ),
        slowdown,
    ]


def _little(lab: Lab, launcher: SideStream | GraphLaunch, rounds: int) -> float:
    """Round trip of the smallest snapshot."""
    module = lab.driver.load(source.snapshotter(StateShape((StatePart(16, 16),))))
    state, out, bases = (lab.driver.mapped_buffer(256) for _ in range(3))
    bases.array("<u8", 1)[0] = state.address
    words = (bases.address, 0, out.address)
    try:
        return lab.host_median_s(lambda: launcher.launch(module, words, 1).wait(), rounds=rounds)
    finally:
        launcher.close()


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
