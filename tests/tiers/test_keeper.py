from __future__ import annotations

import asyncio
import dataclasses
import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.tiers import forked
from tests.tiers.forked import Forked
from tests.tiers.sample import BLOCK, LAYOUT, ROOT, World, append_rows, flip, read_all, rows, sequence, some_tokens
from tiers import drain as drain_file
from tiers import heartbeat, keeper_client, keeper_jobs, store_file
from tiers import keeper as keeper_file
from tiers.drain import Drain
from tiers.errors import BadBlock, KeeperAway, LaneFull, NoRoom, OverBudget, StoreFailed, TierError
from tiers.group import Group
from tiers.keeper import Keeper
from tiers.keeper_jobs import Jobs
from tiers.keeper_operations import Operations
from tiers.lane_format import data_offset
from tiers.lane_reader import LaneReader
from tiers.lock import is_held
from tiers.rebuild import TokenList
from tiers.store import Store
from tiers.verify import verify

TOKENS = some_tokens(5 * BLOCK + 3)
REPOSITORY = Path(__file__).parents[2]


def stored(world: World) -> dict[str, int]:
    store = Store(world.paths.store, map_bytes=world.settings.store_map_bytes)
    with store.snapshot() as view:
        counts = {name: view.count(name) for name in ("blocks", "children", "tails", "sequences", "roots")}
    store.close()
    return counts


# ---------------------------------------------------------------- the drain, in this process


def test_blocks_and_tail_of_one_sequence(world: World) -> None:
    world.capture(world.lane(), "a", TOKENS, [43])
    assert world.drain()["blocks_put"] == 5
    assert stored(world) == {"blocks": 5, "children": 5, "tails": 1, "sequences": 1, "roots": 1}


def test_pieces_of_one_drain_are_grouped(world: World) -> None:
    world.capture(world.lane(), "a", TOKENS, range(1, 8))
    assert world.drain()["tails_put"] == 1
    assert stored(world)["tails"] == 1


def test_whole_block_supersedes_its_pieces(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [3])
    world.drain()
    append_rows(lane, "a", 3, TOKENS[3:5])
    world.drain()
    assert stored(world)["tails"] == 2
    append_rows(lane, "a", 5, TOKENS[5:8])
    world.drain()
    assert (stored(world)["tails"], stored(world)["blocks"]) == (0, 1)


def test_tail_of_an_ended_sequence_goes_when_another_completes_the_block(world: World) -> None:
    lane = world.lane()
    other = TOKENS.copy()
    other[2] += 1
    for name, tokens in (("ended", TOKENS), ("branched", other), ("open", TOKENS)):
        world.capture(lane, name, tokens, [5])
    lane.append_close(sequence("ended"), 1, 5)
    lane.append_close(sequence("branched"), 1, 5)
    world.drain()
    world.capture(lane, "b", TOKENS, [8])
    world.drain()
    assert stored(world)["tails"] == 2  # of the branch, and of the one that may go on
    assert world.restorable(other) == 5


def test_shared_blocks_are_stored_once(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [40])
    branch = TOKENS.copy()
    branch[25:] += 1
    world.capture(lane, "b", branch, [40])
    counts = world.drain()
    assert (counts["blocks_put"], counts["blocks_shared"]) == (5 + 2, 3)
    assert stored(world)["blocks"] == 7
    assert world.restorable(TOKENS) == world.restorable(branch) == 40


def test_replay_after_a_crash_between_commit_and_tail(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [3, 20, 43])
    lane.append_close(sequence("a"), 1, 43)

    def crash(self: LaneReader, number: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LaneReader, "advance_tail", crash)
        drain = Drain(world.paths, world.settings)
        drain.step()
        with pytest.raises(KeyboardInterrupt):
            drain.sync()
        with pytest.raises(KeyboardInterrupt):
            drain.close()
    before = stored(world)
    assert lane.tail == 0
    counts = world.drain()
    assert counts.get("blocks_put", 0) == 0 and counts.get("tails_put", 0) == 0
    assert stored(world) == before and lane.tail == lane.head
    assert world.restorable(TOKENS) == 43


