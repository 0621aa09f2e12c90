"""What a disk, a directory or a clock can do to the keeper, one by one: noticed, said, and got over without losing a record."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress

import pytest
import structlog

from tests.faults.layer import Layer
from tests.faults.processes import PATIENCE_S, Processes, stats, wait_for
from tests.faults.test_backpressure import small_file_system
from tests.tiers.sample import BLOCK, World, append_rows, some_tokens
from tiers import drain as drain_file
from tiers import failpoints, keeper_client, lane_reader, store_file
from tiers.drain import Drain
from tiers.errors import StoreFailed
from tiers.keeper_operations import Operations
from tiers.verify import verify
from tiers.view import StoreReader

TOKENS = some_tokens(11 * BLOCK + 3)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm(None)


def quick(world: World, **more: object) -> World:
    changed = dataclasses.replace(world.settings, drain_interval_ms=5, sync_interval_ms=10, **more)  # type: ignore[arg-type]
    return dataclasses.replace(world, settings=changed)


def reopened(world: World, drain: Drain) -> None:
    """As the keeper does a second later."""
    drain._retry_at = 0
    drain.flush(sync=True)


# ---------------------------------------------------------------- errors of the disk


def test_failed_sync_poisons_the_store_and_its_records_are_taken_again(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [20, 60])
    drain = Drain(world.paths, world.settings)
    drain.flush(sync=False)
    poisoned = drain._store
    taken = drain.counts["records"]
    assert lane.tail == 0 and taken == 3, "nothing is freed before it is on the disk"
    failpoints.arm("drain.sync.before:1:EIO")
    with pytest.raises(StoreFailed, match="Input/output error"):
        drain.sync()
    assert drain._store is None and lane.tail == 0
    with pytest.raises(StoreFailed):
        drain.sync_if_due() if drain._store else drain.store()  # not tried again at once
    append_rows(lane, "a", 60, TOKENS[60:])
    reopened(world, drain)
    assert drain._store is not poisoned
    assert drain.counts["records"] == taken + 4, "the three that were committed before, and the new one"
    assert lane.tail == lane.head and not drain.failing
    drain.close()
    assert world.restorable(TOKENS) == len(TOKENS)


@pytest.mark.parametrize("place", ["drain.put.before", "drain.put.after", "drain.commit.before", "drain.commit.after"])
def test_error_in_any_step_of_a_group_is_got_over(place: str, world: World) -> None:
    world.capture(world.lane(), "a", TOKENS, [20, 60, len(TOKENS)])
    drain = Drain(world.paths, world.settings)
    failpoints.arm(f"{place}:1:ENOSPC")
    with pytest.raises(StoreFailed, match="No space left"):
        drain.flush(sync=True)
    reopened(world, drain)
    drain.close()
    assert world.restorable(TOKENS) == len(TOKENS)
    assert list(verify(world.paths.store, world.paths.lane_dir, map_bytes=world.settings.store_map_bytes)) == []


def test_disk_that_fails_one_sync_under_a_real_keeper(world: World, layer: Layer, processes: Processes) -> None:
    world = quick(world)
    processes.keeper(world, env=layer.environment())
    wait_for("the keeper", lambda: stats(world) is not None)
    lane = world.lane()
    layer.fail("sync", "once")
    world.capture(lane, "a", TOKENS, range(5, len(TOKENS), 5))
    wait_for("the failure to be counted", lambda: stats(world)["store_failures"] == 1)
    wait_for("everything to be freed", lambda: lane.tail == lane.head and not stats(world)["failing"])
    assert world.restorable(TOKENS) == (len(TOKENS) - 1) // 5 * 5


@pytest.mark.parametrize("mode", ["interval", "turn"])
def test_everything_is_synced_by_itself_within_the_interval(
    mode: str, world: World, tmp_path: object, processes: Processes
) -> None:
    """The bound of `interval` and `turn`: a sync follows every commit, with nobody asking for it."""
    world = quick(world, durability=mode)
    layer = Layer.over(world.paths.store, world.paths.data_dir, trace=True)
    processes.keeper(world, env=layer.environment())
    wait_for("the keeper", lambda: stats(world) is not None)
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [len(TOKENS)])
    wait_for("a sync", lambda: lane.tail == lane.head and stats(world)["unsynced_ms"] == 0)
    kinds = [op.kind for op in layer.operations() if op.name == "data.mdb"]
    assert kinds[-1] == "S" and kinds.count("S") >= 2


def test_process_mode_never_syncs_by_itself(world: World, processes: Processes) -> None:
    world = quick(world, durability="process")
    layer = Layer.over(world.paths.store, world.paths.data_dir, trace=True)
    keeper = processes.keeper(world, env=layer.environment())
    wait_for("the keeper", lambda: stats(world) is not None)
    lane = world.lane()
    world.capture(lane, "a", TOKENS, range(2, len(TOKENS), 2))
    wait_for("everything to be committed and freed", lambda: lane.tail == lane.head)
    assert "S" not in [op.kind for op in layer.operations() if op.name == "data.mdb"]
    assert (world.paths.store / "unsynced").exists()
    keeper.terminate()
    assert keeper.wait(PATIENCE_S) == 0
    assert [op.kind for op in layer.operations() if op.name == "data.mdb"][-1] == "S"
    assert not (world.paths.store / "unsynced").exists()


@pytest.mark.parametrize("stored", [False, True], ids=["new", "without its lock file"])
def test_disk_without_a_single_page_is_an_error_and_no_bus_error(
    world: World, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB writes its lock file through a map: whoever opens a store must not die of a page that can't be had."""
    store = world.paths.store
    monkeypatch.setattr(store_file, "FREE_DISK_RESERVE_BYTES", 0)
    with small_file_system(store, 512 << 10):
        if stored:
            world.capture(world.lane(), "a", TOKENS, [40])
            world.drain()
            (store / "lock.mdb").unlink()
        with open(store / "fill", "wb", buffering=0) as fill, suppress(OSError):
            while fill.write(bytes(4096)):
                pass
        for opening in (lambda: Drain(world.paths, world.settings).open(), lambda: snapshot_of(world)):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    opening()
                    status = 2 if stored else 0  # a reader of a store that isn't there has an empty one
                except StoreFailed as error:
                    status = 0 if "No space left" in str(error) else 3
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
        (store / "fill").unlink()
        assert not stored or world.restorable(TOKENS) == 40


