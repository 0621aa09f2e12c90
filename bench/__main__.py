"""Run every bench one after the other, each in a process of its own, then draw the plots: `python -m bench [--quick [--save]] [--missing]`.

Options are handed on to each. A bench that fails doesn't stop the others; the exit status says that one did. Each saves its result
when it ends: what was stopped goes on with --missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from bench import report
from bench.plots import draw_all

NAMES = (
    "capture_scaling",
    "capture_overhead",
    "decode",
    "recovery_gap",
    "failover_policies",
    "detection",
    "migration_gap",
    "drain_streams",
    "stampede",
    "standby_cost",
    "resume_after_restart",
    "append",
    "drain",
    "restore_io",
    "resume_kinds",
    "state_bytes",
    "scan",
    "churn",
    "deterministic",
    "fork",
    "grammar",
    "adapter_delta",
)


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--missing",
        action="store_true",
        help="only benches without a saved result of this very commit and these options; of a tree that differs from its commit, all",
    )
    options = report.parsed(parser)
    wanted = [name for name in NAMES if not (options.missing and is_there(name, options))]
    given = [argument for argument in sys.argv[1:] if argument != "--missing"]
    failed = [name for name in wanted if run(name, [sys.executable, "-m", f"bench.{name}", *given])]
    for picture in draw_all(report.results_of(options)):
        report.say(str(picture))
    if failed:
        report.say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def is_there(name: str, options: argparse.Namespace) -> bool:
    """Whether the saved result is of this very commit, measured with these options."""
    try:
        saved = json.loads((report.results_of(options) / f"{name}.json").read_text())
    except (OSError, ValueError):
        return False
    commit = report.commit()
    wanted = {"commit": commit, **report.regime(options)}
    return report.is_exact(commit) and wanted.items() <= saved.items()


def run(name: str, command: list[str]) -> int:
    """Exit status of a bench; one that is told to stop has its time to remove what it made."""
    report.say(f"== {name}")
    bench = subprocess.Popen(command)
    try:
        return bench.wait()
    except SystemExit:
        bench.terminate()
        bench.wait()
        raise
    except KeyboardInterrupt:  # the terminal has told the bench, too
        bench.wait()
        raise


if __name__ == "__main__":
    sys.exit(main())
