"""What settings that leave a choice to the machine come to, here and now. Runs in the command's process; reads only.

Source: docs/configuration.md
"""

from __future__ import annotations

from typing import Any

from ops.config import Config, engine_threads
from tiers import keeper_client
from tiers.drain import disk_limit
from tiers.errors import TierError


def resolved(config: Config) -> dict[str, Any]:
    """By key, of those that are left open: the value that holds. The disk budget is the keeper's own figure where one runs."""
    found: dict[str, Any] = {}
    if not config.lane_dir:
        found["lane_dir"] = str(config.paths.lane_dir)
    if not config.engine.threads:
        found["engine.threads"] = engine_threads(config.engine, config.started_engines)
    if not config.tiers.disk_budget_bytes:
        found["tiers.disk_budget_bytes"] = _disk_limit(config)
    return found


def _disk_limit(config: Config) -> int:
    try:
        return int(keeper_client.stats(config.paths.keeper_socket, timeout_s=2.0)["budgets"]["disk"][1])
    except (TierError, KeyError):
        pass  # none runs, or its store isn't open
    path = config.paths.store
    try:
        used = (path / "data.mdb").stat().st_size
    except OSError:
        used = 0
    while not path.is_dir():
        path = path.parent
    return disk_limit(config.tiers, path, used, config.tiers.store_map_bytes)
