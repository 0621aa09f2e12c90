"""`concordia doctor`: what this machine allows, measured, and what to change. Reads only, but for files without a name, gone with it.

Each check is a function from the configuration to a finding: `ok`, `advice` (it works, but slower or less safely) or `problem` (something
that is set can't work). Runs in the command's process; imports no torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import resource
import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click

from ops import cuda_lane
from ops.config import Config
from ops.errors import OpsError
from ops.flags import print_json
from ops.show import Bar, console, size, table
from ops.verify import SEALED_BY
from tiers import keeper_client
from tiers.errors import TierError
from tiers.huge_pages import can_collapse
from tiers.keys import BadKeys, Keyring, Locked
from tiers.lane_format import data_offset
from tiers.late_keys import count_open, is_unscrubbed
from tiers.lock import is_held
from tiers.paths import SHARED_MEMORY, SOCKET_PATH_BYTES, Paths
from tiers.store_file import FREE_DISK_RESERVE_BYTES
from tiers.view import StoreReader

WRITE_BYTES = (4 << 10, 1 << 20)
WRITE_COUNT = 12
MARKS = {"ok": "[green]ok[/]", "advice": "[yellow]advice[/]", "problem": "[red]problem[/]"}


@dataclass(frozen=True, slots=True)
class Check:
    """One line. level: ok, advice or problem; advice says what to change, "" if nothing."""

    name: str
    level: str
    found: str
    advice: str = ""


def run(config: Config, as_json: bool) -> None:
    """Print all checks. Raises OpsError if there is a problem."""
    checks: list[Check] = []
    with Bar("measuring", quiet=as_json) as bar:
        for done, look in enumerate(CHECKS):
            bar(done, len(CHECKS))
            checks.append(look(config))
    problems = [check for check in checks if check.level == "problem"]
    if as_json:
        print_json({"ok": not problems, "checks": [asdict(check) for check in checks]})
    else:
        console.print(table("", ("", "", "found"), [(c.name, MARKS[c.level], c.found) for c in checks]))
        for check in checks:
            if check.advice:
                click.echo(f"\n{check.name}: {check.advice}")
    if problems:
        raise OpsError(
            f"{len(problems)} of these keep Concordia from working as it is set: {', '.join(c.name for c in problems)}"
        )


# ---------------------------------------------------------------- memory


def lane_total_bytes(config: Config) -> int:
    """What the lanes of all engines take."""
    return config.host.engines * (data_offset(config.tiers.lane_record_count) + config.tiers.lane_bytes)


def shared_memory(config: Config) -> Check:
    """Room for the lanes where they lie; those that are there already count as room."""
    directory = _existing(config.paths.lane_dir)
    usage = os.statvfs(directory)
    total, free = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
    have = sum(_taken_bytes(path) for path in config.paths.lane_dir.glob("*.lane"))
    need = lane_total_bytes(config)
    where = f"{directory}: {size(free)} of {size(total)} free, lanes need {size(need)}"
    if need > free + have:
        advice = (
            "an engine could not allocate its lane. Make it larger (`mount -o remount,size=…  /dev/shm`, docker: `--shm-size`), lower "
            f"tiers.lane_bytes ({config.tiers.lane_bytes}) or host.engines, or set lane_dir to another tmpfs or DAX file system"
        )
        return Check("shared memory", "problem", where, advice)
    if not directory.is_relative_to(SHARED_MEMORY) and _filesystem(directory) not in ("tmpfs", "ramfs", "hugetlbfs"):
        advice = f"lanes lie on {_filesystem(directory)}, not in shared memory: fine on DAX, slow on a disk"
        return Check("shared memory", "advice", where, advice)
    return Check("shared memory", "ok", where)


def left_behind(config: Config, shared: Path = SHARED_MEMORY) -> Check:
    """Lane directories of installations that are gone, such as those of killed test runs: shared memory that nobody gives back."""
    gone: list[Path] = []
    unnamed: list[Path] = []
    for path in sorted(shared.glob("concordia-*")):
        with contextlib.suppress(OSError):  # it is removed at this moment
            if path == config.paths.lane_dir or not path.is_dir() or path.stat().st_uid != os.getuid():
                continue
            if any(is_held(file) for file in path.glob("*")):
                continue
            owner = Paths(config.paths.data_dir, path).owner
            if not owner.exists():
                unnamed.append(path)
            elif not Path(os.fsdecode(owner.read_bytes())).is_dir():
                gone.append(path)
    if not gone and not unnamed:
        return Check("left behind", "ok", "no lane directory of an installation that is gone")
    taken = sum(_taken_bytes(file) for path in (*gone, *unnamed) for file in path.glob("*"))
    found = f"{len(gone) + len(unnamed)} lane directories that nobody uses, {size(taken)}"
    advice = []
    if gone:
        advice.append(
            "the data directories of these are gone (or on a disk that isn't mounted), so nothing can use what they hold: "
            f"`rm -r {shlex.join(map(str, gone))}`"
        )
    if unnamed:
        advice.append(
            "these don't say whose they are, and no process holds them; unless they belong to an installation that is stopped "
            f"(`concordia config` shows its lane directory): `rm -r {shlex.join(map(str, unnamed))}`"
        )
    return Check("left behind", "advice", found, "\n".join(advice))


def _taken_bytes(file: Path) -> int:
    try:
        return file.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def memlock(config: Config) -> Check:
    """Pinned memory: tier 0 and lanes that a GPU writes into."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else size(soft)
    need = lane_total_bytes(config) // max(1, config.host.engines)
    if soft != resource.RLIM_INFINITY and soft < need and cuda_lane.device_count() > 0:
        advice = (
            f"a lane of {size(need)} can't be pinned, so copies from the GPU take one more step. `ulimit -l unlimited`, "
            "LimitMEMLOCK=infinity in a systemd unit, or docker `--ulimit memlock=-1`"
        )
        return Check("memlock", "advice", shown, advice)
    return Check("memlock", "ok", shown)


