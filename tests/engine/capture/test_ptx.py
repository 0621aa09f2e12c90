"""The PTX pass, on text of real compilers: what it marks, what it leaves alone, that the result assembles."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.capture.ptx_hooks import fill, instrumented_stage, raw_module, triton_kernels_mark
from engine.capture.ptx_marks import (
    REGIONS,
    REGIONS_BYTES,
    SAFE_POINTS,
    Instrumented,
    MarkedRange,
    instrument,
    regions_table,
)
from engine.capture.ptx_text import functions
from tests.engine.capture.ptx_machine import Machine
from tests.engine.capture.tools import ptxas

SAMPLES = Path(__file__).parent / "ptx"
HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.ptx").read_text()


def kernel(body: str, parameters: str = ".param .b64 out") -> str:
    return (
        f"{HEAD}.visible .entry k(\n\t{parameters}\n)\n{{\n\t.reg .pred %p<9>;\n\t.reg .b32 %r<9>;\n"
        f"\t.reg .b64 %rd<9>;\n\tld.param.b64 %rd1, [out];\n{body}\n\tret;\n}}\n"
    )


def assemble(text: str, directory: Path, architecture: str = "sm_90a") -> None:
    """Assemble; an assembler older than the text's compiler is told that the text is as old as itself."""
    assembler = ptxas()
    file = directory / "text.ptx"
    for version in (None, "8.8", "8.0"):
        file.write_text(text if version is None else re.sub(r"^\.version .*$", f".version {version}", text, flags=re.M))
        done = subprocess.run(
            [assembler, f"-arch={architecture}", str(file), "-o", str(directory / "out")],
            check=False,
            capture_output=True,
            text=True,
        )
        if "Unsupported .version" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name, stores, kinds",
    [
        ("nvrtc_12_9", {"saxpy": 1, "_Z3putP6float4S_": 1, "tiled": 3}, {"entry": 2, "barrier": 2, "return": 2}),
        ("nvrtc_13_5_lines", {"saxpy": 1, "_Z3putP6float4S_": 1, "tiled": 3}, {"entry": 2, "barrier": 2, "return": 2}),
        ("triton_3_9_scale", {"scale": 8}, {"entry": 1, "return": 1}),
        ("triton_3_9_total", {"total": 1}, {"entry": 1, "barrier": 3, "return": 1}),
    ],
)
def test_text_of_real_compilers_is_marked_and_assembles(
    name: str, stores: dict[str, int], kinds: dict[str, int], tmp_path: Path
) -> None:
    done = instrument(sample(name))
    assert done.stores == stores
    found = [point.kind for point in done.safe_points]
    assert {kind: found.count(kind) for kind in set(found)} == kinds
    assert [point.number for point in done.safe_points] == list(range(len(found)))
    assert done.unmarked == []
    assemble(done.text, tmp_path)


@pytest.mark.parametrize("name", ["nvrtc_12_9", "triton_3_9_scale"])
def test_nothing_but_insertions_is_done_to_the_text(name: str) -> None:
    text = sample(name)
    rest = instrument(text).text
    for line in text.splitlines():
        at = rest.find(line)
        assert at >= 0, f"the line {line!r} is gone or out of order"
        rest = rest[at + len(line) :]


def test_the_functions_of_a_module_are_found_with_their_bodies() -> None:
    text = (
        HEAD + ".func helper(.param .b64 a);  // only declared { }\n"
        '.func (.param .b32 r) f(.param .b64 a) { ret; }\n/* .entry no() { } */\n.entry k() { .pragma "a{b"; { ret; } }\n'
    )
    assert [(f.name, f.is_entry, len(f.statements)) for f in functions(text)] == [("f", False, 1), ("k", True, 2)]


