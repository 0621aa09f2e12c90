"""The way `parts`: recurrent layers and experts take each token by itself, linear layers and attention the whole step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.arena import Arena
from engine.attention import ArenaCache
from engine.model import load
from engine.parts import compute_in_parts, weighs
from engine.settings import EngineSettings
from tests.engine.kinds import write_model

pytestmark = pytest.mark.process
TOKENS = [list(range(40, 56)), list(range(300, 316))]


def test_what_sees_a_whole_step_and_what_does_not(tmp_path: Path) -> None:
    directory = write_model("qwen3_next", tmp_path / "model")
    model = load(directory, "tiny", EngineSettings(device="cpu", context_tokens=64))
    arena = Arena.allocate(model.layers, 2, 64, model.dtype, model.device, states=model.states, step_tokens=16)
    cache = ArenaCache(arena, lambda: None, model.layers)
    seen: dict[str, list[int]] = {}
    for name, part in model.module.named_modules():
        part.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: seen.setdefault(name, []).append(_token_count(args, kwargs)),
            with_kwargs=True,
        )
    multiplied: list[int] = []
    projection = model.module.get_submodule("model.layers.0.linear_attn.in_proj_qkvz")
    product = projection.forward

    def counted(inputs: torch.Tensor) -> torch.Tensor:
        multiplied.append(inputs.shape[:-1].numel())
        out: torch.Tensor = product(inputs)
        return out

    projection.forward = counted  # type: ignore[method-assign]
    begun: list[int | None] = []
    cache.row_begins = begun.append

    def decode() -> torch.Tensor:
        """One token of each of two sequences, which have sixteen."""
        for slot, tokens in zip(arena.slots, TOKENS, strict=True):
            arena.forget(slot)
            cache.begin([slot], [0], 16)
            model.forward([tokens], [0], cache, logits=False)
        seen.clear()
        begun.clear()
        multiplied.clear()
        cache.begin(arena.slots, [16, 16], 1)
        logits = model.forward([[7], [8]], [16, 16], cache, logits=True)
        assert logits is not None
        return logits

    plain = decode()
    assert {max(counts) for name, counts in seen.items() if name.endswith("in_proj_qkvz")} == {2}
    compute_in_parts(model, cache)
    assert torch.equal(decode(), plain), "nothing has changed yet"
    cache.exact = "parts"
    torch.testing.assert_close(decode(), plain, atol=1e-3, rtol=1e-3)
    assert seen["model.layers.3.self_attn.q_proj"] == [2]
    assert seen["model.layers.0.linear_attn.in_proj_qkvz"] == [1, 1] and multiplied == [2], "once for both tokens"
    assert seen["model.layers.0.mlp.experts"] == [1, 1]
    assert seen["model.layers.0.mlp"] == [2], "the wrapper is within"
    assert begun == [0, 1, None] * 3, "for each recurrent layer"


def _token_count(args: tuple[object, ...], kwargs: dict[str, object]) -> int:
    given = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    return 0 if given is None else given.shape[:-1].numel()


def test_which_modules_have_matrices_of_their_own() -> None:
    convolution, linear = torch.nn.Conv1d(4, 4, 3), torch.nn.Linear(4, 4)
    norm, embedding = torch.nn.LayerNorm(4), torch.nn.Embedding(4, 4)
    parts = (convolution, linear, norm, embedding, torch.nn.Sequential(convolution))
    assert [weighs(part) for part in parts] == [True, False, False, False, False]
