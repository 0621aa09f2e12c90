"""Any byte of a lane, a stored value or an exported file flipped, any of them cut anywhere: found, never served, the rest intact."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiers.sample import BLOCK, LAYOUT, ROOT, World, append_point, append_rows, rows, sequence, some_tokens, state
from tiers import lane_format
from tiers.compaction import Compaction
from tiers.drain import Drain
from tiers.errors import BadBlock, BadRecord, Lost, OtherFormat, StoreFailed, TierError
from tiers.keeper_jobs import Jobs
from tiers.keeper_operations import Operations
from tiers.keys import Keyring
from tiers.lane_format import PointKind, RecordType, data_offset
from tiers.lane_reader import LaneReader, LaneSet
from tiers.layout import Layout, block_chain
from tiers.pages import ReadAhead
from tiers.paths import Paths
from tiers.prefix import LaneIndex, PrefixFinder, Reading
from tiers.store import Store
from tiers.values import KIND_BLOCK, unpack_value
from tiers.verify import Finding, verify
from tiers.view import StoreReader

SEED = int(os.environ.get("CONCORDIA_TEST_SEED", "20261129"))
TOKENS = some_tokens(6 * BLOCK + 3)
OTHER = some_tokens(4 * BLOCK, seed=8)
POINTED = dataclasses.replace(LAYOUT, state_bytes=100)


def served(finder: PrefixFinder, tokens: np.ndarray) -> int:
    """How much of a list can be read; every row that is handed out is compared. Ends at the first damage that is noticed."""
    position = 0
    try:
        with finder.reading() as read:
            for extent in read.find(ROOT, "default", tokens, limit=len(tokens), block_tokens=BLOCK):
                assert extent.token_start == position
                frame, count, start, end, *_ = read(extent)
                out = np.empty(LAYOUT.frame_bytes(end - start), np.uint8)
                LAYOUT.join([(frame, count, start, end)], out)
                expected = rows(extent.token_start, tokens[extent.token_start : extent.token_end])
                assert np.array_equal(out, expected), "damaged rows were served"
                position = extent.token_end
    except (Lost, StoreFailed):
        pass
    return position


# ---------------------------------------------------------------- the lane


@pytest.fixture(scope="module")
def good_lane(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A lane of two sequences that no keeper has seen."""
    directory = tmp_path_factory.mktemp("good")
    world = World(Paths.at(directory / "data", directory / "lanes").make())
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [5, 20, 51])
    world.capture(lane, "b", OTHER, [32])
    lane.append_close(sequence("b"), 1, 32)
    lane.close()
    return world.paths.lane("e0").read_bytes()


def interesting_bytes(good: bytes) -> list[int]:
    """Header page, tail, every byte of the entries that are used, every byte of the payloads; the rest of the ring is nobody's."""
    used = 7 * lane_format.ENTRY_BYTES
    payloads = max(at for at, byte in enumerate(good) if byte) + 1
    return [
        *range(0, 256), *range(4096, 4104),
        *range(lane_format.DIRECTORY_OFFSET, lane_format.DIRECTORY_OFFSET + used),
        *range(data_offset(64), payloads),
    ]  # fmt: skip


def check_lane(image: bytes, directory: Path) -> None:
    """Whatever was done to it: a reader serves right rows or none, and a keeper drains the rest without an error."""
    shutil.rmtree(directory, ignore_errors=True)
    world = World(Paths.at(directory / "data", directory / "lanes").make())
    world.paths.lane("e0").write_bytes(image)
    finder = PrefixFinder(StoreReader(world.paths.store), world.paths.lane_dir)
    from_lane = [served(finder, TOKENS), served(finder, OTHER)]
    finder.close()
    list(verify(world.paths.store, world.paths.lane_dir, map_bytes=1 << 26))
    drain = Drain(world.paths, world.settings)
    drain.flush(sync=True)
    drain.close()
    reader = StoreReader(world.paths.store, map_bytes=1 << 26)
    finder = PrefixFinder(reader, world.paths.lane_dir)
    assert max(from_lane[0], served(finder, TOKENS)) >= 0
    served(finder, OTHER)
    finder.close()
    reader.close()
    assert [f for f in verify(world.paths.store, map_bytes=1 << 26) if f.kind != "parent"] == []


