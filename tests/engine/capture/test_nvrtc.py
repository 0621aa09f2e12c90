"""Every specialisation compiles by NVRTC for every architecture, without a GPU; its PTX assembles."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.capture import nvrtc, source
from engine.capture.cache import HandlerCache
from engine.capture.errors import CompileFailed, NoCompiler
from engine.capture.nvrtc import Machine, Nvrtc, Usage
from engine.capture.source import OPTIONS, HandlerSource
from engine.capture.specialisations import ARCHITECTURES, all_handlers
from tests.engine.capture.tools import ptxas

pytestmark = pytest.mark.process

_MOST_REGISTERS = 128  # two blocks of 256 threads a multiprocessor


def library(major: int) -> Nvrtc:
    try:
        return nvrtc.load(major)
    except NoCompiler as error:
        pytest.skip(f"{error} (tests: pip install 'concordia[cuda-tools,cuda13-tools]')")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_handler_compiles_without_spilling_a_register(architecture: str) -> None:
    compiler = library(12)
    executor_registers = 0
    operators = {}
    for handler in all_handlers():
        usage = compiler.compile(handler.text, handler.name, architecture, OPTIONS).usage()
        assert usage, "the assembler reports every kernel"
        for kernel, taken in usage.items():
            assert taken.spill_bytes == 0, f"{handler.name} {kernel}: {taken}"
            assert taken.registers <= _MOST_REGISTERS, f"{handler.name} {kernel}: {taken}"
        if "executor" in usage:
            executor_registers = usage["executor"].registers
            assert usage["executor"].shared_bytes <= 128
        else:
            operators[handler.name] = usage["operator_address"].registers
    assert max(operators.values()) <= executor_registers, f"the executor has {executor_registers}: {operators}"


def test_the_compiler_of_cuda_13_takes_them_too() -> None:
    """Every handler, each for one of the architectures in turn."""
    compiler = library(13)
    for number, handler in enumerate(all_handlers()):
        architecture = ARCHITECTURES[number % len(ARCHITECTURES)]
        usage = compiler.compile(handler.text, handler.name, architecture, OPTIONS).usage()
        assert usage
        for kernel, taken in usage.items():
            assert taken.spill_bytes == 0, f"{handler.name} {kernel} for {architecture}: {taken}"
            assert taken.registers <= _MOST_REGISTERS, f"{handler.name} {kernel} for {architecture}: {taken}"


def test_the_ptx_of_every_handler_assembles(tmp_path: Path) -> None:
    compiler, assembler = library(12), ptxas()
    for number, handler in enumerate(all_handlers()[::2]):
        ptx = compiler.compile(handler.text, handler.name, "compute_90", OPTIONS).image.rstrip(b"\0")
        file = tmp_path / f"{number}.ptx"
        file.write_bytes(ptx)
        command = [assembler, "-arch=sm_90", str(file), "-o", str(file.with_suffix(".cubin"))]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"{handler.name}: {done.stderr}"


def test_what_does_not_compile_is_told_with_the_compilers_words() -> None:
    with pytest.raises(CompileFailed, match="expected a"):
        library(12).compile("void f( {", "broken", "sm_90")


def test_a_library_that_cannot_be_loaded_is_no_compiler() -> None:
    with pytest.raises(NoCompiler, match="cannot be loaded"):
        Nvrtc("/nowhere/libnvrtc.so.12")


# ---------------------------------------------------------------- the cache on disk


def compiled_as(image: bytes) -> Machine:
    return Machine(image, "Compiling entry function 'run' for 'sm_90'\nUsed 30 registers, 16 bytes smem\n")


def test_a_handler_is_compiled_once_for_each_source_and_architecture(tmp_path: Path) -> None:
    cache, calls = HandlerCache(tmp_path / "new"), []

    def compile_it(handler: HandlerSource) -> Machine:
        calls.append(handler.name)
        return compiled_as(b"code")

    one, two = HandlerSource("a", "text"), HandlerSource("a", "other text")
    for handler, target in ((one, "sm_90"), (one, "sm_90"), (one, "sm_80"), (two, "sm_90")):
        found = cache.get(handler, target, compile_it)
        assert found.image == b"code"
        assert found.usage == {"run": Usage(30, 16, 0, 0)}
    assert len(calls) == 3
    assert (cache.hits, cache.misses) == (1, 3)


def test_a_torn_file_is_compiled_again(tmp_path: Path) -> None:
    cache, handler = HandlerCache(tmp_path), HandlerSource("a", "text")
    cache.get(handler, "sm_90", lambda _: compiled_as(b"right"))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for cut in (0, 3, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert cache.get(handler, "sm_90", lambda _: compiled_as(b"right")).image == b"right"
    file.write_bytes(b"X" + whole[1:])
    assert cache.get(handler, "sm_90", lambda _: compiled_as(b"again")).image == b"again"


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    cache = HandlerCache(tmp_path / "file")
    assert cache.get(HandlerSource("a", "text"), "sm_90", lambda _: compiled_as(b"code")).image == b"code"


def test_equal_shapes_have_equal_sources_and_others_have_not() -> None:
    shape = source.PageShape(4096, 1 << 20)
    assert source.page_scanner(shape).digest == source.page_scanner(source.PageShape(4096, 1 << 20)).digest
    assert source.page_scanner(shape).digest != source.page_scanner(source.PageShape(4096, 2 << 20)).digest
    assert source.page_scanner(shape).digest != source.page_applier(shape).digest


def test_the_compiler_tells_what_it_knows() -> None:
    known = library(12).supported()
    assert {80, 90, 100, 120} <= set(known) and known == sorted(known)


def test_a_device_that_the_compiler_does_not_know_gets_what_it_can_run() -> None:
    known = [75, 80, 86, 90, 100, 120]
    assert nvrtc.target_for(90, known) == "sm_90"
    assert nvrtc.target_for(89, known) == "sm_86", "machine code of the same family"
    assert nvrtc.target_for(121, known) == "sm_120"
    assert nvrtc.target_for(110, known) == "compute_100", "another family: the driver assembles"
    assert nvrtc.target_for(200, known) == "compute_120"
    with pytest.raises(NoCompiler, match="sm_75 and later"):
        nvrtc.target_for(70, known)
