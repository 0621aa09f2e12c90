"""The delta of a LoRA fine-tuning step, found on the device.

Question  Bytes and time of a step's delta against copying adapters and optimiser state whole.
Regime    64 adapters of rank 16 on matrices of 4,096, with AdamW's two moments, in one tensor (201 MB); a step trains one of them.
Baseline  the whole tensor to pinned memory.
Unit      milliseconds, and bytes as a share of all.
"""

from __future__ import annotations

import torch

from bench.gpu.lab import Lab, Row
from engine.capture.kernel_device import KernelDevice
from engine.capture.launch import SideStream
from engine.capture.regions import memory_of

_ADAPTERS, _RANK, _SIDE = 64, 16, 4096


def measure(lab: Lab) -> list[Row]:
    """A few steps, each followed by a scan."""
    side = max(64, _SIDE // lab.scale)
    state = torch.randn(_ADAPTERS, 3, 2 * _RANK * side, device=lab.device)
    device = KernelDevice(lab.driver, SideStream(lab.driver))
    region = device.pages(memory_of(state), 4096)
    region.scan()
    pinned = torch.empty_like(state, device="cpu", pin_memory=lab.on_gpu)
    turn = [0]

    def step() -> None:
        """AdamW of one adapter, on random gradients."""
        turn[0] = (turn[0] + 1) % _ADAPTERS
        weights, first, second = state[turn[0]]
        gradient = torch.randn_like(weights)
        first.mul_(0.9).add_(gradient, alpha=0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        weights.add_(first / (second.sqrt() + 1e-8), alpha=-1e-3)

    taken: list[int] = []
    ours = lab.host_median_s(lambda: taken.append(region.scan().byte_count), rounds=8, before=step)

    def copy_whole() -> None:
        pinned.copy_(state, non_blocking=True)
        lab.synchronize()

    whole = lab.host_median_s(copy_whole, rounds=8, before=step)
    device.close()
    total = state.numel() * 4
    note = f"{sorted(taken)[len(taken) // 2] / total:.2%} of {total >> 20} MB"
    return [Row("training", "delta of a LoRA step", ours * 1e3, "ms", whole * 1e3, whole / ours, "> 1", note)]
