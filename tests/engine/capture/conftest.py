"""Devices under test: host memory, the kernels' source on this CPU by every way to launch, and CUDA where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.capture.executor import Executor, ExecutorOptions
from engine.capture.handlers import HandlerDevice
from engine.capture.kernel_device import KernelDevice
from engine.capture.launch import ExecutorLaunch, GraphLaunch, Launcher, SideStream
from engine.capture.plain import PlainDevice
from engine.capture.regions import Memory, memory_of
from tests.engine.capture.shim_driver import ShimDriver

LAUNCHERS: dict[str, Callable[[Any], Launcher]] = {
    "stream": SideStream,
    "graph": GraphLaunch,
    "executor": lambda driver: ExecutorLaunch(Executor(driver, ExecutorOptions(capacity=8, threads=64))),
}
SHIM = [f"shim/{name}" for name in LAUNCHERS]
CUDA = [pytest.param(f"cuda/{name}", marks=pytest.mark.gpu) for name in LAUNCHERS]


@dataclass
class Bench:
    """A device, and arrays in its memory: `put` makes one, `get` and `set` read and write it behind the device's back."""

    device: HandlerDevice
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]
    set: Callable[[Any, np.ndarray], None]

    def memory(self, array: Any) -> Memory:
        return memory_of(array)


@pytest.fixture(scope="session")
def shim_directory(request: pytest.FixtureRequest) -> Path:
    """Where compiled shims are kept, for other workers and later runs, too."""
    assert request.config.cache is not None
    return request.config.cache.mkdir("concordia-shim")


@pytest.fixture
def shim_driver(shim_directory: Path) -> ShimDriver:
    return ShimDriver(shim_directory)


def aligned_array(data: np.ndarray, quantum: int = 256) -> np.ndarray:
    """A copy that begins at a multiple of `quantum`."""
    whole = np.empty(data.nbytes + quantum, dtype=np.uint8)
    start = -whole.ctypes.data % quantum
    copy = whole[start : start + data.nbytes].view(data.dtype).reshape(data.shape)
    copy[...] = data
    return copy


def assign(array: Any, data: np.ndarray) -> None:
    array[...] = data


def host_bench(device: HandlerDevice) -> Bench:
    return Bench(device, aligned_array, np.array, assign)


@pytest.fixture(params=["cpu", *SHIM, *CUDA])
def bench(request: pytest.FixtureRequest, shim_directory: Path) -> Iterator[Bench]:
    """Every device of the contract."""
    kind, _, way = request.param.partition("/")
    if kind == "cpu":
        made = host_bench(PlainDevice(seed=11))
    elif kind == "shim":
        driver = ShimDriver(shim_directory)
        made = host_bench(KernelDevice(driver, LAUNCHERS[way](driver), seed=11))
    else:
        made = cuda_bench(way)
    yield made
    made.device.close()


@dataclass
class Place:
    """A driver, and where the arenas that it works on lie."""

    driver: Any
    device: torch.device


@pytest.fixture(params=["shim", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, shim_directory: Path) -> Place:
    """The kernels' source on this CPU, and CUDA where there is one."""
    if request.param == "shim":
        return Place(ShimDriver(shim_directory), torch.device("cpu"))
    return Place(cuda_driver(), torch.device("cuda", 0))


def cuda_driver() -> Any:
    """The first CUDA device; skips with the reason where there is none."""
    from engine.capture.cuda_driver import CudaDriver
    from engine.capture.errors import CaptureError

    try:
        return CudaDriver()
    except CaptureError as error:
        pytest.skip(str(error))


def cuda_bench(way: str) -> Bench:
    """A CUDA device; skips with the reason where there is none."""
    driver = cuda_driver()

    def put(data: np.ndarray) -> Any:
        return torch.from_numpy(data.copy()).to("cuda")

    def put_back(array: Any, data: np.ndarray) -> None:
        array.copy_(torch.from_numpy(np.ascontiguousarray(data)))

    return Bench(
        KernelDevice(driver, LAUNCHERS[way](driver), seed=11), put, lambda array: array.cpu().numpy(), put_back
    )
