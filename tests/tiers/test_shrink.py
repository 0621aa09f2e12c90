"""Shrinking the store's file while it is in use: nothing is lost at any step, and readers go on."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tests.tiers.sample import BLOCK, World, append_rows, read_all, some_tokens
from tests.tiers.test_compaction import answer, check_usage, compact, counts, restorable
from tests.tiers.test_keeper import keeper_process
from tiers import failpoints, keeper_client, keeper_jobs
from tiers.drain import Drain
from tiers.errors import StoreFailed, TierError
from tiers.keeper_jobs import Busy, Jobs
from tiers.keeper_operations import Operations
from tiers.prefix import PrefixFinder
from tiers.shrink import Duplicate, Shrink
from tiers.verify import verify
from tiers.view import StoreReader

REPOSITORY = Path(__file__).parents[2]
LISTS = [some_tokens(3 * BLOCK + 3, seed=index) for index in range(40)]


def fill(world: World, drain: Drain) -> None:
    """Forty sessions, of which three stay: most of the file is free pages."""
    lane = world.lane()
    for index, tokens in enumerate(LISTS):
        answer(world, lane, f"s{index}", tokens, session=f"s{index}")
        drain.flush(sync=True)
    for index in range(3, len(LISTS)):
        Operations(drain).remove("default", f"s{index}", force=False, dry_run=False)
    lane.close()


def kept(world: World, drain: Drain) -> list[int]:
    return [restorable(world, drain, tokens) for tokens in LISTS[:4]]


def shrink(drain: Drain) -> Shrink:
    job = Shrink(drain)
    for _ in job.run():
        pass
    return job


def test_file_shrinks_to_what_is_in_it(world: World) -> None:
    drain = Drain(world.paths, world.settings)
    fill(world, drain)
    before, data = drain.store().used_bytes(), world.paths.store / "data.mdb"
    inode = data.stat().st_ino
    job = shrink(drain)
    assert drain.store().used_bytes() < 0.7 * before
    assert job.progress.counts["freed_bytes"] == before - drain.store().used_bytes()
    assert data.stat().st_ino != inode and data.stat().st_size <= drain.store().used_bytes() + 4096
    assert kept(world, drain) == [27, 27, 27, 0]
    assert {path.name for path in world.paths.store.iterdir()} <= {"data.mdb", "lock.mdb", "keeper.lock"}
    check_usage(drain)
    append_rows_of(world, drain)
    drain.close()
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []


def append_rows_of(world: World, drain: Drain) -> None:
    """Another session, after the switch."""
    lane, tokens = world.lane("e1"), some_tokens(30, seed=99)
    world.capture(lane, "after", tokens, [30], session="after")
    drain.flush(sync=True)
    assert restorable(world, drain, tokens) == 30
    lane.close()


def test_what_is_drained_and_removed_meanwhile_is_there_and_gone(world: World) -> None:
    drain = Drain(world.paths, world.settings)
    fill(world, drain)
    lane, tokens = world.lane("e1"), some_tokens(600, seed=77)
    world.capture(lane, "live", tokens, [], session="live")
    position = 0
    for step, _ in enumerate(Shrink(drain).run()):
        append_rows(lane, "live", position, tokens[position : position + 3])
        position += 3
        drain.step()
        if step == 3:
            Operations(drain).remove("default", "s1", force=False, dry_run=False)
        if step == 5:
            Operations(drain).pin("default", "s2", True)
    assert step > 10
    drain.flush(sync=True)
    assert restorable(world, drain, tokens) == position
    assert kept(world, drain) == [27, 0, 27, 0]
    assert next(entry["pinned"] for entry in Operations(drain).sessions(session="s2"))
    check_usage(drain)
    drain.close()
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []


def test_cancelled_at_any_step_leaves_the_store_as_it_was(world: World) -> None:
    drain = Drain(world.paths, world.settings)
    fill(world, drain)
    inode = (world.paths.store / "data.mdb").stat().st_ino
    for stop in itertools.count(1, 4):
        steps = Shrink(drain).run()
        if len(list(itertools.islice(steps, stop))) < stop:
            break
        steps.close()  # type: ignore[attr-defined]
        assert (world.paths.store / "data.mdb").stat().st_ino == inode and not (world.paths.store / "shrink").exists()
        assert kept(world, drain) == [27, 27, 27, 0]
    assert stop > 10
    drain.close()


@pytest.mark.parametrize("side", ["before", "after"])
def test_failed_switch_leaves_a_whole_store(world: World, side: str) -> None:
    drain = Drain(world.paths, world.settings)
    fill(world, drain)
    failpoints.arm(f"compact.shrink_switch.{side}:1:EIO")
    try:
        with pytest.raises((OSError, TierError)):
            shrink(drain)
    finally:
        failpoints.arm(None)
    assert kept(world, drain) == [27, 27, 27, 0]
    append_rows_of(world, drain)
    drain.close()
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []


KILLED = """
import sys
from tests.tiers.sample import World
from tiers import failpoints
from tiers.drain import Drain
from tiers.paths import Paths
from tiers.shrink import Shrink
world = World(Paths.at(sys.argv[1], sys.argv[2]))
drain = Drain(world.paths, world.settings)
failpoints.arm(sys.argv[3] if not sys.argv[3].isdigit() else None)
for step, _ in enumerate(Shrink(drain).run()):
    if sys.argv[3].isdigit() and step == int(sys.argv[3]):
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
@pytest.mark.parametrize("place", ["compact.shrink_switch.before", "compact.shrink_switch.after", "2", "12", "20"])
def test_killed_in_the_middle(world: World, place: str) -> None:
    drain = Drain(world.paths, world.settings)
    fill(world, drain)
    drain.close()
    run([sys.executable, "-c", KILLED, str(world.paths.data_dir), str(world.paths.lane_dir), place])
    drain = Drain(world.paths, world.settings)
    assert kept(world, drain) == [27, 27, 27, 0]
    assert not (world.paths.store / "shrink").exists()
    append_rows_of(world, drain)
    drain.close()
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []


def run(command: list[str]) -> None:
    process = subprocess.run(
        command, check=False, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, timeout=120
    )
    assert process.returncode == -9, process.returncode


def test_no_room_for_the_copy_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Drain(world.paths, world.settings)
    fill(world, drain)
    monkeypatch.setattr("tiers.shrink.FREE_DISK_RESERVE_BYTES", 1 << 60)
    with pytest.raises(StoreFailed, match="no room"):
        shrink(drain)
    assert kept(world, drain) == [27, 27, 27, 0]
    drain.close()


@pytest.mark.process
def test_reader_in_another_process_follows_the_switch(world: World) -> None:
    """One finder all the while, here; the keeper shrinks the store in its own process, several times."""
    drain = Drain(world.paths, world.settings)
    fill(world, drain)
    drain.close()
    finder = world.finder()
    from tests.tiers.sample import read_all

    data = world.paths.store / "data.mdb"
    with keeper_process(world, compact_interval_s=0):
        for turn in range(3):
            inode = data.stat().st_ino
            assert read_all(finder, LISTS[0])[0] == 27
            job = keeper_client.start_compact(world.paths.keeper_socket, settle_s=1e9, grace_s=0, shrink=True)
            while not job.finished:
                assert read_all(finder, LISTS[0])[0] == 27
                job = keeper_client.job(world.paths.keeper_socket)  # type: ignore[assignment]
            assert job.error == "" and data.stat().st_ino != inode
            lane, tokens = world.lane(f"n{turn}"), some_tokens(30, seed=200 + turn)
            world.capture(lane, f"n{turn}", tokens, [30], session=f"n{turn}")
            keeper_client.drain(world.paths.keeper_socket, sync=True)
            assert read_all(finder, tokens)[0] == 30
    finder.close()


def test_damaged_record_is_copied_as_it_is(world: World) -> None:
    drain = Drain(world.paths, world.settings)
    fill(world, drain)
    with drain.store().group() as group:
        key = next(key for key, _ in group.scan("blocks"))
        raw = np.frombuffer(bytes(group.raw("blocks", key)), np.uint8).copy()
        raw[-1] ^= 1
        group._txn.put(key, raw.data, db=group._db[b"blocks"])
    assert shrink(drain).progress.counts["bad_records"] == 1
    assert counts(drain)["blocks"] == 9
    compact(drain, settle_s=1e9)
    drain.close()
    assert [finding.kind for finding in verify(world.paths.store, map_bytes=world.settings.store_map_bytes)] == [
        "block"
    ]


# ---------------------------------------------------------------- copies for backups


