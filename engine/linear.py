"""Linear layers over packed weights: faster for few rows, and each row's bits are its own. CPU, float32.

The stock product of 4 rows reads the demo model's weights at a third of the memory's speed, and the bits of a row depend on how
many rows stand beside it. oneDNN's packed product is about twice as fast (92 -> 45 ms a decode step of 4, docs/lab.md), and computes
a row alike in every batch, save that on some machines and for some shapes few rows take another kernel: those are padded.
A step of few rows takes as long as the weights take to be read. Weights that float16 holds exactly (a float16 checkpoint; what
`concordia pull` makes of a GGUF file), or does once each output's are multiplied by a power of two (a bfloat16 checkpoint), are kept as
that too, and steps of few rows read those by FBGEMM, which computes in float32: half the bytes; under `--deterministic` steps of many
rows, too, in pieces of row counts that give a row the bits that it has among few. What holds of a row's bits is found
out at start, for each shape, with the threads that will be used. Layers that are given the very same tensor (Q, K and V; gate and up)
are one product, since a call costs as much as reading 400 KB. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
import torch

log = structlog.get_logger()

_BATCH_HINT = 8  # packed for 8 rows, the product of 1 to 256 rows is as fast as packed for that count, within noise
_FEW_ROWS = 16  # up to so many, reading the weights is what takes time: half the bytes are faster
_MANY_ROWS = 32
# Rows of a large step that are computed together, if they have the bits that they have among few.
_PIECES = (240, 96, 48)
_OUTS_AT_ONCE = (
    8192  # of weights that are packed as float16: 262,144 x 640 take 1.2 s instead of 3.4, the product as long
)
_TOP_EXPONENT = 15  # float16 ends at 65,504
_ROWS_AT_ONCE = 1024  # of weights that are looked at: one that float16 can't hold is met early

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Shapes:
    """What was found out of each shape (out, in): with how many rows a product of 1, 2 ... _FEW_ROWS rows is to be computed."""

    single: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    half: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    pieces: dict[tuple[int, int], int] = field(default_factory=dict)  # of float16: rows of a piece of more than that


class Packed:
    """One packed product, of one layer or of several that share their inputs."""

    def __init__(self, layers: list[torch.nn.Linear], shapes: Shapes, *, half: bool, wide: bool = True) -> None:
        """half  steps of few rows may read the weights as float16; wide  those of many rows read float32 (else float16 in pieces)."""
        self._outs = [layer.out_features for layer in layers]
        self._bias = _joined_bias(layers)
        self._inputs: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}
        weight = layers[0].weight.data if len(layers) == 1 else torch.cat([layer.weight.data for layer in layers])
        shape = sum(self._outs), layers[0].in_features
        self._few: Product | None = None
        self._half: list[Any] = []
        self._scales: torch.Tensor | None = None
        if half and (kept := _as_half(weight)):
            exact, self._scales = kept
            self._half = [torch.ops.quantized.linear_prepack_fp16(part, None) for part in exact.split(_OUTS_AT_ONCE)]
            self._few = self._half_product
        if wide or self._few is None:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH_HINT)
        self._wide = wide or self._few is None
        known = shapes.single if self._few is None else shapes.half
        # Of a large vocabulary the first and the last part tell.
        ends = partial(_half_product, [self._half[0], self._half[-1]]) if self._few else self._product
        if shape not in known:
            known[shape] = _safe_rows(ends, shape)
        self._safe = known[shape]
        self._piece = _FEW_ROWS
        if self._few is not None and not self._wide:
            if shape not in shapes.pieces:
                shapes.pieces[shape] = _piece_rows(ends, shape)
            self._piece = shapes.pieces[shape]

    @property
    def is_half(self) -> bool:
        """Whether steps of few rows read float16."""
        return self._few is not None

    def whole(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs (..., in) -> (..., out of all layers); row counts whose bits would be their own are padded."""
        rows = inputs.numel() // inputs.shape[-1]
        if rows > _FEW_ROWS:
            if self._wide:
                return self._product(inputs)
            return self._by_pieces(inputs.reshape(rows, -1)).reshape(*inputs.shape[:-1], -1)
        product = self._few or self._product
        if not rows or (safe := self._safe[rows - 1]) == rows:
            return product(inputs)
        padded = inputs.new_zeros(safe, inputs.shape[-1])
        padded[:rows] = inputs.reshape(rows, -1)
        return product(padded)[:rows].reshape(*inputs.shape[:-1], -1)

    def _by_pieces(self, inputs: torch.Tensor) -> torch.Tensor:
        """More than _FEW_ROWS rows (rows, in), each with the bits that it has among few."""
        large = len(inputs) // self._piece * self._piece
        product = self._few or self._product
        pieces = [product(piece) for piece in inputs[:large].split(self._piece)] if large else []
        pieces += [self.whole(piece) for piece in inputs[large:].split(_FEW_ROWS)] if large < len(inputs) else []
        return torch.cat(pieces)

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

    def _half_product(self, inputs: torch.Tensor) -> torch.Tensor:
        product = _half_product(self._half, inputs)
        if self._scales is not None:
            product.mul_(self._scales)
        return product if self._bias is None else product.add_(self._bias)


