"""Choosing a way to launch from what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from engine.capture import source
from engine.capture.executor import Executor, ExecutorOptions
from engine.capture.kernel_device import KernelDevice
from engine.capture.launch import ExecutorLaunch, GraphLaunch, LaunchCost, choose, measure
from engine.capture.regions import memory_of
from engine.capture.source import WORD_COUNT, StatePart, StateShape
from tests.engine.capture.shim_driver import ShimDriver


def test_the_way_that_takes_least_from_the_step_is_chosen() -> None:
    costs = [LaunchCost("stream", 9, 30), LaunchCost("graph", 6, 20), LaunchCost("executor", 2, 25)]
    assert choose(costs).name == "executor"


def test_among_equals_the_one_that_is_ready_first() -> None:
    costs = [LaunchCost("stream", 5.0, 12), LaunchCost("graph", 5.3, 9), LaunchCost("executor", 7, 1)]
    assert choose(costs).name == "graph"


def test_a_way_that_fails_is_kept_with_its_reason_and_never_chosen() -> None:
    @dataclass
    class Way:
        name: str

        def launch(self, *_: Any) -> Any: ...

        def close(self) -> None: ...

    @dataclass
    class Done:
        def done(self) -> bool:
            return True

        def wait(self) -> None: ...

    def start(way: Any) -> Done:
        if way.name == "executor":
            raise OSError("no mapped memory")
        return Done()

    costs = measure([Way("stream"), Way("executor")], start, rounds=3)
    assert [cost.failed for cost in costs] == ["", "OSError: no mapped memory"]
    assert choose(costs).name == "stream"
    with pytest.raises(AssertionError, match="no way to launch works"):
        choose(costs[1:])


def test_graph_launches_take_pinned_memory_once(shim_driver: ShimDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    module = shim_driver.load(source.snapshotter(StateShape((StatePart(64, 64),), threads=64)))
    state, out, bases = (shim_driver.mapped_buffer(256) for _ in range(3))
    bases.array("<u8", 1)[0] = state.address
    made, whole = [0], shim_driver.mapped_buffer

    def counted(byte_count: int) -> Any:
        made[0] += 1
        return whole(byte_count)

    monkeypatch.setattr(shim_driver, "mapped_buffer", counted)
    graphs = GraphLaunch(shim_driver)
    for turn in range(5):
        state.array("<u4", 16)[:] = turn
        graphs.launch(module, (bases.address, 0, out.address), 1).wait()
        assert (out.array("<u4", 16) == turn).all()
    assert made == [1]


def test_a_recording_that_breaks_off_leaves_no_stream_recording(
    shim_driver: ShimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = shim_driver.load(source.snapshotter(StateShape((StatePart(64, 64),), threads=64)))
    state, out, bases = (shim_driver.mapped_buffer(256) for _ in range(3))
    bases.array("<u8", 1)[0] = state.address
    graphs, streams, whole = GraphLaunch(shim_driver), [], shim_driver.stream

    def kept() -> Any:
        streams.append(whole())
        return streams[-1]

    monkeypatch.setattr(shim_driver, "stream", kept)
    words = (bases.address, 0, out.address)
    graphs.launch(module, words, 1).wait()

    def broken(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with monkeypatch.context() as patch:
        patch.setattr(graphs, "record", broken)
        with pytest.raises(RuntimeError, match="not permitted"):
            graphs.launch(module, words, 1)
    assert [stream.recording for stream in streams] == [None]
    state.array("<u4", 16)[:] = 9
    graphs.launch(module, words, 1).wait()
    assert (out.array("<u4", 16) == 9).all(), "the next launch records anew"


def test_what_is_too_much_for_one_block_goes_to_a_side_stream(shim_driver: ShimDriver) -> None:
    executor = Executor(shim_driver, ExecutorOptions(capacity=8, threads=64, lease_ms=50, idle_us=20_000))
    device = KernelDevice(shim_driver, ExecutorLaunch(executor))
    posted = []
    for byte_count in (128 << 10, 4 << 10):
        data = np.random.default_rng(byte_count).integers(0, 256, byte_count, dtype=np.uint8)
        part = StatePart(byte_count, byte_count)
        state = device.state([memory_of(data)], StateShape((part,), threads=64))
        assert np.array_equal(state.read(state.save(0)), data)
        posted.append(executor._head)
    assert posted[0] == 0 and posted[1] > 0, "128 KB would keep one block busy for long"
    device.close()


def test_a_handler_recorded_into_a_steps_graph_runs_with_each_replay(shim_driver: ShimDriver) -> None:
    module = shim_driver.load(source.snapshotter(StateShape((StatePart(64, 64),), threads=64)))
    state, out, bases = (shim_driver.mapped_buffer(256) for _ in range(3))
    bases.array("<u8", 1)[0] = state.address
    graphs, stream = GraphLaunch(shim_driver), shim_driver.stream()

    def step() -> None:
        state.array("<u4", 64)[:] += 1

    words = graphs.words()
    shim_driver.begin_graph(stream)
    stream.put(step)
    graphs.record(module, 1, stream, words)
    graph = shim_driver.end_graph(stream)
    for turn in range(1, 4):
        words.array("<u8", WORD_COUNT)[:3] = (bases.address, 1, out.address)
        graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(out.array("<u4", 16), np.full(16, turn)), "behind the step, in the same replay"
