"""SIGKILL before and after every step of append and drain: the next start loses nothing that was promised and leaks nothing."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.driver import EngineDriver, random_tokens, submit
from tests.faults.processes import Processes, died_of_kill, wait_for
from tests.tiers.sample import BLOCK, World, append_rows, sequence, some_tokens
from tests.tiers.test_compaction import compact
from tiers import failpoints
from tiers.drain import Drain
from tiers.errors import KeeperAway
from tiers.keeper_client import drain as ask_drain
from tiers.lane_reader import LaneSet
from tiers.paths import Paths
from tiers.prefix import PrefixFinder
from tiers.settings import TierSettings
from tiers.store import Store
from tiers.verify import verify

TOKENS = some_tokens(11 * BLOCK + 3)
COUNTED = ("blocks", "nodes", "children", "tails", "sequences", "roots", "streams", "points", "states", "bases")
DRAIN_POINTS = [name for name in failpoints.NAMES if name.startswith("drain.")]
APPEND_POINTS = [name for name in failpoints.NAMES if name.startswith("append.")]


def left(world: World) -> dict[str, int]:
    """Entries of every database, pages that nothing uses any more not counted."""
    store = Store(world.paths.store, map_bytes=world.settings.store_map_bytes)
    with store.snapshot() as view:
        counts = {name: view.count(name) for name in COUNTED}
    store.close()
    return counts


def assert_clean(world: World) -> None:
    found = verify(world.paths.store, world.paths.lane_dir, map_bytes=world.settings.store_map_bytes)
    assert list(found) == []
    names = {path.name for path in world.paths.store.iterdir()}
    assert names <= {"data.mdb", "lock.mdb", "keeper.lock"}, names
    assert [path.name for path in world.paths.lane_dir.glob("*.new")] == []


def capture_all(world: World) -> None:
    """Three sequences, one of them branching off, in many small records."""
    lane = world.lane()
    branch = TOKENS.copy()
    branch[30:] += 1
    for name, tokens in (("a", TOKENS), ("b", branch), ("c", some_tokens(40, seed=7))):
        world.capture(lane, name, tokens, [*range(3, len(tokens), 9), len(tokens)])
        lane.append_close(sequence(name), 1, len(tokens))
    lane.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """What the same work leaves when nobody is killed."""
    directory = tmp_path_factory.mktemp("undisturbed")
    world = roomy(World(Paths.at(directory / "data", directory / "lanes").make()))
    capture_all(world)
    world.drain()
    return left(world)


def roomy(world: World) -> World:
    return dataclasses.replace(
        world, settings=dataclasses.replace(world.settings, lane_record_count=128, drain_interval_ms=5)
    )


@pytest.mark.parametrize(
    "name, count",
    [(name, count) for name in DRAIN_POINTS for count in ((1, 3) if name.split(".")[1] in ("put", "seal") else (1,))],
)
def test_killed_keeper(name: str, count: int, world: World, processes: Processes, undisturbed: dict[str, int]) -> None:
    world = roomy(world)
    capture_all(world)
    keeper = processes.keeper(world, failpoint=f"{name}:{count}")

    def killed() -> bool:
        if keeper.poll() is None:
            try:
                ask_drain(world.paths.keeper_socket, sync=True)
            except KeeperAway:
                pass
        return keeper.poll() is not None

    wait_for("the keeper's end", killed)
    assert keeper.returncode == -signal.SIGKILL
    assert world.restorable(TOKENS) == len(TOKENS), "before the next keeper starts"
    world.drain()
    assert world.restorable(TOKENS) == len(TOKENS)
    assert world.restorable(some_tokens(40, seed=7)) == 40
    assert left(world) == undisturbed
    lanes = LaneSet(world.paths.lane_dir)
    assert [reader.head() - reader.tail for reader in lanes.scan()] == [0]
    lanes.close()
    assert_clean(world)


WRITER = """
import sys
from tests.tiers.sample import BLOCK, World, append_rows, some_tokens
from tiers.paths import Paths
world = World(Paths.at(sys.argv[1], sys.argv[2]))
lane, tokens = world.lane(), some_tokens(11 * BLOCK + 3)
world.capture(lane, "a", tokens, [])
for start in range(0, 91, 7):
    append_rows(lane, "a", start, tokens[start : start + 7])
    print(start + 7, flush=True)
