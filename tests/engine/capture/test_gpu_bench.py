"""`make gpu` measured on this CPU: every section runs and reports what it says, whatever the figures are."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as bench
from bench.gpu import correctness, scan
from bench.gpu.lab import Lab, Row
from engine.capture.kernel_device import KernelDevice
from engine.capture.launch import GraphLaunch, SideStream
from tests.engine.capture.shim_driver import ShimDriver

pytestmark = pytest.mark.process


@pytest.fixture
def lab(shim_driver: ShimDriver, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(scan, "_VARIANTS", scan._VARIANTS[:1])
    return Lab(shim_driver, torch.device("cpu"), quick=True, scale=512, rounds=2)


def test_every_section_runs_and_tells_its_cases(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench.run_sections(lab, deadline=1e12)
    failed = [row for row in found if row.case in ("failed", "not run")]
    assert not failed, failed
    assert {row.section for row in found} == set(bench.SECTIONS)
    cases = " ".join(row.case for row in found)
    for words in (
        "nothing changed",
        "pages changed",
        "sequences",
        "by executor",
        "inside its graph",
        "capture on",
        "graphs on",
        "recovery of",
        "graph replay",
        "matrix product",
        "LoRA",
        "decode",
    ):
        assert words in cases
    bench.print_table(found, {"device": "none"})
    bench.save(found, {"device": "none"}, tmp_path / "gpu.json", 1.0, True)
    saved = json.loads((tmp_path / "gpu.json").read_text())
    assert len(saved["rows"]) == len(found)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    told = json.loads(last)["rows"]
    assert [row["case"] for row in told] == [f"{row.section}: {row.case}" for row in found]
    assert {"case", "value", "unit", "baseline", "ratio"} == set(told[0])


def test_a_section_that_fails_or_comes_too_late_is_told(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(lab: Lab) -> list[Row]:
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(bench, "SECTIONS", {"scan": broken})
    (row,) = bench.run_sections(lab, deadline=1e12)
    assert (row.case, row.note) == ("failed", "RuntimeError: an illegal address")
    (row,) = bench.run_sections(lab, deadline=0.0)
    assert row.note == "out of time"


def test_the_sanitizer_runs_over_every_handler_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\ncase "$1" in *racecheck) echo "1 error"; exit 9;; esac\nshift 4\necho "ran $@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    given = dict(correctness.commands())
    assert set(given) > {"compute-sanitizer memcheck", "compute-sanitizer racecheck"}
    monkeypatch.setattr(
        correctness, "commands", lambda: [item for item in given.items() if item[0].startswith("compute-sanitizer")]
    )
    by_tool = {row.case.split()[-1]: row for row in correctness.check(60.0)}
    assert by_tool["memcheck"].value == 1.0 and by_tool["memcheck"].note == "ran -m bench.gpu.correctness kernels"
    assert (by_tool["racecheck"].value, by_tool["racecheck"].note) == (0.0, "1 error")
    assert not correctness.passed(list(by_tool.values()))
    (late, *_) = correctness.check(0.0)
    assert late.note == "out of time, so not run" and not late.unit


def test_what_the_sanitizer_runs_is_right_on_this_cpu(shim_driver: ShimDriver) -> None:
    for launcher in (SideStream(shim_driver), GraphLaunch(shim_driver)):
        device = KernelDevice(shim_driver, launcher)
        for _ in range(2):
            correctness.every_handler(device, lambda count: torch.randint(0, 255, (count,), dtype=torch.uint8))
        device.close()


def test_nothing_is_timed_where_something_is_wrong() -> None:
    right, wrong = Row("correctness", "a", 1.0, "passed"), Row("correctness", "b", 0.0, "passed")
    missing = Row("correctness", "compute-sanitizer", 0.0, "", note="not installed, so not run")
    assert correctness.passed([right, missing])
    assert not correctness.passed([right, wrong])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: `make gpu` itself is the test")
def test_without_a_gpu_it_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--quick"])
    assert bench.main() == 3
    output = capsys.readouterr()
    assert "no CUDA device" in output.err and output.out == ""
