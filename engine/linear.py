"""Linear layers over weights that oneDNN has packed: faster for few rows, and each row's bits are its own. CPU, float32.

The stock product of 4 rows reads the demo model's weights at a third of the memory's speed, and the bits of a row depend on how
many rows stand beside it. The packed product is about twice as fast (92 -> 45 ms a decode step of 4, docs/lab.md), and computes a row
alike in every batch, save that for some shapes a single row takes another, slower kernel: so fewer than four rows are padded. That
the bits are the same is checked at start, for each shape, with the threads that will be used. Main thread only.
"""

from __future__ import annotations

from functools import partial

import structlog
import torch

log = structlog.get_logger()

_BATCH_HINT = 8  # packed for 8 rows, the product of 1 to 256 rows is as fast as packed for that count, within noise
_LEAST_ROWS = 4  # the product of 4 rows takes less time than that of 1 (docs/lab.md)
_CHECKED_ROWS = (1, 2, 3, 4, 8, 32)


def pack_linear_layers(module: torch.nn.Module) -> bool:
    """Give every linear layer its packed weights; False if this build of torch can't.

    The checkpoint's own weights stay as they are: mapped from the file, shared by all engines of a machine, and used for the
    embedding. The packed copy is private.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        log.info("linear.not_packed", reason="torch was built without oneDNN")
        return False
    checked: set[torch.Size] = set()
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.data, _BATCH_HINT)
            layer.forward = partial(_linear, layer, packed)  # type: ignore[method-assign]
            if layer.weight.shape not in checked:
                checked.add(layer.weight.shape)
                _check_bits(layer, packed)
    return True


def _linear(layer: torch.nn.Linear, packed: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """inputs (..., in) -> (..., out)."""
    rows = inputs.numel() // inputs.shape[-1]
    if rows >= _LEAST_ROWS:
        return torch.ops.mkldnn._linear_pointwise(inputs, packed, layer.bias, "none", [], "")
    padded = inputs.new_zeros(_LEAST_ROWS, inputs.shape[-1])
    padded[:rows] = inputs.reshape(rows, -1)
    out = torch.ops.mkldnn._linear_pointwise(padded, packed, layer.bias, "none", [], "")
    return out[:rows].reshape(*inputs.shape[:-1], -1)


@torch.inference_mode()
def _check_bits(layer: torch.nn.Linear, packed: torch.Tensor) -> None:
    """Say so if a row's bits depend on how many stand beside it: then a stream under load may differ from one alone."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(max(_CHECKED_ROWS), layer.in_features, generator=generator)
    whole = _linear(layer, packed, inputs)
    differing = [n for n in _CHECKED_ROWS if not torch.equal(_linear(layer, packed, inputs[:n]), whole[:n])]
    if differing:
        log.warning("linear.bits_depend_on_batch", shape=list(layer.weight.shape), rows=differing)
