"""What one gateway process is told at its start, as one frozen object.

`ops` resolves defaults, file, environment and flags; the gateway only reads this JSON (`python -m gateway --config-json`).
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gateway.settings import GatewaySettings
from tiers.paths import Paths
from tiers.settings import TierSettings


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Sections and places of one gateway.

    model_name      what clients put into `model`
    context_tokens  longest sequence; 0 means what the model declares
    adapters        `engine.adapters`: those that have a name from the start
    listen_on       listening sockets, inherited from `serve`, which keeps them over this process's death; none: it opens its own
    """

    data_dir: Path
    lane_dir: Path
    model_dir: Path
    model_name: str
    gateway: GatewaySettings = GatewaySettings()
    tiers: TierSettings = TierSettings()
    context_tokens: int = 0
    adapters: str = ""
    listen_on: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> GatewayConfig:
        """Read `--config-json`. Raises msgspec.ValidationError that names the field."""
        return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))

    @property
    def paths(self) -> Paths:
        """Names of everything in the two directories."""
        return Paths(self.data_dir, self.lane_dir)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
