"""The one configuration object: defaults < TOML file < environment < flags, read once, typed, frozen.

Runs in the command line process; the other processes get their sections as JSON (`Config.engine_json` and its siblings) and
never read a file or the environment. An unknown key is refused with the nearest known one; a wrong type says file, key and
what was expected; every value remembers where it came from. Documented in docs/configuration.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import os
import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from engine.settings import EngineSettings
from gateway.config import is_loopback
from gateway.settings import GatewaySettings, TenantAccess
from gateway.tenancy import DEFAULT, TENANT_NAME
from ops.errors import ConfigError
from ops.settings import HostSettings, LogSettings
from tiers.paths import Paths
from tiers.settings import TenantLimits, TierSettings

SECTIONS: dict[str, type] = {
    "gateway": GatewaySettings,
    "engine": EngineSettings,
    "tiers": TierSettings,
    "host": HostSettings,
    "log": LogSettings,
}

ENVIRONMENT_PREFIX = "CONCORDIA_"
ENVIRONMENT_SHORT = {"CONCORDIA_API_KEY": "gateway.api_key", "CONCORDIA_API_KEY_FILE": "api_key_file"}
# Read elsewhere or meant for tests; not keys of the configuration.
ENVIRONMENT_OTHER = {"CONCORDIA_CONFIG", "CONCORDIA_URL", "CONCORDIA_STORE_KEYS", "CONCORDIA_STORE_KEY_FILE"}
ENVIRONMENT_FREE = ("CONCORDIA_TEST_", "CONCORDIA_BENCH_")
SECRET_KEYS = {"gateway.api_key"}
TENANTS = "tenants"  # tables of the file, one a tenant
TENANT_KEYS: dict[str, type] = {
    **{field.name: int for field in dataclasses.fields(TenantLimits)},
    **{field.name: str for field in dataclasses.fields(TenantAccess)},
}

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


def default_data_dir(environment: Mapping[str, str]) -> Path:
    """XDG data home, or ~/.local/share."""
    return Path(environment.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "concordia"


def default_model_cache(environment: Mapping[str, str]) -> Path:
    """XDG cache home, or ~/.cache: converted models can be made again."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "concordia" / "models"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be set. A package receives only its own section.

    data_dir      journal, sessions and the store; one running installation each
    lane_dir      lanes and sockets in shared memory; empty: a directory in /dev/shm named after data_dir
    model         name, directory or .gguf file
    model_cache   where pulled and converted models lie
    api_key_file  file whose first line is the API key (used where no key is given)
    """

    data_dir: Path
    model_cache: Path
    lane_dir: str = ""
    model: str = "smollm2"
    api_key_file: str = ""
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    tiers: TierSettings = field(default_factory=TierSettings)
    host: HostSettings = field(default_factory=HostSettings)
    log: LogSettings = field(default_factory=LogSettings)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> Paths:
        """Names of all files of this installation."""
        return Paths.at(self.data_dir, self.lane_dir or None)

    def values(self) -> dict[str, Any]:
        """Every key with its value, in documentation order; then what is set for single tenants."""
        return {key: _get(self, key) for key in all_keys()} | {
            f"{TENANTS}.{name}.{key}": value
            for name in self.tiers.tenants
            for table in (self.tiers.tenants[name], self.gateway.tenants[name])
            for key, value in dataclasses.asdict(table).items()
            if value not in (None, "")
        }

    @property
    def started_engines(self) -> int:
        """Engine processes that run: under the policy `cold` no spare does."""
        if self.gateway.failover != "cold":
            return self.host.engines
        return max(1, self.host.engines - self.gateway.spares)

    # ------------------------------------------------------------ what the processes get

    def engine_json(self, model_dir: Path, model_name: str) -> dict[str, Any]:
        """Resolved settings for nursery, engines and keeper. Holds no secret: it may stand on a command line."""
        return {
            "engine": dataclasses.asdict(self.engine) | {"threads": engine_threads(self.engine, self.started_engines)},
            "tiers": dataclasses.asdict(self.tiers),
            "log": dataclasses.asdict(self.log),
            "data_dir": str(self.paths.data_dir),
            "lane_dir": str(self.paths.lane_dir),
            "model_dir": str(model_dir),
            "model_name": model_name,
        }

    def host_json(self, model_dir: Path, model_name: str) -> dict[str, Any]:
        """The same for the host agent, with its own section."""
        host = dataclasses.asdict(self.host) | {"engines": self.started_engines}
        return self.engine_json(model_dir, model_name) | {"host": host}

    def gateway_json(self, model_dir: Path, model_name: str) -> dict[str, Any]:
        """The same for the gateway. Holds the API key: hand it over by a pipe, not on a command line."""
        return self.engine_json(model_dir, model_name) | {
            "gateway": dataclasses.asdict(self.gateway) | ({"spares": 0} if self.gateway.failover == "cold" else {}),
            "context_tokens": self.engine.context_tokens,
            "adapters": self.engine.adapters,
        }


def engine_threads(engine: EngineSettings, engine_count: int) -> int:
    """Torch threads of one engine: what is set, or the cores shared out among the engines."""
    return engine.threads or max(1, len(os.sched_getaffinity(0)) // engine_count)


# ---------------------------------------------------------------- keys and types


def _hints() -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for name, kind in get_type_hints(Config).items():
        if name in SECTIONS:
            hints |= {f"{name}.{key}": value for key, value in get_type_hints(SECTIONS[name]).items() if key != TENANTS}
        elif name != "sources":
            hints[name] = kind
    return hints


_HINTS = _hints()


def all_keys() -> list[str]:
    """Every key that can be set: `model`, `gateway.port`, ..."""
    return list(_HINTS)


def environment_name(key: str) -> str:
    """`gateway.port` -> CONCORDIA_GATEWAY_PORT; "" for a tenant's, which only the file can say."""
    return "" if key.startswith(f"{TENANTS}.") else ENVIRONMENT_PREFIX + key.replace(".", "_").upper()


