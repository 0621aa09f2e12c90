"""Compiles a handler's own source for the CPU, through the shim, with the system's C++ compiler."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from engine.capture.source import HandlerSource

SHIM = Path(__file__).parent / "shim"
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(')


def compiler() -> str:
    """The C++ compiler; skips the test if there is none."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not found:
        pytest.skip("no C++ compiler here (g++ or clang++): the kernels' own source cannot be run on the CPU")
    return found


def shim_source(source: HandlerSource) -> str:
    """The handler's text with an entry for each kernel: launch_<kernel>(blocks, threads, seed, arguments)."""
    entries = [
        f'extern "C" void launch_{name}(u32 blocks, u32 threads, u64 seed, const u64* arguments) '
        f"{{ shim::launch({name}, blocks, threads, seed, arguments); }}"
        for name in _KERNEL.findall(source.text)
    ]
    return "\n".join([source.text, '#include "launch.hpp"', *entries, ""])


_SHARED = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-clobbered"]


def build(source: HandlerSource, directory: Path) -> ctypes.CDLL:
    """Compile and load; a library already in `directory` is loaded as it is."""
    directory = directory / _shim_digest()
    directory.mkdir(exist_ok=True)
    runtime = directory / "runtime.so"
    if not runtime.exists():
        compile_file(SHIM / "runtime.cpp", runtime, _SHARED)
    ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    library = directory / f"{source.name}-{source.digest}.so"
    if not library.exists():
        file = library.with_suffix(f".{os.getpid()}.cpp")
        file.write_text(shim_source(source))
        compile_file(file, library, _SHARED)
    return ctypes.CDLL(str(library))


def compile_file(file: Path, output: Path, options: list[str]) -> None:
    """Run the compiler; its messages are the failure. The output is whole or not there: other processes may want it, too."""
    unfinished = output.with_name(f"{output.name}.{os.getpid()}")
    command = [compiler(), *options, '-DCONCORDIA_HOST="device.hpp"', f"-I{SHIM}", str(file), "-o", str(unfinished)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    unfinished.rename(output)


@cache
def _shim_digest() -> str:
    """Changes with the shim's own files and with the compiler."""
    version = subprocess.run([compiler(), "--version"], check=True, capture_output=True).stdout
    files = [file.read_bytes() for file in sorted(SHIM.iterdir())]
    return hashlib.sha256(b"".join([version, " ".join(_SHARED).encode(), *files])).hexdigest()[:12]
