"""Which installation a command is about, and who runs it now: its gateway, its keeper, or nobody. Runs in the command's process.

The data directory decides. A command that is told only an address takes the data directory of the gateway that answers there.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import lmdb

from gateway.sealing import Sealing
from gateway.sessions import SessionFile
from gateway.table_file import MAP_BYTES
from ops.client import Client, base_url
from ops.config import Config
from ops.errors import BadData, NotRunning, OpsError, StateRefused
from ops.processes import FileLock
from tiers import keeper_client
from tiers.errors import BadBlock, KeeperAway, OverBudget, StoreFailed
from tiers.keys import Keyring
from tiers.lock import is_held
from tiers.offline import owned, recover, waiting
from tiers.paths import Paths
from tiers.salvage import is_walkable

DRAIN_TIMEOUT_S = 120.0
SESSIONS_HINT = (
    "Restore a backup; or move that directory away, and every session begins anew, its state is found by its tokens"
)


_walked: set[tuple[str, int, int, int]] = set()  # files of sessions that were read to their end


def gateway_url(config: Config) -> str:
    """Where the gateway listens, or did: as set by flag or environment, else what `serve` of this data directory last said."""
    told = config.sources["gateway.port"].startswith(("flag", "environment"))
    if not told:
        with contextlib.suppress(OSError):
            return config.paths.gateway_url.read_text().strip()
    return base_url(config)


@dataclass(frozen=True, slots=True)
class Installation:
    """One data directory and what runs on it.

    asked    address at which a gateway was looked for
    gateway  None: none answers, or the one that does serves another data directory (then `foreign…` is about that)
    owner    `keeper`, `host agent` or "" (nobody: a command may take the keeper's place)
    """

    config: Config
    paths: Paths
    asked: str
    gateway: Client | None
    engines: tuple[dict[str, Any], ...]
    owner: str
    served_roots: dict[str, dict[str, Any]] = field(default_factory=dict)
    foreign: str = ""
    foreign_gateway: Client | None = None
    foreign_engines: tuple[dict[str, Any], ...] = ()
    foreign_paths: Paths | None = None

    @property
    def roots(self) -> dict[str, dict[str, Any]]:
        """Fingerprints (hex) that engines serve now, those of adapters included, with model, dtype and adapter."""
        return self.served_roots or {row["root"]: row for row in self.engines if row.get("root")}

    def need_gateway(self, what: str) -> Client:
        """The gateway. Raises NotRunning."""
        if self.gateway is None:
            found = (
                f"the one at {self.asked} serves {self.foreign}" if self.foreign else f"none answers at {self.asked}"
            )
            if not self.foreign and not self.paths.data_dir.is_dir():
                found += "; there is no such data directory either: name the installation by --data-dir or --url"
            raise NotRunning(f"{what} needs the gateway of {self.paths.data_dir}, and {found}")
        return self.gateway

    def drained(self) -> bool:
        """Have the keeper bring the lanes' records to the disk; False if nobody runs. Raises StateRefused."""
        if not self.owner:
            return False
        try:
            keeper_client.drain(self.paths.keeper_socket, sync=True, timeout_s=DRAIN_TIMEOUT_S)
        except KeeperAway as error:
            raise StateRefused(f"a {self.owner} owns {self.paths.data_dir}, but does not answer: {error}") from error
        return True


def find(config: Config, url: str | None = None) -> Installation:
    """Look who is there. Raises ApiError if the gateway wants a key."""
    paths = config.paths
    gateway: Client | None = None
    engines: tuple[dict[str, Any], ...] = ()
    roots: dict[str, dict[str, Any]] = {}
    client = Client(url or gateway_url(config), config.gateway.api_key)
    with contextlib.suppress(NotRunning):
        answer = client.get("/admin/engines")
        engines = tuple(answer if isinstance(answer, list) else answer.get("data", ()))
        roots = {} if isinstance(answer, list) else answer.get("roots", {})
        served = "" if isinstance(answer, list) else str(answer.get("data_dir", ""))
        if served == str(paths.data_dir) or not served:
            gateway = client
        elif config.sources["data_dir"] == "default" and Path(served).is_dir():
            gateway, paths = client, Paths(Path(served), Path(answer["lane_dir"]))
        else:
            elsewhere = Paths(Path(served), Path(answer["lane_dir"]))
            return Installation(
                config, paths, client.url, None, (), owned(paths), {}, served, client, engines, elsewhere
            )
    return Installation(config, paths, client.url, gateway, engines, owned(paths), roots)


def drain_what_can_be(here: Installation) -> None:
    """Lanes to disk, by the keeper or in its place; what there is no room for stays in them, and that is said. Raises StateRefused."""
    try:
        if not here.drained() and any(waiting(here.paths).values()):
            recover(here.paths, here.config.tiers)
    except (StoreFailed, OverBudget) as error:
        click.echo(f"what waits in the lanes is left out: {error.reason}", err=True)


def need_data(here: Installation) -> None:
    """Raise StateRefused if there is no data directory."""
    need_directory(here.paths)


def need_directory(paths: Paths) -> None:
    """Raise StateRefused if there is no data directory."""
    if not paths.data_dir.is_dir():
        raise StateRefused(f"there is no data directory {paths.data_dir}; name the installation by --data-dir")


def need_whole_sessions(paths: Paths) -> None:
    """Raise BadData if the file of sessions can't be read to its end: who maps it may die of it. Not asked while it is served."""
    data = paths.sessions / "data.mdb"
    if not data.exists() or is_held(paths.serve_lock):
        return
    now = data.stat()
    seen = (str(data), now.st_ino, now.st_size, now.st_mtime_ns)
    if seen in _walked:
        return
    if is_walkable(paths.sessions, map_bytes=MAP_BYTES):
        _walked.add(seen)
    else:
        raise BadData(
            f"{paths.sessions} can't be read to its end, it was cut or its pages are damaged. {SESSIONS_HINT}"
        )


@contextlib.contextmanager
def session_file(here: Installation, *, writable: bool = False) -> Iterator[SessionFile]:
    """The sessions on disk; writable only while no `serve` runs. Raises AlreadyRunning, BadData (the file is damaged), OpsError."""
    need_whole_sessions(here.paths)
    lock = FileLock(here.paths.serve_lock).take("this data directory is being served") if writable else None
    try:
        file = SessionFile(here.paths.sessions, writable=writable, sealing=Sealing(Keyring.from_environment()))
        try:
            yield file
        finally:
            file.close()
    except BadBlock as error:  # one record, or a block of what it names: it says so, and what helps
        raise BadData(str(error)) from error
    except lmdb.Error as error:
        if getattr(error, "code", 0) in (errno.EIO, errno.ENOSPC, errno.EDQUOT):  # of a write: what is read is mapped
            raise OpsError(
                f"{here.paths.sessions} can't be written: {error}. Free some room on that disk, and run it again"
            ) from error
        raise BadData(f"{here.paths.sessions} can't be used: {error}. {SESSIONS_HINT}") from error
    finally:
        if lock is not None:
            lock.release()