def test_copy_for_a_backup_is_of_the_moment_at_which_it_ends_and_holds_no_snapshot(
    world: World, tmp_path: Path
) -> None:
    drain = Drain(world.paths, world.settings)
    fill(world, drain)
    lane, tokens, target = world.lane("e1"), some_tokens(600, seed=77), tmp_path / "copy"
    world.capture(lane, "live", tokens, [], session="live")
    inode, position = (world.paths.store / "data.mdb").stat().st_ino, 0
    for step, _ in enumerate(Duplicate(drain, target).run()):
        assert drain.store().snapshots() == {}, "nothing keeps freed pages from being used again"
        append_rows(lane, "live", position, tokens[position : position + 3])
        position += 3
        drain.step()
        if step == 3:
            Operations(drain).remove("default", "s1", force=False, dry_run=False)
    assert drain.store().touched is None and (world.paths.store / "data.mdb").stat().st_ino == inode
    drain.close()
    assert [path.name for path in target.iterdir()] == ["data.mdb"]
    assert list(verify(target, map_bytes=world.settings.store_map_bytes)) == []
    finder = PrefixFinder(StoreReader(target, map_bytes=world.settings.store_map_bytes), tmp_path)
    assert [read_all(finder, tokens)[0] for tokens in LISTS[:3]] == [27, 0, 27]
    assert read_all(finder, tokens)[0] >= position - 3 - BLOCK
    finder.close()


def test_copy_with_a_bound_lets_other_work_go_on_meanwhile(world: World, tmp_path: Path) -> None:
    drain = Drain(world.paths, world.settings)
    fill(world, drain)
    job = Duplicate(drain, tmp_path / "copy", limit_bytes_s=1e-3)
    steps = job.run()
    while not job.progress.is_paced:
        next(steps)
    done = dict(job.progress.counts)
    for _ in range(50):
        next(steps)
    assert job.progress.counts == done and job.progress.is_paced
    with pytest.raises(StoreFailed, match="being copied already"):
        shrink(drain)
    steps.close()  # type: ignore[attr-defined]
    assert not (tmp_path / "copy").exists() and drain.store().touched is None
    shrink(drain)
    drain.close()


def test_compaction_goes_on_beside_a_copy_and_an_orphaned_one_ends(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain = Drain(world.paths, world.settings)
    fill(world, drain)
    jobs = Jobs(drain)
    jobs.start_copy(tmp_path / "copy", 1e-3)
    job = jobs.start(0, 0)
    while not job.finished:
        jobs.work()
    assert job.state()["counts"]["folded"] and not job.error
    state = jobs.copy_state()
    assert state is not None and not state["finished"] and not jobs.idle
    with pytest.raises(Busy):
        jobs.start_copy(tmp_path / "other", 0)
    monkeypatch.setattr(keeper_jobs, "COPY_ORPHAN_S", 0.0)
    jobs.work()
    state = jobs.copy_state()
    assert state is not None and "nobody asked" in state["error"]
    assert jobs.idle and not (tmp_path / "copy").exists()
    drain.close()


def test_a_copy_whose_command_was_killed_or_interrupted_gives_way(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain = world.drained()
    jobs = Jobs(drain)
    first = jobs.start_copy(tmp_path / "a", 1e-3)
    jobs.work()
    jobs.cancel_copy()
    assert first.finished and not (tmp_path / "a").exists()
    second = jobs.start_copy(tmp_path / "a", 1e-3)
    jobs.work()
    with pytest.raises(Busy):
        jobs.start_copy(tmp_path / "b", 0)
    monkeypatch.setattr(keeper_jobs, "COPY_SILENT_S", 0.0)
    third = jobs.start_copy(tmp_path / "b", 0)
    while not third.finished:
        jobs.work()
    assert second.finished and not third.error and (tmp_path / "b" / "data.mdb").exists()
    assert not (tmp_path / "a").exists()
    drain.close()


def test_a_copy_to_where_no_database_can_be_ends_and_nothing_else_does(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system without shared mappings, or beyond the limit of addresses."""
    drain = world.drained()
    drain.store()
    jobs = Jobs(drain)

    def refuse(path: str, **given: object) -> None:
        raise lmdb.InvalidParameterError(f"{path}: Invalid argument")

    with monkeypatch.context() as patched:
        patched.setattr(lmdb, "open", refuse)
        job = jobs.start_copy(tmp_path / "copy", 0)
        while not job.finished:
            jobs.work()
    assert "Invalid argument" in job.error and not (tmp_path / "copy").exists()
    again = jobs.start_copy(tmp_path / "copy", 0)
    while not again.finished:
        jobs.work()
    assert not again.error
    drain.close()
