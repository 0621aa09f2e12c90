"""What the machine allows, measured in the same run: everything else is told against these."""

from __future__ import annotations

import torch

from bench.gpu.lab import Lab, Row, gigabytes
from engine.capture.source import HandlerSource

_READ_ONCE = """
typedef unsigned int u32; typedef unsigned long long u64;
extern "C" __global__ void __launch_bounds__(256) run(const uint4* data, u64 count, u32* out) {
    u32 sum = 0;
    const u64 step = u64(gridDim.x) * blockDim.x;
    u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; at + 7 * step < count; at += 8 * step) {
        uint4 held[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) held[i] = __ldcg(data + at + i * step);
#pragma unroll
        for (u32 i = 0; i < 8; i++) sum += held[i].x ^ held[i].y ^ held[i].z ^ held[i].w;
    }
    for (; at < count; at += step) { const uint4 one = __ldcg(data + at); sum += one.x ^ one.y ^ one.z ^ one.w; }
    if (sum == 0x1234567) *out = sum;  // keeps the loads
}
"""


def measure(lab: Lab) -> list[Row]:
    """Device copy, reading once, copies to and from pinned memory; kept in `lab.ceilings` as bytes/s."""
    size = lab.size(1 << 30)
    data, other = lab.random_bytes(size), torch.empty(size, dtype=torch.uint8, device=lab.device)
    pinned = torch.empty(lab.size(256 << 20), dtype=torch.uint8, pin_memory=lab.on_gpu)
    part = data[: pinned.numel()]
    found = {
        "device copy": 2 * size / lab.median_s(lambda: other.copy_(data)),
        "pinned copy out": pinned.numel() / lab.median_s(lambda: pinned.copy_(part, non_blocking=True)),
        "pinned copy in": pinned.numel() / lab.median_s(lambda: part.copy_(pinned, non_blocking=True)),
    }
    found["read once"] = _read_once(lab, data) if lab.on_gpu else found["device copy"] / 2
    lab.ceilings.update(found)
    return [Row("ceilings", name, gigabytes(rate), "GB/s") for name, rate in found.items()]


def _read_once(lab: Lab, data: torch.Tensor) -> float:
    module = lab.driver.load(HandlerSource("read_once", _READ_ONCE))
    out = lab.driver.device_buffer(256)
    arguments = (data.data_ptr(), data.numel() // 16, out.address)
    blocks = 8 * lab.driver.multiprocessors
    return data.numel() / lab.median_s(lambda: module.launch("run", lab.stream, blocks, 256, arguments))
