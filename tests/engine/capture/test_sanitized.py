"""The ring and the scanner under the thread sanitizer: a race between device threads, or with the host, fails here."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest

from engine.capture import source
from engine.capture.source import HandlerSource, PageShape
from tests.engine.capture.shim_build import SHIM, compiler

pytestmark = pytest.mark.process

_OPTIONS = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-DSHIM_THREADS", "-pthread", "-Wno-unknown-pragmas"]


# Seconds of processor and of the clock that a program may take; it takes one or two. A race can also show as a loop without an end.
_CPU_S, _WALL_S = 30, 120


def build_sanitized(handler: HandlerSource, main: str, directory: Path) -> Path:
    """Build handler, shim and a main program into one, with the sanitizer. Skips where there is none."""
    program = directory / main
    included = (f'#include "{name}"' for name in ("launch.hpp", "runtime.cpp", f"{main}.cpp"))
    text = "\n".join([handler.text, *included, ""])
    command = [
        compiler(),
        *_OPTIONS,
        '-DCONCORDIA_HOST="device.hpp"',
        f"-I{SHIM}",
        "-x",
        "c++",
        "-",
        "-o",
        str(program),
    ]
    built = subprocess.run(command, check=False, capture_output=True, text=True, input=text)
    if "cannot find" in built.stderr and "tsan" in built.stderr:
        pytest.skip("the compiler has no thread sanitizer here (libtsan)")
    assert built.returncode == 0, built.stderr
    return program


def run_sanitized(program: Path) -> subprocess.CompletedProcess[str]:
    """Run it to its end, or for as long as it may. Skips where the sanitizer cannot run."""
    process = subprocess.Popen(
        [str(program)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
        # The kernel ends what spins, also when nobody is left to do it.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S)),  # noqa: PLW1509
    )
    with process:
        try:
            out, err = process.communicate(timeout=_WALL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    if "unexpected memory mapping" in err:
        pytest.skip("the thread sanitizer cannot run under this kernel's address layout")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_the_executors_ring_has_no_race(tmp_path: Path) -> None:
    done = run_sanitized(build_sanitized(source.executor(threads=32), "ring_main", tmp_path))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "WARNING" not in done.stderr
    launches = int(done.stdout.split("launches ")[1])
    assert launches >= 1, done.stdout


def test_the_scanner_has_no_race(tmp_path: Path) -> None:
    shape = PageShape(512, 24 * 512, batch=4, threads=64)
    done = run_sanitized(build_sanitized(source.page_scanner(shape), "pages_main", tmp_path))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout == "changed 8\n"


def test_the_sanitizer_sees_a_race_where_a_barrier_is_missing(tmp_path: Path) -> None:
    """Usually at once; a run in which the ring stands still without a race being seen is no proof of either."""
    text = source.executor(threads=32).text
    broken = text.replace("        __threadfence_system();\n        __syncthreads();\n", "", 1)
    assert broken != text
    program = build_sanitized(HandlerSource("broken", broken, 32), "ring_main", tmp_path)
    runs = (run_sanitized(program) for _ in range(3))
    seen = next((done for done in runs if "data race" in done.stderr or "task " in done.stdout), None)
    assert seen is not None and seen.returncode != 0
