"""Whatever becomes of a section of `make gpu`, the others are measured and what was had is kept."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.gpu import __main__ as bench
from bench.gpu import apart, correctness
from bench.gpu.lab import Lab, Row
from tests.engine.capture.shim_driver import ShimDriver

pytestmark = pytest.mark.process

# Stands in for `python -m bench.gpu`: tells of sections as a child does, with sections that end it in all the ways there are.
CHILD = """
import json, os, signal, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
file = open(given["--events"], "a+")
file.seek(0)
ceilings = json.loads(file.readline())["ceilings"]
def tell(**event):
    file.write(json.dumps(event) + "\\n")
    file.flush()
if given["--only"].startswith("unborn"):
    sys.exit(5)
for name in given["--only"].split(","):
    tell(begins=name)
    row = {"section": name, "case": "it", "value": 1.0, "unit": "GB/s", "note": json.dumps(ceilings)}
    if name == "crash":
        file.write('{"over": "cra')
        file.flush()
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if name == "sick":
        row["case"] = "failed"
    tell(over=name, rows=[row])
    if name == "sick":
        sys.exit(1)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    return [sys.executable, str(script)]


def test_a_section_that_crashes_hangs_or_fails_hides_no_other(command: list[str]) -> None:
    names = ["ceilings", "crash", "rows", "hang", "trigger", "sick", "unborn", "engine"]
    found = [row for rows in apart.run(names, command, {"hang": 0.5}, time.monotonic() + 100) for row in rows]
    assert [row.section for row in found] == names
    told = {row.section: (row.case, row.note) for row in found}
    assert told["crash"] == ("failed", "its process ended with SIGSEGV")
    assert told["hang"][0] == "failed" and told["hang"][1].startswith("did not end within")
    assert told["unborn"] == ("failed", "its process ended with status 5")
    assert told["sick"][0] == "failed"
    assert {told[name][0] for name in ("ceilings", "rows", "trigger", "engine")} == {"it"}
    assert json.loads(told["engine"][1]) == {"it": 1e9}, "later children know the ceilings"


def test_what_there_is_no_time_for_is_said(command: list[str]) -> None:
    (rows,) = apart.run(["scan", "engine"], command, {}, time.monotonic() - 1)
    assert [(row.section, row.case, row.note) for row in rows] == [
        ("scan", "not run", "out of time"),
        ("engine", "not run", "out of time"),
    ]
    found = [row for rows in apart.run(["hang", "rows"], command, {}, time.monotonic() + 1) for row in rows]
    assert [row.case for row in found] == ["failed", "not run"]