def snapshot_of(world: World) -> None:
    with StoreReader(world.paths.store, map_bytes=1 << 26).snapshot():
        pass


# ---------------------------------------------------------------- files that go away


def test_store_deleted_under_the_keeper_is_noticed_and_begun_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_file, "READER_CHECK_S", 0.0)
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [40])
    drain = Drain(world.paths, world.settings)
    drain.flush(sync=False)
    for name in ("data.mdb", "lock.mdb"):
        (world.paths.store / name).unlink()
    with pytest.raises(StoreFailed, match="file is gone"):
        drain.sync_if_due()
    assert "gone" in drain.failing
    reopened(world, drain)
    drain.close()
    assert world.restorable(TOKENS) == 40, "it was still in the lane, for it had not been synced"
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []
    assert drain.counts["store_rescued"] == 1


@pytest.mark.parametrize("gone", ["file", "data directory"])
@pytest.mark.parametrize("noticed", ["at a commit", "by a look"])
def test_store_that_was_deleted_is_written_anew_with_all_that_was_in_it(
    noticed: str, gone: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has left the lanes is in that file alone, which is whole as long as it is open."""
    monkeypatch.setattr(drain_file, "READER_CHECK_S", 0.0 if noticed == "by a look" else 60.0)
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [40])
    drain = world.drained()
    assert lane.tail == lane.head
    if gone == "file":
        (world.paths.store / "data.mdb").unlink()
    else:
        shutil.rmtree(world.paths.data_dir)
    append_rows(lane, "a", 40, TOKENS[40:])
    with structlog.testing.capture_logs() as logs, pytest.raises(StoreFailed):
        if noticed == "at a commit":
            drain.flush(sync=False)
        drain.sync_if_due()
    assert "drain.store_rescued" in [entry["event"] for entry in logs]
    assert "written to a new one" in drain.stats()["deleted"]
    reopened(world, drain)
    drain.close()
    assert world.restorable(TOKENS) == len(TOKENS)
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []


def test_store_that_was_replaced_is_not_written_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_file, "READER_CHECK_S", 0.0)
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [40])
    drain = world.drained()
    copy = world.paths.store / "copy.mdb"
    shutil.copyfile(world.paths.store / "data.mdb", copy)
    append_rows(lane, "a", 40, TOKENS[40:60])
    drain.flush(sync=True)
    copy.replace(world.paths.store / "data.mdb")
    with pytest.raises(StoreFailed, match="file is gone"):
        drain.sync_if_due()
    assert drain.counts["store_lost"] == 1 and "replaced" in drain.stats()["deleted"]
    reopened(world, drain)
    drain.close()
    assert world.restorable(TOKENS) == 40
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []


def test_lock_file_that_was_deleted_is_made_anew_for_writer_and_readers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader with another lock file than the writer's would have its pages used again while it reads."""
    monkeypatch.setattr(drain_file, "READER_CHECK_S", 0.0)
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [40])
    drain = world.drained()
    (world.paths.store / "lock.mdb").unlink()
    with pytest.raises(StoreFailed, match="file is gone"):
        drain.sync_if_due()
    append_rows(lane, "a", 40, TOKENS[40:])
    reopened(world, drain)
    assert drain.counts["store_lost"] == drain.counts["store_rescued"] == 0
    drain.close()
    assert world.restorable(TOKENS) == len(TOKENS)