def test_group_that_fails_leaves_nothing_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.capture(world.lane(), "a", TOKENS, [3, 43])
    drain = Drain(world.paths, world.settings)
    with monkeypatch.context() as patch:
        patch.setattr(Group, "put_tail", lambda *_: (_ for _ in ()).throw(StoreFailed("EIO")))
        with pytest.raises(StoreFailed):
            drain.step()
    assert drain.counts["blocks_put"] == 0 and drain.counts["store_failures"] == 1
    drain._retry_at = 0
    drain.flush(sync=True)
    assert drain.counts["blocks_put"] == 5 and not drain.failing
    drain.close()
    assert world.restorable(TOKENS) == 43


def test_full_map_keeps_records_in_the_lane(world: World) -> None:
    small = World(world.paths, dataclasses.replace(world.settings, store_map_bytes=1 << 17))
    lane = world.lane()
    world.capture(lane, "a", some_tokens(800), [800])
    drain = Drain(small.paths, small.settings)
    with pytest.raises(StoreFailed, match="map is full"):
        drain.flush(sync=False)
    assert lane.tail < lane.head and drain.failing
    with pytest.raises(StoreFailed):
        drain.step()  # not tried again at once
    drain.close()
    world.drain()
    assert world.restorable(some_tokens(800)) == 800


def test_full_disk_is_named_and_got_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [43])
    drain = Drain(world.paths, world.settings)
    monkeypatch.setattr(store_file, "FREE_DISK_RESERVE_BYTES", 1 << 60)
    with pytest.raises(StoreFailed, match="disk is full"):
        drain.step()
    assert "disk is full" in drain.stats()["failing"]
    with pytest.raises(NoRoom) as again:
        drain.step()
    assert str(again.value).count("disk is full") == str(again.value).count(StoreFailed.hint) == 1
    monkeypatch.undo()
    drain._retry_at = 0
    drain.flush(sync=True)
    assert drain.stats()["failing"] == "" and lane.tail == lane.head
    drain.close()


def test_flipped_record_never_becomes_a_block(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [8, 16, 24])
    reader = LaneReader.open(world.paths.lane("e0"))
    record = reader.records(0)[2]
    flip(world.paths.lane("e0"), data_offset(64) + record.payload_offset + 100)
    counts = world.drain()
    assert counts["bad_records"] == 1 and counts["gap"] == 1 and counts["blocks_put"] == 1
    assert lane.tail == lane.head
    assert world.restorable(TOKENS) == 8
    world.capture(lane, "again", TOKENS, [43], start=8)
    world.drain()
    assert world.restorable(TOKENS) == 43


def test_flipped_entry_is_passed_over(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [8])
    flip(world.paths.lane("e0"), 2 * 4096 + 30)  # the OPEN record's sequence
    counts = world.drain()
    assert counts["bad_records"] == 1 and counts["orphan"] == 1
    assert lane.tail == lane.head


def test_frame_of_the_wrong_size_is_a_bad_record(world: World) -> None:
    lane = world.lane()
    lane.append_open(sequence("a"), 1, ROOT, LAYOUT, BLOCK, "default", "s", "a", TOKENS[:0])
    reservation = lane.reserve_rows(dataclasses.replace(LAYOUT, groups=((1, 8),)), 4)
    reservation.commit(sequence("a"), 1, 0, TOKENS[:4])
    assert world.drain()["bad_records"] == 1


def test_flipped_tail_piece_never_becomes_part_of_a_block(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [5])
    world.drain()
    data = world.paths.store / "data.mdb"
    flip(data, data.read_bytes().find(rows(0, TOKENS[:5]).tobytes()) + 3)
    append_rows(lane, "a", 5, TOKENS[5:16])
    drain = world.drained()
    assert drain.counts["bad_blocks"] == 1 and drain.counts["blocks_put"] == 0
    assert drain.positions([sequence("a")]) == {sequence("a").hex(): (0, 0)}, "what comes after it can't be restored"
    drain.close()
    with pytest.raises(BadBlock):
        world.restorable(TOKENS)