def memory(config: Config) -> Check:
    """Memory of this machine or container, and swap: a swapped arena stops an engine for long."""
    info = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    kilobytes = {key: int(value.split()[0]) for key, value in info.items() if value.split()}
    total, available, swap = (1024 * kilobytes[key] for key in ("MemTotal", "MemAvailable", "SwapTotal"))
    limit = _cgroup_limit()
    found = f"{size(available)} of {size(total)} available, swap {size(swap)}"
    if limit and limit < total:
        found += f", this container may use {size(limit)}"
    need = lane_total_bytes(config)
    if need > min(total, limit or total) / 2:
        return Check(
            "memory", "advice", found, f"lanes alone take {size(need)}; lower tiers.lane_bytes or host.engines"
        )
    return Check("memory", "ok", found)


def huge_pages(config: Config) -> Check:
    """Whether lanes can lie in pages of 2 MB: copies into them are a tenth faster."""
    try:
        found = can_collapse(_existing(config.paths.lane_dir))
    except OSError as error:
        return Check("huge pages", "ok", f"can't be tried: {error.strerror or error}")
    if found:
        return Check("huge pages", "ok", "new lanes lie in pages of 2 MB")
    reason = "the lane directory isn't in shared memory, the kernel is older than 6.1, or shmem_enabled is `deny`"
    return Check("huge pages", "ok", f"lanes have pages of 4 KB: {reason}")


def dax_devices(config: Config) -> Check:
    """CXL or persistent memory that lanes could use."""
    devices = sorted(path.name for path in Path("/dev").glob("dax*"))
    mounts = [
        line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if "dax" in line.split()[3].split(",")
    ]
    if not devices and not mounts:
        return Check("DAX", "ok", "no /dev/dax* and no file system mounted with dax: lanes are in shared memory")
    found = ", ".join([*(f"/dev/{name}" for name in devices), *(f"{mount} (dax)" for mount in mounts)])
    blocked = [name for name in devices if not os.access(f"/dev/{name}", os.R_OK | os.W_OK)]
    if blocked:
        advice = f"no access to /dev/{blocked[0]}; give this user read and write access to use it for lanes"
        return Check("DAX", "advice", found, advice)
    return Check("DAX", "ok", found)


# ---------------------------------------------------------------- disk


def disk_room(config: Config) -> Check:
    """Free space and kind of the file system that holds the store."""
    directory = _existing(config.paths.data_dir)
    usage = os.statvfs(directory)
    free, kind = usage.f_bavail * usage.f_frsize, _filesystem(directory)
    found = f"{directory} ({kind}): {size(free)} free"
    if free < FREE_DISK_RESERVE_BYTES:
        advice = f"below {size(FREE_DISK_RESERVE_BYTES)} nothing more is stored; answers go on, not durable. Free some, or move --data-dir"
        return Check("disk room", "problem", found, advice)
    if kind in ("tmpfs", "ramfs"):
        return Check(
            "disk room", "advice", found, f"{kind} does not survive the machine; choose a --data-dir on a disk"
        )
    if kind in ("nfs", "nfs4", "cifs", "fuse.sshfs", "9p"):
        return Check(
            "disk room", "problem", found, "LMDB does not work on network file systems; choose a local --data-dir"
        )
    return Check("disk room", "ok", found)


