"""Before anything is timed: the device contract, the executor across modules, the sanitizer. Each a process of its own, so that an
error on the device ends that check alone. Run as `python -m bench.gpu.correctness executor|kernels`, it is one of them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np

from bench.gpu.lab import Row
from bench.report import ROOT

_TOOLS = ("memcheck", "racecheck")


def check(limit_s: float) -> list[Row]:
    """Run all checks; the value is 1 where a check passed."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/engine/capture", "-p", "no:cacheprovider"]
    rows = [_run("device contract (pytest -m gpu)", pytest, limit_s)]
    rows.append(_run("executor runs operators of other modules", _own("executor"), limit_s))
    if not shutil.which("compute-sanitizer"):
        return [*rows, Row("correctness", "compute-sanitizer", 0.0, "", note="not installed, so not run")]
    for tool in _TOOLS:
        command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9", *_own("kernels")]
        rows.append(_run(f"compute-sanitizer {tool}", command, limit_s))
    return rows


def passed(rows: list[Row]) -> bool:
    """Whether nothing that ran failed."""
    return all(row.value == 1.0 for row in rows if row.unit)


def _own(name: str) -> list[str]:
    return [sys.executable, "-m", "bench.gpu.correctness", name]


def _run(case: str, command: list[str], limit_s: float) -> Row:
    try:
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Row("correctness", case, 0.0, "passed", note=f"did not end within {limit_s:.0f} s")
    lines = (done.stdout + done.stderr).strip().splitlines()
    return Row("correctness", case, float(done.returncode == 0), "passed", note=lines[-1][:100] if lines else "")


def executor() -> None:
    """Operators of several modules, replaced while tasks run; then a device-wide wait while the executor is resident."""
    import time

    import torch

    from engine.capture import source
    from engine.capture.cuda_driver import CudaDriver
    from engine.capture.executor import Executor
    from engine.capture.source import PageShape, StatePart, StateShape

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
    """Each page and row kernel once, small, for the sanitizer."""
    import torch

    from engine.capture.cuda_driver import CudaDriver
    from engine.capture.handlers import RowRange
    from engine.capture.kernel_device import KernelDevice
    from engine.capture.launch import SideStream
    from engine.capture.regions import memory_of
    from engine.capture.source import RowGroup, RowShape

    driver = CudaDriver()
    device = KernelDevice(driver, SideStream(driver))
    for bitmap in (False, True):
        data = torch.randint(0, 255, (100 * 4096 + 13,), dtype=torch.uint8, device="cuda")
        region = device.pages(memory_of(data), bitmap=bitmap)
        assert region.apply(region.scan()).count == 101
    shape = RowShape((RowGroup(6, 64, 6 * 32 * 64, 32 * 64), RowGroup(2, 12, 2 * 32 * 12, 32 * 12)))
    arrays = [
        torch.randint(0, 255, (3 * group.slot_stride,), dtype=torch.uint8, device="cuda") for group in shape.groups
    ]
    rows = device.rows([memory_of(array) for array in arrays], shape)
    frame = np.zeros(5 * shape.token_bytes, dtype=np.uint8)
    rows.gather([RowRange(1, 3, 8, frame)])
    rows.scatter([RowRange(2, 3, 8, frame)])
    device.close()
    print("every kernel ran")


if __name__ == "__main__":
    {"executor": executor, "kernels": kernels}[sys.argv[1]]()
