"""`concordia backup` and `concordia restore`: a whole installation's durable files, while it serves. Run in the command's process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from ops.errors import BadData, OpsError, StateRefused
from ops.flags import confirm, print_json
from ops.installation import Installation, drain_what_can_be, need_data, need_whole_sessions
from ops.processes import FileLock
from ops.show import Bar, size
from tiers.backup import BackupManifest, backup, check_backup, misplaced, moved_in, occupied, read_manifest, restore
from tiers.errors import BadFile, FileBusy, OtherFormat, TierError
from tiers.offline import writer_lock


def run_backup(here: Installation, target: Path, as_json: bool, *, check: bool, limit_mb_s: float = 0.0) -> None:
    """Make a backup at `target`. Raises StateRefused, OpsError."""
    need_data(here)
    if target.exists():
        raise StateRefused(f"{target} exists already; a backup is never written over another one")
    need_whole_sessions(here.paths)
    drain_what_can_be(here)
    about = {"models": sorted({str(row.get("model")) for row in here.engines}), "roots": sorted(here.roots)}
    try:
        with Bar("backing up", quiet=as_json) as bar:
            manifest = backup(
                here.paths, target, about=about, map_bytes=here.config.tiers.store_map_bytes,
                progress=lambda what, done, total: bar(done, total, f"copying {what}"), limit_mb_s=limit_mb_s,
            )  # fmt: skip
            if check:
                _must_be_whole(target, bar)
    except FileBusy as error:
        raise StateRefused(str(error)) from error
    except TierError as error:
        raise OpsError(f"{error}; nothing of the backup is left but {target}.part") from error
    except OSError as error:
        raise OpsError(
            f"{error.filename or target}: {error.strerror or error}; nothing of the backup is left but {target}.part"
        ) from error
    if as_json:
        print_json({"path": str(target), "checked": check, **_row(manifest)})
    else:
        checked = ", read back and whole" if check else ""
        click.echo(f"{target}: {len(manifest.files)} files, {size(manifest.total_bytes)}{checked}")


def run_restore(here: Installation, source: Path, as_json: bool, *, replace: bool, yes: bool, dry_run: bool) -> None:
    """Put a backup into the data directory. Raises StateRefused (it is served, or not empty), BadData."""
    if not source.is_dir():
        raise OpsError(f"there is no directory {source}")
    try:
        manifest = read_manifest(source)
    except (BadFile, OtherFormat) as error:
        raise BadData(str(error)) from error
    there, aside = [] if moved_in(manifest, here.paths) is not None else occupied(here.paths), list[Path]()
    if here.owner or here.gateway is not None:
        raise StateRefused(f"{here.paths.data_dir} is being served; stop it first")
    if problem := misplaced(here.paths):
        raise StateRefused(problem)
    if there and not replace:
        raise StateRefused(f"{here.paths.data_dir} has {', '.join(there)} already; --replace moves them aside")
    if dry_run:
        with Bar("checking", quiet=as_json) as bar:
            wrong = check_backup(source, lambda _, done, total: bar(done, total))[1]
    else:
        wrong = []
        if there:
            confirm(f"Move {', '.join(there)} of {here.paths.data_dir} aside and put the backup there?", yes=yes)
        before = set(here.paths.data_dir.glob("replaced-*"))
        manifest = _restore(here, source, as_json)
        aside = sorted(set(here.paths.data_dir.glob("replaced-*")) - before)
    if as_json:
        row = {"path": str(source), "data_dir": str(here.paths.data_dir), "dry_run": dry_run, "replaces": there}
        print_json({**row, "findings": wrong, **_row(manifest)})
    else:
        verb = "would be restored" if dry_run else "is restored"
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created))
        click.echo(
            f"the backup of {made} {verb} to {here.paths.data_dir}: {len(manifest.files)} files, {size(manifest.total_bytes)}"
        )
        if there and dry_run:
            click.echo(f"what is there would be moved to {here.paths.data_dir}/replaced-N")
        for path in aside:
            click.echo(f"what was there is in {path}")
        for text in wrong:
            click.echo(f"bad: {text}")
    if wrong:
        raise BadData(f"{source} is damaged")


def _restore(here: Installation, source: Path, as_json: bool) -> BackupManifest:
    here.paths.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(here.paths.serve_lock).take("this data directory is being served")
    try:
        with writer_lock(here.paths), Bar("restoring", quiet=as_json) as bar:
            return restore(source, here.paths, progress=lambda _, done, total: bar(done, total))
    except (BadFile, OtherFormat) as error:
        raise BadData(f"{error}; the data directory is as it was") from error
    except OSError as error:
        raise OpsError(
            f"{error.filename or here.paths.data_dir}: {error.strerror or error}; the same command goes on with what is there"
        ) from error
    finally:
        lock.release()


def _must_be_whole(target: Path, bar: Bar) -> None:
    _, wrong = check_backup(target, lambda _, done, total: bar(done, total, "reading it back"))
    if wrong:
        raise BadData(f"{target} was not written as it was read: {wrong[0]}; check the disk")


def _row(manifest: BackupManifest) -> dict[str, Any]:
    return {
        "created": manifest.created,
        "files": len(manifest.files),
        "bytes": manifest.total_bytes,
        "about": manifest.about,
    }
