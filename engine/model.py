"""Load a model, learn what state it keeps, and prove that our attention computes what the model's own does.

Used once, at the start of an engine process, on its main thread. Shapes come from a probe forward pass, so there is no code
per architecture. A model whose cached answers differ from its own full forward pass is refused: never served wrong.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from engine import attention
from engine.arena import Arena, LayerShape
from engine.errors import UnsupportedModel
from engine.linear import pack_linear_layers
from engine.settings import EngineSettings
from tiers.layout import Layout, RootId

# Largest difference of logits, relative to their spread, that counts as "the same model" (float32: seen below 1e-5).
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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
    layers: list[LayerShape]
    weights_digest: str
    cache_argument: str
    stop_tokens: tuple[int, ...] = ()

    @torch.inference_mode()
    def forward(self, tokens: list[list[int]], starts: list[int], cache: Any, *, logits: bool) -> torch.Tensor | None:
        """Run the rows of a step: tokens (rows, count), each row from its own position. Returns logits (rows, vocab) of the last column."""
        ids = torch.tensor(tokens, device=self.device)
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(ids.shape[1], device=self.device)
        inputs = {"input_ids": ids, "position_ids": positions, self.cache_argument: cache, "use_cache": True}
        if not logits:
            self.module.base_model(**inputs)
            return None
        return self.module(**inputs, logits_to_keep=1).logits[:, -1]

    def root(self, layout: Layout, block_tokens: int, *, deterministic: bool = False) -> RootId:
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
        if deterministic:
            facts["deterministic"] = {"threads": torch.get_num_threads()}
        text = json.dumps(facts, sort_keys=True, default=str)
        return RootId(hashlib.blake2b(text.encode(), digest_size=16, person=b"concordia-state").digest())


def choose_device(setting: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU."""
    if setting == "auto":
        setting = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(setting)


def load(directory: Path, name: str, settings: EngineSettings) -> Model:
    """Load weights and tell the model's shape. Raises UnsupportedModel with the reason."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = choose_device(settings.device)
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    dtype = _dtype(settings.dtype, device, config)
    try:
        module = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    except ValueError as error:
        raise UnsupportedModel(f"{name}: transformers can't load it: {error}") from error
    module = module.to(device).eval()
    if device.type == "cpu" and dtype == torch.float32:
        pack_linear_layers(module)
    parameters = inspect.signature(module.base_model.forward).parameters
    model = Model(
        name=name,
        module=module,
        device=device,
        dtype=dtype,
        context_tokens=settings.context_tokens or _context_of(config),
        vocab_count=module.get_input_embeddings().weight.shape[0],
        layers=[],
        weights_digest=digest_weights(directory),
        cache_argument="cache" if "cache" in parameters else "past_key_values",
        stop_tokens=_stop_tokens(module),
    )
    model.layers = _probe(model)
    module.set_attn_implementation(attention.NAME)
    return model


def self_check(model: Model, arena: Arena, cache: attention.ArenaCache) -> None:
    """Compare a chunk and decode steps through the arena with one full forward pass. Raises UnsupportedModel if they differ."""
    count = min(24, model.context_tokens)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, model.vocab_count, (count,), generator=generator).tolist()
    slot, chunk = arena.slots[0], count - 4
    cache.begin([slot], [0], chunk)
    ours = [model.forward([tokens[:chunk]], [0], cache, logits=True)]
    for position in range(chunk, count):
        cache.begin([slot], [position], 1)
        ours.append(model.forward([[tokens[position]]], [position], cache, logits=True))
    model.module.set_attn_implementation("sdpa")
    with torch.inference_mode():
        theirs = model.module(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0]
    model.module.set_attn_implementation(attention.NAME)
    expected = theirs[chunk - 1 :].float()
    got = torch.cat([row for row in ours if row is not None]).float()
    difference = float((got - expected).abs().max() / expected.std().clamp_min(1e-6))
    if not difference < _TOLERANCE[model.dtype]:
        raise UnsupportedModel(
            f"{model.name}: answers computed from cached state differ from the model's own by {difference:.2g} of their "
            "spread; this architecture keeps state that Concordia does not capture yet"
        )


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


def _stop_tokens(module: Any) -> tuple[int, ...]:
    """Tokens that end an answer, as the checkpoint names them."""
    generation = getattr(module, "generation_config", None)
    stops = getattr(generation, "eos_token_id", None)
    stops = module.config.get_text_config().eos_token_id if stops is None else stops
    return tuple(stops) if isinstance(stops, list) else () if stops is None else (int(stops),)


def _context_of(config: Any) -> int:
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if not context:
        raise UnsupportedModel("the model declares no max_position_embeddings; set engine.context_tokens")
    return int(context)


def _probe(model: Model) -> list[LayerShape]:
    """Shapes of every layer's state, from a forward pass of two tokens."""
    cache = attention.ProbeCache()
    inputs = {"input_ids": torch.tensor([[3, 4]], device=model.device), model.cache_argument: cache, "use_cache": True}
    try:
        with torch.inference_mode():
            model.module.base_model(**inputs)
    except (AttributeError, TypeError, NotImplementedError, IndexError, ValueError) as error:
        raise UnsupportedModel(
            f"{model.name} keeps state beside attention K and V ({error}); only attention layers are captured yet"
        ) from error
    layers = model.module.config.get_text_config().num_hidden_layers
    if sorted(cache.shapes) != list(range(layers)):
        raise UnsupportedModel(
            f"{model.name}: only {len(cache.shapes)} of {layers} layers keep attention K and V; other state is not captured yet"
        )
    return [cache.shapes[index] for index in range(layers)]