def test_sweep_of_flipped_lane_bytes(good_lane: bytes, tmp_path: Path) -> None:
    print("seed", SEED)
    random = np.random.default_rng(SEED)
    places = interesting_bytes(good_lane)
    for at in random.choice(places, 40, replace=False):
        image = bytearray(good_lane)
        image[at] ^= 1 << int(random.integers(8))
        check_lane(bytes(image), tmp_path / "flipped")


def test_flip_in_one_sequence_leaves_the_other_whole(good_lane: bytes, tmp_path: Path) -> None:
    world = World(Paths.at(tmp_path / "data", tmp_path / "lanes").make())
    path = world.paths.lane("e0")
    path.write_bytes(good_lane)
    reader = LaneReader.open(path)
    headers = reader.records(0)
    reader.close()
    random = np.random.default_rng(SEED)
    for header in headers[1:4]:
        at = data_offset(64) + header.payload_offset + int(random.integers(header.payload_bytes - 64)) + 64
        image = bytearray(good_lane)
        image[at] ^= 0x10
        path.write_bytes(bytes(image))
        finder = PrefixFinder(StoreReader(world.paths.store), world.paths.lane_dir)
        assert served(finder, OTHER) == len(OTHER)
        assert served(finder, TOKENS) == header.token_start
        finder.close()


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.5, 0.9, 0.999])
def test_cut_lane_is_refused_whole(share: float, good_lane: bytes, tmp_path: Path) -> None:
    """A lane's size is in its header: a file of another size isn't one, and mapping it would end in SIGBUS."""
    world = World(Paths.at(tmp_path / "data", tmp_path / "lanes").make())
    path = world.paths.lane("e0")
    path.write_bytes(good_lane[: int(share * len(good_lane))])
    with pytest.raises(OtherFormat):
        LaneReader.open(path)
    world.drain()
    lane = world.lane()
    assert lane.head == 0, "the writer replaces it"
    append_rows(lane, "a", 0, TOKENS[:3])


