"""Load a model and learn what state it keeps. Used once, at the start of an engine process, on its main thread.

Shapes, kinds and windows come from a probe forward pass, so there is no code per architecture. What keeps its state in a way
that is not known here is refused with the reason; `engine/check.py` then proves that what is served is the model's own answer.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from engine import attention, lean_torch
from engine.arena import LayerShape
from engine.errors import UnsupportedDevice, UnsupportedModel
from engine.lean_transformers import lean
from engine.linear import pack_linear_layers
from engine.norms import join_norms
from engine.scan import bound_steps, continue_scans
from engine.settings import EngineSettings
from engine.states import StateShape
from tiers.layout import Layout, RootId

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Rows whose logits are there at a time: as many as the packed vocabulary multiplies at once (engine/linear.py); 16 MB of the largest.
_SCORED_AT_ONCE = 16
_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
_UNKNOWN_LAYERS = {
    "chunked_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "minimax_m3_sparse",
    "indexed_attention",
}
_KEYS_WITHOUT_EFFECT = {
    "_name_or_path",
    "_model_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
}


@dataclass(slots=True)
class Model:
    """A loaded model. `forward` takes the step that `ArenaCache.begin` announced."""

    name: str
    module: Any
    device: torch.device
    dtype: torch.dtype
    context_tokens: int
    vocab_count: int
    layers: dict[int, LayerShape]  # attention layers by index
    states: list[StateShape]
    weights_digest: str
    cache_argument: str
    own_attention: str  # implementation of transformers that answers are checked against
    stop_tokens: tuple[int, ...] = ()

    @torch.inference_mode()
    def forward(
        self, tokens: list[list[int]], starts: list[int], cache: attention.ArenaCache, *, logits: bool
    ) -> torch.Tensor | None:
        """Run the rows of a step: tokens (rows, count), each row from its own position. Returns logits (rows, vocab) of the last column."""
        if cache.exact == "tokens" and (len(tokens) > 1 or len(tokens[0]) > 1):
            return self._token_by_token(tokens, starts, cache, logits=logits)
        inputs = self._inputs(tokens, starts, cache)
        if not logits:
            self.module.base_model(**inputs)
            cache.end()
            return None
        last = self.module(**inputs, logits_to_keep=1).logits[:, -1]
        cache.end()
        return last

    def _inputs(self, tokens: list[list[int]], starts: list[int], cache: attention.ArenaCache) -> dict[str, Any]:
        ids = torch.tensor(tokens, device=self.device)
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(ids.shape[1], device=self.device)
        return {"input_ids": ids, "position_ids": positions, self.cache_argument: cache, "use_cache": True}

    @torch.inference_mode()
    def score(self, tokens: list[int], start: int, cache: attention.ArenaCache) -> Iterator[torch.Tensor]:
        """As `forward` of one row, with the logits of every token: pieces (at most _SCORED_AT_ONCE, vocab) in order.

        The last token is a piece of its own, so that its logits are those that `forward` gives.
        """
        if cache.exact == "tokens":
            yield from self._scores_by_token(tokens, start, cache)
            return
        inputs = self._inputs([tokens], [start], cache)
        outputs = self.module.base_model(**inputs)
        cache.end()
        hidden = outputs.last_hidden_state
        last = len(tokens) - 1
        for low in (*range(0, last, _SCORED_AT_ONCE), last):
            high = min(low + _SCORED_AT_ONCE, last) if low < last else last + 1
            yield self._head(inputs, type(outputs)(**{**outputs, "last_hidden_state": hidden[:, low:high]}))

    def _scores_by_token(self, tokens: list[int], start: int, cache: attention.ArenaCache) -> Iterator[torch.Tensor]:
        slot = cache.rows.slots[0]
        for position, token in enumerate(tokens, start):
            cache.begin([slot], [position], 1)
            logits = self.forward([[token]], [position], cache, logits=True)
            assert logits is not None, "asked for logits"
            yield logits

    def _head(self, inputs: dict[str, Any], outputs: Any) -> torch.Tensor:
        """What the model makes of its last layer's outputs (1, rows, dim): logits (rows, vocab), scaled or capped as it does."""
        base = self.module.base_model
        before = vars(base).get("forward")
        base.forward = lambda *_, **__: outputs
        try:
            logits: torch.Tensor = self.module(**inputs).logits[0]
            return logits
        finally:
            if before is None:
                del base.forward
            else:
                base.forward = before

    @torch.inference_mode()
    def decode(self, ids: torch.Tensor, positions: torch.Tensor, cache: attention.ModelCache) -> torch.Tensor:
        """One token of each row: ids, positions (rows, 1) on the device, read when the work runs. Returns logits (rows, vocab)."""
        inputs = {"input_ids": ids, "position_ids": positions, self.cache_argument: cache, "use_cache": True}
        logits: torch.Tensor = self.module(**inputs, logits_to_keep=1).logits[:, -1]
        return logits

    def settle(self) -> None:
        """Return when what was asked for so far is computed: a GPU is only given it, so nothing else tells how long it takes."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _token_by_token(
        self, tokens: list[list[int]], starts: list[int], cache: attention.ArenaCache, *, logits: bool
    ) -> torch.Tensor | None:
        """`forward`, each token in a pass of its own, so that every pass of this model has the same shape."""
        outputs = []
        for row, (slot, start) in enumerate(zip(cache.rows.slots, starts, strict=True)):
            cache.row_begins(row)
            for position, token in enumerate(tokens[row], start):
                last = position == start + len(tokens[row]) - 1
                cache.begin([slot], [position], 1)
                outputs.append(self.forward([[token]], [position], cache, logits=logits and last))
        return torch.cat([output for output in outputs if output is not None]) if logits else None

    def root(self, layout: Layout, block_tokens: int, *, exact: attention.Exact = "") -> RootId:
        """Fingerprint of everything that the numbers in a frame depend on."""
        config = {k: v for k, v in self.module.config.to_dict().items() if k not in _KEYS_WITHOUT_EFFECT}
        facts = {
            "format": 1,
            "weights": self.weights_digest,
            "config": config,
            "dtype": str(self.dtype),
            "layout": layout.groups,
            "block_tokens": block_tokens,
        }
        if exact:
            way = {} if exact == "tiles" else {"way": exact}
            facts["deterministic"] = {"threads": torch.get_num_threads(), "products": 2, **way}
        if layout.windows or self.states:
            facts |= {"windows": layout.windows, "states": [(s.key, s.shape, str(s.dtype)) for s in self.states]}
        text = json.dumps(facts, sort_keys=True, default=str)
        return RootId(hashlib.blake2b(text.encode(), digest_size=16, person=b"concordia-state").digest())


def choose_device(setting: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU. Raises UnsupportedDevice."""
    if setting == "auto":
        setting = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(setting)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        why = f"finds {torch.cuda.device_count()} CUDA devices" if torch.version.cuda else "is built without CUDA"
        raise UnsupportedDevice(
            f"engine.device is {setting}, but torch {torch.__version__} {why}; serve with --device cpu"
        )
    return device


