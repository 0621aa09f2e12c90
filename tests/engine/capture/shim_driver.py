"""A driver whose device is this CPU: the kernels' own source through the shim, streams as threads, memory that both sides share."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.capture.driver import Buffer
from engine.capture.nvrtc import Usage
from engine.capture.source import HandlerSource
from tests.engine.capture.shim_build import build


class ShimEvent:
    def __init__(self) -> None:
        self._set = threading.Event()
        self.set = self._set.set

    def done(self) -> bool:
        return self._set.is_set()

    def wait(self) -> None:
        assert self._set.wait(60), "the shim's stream did not come to this event within 60 s"


class ShimStream:
    """Work in order on a thread of its own."""

    def __init__(self) -> None:
        self._work: queue.Queue[Callable[[], None]] = queue.Queue()
        self.recording: list[Callable[[], None]] | None = None
        threading.Thread(target=self._run, name="shim-stream", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def put(self, call: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.append(call)
        else:
            self._work.put(call)

    def record(self) -> ShimEvent:
        event = ShimEvent()
        self._work.put(event.set)
        return event

    def wait(self, event: ShimEvent) -> None:
        self._work.put(event.wait)

    def synchronize(self) -> None:
        self.record().wait()


class ShimGraph:
    def __init__(self, calls: list[Callable[[], None]]) -> None:
        self._calls = calls

    def launch(self, stream: ShimStream) -> None:
        for call in self._calls:
            stream.put(call)


class ShimModule:
    def __init__(self, source: HandlerSource, directory: Path, seeds: np.random.Generator) -> None:
        self.source = source
        self.usage: dict[str, Usage] = {}
        self._library = build(source, directory)
        self._seeds = seeds

    def launch(self, kernel: str, stream: ShimStream, blocks: int, threads: int, arguments: tuple[int, ...]) -> None:
        function = getattr(self._library, f"launch_{kernel}")
        words = (ctypes.c_uint64 * max(1, len(arguments)))(*(int(word) for word in arguments))
        seed = ctypes.c_uint64(int(self._seeds.integers(1 << 62)))
        # A block is whole warps here; what asks for one thread alone is started with 32 and must not mind.
        stream.put(lambda: function(blocks, -(-threads // 32) * 32, seed, words))


class ShimDriver:
    """See engine.capture.driver.Driver."""

    name = "shim"
    architecture = "shim"
    multiprocessors = 2

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self._directory = directory
        self._seeds = np.random.default_rng(seed)
        self._default = ShimStream()
        self._lock = threading.Lock()
        self.loads = 0
        self.hold_loads = threading.Event()
        self.hold_loads.set()
        self.registrable = True

    def load(self, source: HandlerSource) -> ShimModule:
        self.hold_loads.wait(60)
        with self._lock:
            self.loads += 1
            return ShimModule(source, self._directory, self._seeds)

    def device_buffer(self, byte_count: int) -> Buffer:
        return self.mapped_buffer(byte_count)

    def mapped_buffer(self, byte_count: int) -> Buffer:
        whole = np.zeros(byte_count + 256, dtype=np.uint8)
        start = -whole.ctypes.data % 256
        host = whole[start : start + byte_count]
        return Buffer(host.ctypes.data, byte_count, host, whole)

    def register(self, array: np.ndarray) -> Buffer:
        return Buffer(array.ctypes.data, array.nbytes, array.view(np.uint8).reshape(-1), array)

    def unregister(self, buffer: Buffer) -> None:
        pass

    def stream(self) -> ShimStream:
        return ShimStream()

    def current_stream(self) -> ShimStream:
        return self._default

    def copy(self, target: int, source: int, byte_count: int, stream: ShimStream) -> None:
        stream.put(lambda: ctypes.memmove(target, source, byte_count) and None)

    def zero(self, target: int, byte_count: int, stream: ShimStream) -> None:
        stream.put(lambda: ctypes.memset(target, 0, byte_count) and None)

    def begin_graph(self, stream: ShimStream) -> None:
        stream.recording = []

    def end_graph(self, stream: ShimStream) -> ShimGraph:
        calls, stream.recording = stream.recording or [], None
        return ShimGraph(calls)