FIELDS = [(4, 2), (6, 2), (8, 8), (16, 8), (24, 16), (40, 4), (44, 4), (48, 8), (56, 8), (64, 8)]  # (offset, bytes)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_fuzzed_lanes_never_crash_a_reader(
    good_lane: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Entries and payloads overwritten at will, checksums of entries made right again: the record reader sees every field wild."""
    image = bytearray(good_lane)
    for _ in range(data.draw(st.integers(1, 6))):
        number = data.draw(st.integers(0, 6))
        at = lane_format.DIRECTORY_OFFSET + number * lane_format.ENTRY_BYTES
        field, size = data.draw(st.sampled_from(FIELDS))
        image[at + field : at + field + size] = data.draw(st.binary(min_size=size, max_size=size))
        if data.draw(st.booleans()):
            body = bytes(image[at : at + lane_format.ENTRY.size])
            check = lane_format.xxh3_64_intdigest(body).to_bytes(8, "little")
            image[at + lane_format.ENTRY.size : at + lane_format.ENTRY.size + 8] = check
    directory = tmp_path_factory.getbasetemp() / "fuzz"
    directory.mkdir(exist_ok=True)
    path = directory / "e0.lane"
    path.write_bytes(bytes(image))
    reader = LaneReader.open(path)
    for header in reader.records(reader.tail):
        try:
            if header.type == RecordType.OPEN:
                reader.open_payload(header)
            elif header.type == RecordType.ROWS:
                reader.frame(header)
                reader.tokens(header)
            else:
                reader.payload(header)
        except BadRecord:
            pass
    reader.close()
    check_lane(bytes(image), directory / "world")


# ---------------------------------------------------------------- the store


@pytest.fixture(scope="module")
def good_store(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("good-store")
    world = World(Paths.at(directory / "data", directory / "lanes").make())
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [5, 20, 51])
    world.capture(lane, "b", OTHER, [32])
    world.drain()
    return (world.paths.store / "data.mdb").read_bytes()


def value_spans(good: bytes) -> list[tuple[int, int]]:
    """Where the stored blocks and tail pieces lie in the file."""
    found, at = [], 0
    while (at := good.find(b"CBLK", at)) >= 0:
        found.append((at, at + 64 + 4 * BLOCK + LAYOUT.frame_bytes(3)))
        at += 4
    return found


def test_sweep_of_flipped_values(good_store: bytes, tmp_path: Path) -> None:
    """Every byte of a stored value is under its checksum: what is flipped is found by `verify`, and never served."""
    random = np.random.default_rng(SEED)
    spans = value_spans(good_store)
    assert len(spans) >= 11
    for index in range(22):
        start, end = spans[index % len(spans)]
        image = bytearray(good_store)
        image[int(random.integers(start, end))] ^= 1 << int(random.integers(8))
        world = World(Paths.at(tmp_path / f"{index}", tmp_path / "lanes").make())
        (world.paths.store / "data.mdb").write_bytes(bytes(image))
        reader = StoreReader(world.paths.store, map_bytes=1 << 26)
        finder = PrefixFinder(reader, world.paths.lane_dir)
        left = [served(finder, TOKENS), served(finder, OTHER)]
        finder.close()
        reader.close()
        found = list(verify(world.paths.store, map_bytes=1 << 26))
        stale = left == [len(TOKENS), len(OTHER)]
        assert found or stale, "only a page that nothing names any more may be flipped unnoticed"
        assert len(OTHER) in left[1:] or left[0] == len(TOKENS), "one flip, one sequence"
        shutil.rmtree(world.paths.data_dir)


def test_stored_value_cut_at_every_length_is_a_bad_block(good_store: bytes, tmp_path: Path) -> None:
    world = World(Paths.at(tmp_path / "data", tmp_path / "lanes").make())
    (world.paths.store / "data.mdb").write_bytes(good_store)
    store = Store(world.paths.store, map_bytes=1 << 26)
    chain = block_chain(ROOT, "default", TOKENS, BLOCK)
    with store.snapshot() as view:
        raw = bytes(view._txn.get(chain[1], db=view._db[b"blocks"]))
    store.close()
    for size in range(len(raw)):
        with pytest.raises(BadBlock):
            unpack_value(raw[:size], KIND_BLOCK, "here")
    assert unpack_value(raw, KIND_BLOCK, "here").token_count == BLOCK
    with pytest.raises(BadBlock):
        unpack_value(raw + b"\0", KIND_BLOCK, "here")


# ---------------------------------------------------------------- its small records, which have no checksum


@pytest.fixture(scope="module")
def rich_store(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Blocks, a tail, rollback points, a base, a pin and a live sequence."""
    directory = tmp_path_factory.mktemp("rich-store")
    world = World(Paths.at(directory / "data", directory / "lanes").make())
    lane = world.lane()
    lane.append_open(sequence("a"), 1, ROOT, POINTED, BLOCK, "default", "chat", "a", TOKENS[:0])
    for start, end in ((0, 20), (20, 51)):
        append_rows(lane, "a", start, TOKENS[start:end])
        append_point(lane, "a", end, PointKind.MESSAGE, POINTED.state_bytes)
    lane.append_close(sequence("a"), 1, 51)
    drain = world.drained()
    Operations(drain).pin("default", "chat", True)
    for _ in Compaction(drain, settle_s=0, grace_s=0).run():
        pass
    world.capture(lane, "b", OTHER, [32])
    drain.flush(sync=True)
    drain.close()
    return (world.paths.store / "data.mdb").read_bytes()