def test_record_of_an_older_epoch_is_refused_once_the_newer_one_began(world: World) -> None:
    old, new = world.lane("e0"), world.lane("e1")
    world.capture(old, "old", TOKENS, [8], stream="chat")
    world.capture(new, "new", TOKENS, [9], start=8, epoch=2, stream="chat")
    world.drain()
    append_rows(old, "old", 8, TOKENS[8:20])  # a fenced engine that isn't dead
    assert world.drain()["stale_records"] == 1
    assert world.restorable(TOKENS) == 9
    world.capture(old, "older", TOKENS, [20], stream="chat")
    assert world.drain()["stale_records"] == 1


def test_what_a_fenced_engine_captured_before_is_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The successor leans on it, whichever lane is drained first, also by a keeper that starts in between."""
    monkeypatch.setattr(drain_file, "GROUP_RECORDS", 1)
    successor, dead = world.lane("e0"), world.lane("e1")
    world.capture(dead, "old", TOKENS, [8, 16, 20], stream="chat")
    world.capture(successor, "new", TOKENS, [43], start=16, epoch=2, stream="chat")
    while dead.tail < dead.head or successor.tail < successor.head:
        drain = Drain(world.paths, world.settings)
        drain.step()
        assert drain.counts["stale_records"] == 0
        drain.close()
    assert world.restorable(TOKENS) == 43


def test_forget_deletes_up_to_what_others_need(world: World) -> None:
    lane = world.lane()
    branch = TOKENS.copy()
    branch[20:] += 1
    world.capture(lane, "a", TOKENS, [43], session="gone")
    world.capture(lane, "b", branch, [43], session="stays")
    for name in "ab":
        lane.append_close(sequence(name), 1, 43)
    drain = world.drained()
    forget = Operations(drain).forget
    assert forget(ROOT, "default", TOKENS, "gone") == {"blocks": 3, "tails": 1, "points": 0, "sequences": 1}
    assert forget(ROOT, "default", TOKENS, "gone") == {"blocks": 0, "tails": 0, "points": 0, "sequences": 0}
    assert forget(ROOT, "another tenant", branch) == {"blocks": 0, "tails": 0, "points": 0, "sequences": 0}
    drain.close()
    assert world.restorable(branch) == 43 and world.restorable(TOKENS) == 20
    drain = world.drained()
    Operations(drain).forget(ROOT, "default", branch, "stays")
    drain.close()
    assert stored(world) == {"blocks": 0, "children": 0, "tails": 0, "sequences": 0, "roots": 1}


def test_store_that_a_power_loss_found_unsynced_is_set_aside(world: World) -> None:
    unsafe = World(world.paths, dataclasses.replace(world.settings, durability="process"))
    unsafe.capture(world.lane(), "a", TOKENS, [43])
    unsafe.drain()
    marker = world.paths.store / "unsynced"
    assert not marker.exists()  # closed properly
    assert world.restorable(TOKENS) == 43
    marker.write_text("another boot")
    store = Store(world.paths.store, map_bytes=1 << 24)
    assert not marker.exists()
    store.close()
    assert stored(world)["blocks"] == 0
    assert (world.paths.store / "damaged" / "data.mdb").exists()


# ---------------------------------------------------------------- the process


@contextmanager
def keeper_process(world: World, *, wait: bool = True, orphan_s: float = 0, **settings: object) -> Iterator[Forked]:
    fields = {**dataclasses.asdict(world.settings), "drain_interval_ms": 5, **settings}
    arguments = ["--data-dir", str(world.paths.data_dir), "--lane-dir", str(world.paths.lane_dir)]
    arguments += ["--settings-json", json.dumps(fields), "--orphan-s", str(orphan_s)]
    process = forked.parent().keeper(arguments, os.environ)
    try:
        if wait:
            ask(lambda: keeper_client.stats(world.paths.keeper_socket))
        yield process
    finally:
        process.kill()
        process.wait(60)


def ask(question, deadline_s: float = 60):  # type: ignore[no-untyped-def]
    """Repeat a question until the keeper answers it."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            return question()
        except KeeperAway:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


