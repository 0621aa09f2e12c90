"""Decode steps of a fixed shape give what steps as ever give, whatever the model keeps; and what can't be recorded goes as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import decode_graph, main
from engine import messages as m
from engine.decode_graph import DecodeGraphs, context_bucket, row_bucket
from engine.model import load
from engine.step_graph import CalledStep, CallRecorder
from tests.engine.driver import EngineDriver, random_tokens, submit
from tests.engine.kinds import write_model
from tiers.paths import Paths

pytestmark = pytest.mark.process
# One of each way that a layer keeps state: everything, windows, capped scores, sinks, latents, scans, convolutions.
KINDS = ["llama", "short_window", "mamba2"]
MORE_KINDS = ["gemma2", "gpt_oss", "deepseek_v3", "qwen3_5_text", "mamba", "lfm2"]
PROMPTS = {"a": random_tokens(1, 40), "b": random_tokens(2, 7), "c": random_tokens(3, 21)}
HOT = m.Sampling(temperature=0.9, seed=5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Directory of a model by name; loaded once."""
    directory = tmp_path_factory.mktemp("graph-kinds")
    written = cache(lambda name: write_model(name, directory / name, context_tokens=512))
    patch = pytest.MonkeyPatch()
    patch.setattr(main, "load", cache(load))
    yield written
    patch.undo()


@pytest.fixture
def start(models: Callable[[str], Path], paths: Paths) -> Iterator[Callable[..., EngineDriver]]:
    engines: list[EngineDriver] = []

    def started(kind: str, name: str = "e0", **options: Any) -> EngineDriver:
        options = {"prefill_chunk": 64, "context_tokens": 512, "lane_bytes": 4 << 20, **options}
        engines.append(EngineDriver.start(models(kind), paths, name, **options))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def as_ever(
    models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, list[int]]]:
    """The answers of an engine without fixed shapes, by model."""

    @cache
    def expected(kind: str) -> dict[str, list[int]]:
        directory = tmp_path_factory.mktemp("as-ever")
        paths = Paths.at(directory / "data", directory / "lanes")
        engine = EngineDriver.start(
            models(kind), paths, prefill_chunk=64, context_tokens=512, lane_bytes=4 << 20, decode_graph="auto"
        )
        assert engine.engine.graphs.off == "cpu has no graphs" and engine.engine.stats().decode_graph == ""
        found = answers(engine)
        assert not engine.engine.graphs.replayed
        engine.close()
        return found

    return expected


class WouldEndACapture(TorchDispatchMode):
    """Notes operations for which the host waits for the device, or that copy from ordinary host memory to it."""

    NAMES = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "bincount",
        "equal",
        "is_nonzero",
        "lift_fresh",
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        by_mask = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], list | tuple) else ())
        )
        if name in self.NAMES or func.__name__ == "repeat_interleave.Tensor" or by_mask:
            self.seen.add(func.__name__)
        return func(*args, **(kwargs or {}))


def test_what_would_end_a_capture_is_seen() -> None:
    with WouldEndACapture() as watch:
        numbers = torch.arange(4)
        numbers[numbers > 2] = int(numbers.sum())
        torch.tensor([1])
    assert {name.split(".")[0] for name in watch.seen} == {"index_put_", "_local_scalar_dense", "lift_fresh"}


def answers(engine: EngineDriver, count: int = 24) -> dict[str, list[int]]:
    """Three streams at once, one of which ends early and one of which is drawn."""
    for stream, prompt in PROMPTS.items():
        sampling = HOT if stream == "c" else m.Sampling(temperature=0)
        engine.handle(submit(stream, prompt, count // 2 if stream == "b" else count, sampling=sampling))
    engine.run()
    return {stream: engine.tokens(stream) for stream in PROMPTS}


# ---------------------------------------------------------------- buckets


def test_buckets_are_powers_of_two_up_to_what_there_is() -> None:
    assert [row_bucket(count, 6) for count in range(1, 7)] == [1, 2, 4, 4, 6, 6]
    assert [row_bucket(count, 32) for count in (9, 16, 17, 32)] == [16, 16, 32, 32]
    assert [context_bucket(end, 3000) for end in (1, 256, 257, 1024, 1025, 3000)] == [256, 256, 512, 1024, 2048, 3000]
    assert context_bucket(100, 128) == 128


# ---------------------------------------------------------------- the same answers


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.kinds) for kind in MORE_KINDS)])
def test_steps_of_a_fixed_shape_give_the_same_answers(
    kind: str, start: Callable[..., EngineDriver], as_ever: Callable[[str], Any]
) -> None:
    fixed = start(kind, decode_graph="on")
    graphs = fixed.engine.graphs
    assert graphs.off == "", "proven at the start, logits within a thousandth of their spread"
    assert answers(fixed) == as_ever(kind)
    assert graphs.replayed > 12 and graphs.recorded >= 2, "three rows and two, and one alone"
    assert {key[0] for key in graphs._buckets} == {1, 2, 4}
    stats = fixed.engine.stats()
    assert stats.decode_graph == "on" and stats.decode_graph_steps == graphs.replayed
    with WouldEndACapture() as watch:
        graphs._call(2, 256)
    assert not watch.seen, "a capture on a GPU would end at these"


def test_the_logits_of_plain_attention_differ_by_rounding_alone(start: Callable[..., EngineDriver]) -> None:
    engine = start("llama", decode_graph="on").engine
    slots = engine.arena.slots[:3]
    for slot, count in zip(slots, (5, 190, 70), strict=True):
        engine.cache.begin([slot], [0], count)
        engine.model.forward([random_tokens(count, count)], [0], engine.cache, logits=False)
    starts, tokens = [5, 190, 70], [9, 8, 7]
    engine.cache.begin(slots, starts, 1)
    expected = engine.model.forward([[token] for token in tokens], starts, engine.cache, logits=True)
    got = engine.graphs.step(slots, starts, tokens)
    assert expected is not None and got is not None
    # A masked column adds an exact zero; what differs is the order in which a longer row of columns is summed.
    assert torch.allclose(got, expected, rtol=0, atol=2e-5 * float(expected.std()))


