"""Where everything of one installation lies: the data directory (disk) and the lane directory (shared memory).

Pure names, used by every process. The only function that touches the file system is `make`. Sockets live in the lane
directory because a unix socket's path may be 107 bytes at most, and a data directory's may be longer.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SOCKET_PATH_BYTES = 107  # unix(7)


@dataclass(frozen=True, slots=True)
class Paths:
    """Names of all files of one installation. Several installations differ in `data_dir`, and so in `lane_dir`."""

    data_dir: Path
    lane_dir: Path

    @classmethod
    def at(cls, data_dir: str | os.PathLike[str], lane_dir: str | os.PathLike[str] | None = None) -> Paths:
        """Paths of the installation at `data_dir`; lanes in /dev/shm under a name made from it unless `lane_dir` is given."""
        data = Path(os.path.realpath(data_dir))
        if lane_dir:
            return cls(data, Path(os.path.realpath(lane_dir)))
        digest = hashlib.blake2b(os.fsencode(data)).hexdigest()[:12]
        return cls(data, SHARED_MEMORY / f"concordia-{os.getuid()}-{digest}")

    def make(self) -> Paths:
        """Create the directories that are missing, readable by this user only, and return self. The lane directory says whose it is."""
        for directory in (self.data_dir, self.lane_dir, self.journal_dir, self.store, self.sessions):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = os.fsencode(self.data_dir)
        if not self.owner.exists() or self.owner.read_bytes() != name:
            self.owner.write_bytes(name)
        return self

    # ------------------------------------------------------------ on disk

    @property
    def config(self) -> Path:
        return self.data_dir / "concordia.toml"

    @property
    def store(self) -> Path:
        """Directory of the tier-2 LMDB."""
        return self.data_dir / "store"

    @property
    def sessions(self) -> Path:
        """Directory of the gateway's LMDB."""
        return self.data_dir / "sessions"

    @property
    def journal_dir(self) -> Path:
        return self.data_dir / "journal"

    def journal(self, stream: str) -> Path:
        return self.journal_dir / f"{stream}.journal"

    @property
    def serve_lock(self) -> Path:
        return self.data_dir / "serve.lock"

    @property
    def serve_settings(self) -> Path:
        """JSON {key: value as shown} of a running `serve`."""
        return self.data_dir / "serve.json"

    # ------------------------------------------------------------ in shared memory

    def lane(self, engine: str) -> Path:
        return self.lane_dir / f"{engine}.lane"

    def status(self, engine: str) -> Path:
        return self.lane_dir / f"{engine}.status"

    def engine_socket(self, engine: str) -> Path:
        return self.lane_dir / f"{engine}.sock"

    @property
    def longest_socket_bytes(self) -> int:
        """Length of the longest path of a socket; more than SOCKET_PATH_BYTES can't be."""
        return max(len(os.fsencode(path)) for path in (self.nursery_socket, self.engine_socket("e000")))

    @property
    def host_socket(self) -> Path:
        return self.lane_dir / "host.sock"

    @property
    def keeper_socket(self) -> Path:
        return self.lane_dir / "keeper.sock"

    @property
    def nursery_socket(self) -> Path:
        return self.lane_dir / "nursery.sock"

    @property
    def host_lock(self) -> Path:
        return self.lane_dir / "host.lock"

    @property
    def owner(self) -> Path:
        """Names the data directory that the lane directory belongs to."""
        return self.lane_dir / "owner"

    @property
    def gateway_url(self) -> Path:
        """Where the gateway of a running `serve` listens, for commands that are told only the data directory."""
        return self.lane_dir / "gateway.url"

    def pid_file(self, name: str) -> Path:
        """JSON {pid, start_ticks, incarnation} of the process `name` (e0, keeper, nursery, host, gateway)."""
        return self.lane_dir / f"{name}.pid"

    def beat(self, name: str) -> Path:
        """Heartbeat of the process `name` (any but an engine); tiers/heartbeat.py."""
        return self.lane_dir / f"{name}.beat"
