"""What is made ready for the next group while one is committed: the store holds the same with it and without it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.tiers.sample import BLOCK, LAYOUT, World, flip, some_tokens
from tiers import drain as drain_file
from tiers import failpoints
from tiers.ahead import Ahead
from tiers.drain import Drain
from tiers.errors import StoreFailed
from tiers.lane_format import data_offset
from tiers.lane_reader import LaneReader
from tiers.track import WholeBlock

TOKENS = some_tokens(30 * BLOCK + 3)
CUTS = [5, 8, 16, 19, 43, 44, 45, 46, 80, 81, 120, 160, 161, 200, len(TOKENS)]


@pytest.fixture(params=["ready in time", "ended at once"])
def uses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Small groups; whether each block's value was ready. Commits are too fast here to leave time, so the drain waits for it, or never."""
    used: list[bool] = []
    monkeypatch.setattr(drain_file, "GROUP_BYTES", LAYOUT.frame_bytes(3 * BLOCK))
    monkeypatch.setattr(drain_file, "FIRST_GROUP_BYTES", LAYOUT.frame_bytes(3 * BLOCK))
    if request.param == "ready in time":
        monkeypatch.setattr(Ahead, "_is_ending", lambda _: False)
    else:
        monkeypatch.setattr(Ahead, "_run", lambda *_: None)
    value = Ahead.value

    def noted(self: Ahead, block: WholeBlock) -> np.ndarray | None:
        found = value(self, block)
        used.append(found is not None)
        return found

    monkeypatch.setattr(Ahead, "value", noted)
    yield used
    assert any(used) == (request.param == "ready in time")


def test_blocks_are_the_same(world: World, uses: list[bool]) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, CUTS)
    world.capture(lane, "b", TOKENS[::-1].copy(), CUTS, stream="other", session="other")
    assert world.drain()["blocks_put"] == 60
    assert world.restorable(TOKENS) == world.restorable(TOKENS[::-1].copy()) == len(TOKENS)


def test_a_block_is_stored_once(world: World, uses: list[bool]) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, CUTS)
    world.capture(lane, "b", TOKENS, CUTS, stream="other")
    counts = world.drain()
    assert (counts["blocks_put"], counts["blocks_shared"]) == (30, 30)


def test_a_flipped_record_never_becomes_a_block(world: World, uses: list[bool]) -> None:
    world.capture(world.lane(), "a", TOKENS, CUTS)
    reader = LaneReader.open(world.paths.lane("e0"))
    record = reader.records(0)[9]  # rows [46, 80)
    flip(world.paths.lane("e0"), data_offset(64) + record.payload_offset + 200)
    counts = world.drain()
    assert counts["bad_records"] == 1
    assert world.restorable(TOKENS) == 46


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_after_a_failed_commit_all_is_taken_again(failing: int, world: World, uses: list[bool]) -> None:
    world.capture(world.lane(), "a", TOKENS, CUTS)
    drain = Drain(world.paths, world.settings)
    drain.open()
    failpoints.arm(f"drain.commit.before:{failing}:EIO")
    try:
        with pytest.raises(StoreFailed):
            drain.flush(sync=True)
    finally:
        failpoints.arm(None)
    drain._retry_at = 0
    drain.flush(sync=True)
    drain.close()
    assert world.restorable(TOKENS) == len(TOKENS)
