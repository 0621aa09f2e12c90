"""Choosing a way to launch from what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from engine.capture import source
from engine.capture.launch import GraphLaunch, LaunchCost, choose, measure
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