def spoilt(raw: bytes, random: np.random.Generator) -> bytes:
    """A bit flipped, or the end cut off, or something added."""
    at, how = int(random.integers(len(raw))), random.random()
    if how < 0.6:
        return raw[:at] + bytes([raw[at] ^ 1 << int(random.integers(8))]) + raw[at + 1 :]
    return raw[:at] if how < 0.9 else raw + b"\x01"


def work_on(world: World, drain: Drain) -> Iterator[Callable[[], object]]:
    """What keeper, engines and commands do with a store, one thing each."""
    finder = PrefixFinder(drain.store(), world.paths.lane_dir)

    def points() -> None:
        with finder.reading() as read:
            for point in read.points(ROOT, "default", TOKENS, limit=1000, block_tokens=BLOCK):
                assert np.array_equal(read.point(point), state(point.position, POINTED.state_bytes))

    def drained() -> None:
        lane, tokens = world.lane(), np.concatenate([TOKENS[:16], some_tokens(20, seed=5)])
        world.capture(lane, "new", tokens, [36], start=16, session="new")
        lane.append_close(sequence("new"), 1, 36)
        drain.flush(sync=True)
        lane.close()

    yield lambda: served(finder, TOKENS)
    yield lambda: served(finder, OTHER)
    yield points
    yield drained
    yield lambda: Operations(drain).sessions()
    yield lambda: Operations(drain).tenants()
    yield lambda: Jobs(drain).wants_compaction()
    yield lambda: list(Compaction(drain, settle_s=0, grace_s=0).run())
    yield drain.stats
    yield lambda: Operations(drain).remove("default", "new", force=True, dry_run=False)


@pytest.mark.parametrize("database", ["nodes", "points", "roots", "sequences", "streams", "tenants", "pins", "bases"])
def test_small_record_that_was_spoilt_is_passed_over_named_and_repaired(
    database: str, rich_store: bytes, tmp_path: Path
) -> None:
    """No process ends of it: what leans on the record is a miss, and the rest goes on."""
    print("seed", SEED)
    random = np.random.default_rng(SEED)
    for attempt in range(6):
        world = World(Paths.at(tmp_path / f"{attempt}", tmp_path / f"lanes-{attempt}").make())
        (world.paths.store / "data.mdb").write_bytes(rich_store)
        drain = Drain(world.paths, world.settings)
        drain.open()
        with drain.store().group() as group:
            keys = [key for key, _ in group.scan_raw(database)]
            key = keys[int(random.integers(len(keys)))]
            bad = spoilt(bytes(group.raw(database, key)), random)
            group._txn.put(key, bad, db=group._db[database.encode()])
        for act in work_on(world, drain):
            try:
                act()
            except TierError:
                pass
        drain.close()
        for _ in range(3):  # a chain that is cut may show what was behind it
            found = list(verify(world.paths.store, world.paths.lane_dir, map_bytes=1 << 26))
            if not found:
                break
            drain = Drain(world.paths, world.settings)
            Operations(drain).repair(damaged_things(found))
            drain.close()
        assert not found


class Dropped(Exception):
    """Ends a group commit of which nothing is to stay."""


