"""New rows are gathered inside the decode step's own graph: the engine on this CPU, its handlers through the shim."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.capture.device_rows import DeviceRows, build
from tests.engine.capture.shim_driver import ShimDriver
from tests.engine.driver import EngineDriver, random_tokens, submit
from tests.engine.kinds import write_model
from tiers.lane_format import RecordType
from tiers.lane_reader import LaneReader
from tiers.paths import Paths

pytestmark = pytest.mark.process


@pytest.fixture(scope="module", params=["llama", "short_window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that keeps everything, and one with windows that slide."""
    return write_model(request.param, tmp_path_factory.mktemp("step-rows") / request.param, context_tokens=256)


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., EngineDriver]]:
    """Start engines that know nothing of each other."""
    engines: list[EngineDriver] = []

    def started(name: str, **options: Any) -> EngineDriver:
        settings = {"prefill_chunk": 32, "context_tokens": 256, "lane_bytes": 4 << 20, **options}
        paths = Paths.at(tmp_path / name / "data", settings.pop("lanes", tmp_path / name / "lanes"))
        engines.append(EngineDriver.start(model, paths, name, **settings))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """Where lanes lie as a rule: memory that can be registered with a device."""
    with tempfile.TemporaryDirectory(prefix="concordia-test-", dir="/dev/shm") as where:
        yield Path(where)


def with_handlers(engine: EngineDriver, driver: ShimDriver, way: str = "graph") -> DeviceRows:
    """Give an engine the handlers that it has on a GPU. Its own memory is the device's, so the streams must be empty between steps."""
    capture = engine.engine.capture
    assert capture is not None
    capture.rows = build(engine.engine.arena, driver, way, in_steps=True)
    engine.engine.graphs.rows = capture.rows
    return capture.rows


def run_three(engine: EngineDriver) -> None:
    for number, count in enumerate((40, 9, 23)):
        engine.handle(submit(f"s{number}", random_tokens(number, count), 12 + 6 * number))
    engine.run()


def frames(engine: EngineDriver) -> dict[tuple[bytes, int, int], bytes]:
    """What its lane holds, by sequence and range."""
    capture = engine.engine.capture
    assert capture is not None
    reader = LaneReader.open(capture.lane.path)
    found = {
        (bytes(record.sequence), record.token_start, record.token_end): bytes(reader.frame(record))
        for record in reader.records(0)
        if record.type == RecordType.ROWS
    }
    reader.close()
    return found


@pytest.mark.parametrize("in_lane", [False, True])
def test_the_lane_holds_the_same_when_steps_gather_their_own_rows(
    start: Callable[..., EngineDriver], shim_driver: ShimDriver, in_lane: bool
) -> None:
    plain, fixed = start("e0", decode_graph="on"), start("e1", decode_graph="on")
    rows = with_handlers(fixed, shim_driver)
    rows.rows.wait_ready()
    if in_lane:
        assert fixed.engine.capture is not None
        rows.reach_lane(fixed.engine.capture.lane.ring)
    run_three(plain)
    run_three(fixed)
    expected = frames(plain)
    assert (rows.in_lane > 30) == in_lane, "written by the step's own graph, into its records"
    assert frames(fixed) == expected and len(expected) > 30
    graphs = fixed.engine.graphs
    prefills = rows.launches - graphs.replayed - sum(bucket.warm_steps for bucket in graphs._buckets.values())
    assert 0 < prefills < 12, "each decode step gathered its rows itself, one row alone too"
    assert not rows.failed and not graphs.off


def test_a_handler_that_comes_later_or_fails_is_followed_by_new_recordings(
    start: Callable[..., EngineDriver], shim_driver: ShimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fixed = start("e0", decode_graph="on"), start("e1", decode_graph="on")
    graphs = fixed.engine.graphs
    shim_driver.hold_loads.clear()
    rows = with_handlers(fixed, shim_driver)
    for engine in (plain, fixed):
        for number, count in enumerate((40, 9, 23)):
            engine.handle(submit(f"s{number}", random_tokens(number, count), 40))
    fixed.run_until_token("s0", 10)
    assert graphs.recorded > 0 and graphs.dropped == 0 and rows.launches == 0, "recorded without a handler"
    shim_driver.hold_loads.set()
    rows.rows.wait_ready()
    fixed.run_until_token("s0", 20)
    assert graphs.dropped > 0 and graphs._handler and rows.launches > 0, "recorded anew, with it"
    launches = rows.launches
    monkeypatch.setattr(rows, "failed", "the handlers were given up")
    fixed.run_until_token("s0", 21)
    assert not graphs._handler and rows.launches == launches, "recorded anew, without it"
    fixed.run()
    plain.run()
    assert frames(fixed) == frames(plain)
    assert fixed.engine.stats().capture_by == "copy: the handlers were given up"


def test_auto_takes_the_way_that_is_part_of_the_step(
    start: Callable[..., EngineDriver], shim_driver: ShimDriver
) -> None:
    rows = with_handlers(start("e0", decode_graph="on"), shim_driver, "auto")
    assert rows.way == "graph"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
def test_on_a_gpu_steps_write_into_the_lane_what_the_framework_would_have_copied(
    start: Callable[..., EngineDriver], shared_memory: Path
) -> None:
    options = {"device": "cuda", "dtype": "float32", "decode_graph": "on"}
    copied = start("e0", capture_launch="copy", lanes=shared_memory / "e0", **options)
    gathered = start("e1", capture_launch="graph", lanes=shared_memory / "e1", **options)
    capture = gathered.engine.capture
    assert capture is not None and capture.rows is not None, capture and capture.without
    capture.rows.rows.wait_ready()
    run_three(copied)
    run_three(gathered)
    assert not capture.rows.failed and not gathered.engine.graphs.off
    assert frames(gathered) == frames(copied) and len(frames(copied)) > 30
    assert capture.rows.in_lane > 30 or capture.rows.lane, "straight into the lane, where it can be registered"
