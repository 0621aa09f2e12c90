"""Rows without a window, read alone: what a restore takes of the blocks before the last window."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.tiers.sample import BLOCK, LAYOUT, ROOT, World, append_rows, flip, rows, sequence, some_tokens
from tiers.errors import BadBlock
from tiers.keys import Keyring
from tiers.layout import Layout
from tiers.prefix import Extent, FrameSlice, PrefixFinder
from tiers.view import StoreReader

WINDOWED = dataclasses.replace(LAYOUT, windows=(0, 2 * BLOCK))
KEPT = LAYOUT.frame_bytes(BLOCK, groups=1)
TOKENS = some_tokens(3 * BLOCK + 3)


def store(world: World, layout: Layout = WINDOWED) -> None:
    lane = world.lane()
    lane.append_open(sequence("a"), 1, ROOT, layout, BLOCK, "default", "chat", "a", TOKENS[:0])
    append_rows(lane, "a", 0, TOKENS)
    world.drain()


def read_each(finder: PrefixFinder) -> list[tuple[Extent, FrameSlice]]:
    """All extents, read without windows; frames copied."""
    with finder.reading() as read:
        found = read.find(ROOT, "default", TOKENS, limit=len(TOKENS), block_tokens=BLOCK)
        slices = [(extent, read(extent, windows=False)) for extent in found]
        return [(extent, piece._replace(frame=piece.frame.copy())) for extent, piece in slices]


def spoil(world: World, block: int, offset: int) -> None:
    path = world.paths.store / "data.mdb"
    at = path.read_bytes().find(rows(block * BLOCK, TOKENS[block * BLOCK : (block + 1) * BLOCK]).tobytes())
    assert at > 0
    flip(path, at + offset)


def test_blocks_give_the_rows_without_a_window_alone(world: World) -> None:
    store(world)
    *blocks, (tail, whole) = read_each(world.finder())
    assert len(blocks) == 3
    for extent, piece in blocks:
        assert (piece.groups, piece.frame.size) == (1, KEPT)
        expected = rows(extent.token_start, TOKENS[extent.token_start : extent.token_end])
        assert np.array_equal(piece.frame, expected[:KEPT])
        assert [view.shape[1] for view in WINDOWED.views(piece.frame, BLOCK, piece.groups)] == [BLOCK, 0]
    assert whole.frame.size == LAYOUT.frame_bytes(tail.token_count), "a tail is read whole"


def test_damage_counts_where_it_was_read(world: World) -> None:
    store(world)
    finder = world.finder()
    spoil(world, 1, KEPT + 3)
    assert np.array_equal(read_each(finder)[1][1].frame, rows(BLOCK, TOKENS[BLOCK : 2 * BLOCK])[:KEPT])
    with finder.reading() as read:
        found = read.find(ROOT, "default", TOKENS, limit=len(TOKENS), block_tokens=BLOCK)
        with pytest.raises(BadBlock, match=r"checksum.*tokens \[8, 16\)"):
            read(found[1])
    spoil(world, 2, KEPT - 1)
    with pytest.raises(BadBlock, match=r"checksum.*tokens \[16, 24\)"):
        read_each(finder)


@pytest.mark.parametrize("windows", [(), (2 * BLOCK, 0), (BLOCK, 2 * BLOCK)])
def test_where_they_do_not_come_first_all_is_read(world: World, windows: tuple[int, ...]) -> None:
    store(world, dataclasses.replace(LAYOUT, windows=windows))
    for extent, piece in read_each(world.finder()):
        assert np.array_equal(piece.frame, rows(extent.token_start, TOKENS[extent.token_start : extent.token_end]))


def test_a_sealed_block_says_nothing_of_its_rows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONCORDIA_STORE_KEYS", f"default={'5a' * 32}")
    store(world)
    reader = StoreReader(world.paths.store, map_bytes=world.settings.store_map_bytes, keys=Keyring.from_environment())
    with reader.snapshot() as view:
        assert {view.node(block).leading for block in map(bytes, dict(view.scan("nodes")))} == {None}  # type: ignore[arg-type, union-attr]
    for extent, piece in read_each(PrefixFinder(reader, world.paths.lane_dir)):
        assert np.array_equal(piece.frame, rows(extent.token_start, TOKENS[extent.token_start : extent.token_end]))
