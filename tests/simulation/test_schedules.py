"""Thousands of fault schedules in virtual time: each token once and in order, one owner an epoch, every stream ends, nothing leaks.

A seed that fails is printed, and kept in pytest's cache, so that the next run begins with it; put it into REGRESSIONS then.
`SIMULATION_SEEDS=START:COUNT` runs others, without a limit of time; `make soak` many more.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gateway.tokenizer import TextCodec
from tests.simulation.schedules import SEEN, run_schedule
from tests.simulation.virtual_time import run

# In one process, so that what was seen adds up.
pytestmark = pytest.mark.xdist_group("simulation")
REGRESSIONS: list[int] = [1001096]
POISON_REGRESSIONS: list[int] = []
KEPT = "concordia/simulation-seeds"
CHOSEN = os.environ.get("SIMULATION_SEEDS", "")
START, COUNT = (int(part) for part in (CHOSEN or "0:2000").split(":"))
LIMIT_S = 1e9 if CHOSEN else 48.0  # of real time; on a slow machine fewer seeds run, and the test says how many
PARTS = 4
ENOUGH = 1000  # seeds of one process after which everything that can happen has

# What a move can come to, and what happens while one is on its way.
OUTCOMES = {
    "move: moved", "move: ended", "move: source lost", "move: target lost", "move: target refused: no_slot",
    "move: source lost; recovered", "move: target lost; recovered", "move: target refused; the source goes on",
    "idle: moved", "parked", "refused: a move", "policy cold", "policy warm", "policy hot",
    *(f"cancelled: {what}" for what in ("waiting", "moving", "running")),
    *(f"amid a move: {act}" for act in ("crash", "hang", "end", "lose", "gateway", "host", "keeper", "refuse")),
}  # fmt: skip


class Seeds:
    """Runs seeds, and keeps those that fail."""

    def __init__(self, cache: pytest.Cache, journals: Path, codec: TextCodec) -> None:
        self._cache = cache
        self._journals = journals
        self._codec = codec

    @property
    def kept(self) -> list[tuple[int, bool]]:
        """(seed, poison) of those that failed in earlier runs here."""
        return [(int(seed), bool(poison)) for seed, poison in self._cache.get(KEPT, [])]

    def check(self, seeds: range | list[int], *, poison: bool = False, limit_s: float = 1e9) -> None:
        """One after the other, as far as they come within the limit; fails at the first that does."""
        began = time.monotonic()
        for done, seed in enumerate(seeds):
            if time.monotonic() - began > limit_s:
                print(f"{done} of {len(seeds)} seeds in {limit_s:g} s")
                return
            self.check_one(seed, poison)

    def check_one(self, seed: int, poison: bool) -> None:
        others = [entry for entry in self.kept if entry != (seed, poison)]
        try:
            run(run_schedule(seed, self._journals, self._codec, poison=poison))
        except BaseException as error:
            self._cache.set(KEPT, [*others, (seed, poison)])
            pytest.fail(f"seed {seed}{' (poison)' if poison else ''}: {type(error).__name__}: {error}", pytrace=True)
        if len(others) != len(self.kept):
            self._cache.set(KEPT, others)


@pytest.fixture
def seeds(request: pytest.FixtureRequest, journals: Path, codec: TextCodec, quiet: None) -> Seeds:
    assert request.config.cache is not None
    return Seeds(request.config.cache, journals, codec)


def test_seeds_that_failed_before(seeds: Seeds) -> None:
    seeds.check(REGRESSIONS)
    seeds.check(POISON_REGRESSIONS, poison=True)
    for seed, poison in seeds.kept:
        seeds.check_one(seed, poison)


@pytest.mark.parametrize("part", range(PARTS))
def test_seeded_schedules(part: int, seeds: Seeds) -> None:
    seeds.check(range(START + part, START + COUNT, PARTS), limit_s=LIMIT_S / PARTS)
    if SEEN["seeds"] >= ENOUGH:
        assert SEEN.keys() >= OUTCOMES, f"never seen in {SEEN['seeds']} seeds: {sorted(OUTCOMES - SEEN.keys())}"


def test_schedules_with_a_poison_request(seeds: Seeds) -> None:
    seeds.check(range(START, START + COUNT // 20), poison=True, limit_s=LIMIT_S / PARTS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_more_schedules(seeds: Seeds) -> None:
    for seed in range(1_000_000, 1_000_000 + 100_000):
        seeds.check_one(seed, poison=seed % 20 == 0)