def load(directory: Path, name: str, settings: EngineSettings) -> Model:
    """Load weights and tell the model's shape. Raises UnsupportedModel, UnsupportedDevice with the reason."""
    from transformers import AutoConfig

    device = choose_device(settings.device)
    if device.index is not None:
        # Streams, events and graphs that are made without a device belong to the current one.
        torch.cuda.set_device(device)
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    dtype = _dtype(settings.dtype, device, config)
    with lean():  # the model's own module is imported, its layers are made
        try:
            module, own_attention = _load_weights(directory, name, dtype)
        except NotImplementedError:  # an operation on tensors without memory that torch has in Python only
            if not lean_torch.whole():
                raise
            module, own_attention = _load_weights(directory, name, dtype)
    module = module.to(device).eval()
    continue_scans(module)
    bound_steps(module)
    parameters = inspect.signature(module.base_model.forward).parameters
    model = Model(
        name=name,
        module=module,
        device=device,
        dtype=dtype,
        context_tokens=settings.context_tokens or _context_of(config),
        vocab_count=module.get_input_embeddings().weight.shape[0],
        layers={},
        states=[],
        weights_digest=digest_weights(directory),
        cache_argument=next((n for n in _CACHE_ARGUMENTS if n in parameters), "cache"),
        own_attention=own_attention,
        stop_tokens=_stop_tokens(getattr(module, "generation_config", None), module.config),
    )
    if model.own_attention:
        module.set_attn_implementation(attention.NAME)

    def probe() -> None:
        model.layers, model.states = _probe(model)

    plain = device.type == "cpu" and dtype == torch.float32
    if plain:
        join_norms(module)
    if not (plain and pack_linear_layers(module, probe, alike=settings.deterministic)):
        probe()
    _refuse_unseen_windows(model)
    return model


