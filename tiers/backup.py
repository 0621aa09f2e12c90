"""A whole installation's durable files, copied while it serves, and put back: `concordia backup` and `concordia restore`.

A backup is a directory: `store/` and `sessions/` as LMDB copies of one moment each (compacted, without free pages), journals, adapters,
and MANIFEST.json with size and digest of every file and of itself. It has its name only once it is whole. Runs in the command's
process and only reads the installation; a store that is being written is copied by its keeper, in slices, so that no snapshot is held.
State is a cache of the token lists, so copies of slightly different moments fit together. Source: docs/log-format.md, "Backup".
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import structlog
from xxhash import xxh3_128, xxh3_128_hexdigest

from tiers import keeper_client
from tiers.errors import BadFile, OtherFormat, StoreFailed
from tiers.lock import hold, is_held
from tiers.paths import Paths
from tiers.store_file import hint_of, opening, sync_file
from tiers.whole_file import refuse_short

FORMAT = "concordia-backup"
VERSION = 1
MANIFEST = "MANIFEST.json"
CHUNK_BYTES = 1 << 20
LOCK = ".lock"  # of who makes a backup, in it until it has its name
DRAFT, MOVED = ".restore", "moved.json"  # where a restore is made, and what of it is in its place
PARTS = ("store", "sessions", "journal", "adapters")
log = structlog.get_logger()

Progress = Callable[[str, int, int], None]


def _silent(what: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """One file of a backup: path in it, size, xxh3 128-bit digest in hex."""

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class BackupManifest:
    """What a backup holds. created: unix time; about: what the installation said of itself."""

    created: int
    files: list[CopiedFile]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def name(self) -> str:
        """What no other backup has."""
        return _digest_of(asdict(self))

    def encoded(self) -> bytes:
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**body, "digest": _digest_of(body)}, indent=1).encode()


def _digest_of(body: dict[str, Any]) -> str:
    return xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


# ---------------------------------------------------------------- backup


def backup(
    paths: Paths,
    target: Path,
    *,
    about: dict[str, Any],
    map_bytes: int,
    progress: Progress = _silent,
    limit_mb_s: float = 0.0,
) -> BackupManifest:
    """Copy everything durable to the new directory `target`. Drain the lanes before, to have what they hold.

    limit_mb_s  of reading; 0: as fast as it goes
    Raises      TierError (a database can't be copied), FileBusy (another backup is made there), FileExistsError (it is there already),
                OSError (the target: full, or not writable)
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    draft = target.with_name(target.name + ".part")
    draft.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = hold(draft / LOCK)
    try:
        _empty(draft)
        manifest = _fill(paths, draft, about, map_bytes, progress, limit_mb_s)
        draft.rename(target)
        (target / LOCK).unlink()
        sync_file(target)
        sync_file(target.parent)
    finally:
        os.close(lock)
    return manifest


def _empty(draft: Path) -> None:
    """Remove what an unfinished backup has left, but its lock."""
    for path in draft.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK:
            path.unlink()


def _fill(
    paths: Paths, draft: Path, about: dict[str, Any], map_bytes: int, progress: Progress, limit_mb_s: float
) -> BackupManifest:
    """Everything durable, synced, and the manifest of it."""
    rate = Rate(limit_mb_s)
    for name, source in (("store", paths.store), ("sessions", paths.sessions)):
        if not (source / "data.mdb").exists():
            continue
        if name == "store" and is_held(source / "keeper.lock"):
            _have_copied(paths, draft / name, limit_mb_s, partial(progress, name))
        else:
            (draft / name).mkdir(mode=0o700)
            copy_lmdb(
                source, draft / name, map_bytes=map_bytes, is_store=name == "store", progress=partial(progress, name),
                rate=rate,
            )  # fmt: skip
    _copy_journals(paths, draft, progress, rate)
    if (paths.data_dir / "adapters").exists():
        shutil.copytree(paths.data_dir / "adapters", draft / "adapters", ignore=shutil.ignore_patterns(".*"))
    if paths.config.exists():
        shutil.copyfile(paths.config, draft / paths.config.name)
    files = [_described(draft, path) for path in _files(draft)]
    manifest = BackupManifest(int(time.time()), files, about)
    _write_synced(draft / MANIFEST, manifest.encoded())
    _sync_tree(draft)
    return manifest


class Rate:
    """Keeps what passes below a speed. `limit_mb_s` 0: no bound."""

    def __init__(self, limit_mb_s: float = 0.0) -> None:
        self._limit_bytes_s = 1e6 * limit_mb_s
        self._began, self._passed = time.monotonic(), 0

    def take(self, size: int) -> None:
        """So many bytes more: waits until they are due."""
        self._passed += size
        if self._limit_bytes_s:
            time.sleep(max(0.0, self._began + self._passed / self._limit_bytes_s - time.monotonic()))


def _have_copied(paths: Paths, target: Path, limit_mb_s: float, progress: Callable[[int, int], None]) -> None:
    """Ask the keeper for a copy of its store. Raises TierError (it is away, has no room, or makes another one)."""

    def show(state: keeper_client.JobState) -> None:
        progress(state.done, state.total)

    keeper_client.copy(paths.keeper_socket, target, limit_mb_s=limit_mb_s, on_progress=show)


def copy_lmdb(
    source: Path,
    target: Path,
    *,
    map_bytes: int,
    is_store: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    rate: Rate | None = None,
) -> None:
    """Copy the LMDB in `source` into the empty directory `target`, of one snapshot, beside its writer. Raises StoreFailed, OSError.

    The snapshot keeps the pages that it sees for as long as the copy takes; a writer uses fresh ones meanwhile.

    is_store  its file always has its full length, so that a shorter one was cut: who reads it may die of it
    """
    failed: list[lmdb.Error] = []
    reading, writing = os.pipe()
    try:
        with opening(source, fcntl.LOCK_SH):
            environment = lmdb.open(str(source), map_size=map_bytes, readonly=True, create=False, max_dbs=32)
    except lmdb.Error as error:
        os.close(reading)
        os.close(writing)
        hint = hint_of(error)
        raise StoreFailed("a database can't be opened", where=str(source), cause=str(error), hint=hint) from error
    if is_store:
        try:
            refuse_short(environment, source)
        except StoreFailed:
            environment.close()
            os.close(reading)
            os.close(writing)
            raise
    used = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]

    def work() -> None:
        try:
            environment.copyfd(writing, compact=True)
        except lmdb.Error as error:
            failed.append(error)
        finally:
            os.close(writing)

    thread = threading.Thread(target=work, name="backup-copy")
    thread.start()
    done = 0
    try:
        with open(target / "data.mdb", "wb") as copied:
            os.chmod(copied.fileno(), 0o600)
            while data := os.read(reading, CHUNK_BYTES):
                copied.write(data)
                done += len(data)
                progress(min(done, used), used)
                (rate or Rate()).take(len(data))
    finally:
        os.close(reading)  # if the target is full, the other end finds nobody to write to
        thread.join()
        environment.close()
    if failed:
        hint = hint_of(failed[0])
        raise StoreFailed("a database can't be copied", where=str(source), cause=str(failed[0]), hint=hint) from failed[
            0
        ]


