"""Linear layers at the edges of a recurrent layer, for a step whose tokens it takes one at a time (`engine/parts.py`).

What a recurrent layer multiplies its inputs with, and what it makes of its outputs at the end, doesn't depend on the recurrence, and
a linear layer computes a row alike in every batch. So their weights are read once a step and not once a token: the first ones before
the first token, the last one after the last. Which they are is seen in one forward pass: those that are given the layer's very
inputs, and the one that made the very tensor that the layer returns. `engine/exactness.py` proves the outcome. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class First:
    """Called by the recurrent layer with one token, it gives that token's part of the product of all."""

    product: Callable[[torch.Tensor], torch.Tensor]
    inputs: torch.Tensor | None = None  # the token that is being computed, (1, 1, in)
    outputs: torch.Tensor | None = None  # its part of the product, (1, 1, out)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs is self.inputs:
            assert self.outputs is not None, "set with its inputs"
            return self.outputs
        return self.product(inputs)


@dataclass(slots=True)
class Last:
    """Called by the recurrent layer with one token, it only keeps it for the product of all."""

    linear: torch.nn.Linear
    product: Callable[[torch.Tensor], torch.Tensor]
    is_collecting: bool = False
    given: list[torch.Tensor] = field(default_factory=list)  # (1, 1, in) each

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.is_collecting:
            return self.product(inputs)
        self.given.append(inputs)
        return inputs.new_empty(*inputs.shape[:-1], self.linear.out_features)

    @property
    def is_plain(self) -> bool:
        """Nothing adds to its product (an adapter does)."""
        return vars(self.linear).get("forward") is self


@dataclass(slots=True)
class Projections:
    """Of one recurrent layer. name: of the argument that holds its inputs, an index or a keyword; None if they weren't found."""

    name: int | str | None = None
    first: list[First] = field(default_factory=list)
    last: Last | None = None
    products: list[torch.Tensor] = field(
        default_factory=list
    )  # of the first layers, while there is a step: (rows, tokens, out)

    @contextmanager
    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Callable[[Any], Any]]:
        """For the block, the layer's arguments hold all tokens. Gives what puts the last product in the place of the joined outputs."""
        inputs = _argument(self.name, args, kwargs)
        products = [] if inputs is None else [first.product(inputs) for first in self.first]
        last = self.last if self.last is not None and self.last.is_plain else None
        self.products = products
        if last is not None:
            last.is_collecting = True
        try:
            yield lambda joined: joined if last is None else _replaced(joined, last)
        finally:
            self.products = []
            for first in self.first:
                first.inputs = first.outputs = None
            if last is not None:
                last.is_collecting = False
                last.given.clear()

    def token(self, row: int, token: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The layer is about to be called with these arguments, which hold one token."""
        for first, product in zip(self.first, self.products, strict=False):
            first.inputs = _argument(self.name, args, kwargs)
            first.outputs = product[row : row + 1, token : token + 1]


def _argument(name: int | str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name is None:
        return None
    return args[name] if isinstance(name, int) else kwargs[name]


def _replaced(joined: Any, last: Last) -> Any:
    """The layer's outputs (rows, tokens, out), or a tuple that begins with them, with the product of what was collected."""
    outputs = joined[0] if isinstance(joined, tuple) else joined
    product = last.product(torch.cat(last.given)).reshape(outputs.shape)
    return (product, *joined[1:]) if isinstance(joined, tuple) else product


def find_projections(layers: list[torch.nn.Module], run: Callable[[], object]) -> dict[torch.nn.Module, Projections]:
    """Look on while `run` makes a forward pass, and put the linear layers at the edges of these layers in charge of themselves."""
    seen = {layer: _Seen(layer) for layer in layers}
    try:
        run()
    finally:
        for each in seen.values():
            each.remove()
    return {layer: each.projections() for layer, each in seen.items()}


class _Seen:
    """One recurrent layer during a forward pass."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        self._outputs: Any = None
        self._calls: list[tuple[torch.nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._hooks = [
            layer.register_forward_pre_hook(self._begin, with_kwargs=True),
            layer.register_forward_hook(self._end),
            *(part.register_forward_hook(self._call) for part in layer.modules() if isinstance(part, torch.nn.Linear)),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs

    def _end(self, _: torch.nn.Module, __: Any, outputs: Any) -> None:
        self._outputs = outputs[0] if isinstance(outputs, tuple) else outputs

    def _call(self, linear: torch.nn.Module, args: tuple[torch.Tensor, ...], outputs: torch.Tensor) -> None:
        assert isinstance(linear, torch.nn.Linear)
        self._calls.append((linear, args[0], args[0].clone(), outputs))

    def projections(self) -> Projections:
        """Found: layers that were called once, with the inputs as they came, or last of all."""
        name = next((name for name, value in self._named() if any(value is call[1] for call in self._calls)), None)
        found, inputs = Projections(name), _argument(name, self._args, self._kwargs)
        once = [call for call in self._calls if [other[0] for other in self._calls].count(call[0]) == 1]
        for linear, given, content, outputs in once:
            if given is inputs and torch.equal(content, inputs):
                first = First(linear.forward)
                found.first.append(first)
                linear.forward = first  # type: ignore[method-assign]
            elif outputs is self._outputs and given.shape[:2] == outputs.shape[:2]:
                found.last = Last(linear, linear.forward)
                linear.forward = found.last  # type: ignore[method-assign]
        return found

    def _named(self) -> Iterator[tuple[int | str, Any]]:
        named: list[tuple[int | str, Any]] = [*enumerate(self._args), *self._kwargs.items()]
        for name, value in named:
            if isinstance(value, torch.Tensor) and value.dim() == 3:
                yield name, value