@pytest.mark.process
def test_lanes_may_appear_after_the_keeper(world: World) -> None:
    with keeper_process(world):
        assert keeper_client.drain(world.paths.keeper_socket) == {}
        lane = world.lane()
        world.capture(lane, "a", TOKENS, [43])
        assert keeper_client.drain(world.paths.keeper_socket, sync=True) == {"e0": 2}
        assert world.restorable(TOKENS) == 43
        stats = keeper_client.stats(world.paths.keeper_socket)
        assert stats["blocks_put"] == 5 and stats["stored_tails"] == 1 and stats["unsynced_ms"] == 0


@pytest.mark.process
def test_a_keeper_without_a_descriptor_left_sends_callers_away_and_goes_on_later(world: World) -> None:
    path, silent = world.paths.keeper_socket, list[socket.socket]()
    with keeper_process(world) as process:
        lane = world.lane()
        world.capture(lane, "a", TOKENS, [20])
        keeper_client.drain(path)
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        highest = max(map(int, os.listdir(f"/proc/{process.pid}/fd")))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (highest + 3, limits[1]))
        with pytest.raises(KeeperAway):
            for _ in range(20):
                with suppress(StoreFailed):  # it can't look at its lanes: that is to be asked again
                    keeper_client.stats(path)
                silent.append(socket.socket(socket.AF_UNIX))
                silent[-1].connect(str(path))
        append_rows(lane, "a", 20, TOKENS[20:])
        for _ in range(3):
            with pytest.raises(KeeperAway, match="mid-answer|reset|pipe"):
                keeper_client.drain(path, timeout_s=60)
        for one in silent:
            one.close()
        assert ask(lambda: keeper_client.drain(path, sync=True)) == {"e0": 3}
        assert process.poll() is None
    assert world.restorable(TOKENS) == 43


@pytest.mark.process
@pytest.mark.parametrize("tail_interval_ms", [0, 60_000])
def test_killed_keepers_lose_nothing(world: World, tail_interval_ms: int) -> None:
    """Records are appended without pause while keepers are killed at random instructions, one after the other."""
    seed = int(time.time())
    print("seed", seed)
    random = np.random.default_rng(seed)
    lane = world.lane()
    tokens = some_tokens(6000, seed=seed)
    world.capture(lane, "a", tokens, [])
    position = 0
    for _ in range(4):
        with keeper_process(world, wait=False, tail_interval_ms=tail_interval_ms) as process:
            ask(lambda: keeper_client.stats(world.paths.keeper_socket))
            kill_at = time.monotonic() + random.uniform(0.01, 0.08)
            while time.monotonic() < kill_at and position < 5900:
                size = int(random.integers(1, 20))
                try:
                    append_rows(lane, "a", position, tokens[position : position + size])
                    position += size
                except LaneFull:
                    time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        world.paths.keeper_socket.unlink(missing_ok=True)
        assert world.restorable(tokens) == position
    with keeper_process(world):
        keeper_client.drain(world.paths.keeper_socket, sync=True)
    assert lane.tail == lane.head
    assert world.restorable(tokens) == position > 100


@pytest.mark.process
@pytest.mark.parametrize("tail_interval_ms", [0, 60_000])
def test_everything_captured_is_restorable_at_any_moment(world: World, tail_interval_ms: int) -> None:
    """While the keeper moves it from the lane to the disk, through several laps of the ring, one finder always finds all of it."""
    lane = world.lane()
    tokens = some_tokens(402)
    world.capture(lane, "a", tokens, [])
    finder = world.finder()
    with keeper_process(world, drain_interval_ms=1, tail_interval_ms=tail_interval_ms):
        position = 0
        while position < 402:
            try:
                append_rows(lane, "a", position, tokens[position : position + 3])
                position += 3
            except LaneFull:
                pass
            assert read_all(finder, tokens[:position])[0] == position
    assert lane.head > 2 * world.settings.lane_record_count
    finder.close()


