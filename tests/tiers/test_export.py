"""An exported file keeps rollback points and what compaction has thinned out; importing it never takes anything away."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.tiers.sample import BLOCK, LAYOUT, ROOT, World, append_point, append_rows, flip, sequence, some_tokens, state
from tiers import export
from tiers.base import session_key
from tiers.compaction import ABANDONED_MS, Compaction
from tiers.errors import BadFile, OtherFormat
from tiers.export_seal import ExportKeys
from tiers.lane_format import PointKind
from tiers.layout import ALL_GROUPS, block_chain, point_id
from tiers.offline import offline_drain
from tiers.paths import Paths
from tiers.view import StoreReader

TOKENS = some_tokens(5 * BLOCK + 3)
SHAPE = dataclasses.replace(LAYOUT, windows=(0, 8), state_bytes=100)
CHAIN = block_chain(ROOT, "default", TOKENS, BLOCK)


@pytest.fixture
def stored(world: World) -> World:
    """A session with rollback points at 11 and 40."""
    lane = world.lane()
    lane.append_open(sequence("a"), 1, ROOT, SHAPE, BLOCK, "default", "chat", "stream-a", TOKENS[:0])
    start = 0
    for end, kind in ((11, PointKind.MESSAGE), (40, PointKind.CHUNK), (43, None)):
        append_rows(lane, "a", start, TOKENS[start:end])
        if kind is not None:
            append_point(lane, "a", end, kind, 100)
        start = end
    lane.append_close(sequence("a"), 1, 43)
    world.drain()
    return world


@pytest.fixture
def other(tmp_path: Path) -> World:
    return World(Paths.at(tmp_path / "other", tempfile.mkdtemp(dir=tmp_path)).make())


def write(world: World, path: Path, keys: ExportKeys | None = None) -> export.Found:
    store = StoreReader(world.paths.store, map_bytes=world.settings.store_map_bytes)
    found = export.find_stored(store, "default", TOKENS)
    assert found is not None
    manifest = export.Manifest(
        "chat", "default", ROOT, SHAPE.entries, SHAPE.state_bytes, BLOCK, len(TOKENS), found.position, found.block_count,
        len(found.points), 1,
    )  # fmt: skip
    export.export_session(store, path, found, manifest, TOKENS, keys=keys)
    store.close()
    export.check_exported(path, keys=keys)
    return found


def take(world: World, path: Path, **more: object) -> export.Slice:
    with offline_drain(world.paths, world.settings) as drain, drain.store().group() as group:
        return export.import_slice(group, path, session="chat", namespace="default", **more)  # type: ignore[arg-type]


def test_rollback_points_travel(stored: World, other: World, tmp_path: Path) -> None:
    found = write(stored, tmp_path / "f")
    assert [(position, kind) for position, kind, _ in found.points] == [(11, 2), (40, 1)]
    assert take(other, tmp_path / "f").done
    store = StoreReader(other.paths.store, map_bytes=other.settings.store_map_bytes)
    with store.snapshot() as view:
        for position, parent in ((11, CHAIN[1]), (40, CHAIN[5])):
            point = point_id(parent, TOKENS[position // BLOCK * BLOCK : position])
            assert np.array_equal(view.point(point).frame, state(position, 100))
    store.close()
    assert other.restorable(TOKENS) == 43


def test_blocks_without_their_window_rows_travel_as_they_are(stored: World, other: World, tmp_path: Path) -> None:
    with offline_drain(stored.paths, stored.settings) as drain, drain.store().group() as group:
        group.drop_groups(CHAIN[1], 0b01)
    write(stored, tmp_path / "thin")
    take(other, tmp_path / "thin")
    assert groups_of(other, CHAIN[1]) == ALL_GROUPS & ~0b10 & groups_of(stored, CHAIN[1])
    assert groups_of(other, CHAIN[2]) == ALL_GROUPS


def test_an_import_never_thins_out_what_is_there_but_fills_it_up(stored: World, other: World, tmp_path: Path) -> None:
    write(stored, tmp_path / "full")
    take(other, tmp_path / "full")
    with offline_drain(stored.paths, stored.settings) as drain, drain.store().group() as group:
        group.drop_groups(CHAIN[1], 0b01)
    thin = groups_of(stored, CHAIN[1])
    write(stored, tmp_path / "thin")
    assert take(other, tmp_path / "thin").blocks_put == 0
    assert groups_of(other, CHAIN[1]) == ALL_GROUPS
    assert thin != ALL_GROUPS
    take(stored, tmp_path / "full")
    assert groups_of(stored, CHAIN[1]) == ALL_GROUPS


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "an empty file, .* Name a file"),
        (b"localhost\n", "not an exported session at .* Name a file"),
        (b"CONCEXP9", "of another version .* the version that wrote"),
    ],
)
def test_what_is_no_export_is_called_so(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(OtherFormat, match=said):
        export.check_exported(tmp_path / "f")


@pytest.mark.parametrize("keys", [{}, {"key": bytes(32)}])
@pytest.mark.parametrize("at", [0, 7])
def test_flipped_first_bytes_are_damage_and_no_later_version(
    stored: World, tmp_path: Path, at: int, keys: dict[str, bytes]
) -> None:
    write(stored, tmp_path / "f", ExportKeys(**keys))  # type: ignore[arg-type]
    for bit in range(8):
        flip(tmp_path / "f", at, 1 << bit)
        with pytest.raises(BadFile, match="first bytes .* damaged"):
            export.check_exported(tmp_path / "f", keys=ExportKeys(**keys))  # type: ignore[arg-type]
        flip(tmp_path / "f", at, 1 << bit)


def groups_of(world: World, block: bytes) -> int:
    store = StoreReader(world.paths.store, map_bytes=world.settings.store_map_bytes)
    with store.snapshot() as view:
        node = view.node(block)  # type: ignore[arg-type]
        assert node is not None
        assert view.block(block).groups == node.groups  # type: ignore[arg-type]
    store.close()
    return node.groups


def test_what_is_being_imported_is_named_while_blocks_are_collected(
    stored: World, other: World, tmp_path: Path
) -> None:
    write(stored, tmp_path / "f")
    named: set[bytes] = set()
    take(other, tmp_path / "f", named=named)
    assert set(CHAIN[1:]) < named
    assert export.import_sequence(export.open_exported(tmp_path / "f"), "chat", "default") in named


def test_an_interrupted_import_takes_the_place_of_nothing_and_goes_if_it_is_not_repeated(
    stored: World, other: World, tmp_path: Path
) -> None:
    write(stored, tmp_path / "f")
    own, lane = some_tokens(3 * BLOCK, seed=5), other.lane()
    lane.append_open(sequence("own"), 1, ROOT, SHAPE, BLOCK, "default", "chat", "own", own[:0])
    append_rows(lane, "own", 0, own)
    lane.append_close(sequence("own"), 1, len(own))
    other.drain()
    assert not take(other, tmp_path / "f", limit_bytes=1000).done
    compact(other)
    begun = other.restorable(TOKENS)
    assert begun >= BLOCK and other.restorable(own) == len(own), "the session of that name is what it was"
    with offline_drain(other.paths, other.settings) as drain, drain.store().group() as group:
        ((key, raw),) = group.scan("sequences")
        progress = group.decode_progress(raw)
        replaced = msgspec.structs.replace(progress, used_ms=progress.used_ms - ABANDONED_MS)
        group.replace_progress(key, replaced)  # type: ignore[arg-type]
    compact(other)
    assert (other.restorable(TOKENS), other.restorable(own)) == (0, len(own))


def test_a_repeated_import_that_is_interrupted_takes_nothing_away(stored: World, other: World, tmp_path: Path) -> None:
    write(stored, tmp_path / "f")
    assert take(other, tmp_path / "f").done
    assert not take(other, tmp_path / "f", limit_bytes=1000).done
    compact(other)
    store = StoreReader(other.paths.store, map_bytes=other.settings.store_map_bytes)
    with store.snapshot() as view:
        base = view.base(session_key("default", "chat"))
        assert base is not None and base.position == 43
    store.close()


def compact(world: World) -> None:
    with offline_drain(world.paths, world.settings) as drain:
        for _ in Compaction(drain, settle_s=0, grace_s=0).run():
            pass


def test_nonsense_whose_checksums_are_right_is_refused_before_anything_is_taken(stored: World, tmp_path: Path) -> None:
    write(stored, tmp_path / "f")
    (_, first), *records = [(item.type, bytes(item.payload)) for item in export.read_items(tmp_path / "f")][:-1]
    manifest = msgspec.msgpack.decode(first, type=export.Manifest)
    changes: list[dict[str, object]] = [
        *({"block_tokens": count} for count in (0, -1, 4)), *({"root": root} for root in (b"", bytes(17))),
        *({"layout": layout} for layout in ([], [(1,)], [(1, 2, 0)] * 33, [(-1, 5, 0)])), {"state_bytes": -1},
    ]  # fmt: skip
    made = [(msgspec.structs.replace(manifest, **change), records) for change in changes]
    for index, (kind, payload) in enumerate(records[1:], 1):
        for wrong in (b"", payload[:10], b"\xff" * 16 + payload[16:], payload + b"\0"):
            made.append((manifest, [*records[:index], (kind, wrong), *records[index + 1 :]]))
    for number, (said, rest) in enumerate(made):
        exporter = export.Exporter(tmp_path / str(number), said)
        for index, (kind, payload) in enumerate([(export.MANIFEST, msgspec.msgpack.encode(said)), *rest]):
            exporter.write(index, kind, payload)
        exporter.finish()
        with pytest.raises(BadFile):
            export.check_exported(tmp_path / str(number))
