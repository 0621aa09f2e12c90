"""The ring and the scanner under the thread sanitizer: a race between device threads, or with the host, fails here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from engine.capture import source
from engine.capture.source import HandlerSource, PageShape
from tests.engine.capture.shim_build import SHIM, compiler

_OPTIONS = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-DSHIM_THREADS", "-pthread", "-Wno-unknown-pragmas"]


def run_sanitized(handler: HandlerSource, main: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Build handler, shim and a main program into one, with the sanitizer; run it. Skips where the sanitizer cannot run."""
    program = directory / main
    text = "\n".join(
        [handler.text, *(f'#include "{name}"' for name in ("launch.hpp", "runtime.cpp", f"{main}.cpp")), ""]
    )
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
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True, timeout=200, env=environment)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer cannot run under this kernel's address layout")
    return done


def test_the_executors_ring_has_no_race(tmp_path: Path) -> None:
    done = run_sanitized(source.executor(threads=32), "ring_main", tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "WARNING" not in done.stderr
    launches = int(done.stdout.split("launches ")[1])
    assert launches >= 1, done.stdout


def test_the_scanner_has_no_race(tmp_path: Path) -> None:
    shape = PageShape(512, 24 * 512, batch=4, threads=64)
    done = run_sanitized(source.page_scanner(shape), "pages_main", tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout == "changed 8\n"


def test_the_sanitizer_sees_a_race_where_a_barrier_is_missing(tmp_path: Path) -> None:
    text = source.executor(threads=32).text
    broken = text.replace("        __threadfence_system();\n        __syncthreads();\n", "", 1)
    assert broken != text
    done = run_sanitized(HandlerSource("broken", broken, 32), "ring_main", tmp_path)
    assert done.returncode != 0
    assert "data race" in done.stderr or "task " in done.stdout