@pytest.mark.parametrize(
    "store",
    [
        "st.global.b32 [%rd1], %r1;",
        "st.global.v4.b32 [%rd1+-16], {%r1, %r2, %r3, %r4};",
        "@%p1 st.b32 [%rd1 + 0], %r1;",
        "@!%p1 st.global.wt.b32 [%rd1+0x10], %r1;",
        "red.global.add.u32 [%rd1+8], %r1;",
        "atom.global.add.u32 %r2, [%rd1], %r1;",
        "atom.global.exch.b64 %rd1, [%rd1], %rd2;",
        "st.release.sys.global.u64 [%rd1], %rd2;",
        "st.volatile.global.u32 [variable+4], %r1;",
        "@%p2 atom.global.cas.b32 %r2, [%rd1], %r3, %r4;",
    ],
)
def test_every_kind_of_store_is_marked(store: str, tmp_path: Path) -> None:
    values = "".join(f"\tmov.u32 %r{i}, 1;\n" for i in range(1, 5))
    body = f"{values}\tmov.u64 %rd2, 1;\n\tsetp.ne.u32 %p1, %r1, 0;\n\tsetp.ne.u32 %p2, %r1, 0;\n\t{store}"
    text = kernel(body).replace(".visible", ".visible .global .align 8 .b8 variable[64];\n.visible", 1)
    done = instrument(text)
    assert sum(done.stores.values()) == 1
    assemble(done.text, tmp_path)


@pytest.mark.parametrize(
    "store",
    [
        "st.shared.b32 [%r1], %r2;",
        "st.local.b32 [%rd1], %r2;",
        "ld.global.b32 %r1, [%rd1];",
        "st.shared::cta.b32 [%r1], %r2;",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 64, [%r2];",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1, %r2}], [%r3];",
        "cp.async.bulk.prefetch.L2.global [%rd1], 64;",
        "cp.async.cg.shared.global [%r1], [%rd1], 16;",
        "wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%r1], {%r1, %r2, %r3, %r4, %r1, %r2, %r3, %r4}, %r3;",
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3];",
        "call.uni (%r1), vprintf, (%rd1, %rd2);",
    ],
)
def test_stores_elsewhere_and_loads_are_left_alone(store: str) -> None:
    done = instrument(kernel("\t" + store))
    assert (done.stores, done.unmarked) == ({}, [])


@pytest.mark.parametrize(
    "write",
    [
        "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 64;",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r1], 64;",
        "multimem.red.global.add.u32 [%rd1], %r1;",
        "wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%rd1], {%r1, %r2, %r3, %r4, %r1, %r2, %r3, %r4}, %r3;",
        "wmma.store.d.sync.aligned.row.m16n16k16.f32 [%rd1], {%r1, %r2, %r3, %r4, %r1, %r2, %r3, %r4}, %r3;",
        "discard.global.L2 [%rd1], 128;",
        "call.uni elsewhere, (%rd1);",
        "@%p1 call (%r1), elsewhere, (%rd1);",
        "call (%r1), %rd2, (%rd1), prototype;",
    ],
)
def test_writes_round_the_registers_are_reported_not_hidden(write: str, tmp_path: Path) -> None:
    done = instrument(kernel("\t" + write))
    assert done.stores == {}
    assert done.unmarked == [f"k: {write}"]


def test_a_mark_stands_before_an_atomic_that_overwrites_its_address() -> None:
    text = instrument(kernel("\tatom.global.exch.b64 %rd1, [%rd1], %rd2;")).text
    assert text.index("add.s64 %concordia_a, %rd1, 0;") < text.index("atom.global.exch")


def test_a_guarded_stores_mark_is_skipped_with_it() -> None:
    text = instrument(kernel("\t@%p1 st.global.b32 [%rd1], %r1;")).text
    assert "@!%p1 bra $concordia_m0;" in text
    text = instrument(kernel("\t@!%p1 st.global.b32 [%rd1], %r1;")).text
    assert "@%p1 bra $concordia_m0;" in text


def test_a_loop_that_begins_a_kernel_passes_its_entry_once() -> None:
    text = instrument(kernel("$again:\n\tbra $again;").replace("\tld.param.b64 %rd1, [out];\n", "")).text
    assert text.index("safe point 0: entry") < text.index("$again:")


