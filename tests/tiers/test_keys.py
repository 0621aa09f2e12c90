"""Encryption at rest: what a tenant's key hides, what happens without it, and that nothing else changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.keyed import (
    KEY,
    OTHER,
    POINT_BYTES,
    SECRETS,
    SESSION,
    TOKENS,
    check_point,
    is_readable,
    put_point,
)
from tests.tiers.sample import (
    BLOCK,
    LAYOUT,
    ROOT,
    World,
    append_point,
    append_rows,
    read_all,
    sequence,
    some_tokens,
    state,
)
from tests.tiers.test_compaction import answer, check_usage, compact, counts, restorable
from tiers import late_keys
from tiers.compaction import Compaction
from tiers.drain import Drain
from tiers.errors import BadBlock
from tiers.keeper_jobs import Jobs
from tiers.keeper_operations import Operations
from tiers.keys import FILE_VARIABLE, KEYS_VARIABLE, SEALED_BYTES, BadKeys, Keyring, Locked
from tiers.lane_format import PointKind
from tiers.layout import Layout
from tiers.shrink import Shrink
from tiers.store import Store
from tiers.verify import Checked, verify

LAYOUT_WITH_STATE = Layout(LAYOUT.groups, LAYOUT.windows, 40)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv(KEYS_VARIABLE, f"secret = {KEY}\n# a comment\nanother = {OTHER}")
    return monkeypatch


def capture(world: World, namespace: str = "secret") -> None:
    answer(world, world.lane(), "a", TOKENS, session=SESSION, namespace=namespace)
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
    assert not is_readable((world.paths.store / "data.mdb").read_bytes())
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
    put_point(world)
    world.drain()
    assert not on_disk(world, state(0, POINT_BYTES)[:32].tobytes())
    check_point(world)


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
    assert not is_readable((world.paths.store / "data.mdb").read_bytes())


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


# ---------------------------------------------------------------- a key that comes later


@pytest.fixture
def open_store(world: World) -> World:
    """Two tenants without keys: one at rest with a base and a tail, both with points, rejected turns and sequences."""
    lane, layout = world.lane(), LAYOUT_WITH_STATE
    for name, namespace in (("a", "secret"), ("b", "open")):
        lane.append_open(sequence(name), 1, ROOT, layout, BLOCK, namespace, SESSION, name, TOKENS[:0])
        append_rows(lane, name, 0, TOKENS[:20], namespace=namespace)
        append_point(lane, name, 20, PointKind.MESSAGE, layout.state_bytes, namespace=namespace)
        append_rows(lane, name, 20, TOKENS[20:], namespace=namespace)
    lane.append_close(sequence("a"), 1, len(TOKENS))
    drain = world.drained()
    compact(drain)
    drain.close()
    lane.append_open(sequence("c"), 1, ROOT, layout, BLOCK, "secret", "another", "c", TOKENS[:40])
    append_rows(lane, "c", 40, TOKENS[40:42], namespace="secret")
    world.drain()
    return world


def open_ones(drain: Drain) -> int:
    with drain.store().snapshot() as view:
        return late_keys.count_open(view)


@pytest.mark.parametrize("key", [f"secret = {KEY}", f"* = {KEY}"])
def test_what_was_stored_before_the_key_is_counted_and_sealed_by_compaction(
    open_store: World, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    world = open_store
    monkeypatch.setenv(KEYS_VARIABLE, key)
    drain = Drain(world.paths, world.settings)
    drain.open()
    found = open_ones(drain)
    assert found == (10 if "secret" in key else 18), "blocks, points, tails, sequences and a base"
    checked = Checked()
    assert compact(drain, dry_run=True).counts["sealed_values"] == found == open_ones(drain)
    assert compact(drain).counts["sealed_values"] == found
    assert open_ones(drain) == 0 and "sealed_values" not in compact(drain).counts
    assert restorable(world, drain, TOKENS, "secret") == restorable(world, drain, TOKENS, "open") == 43
    check_usage(drain)
    with drain.store().snapshot() as view:
        assert late_keys.is_unscrubbed(view) and not late_keys.marked(view)
    for _ in Shrink(drain).run():
        pass
    with drain.store().snapshot() as view:
        assert not late_keys.is_unscrubbed(view)
    drain.close()
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes, checked=checked)) == []
    assert checked.open == checked.locked == 0
    assert [on_disk(world, what) for what in SECRETS] == ["*" not in key] * 4
    monkeypatch.delenv(KEYS_VARIABLE)
    with pytest.raises(BadBlock, match="key that isn't there"):
        read_all(world.finder(), TOKENS, namespace="secret")


def test_sealing_goes_on_where_it_stopped(open_store: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.compaction.BATCH", 2)
    monkeypatch.setenv(KEYS_VARIABLE, f"secret = {KEY}")
    left = []
    for steps in range(3, 30):
        drain = Drain(open_store.paths, open_store.settings)
        run = Compaction(drain, settle_s=1e9, grace_s=0, collect=False).run()
        for _ in range(steps):
            next(run, None)
        run.close()
        left.append(open_ones(drain))
        assert restorable(open_store, drain, TOKENS, "secret") == 43
        check_usage(drain)
        drain.close()
    assert left == sorted(left, reverse=True) and left[0] > 0 and left[-1] == 0


def test_the_keeper_seals_in_the_background_and_writes_the_file_anew(
    open_store: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, f"* = {KEY}")
    monkeypatch.setattr("tiers.keeper_jobs.GRACE_S", 0.0)
    settings = dataclasses.replace(open_store.settings, compact_interval_s=0.001)
    drain = Drain(open_store.paths, settings)
    jobs = Jobs(drain)
    for _ in range(2000):
        jobs.work()
        with drain.store().snapshot() as view:
            if jobs.idle and not late_keys.marked(view) and not late_keys.is_unscrubbed(view):
                break
    assert open_ones(drain) == 0 and restorable(open_store, drain, TOKENS, "secret") == 43
    drain.close()
    assert not on_disk(open_store, TOKENS[:4].tobytes())


def test_a_store_without_room_for_the_mark_opens_all_the_same(
    open_store: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise lmdb.MapFullError("full")

    monkeypatch.setenv(KEYS_VARIABLE, f"secret = {KEY}")
    with monkeypatch.context() as patched:
        patched.setattr(late_keys, "mark", full)
        drain = Drain(open_store.paths, open_store.settings)
        assert restorable(open_store, drain, TOKENS, "secret") == 43 and open_ones(drain) == 0
        drain.close()
    said = capsys.readouterr()
    assert "store.not_marked" in said.out + said.err
    drain = Drain(open_store.paths, open_store.settings)
    assert open_ones(drain) == 10
    drain.close()


def test_damaged_value_stays_damaged_when_it_is_sealed(open_store: World, monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Drain(open_store.paths, open_store.settings)
    with drain.store().group() as group:
        for key, raw in [(key, bytearray(raw)) for key, raw in group.scan_raw("blocks")][:2]:
            raw[-1] ^= 1
            group._txn.put(key, bytes(raw), db=group._db[b"blocks"])
    drain.close()
    monkeypatch.setenv(KEYS_VARIABLE, f"* = {KEY}")
    drain = Drain(open_store.paths, open_store.settings)
    compact(drain)
    drain.close()
    found = list(verify(open_store.paths.store, map_bytes=open_store.settings.store_map_bytes))
    assert [(one.kind, one.reason) for one in found] == [("block", "a stored value's checksum is wrong")] * 2
