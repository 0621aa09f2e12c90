"""Sections of `make gpu` in processes of their own: what ends one of them, an error on the device, a crash, a hang, hides no other.

A child runs sections one after another and writes a line of JSON into a file when one begins and when it is over, with its rows.
Whatever becomes of the child, the parent reads what is there; a section that did not end becomes a row that says why, and the rest go to
a new child. A child that saw a section fail ends, too: the device may not be itself any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import scratch
from bench.gpu.lab import Row
from bench.report import ROOT

FAILED, NOT_RUN = "failed", "not run"
_LOOK_S = 0.1
_START_S = 60.0  # until a child's first section begins: imports, the driver, the device's context


# ---------------------------------------------------------------- the parent


def run(names: list[str], command: list[str], most_s: Mapping[str, float], deadline: float) -> Iterator[list[Row]]:
    """Rows of each section as they are had.

    command   starts a child; `--only`, `--events` and `--limit` are added
    most_s    seconds of each section
    deadline  time.monotonic(), after which no section begins and none goes on
    """
    left, known = list(names), dict[str, float]()
    while left:
        if time.monotonic() > deadline:
            yield [Row(name, NOT_RUN, 0.0, "", note="out of time") for name in left]
            return
        for name, rows in _child_of(left, command, most_s, deadline, known):
            left.remove(name)
            known.update(
                {row.case: 1e9 * row.value for row in rows if row.section == "ceilings" and row.unit == "GB/s"}
            )
            yield rows


def _child_of(
    names: list[str], command: list[str], most_s: Mapping[str, float], deadline: float, ceilings: dict[str, float]
) -> Iterator[tuple[str, list[Row]]]:
    """Sections that one child ended, and the one that ended it."""
    with scratch.directory("gpu") as where:
        events = where / "events.jsonl"
        events.write_text(json.dumps({"ceilings": ceilings}) + "\n")
        limit_s = max(1.0, deadline - time.monotonic())
        more = ["--only", ",".join(names), "--events", str(events), "--limit", f"{limit_s:.1f}"]
        # What it leaves lies in a directory that goes with it.
        child = subprocess.Popen(
            [*command, *more], cwd=ROOT, env={**os.environ, "TMPDIR": str(where)}, start_new_session=True
        )
        try:
            yield from _follow(child, events, names, most_s, deadline)
        finally:
            _end(child)
            scratch.clear()


def _follow(
    child: subprocess.Popen[bytes], events: Path, names: list[str], most_s: Mapping[str, float], deadline: float
) -> Iterator[tuple[str, list[Row]]]:
    told, since, running = 1, time.monotonic(), ""
    while True:
        ended = child.poll() is not None
        lines = events.read_text().split("\n")[:-1]  # a line that is still being written has no end yet
        for line in lines[told:]:
            event = json.loads(line)
            since, running = time.monotonic(), event.get("begins", "")
            if "over" in event:
                yield event["over"], [Row(**row) for row in event["rows"]]
        told = max(told, len(lines))
        if ended:
            break
        limit_s = most_s.get(running, _START_S) if running else _START_S
        if time.monotonic() > min(since + limit_s, deadline + _LOOK_S):
            _end(child)
            at = running or names[0]
            yield at, [Row(at, FAILED, 0.0, "", note=f"did not end within {time.monotonic() - since:.0f} s")]
            return
        time.sleep(_LOOK_S)
    if running or told == 1:
        at = running or names[0]
        yield at, [Row(at, FAILED, 0.0, "", note=f"its process ended with {_status(child.returncode)}")]


def _status(code: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"status {code}"


def _end(child: subprocess.Popen[bytes]) -> None:
    """It and what it started."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


# ---------------------------------------------------------------- the child


def child(names: list[str], events: Path, section: Callable[[str], list[Row]], ceilings: dict[str, float]) -> int:
    """Run sections and tell of them; what earlier children measured is put into `ceilings`."""
    ceilings.update(json.loads(events.read_text().splitlines()[0])["ceilings"])
    if "ceilings" not in names and not ceilings:
        section("ceilings")
    with open(events, "a") as file:

        def tell(event: dict[str, Any]) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        for name in names:
            tell({"begins": name})
            rows = section(name)
            tell({"over": name, "rows": [asdict(row) for row in rows]})
            if any(row.case == FAILED for row in rows):
                return 1
    return 0