def test_stale_rows_of_others_never_come_in(start: Callable[..., EngineDriver], as_ever: Callable[[str], Any]) -> None:
    engine = start("llama", decode_graph="on")
    for group in engine.engine.arena.groups:
        group.fill_(torch.nan)
    assert answers(engine) == as_ever("llama")


# ---------------------------------------------------------------- what goes as ever


class Refusing(CallRecorder):
    """Can't record; what ran before the refusal is what a capture leaves: nothing."""

    def record(self, call: Callable[[], None]) -> CalledStep:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_a_model_that_cannot_be_recorded_is_served_as_ever_with_the_reason(
    kind: str, start: Callable[..., EngineDriver], as_ever: Callable[[str], Any]
) -> None:
    engine = start(kind, decode_graph="on")
    engine.engine.graphs._buckets.clear()
    engine.engine.graphs.recorder = Refusing()
    assert answers(engine) == as_ever(kind)
    off = engine.engine.stats().decode_graph
    assert off == "a step can't be recorded (RuntimeError: operation not permitted when stream is capturing)"
    assert engine.engine.graphs.replayed == 0


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_a_step_that_breaks_off_is_computed_again(
    kind: str, start: Callable[..., EngineDriver], as_ever: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(kind, decode_graph="on")
    graphs, whole = engine.engine.graphs, DecodeGraphs._static_logits
    calls = [0]

    def breaks(self: DecodeGraphs, like: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise ValueError("the model's own code")
        return whole(self, like)

    monkeypatch.setattr(DecodeGraphs, "_static_logits", breaks)
    assert answers(engine) == as_ever(kind)
    assert "the model's own code" in graphs.off


def test_too_little_memory_leaves_one_shape_alone(
    start: Callable[..., EngineDriver], as_ever: Callable[[str], Any]
) -> None:
    class Full(CallRecorder):
        def record(self, call: Callable[[], None]) -> CalledStep:
            if engine.engine.counters.decode_steps < 8:
                try:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                finally:
                    raise RuntimeError("capture was invalidated")  # what the end of such a capture says
            return CalledStep(call)

    engine = start("llama", decode_graph="on")
    engine.engine.graphs._buckets.clear()
    engine.engine.graphs.recorder = Full()
    assert answers(engine) == as_ever("llama")
    graphs = engine.engine.graphs
    assert not graphs.off and graphs.skipped["no memory for its graph"] > 0 and graphs.replayed > 0


def test_the_slower_kind_of_step_is_left(start: Callable[..., EngineDriver]) -> None:
    engine = start("llama", decode_graph="on").engine
    graphs, slots = engine.graphs, engine.arena.slots[:1]
    graphs.setting = "auto"
    for step_ms, recorded_ms in ((2.0, 1.0), (1.0, 2.0)):
        graphs._buckets.clear()
        for position in range(20):
            logits = graphs.step(slots, [position], [3])
            graphs.saw(step_ms if logits is None else recorded_ms)
        (bucket,) = graphs._buckets.values()
        assert bucket.left == ("" if recorded_ms < step_ms else "launches are faster at this shape")
        assert (bucket.graph is None) == bool(bucket.left)


def test_steps_with_other_logits_are_not_served(
    start: Callable[..., EngineDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where these are no numbers, with which nothing compares; recorded or not."""
    engine = start("llama", decode_graph="on").engine
    graphs, decode = engine.graphs, type(engine.model).decode
    factors: list[float] = []
    monkeypatch.setattr(type(engine.model), "decode", lambda *given: decode(*given) * factors.pop(0))
    for wrong in (0.5, torch.nan):
        for before in (0, 3):
            factors[:] = [1.0] * before + [wrong] + [1.0] * (3 - before)
            graphs._buckets.clear()
            graphs.off = ""
            graphs.prove(engine.cache)
            assert "its logits differ" in graphs.off and not factors, (wrong, before)


def test_a_step_with_too_much_context_goes_as_ever(
    start: Callable[..., EngineDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("llama", decode_graph="on").engine
    monkeypatch.setattr(decode_graph, "_MOST_GATHERED_BYTES", 1000)
    assert engine.graphs.step(engine.arena.slots[:1], [3], [3]) is None
    assert engine.graphs.step(engine.arena.slots[:1], [3], [3], adapted=True) is None
    assert set(engine.graphs.skipped) == {"its contexts are too long", "a row uses an adapter"}


def test_settings_say_where_there_are_none(start: Callable[..., EngineDriver]) -> None:
    assert start("llama", decode_graph="off").engine.stats().decode_graph == "engine.decode_graph is off"
    exact = start("llama", "e1", decode_graph="on", deterministic=True)
    assert "engine.deterministic" in exact.engine.stats().decode_graph


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
@pytest.mark.parametrize("kind", ["llama", "short_window", "deepseek_v3", "gpt_oss"])
def test_a_gpu_replays_its_steps_as_graphs(kind: str, start: Callable[..., EngineDriver]) -> None:
    options = {"device": "cuda", "dtype": "float32"}
    plain, fixed = start(kind, decode_graph="off", **options), start(kind, "e1", decode_graph="on", **options)
    graphs = fixed.engine.graphs
    if kind != "gpt_oss":  # whose experts may be chosen by the host
        assert graphs.off == "" and graphs.recorder.is_graph
    assert answers(fixed) == answers(plain)
    assert graphs.off or graphs.replayed > 12