def test_text_that_is_not_for_the_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="address_size 64"):
        instrument(".version 8.0\n.target sm_90\n.address_size 32\n")
    with pytest.raises(ValueError, match="already"):
        instrument(instrument(kernel("")).text)


def test_a_compilers_stage_hands_out_instrumented_text_or_leaves_it() -> None:
    seen = []
    stage = instrumented_stage(lambda source, metadata: source, seen.append)
    assert "concordia_mark" in stage(sample("triton_3_9_scale"), {})
    assert stage("not ptx", {}) == "not ptx"
    assert len(seen) == 1


def test_cupys_raw_modules_are_instrumented_and_filled_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, written = [], []

    class RawModule:
        def __init__(self, *, path: str) -> None:
            self.text = Path(path).read_text()

        def compile(self) -> None:
            loaded.append(self.text)

        def get_global(self, name: str) -> Any:
            assert name == REGIONS
            return SimpleNamespace(ptr=4096)

    runtime = SimpleNamespace(
        memcpyHostToDevice=1, memcpy=lambda target, source, size, kind: written.append((target, size, kind))
    )
    driver = SimpleNamespace(moduleGetGlobal=lambda module, name: 8192 + module)
    cuda = SimpleNamespace(runtime=runtime, driver=driver)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=RawModule, cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    module, done = raw_module(sample("nvrtc_12_9"))
    assert loaded == [done.text] and "concordia_mark" in done.text
    old = SimpleNamespace(get_global_var=lambda name: 12288)
    for given in (module, 5, old):
        fill(given, [MarkedRange(1 << 20, 4096, 12, 1 << 30)])
    assert written == [(address, REGIONS_BYTES, 1) for address in (4096, 8197, 12288)]


def test_tritons_hook_is_there_for_a_while_and_keeps_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def earlier(*arguments: Any) -> Any:
        calls.append(len(arguments))
        return None if arguments else ("key", "digest")

    runtime = SimpleNamespace(add_stages_inspection_hook=earlier)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)))
    seen: list[Instrumented] = []
    with triton_kernels_mark(seen.append):
        key, digest = runtime.add_stages_inspection_hook()
        stages = {"ptx": lambda source, metadata: sample("triton_3_9_scale")}
        # As Triton's backend calls it: itself, stages, options, language, capability.
        runtime.add_stages_inspection_hook(object(), stages, object(), object(), 90)
    assert runtime.add_stages_inspection_hook is earlier and calls == [0, 5]
    assert key.startswith("key") and digest.startswith("digest") and (key, digest) != ("key", "digest")
    assert "concordia_mark" in stages["ptx"]("", {}) and len(seen) == 1


def test_the_table_of_ranges_has_its_size_and_a_bound() -> None:
    table = regions_table([MarkedRange(4096, 8192, 12, 65536)])
    assert len(table) == REGIONS_BYTES
    assert struct.unpack_from("<QQQQQ", table) == (1, 4096, 8192, 12, 65536)
    with pytest.raises(ValueError, match="8 at most"):
        regions_table([MarkedRange(4096, 1, 12, 0)] * 9)


def run_saxpy(machine: Machine, count: int) -> tuple[int, np.ndarray]:
    """y = 2 x + y over `count` of 4,096 floats; returns where y lies, and y."""
    y, x = machine.memory.allocate(4 * 4096), machine.memory.allocate(4 * 4096)
    machine.memory.array(x, "<f4", 4096)[:] = np.arange(4096)
    machine.memory.array(y, "<f4", 4096)[:] = 1
    return y, machine.memory.array(y, "<f4", 4096)


