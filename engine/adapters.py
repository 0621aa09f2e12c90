"""LoRA adapters in PEFT's format, loaded and dropped while the engine serves. Main thread only.

Sequences with different adapters stand in one batch: a layer computes the base model's product for all rows, then adds
scale * B(A(x)) to the rows of each adapter. A row's bits are its own (one product a row, whatever stands beside it). An adapter is named
by the digest of its files, and what it computes by a root of its own, so new weights under an old name never meet old state.
Source: Hu et al. 2021; the files that `peft`'s save_pretrained writes, which tests compare with.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.errors import BadRequest
from engine.messages import adapter_digest

log = structlog.get_logger()

_PREFIX = "base_model.model."
# Options that change what is computed, and the values with which they don't.
_PLAIN = {
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "target_parameters": ([], None),
}


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one layer: down (in, rank), up (rank, out), scale included."""

    down: torch.Tensor
    up: torch.Tensor

    def __call__(self, inputs: torch.Tensor, *, by_token: bool = False) -> torch.Tensor:
        """(rows, tokens, in) -> (rows, tokens, out), each row by a product of its own, or each token."""
        if by_token:
            return self(inputs.reshape(-1, 1, inputs.shape[-1])).reshape(*inputs.shape[:-1], -1)
        rows = inputs.shape[0]
        narrow = torch.bmm(inputs, self.down.expand(rows, -1, -1))
        return torch.bmm(narrow, self.up.expand(rows, -1, -1))


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter: what it adds, by the name of the layer."""

    digest: str
    layers: dict[str, LowRank]


class Adapters:
    """The adapters of one engine. `begin` says which rows of the next forward pass use which.

    by_token  the bits of a token must not depend on how many are computed with it (a deterministic engine)
    """

    def __init__(self, module: torch.nn.Module, *, by_token: bool = False) -> None:
        self._by_token = by_token
        self._digests: list[str] = []
        self._linear = {name: layer for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}
        self._wrapped: set[str] = set()
        self._known: dict[str, Adapter] = {}
        self._leaving: set[str] = set()
        self._rows: list[tuple[Adapter, list[int]]] = []
        self._row_count = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._known

    def load(self, directory: Path, digest: str) -> None:
        """Read an adapter whose files have this digest. Raises BadRequest with the reason if it can't be used."""
        self._leaving.discard(digest)
        if digest in self._known:
            return
        found = adapter_digest(directory)
        if found != digest:
            raise BadRequest(
                "bad_adapter", f"the files in {directory} are not those that were announced; load it again"
            )
        layers = read_adapter(directory, self._linear)
        for name in layers:
            self._wrap(name)
        self._known[digest] = Adapter(digest, layers)
        log.info("adapter.loaded", digest=digest, layers=len(layers))

    def unload(self, digest: str) -> None:
        """Forget an adapter as soon as nobody uses it."""
        self._leaving.add(digest)

    def let_go(self, used: set[str]) -> None:
        """Drop what is to be forgotten and isn't used."""
        for digest in self._leaving - used:
            self._leaving.discard(digest)
            if self._known.pop(digest, None) is not None:
                log.info("adapter.unloaded", digest=digest)

    def begin(self, digests: list[str]) -> None:
        """The adapter of each row of the next step, "" for none."""
        self._digests = digests
        self._use(digests)

    def only(self, row: int | None) -> None:
        """What is computed next is of one row of the step; None: of all again."""
        self._use(self._digests if row is None else self._digests[row : row + 1])

    def _use(self, digests: list[str]) -> None:
        self._row_count = len(digests)
        rows: dict[str, list[int]] = {}
        for index, digest in enumerate(digests):
            if digest:
                rows.setdefault(digest, []).append(index)
        self._rows = [(self._known[digest], indices) for digest, indices in rows.items()]

    def _wrap(self, name: str) -> None:
        """Put the addition behind a layer; costs one look at an empty list while no row has an adapter."""
        if name in self._wrapped:
            return
        self._wrapped.add(name)
        layer = self._linear[name]
        base: Callable[[torch.Tensor], torch.Tensor] = layer.forward

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            out = base(inputs)
            return self._add(name, inputs, out) if self._rows else out

        layer.forward = forward  # type: ignore[method-assign]

    def _add(self, name: str, inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        for adapter, rows in self._rows:
            low_rank = adapter.layers.get(name)
            if low_rank is None:
                continue
            if len(rows) == self._row_count:
                out = out + low_rank(inputs, by_token=self._by_token)
            else:
                index = torch.tensor(rows, device=inputs.device)
                out = out.index_add(0, index, low_rank(inputs.index_select(0, index), by_token=self._by_token))
        return out


def read_adapter(directory: Path, linear: dict[str, torch.nn.Linear]) -> dict[str, LowRank]:
    """An adapter's files -> what it adds to each layer. Raises BadRequest with the reason if it can't be used as it is."""
    try:
        return _read(directory, linear)
    except (TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, NotImplementedError) as error:
        # Values of other kinds than PEFT writes: the last of a number format that has no arithmetic.
        raise BadRequest("bad_adapter", f"its files are not as PEFT writes them: {error}") from error


def _read(directory: Path, linear: dict[str, torch.nn.Linear]) -> dict[str, LowRank]:
    config = _config(directory)
    try:
        weights = load_file(directory / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise BadRequest("bad_adapter", f"its adapter_model.safetensors can't be read: {error}") from error
    downs: dict[str, torch.Tensor] = {}
    ups: dict[str, torch.Tensor] = {}
    for key, tensor in weights.items():
        name, _, kind = key.removeprefix(_PREFIX).rpartition(".lora_")
        side = {"A.weight": downs, "B.weight": ups}.get(kind)
        if side is None:
            raise BadRequest(
                "bad_adapter", f"it changes {key}, which is not supported; only low-rank linear layers are"
            )
        side[name] = tensor
    if set(downs) != set(ups) or not downs:
        raise BadRequest("bad_adapter", "its lora_A and lora_B do not pair up")
    return {name: _low_rank(name, downs[name], ups[name], config, linear) for name in downs}


def _config(directory: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((directory / "adapter_config.json").read_text())
    except (OSError, ValueError) as error:
        raise BadRequest("bad_adapter", f"its adapter_config.json can't be read: {error}") from error
    if config.get("peft_type") != "LORA":
        raise BadRequest("bad_adapter", f"its peft_type is {config.get('peft_type')!r}; only LORA is supported")
    for option, plain in _PLAIN.items():
        if config.get(option) not in plain:
            raise BadRequest("bad_adapter", f"its {option} is {config[option]!r}, which is not supported")
    return config


def _low_rank(
    name: str, down: torch.Tensor, up: torch.Tensor, config: dict[str, Any], linear: dict[str, torch.nn.Linear]
) -> LowRank:
    layer = linear.get(name)
    if layer is None or "experts" in name:
        raise BadRequest(
            "bad_adapter", f"it changes {name}, which this model does not have as a linear layer of its own"
        )
    if down.dim() != 2 or up.dim() != 2 or not down.numel():
        raise BadRequest("bad_adapter", f"{name}: {tuple(down.shape)} and {tuple(up.shape)} are no matrices of a rank")
    if down.shape[1] != layer.in_features or up.shape[0] != layer.out_features or down.shape[0] != up.shape[1]:
        shapes = f"{tuple(down.shape)} and {tuple(up.shape)} for a layer of {layer.in_features} x {layer.out_features}"
        raise BadRequest("bad_adapter", f"{name}: the shapes {shapes} do not fit; it was made for another model")
    rank = down.shape[0]
    alpha = _pattern(config.get("alpha_pattern"), name, config.get("lora_alpha") or rank)
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    to = {"dtype": layer.weight.dtype, "device": layer.weight.device}
    return LowRank(down.t().contiguous().to(**to), (up.t() * scale).contiguous().to(**to))


def _pattern(pattern: dict[str, float] | None, name: str, default: float) -> float:
    """PEFT's per-layer values: a key is the end of a layer's name."""
    for key, value in (pattern or {}).items():
        if name == key or name.endswith("." + key):
            return value
    return default