def _get(config: Config, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}[kind]


def _convert(key: str, value: Any, where: str) -> Any:
    """Value of TOML, environment or flag -> value of the key's type; text is parsed where it comes from the environment."""
    kind = TENANT_KEYS[key.rpartition(".")[2]] if key.startswith(f"{TENANTS}.") else _HINTS[key]
    converted = _converted(kind, key, value)
    if converted is None:
        said = "what is given" if is_secret(key) else repr(value)
        raise ConfigError(f"{where}: {key} must be {_expected(kind)}, not {said}")
    problem = _problem(key, converted)
    if problem:
        raise ConfigError(
            f"{where}: {key} {problem}" if is_secret(key) else f"{where}: {key} = {converted!r} {problem}"
        )
    return converted


def _converted(kind: Any, key: str, value: Any) -> Any:
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else None
    if kind is Path:
        return Path(os.path.expanduser(value)) if isinstance(value, str | Path) and str(value) else None
    if kind is str:
        return value if isinstance(value, str) else None
    if kind is bool:
        return value if isinstance(value, bool) else _BOOLEANS.get(value.lower()) if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if kind is int:
        return _integer(key, value)
    try:
        return float(value) if math.isfinite(float(value)) else None
    except (ValueError, OverflowError):
        return None


_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _integer(key: str, value: int | float | str) -> int | None:
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if key.endswith("_bytes"):
        match = _SIZE.fullmatch(value.strip())
        size = float(match[1]) * _UNITS[match[2].lower()] if match and match[2].lower() in _UNITS else math.inf
        return int(size) if math.isfinite(size) else None
    try:
        return int(value)
    except ValueError:
        return None


