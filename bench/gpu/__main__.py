"""`make gpu`: correctness, then every measurement, one table, one JSON file. Under eight minutes; what did not fit is said.

    python -m bench.gpu [--quick] [--limit SECONDS] [--out FILE] [--only SECTION,...]

Sections run in processes of their own (bench/gpu/apart.py): an error on the device ends the one that made it. The JSON file is written anew
after each of them. Exit status: 0 measured, 1 something is wrong on the device (nothing is timed then) or a section failed, 3 no CUDA
device that can be used, with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu import apart, ceilings, correctness, engine, rows, scan, training, trigger
from bench.gpu.lab import Lab, Row
from bench.report import QUICK, RESULTS, commit, machine

SECTIONS: dict[str, Callable[[Lab], list[Row]]] = {
    "ceilings": ceilings.measure,
    "scan": scan.measure,
    "rows": rows.measure,
    "trigger": trigger.measure,
    "training": training.measure,
    "engine": engine.measure,
}
# Seconds after which a section that does not end is ended, so that the others have their turn.
MOST_S = {"ceilings": 45.0, "scan": 120.0, "rows": 75.0, "trigger": 60.0, "training": 60.0, "engine": 180.0}
# Of the limit, for what must be right.
_CHECKS_SHARE = 0.45


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewest sizes and rounds: does it run at all")
    parser.add_argument("--limit", type=float, default=460.0, help="seconds for everything (default 460)")
    parser.add_argument(
        "--out",
        type=Path,
        help="where the JSON goes (default bench/results/gpu.json, of a quick run bench/results/quick/)",
    )
    parser.add_argument("--only", default="", help=f"no checks, and of {', '.join(SECTIONS)} only these (with commas)")
    parser.add_argument("--events", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out or (RESULTS / QUICK if options.quick else RESULTS) / "gpu.json"
    wanted = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"--only {','.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    names = [name for name in SECTIONS if name in wanted]
    lab, why_not = open_lab(options.quick)
    if lab is None:
        print(f"gpu: {why_not}", file=sys.stderr)
        return 3
    began = time.monotonic()
    if options.events:
        return apart.child(
            names, options.events, lambda name: run_section(name, lab, began + options.limit), lab.ceilings
        )
    return measure_all(names, lab, options, began)


def measure_all(names: list[str], lab: Lab, options: argparse.Namespace, began: float) -> int:
    """Checks, then every section; what is had so far is in the JSON file at any time."""
    facts, found = device_facts(lab), []
    if not options.only:
        found = correctness.check(options.limit * _CHECKS_SHARE)
        if correctness.executor_proven(found):
            lab.driver.proof_of_executor().touch()  # type: ignore[attr-defined]
    right = correctness.passed(found)

    def keep() -> None:
        write(found, facts, options.out, time.monotonic() - began, right)

    keep()
    command = [sys.executable, "-m", "bench.gpu", *(["--quick"] if options.quick else [])]
    for more in apart.run(names, command, MOST_S, began + options.limit) if right else ():
        found += more
        keep()
    print_table(found, facts)
    save(found, facts, options.out, time.monotonic() - began, right)
    return 0 if right and not any(row.case == apart.FAILED for row in found) else 1


def open_lab(quick: bool) -> tuple[Lab | None, str]:
    """The first CUDA device, or why there is none."""
    from engine.capture.cuda_driver import CudaDriver
    from engine.capture.errors import CaptureError

    if not torch.cuda.is_available():
        return None, "torch sees no CUDA device (a CPU build of torch, or no driver); nothing was measured"
    try:
        driver = CudaDriver()
    except CaptureError as error:
        return None, f"{error}; nothing was measured"
    driver.cache.directory.mkdir(parents=True, exist_ok=True)
    return Lab(driver, torch.device("cuda", 0), quick, rounds=8 if quick else 30), ""


def run_sections(lab: Lab, deadline: float) -> list[Row]:
    """Every section that begins before the deadline; one that fails is a row that says so."""
    found = []
    for name in SECTIONS:
        found += run_section(name, lab, deadline)
    return found


def run_section(name: str, lab: Lab, deadline: float) -> list[Row]:
    """One section; nothing is raised."""
    lab.deadline = deadline
    if time.monotonic() > deadline:
        return [Row(name, apart.NOT_RUN, 0.0, "", note="out of time")]
    began = time.monotonic()
    try:
        return SECTIONS[name](lab)
    except Exception as error:  # noqa: BLE001 - the other sections are worth their figures
        traceback.print_exc()
        return [Row(name, apart.FAILED, 0.0, "", note=f"{type(error).__name__}: {error}"[:120])]
    finally:
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def device_facts(lab: Lab) -> dict[str, Any]:
    """What a figure depends on."""
    driver: Any = lab.driver
    compiler = ".".join(str(part) for part in driver._nvrtc.version)
    return {
        "device": driver.title,
        "architecture": driver.architecture,
        "multiprocessors": driver.multiprocessors,
        "driver": driver.cupy.cuda.runtime.driverGetVersion(),
        "cupy": driver.cupy.__version__,
        "nvrtc": compiler,
        "torch": torch.__version__,
    }


def met(row: Row) -> str:
    """Whether a row's ratio is what is wanted of it, for the table."""
    sign, _, rest = row.want.partition(" ")
    if sign not in (">=", "<=", ">"):
        return ""
    bound = float(rest.split()[0])
    return (
        "yes"
        if (row.ratio >= bound if sign == ">=" else row.ratio <= bound if sign == "<=" else row.ratio > bound)
        else "no"
    )


def print_table(found: list[Row], facts: dict[str, Any]) -> None:
    """One table on stdout."""
    table = Table(title=f"{facts.get('device', 'device')}, driver {facts.get('driver', '?')}")
    for heading in ("section", "case", "value", "baseline", "ratio", "wanted", "met", "note"):
        table.add_column(heading, justify="left" if heading in ("section", "case", "note") else "right")
    for row in found:
        value = f"{row.value:.4g} {row.unit}" if row.unit else ""
        baseline = f"{row.baseline:.4g} {row.unit}" if row.baseline else ""
        ratio = f"{row.ratio:.4g}" if row.ratio or row.want else ""
        table.add_row(row.section, row.case, value, baseline, ratio, row.want, met(row), row.note)
    Console(file=sys.stdout, width=190).print(table)


def write(found: list[Row], facts: dict[str, Any], path: Path, seconds: float, right: bool) -> dict[str, Any]:
    """The JSON file, whole at any time; returns it without the rows."""
    line = {
        "bench": "gpu",
        "commit": commit(),
        "machine": machine(),
        "facts": facts,
        "correct": right,
        "seconds": round(seconds, 1),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({**line, "rows": [asdict(row) for row in found]}, indent=1) + "\n")
    partial.replace(path)
    return line


def save(found: list[Row], facts: dict[str, Any], path: Path, seconds: float, right: bool) -> None:
    """The JSON file; the last line on stdout is what it says, of each row what every bench tells."""
    line = write(found, facts, path, seconds, right)
    rows = [
        {
            "case": f"{row.section}: {row.case}",
            "value": row.value,
            "unit": row.unit,
            "baseline": row.baseline,
            "ratio": row.ratio,
        }
        for row in found
    ]
    print(json.dumps({**line, "rows": rows, "file": str(path)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
