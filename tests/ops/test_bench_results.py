"""Where a bench leaves its result: a quick look changes nothing that git tracks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import report


@pytest.mark.parametrize(
    ("flags", "place"), [((), ""), (("--quick",), "quick"), (("--quick", "--save"), ""), (("--save",), "")]
)
def test_a_quick_result_lies_apart_unless_it_is_to_be_saved(
    flags: tuple[str, ...],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    result = report.Report("some", report.arguments("", flags))
    result.add(report.Row("case", 2.0, "ms", 4.0, 2.0, ">= 1"))
    result.finish()
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last) == {"bench", "commit", "machine", "rows"}
    assert last["rows"] == [{"case": "case", "value": 2.0, "unit": "ms", "baseline": 4.0, "ratio": 2.0}]
    assert list(tmp_path.rglob("*.json")) == [tmp_path / place / "some.json"]
    saved = json.loads((tmp_path / place / "some.json").read_text())
    assert saved["quick"] == ("--quick" in flags) and saved["wanted"] == {"case": ">= 1"}


@pytest.mark.skipif(report.commit() == "unknown", reason="not a git checkout")
def test_git_ignores_quick_results() -> None:
    quick = report.results_of(report.arguments("", ["--quick"])) / "some.json"
    asked = subprocess.run(["git", "check-ignore", "-q", str(quick)], cwd=report.ROOT, check=False)
    assert asked.returncode == 0