def store_readers(config: Config) -> Check:
    """Who holds a snapshot of the store, if a keeper runs that can tell."""
    try:
        stats = keeper_client.stats(config.paths.keeper_socket, timeout_s=2.0)
    except TierError:
        return Check("store readers", "ok", "no keeper runs")
    rows = stats.get("snapshots", [])
    if not rows:
        return Check("store readers", "ok", "none")
    oldest = rows[0]
    found = f"{len(rows)}, the oldest pid {oldest['pid']} for {oldest['age_s']:.0f} s, {oldest['commits_behind']} commits behind"
    if oldest["pid"] in stats.get("snapshots_held", []):
        advice = (
            f"process {oldest['pid']} is stopped or stuck in the middle of a read, so the store's file grows; end it. Once it has grown "
            "by a quarter the keeper leaves it to that process and goes on with a copy"
        )
        return Check("store readers", "advice", found, advice)
    return Check("store readers", "ok", found)


def encryption(config: Config) -> Check:
    """Keys of tenants: what is sealed for want of one, and what is stored openly though there is one."""
    try:
        keys = Keyring.from_environment()
    except BadKeys as error:
        return Check("encryption", "problem", "the keys can't be read", str(error))
    found = "for tenants with a key" if keys else "off: no tenant has a key"
    if not (config.paths.store / "data.mdb").exists():
        return Check("encryption", "ok", found)
    store = StoreReader(config.paths.store, map_bytes=config.tiers.store_map_bytes, keys=keys)
    try:
        with store.snapshot() as view:
            missing = sorted({t.namespace for _, t in view.tenants() if t.sealed and not keys.has(t.namespace)})
            count, unscrubbed = count_open(view), bool(keys) and is_unscrubbed(view)
    except TierError as error:
        return Check("encryption", "ok", f"{found}; the store can't be read: {error.reason}")
    finally:
        store.close()
    advice = []
    if missing:
        advice.append(
            f"{', '.join(missing)}: sealed with keys that are not given here, so nothing of them can be restored. {Locked.hint}"
        )
    if count:
        advice.append(f"{count} values were stored before their tenant had a key, and can be read: {SEALED_BY}")
    elif unscrubbed:
        advice.append(
            "pages that are free now may still hold what was stored before there was a key: `concordia compact --shrink`"
        )
    return Check("encryption", "advice" if advice else "ok", found, "\n".join(advice))


def disk_sync(config: Config) -> Check:
    """How fast fdatasync is, at 4 KB and at 1 MB: it bounds durability = turn and the drain."""
    directory = _existing(config.paths.data_dir)
    try:
        times = _sync_times(directory)
    except OSError as error:
        return Check(
            "disk sync", "problem", f"{directory}: {error.strerror or error}", "the data directory must be writable"
        )
    small, large = (median(times[count]) for count in WRITE_BYTES)
    found = f"{1000 * small:.1f} ms for 4 KB, {1000 * large:.1f} ms for 1 MB ({size(WRITE_BYTES[1] / large)}/s)"
    if config.tiers.durability == "turn" and small > 0.05:
        return Check(
            "disk sync",
            "advice",
            found,
            "durability = turn waits for this at the end of every answer; interval does not",
        )
    if WRITE_BYTES[1] / large < 20e6:
        return Check(
            "disk sync", "advice", found, "the drain will lag behind a busy engine; use a faster disk for --data-dir"
        )
    return Check("disk sync", "ok", found)


def _sync_times(directory: Path) -> dict[int, list[float]]:
    """Seconds of write + fdatasync by size, appended to one temporary file, which a killed doctor doesn't leave: it has no name."""
    times: dict[int, list[float]] = {}
    with tempfile.TemporaryFile(dir=directory, buffering=0) as opened:
        file = opened.fileno()
        for count in WRITE_BYTES:
            data = os.urandom(count)
            for _ in range(WRITE_COUNT):
                started = time.perf_counter()
                os.write(file, data)
                os.fdatasync(file)
                times.setdefault(count, []).append(time.perf_counter() - started)
    return times


def map_size(config: Config) -> Check:
    """Address space for the store's map."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    wanted = config.tiers.store_map_bytes
    if soft != resource.RLIM_INFINITY and soft < 2 * wanted:
        advice = f"the store's map takes {size(wanted)} of addresses, not of memory: `ulimit -v unlimited`, or lower tiers.store_map_bytes"
        return Check("address space", "problem", size(soft), advice)
    return Check("address space", "ok", "unlimited" if soft == resource.RLIM_INFINITY else size(soft))


# ---------------------------------------------------------------- system


def kernel(config: Config) -> Check:
    """What is leant on: pidfd (5.3), MADV_POPULATE_READ (5.14), little-endian x86-64 or arm64."""
    release = platform.release()
    version = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    found = f"Linux {release} on {platform.machine()}"
    if version < (5, 3) or not hasattr(os, "pidfd_open"):
        return Check("kernel", "problem", found, "pidfd_open is needed: Linux 5.3 or newer")
    if version < (5, 14):
        return Check(
            "kernel",
            "advice",
            found,
            "cold restores are two to three times faster with MADV_POPULATE_READ: Linux 5.14 or newer",
        )
    return Check("kernel", "ok", found)


def open_files(config: Config) -> Check:
    """A live stream takes a socket and a journal."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 2 * config.gateway.max_waiting + 256
    shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    if hard != resource.RLIM_INFINITY and hard < need:
        return Check(
            "open files",
            "advice",
            shown,
            f"enough for {hard // 2} streams at once; `ulimit -Hn {need}` for gateway.max_waiting",
        )
    return Check("open files", "ok", shown)


