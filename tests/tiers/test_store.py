from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.sample import BLOCK, LAYOUT, ROOT, World, rows, sequence, some_tokens
from tiers import store as store_file
from tiers.errors import BadBlock, OtherFormat, StoreFailed
from tiers.lane_format import OpenPayload
from tiers.layout import BlockId, block_chain, block_id
from tiers.store import Store
from tiers.track import Part, Track, WholeBlock, common_tokens, cut_parts, open_track
from tiers.values import KIND_BLOCK, frame_offset, pack_value, unpack_value
from tiers.view import StoreReader

TOKENS = some_tokens(4 * BLOCK)
CHAIN = block_chain(ROOT, "default", TOKENS, BLOCK)


@pytest.fixture
def store(world: World) -> Iterator[Store]:
    store = Store(world.paths.store, map_bytes=world.settings.store_map_bytes)
    yield store
    store.close()


def new_track() -> Track:
    return open_track(OpenPayload(ROOT, LAYOUT.entries, BLOCK, "default", "chat", "stream", 0, b""), 1)


def put_block(store: Store, parent: BlockId, tokens: np.ndarray, start: int = 0) -> BlockId:
    block = WholeBlock(block_id(parent, tokens), parent, start, tokens.tobytes(), [])
    with store.group() as group:
        group.frame_buffer(len(tokens), LAYOUT)[:] = rows(start, tokens)
        group.put_block(new_track(), block)
    return block.id


def test_block_comes_back(store: Store) -> None:
    block = put_block(store, CHAIN[0], TOKENS[:BLOCK])
    assert block == CHAIN[1]
    with store.snapshot() as view:
        value = view.block(block)
        assert (value.token_count, value.token_start, value.parent, value.root) == (BLOCK, 0, CHAIN[0], ROOT)
        assert value.tokens == TOKENS[:BLOCK].tobytes()
        assert np.array_equal(value.frame, rows(0, TOKENS[:BLOCK]))
        assert view.has_block(block) and view.node(block) is not None
        assert view.children(CHAIN[0]) == [block] and view.children(block) == []


def test_frame_of_a_large_value_is_aligned(store: Store) -> None:
    tokens = some_tokens(BLOCK)
    big = np.zeros(1, np.uint8)
    with store.group() as group:
        track = new_track()
        track.layout = type(LAYOUT)(((16, 256),))
        group.frame_buffer(BLOCK, track.layout)[:] = 7
        group.put_block(track, WholeBlock(block_id(CHAIN[0], tokens), CHAIN[0], 0, tokens.tobytes(), []))
    with store.snapshot() as view:
        big = view.block(block_id(CHAIN[0], tokens)).frame
        assert big.size == 16 * 256 * BLOCK and big.__array_interface__["data"][0] % 64 == 0


def test_value_has_golden_bytes() -> None:
    """The format of docs/log-format.md, to the byte. If this fails, raise the version."""
    frame = np.arange(LAYOUT.frame_bytes(2), dtype=np.uint8)
    value = np.empty(frame_offset(2) + frame.size, np.uint8)
    value[frame_offset(2) :] = frame
    pack_value(value, KIND_BLOCK, ROOT, BLOCK, b"parent-of-golden", 40, np.array([1, -2], "<i4").tobytes())
    assert frame_offset(2) == 112
    head = value[:112].tobytes()
    assert head[:8] == b"CBLK\x02\x00\x01\x00" and head[8:16].hex() == GOLDEN_CHECKSUM
    assert head[16:64] == b"\2\0\0\0\x28\0\0\0parent-of-goldenroot-of-the-test\x08\0\0\0\0\0\0\0"
    assert head[64:] == b"\1\0\0\0\xfe\xff\xff\xff" + bytes(40)


GOLDEN_CHECKSUM = "4ea44cf87e7ad468"


