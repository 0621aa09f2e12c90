"""The soak of `soak.py`: three minutes in every run of the suite, an hour in `make soak`. The seed is printed, and may be given."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.processes import Processes
from tests.faults.soak import run

SLICE_S = 180.0
NICE = 5  # the tests beside it wait more than it does: they come first
REST_S = 1.0  # as much work as when each keeper took half a second to start, at a third of the processor time
HOUR_S = float(os.environ.get("CONCORDIA_SOAK_S", "3600"))


def seed() -> int:
    chosen = int(os.environ.get("CONCORDIA_TEST_SEED", time.time()))
    print("seed", chosen)
    return chosen


@pytest.mark.timeout(900)
def test_a_slice_of_random_work_and_random_kills(processes: Processes, tmp_path: Path) -> None:
    options = ("--seconds", str(SLICE_S), "--seed", str(seed()), "--nice", str(NICE), "--rest-s", str(REST_S), "--json")
    soak = processes.start("-m", "tests.faults.soak", *options, TMPDIR=str(tmp_path))
    said, _ = soak.communicate()
    assert soak.returncode == 0, said
    done = Counter(json.loads(said.splitlines()[-1]))
    assert done["turn"] > 10 and done["rows_compared"] > 100


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_an_hour_of_random_work_and_random_kills() -> None:
    done = run(HOUR_S, seed())
    assert done["kill_keeper"] + done["kill_at_failpoint"] > 50
