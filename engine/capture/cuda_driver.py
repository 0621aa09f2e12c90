"""The driver of a CUDA device, through CuPy (its builds for CUDA 12 and 13), sharing the process's context with torch.

Handlers are compiled by NVRTC for the device's own architecture and cached on disk. Pinned memory is mapped: with unified
addressing the device uses the host's pointers. Every call names its device, so any thread may make it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine.capture import nvrtc
from engine.capture.cache import HandlerCache
from engine.capture.driver import Buffer
from engine.capture.errors import CaptureError, CompileFailed, NoDevice
from engine.capture.nvrtc import Usage
from engine.capture.regions import bytes_at
from engine.capture.source import OPTIONS, HandlerSource

_HOST_REGISTER_MAPPED_PORTABLE = 3


class CudaEvent:
    """See engine.capture.driver.Event."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        """See Event."""
        return bool(self.event.done)

    def wait(self) -> None:
        """See Event."""
        self.event.synchronize()


class CudaStream:
    """See engine.capture.driver.Stream."""

    def __init__(self, driver: CudaDriver, stream: Any) -> None:
        self._driver = driver
        self.stream = stream

    def record(self) -> CudaEvent:
        """See Stream."""
        with self._driver.device:
            event = self._driver.cupy.cuda.Event(disable_timing=True)
            event.record(self.stream)
            return CudaEvent(event)

    def wait(self, event: Any) -> None:
        """See Stream."""
        self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        """See Stream."""
        self.stream.synchronize()


class ForeignStream:
    """A stream that somebody else owns, with as much of CuPy's interface as is used here.

    CuPy 13 has `ExternalStream`, 14 warns of it, and its successor may end a stream that is not its own when it is let go of.
    """

    def __init__(self, runtime: Any, pointer: int) -> None:
        self._runtime, self.ptr = runtime, pointer

    def wait_event(self, event: Any) -> None:
        """What is put on from now on runs after the event."""
        self._runtime.streamWaitEvent(self.ptr, event.ptr)

    def synchronize(self) -> None:
        """Block until it is empty."""
        self._runtime.streamSynchronize(self.ptr)


class CudaGraph:
    """See engine.capture.driver.Graph."""

    def __init__(self, driver: CudaDriver, graph: Any) -> None:
        self._driver = driver
        self._graph = graph

    def launch(self, stream: Any) -> None:
        """See Graph."""
        with self._driver.device:
            self._graph.launch(stream.stream)


class CudaModule:
    """See engine.capture.driver.Module."""

    def __init__(self, driver: CudaDriver, source: HandlerSource, image: bytes, usage: dict[str, Usage]) -> None:
        self.source = source
        self.usage = usage
        self._driver = driver
        with driver.device:
            self._module = driver.cupy.cuda.Module()
            self._module.load(image)
        self._functions: dict[str, Any] = {}

    def launch(self, kernel: str, stream: Any, blocks: int, threads: int, arguments: tuple[int, ...]) -> None:
        """See Module."""
        function = self._functions.get(kernel)
        with self._driver.device:
            if function is None:
                function = self._functions[kernel] = self._module.get_function(kernel)
            words = tuple(np.array(arguments, dtype=np.uint64))
            function((blocks,), (threads,), words, stream=stream.stream)


class CudaDriver:
    """See engine.capture.driver.Driver.

    Raises NoDevice (no CuPy, no driver, no such device), NoCompiler
    """

    def __init__(self, device: int = 0, cache_directory: Path | None = None) -> None:
        self.cupy = _cupy()
        runtime = self.cupy.cuda.runtime
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            raise NoDevice(f"no CUDA device can be used here: {error}") from error
        if device >= count:
            raise NoDevice(f"CUDA device {device} was asked for, this machine has {count}")
        self._errors = (runtime.CUDARuntimeError, self.cupy.cuda.driver.CUDADriverError)
        self.index = device
        self._foreign: dict[int, CudaStream] = {}
        self.device = self.cupy.cuda.Device(device)
        properties = runtime.getDeviceProperties(device)
        self.title = properties["name"].decode()
        self.name = f"cuda:{device}"
        self.architecture = f"sm_{properties['major']}{properties['minor']}"
        self.multiprocessors = int(properties["multiProcessorCount"])
        self._nvrtc = _compiler_for(runtime.driverGetVersion() // 1000)
        self._compile_for = nvrtc.target_for(int(self.architecture[3:]), self._nvrtc.supported())
        self._target = f"{self._compile_for}-nvrtc{self._nvrtc.version[0]}.{self._nvrtc.version[1]}"
        self.cache = HandlerCache(cache_directory or Path.home() / ".cache" / "concordia" / "handlers")

    def proof_of_executor(self) -> Path:
        """The file that `make gpu` leaves once the executor has passed its checks on this kind of device with this driver."""
        version = self.cupy.cuda.runtime.driverGetVersion()
        return self.cache.directory / f"executor-proven-{self.title.replace(' ', '_')}-{version}"

    def load(self, source: HandlerSource) -> CudaModule:
        """See Driver."""
        compiled = self.cache.get(source, self._target, self._compile)
        try:
            return CudaModule(self, source, compiled.image, compiled.usage)
        except self._errors as error:
            raise CompileFailed(
                f"{source.name} for {self._target} cannot be loaded on {self.title}: {error}"
            ) from error

    def _compile(self, source: HandlerSource) -> nvrtc.Machine:
        return self._nvrtc.compile(source.text, source.name, self._compile_for, OPTIONS)

    def device_buffer(self, byte_count: int) -> Buffer:
        """See Driver."""
        with self.device:
            try:
                memory = self.cupy.cuda.alloc(byte_count)
            except self.cupy.cuda.memory.OutOfMemoryError as error:
                raise CaptureError(f"no {byte_count} bytes of the device's memory: {error}") from error
            self.cupy.cuda.runtime.memset(memory.ptr, 0, byte_count)
            self.cupy.cuda.runtime.streamSynchronize(0)
        return Buffer(int(memory.ptr), byte_count, None, memory)

    def mapped_buffer(self, byte_count: int) -> Buffer:
        """See Driver."""
        runtime = self.cupy.cuda.runtime
        with self.device:
            try:
                address = runtime.hostAlloc(byte_count, runtime.hostAllocMapped | runtime.hostAllocPortable)
            except runtime.CUDARuntimeError as error:
                raise CaptureError(f"no {byte_count} bytes of pinned memory: {error}") from error
        pinned = _Pinned(runtime, address)
        host = bytes_at(address, byte_count, pinned)
        host[:] = 0
        return Buffer(address, byte_count, host, pinned)

    def register(self, array: np.ndarray) -> Buffer:
        """See Driver."""
        runtime = self.cupy.cuda.runtime
        attribute = runtime.cudaDevAttrCanUseHostPointerForRegisteredMem
        if not runtime.deviceGetAttribute(attribute, self.index):
            raise CaptureError(f"{self.title} cannot use the host's pointers of registered memory")
        address = array.ctypes.data
        try:
            with self.device:
                runtime.hostRegister(address, array.nbytes, _HOST_REGISTER_MAPPED_PORTABLE)
        except runtime.CUDARuntimeError as error:
            raise CaptureError(
                f"{array.nbytes} bytes of host memory cannot be registered with CUDA: {error}"
            ) from error
        return Buffer(address, array.nbytes, array.view(np.uint8).reshape(-1), array)

    def unregister(self, buffer: Buffer) -> None:
        """See Driver."""
        with self.device:
            self.cupy.cuda.runtime.hostUnregister(buffer.address)

    def stream(self) -> CudaStream:
        """See Driver."""
        with self.device:
            return CudaStream(self, self.cupy.cuda.Stream(non_blocking=True))

    def current_stream(self) -> CudaStream:
        """See Driver."""
        import torch

        pointer = torch.cuda.current_stream(self.index).cuda_stream
        if pointer not in self._foreign:
            self._foreign[pointer] = CudaStream(self, ForeignStream(self.cupy.cuda.runtime, pointer))
        return self._foreign[pointer]

    def copy(self, target: int, source: int, byte_count: int, stream: Any) -> None:
        """See Driver."""
        runtime = self.cupy.cuda.runtime
        with self.device:
            runtime.memcpyAsync(target, source, byte_count, runtime.memcpyDefault, stream.stream.ptr)

    def zero(self, target: int, byte_count: int, stream: Any) -> None:
        """See Driver."""
        with self.device:
            self.cupy.cuda.runtime.memsetAsync(target, 0, byte_count, stream.stream.ptr)

    def begin_graph(self, stream: Any) -> None:
        """See Driver."""
        with self.device:
            # This thread's calls alone: others load handlers and start executors meanwhile, which the global mode forbids.
            stream.stream.begin_capture(self.cupy.cuda.runtime.streamCaptureModeThreadLocal)

    def end_graph(self, stream: Any) -> CudaGraph:
        """See Driver."""
        with self.device:
            return CudaGraph(self, stream.stream.end_capture())


class _Pinned:
    """Frees pinned memory when its last user is gone."""

    def __init__(self, runtime: Any, address: int) -> None:
        self._runtime, self._address = runtime, address

    def __del__(self) -> None:
        try:
            self._runtime.freeHost(self._address)
        except Exception:  # noqa: BLE001 - the context is gone at interpreter exit, and the memory with it
            return


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise NoDevice(
            f"CuPy is not installed ({error}); pip install 'concordia[cuda]' (cupy-cuda13x for CUDA 13)"
        ) from error
    return cupy


def _compiler_for(driver_major: int) -> nvrtc.Nvrtc:
    """The newest NVRTC whose machine code the driver can load: of its own CUDA version, else an older one."""
    for major in range(driver_major, 10, -1):
        try:
            return nvrtc.load(major)
        except CaptureError:
            continue
    return nvrtc.load()