"""


@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize("name", APPEND_POINTS)
def test_killed_writer(name: str, count: int, world: World, processes: Processes) -> None:
    """Every record that was committed is there, the one in the making is not, and the next writer goes on after it."""
    writer = processes.start(
        "-c", WRITER, str(world.paths.data_dir), str(world.paths.lane_dir), CONCORDIA_FAILPOINT=f"{name}:{count}"
    )
    assert died_of_kill(writer) and writer.stdout is not None
    told = [int(line) for line in writer.stdout.read().splitlines() if line.isdigit()]
    position = 7 * (count - 1 if name == "append.commit_word.after" else count - 2)
    assert (told or [0])[-1] == 7 * (count - 2)
    assert world.restorable(TOKENS) == position
    lane = world.lane()
    append_rows(lane, "a", position, TOKENS[position:])
    assert world.restorable(TOKENS) == len(TOKENS)
    world.drain()
    assert world.restorable(TOKENS) == len(TOKENS)
    assert_clean(world)


def died_in_a_child(work: Callable[[], None]) -> bool:
    """Do it in a fork of this process, which has imported what takes a new one seconds; whether it was killed there."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("name", APPEND_POINTS)
def test_killed_engine(name: str, tiny_dir: Path, weights: None, world: World) -> None:
    """A whole engine dies in a capture; another one goes on from what the lane holds, with the same tokens."""
    prompt = random_tokens(3, 70)
    paths = world.paths
    alone = EngineDriver.start(tiny_dir, Paths.at(paths.data_dir / "alone", paths.lane_dir / "alone"))
    alone.handle(submit("s", prompt, answer=12))
    alone.run()
    expected = alone.tokens("s")
    alone.close()

    def serve() -> None:
        engine = EngineDriver.start(tiny_dir, paths)
        failpoints.arm(f"{name}:6")
        engine.handle(submit("s", prompt, answer=12))
        engine.run()

    assert died_in_a_child(serve)
    drain = Drain(paths, TierSettings(store_map_bytes=1 << 30))
    drain.open()
    other = EngineDriver.start(tiny_dir, paths, "e1")
    other.engine.lookup.finder = PrefixFinder(drain.store(), paths.lane_dir)
    other.handle(submit("s", prompt, answer=12, epoch=2))
    other.run()
    assert other.tokens("s") == expected
    assert sum(other.started("s").reused.values()) > 0
    drain.flush(sync=True)
    other.close()
    drain.close()
    assert list(verify(paths.store, paths.lane_dir, map_bytes=1 << 30)) == []


def test_failpoints_cost_nothing_when_off_and_refuse_unknown_names() -> None:
    for name in failpoints.NAMES:
        failpoints.reach(name)
    with pytest.raises(ValueError, match="no failpoint"):
        failpoints.arm("drain.nowhere")
    failpoints.arm("drain.put.before:2:EIO")
    try:
        failpoints.reach("drain.put.before")
        failpoints.reach("drain.put.after")
        with pytest.raises(OSError, match="Input/output error"):
            failpoints.reach("drain.put.before")
        failpoints.reach("drain.put.before")  # only once
    finally:
        failpoints.arm(None)


def sessions_of(world: World) -> None:
    """Two turns of three sessions, the second of which drops the end of the first."""
    lane = world.lane()
    for index in range(3):
        first, second = some_tokens(5 * BLOCK + 3, seed=index), some_tokens(6 * BLOCK + 5, seed=index)
        second[30:] += 1
        for turn, tokens in enumerate((first, second)):
            name = f"{index}-{turn}"
            world.capture(lane, name, tokens, [len(tokens)], session=f"session-{index}")
            lane.append_close(sequence(name), 1, len(tokens))
            world.drain()
    lane.close()


def compacted(world: World) -> None:
    drain = Drain(world.paths, world.settings)
    compact(drain)
    drain.close()


@pytest.fixture(scope="module")
def compacted_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    directory = tmp_path_factory.mktemp("compacted")
    world = World(Paths.at(directory / "data", directory / "lanes").make())
    sessions_of(world)
    compacted(world)
    return left(world)


@pytest.mark.parametrize(
    "name, count",
    [("compact.base_switch.before", 2), ("compact.base_switch.after", 1), ("compact.base_switch.after", 3)]
    + [("compact.free.before", 1), ("compact.free.after", 1)],
)
def test_killed_compaction(name: str, count: int, world: World, compacted_undisturbed: dict[str, int]) -> None:
    """Resumed by the next one: the same bases, the same blocks, nothing left over."""
    sessions_of(world)

    def begin() -> None:
        failpoints.arm(f"{name}:{count}")
        compacted(world)

    assert died_in_a_child(begin)
    kept = [some_tokens(6 * BLOCK + 5, seed=index) for index in range(3)]
    for tokens in kept:
        tokens[30:] += 1
        assert world.restorable(tokens) == len(tokens)
    compacted(world)
    for tokens in kept:
        assert world.restorable(tokens) == len(tokens)
    assert left(world) == compacted_undisturbed
    assert_clean(world)