@pytest.mark.process
@pytest.mark.parametrize("count", [1, 1000, 1030])
def test_an_instrumented_kernel_marks_just_the_pages_it_writes(count: int) -> None:
    machine = Machine(instrument(sample("nvrtc_12_9")).text)
    y, values = run_saxpy(machine, count)
    bitmap, points = machine.memory.allocate(64), machine.memory.allocate(64)
    other = MarkedRange(1, 4096, 12, 1)
    table = regions_table([other, MarkedRange(y, 4 * 4096, 9, bitmap)])
    machine.memory.view(machine.memory.names[REGIONS], len(table))[:] = table
    machine.memory.view(machine.memory.names[SAFE_POINTS], 8)[:] = struct.pack("<Q", points)
    x = next(address for address in machine.memory.ranges if address > y)
    blocks = -(-count // 64)
    machine.launch("saxpy", blocks, 64, [("Q", y), ("Q", x), ("f", 2.0), ("i", count)])
    expected = np.ones(4096, np.float32)
    expected[:count] += 2 * np.arange(count)
    assert np.array_equal(values, expected), "the kernel does what it did"
    marked = np.unpackbits(machine.memory.array(bitmap, "u1", 8), bitorder="little")
    pages = -(-4 * count // 512)
    assert marked[:pages].all() and not marked[pages:].any()
    assert machine.memory.array(points, "<u4", 2).tolist() == [blocks, blocks], "entry and return, once a block"


def test_a_kernel_with_barriers_calls_and_atomics_marks_all_that_it_writes() -> None:
    machine = Machine(instrument(sample("nvrtc_12_9")).text)
    out, given, hits = (machine.memory.allocate(size) for size in (128 * 16, 128 * 16, 512))
    source = np.random.default_rng(1).random((128, 4), dtype=np.float32)
    machine.memory.array(given, "<f4", 512)[:] = source.reshape(-1)
    bitmap, small = machine.memory.allocate(64), machine.memory.allocate(64)
    table = regions_table([MarkedRange(out, 128 * 16, 9, bitmap), MarkedRange(hits, 512, 9, small)])
    machine.memory.view(machine.memory.names[REGIONS], len(table))[:] = table
    machine.launch("tiled", 2, 64, [("Q", out), ("Q", given), ("Q", hits), ("i", 128)])
    reversed_tiles = source.reshape(2, 64, 4)[:, ::-1].reshape(128, 4)
    assert np.array_equal(machine.memory.array(out, "<f4", 512).reshape(128, 4), reversed_tiles)
    assert machine.memory.array(hits, "<u4", 2).tolist() == [int((source[:, 0] > 0.5).sum()), 3]
    assert machine.memory.array(bitmap, "<u4", 2).tolist() == [0b1111, 0]
    assert machine.memory.array(small, "<u4", 1).tolist() == [1]


def test_without_registered_ranges_nothing_is_marked() -> None:
    machine = Machine(instrument(sample("nvrtc_12_9")).text)
    y, values = run_saxpy(machine, 64)
    x = next(address for address in machine.memory.ranges if address > y)
    machine.launch("saxpy", 1, 64, [("Q", y), ("Q", x), ("f", 2.0), ("i", 64)])
    assert values[63] == 127


@pytest.mark.gpu
def test_an_instrumented_kernel_marks_just_what_it_writes_on_a_gpu() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from engine.capture.ptx_hooks import load

    torch.zeros(1, device="cuda")
    module, done = load(sample("nvrtc_12_9"))
    assert done.stores["saxpy"] == 1
    values, ones = torch.zeros(1 << 16, device="cuda"), torch.ones(1 << 16, device="cuda")
    bitmap = torch.zeros(2, dtype=torch.int32, device="cuda")
    fill(module, [MarkedRange(values.data_ptr(), 4 << 16, 12, bitmap.data_ptr())])
    torch.cuda.synchronize()
    count = 3000  # floats: pages 0 to 2 of 4 KB
    arguments = (cupy.uint64(values.data_ptr()), cupy.uint64(ones.data_ptr()), cupy.float32(2), cupy.int32(count))
    module.get_function("saxpy")((12,), (256,), arguments)
    cupy.cuda.runtime.deviceSynchronize()
    assert values[:count].eq(2).all() and values[count:].eq(0).all()
    assert bitmap.tolist() == [0b111, 0]