def _load_weights(directory: Path, name: str, dtype: torch.dtype) -> tuple[Any, str]:
    """The module, and the first of transformers' attention implementations that it takes ("" if it has no attention)."""
    from transformers import AutoModelForCausalLM

    errors = []
    for implementation in ("sdpa", "eager"):
        try:
            module = AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, attn_implementation=implementation, local_files_only=True
            )
        except ValueError as error:
            errors.append(str(error))
            continue
        return module, implementation
    raise UnsupportedModel(f"{name}: transformers can't load it: {errors[0]}")


def digest_weights(directory: Path) -> str:
    """Digest of the weight files' content (xxh3_128, 10 GB/s: 50 ms for the demo model)."""
    digest = xxhash.xxh3_128()
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    for path in files:
        with open(path, "rb") as file:
            while data := file.read(16 << 20):
                digest.update(data)
    return digest.hexdigest()


def _dtype(setting: str, device: torch.device, config: Any) -> torch.dtype:
    if setting != "auto":
        return _DTYPES[setting]
    if device.type == "cpu":
        return torch.float32
    return getattr(config, "dtype", None) or torch.bfloat16


def declared_tokens(directory: Path, config: Any) -> tuple[int, tuple[int, ...]]:
    """Size of the vocabulary and the tokens that end an answer, as the checkpoint declares them; without loading it."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except OSError:
        generation = None
    return int(config.get_text_config().vocab_size), _stop_tokens(generation, config)


def _stop_tokens(generation: Any, config: Any) -> tuple[int, ...]:
    """Tokens that end an answer, as the checkpoint names them."""
    stops = getattr(generation, "eos_token_id", None)
    stops = config.get_text_config().eos_token_id if stops is None else stops
    return tuple(stops) if isinstance(stops, list) else () if stops is None else (int(stops),)


def _context_of(config: Any) -> int:
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if not context:
        raise UnsupportedModel("the model declares no max_position_embeddings; set engine.context_tokens")
    return int(context)


def _probe(model: Model) -> tuple[dict[int, LayerShape], list[StateShape]]:
    """Shapes of every layer's state, from a forward pass of two tokens."""
    cache = attention.ProbeCache()
    cache.begin()
    inputs = {"input_ids": torch.tensor([[3, 4]], device=model.device), model.cache_argument: cache, "use_cache": True}
    try:
        with torch.inference_mode():
            model.module.base_model(**inputs)
    except (AttributeError, TypeError, NotImplementedError, IndexError, KeyError, ValueError) as error:
        raise UnsupportedModel(
            f"{model.name} keeps its state in a way that is not known here ({type(error).__name__}: {error})"
        ) from error
    if not cache.layers_seen and not cache.states:
        raise UnsupportedModel(
            f"{model.name} keeps no state in the cache that it is given; what it keeps elsewhere can't be captured"
        )
    return cache.layers_seen, cache.states


def _refuse_unseen_windows(model: Model) -> None:
    """Refuse a model whose configuration declares windows which its attention did not ask for: they are in masks that we don't build."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    config = model.module.config.get_text_config(decoder=True)
    try:
        types, arguments = get_layer_types_and_kwargs(config)
    except (AttributeError, TypeError, KeyError):
        return  # nothing declared; the check of answers is what is left
    for index, (kind, options) in enumerate(zip(types, arguments, strict=True)):
        layer, window = model.layers.get(index), options.get("sliding_window") or 0
        if kind in _UNKNOWN_LAYERS:
            raise UnsupportedModel(f"{model.name}: layer {index} is of kind {kind}, which is not known here")
        if layer is not None and window and layer.window != window and window < model.context_tokens:
            raise UnsupportedModel(
                f"{model.name}: layer {index} declares a window of {window} tokens, but attends with one of {layer.window or 'all'}"
            )
