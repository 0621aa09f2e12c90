"""Linear layers over weights that oneDNN has packed: faster for few rows, and each row's bits are its own. CPU, float32.

The stock product of 4 rows reads the demo model's weights at a third of the memory's speed, and the bits of a row depend on how
many rows stand beside it. The packed product is about twice as fast (92 -> 45 ms a decode step of 4, docs/lab.md), and computes a row
alike in every batch, save that on some machines and for some shapes fewer than four rows take another kernel: those are padded. What
holds is found out at start, for each shape, with the threads that will be used. Layers that are given the very same tensor (Q, K and V;
gate and up) are one product, since a call costs as much as reading 400 KB. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog
import torch

log = structlog.get_logger()

_BATCH_HINT = 8  # packed for 8 rows, the product of 1 to 256 rows is as fast as packed for that count, within noise
_SAFE_ROWS = 4  # no shape was seen whose product of this many rows had bits of its own
_CHECKED_ROWS = (4, 8, 32)


class Packed:
    """One packed product, of one layer or of several that share their inputs."""

    def __init__(self, layers: list[torch.nn.Linear], known: dict[tuple[int, int], int]) -> None:
        """`known`: least rows by (out, in), filled as shapes are met."""
        self._outs = [layer.out_features for layer in layers]
        weight = layers[0].weight.data if len(layers) == 1 else torch.cat([layer.weight.data for layer in layers])
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH_HINT)
        self._bias = _joined_bias(layers)
        self._inputs: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}
        shape = sum(self._outs), layers[0].in_features
        if shape not in known:
            known[shape] = _least_rows(self._product, shape)
        self._least = known[shape]

    def whole(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs (..., in) -> (..., out of all layers); fewer rows than the least that are safe are padded."""
        rows = inputs.numel() // inputs.shape[-1]
        if rows >= self._least:
            return self._product(inputs)
        padded = inputs.new_zeros(self._least, inputs.shape[-1])
        padded[:rows] = inputs.reshape(rows, -1)
        return self._product(padded)[:rows].reshape(*inputs.shape[:-1], -1)

    def part(self, index: int, inputs: torch.Tensor) -> torch.Tensor:
        """The product of one layer; the others' is kept until they are asked with the same tensor."""
        if inputs is not self._inputs or index not in self._parts:
            self._inputs = inputs
            self._parts = dict(enumerate(self.whole(inputs).split(self._outs, dim=-1)))
        part = self._parts.pop(index)
        if not self._parts:
            self._inputs = None
        return part

    def _product(self, inputs: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self._bias, "none", [], "")
        return product


def pack_linear_layers(module: torch.nn.Module, run: Callable[[], object]) -> bool:
    """Give every linear layer its packed weights; False if this build of torch can't.

    The checkpoint's own weights stay as they are: mapped from the file, shared by all engines of a machine, and used for the
    embedding. The packed copy is private. `run` is a forward pass from which is learned which layers share their inputs; it is made
    once, and not at all where nothing is packed.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        log.info("linear.not_packed", reason="torch was built without oneDNN")
        return False
    least: dict[tuple[int, int], int] = {}
    joined = _sharing_inputs(module, run)
    for layers in joined:
        packed = Packed(layers, least)
        for index, layer in enumerate(layers):
            layer.forward = partial(packed.part, index)  # type: ignore[method-assign]
    together = {layer for layers in joined for layer in layers}
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear) and layer not in together:
            layer.forward = Packed([layer], least).whole  # type: ignore[method-assign]
    padded = {f"{out}x{inside}": rows for (out, inside), rows in least.items() if rows > 1}
    log.info("linear.packed", joined=len(joined), padded=padded)
    return True


def _sharing_inputs(module: torch.nn.Module, run: Callable[[], object]) -> list[list[torch.nn.Linear]]:
    """Layers that are called one after the other, each once, with the very same tensor, which nobody changed in between."""
    calls: list[tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]] = []

    def note(layer: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(layer, torch.nn.Linear)
        calls.append((layer, arguments[0], arguments[0].clone()))

    linear = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
    hooks = [layer.register_forward_pre_hook(note) for layer in linear]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    groups: list[list[torch.nn.Linear]] = []
    before: tuple[torch.Tensor, torch.Tensor] | None = None
    for layer, inputs, content in calls:
        if before is not None and inputs is before[0] and torch.equal(content, before[1]):
            groups[-1].append(layer)
        else:
            groups.append([layer])
        before = inputs, content
    called = [layer for layer, _, _ in calls]
    return [group for group in groups if len(group) > 1 and all(called.count(layer) == 1 for layer in group)]


def _joined_bias(layers: list[torch.nn.Linear]) -> torch.Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat(
        [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.data for layer in layers]
    )


@torch.inference_mode()
def _least_rows(product: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int]) -> int:
    """From how many rows on a product (out, in) gives each row the bits that it has among many; says so if that never holds.

    Then a stream under load may differ from one alone.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(max(_CHECKED_ROWS), shape[1], generator=generator)
    whole = product(inputs)

    def alike(rows: int) -> bool:
        """Of rows at the beginning and further on."""
        starts = (0, rows) if rows < len(inputs) else (0,)
        return all(torch.equal(product(inputs[at : at + rows]), whole[at : at + rows]) for at in starts)

    differing = [rows for rows in _CHECKED_ROWS if not alike(rows)]
    if differing:
        log.warning("linear.bits_depend_on_batch", shape=list(shape), rows=differing)
    least = _SAFE_ROWS
    while least > 1 and alike(least - 1):
        least -= 1
    return least