@given(byte=st.integers(0, 255), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_value_is_noticed(byte: int, bit: int) -> None:
    value = np.empty(frame_offset(3) + LAYOUT.frame_bytes(3), np.uint8)
    value[frame_offset(3) :] = rows(0, TOKENS[:3])
    pack_value(value, KIND_BLOCK, ROOT, BLOCK, CHAIN[0], 0, TOKENS[:3].tobytes())
    value[byte % value.size] ^= 1 << bit
    with pytest.raises(BadBlock):
        unpack_value(value, KIND_BLOCK, "here")


@pytest.mark.parametrize("size", [0, 10, 63, 64, 100])
def test_short_value_is_a_bad_block(size: int) -> None:
    value = np.zeros(frame_offset(3) + LAYOUT.frame_bytes(3), np.uint8)
    pack_value(value, KIND_BLOCK, ROOT, BLOCK, CHAIN[0], 0, TOKENS[:3].tobytes())
    with pytest.raises(BadBlock):
        unpack_value(value[:size], KIND_BLOCK, "here")


def test_block_under_another_id_is_a_bad_block(store: Store) -> None:
    put_block(store, CHAIN[0], TOKENS[:BLOCK])
    other = WholeBlock(CHAIN[2], CHAIN[0], 0, TOKENS[:BLOCK].tobytes(), [])
    with store.group() as group:
        group.frame_buffer(BLOCK, LAYOUT)[:] = rows(0, TOKENS[:BLOCK])
        group.put_block(new_track(), other)
    with store.snapshot() as view, pytest.raises(BadBlock, match="not those of its id"):
        view.block(CHAIN[2])


@pytest.mark.parametrize("branches", [1, 2, 40])
def test_best_child_shares_most_tokens(store: Store, branches: int) -> None:
    random = np.random.default_rng(5)
    children = [random.integers(0, 3, BLOCK).astype(np.int32) for _ in range(branches)]
    for tokens in children:
        put_block(store, CHAIN[0], tokens)
    put_block(store, CHAIN[1], TOKENS[:BLOCK])  # neighbours of another parent
    put_block(store, BlockId(bytes(16)), TOKENS[:BLOCK])
    put_block(store, BlockId(b"\xff" * 16), TOKENS[:BLOCK])
    with store.snapshot() as view:
        for _ in range(50):
            wanted = random.integers(0, 3, random.integers(1, BLOCK + 1)).astype(np.int32).tobytes()
            expected = max(common_tokens(wanted, tokens.tobytes()) for tokens in children)
            found = view.best_child(CHAIN[0], wanted)
            assert (found[1] if found else 0) == expected


def test_group_that_raises_is_dropped_whole(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.group() as group:
        group.put_progress(sequence("a"), new_track(), 0, 0)
        raise ZeroDivisionError
    with store.snapshot() as view:
        assert view.progress(sequence("a")) is None


def test_store_of_another_version_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(world.paths.store, map_bytes=1 << 24).close()
    monkeypatch.setattr(store_file, "STORE_VERSION", 3)
    with pytest.raises(OtherFormat, match="version 2"):
        Store(world.paths.store, map_bytes=1 << 24)
    monkeypatch.undo()
    Store(world.paths.store, map_bytes=1 << 24).close()


def test_store_that_cannot_be_made_says_so(world: World) -> None:
    world.paths.store.rmdir()
    world.paths.store.write_text("in the way")
    with pytest.raises(StoreFailed):
        Store(world.paths.store, map_bytes=1 << 24)


def test_garbage_for_a_store_says_so(world: World) -> None:
    (world.paths.store / "data.mdb").write_bytes(b"garbage" * 4096)
    with pytest.raises(StoreFailed):
        Store(world.paths.store, map_bytes=1 << 24)
    with pytest.raises(StoreFailed), StoreReader(world.paths.store).snapshot():
        pass


def test_reader_follows_a_replaced_store(world: World) -> None:
    reader = StoreReader(world.paths.store, map_bytes=1 << 24)
    for tokens in (TOKENS[:BLOCK], TOKENS[BLOCK : 2 * BLOCK]):
        store = Store(world.paths.store, map_bytes=1 << 24)
        block = put_block(store, CHAIN[0], tokens)
        store.close()
        with reader.snapshot() as view:
            assert view.children(CHAIN[0]) == [block]
        reader.close()
        for name in ("data.mdb", "lock.mdb"):
            (world.paths.store / name).rename(world.paths.store / f"old-{name}")


# ---------------------------------------------------------------- the track, pure


def test_track_seals_blocks_and_keeps_the_rest() -> None:
    track = new_track()
    assert track.add(0, 5, TOKENS[:5].tobytes(), "one") == []
    whole = track.add(5, 20, TOKENS[5:20].tobytes(), "two")
    assert whole is not None
    assert [block.id for block in whole] == CHAIN[1:3]
    assert whole[0].parts == [Part("one", 5, 0, 5), Part("two", 15, 0, 3)]
    assert whole[1].parts == [Part("two", 15, 3, 11)]
    assert (track.parent, track.block_start, track.position) == (CHAIN[2], 16, 20)
    assert track.parts == [Part("two", 15, 11, 15)] and track.tokens == TOKENS[16:20].tobytes()


def test_track_skips_what_it_has_and_refuses_a_gap() -> None:
    track = new_track()
    track.add(0, 10, TOKENS[:10].tobytes(), "one")
    assert track.add(0, 10, TOKENS[:10].tobytes(), "again") == []
    assert track.add(4, 12, TOKENS[4:12].tobytes(), "overlap") == []
    assert track.parts == [Part("one", 10, 8, 10), Part("overlap", 8, 6, 8)]
    assert track.add(13, 14, TOKENS[13:14].tobytes(), "gap") is None
    assert track.position == 12


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_common_tokens(left: list[int], right: list[int]) -> None:
    expected = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        expected += 1
    packed = [np.array(tokens, "<i4").tobytes() for tokens in (left, right)]
    assert common_tokens(*packed) == expected


def test_cut_parts() -> None:
    parts = [Part("a", 9, 2, 5), Part("b", 4, 0, 4)]
    assert cut_parts(parts, 0, 7) == parts
    assert cut_parts(parts, 1, 4) == [Part("a", 9, 3, 5), Part("b", 4, 0, 1)]
    assert cut_parts(parts, 0, 0) == []


@pytest.mark.parametrize("key", [b"version", b"version_copy"])
def test_a_flipped_version_is_no_later_one(world: World, key: bytes) -> None:
    """The version stands in the store twice: one of the two that differs was flipped."""
    given = {"map_bytes": world.settings.store_map_bytes}
    Store(world.paths.store, **given).close()
    for flipped in (b"3", b"6", b"0", b"r"):
        store = Store(world.paths.store, **given)
        with store.group() as group:
            group.put_meta(key, flipped)
        store.close()
        reader = StoreReader(world.paths.store, **given)
        with reader.snapshot() as view:
            assert bytes(view.raw("meta", key)) == flipped
        reader.close()
    store = Store(world.paths.store, **given)
    with store.snapshot() as view:
        assert [bytes(view.raw("meta", name)) for name in (b"version", b"version_copy")] == [b"2", b"2"]
    store.close()