_LEAST = {
    "host.engines": 1,
    "engine.slots": 1,
    "engine.prefill_chunk": 1,
    "tiers.block_tokens": 1,
    "tiers.lane_bytes": 1 << 20,
    "tiers.lane_record_count": 64,
    "tiers.store_map_bytes": 1 << 20,
    "tiers.drain_interval_ms": 1,
    "tiers.sync_interval_ms": 1,
    "host.hang_floor_ms": 50,
    "host.stopped_ms": 10,
    "host.spin_limit_s": 1,
    "host.watch_interval_ms": 1,
    "gateway.max_body_bytes": 1024,
}


def _problem(key: str, value: Any) -> str:
    """What is wrong with a value of the right type; "" if nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = str(value)
        if is_secret(key) and not (text.isascii() and text.isprintable() and text == text.strip()):
            return "has what no HTTP header carries: only printable ASCII, and no blank first or last"
        if key == "engine.device" and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
            return "is not a device: expected auto, cpu, cuda or cuda:N"
        return ""
    if value < _LEAST.get(key, 0):
        return f"is too small: at least {_LEAST.get(key, 0)}"
    if key == "host.silent_limit_s" and 0 < value < 1:
        return "is too small: heartbeats come twice a second; at least 1, or 0 for never"
    if key == "gateway.port" and value > 65535:
        return "is not a port: at most 65535"
    return ""


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}" if len(known) < 20 else ""


def _nearest_variable(name: str, known: Mapping[str, str]) -> str:
    """Compared without the prefix that all share, with the whole rest and with the key's last part (CONCORDIA_PORT)."""
    said = name.removeprefix(ENVIRONMENT_PREFIX)
    names = {variable.removeprefix(ENVIRONMENT_PREFIX): variable for variable in known}
    names |= {key.rpartition(".")[2].upper(): environment_name(key) for key in known.values() if "." in key}
    near = difflib.get_close_matches(said, list(names), n=1, cutoff=0.6)
    if near:
        return f"; did you mean {names[near[0]]}?"
    return "; docs/configuration.md lists all. Unset it, or rename it if it is another program's"


# ---------------------------------------------------------------- the four layers


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    config_file: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Read all layers. `flags` holds the keys given on the command line ({"gateway.port": 9000}); None values don't count.

    Raises ConfigError, whose text names the layer, the key and what was expected.
    """
    environment = os.environ if environment is None else environment
    given_flags = {key: value for key, value in (flags or {}).items() if value is not None}
    values: dict[str, Any] = {
        "data_dir": default_data_dir(environment),
        "model_cache": default_model_cache(environment),
    }
    sources: dict[str, str] = {}

    def take(layer: Mapping[str, tuple[Any, str]]) -> None:
        for key, (value, where) in layer.items():
            values[key] = _convert(key, value, where)
            sources[key] = where

    from_environment = _read_environment(environment)
    from_flags = {key: (value, f"flag {flag_name(key)}") for key, value in given_flags.items()}
    # The data directory decides where the file is looked for, so it must be known before the file is read.
    for layer in (from_environment, from_flags):
        take({key: value for key, value in layer.items() if key == "data_dir"})
    _check_data_dir(values["data_dir"], sources)
    take(_read_file(config_file or environment.get("CONCORDIA_CONFIG"), values["data_dir"]))
    take(from_environment)
    take(from_flags)
    return _check(_assemble(values, sources))


def flag_name(key: str) -> str:
    """`gateway.api_key` -> --api-key."""
    return "--" + key.rpartition(".")[2].replace("_", "-")


def _assemble(values: dict[str, Any], sources: dict[str, str]) -> Config:
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    top: dict[str, Any] = {}
    tenants: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if section.startswith(f"{TENANTS}."):
            tenants.setdefault(section.removeprefix(f"{TENANTS}."), {})[name] = value
        else:
            (sections[section] if section else top)[name] = value
    sections["tiers"][TENANTS] = {name: _part(TenantLimits, table) for name, table in tenants.items()}
    sections["gateway"][TENANTS] = {name: _part(TenantAccess, table) for name, table in tenants.items()}
    built = {name: SECTIONS[name](**section) for name, section in sections.items()}
    said = {key: sources.get(key, "default") for key in [*all_keys(), *(key for key in values if key not in _HINTS)]}
    config = Config(**top, **built, sources=types.MappingProxyType(said))
    return _with_key_files(config)


def _part(form: type[Any], table: dict[str, Any]) -> Any:
    """What a tenant's table says of one of the classes that it is split into."""
    names = {field.name for field in dataclasses.fields(form)}
    return form(**{key: value for key, value in table.items() if key in names})


