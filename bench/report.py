"""What every bench shares: its command line, medians, the table for people and the one JSON line for scripts.

A bench calls `arguments`, measures, and gives `Report.finish` its rows; the last line on stdout is the JSON object, and a
copy lies where `results_of` says. Runs on the bench's own main thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
QUICK = "quick"  # below RESULTS, ignored by git: a quick look leaves the checkout as it was
SEED = 20261129


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `ratio` is what is wanted of it; `want` says how much, for the table and the plots only."""

    case: str
    value: float
    unit: str
    baseline: float
    ratio: float
    want: str = ""
    note: str = ""

    def json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "value": significant(self.value),
            "unit": self.unit,
            "baseline": significant(self.baseline),
            "ratio": significant(self.ratio),
        }


@dataclass(slots=True)
class Report:
    """Rows of one bench; `options` are what `arguments` gave it."""

    bench: str
    options: argparse.Namespace
    rows: list[Row] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)  # raw samples and parts; only in the saved file
    started: float = field(default_factory=time.monotonic)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        say(f"  {row.case}: {row.value:.4g} {row.unit}, baseline {row.baseline:.4g}, ratio {row.ratio:.4g} {row.note}")

    def finish(self) -> None:
        """Print the table, save the result, print the JSON line last."""
        table = Table(title=f"{self.bench}{' (quick)' if self.options.quick else ''}")
        for heading in ("case", "value", "baseline", "ratio", "wanted"):
            table.add_column(heading, justify="left" if heading == "case" else "right")
        for row in self.rows:
            value, baseline = f"{row.value:.4g} {row.unit}", f"{row.baseline:.4g} {row.unit}"
            table.add_row(row.case, value, baseline, f"{row.ratio:.4g}", row.want)
        Console(file=sys.stdout, width=120 if not sys.stdout.isatty() else None).print(table)
        line = {
            "bench": self.bench,
            "commit": commit(),
            "machine": machine(),
            "rows": [row.json() for row in self.rows],
        }
        self._save(line)
        print(json.dumps(line, allow_nan=False), flush=True)

    def _save(self, line: dict[str, Any]) -> None:
        directory = results_of(self.options)
        directory.mkdir(parents=True, exist_ok=True)
        saved = {
            **line,
            "quick": self.options.quick,
            "seconds": round(time.monotonic() - self.started, 1),
            "wanted": {row.case: row.want for row in self.rows},
            "details": self.details,
        }
        file = directory / f"{self.bench}.json"
        file.write_text(json.dumps(saved, indent=1, default=asdict) + "\n")
        say(f"  saved in {os.path.relpath(file)}")


def arguments(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options that every bench has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer repeats and lengths, under five minutes; saved in bench/results/quick/",
    )
    parser.add_argument(
        "--save",
        action="store_true",
        help="save a quick run in bench/results/, where full runs are saved and git looks",
    )
    parser.add_argument("--model", default="smollm2", help="name or directory of the model (default: the demo model)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each engine and each baseline")
    parser.add_argument("--seed", type=int, default=SEED)
    return parser.parse_args(argv)


def results_of(options: argparse.Namespace) -> Path:
    """Where the result of such a run is saved: bench/results/, or bench/results/quick/ for a quick one without --save."""
    return RESULTS / QUICK if options.quick and not options.save else RESULTS


def say(text: str) -> None:
    """Progress, on stderr, so that stdout holds the table and the JSON line."""
    print(text, file=sys.stderr, flush=True)


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def significant(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")


def random_tokens(draw: random.Random, count: int) -> list[int]:
    """Token ids that are no special tokens of the demo model."""
    return [draw.randrange(300, 40_000) for _ in range(count)]


def length_name(token_count: int) -> str:
    """256 -> "256", 1024 -> "1k", 7168 -> "7k"."""
    return f"{token_count // 1024}k" if token_count % 1024 == 0 else str(token_count)


def commit() -> str:
    """Hash of the commit, with "-dirty" if the tree differs from it; "unknown" outside a repository."""
    head = _git("rev-parse", "HEAD")
    if not head:
        return "unknown"
    return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def machine() -> str:
    """Processor, cores that may be used, memory, kernel and Python in one line."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_processor()}, {cores} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