def test_lane_deleted_under_engine_and_keeper_is_drained_as_long_as_both_live(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [20])
    drain = world.drained()
    world.paths.lane("e0").unlink()
    with structlog.testing.capture_logs() as logs:
        for end in (40, 60):
            append_rows(lane, "a", end - 20, TOKENS[end - 20 : end])
            drain.flush(sync=True)
    assert [entry["event"] for entry in logs].count("lane.deleted") == 1
    assert lane.tail == lane.head and list(drain.stats()["lanes"]) == ["e0 (deleted)"]
    other = world.lane()  # the engine's next start: a lane of the same name, and both are followed
    append_rows(lane, "a", 60, TOKENS[60:70])
    world.capture(other, "b", some_tokens(30, seed=5), [30])
    drain.flush(sync=True)
    lane.close()
    drain.flush(sync=True)
    assert list(drain.stats()["lanes"]) == ["e0"]
    drain.close()
    assert world.restorable(TOKENS) == 70 and world.restorable(some_tokens(30, seed=5)) == 30


def test_deleted_lane_whose_writer_ends_while_the_keeper_looks_is_drained_to_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the soak: it looked for records first, then whether anybody could still append."""
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [20])
    drain = world.drained()
    world.paths.lane("e0").unlink()

    def last_words(file: object) -> bool:
        monkeypatch.undo()
        append_rows(lane, "a", 20, TOKENS[20:60])
        lane.close()
        return False

    monkeypatch.setattr(lane_reader, "is_held", last_words)
    drain.step()
    drain.flush(sync=True)
    drain.close()
    assert world.restorable(TOKENS) == 60


def test_directory_of_the_store_that_is_gone_says_so(world: World) -> None:
    world.capture(world.lane(), "a", TOKENS, [40])
    drain = Drain(world.paths, world.settings)
    drain.flush(sync=False)
    moved = world.paths.store.rename(world.paths.data_dir / "moved")
    append_rows(lane := world.lane("e1"), "x", 0, TOKENS[:1])
    with pytest.raises(StoreFailed, match="can't be reached"):
        drain.flush(sync=True)
    moved.rename(world.paths.store)
    reopened(world, drain)
    drain.close()
    assert world.restorable(TOKENS) == 40 and lane.tail == lane.head
    assert drain.counts["store_lost"] == drain.counts["store_rescued"] == 0


def test_directory_of_the_store_that_stays_away_is_begun_anew_and_said(world: World) -> None:
    world.capture(world.lane(), "a", TOKENS, [40])
    drain = world.drained()
    world.paths.store.rename(world.paths.data_dir / "moved")
    world.capture(world.lane("e1"), "b", TOKENS, [20])
    with pytest.raises(StoreFailed, match="can't be reached"):
        drain.flush(sync=True)
    assert not drain.stats()["deleted"]
    reopened(world, drain)
    assert drain.counts["store_lost"] == 1 and "moved" in drain.stats()["deleted"]
    drain.close()
    assert world.restorable(TOKENS) == 20


# ---------------------------------------------------------------- two of them, and time


def test_second_keeper_on_a_directory_is_refused_and_disturbs_nothing(
    world: World, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = quick(world)
    processes.keeper(world)
    wait_for("the keeper", lambda: stats(world) is not None)
    second = processes.start(
        "-c", "import sys; from tiers import keeper; keeper.LOCK_WAIT_S = 0.1; sys.exit(keeper.main(sys.argv[1:]))",
        "--data-dir", str(world.paths.data_dir), "--lane-dir", str(world.paths.lane_dir),
    )  # fmt: skip
    assert second.wait(PATIENCE_S) == 1
    world.capture(world.lane(), "a", TOKENS, [len(TOKENS)])
    keeper_client.drain(world.paths.keeper_socket, sync=True)
    assert world.restorable(TOKENS) == len(TOKENS)


def test_second_host_agent_on_a_directory_is_refused(world: World) -> None:
    from ops.processes import AlreadyRunning, FileLock

    FileLock(world.paths.host_lock).take("a host agent runs already")
    with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}"):
        FileLock(world.paths.host_lock).take("a host agent runs already")


@pytest.mark.parametrize("seconds", ["-1000000000", "1000000000"])
def test_clock_that_jumps_changes_nothing(seconds: str, world: World, layer: Layer, processes: Processes) -> None:
    """Intervals, deadlines and leases are taken from the monotonic clock; the wall clock is for people."""
    world = quick(world)
    processes.keeper(world, env=layer.environment())
    wait_for("the keeper", lambda: stats(world) is not None)
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [20])
    layer.fail("clock", seconds)
    for end in range(30, len(TOKENS), 10):
        append_rows(lane, "a", end - 10, TOKENS[end - 10 : end])
    wait_for("everything to be freed", lambda: lane.tail == lane.head)
    layer.heal("clock")
    append_rows(lane, "a", 90, TOKENS[90:])
    wait_for("everything to be freed", lambda: lane.tail == lane.head and stats(world)["unsynced_ms"] == 0)
    assert world.restorable(TOKENS) == len(TOKENS) == 91


def test_failed_commit_of_anything_but_the_drain_poisons_the_store_as_well(world: World) -> None:
    """What the kernel has given up writing may be of the commits before it: their records aren't freed on the word of a later sync."""
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [20, 60])
    drain = Drain(world.paths, world.settings)
    drain.flush(sync=False)
    failpoints.arm("drain.commit.before:1:EIO")
    with pytest.raises(StoreFailed, match="Input/output error"):
        Operations(drain).pin("default", "chat", True)
    with pytest.raises(StoreFailed, match="Input/output error"):
        drain.sync()
    assert drain._store is None and lane.tail == 0
    reopened(world, drain)
    assert lane.tail == lane.head
    drain.close()
    assert world.restorable(TOKENS) == 60
