"""Run every bench one after the other, each in a process of its own, then draw the plots: `python -m bench [--quick [--save]]`.

Options are handed on to each. A bench that fails doesn't stop the others; the exit status says that one did.
"""

from __future__ import annotations

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
    options = report.arguments(__doc__)
    failed = [name for name in NAMES if run(name)]
    for picture in draw_all(report.results_of(options)):
        print(picture, file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(name: str) -> int:
    print(f"== {name}", file=sys.stderr, flush=True)
    return subprocess.run([sys.executable, "-m", f"bench.{name}", *sys.argv[1:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
