"""What a running `serve` was given: it notes its settings in the data directory, and `concordia config` shows where they differ.

Written by `serve` once it holds its lock, gone with it; what a killed one left counts for nothing, since the lock isn't held.
API keys are only said to be set.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import structlog

from ops.config import Config, engine_threads, shown_value
from tiers.lock import is_held
from tiers.paths import Paths

log = structlog.get_logger("serve")


def note(config: Config) -> None:
    """Write them down. Serving goes on without it where there is no room."""
    threads = engine_threads(config.engine, config.started_engines)
    values = {**config.values(), "lane_dir": config.paths.lane_dir, "engine.threads": threads}
    told = {key: shown_value(key, value) for key, value in values.items()}
    try:
        config.paths.serve_settings.write_text(json.dumps(told))
    except OSError as error:
        log.warning(
            "serve.settings_not_noted", error=str(error), hint="`concordia config` can't show them; free some room"
        )


def forget(paths: Paths) -> None:
    """Nothing runs from now on."""
    with contextlib.suppress(OSError):  # whatever became of the data directory, the rest of the end goes on
        paths.serve_settings.unlink()


def differing(config: Config) -> dict[str, Any] | None:
    """By key, what the `serve` of this data directory runs with, where it is another value than configured; None: none runs."""
    if not is_held(config.paths.serve_lock):
        return None
    values = config.values()
    try:
        told = json.loads(config.paths.serve_settings.read_bytes())
        return {
            key: _as(values[key], value)
            for key, value in told.items()
            if key in values and shown_value(key, values[key]) != value
        }
    except (OSError, ValueError, AttributeError):  # there is none, or it is torn or another version's
        return None


def _as(configured: Any, told: str) -> Any:
    """Numbers and switches as such again, for JSON."""
    return json.loads(told) if isinstance(configured, bool | int | float) else told