@pytest.mark.process
def test_sigterm_drains_and_syncs(world: World) -> None:
    with keeper_process(world, drain_interval_ms=60_000) as process:
        lane = world.lane()
        world.capture(lane, "a", TOKENS, [43])
        heard = heartbeat.read(world.paths.beat("keeper"))
        assert heard is not None and heard.pid == process.pid
        deadline = time.monotonic() + 60
        while heartbeat.read(world.paths.beat("keeper")) == heard:  # also where it has nothing to do
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.terminate()
        assert process.wait(60) == 0
    assert lane.tail == lane.head
    assert not world.paths.keeper_socket.exists()
    assert stored(world)["blocks"] == 5


@pytest.mark.process
def test_keeper_survives_a_full_map_and_says_so(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", some_tokens(800), [800])
    with keeper_process(world, store_map_bytes=1 << 17) as process:
        with pytest.raises(StoreFailed, match="map is full"):
            keeper_client.drain(world.paths.keeper_socket)
        assert "map is full" in keeper_client.stats(world.paths.keeper_socket)["failing"]
        assert process.poll() is None and lane.tail < lane.head
    with keeper_process(world):
        keeper_client.drain(world.paths.keeper_socket)
    assert world.restorable(some_tokens(800)) == 800


@pytest.mark.process
def test_keeper_ends_when_no_host_agent_is_left(world: World) -> None:
    world.capture(world.lane(), "a", TOKENS, [43])
    with open(world.paths.host_lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_held(world.paths.host_lock)
        with keeper_process(world, orphan_s=0.3) as process:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.6)
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert not is_held(world.paths.host_lock)
            assert process.wait(60) == 0
    assert world.restorable(TOKENS) == 43


def test_keeper_needs_no_room_in_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    keeper_file._write_pid_file(tmp_path / "keeper.pid", 1)
    assert not (tmp_path / "keeper.pid").exists()


@pytest.mark.process
def test_second_keeper_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_file, "LOCK_WAIT_S", 0.05)
    with keeper_process(world):
        with pytest.raises(SystemExit, match="another keeper"):
            Keeper(world.paths, world.settings)


@pytest.mark.process
def test_bad_requests_are_answered(world: World) -> None:
    with keeper_process(world):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(world.paths.keeper_socket))
            reader = connection.makefile("r")
            for line in (
                "not json",
                "[]",
                "{}",
                '{"op": "dance"}',
                '{"op": "forget"}',
                '{"op": "forget", "root": "zz"}',
                '{"op": "compact", "settle_s": 1e306}',
                "[" * 100_000,
            ):
                connection.sendall(line.encode() + b"\n")
                answer = json.loads(reader.readline())
                assert answer["ok"] is False and answer["error"]
        with pytest.raises(TierError):
            keeper_client.forget(world.paths.keeper_socket, ROOT, "default", ["x"])  # type: ignore[list-item]
        with pytest.raises(TierError, match="/nowhere: No such file"):
            keeper_client.import_slice(world.paths.keeper_socket, "/nowhere", "chat", "default", 0, 0)
        assert keeper_client.forget(world.paths.keeper_socket, ROOT, "default", [1])["blocks"] == 0
        long = [TokenList("default", f"s{number}", bytes(1 << 20), 0) for number in range(10)]
        assert asyncio.run(keeper_client.astored(world.paths.keeper_socket, long)) == [0] * 10


