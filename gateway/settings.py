"""The gateway's own section of the configuration. `ops/config.py` fills it; nothing here reads the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

BACKLOG = 1024  # connections that wait to be accepted, of the gateway's port


@dataclass(frozen=True, slots=True)
class TenantAccess:
    """How the requests of one tenant are known, `[tenants.NAME]`.

    api_key       a request that carries it has the namespace NAME
    api_key_file  file whose first line is that key (used where no key is given)
    """

    api_key: str = ""
    api_key_file: str = ""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """HTTP, admission and stream retention.

    api_key               the operator's; once it or a tenant's key is set, every request must carry one; needed to listen beyond loopback
    max_body_bytes        larger request bodies are refused with 413
    max_waiting           streams that may wait for an engine; more are refused with 429
    engine_wait_s         how long a stream waits while no engine is alive
    keepalive_s           an SSE comment is sent after this long without an event
    resume_grace_s        how long a stream without a client goes on when it is not stored (a restart of the gateway looks like this)
    stream_retention_s    finished streams can be fetched for this long
    max_waiting_tokens    tokens of the streams that may wait for an engine; a request beyond is refused with 429
    failover              what stands ready for a lost engine: `cold` nothing (it is started again), `warm` spares with weights loaded,
                          `hot` spares that also keep the state of live streams, and of some idle sessions, on their device
    hot_sessions          under `hot`: idle sessions whose state a standby keeps, besides pinned ones; those that were used last, as far as
                          it has slots to spare
    poison_deaths         a request that was being computed at so many deaths of engines, without a token between, is ended (not for kills)
    spares                engines kept idle while another one can serve
    default_max_tokens    length of an answer when the request names none; 0 means up to the context
    tool_form             how the model writes tool calls: `hermes`, `llama`, or `auto`, by its chat template
    drain_s               how long SIGTERM lets running streams go on before the gateway exits (they can be resumed afterwards)

    `tenants`, by namespace, comes from the tables `[tenants.NAME]`.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str = ""
    max_body_bytes: int = 8 << 20
    max_waiting: int = 256
    max_waiting_tokens: int = 1 << 20
    failover: Literal["cold", "warm", "hot"] = "warm"
    hot_sessions: int = 4
    poison_deaths: int = 2
    engine_wait_s: float = 60.0
    keepalive_s: float = 5.0
    resume_grace_s: float = 30.0
    stream_retention_s: float = 86_400.0
    spares: int = 1
    default_max_tokens: int = 0
    tool_form: Literal["auto", "hermes", "llama"] = "auto"
    drain_s: float = 10.0
    tenants: Mapping[str, TenantAccess] = field(default_factory=dict)

    @property
    def any_key(self) -> str:
        """A key that requests may carry, the operator's if it is set; "" if they need none."""
        return self.api_key or next((row.api_key for row in self.tenants.values() if row.api_key), "")
