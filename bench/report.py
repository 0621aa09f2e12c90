"""What every bench shares: its command line, medians, the table for people and the one JSON line for scripts.

A bench calls `arguments`, makes its `Report`, measures, and finishes it; the last line on stdout is the JSON object, and a
copy lies where `results_of` says. Runs on the bench's own main thread. SIGTERM ends a bench as Ctrl-C does: what it made goes first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import signal
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
DIRTY = "-dirty"


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
    """Rows of one bench; `options` are what `arguments` gave it. Made before anything is measured: time and commit are those of then."""

    bench: str
    options: argparse.Namespace
    rows: list[Row] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)  # raw samples and parts; only in the saved file
    started: float = field(default_factory=time.monotonic)
    commit: str = field(init=False)

    def __post_init__(self) -> None:
        self.commit = commit()

    def add(self, row: Row) -> None:
        """Raises ValueError for a figure that is none (nan, infinity), and for a case that is there already."""
        if not all(map(math.isfinite, (row.value, row.baseline, row.ratio))):
            raise ValueError(f"{row.case}: no figure: {row}")
        if any(row.case == known.case for known in self.rows):
            raise ValueError(f"{row.case}: measured twice: {row}")
        self.rows.append(row)
        say(f"  {row.case}: {row.value:.4g} {row.unit}, baseline {row.baseline:.4g}, ratio {row.ratio:.4g} {row.note}")

    def finish(self) -> None:
        """Print the table, save the result, print the JSON line last, also of a result that could not be saved."""
        table = Table(title=f"{self.bench}{' (quick)' if self.options.quick else ''}")
        for heading in ("case", "value", "baseline", "ratio", "wanted"):
            table.add_column(heading, justify="left" if heading == "case" else "right")
        for row in self.rows:
            value, baseline = f"{row.value:.4g} {row.unit}", f"{row.baseline:.4g} {row.unit}"
            table.add_row(row.case, value, baseline, f"{row.ratio:.4g}", row.want)
        Console(file=sys.stdout, width=120 if not sys.stdout.isatty() else None).print(table)
        line = {
            "bench": self.bench,
            "commit": self._measured_commit(),
            "machine": machine(),
            "rows": [row.json() for row in self.rows],
        }
        try:
            self._save(line)
        finally:
            print(json.dumps(line, allow_nan=False), flush=True)

    def _measured_commit(self) -> str:
        """The commit of the start; "-dirty" too if the tree is another by now: processes that were started late had that one."""
        return self.commit if commit() == self.commit else self.commit.removesuffix(DIRTY) + DIRTY

    def _save(self, line: dict[str, Any]) -> None:
        directory = results_of(self.options)
        directory.mkdir(parents=True, exist_ok=True)
        saved = {
            **line,
            **regime(self.options),
            "seconds": round(time.monotonic() - self.started, 1),
            "wanted": {row.case: row.want for row in self.rows},
            "details": self.details,
        }
        file = directory / f"{self.bench}.json"
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text(json.dumps(saved, indent=1, default=asdict, allow_nan=False) + "\n")
        partial.replace(file)
        say(f"  saved in {os.path.relpath(file)}")


def arguments(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options that every bench has, from the command line or from `argv`."""
    return parsed(parser(doc), argv)


def parsed(options: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Those of a parser; of a command line: from here on SIGTERM ends this process as Ctrl-C does."""
    if argv is None:
        signal.signal(signal.SIGTERM, _leave)
    return options.parse_args(argv)


def _leave(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # `timeout` sends it to a process and to its group; once is enough
    sys.exit(128 + number)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Of the options that every bench has."""
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    options.add_argument(
        "--quick",
        action="store_true",
        help="fewer repeats and lengths, under five minutes; saved in bench/results/quick/",
    )
    options.add_argument(
        "--save",
        action="store_true",
        help="save a quick run in bench/results/, where full runs are saved and git looks",
    )
    options.add_argument("--model", default="smollm2", help="name or directory of the model (default: the demo model)")
    options.add_argument("--threads", type=int, default=1, help="torch threads of each engine and each baseline")
    options.add_argument("--seed", type=int, default=SEED)
    return options


def regime(options: argparse.Namespace) -> dict[str, Any]:
    """The options that figures depend on."""
    return {name: getattr(options, name) for name in ("quick", "model", "threads", "seed")}


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
    """Hash of the commit, with "-dirty" if the tree differs from it, results apart; "unknown" outside a repository."""
    head = _git("rev-parse", "HEAD")
    if not head:
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/results")
    return head + (DIRTY if changed else "")


def is_exact(commit: str) -> bool:
    """Whether the commit is known and the tree was as it says."""
    return commit != "unknown" and not commit.endswith(DIRTY)


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