def _copy_journals(paths: Paths, draft: Path, progress: Progress, rate: Rate) -> None:
    """Journals only grow, and a torn end is dropped when they are read; one that is retired meanwhile isn't needed."""
    (draft / "journal").mkdir(mode=0o700)
    # Groups last: one that names more events than its choices have yet is read as if it didn't.
    found = [path for kind in ("*.journal", "*.group") for path in sorted(paths.journal_dir.glob(kind))]
    for done, journal in enumerate(found):
        try:
            data = journal.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:  # a bad sector must not keep all the rest from being saved
            log.error(
                "backup.journal_left_out", path=str(journal), error=str(error),
                hint="its answer can't be fetched where the backup is restored; `concordia verify` names all of them",
            )  # fmt: skip
            continue
        (draft / "journal" / journal.name).write_bytes(data)
        rate.take(len(data))
        progress("journal", done + 1, len(found))


def _files(directory: Path) -> Iterator[Path]:
    """All but the manifest and the lock."""
    return iter(sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in (MANIFEST, LOCK)))


def _described(root: Path, path: Path) -> CopiedFile:
    return CopiedFile(str(path.relative_to(root)), path.stat().st_size, _digest(path))


def _digest(path: Path, tell: Callable[[int], None] = lambda count: None) -> str:
    hasher = xxh3_128()
    with open(path, "rb") as file:
        while data := file.read(CHUNK_BYTES):
            hasher.update(data)
            tell(len(data))
    return hasher.hexdigest()


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


