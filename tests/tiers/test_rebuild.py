"""A damaged base is made again from what is stored, whichever byte of it was flipped; what can't be made again is left and named."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.tiers.sample import BLOCK, World, flip, some_tokens
from tests.tiers.test_compaction import answer, check_usage, compact, restorable
from tiers.base import Base, SessionKey, pack_base, session_key
from tiers.drain import Drain
from tiers.keeper_jobs import Jobs
from tiers.keeper_operations import Operations
from tiers.keys import KEYS_VARIABLE
from tiers.rebuild import TokenList, from_wire, rebuilt_base, to_wire
from tiers.repair import ASIDE
from tiers.verify import verify

TOKENS = some_tokens(5 * BLOCK + 3)
KEY = session_key("default", "chat")
LIST = TokenList("default", "chat", TOKENS.astype("<i4").tobytes(), 5)


@pytest.fixture
def drain(world: World) -> Iterator[Drain]:
    """A store with one compacted session, and another one that goes on from its beginning."""
    lane = world.lane()
    answer(world, lane, "first", TOKENS[:20])
    answer(world, lane, "second", TOKENS, start=16)
    answer(world, lane, "third", np.concatenate([TOKENS[:16], some_tokens(9, seed=9)]), session="other")
    drain = Drain(world.paths, world.settings)
    drain.flush(sync=True)
    assert compact(drain).counts["folded"] == 2
    yield drain
    drain.close()


def base_of(drain: Drain, key: SessionKey = KEY) -> Base:
    with drain.store().snapshot() as view:
        base = view.base(key)
    assert base is not None
    return base


def put_raw(drain: Drain, raw: bytes, key: SessionKey = KEY) -> None:
    with drain.store().group() as group:
        group._txn.put(key, raw, db=group._db[b"bases"])


def raw_of(drain: Drain, key: SessionKey = KEY) -> bytes:
    with drain.store().snapshot() as view:
        return bytes(view.raw("bases", key))


def test_any_flipped_byte_of_a_base_with_its_token_list_at_hand(drain: Drain) -> None:
    """Offline repair and the gateway have the session's list: then everything comes back."""
    whole, raw = base_of(drain), raw_of(drain)
    for at in range(len(raw)):
        put_raw(drain, raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        with drain.store().snapshot() as view:
            made = rebuilt_base(view, KEY, [LIST])
        assert made is not None, at
        assert (made.tokens, made.blocks, made.points) == (whole.tokens, whole.blocks, whole.points), at
        assert (made.namespace, made.session, made.root) == ("default", "chat", whole.root), at
        assert made.tail == whole.tail, at


def test_most_flipped_bytes_of_a_base_without_anything_else(drain: Drain) -> None:
    """Header, tokens, block ids, the tail's name and numbers: what the bytes still say is enough. Structure and names aren't."""
    whole, raw = base_of(drain), raw_of(drain)
    inside = [raw.find(whole.tokens), raw.find(whole.blocks), raw.find(whole.tail)]
    sizes = [len(whole.tokens), len(whole.blocks), len(whole.tail)]
    must = {at for start, size in zip(inside, sizes, strict=True) for at in range(start, start + size)} | set(range(16))
    for at in range(len(raw)):
        put_raw(drain, raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        with drain.store().snapshot() as view:
            made = rebuilt_base(view, KEY)
        assert made is not None or at not in must, at
        if made is not None:
            assert whole.tokens.startswith(made.tokens) and whole.blocks.startswith(made.blocks), at
            assert (made.namespace, made.session) == ("default", "chat"), at
        if at in must:
            assert made is not None and (made.tokens, made.blocks, made.tail) == (
                whole.tokens,
                whole.blocks,
                whole.tail,
            )


@pytest.mark.parametrize("size", [0, 10, 16, 100, 400])
def test_a_base_that_was_cut(drain: Drain, size: int) -> None:
    whole = base_of(drain)
    put_raw(drain, raw_of(drain)[:size])
    with drain.store().snapshot() as view:
        assert rebuilt_base(view, KEY) is None
        made = rebuilt_base(view, KEY, [LIST])
    assert made is not None and (made.tokens, made.blocks) == (whole.tokens, whole.blocks)


def damage(drain: Drain, at: int) -> None:
    raw = raw_of(drain)
    put_raw(drain, raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])


def test_the_keeper_finds_it_by_itself_and_nothing_is_lost(world: World, drain: Drain) -> None:
    whole = base_of(drain)
    damage(drain, raw_of(drain).find(whole.tokens) + 40)
    jobs = Jobs(drain)
    jobs.look_at_bases()
    assert base_of(drain) == whole
    assert drain.stats()["bases_rebuilt"] == 1 and drain.stats()["bad_bases"] == []
    (kept,) = (world.paths.store / ASIDE).iterdir()
    assert kept.name == f"base-{KEY.hex()}.broken"
    assert compact(drain).counts.get("freed_blocks", 0) == 0
    assert restorable(world, drain, TOKENS) == len(TOKENS)
    check_usage(drain)


def test_a_compaction_finds_it_too_and_frees_nothing_of_it(world: World, drain: Drain) -> None:
    whole = base_of(drain)
    damage(drain, raw_of(drain).find(whole.blocks) + 3)
    done = compact(drain)
    assert done.counts["rebuilt_bases"] == 1 and done.counts.get("freed_blocks", 0) == 0
    assert base_of(drain) == whole
    drain.close()
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []


def test_one_that_cannot_be_made_again_waits_for_its_list(world: World, drain: Drain) -> None:
    whole = base_of(drain)
    put_raw(drain, raw_of(drain)[:30])
    losses = drain.stats()["losses"]
    Jobs(drain).look_at_bases()
    assert drain.stats()["bad_bases"] == [KEY.hex()]
    assert [row["session"] for row in Operations(drain).sessions()] == ["other"], "the others are listed as ever"
    other = TokenList("default", "nobody", LIST.tokens)
    assert Operations(drain).mend([KEY], from_wire(to_wire([other]))) == {"left": [KEY.hex()]}
    assert Operations(drain).mend([KEY], from_wire(to_wire([other, LIST]))) == {"left": []}
    assert drain.stats()["bad_bases"] == [] and drain.stats()["losses"] != losses
    made = base_of(drain)
    assert (made.tokens, made.blocks, made.tail, made.used_ms) == (whole.tokens, whole.blocks, whole.tail, 5)


def test_repair_makes_it_again_instead_of_dropping_it(world: World, drain: Drain) -> None:
    whole = base_of(drain)
    put_raw(drain, raw_of(drain)[:30])
    done = Operations(drain).repair([("base", KEY)], [LIST])["repaired"]
    assert (done["dropped"], done["rebuilt"], done["recompute"]) == (0, [KEY.hex()], [])
    assert base_of(drain).blocks == whole.blocks


def test_with_a_block_gone_it_ends_before_the_hole(world: World, drain: Drain) -> None:
    whole = base_of(drain)
    damage(drain, 20)
    with drain.store().group() as group:
        group.delete_block(whole.block_ids[2], TOKENS[24:32].astype("<i4").tobytes(), whole.block_ids[3])
    assert Operations(drain).mend([KEY], [LIST]) == {"left": []}
    made = base_of(drain)
    assert made.position == 24 and made.block_ids == whole.block_ids[:3] and made.tail == b""


def test_a_base_whose_key_is_not_there_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, f"default = {'11' * 32}")
    answer(world, world.lane(), "a", TOKENS)
    drain = Drain(world.paths, world.settings)
    drain.flush(sync=True)
    compact(drain)
    damage(drain, 60)
    assert Operations(drain).mend([KEY]) == {"left": [KEY.hex()]}, "its bytes say nothing"
    assert Operations(drain).mend([KEY], [LIST]) == {"left": []}
    assert base_of(drain).position == len(TOKENS)
    drain.close()
    monkeypatch.delenv(KEYS_VARIABLE)
    without = Drain(world.paths, world.settings)
    without.open()
    assert Operations(without).mend([KEY], [LIST]) == {"left": []} and without.counts["bases_rebuilt"] == 0
    without.close()


def test_what_is_stored_of_a_token_list_is_told(world: World, drain: Drain) -> None:
    shorter, stranger = LIST._replace(tokens=LIST.tokens[:40]), LIST._replace(namespace="another")
    assert Operations(drain).stored([LIST, shorter, stranger]) == {"stored": [43, 10, 0]}


def test_flips_in_the_file_itself(world: World, drain: Drain) -> None:
    """As a disk would do it, between two runs of the keeper."""
    whole, raw = base_of(drain), raw_of(drain)
    drain.close()
    at = (world.paths.store / "data.mdb").read_bytes().rfind(pack_base(whole))
    assert at > 0
    for offset in (20, raw.find(whole.tokens) + 5, raw.find(whole.blocks) + 40):
        flip(world.paths.store / "data.mdb", at + offset)
    again = Drain(world.paths, world.settings)
    again.open()
    Operations(again).repair([("base", KEY)], [LIST])
    assert restorable(world, again, TOKENS) == len(TOKENS) and base_of(again).blocks == whole.blocks
    again.close()
