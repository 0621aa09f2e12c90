"""Before anything is timed: the device contract, the executor across modules, the sanitizer. Each a process of its own, so that an
error on the device ends that check alone. Run as `python -m bench.gpu.correctness executor|kernels`, it is one of them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.gpu.lab import Row
from bench.report import ROOT
from engine.capture.executor import unsupported
from engine.capture.handlers import RowRange
from engine.capture.regions import memory_of
from engine.capture.source import RowGroup, RowShape, StatePart, StateShape

if TYPE_CHECKING:
    from engine.capture.kernel_device import KernelDevice

_TOOLS = ("memcheck", "racecheck", "synccheck")


def check(limit_s: float) -> list[Row]:
    """Run all checks, all within `limit_s`; the value is 1 where a check passed."""
    deadline = time.monotonic() + limit_s
    rows = [_run(case, command, deadline) for case, command in commands()]
    if reason := unsupported():
        rows.append(Row("correctness", "executor", 0.0, "", note=reason[:100]))
    if not shutil.which("compute-sanitizer"):
        rows.append(Row("correctness", "compute-sanitizer", 0.0, "", note="not installed, so not run"))
    return rows


def commands() -> list[tuple[str, list[str]]]:
    """Every check that can be run here, by name."""
    contract = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/engine", "-p", "no:cacheprovider"]
    found = [("device contract (pytest -m gpu)", contract)]
    if not unsupported():
        found.append(("executor runs operators of other modules", _own("executor")))
    if shutil.which("compute-sanitizer"):
        options = ["--error-exitcode=9", "--target-processes=all"]
        found += [
            (f"compute-sanitizer {tool}", ["compute-sanitizer", f"--tool={tool}", *options, *_own("kernels")])
            for tool in _TOOLS
        ]
    return found


def passed(rows: list[Row]) -> bool:
    """Whether nothing that ran failed."""
    return all(row.value == 1.0 for row in rows if row.unit)


def _own(name: str) -> list[str]:
    return [sys.executable, "-m", "bench.gpu.correctness", name]


def _run(case: str, command: list[str], deadline: float) -> Row:
    left_s = deadline - time.monotonic()
    if left_s <= 1:
        return Row("correctness", case, 0.0, "", note="out of time, so not run")
    try:
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=left_s)
    except subprocess.TimeoutExpired:
        return Row("correctness", case, 0.0, "passed", note=f"did not end within {left_s:.0f} s")
    lines = (done.stdout + done.stderr).strip().splitlines()
    return Row("correctness", case, float(done.returncode == 0), "passed", note=lines[-1][:100] if lines else "")


def executor() -> None:
    """Operators of several modules, replaced while tasks run; then a device-wide wait while the executor is resident."""
    import time

    import torch

    from engine.capture import source
    from engine.capture.cuda_driver import CudaDriver
    from engine.capture.executor import Executor
    from engine.capture.source import PageShape

    driver = CudaDriver()
    made = Executor(driver)
    for part in (64, 4096, 65536):
        shape = StateShape((StatePart(part, part),))
        operator = made.install(driver.load(source.snapshotter(shape)))
        state, out, bases = driver.mapped_buffer(part), driver.mapped_buffer(part), driver.mapped_buffer(8)
        state.array("u1", part)[:] = np.random.default_rng(part).integers(0, 256, part)
        bases.array("<u8", 1)[0] = state.address
        for _ in range(50):
            out.array("u1", part)[:] = 0
            made.submit(operator, (bases.address, 0, out.address)).wait()
            assert np.array_equal(state.array("u1", part), out.array("u1", part)), (
                f"an operator of {part} bytes wrote something else"
            )
    made.install(
        driver.load(source.page_scanner(PageShape(4096, 1 << 20)))
    )  # the largest there is: checks the registers
    made.submit(0, ())
    began = time.perf_counter()
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 0.5, "a device-wide wait took longer than any lease"
    made.close()
    print(f"{made.laps} stays, last left because {made.left_because}")


def kernels() -> None:
    """Each handler once, small, in both forms that a launch has, for the sanitizer."""
    import torch

    from engine.capture.cuda_driver import CudaDriver
    from engine.capture.kernel_device import KernelDevice
    from engine.capture.launch import GraphLaunch, SideStream

    def put(byte_count: int) -> torch.Tensor:
        return torch.randint(0, 255, (byte_count,), dtype=torch.uint8, device="cuda")

    driver = CudaDriver()
    for launcher in (SideStream(driver), GraphLaunch(driver)):
        device = KernelDevice(driver, launcher)
        every_handler(device, put)
        every_handler(device, put)  # by graphs the first launch is none
        device.close()
    print("every handler ran")


def every_handler(device: KernelDevice, put: Callable[[int], Any]) -> None:
    """Scan, mark, apply, gather, scatter, save and restore on memory that `put` makes; asserts what comes out."""
    for bitmap in (False, True):
        region = device.pages(memory_of(put(100 * 4096 + 13)), bitmap=bitmap)
        assert region.apply(region.scan(), [*reversed(range(100)), 100]).count == 101
        if bitmap:
            region.mark([3, 40, 100])
            assert list(region.scan().indices) == [3, 40, 100]
    shape = RowShape((RowGroup(6, 64, 6 * 32 * 64, 32 * 64), RowGroup(2, 12, 2 * 32 * 12, 32 * 12)))
    rows = device.rows([memory_of(put(3 * group.slot_stride)) for group in shape.groups], shape)
    frame, back = (np.zeros(5 * shape.token_bytes, dtype=np.uint8) for _ in range(2))
    rows.gather([RowRange(1, 3, 8, frame)])
    rows.scatter([RowRange(2, 3, 8, frame, rows=(3, 20), spans=((0, 5), (2, 5)))])
    rows.gather([RowRange(2, 3, 8, back, rows=(3, 20), spans=((0, 5), (2, 5)))])
    assert np.array_equal(back[: 6 * 5 * 64], frame[: 6 * 5 * 64]), "rows came back other than they went"
    state = StateShape((StatePart(96, 128), StatePart(33, 36)))
    kept = device.state([memory_of(put(4 * part.slot_stride)) for part in state.parts], state)
    saved = kept.read(kept.save(2))
    kept.restore(0, saved)
    assert np.array_equal(kept.read(kept.save(0)), saved), "a state came back other than it went"


if __name__ == "__main__":
    {"executor": executor, "kernels": kernels}[sys.argv[1]]()
