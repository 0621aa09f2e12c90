"""What every measurement on a device shares: the driver, memory, and medians by events. Work is put on the framework's stream.

Works on the CPU as well (any driver, host clock), so that the measurements themselves are tested where there is no GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.capture.driver import Driver, Stream

_FLUSH_BYTES = 256 << 20  # more than any second-level cache


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `ratio` is what is wanted of it, `want` how much."""

    section: str
    case: str
    value: float
    unit: str
    baseline: float = 0.0
    ratio: float = 0.0
    want: str = ""
    note: str = ""


@dataclass(slots=True)
class Lab:
    """A device to measure on. `scale` divides sizes: 1 on a GPU, more where the CPU stands in for it."""

    driver: Driver
    device: torch.device
    quick: bool = False
    scale: int = 1
    rounds: int = 30
    deadline: float = float("inf")  # time.monotonic(), by which the last figure has to be had
    ceilings: dict[str, float] = field(default_factory=dict)  # bytes/s by name
    _flush: Any = None

    @property
    def on_gpu(self) -> bool:
        """Whether this is CUDA."""
        return self.device.type == "cuda"

    @property
    def stream(self) -> Stream:
        """The framework's stream."""
        return self.driver.current_stream()

    def out_of_time(self) -> bool:
        """Whether what is left of a section must be left out."""
        return time.monotonic() > self.deadline

    def size(self, byte_count: int) -> int:
        """A size as it is measured here."""
        return max(4096, byte_count // self.scale)

    def random_bytes(self, byte_count: int) -> torch.Tensor:
        """uint8 of the device; never zeros, which some hardware moves faster."""
        generator = torch.Generator(self.device).manual_seed(1)
        words = -(-byte_count // 4)
        values = torch.randint(
            -(1 << 31), (1 << 31) - 1, (words,), dtype=torch.int32, device=self.device, generator=generator
        )
        return values.view(torch.uint8)[:byte_count]

    def synchronize(self) -> None:
        """Wait for the framework's stream; not for the device, on which an executor may be resident."""
        self.stream.synchronize()

    def median_s(self, call: Callable[[], Any], *, rounds: int = 0, before: Callable[[], Any] | None = None) -> float:
        """Median time of what `call` puts on the framework's stream; `before` runs ahead of each round, untimed. Caches are cold."""
        samples = []
        for turn in range((rounds or self.rounds) + 3):
            if before is not None:
                before()
            self.flush_cache()
            seconds = self._by_events(call) if self.on_gpu else self._by_clock(call)
            if turn >= 3:
                samples.append(seconds)
        return statistics.median(samples)

    def _by_events(self, call: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _by_clock(self, call: Callable[[], Any]) -> float:
        began = time.perf_counter()
        call()
        self.stream.synchronize()
        return time.perf_counter() - began

    def host_median_s(
        self, call: Callable[[], Any], *, rounds: int = 0, before: Callable[[], Any] | None = None
    ) -> float:
        """Median by the host's clock of something that waits for its own results."""
        samples = []
        for turn in range((rounds or self.rounds) + 3):
            if before is not None:
                before()
            self.synchronize()
            began = time.perf_counter()
            call()
            if turn >= 3:
                samples.append(time.perf_counter() - began)
        return statistics.median(samples)

    def flush_cache(self) -> None:
        """Push everything out of the device's caches."""
        if self.on_gpu:
            if self._flush is None:
                self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)
            self._flush.add_(1)


def gigabytes(rate: float) -> float:
    """Bytes/s as GB/s."""
    return rate / 1e9