def test_what_was_committed_is_synced_though_nothing_more_is_taken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the budget for days, the bound of `interval` holds for what was taken before."""
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [43])
    keeper = Keeper(world.paths, dataclasses.replace(world.settings, sync_interval_ms=0), orphan_s=0)
    keeper._drain.step()
    assert lane.tail == 0 and keeper._drain._unsynced

    def over_budget() -> bool:
        raise OverBudget("the store's budget is used up")

    monkeypatch.setattr(keeper._drain, "step", over_budget)
    keeper._tick()
    assert lane.tail == lane.head and not keeper._drain._unsynced
    monkeypatch.undo()
    keeper._finish()


def test_what_hinders_a_keeper_is_said_once_and_again_when_it_comes_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper(world.paths, world.settings, orphan_s=0)

    def refused(what: str) -> Callable[[], bool]:
        def refuse() -> bool:
            raise OSError(errno.EMFILE, "Too many open files", what)

        return refuse

    with capture_logs() as events:
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(keeper._drain, "step", refused("lanes"))
                patch.setattr(keeper, "_look_for_host", refused("host"))
                for _ in range(3):
                    assert not keeper._tick()
            keeper._tick()
    assert [event["event"] for event in events].count("keeper.hindered") == 2
    keeper._finish()


@pytest.mark.process
async def test_async_client(world: World) -> None:
    with pytest.raises(KeeperAway):
        await keeper_client.adrain(world.paths.keeper_socket)
    world.capture(world.lane(), "a", TOKENS, [43])
    with keeper_process(world):
        assert await keeper_client.adrain(world.paths.keeper_socket, sync=True) == {"e0": 2}
        assert (await keeper_client.astats(world.paths.keeper_socket))["records"] == 2
        deleted = await keeper_client.aforget(world.paths.keeper_socket, ROOT, "default", TOKENS.tolist())
        assert deleted == {
            "blocks": 0,
            "tails": 0,
            "points": 0,
            "sequences": 0,
        }  # the sequence is live, and needs all of it


def test_client_has_a_deadline(world: World) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(world.paths.keeper_socket))
        listener.listen(1)
        with pytest.raises(KeeperAway, match="timed out"):
            keeper_client.drain(world.paths.keeper_socket, timeout_s=0.05)


@pytest.mark.process
def test_tiers_import_no_torch() -> None:
    names = sorted(path.stem for path in (REPOSITORY / "tiers").glob("*.py") if path.stem != "__init__")
    check = "import sys; assert not {'torch', 'engine', 'gateway', 'ops'} & set(sys.modules)"
    script = "\n".join([f"import tiers.{name}" for name in names] + [check])
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True, timeout=30)


# ---------------------------------------------------------------- rows that wait for their block


def test_rows_of_an_unfinished_block_are_written_once(world: World) -> None:
    """They wait in the lane, are found there, and go into the block; a drain on request writes what is left."""
    patient = World(world.paths, dataclasses.replace(world.settings, tail_interval_ms=60_000))
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [])
    drain = Drain(patient.paths, patient.settings)
    for position in range(43):
        append_rows(lane, "a", position, TOKENS[position : position + 1])
        drain.step()
        if position % 5 == 0:
            drain.sync()
            assert lane.tail <= 1 + (position + 1) // BLOCK * BLOCK
    assert drain.counts["blocks_put"] == 5 and drain.counts["tails_put"] == 0
    assert drain.counts["put_bytes"] < 2 * drain.counts["captured_bytes"]  # tiny blocks: headers weigh
    drain.flush(sync=True)
    assert drain.counts["tails_put"] == 1 and lane.tail == lane.head
    drain.close()
    assert world.restorable(TOKENS) == 43


@pytest.mark.parametrize("why", ["time", "lane fills", "closed"])
def test_rows_do_not_wait_for_ever(world: World, why: str) -> None:
    interval = 1 if why == "time" else 60_000
    drain = Drain(world.paths, dataclasses.replace(world.settings, tail_interval_ms=interval))
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [3])
    drain.step()
    assert drain.counts["tails_put"] == 0
    if why == "time":
        time.sleep(0.002)
    elif why == "closed":
        lane.append_close(sequence("a"), 1, 3)
    else:
        for position in range(20):
            append_rows(lane, "b", position, TOKENS[position : position + 1])
    drain.step()
    drain.step()
    assert drain.counts["tails_put"] == 1
    drain.close()


def test_killed_with_rows_waiting(world: World) -> None:
    """The next keeper takes them again from the lane."""
    patient = dataclasses.replace(world.settings, tail_interval_ms=60_000)
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [3, 13, 21])
    drain = Drain(world.paths, patient)
    drain.step()
    drain.close()
    assert lane.tail < lane.head
    assert world.restorable(TOKENS) == 21
    append_rows(lane, "a", 21, TOKENS[21:])
    assert world.drain()["blocks_put"] == 3
    assert world.restorable(TOKENS) == 43


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_rows_that_go_bad_while_they_wait_are_not_stored(world: World, ended: bool, busy: bool) -> None:
    """A block or a tail is as good as its checksum says: it isn't made of rows that were flipped after they had been looked at."""
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [8, 11])
    drain = Drain(world.paths, dataclasses.replace(world.settings, tail_interval_ms=60_000))
    drain.step()
    number = lane.head - 1
    flip(
        world.paths.lane("e0"),
        data_offset(64) + LaneReader.open(world.paths.lane("e0")).records(number)[0].payload_offset + 70,
    )
    if ended:
        lane.append_close(sequence("a"), 1, 11)
    else:
        append_rows(lane, "a", 11, TOKENS[11:30])
    if busy:  # so that the next group is made ready beside a commit
        world.capture(lane, "b", some_tokens(40, seed=3), range(1, 41))
    while drain.step():
        continue
    drain.flush(sync=True)
    counts = drain.counts
    assert counts["bad_records"] + counts["bad_blocks"] == 1
    assert drain.positions([sequence("a")]) == {sequence("a").hex(): (8, 8)}
    drain.close()
    lane.close()
    shutil.rmtree(world.paths.lane_dir)
    assert world.restorable(TOKENS) == 8
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []


# ---------------------------------------------------------------- compaction through the control socket


@pytest.mark.process
def test_compaction_by_command(world: World) -> None:
    lane = world.lane()
    other = TOKENS.copy()
    other[18:] += 1
    with keeper_process(world, compact_interval_s=0):
        socket_path = world.paths.keeper_socket
        assert keeper_client.job(socket_path) is None
        for name, tokens in (("rejected", other), ("kept", TOKENS)):
            world.capture(lane, name, tokens, [43])
            lane.append_close(sequence(name), 1, 43)
        keeper_client.drain(socket_path)
        assert keeper_client.compact(socket_path, dry_run=True, grace_s=0).counts.get("freed_blocks", 0) == 0
        seen: list[str] = []
        done = keeper_client.compact(socket_path, grace_s=1.0, on_progress=lambda state: seen.append(state.phase))
        assert done.finished and done.counts["folded"] == 1 and done.counts["freed_blocks"] == 3
        assert seen[-1] == "done" and "wait" in seen
        (session,) = keeper_client.sessions(socket_path)
        assert session.session == "chat" and session.stored == 43 and session.compacted and not session.live
        assert keeper_client.sessions(socket_path, session="another") == []
        tenants = keeper_client.tenants(socket_path)
        assert tenants["default"].blocks[0] == 5 and tenants["default"].bases[0] == 1
        keeper_client.pin(socket_path, "default", "chat")
        assert keeper_client.sessions(socket_path)[0].pinned
        stats = keeper_client.stats(socket_path)
        assert stats["captured_bytes"] > 0 and stats["live_bytes"] > 0
        assert keeper_client.remove(socket_path, "default", "chat")["blocks"] == 5
        assert keeper_client.sessions(socket_path) == []


@pytest.mark.process
def test_keeper_compacts_by_itself(world: World) -> None:
    lane = world.lane()
    with keeper_process(world, compact_interval_s=0.05, compact_after_s=0.05):
        world.capture(lane, "a", TOKENS, [43])
        lane.append_close(sequence("a"), 1, 43)
        keeper_client.drain(world.paths.keeper_socket)
        deadline = time.monotonic() + 60
        while not keeper_client.sessions(world.paths.keeper_socket)[0].compacted:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.process
def test_one_compaction_at_a_time(world: World) -> None:
    with keeper_process(world, compact_interval_s=0):
        first = keeper_client.start_compact(world.paths.keeper_socket, grace_s=30)
        with pytest.raises(StoreFailed, match="is running"):
            keeper_client.start_compact(world.paths.keeper_socket)
        state = keeper_client.job(world.paths.keeper_socket)
        assert state is not None and state.id == first.id and not state.finished


def test_a_job_is_never_taken_for_one_of_the_keeper_before(world: World) -> None:
    drain = Drain(world.paths, world.settings)
    first, second = (Jobs(drain).start(1e9, 0).number for _ in range(2))
    assert first != second
    drain.close()


