"""Where a framework hands over PTX: instrumented kernels for CuPy and Triton, and the tables that their marks go by.

CuPy: `load(ptx)` or `raw_module(ptx)` gives a module whose kernels mark what they write. Triton: while `triton_kernels_mark()` holds,
kernels that it compiles are instrumented between its own PTX and its assembler. Either way `fill` says which ranges are registered.
"""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from engine.capture.errors import NoDevice
from engine.capture.ptx_marks import (
    MARKS_VERSION,
    REGIONS,
    Instrumented,
    MarkedRange,
    instrument,
    regions_table,
)

log = structlog.get_logger()

_texts: tempfile.TemporaryDirectory[str] | None = None  # what RawModules were loaded from; gone with the process


def load(ptx: str) -> tuple[Any, Instrumented]:
    """An instrumented module in the current CUDA context (a `cupy.cuda.Module`), and what was put into it."""
    try:
        import cupy
    except ImportError as error:
        raise NoDevice(f"CuPy is not installed: {error}") from error
    done = instrument(ptx)
    module = cupy.cuda.Module()
    module.load(done.text.encode() + b"\0")
    return module, done


def raw_module(ptx: str) -> tuple[Any, Instrumented]:
    """As `load`, as a `cupy.RawModule`, for code that launches `cupy.RawKernel`s."""
    global _texts
    try:
        import cupy
    except ImportError as error:
        raise NoDevice(f"CuPy is not installed: {error}") from error
    done = instrument(ptx)
    _texts = _texts or tempfile.TemporaryDirectory(prefix="concordia-ptx-")
    # CuPy keeps modules by their path: a name that no other text ever has.
    path = Path(_texts.name) / f"{hashlib.blake2b(done.text.encode(), digest_size=16).hexdigest()}.ptx"
    path.write_text(done.text)
    module = cupy.RawModule(path=str(path))
    module.compile()
    return module, done


def fill(module: Any, ranges: Sequence[MarkedRange]) -> None:
    """Register ranges with an instrumented module; takes effect for launches after it.

    module  a `cupy.cuda.Module`, a `cupy.RawModule`, or the driver's handle (int), as `module` of a kernel that Triton compiled
    """
    from cupy.cuda import driver, runtime

    table = regions_table(ranges)
    source = ctypes.create_string_buffer(table, len(table))
    if isinstance(module, int):
        target = driver.moduleGetGlobal(module, REGIONS)
    else:
        target = (getattr(module, "get_global", None) or module.get_global_var)(REGIONS)
    runtime.memcpy(
        int(getattr(target, "ptr", target)), ctypes.addressof(source), len(table), runtime.memcpyHostToDevice
    )


def instrumented_stage(compile_ptx: Callable[..., str], seen: Callable[[Instrumented], None]) -> Callable[..., str]:
    """A compiler stage that hands out PTX, with the pass behind it. Text that cannot be instrumented stays as it is, and is told."""

    def stage(*arguments: Any, **options: Any) -> str:
        text = compile_ptx(*arguments, **options)
        try:
            done = instrument(text)
        except ValueError as error:
            log.warning("capture.ptx_left_alone", reason=str(error))
            return text
        seen(done)
        return done.text

    return stage


@contextmanager
def triton_kernels_mark(seen: Callable[[Instrumented], None]) -> Iterator[None]:
    """Triton kernels compiled inside mark the pages that they write; `seen` is told what was put into each.

    Triton's cache is by its own key, which this changes: kernels compiled outside stay apart from those compiled inside.
    """
    from triton import knobs

    before = knobs.runtime.add_stages_inspection_hook

    def hook(*arguments: Any) -> Any:
        if not arguments:  # asked for what belongs into the cache's key
            key, digest = before() if before is not None else ("", "")
            return f"{key}concordia-marks", f"{digest}concordia-marks-{MARKS_VERSION}"
        if before is not None:
            before(*arguments)
        stages = arguments[1]
        stages["ptx"] = instrumented_stage(stages["ptx"], seen)
        return None

    knobs.runtime.add_stages_inspection_hook = hook
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = before
