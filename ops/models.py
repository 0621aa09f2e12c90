"""What `--model` means: a name that can be pulled, a directory with a checkpoint, or a .gguf file. Gives a directory to load from.

Runs in the command's process, without torch; conversions run in a process of their own (`ops/pull.py`).
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ops.errors import ModelError

DEMO_MODEL = "smollm2"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be served: where it lies and what clients call it."""

    directory: Path
    name: str


def is_hub_name(text: str) -> bool:
    """owner/name, as on the hub."""
    return _HUB_NAME.fullmatch(text) is not None


def cache_directory(cache: Path, spec: str) -> Path:
    """Where a pulled model lies in the cache; a hub name's slash becomes two dashes."""
    return cache / spec.replace("/", "--")


def is_complete(directory: Path) -> bool:
    """The directory holds a config, a tokenizer and all shards of its weights."""
    return not missing_files(directory)


def missing_files(directory: Path) -> list[str]:
    """What a checkpoint directory lacks; empty if it can be loaded."""
    missing = [name for name in ("config.json",) if not (directory / name).is_file()]
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        missing.append("tokenizer.json")
    return missing + _missing_weights(directory)


def _missing_weights(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            return [f"{index.name} (unreadable)"]
        return sorted(shard for shard in shards if not (directory / shard).is_file())
    return [] if (directory / "model.safetensors").is_file() else ["model.safetensors"]


def resolve(spec: str, cache: Path) -> Model | None:
    """The model to serve; None if it has to be pulled first. Raises ModelError for what can never be served."""
    path = Path(os.path.expanduser(spec))
    if path.is_dir():
        missing = missing_files(path)
        if missing:
            raise ModelError(f"{path} is no model directory: it lacks {', '.join(missing)}")
        return Model(path.resolve(), path.resolve().name)
    if spec.endswith(".gguf") and not path.is_file():
        raise ModelError(f"{path}: no such file")
    if os.sep in spec and not path.is_file() and not is_hub_name(spec):
        raise ModelError(f"{spec}: no such directory")
    name = path.stem if path.is_file() else spec.rpartition("/")[2]
    directory = gguf_directory(cache, path) if path.is_file() else cache_directory(cache, spec)
    return Model(directory, name) if is_complete(directory) else None


def gguf_directory(cache: Path, file: Path) -> Path:
    """Where the conversion of a user's own .gguf file lies: named by path, size and time, so that a changed file is converted anew."""
    import hashlib

    stat = file.stat()
    mark = hashlib.blake2b(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(), digest_size=6).hexdigest()
    return cache / f"{file.stem}-{mark}"
