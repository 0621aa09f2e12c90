"""The soak of `soak.py`: a slice of it in every run of the suite, an hour of it in `make soak`. The seed is printed, and may be given."""

from __future__ import annotations

import os
import time

import pytest

from tests.faults.soak import run

SLICE_S = 60.0
HOUR_S = float(os.environ.get("CONCORDIA_SOAK_S", "3600"))


def seed() -> int:
    chosen = int(os.environ.get("CONCORDIA_TEST_SEED", time.time()))
    print("seed", chosen)
    return chosen


@pytest.mark.timeout(900)
def test_a_slice_of_random_work_and_random_kills() -> None:
    done = run(SLICE_S, seed())
    assert done["turn"] > 10 and done["rows_compared"] > 100


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_an_hour_of_random_work_and_random_kills() -> None:
    done = run(HOUR_S, seed())
    assert done["kill_keeper"] + done["kill_at_failpoint"] > 50