# ---------------------------------------------------------------- check and restore


def read_manifest(source: Path) -> BackupManifest:
    """The manifest of a backup. Raises BadFile, OtherFormat."""
    try:
        body = json.loads((source / MANIFEST).read_bytes())
        digest = body.pop("digest")
        if body.pop("format") != FORMAT or not isinstance(body["version"], int):
            raise ValueError("not a backup")
        version = body.pop("version")
        whole = digest == _digest_of({"format": FORMAT, "version": version, **body})
        if whole and version != VERSION:
            raise OtherFormat(f"a backup of version {version}, this is {VERSION}", where=str(source))
        manifest = BackupManifest(body["created"], [CopiedFile(**file) for file in body["files"]], body["about"])
    except FileNotFoundError as error:
        raise BadFile(
            f"there is no {MANIFEST}: not a backup, or one that was never finished", where=str(source)
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFile("a backup's manifest can't be read", where=str(source), cause=str(error)) from error
    if not whole or any(Path(file.path).is_absolute() or ".." in Path(file.path).parts for file in manifest.files):
        raise BadFile("a backup's manifest is damaged", where=str(source))
    return manifest


def check_backup(source: Path, progress: Progress = _silent) -> tuple[BackupManifest, list[str]]:
    """Read every byte of a backup; its manifest, and what is wrong, one line a file. Raises BadFile (the manifest itself)."""
    manifest = read_manifest(source)
    wrong, done = [], 0
    for file in manifest.files:
        path = source / file.path
        if not path.exists():
            wrong.append(f"{file.path} is missing")
        elif path.stat().st_size != file.bytes:
            wrong.append(f"{file.path} has {path.stat().st_size} bytes, not {file.bytes}")
        elif _digest(path) != file.digest:
            wrong.append(f"{file.path} is damaged")
        done += file.bytes
        progress("check", done, manifest.total_bytes)
    known = {file.path for file in manifest.files}
    wrong += [
        f"{path.relative_to(source)} is not in the manifest"
        for path in _files(source)
        if str(path.relative_to(source)) not in known
    ]
    return manifest, wrong


def occupied(paths: Paths) -> list[str]:
    """Parts of the data directory that a restore would replace."""
    return [name for name in PARTS if _holds_data(paths.data_dir / name)]


def misplaced(paths: Paths) -> str:
    """What keeps a restore from putting a part in its place, and what to do about it; "" if nothing does."""
    for place in (paths.data_dir / name for name in PARTS):
        if place.is_symlink() and not place.is_dir():
            return f"{place} is a link that leads to no directory: mount its disk, or remove the link"
        if place.exists() and os.path.ismount(place.resolve()):
            return (
                f"{place} is where a disk is mounted, and can't be replaced: restore to another --data-dir, then copy what is in its "
                f"{place.name}/ there"
            )
    return ""


def _holds_data(directory: Path) -> bool:
    """Whether there is any file but the lock that the command itself holds."""
    return any(path.is_file() and path.name != "keeper.lock" for path in directory.rglob("*"))


def restore(source: Path, paths: Paths, *, progress: Progress = _silent) -> BackupManifest:
    """Put a backup into a data directory that nobody serves. Raises BadFile, OSError.

    Files are copied beside their place, verified as they are written, and moved in at the end; what was there before is moved to
    DATA/replaced-N. A part that is a link to another disk stays one, to a new directory there. Interrupted, run it again: what was
    copied whole is kept.
    """
    manifest = read_manifest(source)
    draft = paths.data_dir / DRAFT
    draft.mkdir(mode=0o700, parents=True, exist_ok=True)
    moved, done = moved_in(manifest, paths), 0
    for name in [name for name in PARTS if name not in (moved or ())]:
        _link_as_before(paths.data_dir / name, draft / name)
    _drop_others(draft, manifest)
    for file in manifest.files:
        if Path(file.path).parts[0] not in (moved or ()):
            _restore_file(source / file.path, draft / file.path, file)
        done += file.bytes
        progress("restore", done, manifest.total_bytes)
    for name in PARTS:
        if (draft / name).is_symlink():
            _sync_tree(draft / name)
    _sync_tree(draft)
    moved = moved or []
    _note_moved(draft, manifest, moved)
    replaced = next(path for n in range(1 << 20) if not (path := paths.data_dir / f"replaced-{n}").exists())
    for name in PARTS:
        if name in moved or (name == "adapters" and not (draft / name).exists()):
            continue
        (draft / name).mkdir(mode=0o700, exist_ok=True)
        target = paths.data_dir / name
        if target.exists():
            replaced.mkdir(mode=0o700, exist_ok=True)
            target.rename(replaced / name)
        (draft / name).rename(target)
        moved.append(name)
        _note_moved(draft, manifest, moved)
    _remove_if_empty(replaced)
    if (draft / paths.config.name).exists() and not paths.config.exists():
        (draft / paths.config.name).rename(paths.config)
    shutil.rmtree(draft)
    sync_file(paths.data_dir)
    return manifest


def _link_as_before(place: Path, made: Path) -> None:
    """If a part is a link to a directory, make it anew on that disk, too."""
    if place.is_symlink() and not made.exists():
        there = place.resolve()
        beside = next(path for n in range(1 << 20) if not (path := there.with_name(f"{there.name}-{n}")).exists())
        beside.mkdir(mode=0o700)
        sync_file(there.parent)  # the draft's own sync ends at the link
        made.unlink(missing_ok=True)
        made.symlink_to(beside)


def _remove_if_empty(replaced: Path) -> None:
    """Remove what was replaced if there is no data in any of its parts."""
    if replaced.exists() and not any(_holds_data(replaced / name) for name in PARTS):
        for part in [part for part in replaced.iterdir() if part.is_symlink()]:
            shutil.rmtree(part.resolve(), ignore_errors=True)
        shutil.rmtree(replaced)


def _drop_others(draft: Path, manifest: BackupManifest) -> None:
    """Remove what the restore of another backup has left of it."""
    known = {file.path for file in manifest.files} | {MOVED}
    linked = [path for name in PARTS if (draft / name).is_symlink() for path in _files(draft / name)]
    for path in [*_files(draft), *linked]:
        if str(path.relative_to(draft)) not in known:
            path.unlink()


def moved_in(manifest: BackupManifest, paths: Paths) -> list[str] | None:
    """Parts that a restore of this backup had moved in when it was interrupted; None: it hadn't come so far, or was of another backup."""
    noted = _noted(paths)
    return list(noted["parts"]) if noted is not None and noted["backup"] == manifest.name else None


def _noted(paths: Paths) -> dict[str, Any] | None:
    try:
        return dict(json.loads((paths.data_dir / DRAFT / MOVED).read_bytes()))
    except (OSError, ValueError):
        return None


def is_half_restored(paths: Paths) -> bool:
    """Whether a restore was interrupted when it was to move its parts in: what is there may be of two installations."""
    noted, draft = _noted(paths), paths.data_dir / DRAFT
    parts = [name for name in PARTS if name != "adapters" or (draft / name).exists()]
    return noted is not None and not set(parts) <= set(noted["parts"])


def _note_moved(draft: Path, manifest: BackupManifest, parts: list[str]) -> None:
    _write_synced(draft / (MOVED + ".new"), json.dumps({"backup": manifest.name, "parts": parts}).encode())
    (draft / (MOVED + ".new")).rename(draft / MOVED)


def _restore_file(source: Path, target: Path, file: CopiedFile) -> None:
    if target.exists() and target.stat().st_size == file.bytes and _digest(target) == file.digest:
        return
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    hasher = xxh3_128()
    try:
        with open(source, "rb") as reader, open(target, "wb") as writer:
            while data := reader.read(CHUNK_BYTES):
                hasher.update(data)
                writer.write(data)
    except FileNotFoundError as error:
        raise BadFile(f"{file.path} is missing", where=str(source)) from error
    os.chmod(target, 0o600)
    if hasher.hexdigest() != file.digest:
        target.unlink()
        raise BadFile(f"{file.path} is damaged", where=str(source))
