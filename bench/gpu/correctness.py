"""Before anything is timed: the device contract, the executor across modules, the sanitizer. Each a process of its own, so that an
error on the device ends that check alone. Run as `python -m bench.gpu.correctness executor|kernels`, it is one of them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.gpu.lab import Row
from bench.report import ROOT
from engine.capture.executor import unsupported
from engine.capture.handlers import RowRange
from engine.capture.regions import memory_of
from engine.capture.source import RowGroup, RowShape, StatePart, StateShape

if TYPE_CHECKING:
    from engine.capture.cuda_driver import CudaDriver
    from engine.capture.kernel_device import KernelDevice

_TOOLS = ("memcheck", "racecheck", "synccheck")
_FOUND_ERRORS = 9  # what the sanitizer is told to exit with
EXECUTOR = "executor runs operators of other modules"
# Where tests marked `gpu` are.
GPU_TESTS = ("tests/engine/capture", "tests/engine/test_decode_graph.py", "tests/tiers/test_staging.py")
# What tells most of a failure, first of these first: pytest's summary without the path of the test, then what Python raised.
_TELLING = (re.compile(r"^(?:FAILED|ERROR) (?:\S*?::)?"), re.compile(r"^(?=[\w.]*(?:Error|Exception)\b)"))


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
    contract = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *GPU_TESTS]
    found = [("device contract (pytest -m gpu)", contract)]
    if not unsupported():
        found.append((EXECUTOR, _own("executor")))
    found.append(("every handler, by stream and by graph", _own("kernels")))
    if shutil.which("compute-sanitizer"):
        options = [f"--error-exitcode={_FOUND_ERRORS}", "--target-processes=all"]
        found += [
            (f"compute-sanitizer {tool}", ["compute-sanitizer", f"--tool={tool}", *options, *_own("kernels")])
            for tool in _TOOLS
        ]
    return found


def passed(rows: list[Row]) -> bool:
    """Whether nothing that ran failed."""
    return all(row.value == 1.0 for row in rows if row.unit)


def executor_proven(rows: list[Row]) -> bool:
    """Whether the executor's own check ran, and all that ran is right."""
    return passed(rows) and any(row.case == EXECUTOR and row.value == 1.0 for row in rows)


def _own(name: str) -> list[str]:
    return [sys.executable, "-m", "bench.gpu.correctness", name]


def _run(case: str, command: list[str], deadline: float) -> Row:
    left_s = deadline - time.monotonic()
    if left_s <= 1:
        return Row("correctness", case, 0.0, "", note="out of time, so not run")
    by_sanitizer = Path(command[0]).name == "compute-sanitizer"
    try:
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=left_s)
    except subprocess.TimeoutExpired:
        # A sanitizer is slow, and what it runs has passed without it; anything else that hangs is wrong.
        return Row(
            "correctness", case, 0.0, "" if by_sanitizer else "passed", note=f"did not end within {left_s:.0f} s"
        )
    right = done.returncode == 0
    if by_sanitizer and not right and (done.returncode != _FOUND_ERRORS or "Device not supported" in done.stdout):
        return Row(
            "correctness", case, 0.0, "", note=f"it cannot be run here: {said(done.stdout, done.stderr, right)}"[:100]
        )
    if not right:
        print(f"-- {case}\n{(done.stdout + done.stderr)[-6000:]}", file=sys.stderr, flush=True)
    return Row("correctness", case, float(right), "passed", note=said(done.stdout, done.stderr, right)[:100])


def said(out: str, err: str, right: bool) -> str:
    """The line that tells most of what a check printed: its last one, or what went wrong."""
    lines = [*out.splitlines(), *err.splitlines()]
    for telling in () if right else _TELLING:
        for line in lines:
            if match := telling.match(line):
                return line[match.end() :]
    return next((line.strip() for text in (out, err) for line in reversed(text.splitlines()) if line.strip()), "")


def executor() -> None:
    """Operators of several modules, replaced while tasks run; then whatever waits for the device, while the executor is resident."""
    import torch

    from engine.capture import source
    from engine.capture.cuda_driver import CudaDriver
    from engine.capture.executor import Executor
    from engine.capture.source import PageShape

    torch.zeros(1, device="cuda")
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
    made.close()
    print(f"{made.laps} stays, last left because {made.left_because}; {_waits(driver)}")


def _waits(driver: CudaDriver) -> str:
    """What waits for the whole device, done while a block is resident for a long lease: it waits for that lease at most."""
    import torch

    from engine.capture import source
    from engine.capture.executor import Executor, ExecutorOptions

    lease_s = 0.2
    made = Executor(driver, ExecutorOptions(lease_ms=1e3 * lease_s, idle_us=1e6))
    square = torch.ones(512, 512, device="cuda")

    def load_code() -> None:
        module = driver.load(source.snapshotter(StateShape((StatePart(48, 48),))))
        out, stream = driver.mapped_buffer(8), driver.stream()
        module.launch("operator_address", stream, 1, 32, (out.address,))
        stream.synchronize()  # before its memory goes

    def allocate() -> None:
        held = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        del held
        torch.cuda.empty_cache()

    waits: dict[str, Callable[[], object]] = {
        "synchronize": torch.cuda.synchronize,
        "cuBLAS": lambda: torch.matmul(square, square).sum().item(),
        "allocator": allocate,
        "pinned": lambda: driver.mapped_buffer(1 << 20),
        "module": load_code,
    }
    took = {}
    for name, call in waits.items():
        made.submit(0, ()).wait()
        began = time.perf_counter()
        call()
        took[name] = time.perf_counter() - began
        # The grace is for what the call itself takes, loading a library among it; without a lease it would never end.
        assert took[name] < lease_s + 5, (
            f"{name} took {took[name]:.1f} s beside an executor with a lease of {lease_s} s"
        )
    made.close()
    return "waits, ms: " + ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in took.items())


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