def pack_linear_layers(
    module: torch.nn.Module, run: Callable[[], object], *, half: bool = True, alike: bool = False
) -> bool:
    """Give every linear layer its packed weights; False if this build of torch can't.

    The checkpoint's own weights stay as they are: mapped from the file, shared by all engines of a machine, and used for the
    embedding. The packed copy is private. `run` is a forward pass from which is learned which layers share their inputs; it is made
    once, and not at all where nothing is packed. half=False: float16 is not used. alike: every row count takes the same kernel, so
    that a row's bits don't depend on how a prompt was cut either; the weights are kept once.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        log.info("linear.not_packed", reason="torch was built without oneDNN")
        return False
    half = half and "fbgemm" in torch.backends.quantized.supported_engines
    shapes, half_count = Shapes(), 0
    joined = _sharing_inputs(module, run)
    for layers in joined:
        packed = Packed(layers, shapes, half=half, wide=not alike)
        half_count += packed.is_half
        for index, layer in enumerate(layers):
            layer.forward = partial(packed.part, index)  # type: ignore[method-assign]
    together = {layer for layers in joined for layer in layers}
    vocabulary = getattr(module, "get_output_embeddings", lambda: None)()
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear) and layer not in together:
            # The vocabulary is multiplied with one row a sequence.
            packed = Packed([layer], shapes, half=half, wide=not alike and layer is not vocabulary)
            half_count += packed.is_half
            layer.forward = packed.whole  # type: ignore[method-assign]
    padded = {
        f"{out}x{inside}": counts
        for (out, inside), safe_rows in (shapes.single | shapes.half).items()
        if (counts := {rows: safe for rows, safe in enumerate(safe_rows, 1) if rows != safe})
    }
    log.info("linear.packed", joined=len(joined), half=half_count, padded=padded)
    return True


def _half_product(parts: list[Any], inputs: torch.Tensor) -> torch.Tensor:
    products: list[torch.Tensor] = [torch.ops.quantized.linear_dynamic_fp16(inputs, part) for part in parts]
    return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


def _as_half(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """weight (out, in) -> weights that float16 holds, and the power of two (out,) by which the product is multiplied (None: by 1)."""
    if _is_half(weight):
        return weight, None
    exponents = torch.frexp(weight.abs().amax(1)).exponent
    up = torch.ldexp(torch.ones(len(weight)), _TOP_EXPONENT - exponents)[:, None]
    if not _is_half(weight[:_ROWS_AT_ONCE] * up[:_ROWS_AT_ONCE]) or not _is_half(scaled := weight * up):
        return None
    return scaled, (1 / up[:, 0])


def _is_half(weight: torch.Tensor) -> bool:
    """Whether float16 holds every value exactly."""
    return all(torch.equal(part.half().to(part.dtype), part) for part in weight.split(_ROWS_AT_ONCE))


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
def _safe_rows(product: Product, shape: tuple[int, int]) -> tuple[int, ...]:
    """With how many rows a product (out, in) of 1, 2 ... _FEW_ROWS rows gives each row the bits that it has among many.

    Says so if rows among more than _FEW_ROWS have others: then a stream under load may differ from one alone.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_MANY_ROWS, shape[1], generator=generator)
    few = product(inputs[:_FEW_ROWS])

    good = [
        rows
        for rows in range(1, _FEW_ROWS + 1)
        if torch.equal(product(inputs[_FEW_ROWS - rows : _FEW_ROWS]), few[_FEW_ROWS - rows :])
    ]
    if not torch.equal(product(inputs)[:_FEW_ROWS], few):
        log.warning("linear.bits_depend_on_batch", shape=list(shape), rows=[_MANY_ROWS])
    return _padded_counts(good)


@torch.inference_mode()
def _piece_rows(product: Product, shape: tuple[int, int]) -> int:
    """The most rows of a product (out, in) that have the bits they have among _FEW_ROWS."""
    inputs = torch.randn(max(_PIECES), shape[1], generator=torch.Generator().manual_seed(0))
    for rows in _PIECES:
        whole = product(inputs[:rows])
        few = [product(part) for part in (inputs[:_FEW_ROWS], inputs[rows - _FEW_ROWS : rows])]
        if torch.equal(whole[:_FEW_ROWS], few[0]) and torch.equal(whole[rows - _FEW_ROWS :], few[1]):
            return rows
    return _FEW_ROWS


def _padded_counts(good: list[int]) -> tuple[int, ...]:
    return tuple(next((safe for safe in good if safe >= rows), _FEW_ROWS) for rows in range(1, _FEW_ROWS + 1))