def _with_key_files(config: Config) -> Config:
    """Keys that lie in files, of the operator and of tenants."""
    gateway, sources = config.gateway, dict(config.sources)
    if config.api_key_file and not gateway.api_key:
        key, sources["gateway.api_key"] = _key_in("api_key_file", config.api_key_file, sources)
        gateway = dataclasses.replace(gateway, api_key=key)
    tenants = dict(gateway.tenants)
    for name, access in gateway.tenants.items():
        if access.api_key_file and not access.api_key:
            table = f"{TENANTS}.{name}"
            key, sources[f"{table}.api_key"] = _key_in(f"{table}.api_key_file", access.api_key_file, sources)
            tenants[name] = dataclasses.replace(access, api_key=key)
    gateway = dataclasses.replace(gateway, tenants=tenants)
    return dataclasses.replace(config, gateway=gateway, sources=types.MappingProxyType(sources))


def _key_in(key: str, file: str, sources: Mapping[str, str]) -> tuple[str, str]:
    """The first line of a key file, and where that comes from. Raises ConfigError."""
    path = Path(os.path.expanduser(file))
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{sources[key]}: {key} {path} can't be read: {error}") from error
    if not lines or not lines[0].strip():
        raise ConfigError(f"{sources[key]}: {key} {path} is empty; its first line must be the key")
    if problem := _problem("gateway.api_key", lines[0].strip()):
        raise ConfigError(f"{sources[key]}: {key} {path}: the key {problem}")
    return lines[0].strip(), f"file {path}"


def _check_data_dir(data_dir: Path, sources: Mapping[str, str]) -> None:
    """Raise ConfigError if a file has that name, or one of a directory above it."""
    with contextlib.suppress(OSError):  # what may not be looked at is the next one's to say
        there = next(path for path in (data_dir, *data_dir.absolute().parents) if path.exists())
        if not there.is_dir():
            what = "it is a file" if there == data_dir else f"{there} is a file"
            where = sources.get("data_dir", "default")
            raise ConfigError(
                f"{where}: {data_dir} can't be the data directory: {what}; name a directory by --data-dir"
            )


def _check(config: Config) -> Config:
    _check_data_dir(config.data_dir, config.sources)
    _check_tenants(config)
    if not is_loopback(config.gateway.host) and not config.gateway.any_key:
        raise ConfigError(
            f"{config.sources['gateway.host']}: gateway.host = {config.gateway.host!r} is reachable from other machines, and no API key "
            "is set; give one by --api-key, CONCORDIA_API_KEY, api_key_file or [tenants.NAME] api_key, or listen on 127.0.0.1"
        )
    return config


def _check_tenants(config: Config) -> None:
    """Whose key it is must follow from the key. Raises ConfigError, which names no key."""
    owners = {config.gateway.api_key: "gateway.api_key"} if config.gateway.api_key else {}
    for name, access in config.gateway.tenants.items():
        key = f"{TENANTS}.{name}.api_key"
        if not access.api_key:
            continue
        if name == DEFAULT:
            raise ConfigError(
                f"{config.sources[key]}: {key}: {DEFAULT} is the operator's namespace; set gateway.api_key"
            )
        if not TENANT_NAME.fullmatch(name):
            hint = "1 to 128 letters, digits or any of . _ : @ -, a letter or digit first"
            raise ConfigError(f"{config.sources[key]}: {key}: a tenant with a key needs another name: {hint}")
        if access.api_key in owners:
            raise ConfigError(
                f"{config.sources[key]}: {key} is the key of {owners[access.api_key]} too; give each its own"
            )
        owners[access.api_key] = key