def socket_paths(config: Config) -> Check:
    """A unix socket's path may have 107 bytes."""
    longest = config.paths.longest_socket_bytes
    found = f"{longest} of {SOCKET_PATH_BYTES} bytes"
    if longest > SOCKET_PATH_BYTES:
        return Check(
            "socket paths",
            "problem",
            found,
            f"lane_dir {config.paths.lane_dir} is too long; choose a shorter --lane-dir",
        )
    return Check("socket paths", "ok", found)


def cuda(config: Config) -> Check:
    """The driver's own count of devices; torch is not asked."""
    count = cuda_lane.device_count()
    found = "no CUDA driver" if count < 0 else f"{count} device{'s' if count != 1 else ''}"
    if count <= 0 and config.engine.device.startswith("cuda"):
        advice = f"engine.device is {config.engine.device}: install the driver, start the container with GPUs, or use --device cpu"
        return Check("CUDA", "problem", found, advice)
    return Check("CUDA", "ok", found)


def handlers(config: Config) -> Check:
    """What an engine on a GPU captures with: CuPy, and a processor that the persistent executor can be driven from."""
    launch, machine = config.engine.capture_launch, platform.machine()
    if not (config.engine.device.startswith("cuda") or cuda_lane.device_count() > 0):
        return Check("capture on a GPU", "ok", "no GPU is used")
    if launch == "copy":
        return Check("capture on a GPU", "ok", "by the framework's copies, as engine.capture_launch says")
    if importlib.util.find_spec("cupy") is None:
        advice = "the framework copies rows, a group at a time; `pip install 'concordia[cuda]'` (CUDA 13: cupy-cuda13x) brings handlers"
        return Check("capture on a GPU", "advice", "CuPy is not installed", advice)
    if machine not in ("x86_64", "AMD64"):
        found = f"by handlers, without the persistent executor on {machine}"
        why = "its ring is published by stores in program order, which only x86-64 keeps"
        if launch == "executor":
            return Check(
                "capture on a GPU",
                "problem",
                found,
                f"engine.capture_launch is executor: {why}; set auto, stream or graph",
            )
        return Check("capture on a GPU", "ok", f"{found} ({why})")
    return Check("capture on a GPU", "ok", f"by handlers, launched by {launch}")


def lane_in_place(config: Config) -> Check:
    """Whether the device's handlers can write into the lanes themselves: the driver tries it."""
    name, device = "lanes written by a GPU", config.engine.device
    if not (device.startswith("cuda") or cuda_lane.device_count() > 0) or config.engine.capture_launch == "copy":
        return Check(name, "ok", "no handler writes into them")
    index = int(device.partition(":")[2] or 0) if device.startswith("cuda") else 0
    reason = cuda_lane.why_not(_existing(config.paths.lane_dir), index)
    if not reason:
        return Check(name, "ok", "in place, registered with CUDA")
    advice = f"they cannot be registered with CUDA ({reason}); rows go through pinned memory, one copy more"
    return Check(name, "advice", "through tier 0", advice)


def cores(config: Config) -> Check:
    """Engines, gateway and keeper want a core each."""
    count = len(os.sched_getaffinity(0))
    found = f"{count} cores for {config.host.engines} engines, gateway and keeper"
    busy = max(1, config.host.engines - config.gateway.spares)
    if count < busy + 1:
        return Check("cores", "advice", found, "engines will wait for each other; fewer --engines, or more cores")
    return Check("cores", "ok", found)


CHECKS: tuple[Callable[[Config], Check], ...] = (
    kernel, cores, memory, shared_memory, left_behind, huge_pages, memlock, dax_devices, disk_room, disk_sync, store_readers, encryption,
    map_size, open_files, socket_paths, cuda, handlers, lane_in_place,
)  # fmt: skip


def _existing(path: Path) -> Path:
    """The nearest directory above that is there."""
    while not path.is_dir():
        path = path.parent
    return path


def _filesystem(path: Path) -> str:
    """Type of the file system that holds `path`, from /proc/mounts."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        mount = mount.replace("\\040", " ")
        if path.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def _cgroup_limit() -> int:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < 1 << 60 else 0
    return 0
