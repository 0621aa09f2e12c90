"""The kernel for few rows gives what torch gives, whatever the sizes, what each row sees, and who stands beside it."""

from __future__ import annotations

import platform
import random

import llvmlite.binding as llvm
import pytest
import torch
import torch.nn.functional as F
from structlog.testing import capture_logs

from engine import row_attention
from engine.arena import Arena, LayerShape
from engine.attention import ArenaCache, Options

SIZES = [(64, 64), (8, 32), (96, 128), (256, 256)]
CONTEXTS = [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 700]


def rows_of(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("key_dim", "value_dim"), SIZES)
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_rows_are_those_of_torch(key_dim: int, value_dim: int, scale: float) -> None:
    draw = random.Random(key_dim)
    for context in CONTEXTS:
        heads, count = draw.choice([1, 2, 3]), draw.randint(1, row_attention.MOST_ROWS)
        query = rows_of(heads, count, key_dim, seed=context)
        # Behind the context lies what nobody may look at.
        keys, values = (torch.full((heads, context + 9, dim), torch.nan) for dim in (key_dim, value_dim))
        keys[:, :context] = rows_of(heads, context, key_dim, seed=context + 1, scale=scale)
        values[:, :context] = rows_of(heads, context, value_dim, seed=context + 2)
        keys, values = keys[:, :context], values[:, :context]
        lows = [draw.choice([0, draw.randrange(context)]) for _ in range(count)]
        highs = [draw.choice([context, draw.randint(low + 1, context)]) for low in lows]
        hidden = torch.tensor(
            [[not lo <= at < hi for at in range(context)] for lo, hi in zip(lows, highs, strict=True)]
        )
        mask = torch.zeros(count, context, dtype=torch.float64).masked_fill_(hidden, -torch.inf)
        assert row_attention.takes(query, keys, values)
        got = row_attention.attend(query, keys, values, row_attention.seen(lows, highs), 0.11)
        expected = F.scaled_dot_product_attention(
            query[None].double(), keys[None].double(), values[None].double(), attn_mask=mask, scale=0.11
        )[0]
        assert got.shape == (heads, count, value_dim)
        assert torch.allclose(got.double(), expected, atol=3e-5), (context, heads, count)


def test_a_row_has_its_bits_whoever_stands_beside_it() -> None:
    query = rows_of(2, 24, 64, seed=1)
    keys, values = rows_of(2, 300, 64, seed=2), rows_of(2, 300, 64, seed=3)
    highs = [277 + row for row in range(24)]
    together = row_attention.attend(query, keys, values, row_attention.seen([0] * 24, highs), None)
    for row in range(24):
        seen = row_attention.seen([0], [highs[row]])
        alone = row_attention.attend(query[:, row : row + 1], keys, values, seen, None)
        assert torch.equal(alone[:, 0], together[:, row])
        # As when it was decoded, before those behind it were there.
        seen, end = row_attention.seen([0], [highs[row]]), highs[row]
        then = row_attention.attend(query[:, row : row + 1], keys[:, :end], values[:, :end], seen, None)
        assert torch.equal(then, alone)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(bad: float) -> None:
    query, keys, values = rows_of(1, 2, 64, seed=1).abs(), rows_of(1, 90, 64, seed=2), rows_of(1, 90, 64, seed=3)
    keys[0, 70, 5] = bad
    got = row_attention.attend(query, keys, values, row_attention.seen([0, 0], [70, 90]), None)
    assert got[0, 0].isfinite().all(), "it does not see that key"
    assert got[0, 1].isnan().all()


def test_what_it_does_not_take() -> None:
    query, keys, values = rows_of(2, 3, 64, seed=1), rows_of(2, 20, 64, seed=2), rows_of(2, 20, 64, seed=3)
    assert row_attention.takes(query, keys, values)
    assert not row_attention.takes(rows_of(2, row_attention.MOST_ROWS + 1, 64, seed=1), keys, values)
    assert not row_attention.takes(query.half(), keys.half(), values.half())
    assert not row_attention.takes(query, keys, rows_of(2, 20, 16, seed=3))
    assert not row_attention.takes(rows_of(2, 3, 12, seed=1), rows_of(2, 20, 12, seed=2), values)
    assert not row_attention.takes(query, keys, rows_of(2, 64, 20, seed=3).transpose(1, 2))
    torch.set_num_threads(2)
    try:
        assert not row_attention.takes(query, keys, values)
        assert row_attention.used_for([(64, 64)]) == (False, "")
    finally:
        torch.set_num_threads(1)
    assert row_attention.used_for([(16, 16)]) == (False, "")
    assert row_attention.used_for([(16, 16), (64, 64)]) == (True, "")


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
def test_the_arena_is_attended_to_alike_with_and_without_it(
    window: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped heads over a slot's rows, with and without a window."""
    arena = Arena.allocate([LayerShape(2, 64, 32, window)], 1, 200, torch.float32, torch.device("cpu"), step_tokens=16)
    cache = ArenaCache(arena, lambda: None, {0: LayerShape(2, 64, 32, window)})
    slot = arena.slots[0]
    for start, count in ((0, 16), *((at, 16) for at in range(16, 96, 16)), (96, tokens)):
        cache.begin([slot], [start], count)
        key, value = rows_of(1, 2, count, 64, seed=start), rows_of(1, 2, count, 32, seed=start + 1)
        cache.update(key, value, 0)
    query, options = rows_of(1, 6, tokens, 64, seed=7), Options(None, window, None, None)
    assert cache.by_rows == (True, "")
    ours = cache.attend(0, query, key, value, options)
    monkeypatch.setattr(row_attention, "takes", lambda *_: False)
    assert torch.allclose(ours, cache.attend(0, query, key, value, options), atol=1e-5)
    cache.exact = "tokens"
    assert cache.by_rows == (False, "")


@pytest.mark.parametrize(("broken", "why"), [("no target", "no target"), (None, "a wrong answer")])
def test_without_the_kernel_torch_does_it_and_that_is_said(
    broken: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_() -> object:
        if broken:
            raise RuntimeError(broken)
        return lambda arguments: None

    monkeypatch.setattr(row_attention, "_compile", compile_)
    row_attention._kernel.cache_clear()
    try:
        with capture_logs() as events:
            assert not row_attention.takes(*(rows_of(1, 3, 64, seed=seed) for seed in range(3)))
            assert row_attention.used_for([(64, 64)]) == (False, why)
        assert [(event["event"], event["error"]) for event in events] == [("attention.no_kernel", why)]
    finally:
        monkeypatch.undo()
        row_attention._kernel.cache_clear()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86 only some have it")
def test_a_processor_that_multiplies_and_adds_apart_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: llvm.FeatureMap({"avx": True}))
    with pytest.raises(RuntimeError, match="fused"):
        row_attention._compile()
