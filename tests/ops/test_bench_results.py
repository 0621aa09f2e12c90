"""What a bench leaves: its result, where a quick look changes nothing that git tracks, of the commit that was measured; the picture."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import __main__ as every
from bench import plots, report


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit of a program and a result."""
    root = tmp_path / "checkout"
    (root / "bench" / "results").mkdir(parents=True)
    monkeypatch.setattr(report, "ROOT", root)
    monkeypatch.setattr(report, "RESULTS", root / "bench" / "results")
    for name in ("program.py", "bench/results/some.json"):
        (root / name).write_text("{}")
    named = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for command in (["init", "-q"], ["add", "."], [*named, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def finished(*flags: str) -> report.Report:
    result = report.Report("some", report.arguments("", flags))
    result.add(report.Row("case", 2.0, "ms", 4.0, 2.0, ">= 1"))
    result.finish()
    return result


@pytest.mark.parametrize(
    ("flags", "place"), [((), ""), (("--quick",), "quick"), (("--quick", "--save"), ""), (("--save",), "")]
)
def test_a_quick_result_lies_apart_unless_it_is_to_be_saved(
    flags: tuple[str, ...], place: str, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(*flags)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last) == {"bench", "commit", "machine", "rows"}
    assert last["rows"] == [{"case": "case", "value": 2.0, "unit": "ms", "baseline": 4.0, "ratio": 2.0}]
    assert [path for path in results.rglob("*") if path.is_file()] == [results / place / "some.json"]
    saved = json.loads((results / place / "some.json").read_text())
    assert saved["quick"] == ("--quick" in flags) and saved["wanted"] == {"case": ">= 1"}


@pytest.mark.skipif(report.commit() == "unknown", reason="not a git checkout")
def test_git_ignores_quick_results() -> None:
    quick = report.results_of(report.arguments("", ["--quick"])) / "some.json"
    asked = subprocess.run(["git", "check-ignore", "-q", str(quick)], cwd=report.ROOT, check=False)
    assert asked.returncode == 0


def test_a_result_that_cannot_be_saved_is_still_the_last_line(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "quick").write_text("a file where the directory would be")
    with pytest.raises(OSError, match="quick"):
        finished("--quick")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bench"] == "some"


@pytest.mark.parametrize("figures", [(float("nan"), 1.0, 1.0), (1.0, float("inf"), 1.0), (1.0, 1.0, float("-inf"))])
def test_a_figure_that_is_none_is_refused_where_it_arises(figures: tuple[float, float, float]) -> None:
    value, baseline, ratio = figures
    with pytest.raises(ValueError, match="case: no figure"):
        report.Report("some", report.arguments("", [])).add(report.Row("case", value, "ms", baseline, ratio))


def test_a_case_has_one_figure() -> None:
    result = report.Report("some", report.arguments("", []))
    result.add(report.Row("case", 1.0, "ms", 1.0, 1.0))
    with pytest.raises(ValueError, match="case: measured twice"):
        result.add(report.Row("case", 2.0, "ms", 1.0, 2.0))


def test_the_commit_is_that_of_the_start_and_results_make_no_other_tree(checkout: Path) -> None:
    clean = report.commit()
    assert report.is_exact(clean)
    assert finished().commit == clean
    (checkout / "bench/results/some.json").write_text("another result, tracked")
    assert report.commit() == clean
    began = report.Report("some", report.arguments("", []))
    (checkout / "program.py").write_text("another program")
    began.finish()
    assert json.loads((checkout / "bench/results/some.json").read_text())["commit"] == f"{clean}-dirty"
    assert not report.is_exact(report.commit())


def test_what_is_missing_is_what_has_no_result_of_this_commit_and_these_options(checkout: Path) -> None:
    def is_there(name: str, *flags: str) -> bool:
        return every.is_there(name, report.arguments("", flags))

    assert not is_there("some")  # a result, but not of this commit
    finished()
    assert is_there("some") and not is_there("other")
    assert not is_there("some", "--quick") and not is_there("some", "--quick", "--save")
    assert not is_there("some", "--seed", "1") and not is_there("some", "--threads", "2")
    (checkout / "program.py").write_text("another program")
    finished()
    assert not is_there("some"), "two trees that differ from one commit may differ from each other"


def test_every_bench_runs_though_one_failed_and_the_status_says_so(
    results: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run_file(name: str, command: list[str]) -> int:
        return run(name, [sys.executable, str(results / command[2]), *command[3:]])

    run = every.run
    monkeypatch.setattr(every, "run", run_file)
    (results / "bench.one").write_text("raise SystemExit(3)")
    (results / "bench.two").write_text("import sys; print(sys.argv[1:])")
    (results / "torn.json").write_text('{"rows": [')
    monkeypatch.setattr(every, "NAMES", ("one", "two"))
    monkeypatch.setattr(sys, "argv", ["bench", "--missing", "--seed", "7"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert every.main() == 1
    told = capfd.readouterr()
    assert told.out == "['--seed', '7']\n" and told.err.endswith("failed: one\n")


STOPPED = """
import sys, time
from pathlib import Path
from bench import report
report.arguments("", None)
place = Path(__file__).parent
try:
    (place / "began").touch()
    time.sleep(600)
finally:
    time.sleep(0.5)  # longer than `subprocess.run` waits after Ctrl-C
    (place / "cleared").touch()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_bench_that_is_stopped_has_its_time_to_clear_up(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "bench.some").write_text(STOPPED)
    program = (
        "import sys; from bench import __main__ as every, report; report.arguments('', None);"
        f"every.run('some', [sys.executable, {str(tmp_path / 'bench.some')!r}])"
    )
    running = subprocess.Popen([sys.executable, "-c", program], cwd=report.ROOT, process_group=0)
    deadline = time.monotonic() + 60
    while not (tmp_path / "began").exists():
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    if number == signal.SIGINT:
        os.killpg(running.pid, number)  # a terminal tells all of them
    else:
        running.send_signal(number)
    assert running.wait(60) in (128 + number, -number)
    assert (tmp_path / "cleared").exists()


def test_what_no_picture_can_be_drawn_of_is_told_and_passed_over(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "empty.json").write_text('{"bench": "empty", "rows": []}')
    (results / "torn.json").write_text('{"rows": [')
    (results / "other.json").write_text("[]")
    assert plots.draw_all(results) == []
    told = capsys.readouterr().err
    assert all(f"{name}.json: not drawn" in told for name in ("empty", "torn", "other"))
