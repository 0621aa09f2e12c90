"""Linear layers over weights that oneDNN has packed: faster for few rows, and each row's bits are its own. CPU, float32.

The stock product of 4 rows reads the demo model's weights at a third of the memory's speed, and the bits of a row depend on how
many rows stand beside it. The packed product is about twice as fast (92 -> 45 ms a decode step of 4, docs/lab.md), and computes a row
alike in every batch, save that on some machines and for some shapes fewer than four rows take another kernel: those are padded. What
holds is found out at start, for each shape, with the threads that will be used. Main thread only.
"""

from __future__ import annotations

from functools import partial

import structlog
import torch

log = structlog.get_logger()

_BATCH_HINT = 8  # packed for 8 rows, the product of 1 to 256 rows is as fast as packed for that count, within noise
_SAFE_ROWS = 4  # no shape was seen whose product of this many rows had bits of its own
_CHECKED_ROWS = (4, 8, 32)


def pack_linear_layers(module: torch.nn.Module) -> bool:
    """Give every linear layer its packed weights; False if this build of torch can't.

    The checkpoint's own weights stay as they are: mapped from the file, shared by all engines of a machine, and used for the
    embedding. The packed copy is private.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        log.info("linear.not_packed", reason="torch was built without oneDNN")
        return False
    least: dict[torch.Size, int] = {}
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.data, _BATCH_HINT)
            if layer.weight.shape not in least:
                least[layer.weight.shape] = _least_rows(layer, packed)
            layer.forward = partial(_linear, layer, packed, least[layer.weight.shape])  # type: ignore[method-assign]
    log.info("linear.packed", padded={f"{o}x{i}": rows for (o, i), rows in least.items() if rows > 1})
    return True


def _linear(layer: torch.nn.Linear, packed: torch.Tensor, least_rows: int, inputs: torch.Tensor) -> torch.Tensor:
    """inputs (..., in) -> (..., out); fewer rows than `least_rows` are padded to that many."""
    rows = inputs.numel() // inputs.shape[-1]
    if rows >= least_rows:
        return torch.ops.mkldnn._linear_pointwise(inputs, packed, layer.bias, "none", [], "")
    padded = inputs.new_zeros(least_rows, inputs.shape[-1])
    padded[:rows] = inputs.reshape(rows, -1)
    out = torch.ops.mkldnn._linear_pointwise(padded, packed, layer.bias, "none", [], "")
    return out[:rows].reshape(*inputs.shape[:-1], -1)


@torch.inference_mode()
def _least_rows(layer: torch.nn.Linear, packed: torch.Tensor) -> int:
    """From how many rows on a product gives each row the bits that it has among many; says so if that never holds.

    Then a stream under load may differ from one alone.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(max(_CHECKED_ROWS), layer.in_features, generator=generator)
    whole = _linear(layer, packed, 1, inputs)

    def alike(rows: int) -> bool:
        """Of rows at the beginning and further on."""
        starts = (0, rows) if rows < len(inputs) else (0,)
        return all(
            torch.equal(_linear(layer, packed, 1, inputs[at : at + rows]), whole[at : at + rows]) for at in starts
        )

    differing = [rows for rows in _CHECKED_ROWS if not alike(rows)]
    if differing:
        log.warning("linear.bits_depend_on_batch", shape=list(layer.weight.shape), rows=differing)
    least = _SAFE_ROWS
    while least > 1 and alike(least - 1):
        least -= 1
    return least
