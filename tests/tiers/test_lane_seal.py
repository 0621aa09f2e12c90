"""Lanes of tenants with a key: nothing of them is readable where the lane outlives the memory, and everything works as ever."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.golden.__main__ import GOLDEN_KEY
from tests.tiers.keyed import (
    KEY,
    OTHER,
    POINT_BYTES,
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
    append_rows,
    flip,
    read_all,
    rows,
    sequence,
    some_tokens,
    state,
)
from tests.tiers.test_golden import put_lane
from tiers.copy_sum import Memory
from tiers.drain import Drain
from tiers.errors import BadBlock, BadRecord
from tiers.keys import KEYS_VARIABLE, BadKeys, Keyring
from tiers.lane_format import PointKind, RecordType, data_offset
from tiers.lane_reader import LaneReader
from tiers.lane_seal import HEAD, LaneOpener, LaneSealer, LockedRecord, Shape, Where
from tiers.offline import recover
from tiers.paths import Paths
from tiers.staging import StagingRing
from tiers.verify import Checked, verify


@pytest.fixture
def keys(world: World, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv(KEYS_VARIABLE, f"secret = {KEY}")
    world.settings = dataclasses.replace(world.settings, lane_encryption="always")
    return monkeypatch


def readable(world: World) -> bool:
    """Whether anything of the tenant stands in a lane as it is."""
    return is_readable(b"".join(path.read_bytes() for path in world.paths.lane_dir.glob("*.lane")))


def capture(world: World, namespace: str = "secret", **more: object) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [11, 43], session=SESSION, namespace=namespace)
    lane.close()


def test_restored_from_the_lane_and_drained_as_ever(world: World, keys: pytest.MonkeyPatch) -> None:
    capture(world)
    assert not readable(world)
    assert read_all(world.finder(), TOKENS, namespace="secret") == (43, ["lane"] * 2)
    other = TOKENS.copy()
    other[21:] += 1
    assert read_all(world.finder(), other, namespace="secret")[0] == 21
    counts = world.drain()
    assert counts.get("bad_records", 0) == 0
    assert read_all(world.finder(), TOKENS, namespace="secret") == (43, ["disk"] * 6)


def test_rows_that_are_appended_from_where_they_lie_are_sealed(world: World, keys: pytest.MonkeyPatch) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [11], session=SESSION, namespace="secret")
    pieces = [Memory.of(rows(11, TOKENS[11:43]))]
    lane.append_rows(LAYOUT, sequence("a"), 1, 11, TOKENS[11:43], pieces, "secret")
    assert not readable(world)
    assert read_all(world.finder(), TOKENS, namespace="secret") == (43, ["lane"] * 2)


def test_tenants_without_a_key_share_the_lane_openly(world: World, keys: pytest.MonkeyPatch) -> None:
    capture(world, "open")
    assert readable(world)
    world.capture(world.lane(), "b", TOKENS, [43], namespace="secret")
    assert {read_all(world.finder(), TOKENS, namespace=name)[0] for name in ("open", "secret")} == {43}


def test_in_memory_nothing_is_sealed_unless_it_is_asked_for(
    world: World, tmp_path: Path, keys: pytest.MonkeyPatch
) -> None:
    world.settings = dataclasses.replace(world.settings, lane_encryption="auto")
    capture(world)
    assert readable(world) or not str(world.paths.lane_dir).startswith("/dev/shm")
    assert read_all(world.finder(), TOKENS, namespace="secret")[0] == 43


def test_on_a_file_system_it_is_sealed_by_itself(
    tmp_path: Path, keys: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk = World(Paths.at(tmp_path / "data", tmp_path / "lanes").make())
    monkeypatch.setattr("tiers.media.MEMORY_FILE_SYSTEMS", ())  # whatever the tests' own directory lies on
    capture(on_disk)
    assert not readable(on_disk)
    assert read_all(on_disk.finder(), TOKENS, namespace="secret")[0] == 43


def test_points_and_kinds(world: World, keys: pytest.MonkeyPatch) -> None:
    put_point(world)
    assert state(0, POINT_BYTES)[:32].tobytes() not in world.paths.lane("e0").read_bytes()
    check_point(world)
    assert world.drain()["points_put"] == 1


def test_without_the_key_nothing_is_found_nothing_is_damaged_and_recover_refuses(
    world: World, keys: pytest.MonkeyPatch
) -> None:
    capture(world)
    keys.setenv(KEYS_VARIABLE, f"secret = {OTHER}")
    assert read_all(world.finder(), TOKENS, namespace="secret")[0] == 0
    checked = Checked()
    found = verify(world.paths.store, world.paths.lane_dir, map_bytes=64 << 20, checked=checked)
    assert list(found) == [] and checked.locked == 3
    with pytest.raises(BadKeys, match="sealed"):
        recover(world.paths, world.settings)
    keys.delenv(KEYS_VARIABLE)
    assert read_all(world.finder(), TOKENS, namespace="secret")[0] == 0
    keys.setenv(KEYS_VARIABLE, f"secret = {KEY}")
    assert recover(world.paths, world.settings).sessions == {(SESSION, "a"): 43}
    assert read_all(world.finder(), TOKENS, namespace="secret")[0] == 43


def test_a_common_key_is_known_by_the_record_that_opens_a_sequence(world: World, keys: pytest.MonkeyPatch) -> None:
    keys.setenv(KEYS_VARIABLE, f"* = {KEY}")
    capture(world, "anybody")
    assert not readable(world)
    assert read_all(world.finder(), TOKENS, namespace="anybody")[0] == 43
    world.drain()
    append_rows(lane := world.lane(), "a", 43, some_tokens(2, seed=3), namespace="anybody")
    lane.close()
    drain = Drain(world.paths, world.settings)  # which has the name from the store alone
    drain.flush(sync=True)
    assert drain.counts["bad_records"] == 0
    drain.close()


def test_any_flip_is_found_and_never_served(world: World, keys: pytest.MonkeyPatch) -> None:
    capture(world)
    path = world.paths.lane("e0")
    reader = LaneReader.open(path)
    headers = reader.records(0)
    assert [header.sealed for header in headers] == [True] * 3
    start = data_offset(world.settings.lane_record_count)
    for header in headers:
        for at in range(0, header.payload_bytes, 7):
            flip(path, start + header.payload_offset + at, 1 << at % 8)
            fresh = LaneReader.open(path)
            with pytest.raises(BadRecord):
                fresh.payload(header)
            parts = (fresh.open_payload,) if header.type == RecordType.OPEN else (fresh.tokens, fresh.frame)
            bad = 0
            for part in parts:
                try:
                    part(header)  # type: ignore[operator]
                except BadRecord:
                    bad += 1
            padding = header.type == RecordType.ROWS and HEAD.size + 4 * header.token_count + 16 <= at < 192
            assert bad or padding, (header.number, at)
            fresh.close()
            flip(path, start + header.payload_offset + at, 1 << at % 8)
    flip(path, start + headers[1].payload_offset + headers[1].payload_bytes - 20)
    with pytest.raises(BadBlock):
        read_all(world.finder(), TOKENS[:11], namespace="secret")
    flip(path, start + headers[1].payload_offset + HEAD.size + 3)
    assert read_all(world.finder(), TOKENS[:11], namespace="secret")[0] == 0, "a miss: its tokens aren't known"


@given(st.binary(min_size=4, max_size=300), st.binary(max_size=300), st.integers(0, 4))
def test_a_payload_is_bound_to_its_record(small: bytes, large: bytes, field: int) -> None:
    ring = Keyring({"a": bytes.fromhex(KEY)})
    sealer, where = LaneSealer(ring), Where(2, 5, b"s" * 16, 7, 9)
    shape = Shape.of(0, len(small), len(large))
    payload = np.zeros(shape.payload_bytes, np.uint8)
    sealer.seal(payload, shape, "a", where, small, large)
    opener = LaneOpener(ring)
    assert opener.small(payload, where, len(small), "") == small
    assert opener.large(payload, where, len(small), "").tobytes() == large
    changed = [3, 6, b"t" * 16, 8, 10]
    elsewhere = where._replace(**{where._fields[field]: changed[field]})
    with pytest.raises(BadRecord):
        opener.small(payload, elsewhere, len(small), "")
    with pytest.raises(BadRecord):
        opener.large(payload, elsewhere, len(small), "")
    with pytest.raises(LockedRecord):
        LaneOpener(Keyring({"a": bytes.fromhex(OTHER)})).small(payload, where, len(small), "")
    for size in (0, 10, HEAD.size, shape.payload_bytes - len(large) - 17):
        with pytest.raises(BadRecord):
            opener.large(payload[: max(0, size)], where, len(small), "")


def test_no_two_records_have_the_same_key_and_nonce(world: World, keys: pytest.MonkeyPatch) -> None:
    """Also when an engine starts anew on the same lane, or a reservation is dropped."""
    seen = set()
    for start in range(3):
        lane = world.lane()
        lane.append_open(sequence(f"a{start}"), 1, ROOT, LAYOUT, BLOCK, "secret", "chat", "a", TOKENS[:0])
        lane.reserve_rows(LAYOUT, 4, "secret")
        append_rows(lane, f"a{start}", 0, TOKENS[:4], namespace="secret")
        append_rows(lane, f"a{start}", 4, TOKENS[4:9], namespace="secret")
        lane.close()
    reader = LaneReader.open(world.paths.lane("e0"))
    for header in reader.records(0):
        _, _, _, key, salt, number = HEAD.unpack_from(reader.payload(header))
        seen.add((key, salt, number))
    assert len(seen) == 9


def test_a_lane_that_was_open_is_set_aside_when_a_key_is_given_and_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(world, "default")
    world.settings = dataclasses.replace(world.settings, lane_encryption="always")
    monkeypatch.setenv(KEYS_VARIABLE, f"secret = {KEY}")
    sealed = world.lane()
    assert sealed.head == 0 and len(list(world.paths.lane_dir.glob("e0~*.lane"))) == 1
    world.capture(sealed, "b", TOKENS, [43], namespace="secret")
    sealed.close()
    monkeypatch.setenv(KEYS_VARIABLE, "")
    assert world.lane().head == 0
    monkeypatch.setenv(KEYS_VARIABLE, f"secret = {KEY}")
    drain = world.drained()
    drain.step()
    drain.close()
    assert {read_all(world.finder(), TOKENS, namespace=name)[0] for name in ("default", "secret")} == {43}
    assert [path.name for path in world.paths.lane_dir.glob("*.lane")] == ["e0.lane"]


def test_through_the_staging_ring(world: World, keys: pytest.MonkeyPatch) -> None:
    ring = StagingRing(world.lane(), np.zeros(1 << 16, np.uint8))
    ring.append_open(sequence("a"), 1, ROOT, LAYOUT, BLOCK, "secret", "chat", "a", TOKENS[:0])
    reservation = ring.reserve_rows(LAYOUT, 43, "secret")
    np.copyto(reservation.frame, rows(0, TOKENS))
    reservation.commit(sequence("a"), 1, 0, TOKENS)
    assert not readable(world)
    assert read_all(world.finder(), TOKENS, namespace="secret")[0] == 43


def test_records_of_version_3(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, f"default = {GOLDEN_KEY}")
    put_lane(world, 3)
    reader = LaneReader.open(world.paths.lane("e0"))
    opened, _, point, _, _, closed = reader.records(0)
    assert reader.version == 3 and reader.open_payload(opened).stream == "a"
    assert [header.sealed for header in (opened, point, closed)] == [True, True, False]
    assert reader.point_kind(point) == PointKind.CHUNK and np.array_equal(reader.state(point), state(20, 40))
    assert read_all(world.finder(), TOKENS)[0] == 43
    assert world.drain().get("bad_records", 0) == 0
    assert read_all(world.finder(), TOKENS) == (43, ["disk"] * 6)
