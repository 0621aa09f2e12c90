"""`--deterministic`, the way *parts*: only what must be is computed token by token, the rest of a step together.

A recurrent layer scans many tokens otherwise than it takes one, and experts compute as many rows as chose them: run one token of one
row at a time, such a layer always works on the same shapes. Linear layers and attention in tiles (engine/attention.py) compute a
row alike in every batch, so they see the whole step. Which layers are meant is found by asking: those that come to the cache for state,
and those with weights that are no linear layer's. `engine/exactness.py` proves the outcome. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine import attention
from engine.attention import ArenaCache, ProbeCache
from engine.model import Model
from engine.projections import Projections, find_projections

_Forward = Callable[..., Any]


def compute_in_parts(model: Model, cache: ArenaCache) -> None:
    """Wrap the layers that can't see a whole step. They do as before while `cache.exact` isn't `parts`."""
    recurrent, blocks = _layers(model)
    projections = find_projections(recurrent, lambda: _run(model, ProbeCache()))
    for layer in recurrent:
        layer.forward = partial(_token_by_token, layer.forward, cache, projections[layer])  # type: ignore[method-assign]
    for block in blocks:
        block.forward = partial(_row_by_row, block.forward, cache)  # type: ignore[method-assign]


def weighs(part: torch.nn.Module) -> bool:
    """Whether a module has matrices of its own and is no linear layer: a router, experts, a convolution."""
    if isinstance(part, torch.nn.Linear | torch.nn.Embedding):
        return False
    return any(weight.dim() > 1 for weight in part.parameters(recurse=False))


def _layers(model: Model) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """The layers with recurrent state, and the largest blocks around other matrices in which no layer keeps anything.

    A block as a whole, since the vector and the scalar form of a function differ in bits: the gate of one number a token.
    """
    cache = _ask(model)
    parents = {child: part for part in model.module.modules() for child in part.children()}
    keeping = set()
    for layer in (*cache.recurrent_layers, *cache.attention_layers):
        part: torch.nn.Module | None = layer
        while part is not None:
            keeping.add(part)
            part = parents.get(part)
    inside = {part for layer in cache.recurrent_layers for part in layer.modules()}
    blocks = []
    for part in model.module.modules():
        if part not in inside and weighs(part):
            while (parent := parents.get(part)) is not None and parent not in keeping:
                part = parent
            blocks.append(part)
    return list(dict.fromkeys(cache.recurrent_layers)), list(dict.fromkeys(blocks))


def _ask(model: Model) -> _NotingCache:
    """A forward pass of two tokens over a cache that notes who comes to it."""
    cache = _NotingCache()
    hooks = (
        torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: cache.stack.append(module)),
        torch.nn.modules.module.register_module_forward_hook(lambda *_: cache.stack.pop() and None),
    )
    try:
        _run(model, cache)
    finally:
        for hook in hooks:
            hook.remove()
    return cache


@torch.inference_mode()
def _run(model: Model, cache: ProbeCache) -> None:
    """A forward pass of two tokens."""
    cache.begin()
    ids = torch.tensor([[3, 4]], device=model.device)
    model.module.base_model(**{"input_ids": ids, model.cache_argument: cache, "use_cache": True})


class _NotingCache(ProbeCache):
    """Notes which modules store K and V, and which store recurrent state. `stack`: those that are running."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[torch.nn.Module] = []
        self.attention_layers: list[torch.nn.Module] = []
        self.recurrent_layers: list[torch.nn.Module] = []

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.attention_layers.append(self.stack[-1])
        return super().update(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.recurrent_layers.append(self.stack[-1])
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.recurrent_layers.append(self.stack[-1])
        return super().update_recurrent_state(*args, **kwargs)


def _token_by_token(whole: _Forward, cache: ArenaCache, projections: Projections, /, *args: Any, **kwargs: Any) -> Any:
    """A recurrent layer over (rows, tokens, ...): each token by a call of its own, that goes on from the one before."""
    rows = cache.rows
    asked = any(given is cache for given in (*args, *kwargs.values()))
    if not asked or not _in_parts(cache) or len(rows.slots) * rows.token_count == 1:
        return whole(*args, **kwargs)
    lead = (len(rows.slots), rows.token_count)
    made = []
    with projections.whole(args, kwargs) as finished:
        for row in range(len(rows.slots)):
            cache.row_begins(row)
            for token in range(rows.token_count):
                own = _own(lead, row * rows.token_count + token, args, kwargs)
                projections.token(row, token, *own)
                with cache.only(row, token):
                    made.append(whole(*own[0], **own[1]))
        cache.row_begins(None)
        return finished(_joined(made, lead))


def _row_by_row(whole: _Forward, cache: ArenaCache, /, *args: Any, **kwargs: Any) -> Any:
    """A layer without state over (rows, ...) or (rows, tokens, ...): each token by a call of its own."""
    given = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    lead = tuple(given.shape[:-1])
    count = given.shape[:-1].numel()
    if not _in_parts(cache) or count == 1:
        return whole(*args, **kwargs)
    own = [_own(lead, index, args, kwargs) for index in range(count)]
    return _joined([whole(*each, **named) for each, named in own], lead)


def _in_parts(cache: ArenaCache) -> bool:
    return cache.exact == "parts" and attention.current() is cache


def _own(
    lead: tuple[int, ...], index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of arguments that hold all tokens, the part that is one token's own."""
    return tuple(_of_one(value, lead, index) for value in args), {
        name: _of_one(value, lead, index) for name, value in kwargs.items()
    }


def _of_one(value: Any, lead: tuple[int, ...], index: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if len(lead) > 1 and tuple(value.shape[: len(lead)]) == lead:
        row, token = divmod(index, lead[1])
        return value[row : row + 1, token : token + 1]
    count = torch.Size(lead).numel()
    return value[index : index + 1] if value.dim() and value.shape[0] == count else value


def _joined(made: list[Any], lead: tuple[int, ...]) -> Any:
    """Outputs of single tokens -> the output of all: tensors, or tuples of them."""
    first = made[0]
    if isinstance(first, tuple | list):
        return type(first)(_joined(list(each), lead) for each in zip(*made, strict=True))
    if not isinstance(first, torch.Tensor):
        return first
    whole = torch.cat(made)
    return whole.reshape(*lead, *first.shape[2:]) if len(lead) > 1 and first.dim() > 2 else whole
