"""Where the model to measure lies: the directory behind a name, pulled if it is missing."""

from __future__ import annotations

from pathlib import Path


def model_directory(model: str) -> Path:
    """Directory of a name, a hub name, a directory or a .gguf file, as `concordia serve --model` takes it."""
    from ops import config, pull

    return pull.ensure(model, config.load().model_cache).directory
