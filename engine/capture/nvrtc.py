"""NVRTC through ctypes: CUDA C++ text -> machine code for one architecture. Needs the library, no GPU and no driver.

The library is the one that CuPy or torch brought along (PyPI packages nvidia-cuda-nvrtc*), else the system's. CuPy loads what comes
out of it. Compiling runs on whatever thread calls it and holds no lock of Python's.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.capture.errors import CompileFailed, NoCompiler

_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_FUNCTION = re.compile(r"Function properties for (\w+)|Compiling entry function '(\w+)'")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one kernel takes of a multiprocessor."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine code (cubin) or PTX, and what the assembler said of each kernel."""

    image: bytes
    log: str

    def usage(self) -> dict[str, Usage]:
        """By kernel name. Empty for PTX, which is not assembled yet."""
        return parse_usage(self.log)


class Nvrtc:
    """One loaded NVRTC library."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise NoCompiler(f"NVRTC at {path} cannot be loaded: {error}") from error
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.path = path
        self.version = (major.value, minor.value)

    def compile(self, text: str, name: str, architecture: str, options: tuple[str, ...] = ()) -> Machine:
        """Machine code of `text` for `architecture` (`sm_90`), or PTX for `compute_90`. Raises CompileFailed."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
        try:
            flags = [f"--gpu-architecture={architecture}", "--std=c++17", *options]
            if architecture.startswith("sm_"):
                flags.append("--ptxas-options=-v")
            values = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
            status = self._library.nvrtcCompileProgram(program, len(flags), values)
            log = self._text("nvrtcGetProgramLog", program).decode(errors="replace").rstrip("\0")
            if status:
                raise CompileFailed(f"{name} for {architecture}: {self._message(status)}\n{log}")
            kind = "CUBIN" if architecture.startswith("sm_") else "PTX"
            return Machine(self._text(f"nvrtcGet{kind}", program), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def supported(self) -> list[int]:
        """Architectures that it compiles for, ascending: 90 is sm_90."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def _text(self, function: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{function}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(function, program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise NoCompiler(f"{function}: {self._message(status)}")

    def _message(self, status: int) -> str:
        return str(self._library.nvrtcGetErrorString(status).decode())


def target_for(architecture: int, supported: list[int]) -> str:
    """What to compile for, given a device of `architecture` (90 for sm_90) and what a compiler knows.

    Machine code runs on later devices of the same family; for a family that the compiler does not know there is PTX, which the driver
    assembles. Raises NoCompiler: the device is older than all that it knows.
    """
    family = [known for known in supported if known // 10 == architecture // 10 and known <= architecture]
    if family:
        return f"sm_{max(family)}"
    older = [known for known in supported if known < architecture]
    if not older:
        raise NoCompiler(f"this NVRTC compiles for sm_{supported[0]} and later; the device is an sm_{architecture}")
    return f"compute_{max(older)}"


def parse_usage(log: str) -> dict[str, Usage]:
    """Registers, shared memory and spills by kernel, from what `ptxas -v` prints."""
    found: dict[str, Usage] = {}
    name, stack, spill = "", 0, 0
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            name = match.group(1) or match.group(2)
        if match := _SPILL.search(line):
            stack, spill = int(match.group(1)), int(match.group(2)) + int(match.group(3))
        if (match := _USED.search(line)) and name:
            shared = _SHARED.search(line)
            found[name] = Usage(int(match.group(1)), int(shared.group(1)) if shared else 0, stack, spill)
    return found


def library_paths() -> list[str]:
    """NVRTC libraries of this environment, the ones beside Python's packages first."""
    found: list[str] = []
    for entry in sys.path:
        root = Path(entry) / "nvidia"
        if root.is_dir():
            found += sorted(str(path) for path in root.glob("*/lib/libnvrtc.so.*") if ".alt." not in path.name)
    for path in sorted(Path("/usr/local").glob("cuda*/lib64/libnvrtc.so.*")):
        found.append(str(path))
    system = ctypes.util.find_library("nvrtc")
    return list(dict.fromkeys([*found, *([system] if system else [])]))


def load(major: int | None = None) -> Nvrtc:
    """The first NVRTC found, of the CUDA version `major` if given. Raises NoCompiler."""
    reasons = []
    for path in library_paths():
        try:
            library = Nvrtc(path)
        except NoCompiler as error:
            reasons.append(str(error))
            continue
        if major is None or library.version[0] == major:
            return library
    wanted = f" for CUDA {major}" if major else ""
    raise NoCompiler(
        f"no NVRTC{wanted} found; it comes with `pip install concordia[cuda]`" + "".join(f"; {r}" for r in reasons)
    )
