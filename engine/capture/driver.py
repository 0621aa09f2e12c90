"""What the handlers need of a device: memory, streams, events, graphs and compiled kernels. `cuda_driver.py` is CUDA through CuPy;
the tests have one that runs the kernels' own source on the CPU. Addresses are plain integers, as the device sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from engine.capture.nvrtc import Usage
from engine.capture.source import HandlerSource


@dataclass(slots=True)
class Buffer:
    """Memory that a device can reach. `host` is the same memory as the host sees it, or None if it lies on the device alone."""

    address: int
    byte_count: int
    host: np.ndarray | None = None
    owner: Any = field(default=None, repr=False)

    def array(self, dtype: Any, count: int, offset: int = 0) -> np.ndarray:
        """`count` items from byte `offset` on; host-visible buffers only."""
        assert self.host is not None, "this buffer lies on the device"
        kind = np.dtype(dtype)
        return self.host[offset : offset + count * kind.itemsize].view(kind)


class Event(Protocol):
    """A point on a stream."""

    def done(self) -> bool:
        """Whether all before it ran."""

    def wait(self) -> None:
        """Block until it did."""


class Stream(Protocol):
    """Work in order, beside other streams."""

    def record(self) -> Event:
        """A point after all that was put on so far."""

    def wait(self, event: Event) -> None:
        """What is put on from now on runs after the event."""

    def synchronize(self) -> None:
        """Block until the stream is empty."""


class Graph(Protocol):
    """Launches that were recorded once."""

    def launch(self, stream: Stream) -> None:
        """Replay all of them on a stream."""


class Module(Protocol):
    """A compiled handler."""

    source: HandlerSource
    usage: dict[str, Usage]

    def launch(self, kernel: str, stream: Stream, blocks: int, threads: int, arguments: tuple[int, ...]) -> None:
        """Put one launch on a stream. All arguments are 8 bytes."""


class Driver(Protocol):
    """One device."""

    name: str
    architecture: str
    multiprocessors: int

    def load(self, source: HandlerSource) -> Module:
        """Compile, or take from the cache, and load. Raises CompileFailed, also where the device refuses what came of it."""

    def device_buffer(self, byte_count: int) -> Buffer:
        """Zeroed memory of the device. Raises CaptureError if there is none."""

    def mapped_buffer(self, byte_count: int) -> Buffer:
        """Zeroed host memory, pinned, that the device reads and writes in place. Raises CaptureError if there is none."""

    def register(self, array: np.ndarray) -> Buffer:
        """Pin and map existing host memory (a lane's `mmap`). Raises CaptureError with the reason if that cannot be."""

    def unregister(self, buffer: Buffer) -> None:
        """Undo `register`."""

    def stream(self) -> Stream:
        """A new stream that does not wait for the default one."""

    def current_stream(self) -> Stream:
        """The one that the framework's step runs on."""

    def copy(self, target: int, source: int, byte_count: int, stream: Stream) -> None:
        """Bytes from one address to another, in the stream's order."""

    def zero(self, target: int, byte_count: int, stream: Stream) -> None:
        """Zero bytes, in the stream's order."""

    def begin_graph(self, stream: Stream) -> None:
        """From here on the stream's launches are recorded, not run."""

    def end_graph(self, stream: Stream) -> Graph:
        """What was recorded."""


def aligned(size: int, quantum: int = 256) -> int:
    """`size` rounded up."""
    return -(-size // quantum) * quantum


def constant_words(driver: Driver, values: Sequence[int]) -> Buffer:
    """A list of u64 that handlers read and nobody changes: on the device, so that they need not cross the bus for it."""
    size = 8 * max(1, len(values))
    staged, kept = driver.mapped_buffer(size), driver.device_buffer(size)
    staged.array("<u8", len(values))[:] = values
    stream = driver.stream()
    driver.copy(kept.address, staged.address, size, stream)
    stream.synchronize()
    return kept
