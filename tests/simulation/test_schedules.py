"""Thousands of fault schedules in virtual time: each token once and in order, one owner an epoch, every stream ends, nothing leaks.

A failing seed is printed; put it into REGRESSIONS. `SIMULATION_SEEDS=START:COUNT` runs others, `make soak` many more.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gateway.tokenizer import TextCodec
from tests.simulation.schedules import run_schedule
from tests.simulation.virtual_time import run

REGRESSIONS: list[int] = []
POISON_REGRESSIONS: list[int] = []
START, COUNT = (int(part) for part in os.environ.get("SIMULATION_SEEDS", "0:2000").split(":"))
LIMIT_S = 45.0  # of real time; on a slow machine fewer seeds run, and the test says how many
PARTS = 4


def check(seeds: range | list[int], journals: Path, codec: TextCodec, *, poison: bool = False) -> None:
    began = time.monotonic()
    for done, seed in enumerate(seeds):
        try:
            run(run_schedule(seed, journals, codec, poison=poison))
        except BaseException as error:
            pytest.fail(f"seed {seed}{' (poison)' if poison else ''}: {type(error).__name__}: {error}", pytrace=True)
        if time.monotonic() - began > LIMIT_S / PARTS:
            print(f"{done + 1} of {len(seeds)} seeds in {LIMIT_S / PARTS:g} s")
            return


@pytest.mark.parametrize("part", range(PARTS))
def test_seeded_schedules(part: int, journals: Path, codec: TextCodec, quiet: None) -> None:
    check(range(START + part, START + COUNT, PARTS), journals, codec)


def test_schedules_with_a_poison_request(journals: Path, codec: TextCodec, quiet: None) -> None:
    check(range(START, START + COUNT // 20), journals, codec, poison=True)


def test_seeds_that_failed_before(journals: Path, codec: TextCodec, quiet: None) -> None:
    check(REGRESSIONS, journals, codec)
    check(POISON_REGRESSIONS, journals, codec, poison=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_more_schedules(journals: Path, codec: TextCodec, quiet: None) -> None:
    for seed in range(1_000_000, 1_000_000 + 100_000):
        check([seed], journals, codec, poison=seed % 20 == 0)