@pytest.mark.parametrize("database", ["roots", "sequences", "nodes"])
def test_flipped_small_record_leads_to_no_wrong_rows_and_no_endless_work(
    database: str, world: World, tmp_path: Path
) -> None:
    """Every bit of numbers that say where rows belong, and others at random."""
    print("seed", SEED)
    random, windowed = np.random.default_rng(SEED), dataclasses.replace(LAYOUT, windows=(0, 2 * BLOCK))
    lane = world.lane()
    lane.append_open(sequence("a"), 1, ROOT, windowed, BLOCK, "default", "chat", "a", TOKENS[:0])
    append_rows(lane, "a", 0, TOKENS)
    drain = world.drained()
    index, ahead, name = LaneIndex(LaneSet(tmp_path)), ReadAhead(1 << 20), database.encode()
    with drain.store().snapshot() as view:
        key, raw = next((key, bytes(raw)) for key, raw in view.scan_raw(database))
    start, count = {
        "roots": (raw.find(b"block_tokens") + 12, 1),
        "sequences": (raw.find(b"block_start") + 11, 1),
        "nodes": (64, 8),  # mask of the groups that come first, and what is kept free behind it
    }[database]
    bits = [*range(8 * start, 8 * (start + count)), *map(int, random.integers(8 * len(raw), size=40))]
    for bit in bits:
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Dropped), drain.store().group() as group:
            group._txn.put(key, bytes(flipped), db=group._db[name])
            for windows in (True, False):
                assert_right_rows(Reading(group, index, ahead), windowed, windows)
            track = group.load_track(sequence("a"))
            if track is not None and track.position == len(TOKENS):
                longer = np.concatenate([TOKENS, OTHER])
                whole = track.add(len(TOKENS), len(longer), OTHER.tobytes(), b"")
                chain = block_chain(ROOT, "default", longer, track.block_tokens)
                assert track.block_tokens != BLOCK or {block.id for block in whole or ()} <= set(chain)
            raise Dropped
    drain.close()


def assert_right_rows(read: Reading, layout: Layout, windows: bool) -> None:
    for extent in read.find(ROOT, "default", TOKENS, limit=len(TOKENS), block_tokens=BLOCK):
        try:
            frame, count, start, _, groups = read(extent, windows=windows)
        except BadBlock:
            return
        begin = extent.token_start - start
        right = layout.views(rows(begin, TOKENS[begin : begin + count]), count)
        for found_rows, expected in zip(layout.views(frame, count, groups), right, strict=True):
            assert not found_rows.size or np.array_equal(found_rows, expected)


def damaged_things(findings: list[Finding]) -> list[tuple[str, bytes]]:
    """As `concordia repair` hands them to the keeper."""
    kinds = {"block", "tail", "point", "base"}
    found = [(f.kind, bytes.fromhex(f.key)) for f in findings if f.kind in kinds]
    entries = [f.key.split("/") for f in findings if f.kind == "entry"]
    return found + [(name, bytes.fromhex(key)) for name, key in entries]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 0.9])
def test_cut_store_ends_in_a_reason(share: float, good_store: bytes, tmp_path: Path) -> None:
    """A file that lost its end: opening, serving and verifying end in StoreFailed or in fewer tokens, in a process of its own.

    (LMDB maps the file: a page that isn't there any more may be a SIGBUS, which only that process dies of.)
    """
    world = World(Paths.at(tmp_path / "data", tmp_path / "lanes").make())
    size = int(share * len(good_store)) & -4096
    (world.paths.store / "data.mdb").write_bytes(good_store[:size])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            reader = StoreReader(world.paths.store, map_bytes=1 << 26)
            served(PrefixFinder(reader, world.paths.lane_dir), TOKENS)
            status = 0
        except (StoreFailed, TierError):
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"ended with status {status}"


@pytest.mark.parametrize("database", ["tenants", "meta"])
def test_a_record_that_is_read_when_the_store_is_opened_does_not_keep_it_closed(
    database: str, rich_store: bytes, tmp_path: Path
) -> None:
    world = World(Paths.at(tmp_path / "data", tmp_path / "lanes").make())
    (world.paths.store / "data.mdb").write_bytes(rich_store)
    given = {"map_bytes": world.settings.store_map_bytes, "keys": Keyring({"other": bytes(32)})}
    store = Store(world.paths.store, **given)
    with store.group() as group:
        for key, raw in list(group.scan_raw(database)):
            group._txn.put(key, bytes([raw[0] ^ 0x40]) + bytes(raw[1:]), db=group._db[database.encode()])
    store.close()
    Store(world.paths.store, **given).close()
    assert served(PrefixFinder(StoreReader(world.paths.store, map_bytes=1 << 26), world.paths.lane_dir), OTHER)
