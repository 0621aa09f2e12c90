"""Encryption at rest: what a tenant's key hides, what happens without it, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.sample import (
    BLOCK,
    ROOT,
    World,
    append_point,
    append_rows,
    read_all,
    rows,
    sequence,
    some_tokens,
    state,
)
from tests.tiers.test_compaction import answer, check_usage, compact, counts, restorable
from tiers.drain import Drain
from tiers.errors import BadBlock
from tiers.keeper_operations import Operations
from tiers.keys import FILE_VARIABLE, KEYS_VARIABLE, SEALED_BYTES, BadKeys, Keyring, Locked
from tiers.lane import PointKind
from tiers.layout import Layout
from tiers.shrink import Shrink
from tiers.store import Store
from tiers.verify import verify

TOKENS = some_tokens(5 * BLOCK + 3)
KEY, OTHER = "11" * 32, "22" * 32


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv(KEYS_VARIABLE, f"secret = {KEY}\n# a comment\nanother = {OTHER}")
    return monkeypatch


def capture(world: World, namespace: str = "secret") -> None:
    answer(world, world.lane(), "a", TOKENS, session="the-session-name", namespace=namespace)
    world.drain()


def on_disk(world: World, what: bytes) -> bool:
    return what in (world.paths.store / "data.mdb").read_bytes()


# ---------------------------------------------------------------- keys


def test_keys_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"\n  a = {KEY}  # of a\nname with = in it = {OTHER}\n")
    ring = Keyring.from_environment({FILE_VARIABLE: str(file)})
    assert ring.has("a") and ring.has("name with = in it") and not ring.has("b")
    assert not Keyring.from_environment({}) and Keyring.from_environment({KEYS_VARIABLE: f"* = {KEY}"}).has("anybody")


@pytest.mark.parametrize("text", ["a", "a = 12", f"= {KEY}", f"a = {KEY}00", f"a = {'zz' * 32}"])
def test_keys_that_cannot_be_read_are_refused_and_not_shown(text: str) -> None:
    with pytest.raises(BadKeys, match="line 1") as caught:
        Keyring.from_environment({KEYS_VARIABLE: text})
    assert KEY not in str(caught.value)


def test_missing_key_file_is_said() -> None:
    with pytest.raises(BadKeys, match="can't be read"):
        Keyring.from_environment({FILE_VARIABLE: "/nowhere/keys"})


@given(st.binary(max_size=200), st.integers(0, 300), st.integers(0, 7), st.integers(0, 300))
def test_sealed_value_comes_back_and_any_change_is_noticed(value: bytes, byte: int, bit: int, size: int) -> None:
    ring = Keyring({"a": bytes.fromhex(KEY)})
    sealed = ring.seal("a", "blocks", b"key", value)
    assert ring.open("blocks", b"key", sealed) == value and len(sealed) == len(value) + SEALED_BYTES
    with pytest.raises(BadBlock):
        ring.open("tails", b"key", sealed)
    with pytest.raises(BadBlock):
        ring.open("blocks", b"other", sealed)
    changed = bytearray(sealed)
    changed[4 + byte % (len(sealed) - 4)] ^= 1 << bit
    with pytest.raises(BadBlock):
        ring.open("blocks", b"key", bytes(changed))
    with pytest.raises(BadBlock):
        ring.open("blocks", b"key", sealed[: max(4, size % len(sealed))])
    with pytest.raises(Locked):
        Keyring({"a": bytes.fromhex(OTHER)}).open("blocks", b"key", sealed)


def test_each_tenant_has_a_key_of_its_own_under_a_common_one() -> None:
    ring = Keyring({"*": bytes.fromhex(KEY)})
    one, two = (ring.seal(name, "blocks", b"key", b"value") for name in ("one", "two"))
    assert one[8:16] != two[8:16]
    again = Keyring({"*": bytes.fromhex(KEY)})
    again.know("one")
    assert again.open("blocks", b"key", one) == b"value"


# ---------------------------------------------------------------- the store


def test_nothing_of_the_tenant_is_readable_on_the_disk(world: World, keys: pytest.MonkeyPatch) -> None:
    capture(world)
    for what in (
        TOKENS[:4].tobytes(),
        TOKENS[40:43].tobytes(),
        rows(0, TOKENS[:8])[:16].tobytes(),
        b"the-session-name",
    ):
        assert not on_disk(world, what)
    assert read_all(world.finder(), TOKENS, namespace="secret")[0] == 43
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []


def test_tenant_without_a_key_is_stored_as_ever(world: World, keys: pytest.MonkeyPatch) -> None:
    capture(world, "open")
    assert on_disk(world, TOKENS[:4].tobytes())
    assert read_all(world.finder(), TOKENS, namespace="open")[0] == 43


@pytest.mark.parametrize("diverges_at", [0, 1, 8, 21, 41])
def test_divergent_tokens_reuse_up_to_the_divergence(world: World, keys: pytest.MonkeyPatch, diverges_at: int) -> None:
    capture(world)
    other = TOKENS.copy()
    other[diverges_at:] += 1
    assert read_all(world.finder(), other, namespace="secret")[0] == diverges_at


def test_without_the_key_it_is_a_bad_block_with_a_reason(world: World, keys: pytest.MonkeyPatch) -> None:
    capture(world)
    keys.setenv(KEYS_VARIABLE, f"secret = {OTHER}")
    with pytest.raises(BadBlock, match="key that isn't there"):
        read_all(world.finder(), TOKENS, namespace="secret")


def test_points_are_sealed(world: World, keys: pytest.MonkeyPatch) -> None:
    lane = world.lane()
    lane.append_open(sequence("a"), 1, ROOT, Layout((), state_bytes=200), BLOCK, "secret", "chat", "a", TOKENS[:0])
    append_point(lane, "a", 0, PointKind.CHUNK, 200)
    world.drain()
    assert not on_disk(world, state(0, 200)[:32].tobytes())
    with world.finder().reading() as read:
        (found,) = read.points(ROOT, "secret", TOKENS, limit=43, block_tokens=BLOCK)
        assert np.array_equal(read.point(found), state(0, 200))


def test_goes_on_after_a_restart_of_the_keeper(world: World, keys: pytest.MonkeyPatch) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [11], namespace="secret")
    world.drain()
    append_rows(lane, "a", 11, TOKENS[11:])
    world.drain()
    assert read_all(world.finder(), TOKENS, namespace="secret")[0] == 43


def test_compacted_and_shrunk(world: World, keys: pytest.MonkeyPatch) -> None:
    capture(world)
    drain = Drain(world.paths, world.settings)
    assert compact(drain).counts["folded"] == 1
    shrink = Shrink(drain)
    for _ in shrink.run():
        pass
    assert shrink.progress.counts["bad_records"] == 0
    assert restorable(world, drain, TOKENS, "secret") == 43
    check_usage(drain)
    drain.close()
    assert not on_disk(world, TOKENS[:4].tobytes()) and not on_disk(world, b"the-session-name")


@pytest.mark.parametrize("compacted", [False, True])
def test_forgotten_key(world: World, keys: pytest.MonkeyPatch, compacted: bool) -> None:
    """Nothing is freed by mistake; once it is given up, everything of it goes, and nothing of others."""
    capture(world)
    drain = Drain(world.paths, world.settings)
    if compacted:
        compact(drain)
    answer(world, world.lane("e1"), "b", TOKENS[:30], namespace="open")
    drain.flush(sync=True)
    drain.close()
    keys.setenv(KEYS_VARIABLE, f"another = {OTHER}")
    drain = Drain(world.paths, world.settings)
    assert [entry["namespace"] for entry in Operations(drain).sessions()] == ["open"]
    with pytest.raises(BadBlock, match="key that isn't there"):
        compact(drain)
    assert counts(drain)["blocks"] == 8
    assert sum(Operations(drain).drop_locked().values()) == 1
    compact(drain)
    assert counts(drain)["blocks"] == 3 and counts(drain)["tails"] == 1
    assert restorable(world, drain, TOKENS[:30], "open") == 30
    check_usage(drain)
    drain.close()


def test_nothing_is_written_openly_for_a_tenant_whose_key_is_missing(world: World, keys: pytest.MonkeyPatch) -> None:
    capture(world)
    keys.delenv(KEYS_VARIABLE)
    other = some_tokens(43, seed=8)
    world.capture(world.lane("e1"), "b", other, [43], namespace="secret")
    assert world.drain()["bad_records"] == 1
    assert not on_disk(world, other[:4].tobytes())


def test_store_says_which_keys_are_missing(
    world: World, keys: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capture(world)
    keys.delenv(KEYS_VARIABLE)
    Store(world.paths.store, map_bytes=world.settings.store_map_bytes).close()
    said = capsys.readouterr()
    assert "store.key_missing" in said.out + said.err and "secret" in said.out + said.err