def _read_environment(environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    known = {environment_name(key): key for key in all_keys()} | ENVIRONMENT_SHORT
    layer = {}
    for name in sorted(environment, key=lambda name: name in ENVIRONMENT_SHORT):  # the short names win
        if not name.startswith(ENVIRONMENT_PREFIX) or name in ENVIRONMENT_OTHER or name.startswith(ENVIRONMENT_FREE):
            continue
        if name not in known:
            raise ConfigError(f"environment: {name} is no known variable{_nearest_variable(name, known)}")
        layer[known[name]] = (environment[name], f"environment {name}")
    return layer


def _read_file(path: str | os.PathLike[str] | None, data_dir: Path) -> dict[str, tuple[Any, str]]:
    file = Path(path) if path else data_dir / "concordia.toml"
    try:
        document = tomllib.loads(file.read_text())
    except FileNotFoundError as error:
        if path:
            raise ConfigError(f"{file}: no such file") from error
        return {}
    except PermissionError as error:
        hint = "run this as the user whom the data directory belongs to, or name another one by --data-dir"
        raise ConfigError(f"{file}: no permission to look for it; {hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: can't be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not TOML: {error}") from error
    layer: dict[str, tuple[Any, str]] = {}
    for name, value in document.items():
        if name == TENANTS:
            layer |= {key: (inner, f"file {file}") for key, inner in _tenant_keys(value, file).items()}
        elif name in SECTIONS:
            if not isinstance(value, dict):
                raise ConfigError(f"{file}: {name} is a section; write [{name}] and its keys below")
            for key, inner in value.items():
                layer[_known(f"{name}.{key}", file)] = (inner, f"file {file}")
        else:
            layer[_known(name, file)] = (value, f"file {file}")
    if "data_dir" in layer and not path:
        raise ConfigError(
            f"{file}: this file was found by data_dir, so it can't set it; use --data-dir or CONCORDIA_DATA_DIR"
        )
    return layer


def _tenant_keys(tables: Any, file: Path) -> dict[str, Any]:
    """What the tables `[tenants.NAME]` say, as `tenants.NAME.key`. Raises ConfigError."""
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{file}: {TENANTS} holds tables; write [{TENANTS}.NAME] and its keys below")
    found = {}
    for name, table in tables.items():
        for key, value in table.items():
            if key not in TENANT_KEYS:
                raise ConfigError(f"{file}: unknown key {TENANTS}.{name}.{key}{_nearest(key, list(TENANT_KEYS))}")
            found[f"{TENANTS}.{name}.{key}"] = value
    return found


def _known(key: str, file: Path) -> str:
    if key in _HINTS:
        return key
    raise ConfigError(f"{file}: unknown key {key}{_nearest(key, [*all_keys(), *SECTIONS, TENANTS])}")


# ---------------------------------------------------------------- showing


def is_secret(key: str) -> bool:
    """Its value is never shown: the operator's key, or a tenant's."""
    return key in SECRET_KEYS or (key.startswith(f"{TENANTS}.") and key.endswith(".api_key"))


def shown_value(key: str, value: Any) -> str:
    """A value as `concordia config` shows it; secrets are only said to be set."""
    if is_secret(key):
        return "(set)" if value else ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_json(config: Config, resolved: Mapping[str, Any] = types.MappingProxyType({})) -> str:
    """`concordia config --json`: {key: {"value", "source", "environment"}}, with "resolved" where the machine decides."""
    shown = {
        key: {
            "value": shown_value(key, value) if is_secret(key) or isinstance(value, Path) else value,
            "source": config.sources[key],
            "environment": environment_name(key) or None,
            **({"resolved": resolved[key]} if key in resolved else {}),
        }
        for key, value in config.values().items()
    }
    return json.dumps(shown, indent=2)