def test_what_was_asked_for_is_seen_to_be_done_before_the_next_compaction_begins(world: World) -> None:
    lane = world.lane()
    world.capture(lane, "a", TOKENS, [43])
    lane.append_close(sequence("a"), 1, 43)
    settings = dataclasses.replace(world.settings, compact_interval_s=60, compact_after_s=0)
    drain = Drain(world.paths, settings)
    drain.flush(sync=True)
    jobs = Jobs(drain)
    jobs._compacted_at = -1e9  # it took longer than the interval
    asked = jobs.start(1e9, 0)
    while not asked.finished:
        jobs.work()
    assert jobs.wants_compaction()
    jobs.work()
    assert jobs.state() == asked.state()
    drain.close()


@pytest.mark.process
def test_what_is_interrupted_by_who_waits_for_it_ends_in_the_keeper_too(world: World, tmp_path: Path) -> None:
    def interrupt(state: keeper_client.JobState) -> None:
        raise KeyboardInterrupt

    with keeper_process(world, compact_interval_s=0):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                keeper_client.compact(world.paths.keeper_socket, grace_s=30, on_progress=interrupt)
            state = keeper_client.job(world.paths.keeper_socket)
            assert state is not None and state.finished and "cancelled" in state.error
            with pytest.raises(KeyboardInterrupt):
                keeper_client.copy(world.paths.keeper_socket, tmp_path / "copy", limit_mb_s=1e-6, on_progress=interrupt)
            assert not (tmp_path / "copy").exists()


HOLDER = """
import sys, time
from tiers.view import StoreReader
with StoreReader(sys.argv[1], map_bytes=64 << 20).snapshot() as view:
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.process
def test_held_snapshot_is_named_and_a_killed_one_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.capture(world.lane(), "a", TOKENS, [43])
    drain = world.drained()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", HOLDER, str(world.paths.store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=REPOSITORY) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            monkeypatch.setattr(drain_file, "SNAPSHOT_LIMIT_S", 0.0)
            for turn in range(3):
                Operations(drain).pin("default", f"s{turn}", True)
            drain._check_store()
            stats = drain.stats()
            assert stats["snapshots_held"] == [holder.pid] and stats["snapshot_lag"] >= 3
            (row,) = stats["snapshots"]
            assert row["pid"] == holder.pid and row["age_s"] >= 0 and row["commits_behind"] >= 3
        finally:
            holder.kill()
    drain._check_store()
    stats = drain.stats()
    assert stats["snapshots_held"] == [] and stats["snapshot_lag"] == 0
    drain.close()


@pytest.mark.process
def test_file_that_grows_by_a_held_snapshot_is_left_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped reader costs the room of one old file at most, however long it stands."""
    monkeypatch.setattr(keeper_jobs, "GRACE_S", 0.0)  # nobody else reads
    monkeypatch.setattr(drain_file, "SNAPSHOT_LIMIT_S", 0.0)
    monkeypatch.setattr(drain_file, "GROWN_BYTES", 1 << 16)
    settings = dataclasses.replace(world.settings, compact_interval_s=1e-6)
    world.capture(world.lane(), "a", TOKENS, [43])
    drain = Drain(world.paths, settings)
    drain.flush(sync=True)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", HOLDER, str(world.paths.store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=REPOSITORY) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            holder.send_signal(signal.SIGSTOP)
            drain._check_store()
            assert not drain.grows_by_snapshot()
            for turn in range(100):
                Operations(drain).pin("default", "s", bool(turn % 2))
            assert drain.grows_by_snapshot()
            grown, jobs = drain.store().used_bytes(), Jobs(drain)
            while jobs.idle:
                jobs.work()
            while not jobs.idle:
                jobs.work()
            state = jobs.state()
            assert state is not None and not state["error"] and state["background"]
            assert drain.store().used_bytes() < grown / 2
            drain._check_store()
            assert drain.stats()["snapshots"] == [] and not drain.grows_by_snapshot()
        finally:
            holder.kill()
    drain.close()
    assert world.restorable(TOKENS) == 43
