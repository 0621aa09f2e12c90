"""The list of free pages of a store's file: right after any work, and a bit of it that was flipped is found before anybody writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.sample import BLOCK, World, sequence, some_tokens
from tiers import free_list
from tiers.compaction import Compaction
from tiers.errors import StoreFailed
from tiers.free_list import free_list_problem
from tiers.keeper_operations import Operations
from tiers.store import Store


def churned(world: World) -> Path:
    """A store that has stored, folded, freed and gone on, looked at after each."""
    data, lane, drain = world.paths.store / "data.mdb", world.lane(), world.drained()
    for turn in range(6):
        tokens = some_tokens(12 * BLOCK, seed=turn)
        world.capture(lane, f"s{turn}", tokens, range(BLOCK, 12 * BLOCK + 1, BLOCK), session=f"chat-{turn % 3}")
        lane.append_close(sequence(f"s{turn}"), 1, 12 * BLOCK)
        drain.flush(sync=True)
        if turn % 2:
            for _ in Compaction(drain, settle_s=0, grace_s=0).run():
                pass
        if turn == 4:
            Operations(drain).remove("default", "chat-0", force=True, dry_run=False)
        assert free_list_problem(data) == ""
    drain.close()
    assert free_list_problem(data) == ""
    return data


def lists(data: Path) -> Iterator[np.ndarray]:
    file = os.open(data, os.O_RDONLY)
    try:
        page_bytes, root, _, last_page = free_list._newest_root(file)  # type: ignore[misc]
        yield from free_list._lists(file, page_bytes, root, last_page, 32)
    finally:
        os.close(file)


def test_a_page_in_use_that_looks_free_is_found_before_anybody_writes(world: World) -> None:
    data = churned(world)
    good = data.read_bytes()
    known = list(lists(data))
    free = {int(page) for ids in known for page in ids[1:]}
    blocks = {at // 4096 for at in range(0, len(good), 4096) if good[at + 16 : at + 20] == b"CBLK"}
    found = list[bytearray]()
    for ids in known:
        at = good.find(ids.tobytes())
        for index, page in enumerate(map(int, ids[1:]), 1):
            for bit in range(10):
                other = page ^ 1 << bit
                if other not in free and other < len(good) // 4096:
                    flipped = bytearray(good)
                    flipped[at + 8 * index : at + 8 * index + 8] = other.to_bytes(8, "little")
                    data.write_bytes(flipped)
                    assert other not in blocks or free_list_problem(data)
                    if "in use" in free_list_problem(data):
                        found.append(flipped)
    assert len(found) > 3
    data.write_bytes(found[0])
    with pytest.raises(StoreFailed, match="in use"):
        Store(world.paths.store, map_bytes=world.settings.store_map_bytes)
