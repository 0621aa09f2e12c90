"""A step of a fixed shape, recorded once and replayed: as a CUDA graph, or by calling it again on a device that has no graphs.

What is recorded reads and writes static memory only. A call may be recorded after it ran a few times: by then its kernels are
loaded, its libraries have their workspaces, and nothing of that has to happen inside a capture. Main thread only.
Source: torch.cuda.graphs; CUDA Programming Guide, "CUDA Graphs".
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class StepGraph(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Put the step on the framework's stream."""


class StepRecorder(Protocol):
    """Makes step graphs. `is_graph` says whether a replay is one launch."""

    is_graph: bool

    def record(self, call: Callable[[], None]) -> StepGraph:
        """Record what `call` does; where there are graphs nothing of it runs yet. Raises RuntimeError if it can't be recorded."""


class CalledStep:
    """A step that is simply called."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def replay(self) -> None:
        """See StepGraph."""
        self._call()


class CallRecorder:
    """For a device without graphs: the CPU."""

    is_graph = False

    def record(self, call: Callable[[], None]) -> CalledStep:
        """See StepRecorder."""
        return CalledStep(call)


class CudaRecorder:
    """CUDA graphs, all with one private memory pool: no two of them run at once, and what a step leaves lies outside of it."""

    is_graph = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, call: Callable[[], None]) -> Any:
        """See StepRecorder.

        The mode is that of the thread: handlers are loaded and executors are started on other threads meanwhile, which
        the global mode would forbid them, and end the capture.
        """
        graph = torch.cuda.CUDAGraph()
        with (
            _no_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            call()
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """What a cyclic collection frees may be pinned memory or a graph, and to free those ends a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def recorder_for(device: torch.device) -> StepRecorder:
    """What a device has."""
    return CudaRecorder(device) if device.type == "cuda" else CallRecorder()
