"""A slow, full, read-only or broken disk, a full map, a full lane: streams run on, what is not kept is counted and caught up later.

Real keeper, real engine (its loop driven by hand) on the tiny model, a lane that holds a few hundred tokens.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.engine.driver import EngineDriver, random_tokens, submit
from tests.faults.layer import Layer
from tests.faults.processes import Processes, stats, wait_for
from tests.tiers.sample import World
from tiers import keeper_client
from tiers.errors import KeeperAway, StoreFailed
from tiers.paths import Paths
from tiers.settings import TierSettings
from tiers.verify import verify

LANE_BYTES = 256 << 10  # 250 tokens of the tiny model
PROMPTS = [random_tokens(seed, 300) for seed in (1, 2)]
ANSWER = 40


@pytest.fixture(scope="module")
def expected(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers of an engine whose lane is large and whose disk is well."""
    directory = tmp_path_factory.mktemp("well")
    engine = EngineDriver.start(tiny_dir, Paths.at(directory / "data", directory / "lanes"))
    answers = answer_all(engine)
    stop(engine)
    return answers


def answer_all(engine: EngineDriver) -> list[list[int]]:
    for index, prompt in enumerate(PROMPTS):
        engine.handle(submit(f"s{index}", prompt, answer=ANSWER))
        engine.run()
    return [engine.tokens(f"s{index}") for index in range(len(PROMPTS))]


def small(world: World, **settings: object) -> World:
    changed = TierSettings(
        lane_bytes=LANE_BYTES,
        lane_record_count=4096,
        drain_interval_ms=10,
        sync_interval_ms=20,
        store_map_bytes=1 << 30,
    )
    return World(world.paths, dataclasses.replace(changed, **settings))  # type: ignore[arg-type]


def start(tiny_dir: Path, world: World, name: str = "e0") -> EngineDriver:
    return EngineDriver.start(tiny_dir, world.paths, name, lane_bytes=LANE_BYTES)


def stop(engine: EngineDriver) -> None:
    """Also lets go of the store: LMDB can be open only once in a process."""
    engine.close()
    engine.engine.lookup.finder._store.close()  # type: ignore[attr-defined]


def lag(engine: EngineDriver) -> int:
    return engine.engine.stats().capture_lag_tokens


def caught_up(engine: EngineDriver, world: World) -> bool:
    """One idle round of the engine and of the keeper; whether nothing waits any more."""
    engine.step()
    try:
        keeper_client.drain(world.paths.keeper_socket, sync=True)
    except (KeeperAway, StoreFailed):
        return False
    return lag(engine) == 0 and not stats(world)["failing"]


def assert_everything_is_on_disk(tiny_dir: Path, world: World, expected: list[list[int]]) -> None:
    """A fresh engine, with no lane to look at, restores both whole sequences from the disk."""
    (world.paths.lane_dir / "gone").mkdir()
    world.paths.lane("e0").rename(world.paths.lane_dir / "gone" / "e0.lane")
    engine = start(tiny_dir, world, "e1")
    for index, prompt in enumerate(PROMPTS):
        engine.handle(submit(f"again{index}", prompt + expected[index], answer=1))
        engine.run()
        assert engine.started(f"again{index}").reused == {"disk": len(prompt) + ANSWER - 1}
    stop(engine)
    assert list(verify(world.paths.store, map_bytes=1 << 30)) == []


@pytest.mark.parametrize("fault", ["slow", "space", "grow", "write", "sync", "ro"])
def test_streams_run_on_and_the_lag_is_caught_up(
    fault: str, tiny_dir: Path, world: World, layer: Layer, processes: Processes, expected: list[list[int]]
) -> None:
    world = small(world)
    processes.keeper(world, env=layer.environment())
    wait_for("the keeper", lambda: stats(world) is not None)
    engine = start(tiny_dir, world)
    layer.fail(fault, {"slow": "300", "grow": "65536"}.get(fault, ""))
    assert answer_all(engine) == expected
    if fault != "slow":
        failing = wait_for("the keeper to say so", lambda: stats(world)["failing"])
        assert "can't be used" in failing
        assert stats(world)["store_failures"] > 0
    for _ in range(3):
        engine.step()
    assert engine.engine.stats().lane_full > 0
    assert lag(engine) > 0 or fault == "slow", "a slow disk may have caught up with a slower engine"
    layer.heal(fault)
    wait_for("the lag to be caught up", lambda: caught_up(engine, world))
    stop(engine)
    assert_everything_is_on_disk(tiny_dir, world, expected)


def test_full_map(tiny_dir: Path, world: World, processes: Processes, expected: list[list[int]]) -> None:
    """`store_map_bytes` is used up; the operator starts the keeper with a larger one."""
    keeper = processes.keeper(small(world, store_map_bytes=300 << 10))
    world = small(world)
    wait_for("the keeper", lambda: stats(world) is not None)
    engine = start(tiny_dir, world)
    assert answer_all(engine) == expected
    assert "used up" in wait_for("the keeper to say so", lambda: stats(world)["failing"])
    assert lag(engine) > 0
    keeper.terminate()
    assert keeper.wait(60) == 0
    processes.keeper(world)
    wait_for("the lag to be caught up", lambda: caught_up(engine, world))
    stop(engine)
    assert_everything_is_on_disk(tiny_dir, world, expected)


@contextmanager
def small_file_system(directory: Path, size: int) -> Iterator[Callable[[str], None]]:
    """A tmpfs of `size` bytes mounted on `directory`; yields a function that mounts it again with other options."""
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting needs root here; the same fault is tried through the file layer")

    def remount(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(directory)], check=True)

    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(directory)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting isn't allowed here: {done.stderr.decode().strip()}; the file layer tries the same fault")
    try:
        yield remount
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=False)


def test_real_file_system_that_is_full(
    tiny_dir: Path, world: World, processes: Processes, expected: list[list[int]]
) -> None:
    world = small(world)
    with small_file_system(world.paths.store, 200 << 10) as remount:
        processes.keeper(world)
        wait_for("the keeper", lambda: stats(world) is not None)
        engine = start(tiny_dir, world)
        assert answer_all(engine) == expected
        assert wait_for("the keeper to say so", lambda: stats(world)["failing"])
        assert lag(engine) > 0
        remount("size=256m")
        wait_for("the lag to be caught up", lambda: caught_up(engine, world))
        stop(engine)
        assert_everything_is_on_disk(tiny_dir, world, expected)
        processes.end()


def test_full_lane_without_a_keeper_costs_nothing_but_lag(
    tiny_dir: Path, world: World, expected: list[list[int]]
) -> None:
    world = small(world)
    engine = start(tiny_dir, world)
    assert answer_all(engine) == expected
    said = engine.engine.stats()
    resident = sum(slot.length for slot in engine.engine.arena.slots)
    assert said.lane_full > 0 and 0 < said.capture_lag_tokens < resident
    assert np.sum([slot.stored for slot in engine.engine.arena.slots]) + said.capture_lag_tokens == resident
    stop(engine)