def test_a_child_tells_each_section_and_ends_with_the_first_that_fails(tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.write_text(json.dumps({"ceilings": {"read once": 2e12}}) + "\n")
    ceilings: dict[str, float] = {}

    def section(name: str) -> list[Row]:
        return [Row(name, "failed" if name == "rows" else "it", 1.0, "us")]

    assert apart.child(["scan", "rows", "engine"], events, section, ceilings) == 1
    assert ceilings == {"read once": 2e12}
    said = [json.loads(line) for line in events.read_text().splitlines()[1:]]
    assert [event.get("begins") or event["over"] for event in said] == ["scan", "scan", "rows", "rows"]
    assert said[1]["rows"] == [asdict(section("scan")[0])]


def test_the_table_and_the_file_are_kept_whatever_fails(
    command: list[str], tmp_path: Path, shim_driver: ShimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    out = tmp_path / "gpu.json"
    lab = Lab(shim_driver, torch.device("cpu"), quick=True, scale=512, rounds=2)
    proof = tmp_path / "proof"
    monkeypatch.setattr(shim_driver, "proof_of_executor", lambda: proof, raising=False)
    monkeypatch.setattr(bench, "open_lab", lambda quick: (lab, ""))
    monkeypatch.setattr(bench, "device_facts", lambda lab: {"device": "none"})
    monkeypatch.setattr(bench, "SECTIONS", dict.fromkeys(("crash", "scan")))
    checks = [Row("correctness", correctness.EXECUTOR, 1.0, "passed")]
    monkeypatch.setattr(correctness, "check", lambda limit_s: checks)
    whole, seen = apart.run, []

    def run(names: list[str], _: list[str], *rest: object) -> object:
        for rows in whole(names, command, *rest):  # type: ignore[arg-type]
            yield rows
            seen.append(len(json.loads(out.read_text())["rows"]))

    monkeypatch.setattr(apart, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--out", str(out)])
    assert bench.main() == 1, "a section failed"
    assert seen == [2, 3], "the file holds what was had after each section"
    assert proof.exists()
    proof.unlink()
    checks[:] = [Row("correctness", correctness.EXECUTOR, 0.0, "", note="out of time, so not run")]
    bench.main()
    assert not proof.exists(), "what was not run is not proven"


@pytest.mark.parametrize(
    "want, ratio, told",
    [
        (">= 0.8 of read-once", 0.81, "yes"),
        (">= 300", 299.0, "no"),
        ("<= 0.01", 0.0, "yes"),
        ("<= 1.02", 1.03, "no"),
        ("> 1", 1.0, "no"),
        ("", 2.0, ""),
    ],
)
def test_the_table_says_whether_what_is_wanted_is_met(want: str, ratio: float, told: str) -> None:
    assert bench.met(Row("scan", "a case", 1.0, "us", 1.0, ratio, want)) == told


def test_a_check_that_fails_is_told_by_what_matters() -> None:
    pytest_said = "...F\n=== FAILURES ===\nE   AssertionError: no\n=== short test summary info ===\n"
    failed = "FAILED tests/engine/capture/test_contract.py::test_a_scan[cuda/stream] - AssertionError: no"
    assert correctness.said(f"{pytest_said}{failed}\n1 failed in 2 s\n", "a warning\n", right=False) == (
        "test_a_scan[cuda/stream] - AssertionError: no"
    )
    trace = "Traceback:\n  File x\ncupy.cuda.runtime.CUDARuntimeError: cudaErrorIllegalAddress: an illegal access\n"
    assert correctness.said("", trace, right=False).startswith("cupy.cuda.runtime.CUDARuntimeError: cudaErrorIllegal")
    assert correctness.said("41 passed in 9 s\n", "a warning\n", right=True) == "41 passed in 9 s"


@pytest.mark.parametrize(
    "status, printed, unit, value",
    [
        (9, "========= ERROR SUMMARY: 3 errors", "passed", 0.0),
        (9, "========= Error: Device not supported", "", 0.0),
        (1, "========= Internal error", "", 0.0),
        (0, "every handler ran", "passed", 1.0),
    ],
)
def test_a_sanitizer_that_cannot_run_is_no_error_of_a_kernel(
    tmp_path: Path, status: int, printed: str, unit: str, value: float
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '{printed}'\nexit {status}\n")
    tool.chmod(0o755)
    row = correctness._run("a tool", [str(tool)], time.monotonic() + 60)
    assert (row.unit, row.value) == (unit, value) and row.note
    assert correctness.passed([row]) == (value == 1.0 or not unit)


def test_a_sanitizer_that_is_slow_is_not_wrong_but_a_check_that_hangs_is(tmp_path: Path) -> None:
    for name, unit in (("compute-sanitizer", ""), ("python", "passed")):
        tool = tmp_path / name
        tool.write_text("#!/bin/sh\nexec sleep 60\n")
        tool.chmod(0o755)
        row = correctness._run("a tool", [str(tool)], time.monotonic() + 1.2)
        assert row.unit == unit and row.note.startswith("did not end")


def test_every_test_marked_gpu_is_among_the_checks() -> None:
    root = Path(__file__).resolve().parents[3]
    marked = [path for path in (root / "tests").rglob("*.py") if "mark.gpu" in path.read_text()]
    places = [root / place for place in correctness.GPU_TESTS]
    strays = [
        path
        for path in marked
        if not any(path == place or place in path.parents for place in places) and path != Path(__file__)
    ]
    assert marked and not strays
