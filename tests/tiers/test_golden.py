"""Files kept as the versions wrote them: this version reads the one before it, and its own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.golden.__main__ import GOLDEN, TOKENS
from tests.tiers.sample import BLOCK, ROOT, World, read_all, rows, sequence, state
from tiers.lane import LaneWriter
from tiers.lane_format import PointKind, RecordType
from tiers.lane_reader import LaneReader
from tiers.layout import Layout, chain_root
from tiers.store import Store
from tiers.verify import verify

HERE = Path(__file__).parent / "golden"


def put_lane(world: World, version: int) -> None:
    shutil.copy(HERE / f"lane-v{version}.bin", world.paths.lane("e0"))


def put_store(world: World, version: int) -> None:
    shutil.copy(HERE / f"store-v{version}.bin", world.paths.store / "data.mdb")


@pytest.mark.parametrize("version", [1, 2])
def test_lane_is_read_and_drained(world: World, version: int) -> None:
    put_lane(world, version)
    reader = LaneReader.open(world.paths.lane("e0"))
    assert reader.version == version
    assert RecordType.BAD not in [header.type for header in reader.records(0)]
    assert read_all(world.finder(), TOKENS)[0] == 43
    counts = world.drain()
    assert counts.get("bad_records", 0) == 0
    assert read_all(world.finder(), TOKENS) == (43, ["disk"] * 6)


def test_records_of_version_1(world: World) -> None:
    put_lane(world, 1)
    reader = LaneReader.open(world.paths.lane("e0"))
    opened, *rest = reader.records(0)
    said = reader.open_payload(opened)
    assert Layout.from_entries(said.layout, said.state_bytes) == Layout(GOLDEN.groups)
    assert [header.type for header in rest] == [2, 2, 2, 3, 1, 2]
    assert np.array_equal(reader.frame(rest[0]), rows(0, TOKENS[:20]))


def test_records_of_version_2(world: World) -> None:
    put_lane(world, 2)
    reader = LaneReader.open(world.paths.lane("e0"))
    opened, _, point, _, tip, closed = reader.records(0)
    said = reader.open_payload(opened)
    assert Layout.from_entries(said.layout, said.state_bytes) == GOLDEN
    assert (point.type, point.token_end, reader.point_kind(point)) == (RecordType.POINT, 20, PointKind.CHUNK)
    assert np.array_equal(reader.state(point), state(20, 40))
    assert reader.point_kind(tip) == PointKind.TIP and closed.type == RecordType.CLOSE


def test_writer_sets_a_lane_of_version_1_aside_for_the_keeper(world: World) -> None:
    put_lane(world, 1)
    writer = LaneWriter.open(world.paths.lane("e0"), lane_bytes=8192, record_count=16, incarnation=2)
    assert writer.head == 0
    assert read_all(world.finder(), TOKENS)[0] == 43
    drain = world.drained()
    drain.step()
    drain.close()
    assert [path.name for path in world.paths.lane_dir.glob("*.lane")] == ["e0.lane"]
    assert read_all(world.finder(), TOKENS)[0] == 43


@pytest.mark.parametrize("version", [1, 2])
def test_store_is_read_and_goes_on(world: World, version: int) -> None:
    put_store(world, version)
    Store(world.paths.store, map_bytes=1 << 20).close()
    assert read_all(world.finder(), TOKENS)[0] == 43
    assert list(verify(world.paths.store, map_bytes=1 << 20)) == []
    store = Store(world.paths.store, map_bytes=1 << 20)
    with store.snapshot() as view:
        assert view.count("nodes") == view.count("blocks")
        for key, _ in view.scan("blocks"):
            node, block = view.node(key), view.block(key)  # type: ignore[arg-type]
            assert node is not None and node.parent == block.parent and node.token_end == block.token_start + BLOCK
            tenant = view.tenant(node.tenant)
            assert tenant is not None and node.tenant == chain_root(ROOT, tenant.namespace)
    store.close()
    lane = world.lane()
    world.capture(lane, "more", TOKENS, [43], start=40)
    world.drain()
    assert read_all(world.finder(), TOKENS)[0] == 43


def test_points_of_version_2(world: World) -> None:
    put_store(world, 2)
    with world.finder().reading() as read:
        found = read.points(ROOT, "default", TOKENS, limit=43, block_tokens=BLOCK)
        assert [(point.position, point.tier, point.kind) for point in found] == [(20, "disk", 1), (43, "disk", 4)]
        assert np.array_equal(read.point(found[0]), state(20, 40))


def test_progress_of_version_1_keeps_its_sequences(world: World) -> None:
    put_store(world, 1)
    store = Store(world.paths.store, map_bytes=1 << 20)
    with store.snapshot() as view:
        assert view.progress(sequence("a")).position == 43  # type: ignore[union-attr]
    store.close()


def test_the_worked_example_of_the_documentation_is_this_file() -> None:
    text = (Path(__file__).parents[2] / "docs" / "log-format.md").read_text()
    section = text.partition("### Worked example")[2].partition("\n### ")[0]
    lines = re.findall(r"^    ([0-9a-f]{8})  ([0-9a-f ]+)$", section, re.MULTILINE)
    image = (HERE / "lane-v2.bin").read_bytes()
    assert len(lines) > 10
    for offset, digits in lines:
        at, data = int(offset, 16), bytes.fromhex(digits)
        assert image[at : at + len(data)] == data, offset
    rows = re.findall(r"^\| (\d) \| ([A-Z]+) \| \[(\d+), (\d+)\) \| (\d+) \| (\d+) \|", section, re.MULTILINE)
    reader = LaneReader.open(HERE / "lane-v2.bin")
    assert rows == [
        tuple(
            map(str, (h.number, RecordType(h.type).name, h.token_start, h.token_end, h.payload_offset, h.payload_bytes))
        )
        for h in reader.records(0)
    ]
    reader.close()
