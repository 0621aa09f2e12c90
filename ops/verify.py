"""`concordia verify`: every checksum and every chain of an installation, of an exported file or of a backup. Reads only.

Runs in the command's process, beside a running installation. Source: tiers/verify.py, tiers/export.py, tiers/backup.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import lmdb

from gateway.journal import CLOSED, read_records
from gateway.sealing import Sealing
from gateway.sessions import SessionFile
from ops.config import Config
from ops.errors import BadData, OpsError
from ops.flags import print_json
from ops.installation import need_directory, need_whole_sessions
from ops.show import Bar, size
from tiers import keeper_client
from tiers.backup import check_backup
from tiers.errors import BadFile, OtherFormat, TierError
from tiers.export import check_exported, read_items
from tiers.export_seal import ExportKeys, LockedFile
from tiers.keys import Keyring, Locked
from tiers.offline import owned
from tiers.paths import Paths
from tiers.salvage import is_walkable
from tiers.verify import Affected, Checked, Finding, verify
from tiers.view import StoreReader

SEALED_BY = "`concordia compact --shrink` seals them, and leaves no page of the store's file in which they were"


class Pace:
    """Keeps reading below a speed, and shows how far it is."""

    def __init__(self, limit_mb_s: float, block_count: int, show: Callable[[int, int], None]) -> None:
        self._limit_bytes_s = limit_mb_s * 1e6
        self._block_count = block_count
        self._show = show
        self._started = time.monotonic()

    def __call__(self, checked: Checked) -> None:
        self._show(checked.blocks, max(self._block_count, checked.blocks))
        if self._limit_bytes_s:
            ahead_s = checked.bytes / self._limit_bytes_s - (time.monotonic() - self._started)
            if ahead_s > 0:
                time.sleep(ahead_s)


def run(config: Config, as_json: bool, *, limit_mb_s: float = 0.0) -> None:
    """Check store, lanes and journals of one installation. Raises BadData if anything is damaged."""
    paths = config.paths
    need_directory(paths)
    if not (paths.store / "data.mdb").exists():
        raise OpsError(f"nothing is stored in {paths.data_dir}; name the installation by --data-dir")
    checked, findings = Checked(), []
    started = time.monotonic()
    with Bar("checking blocks", quiet=as_json) as bar:
        for finding in find_damage(config, checked, Pace(limit_mb_s, _block_count(config), bar)):
            findings.append(finding)
    mended = _have_mended(paths, findings)
    journal_count, journal_findings = check_journals(paths)
    findings += [*journal_findings, *check_sessions(paths)]
    counts = {**asdict(checked), "journals": journal_count}
    if as_json:
        rows = [finding_row(f) for f in findings]
        print_json({"ok": not findings, "checked": counts, "findings": rows, "rebuilt": mended})
    else:
        for finding in findings:
            print_finding(finding)
            if finding.key in mended:
                click.echo("    the keeper has made it again from what is stored")
        counted = ", ".join(f"{count} {name}" for name, count in counts.items() if name != "bytes")
        speed = f"{size(checked.bytes)} at {size(checked.bytes / max(time.monotonic() - started, 1e-3))}/s"
        click.echo(f"checked {counted}, {speed}: {'all whole' if not findings else f'{len(findings)} damaged'}")
        if checked.open:
            click.echo(f"{checked.open} values were stored before their tenant had a key, and can be read: {SEALED_BY}")
    sys.stdout.flush()
    if findings:
        raise BadData(_advice(findings))


def _advice(findings: list[Finding]) -> str:
    """What becomes of what is damaged: of state, of journals, and of the table of sessions."""
    kinds, said = {finding.kind for finding in findings}, []
    if kinds - {"journal", "sessions"}:
        said.append(
            "damaged state is computed again when it is needed, nothing else is affected; `concordia repair` takes it out"
        )
    if "journal" in kinds:
        said.append("`concordia repair` leaves a damaged journal as it is")
    if "sessions" in kinds:
        said.append("`concordia repair` does not touch DATA/sessions")
    if any(finding.kind == "sessions" and finding.affected for finding in findings):
        said.append(
            "a gateway uses no damaged record or token list of a session: the session's next turn writes it anew, a record also a restart "
            "of the gateway, if its journals are there"
        )
    return "; ".join(said)


def _have_mended(paths: Paths, findings: list[Finding]) -> list[str]:
    """Damaged bases that a running keeper has made again, told of them: it would find them by itself, later."""
    bases = [finding.key for finding in findings if finding.kind == "base"]
    if not bases or owned(paths) != "keeper":
        return []
    try:
        left = keeper_client.mend(paths.keeper_socket, bases)
    except TierError:
        return []
    return sorted(set(bases) - set(left))


def find_damage(
    config: Config, checked: Checked, pace: Callable[[Checked], None] = lambda checked: None
) -> list[Finding]:
    """What is wrong with store and lanes. Raises BadData if the store can't be read at all."""
    paths = config.paths
    lane_dir = paths.lane_dir if paths.lane_dir.exists() else None
    # Not beside a keeper: it reads the same pages all the time, and a long snapshot would let the file grow.
    if not owned(paths) and not is_walkable(paths.store, map_bytes=config.tiers.store_map_bytes):
        raise BadData(
            f"{paths.store} can't be read to its end, its own pages are damaged or missing; `concordia repair` saves what can be, "
            "or restore a backup"
        )
    try:
        return list(verify(paths.store, lane_dir, map_bytes=config.tiers.store_map_bytes, checked=checked, pace=pace))
    except OtherFormat:
        raise  # it may be whole: another version's
    except TierError as error:
        raise BadData(
            f"{paths.store} can't be read: {error}; `concordia repair` saves what can be, or restore a backup"
        ) from error


def _block_count(config: Config) -> int:
    """How much there is to do; 0 if the store can't be read, which is said later."""
    store = StoreReader(config.paths.store, map_bytes=config.tiers.store_map_bytes)
    try:
        with store.snapshot() as view:
            return view.count("blocks")
    except TierError:
        return 0
    finally:
        store.close()


def check_journals(paths: Paths) -> tuple[int, list[Finding]]:
    """Journals read, and those with damage before their end. A torn last record is no damage: its token was never sent."""
    findings, count, sealing = [], 0, Sealing(Keyring.from_environment())
    for path in sorted([*paths.journal_dir.glob("*.journal"), *paths.journal_dir.glob("*.group")]):
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # retired meanwhile
            continue
        except OSError as error:  # a bad sector
            findings.append(Finding("journal", path.name, f"can't be read: {error.strerror or error}"))
            continue
        count += 1
        at, spec = 0, None
        try:
            for record, end in read_records(data, sealing.opens_journal(path.stem)):
                at, spec = end, spec or record
        except Locked:
            continue  # its bodies can't be read here; nothing says that it is damaged
        closed = data.endswith(CLOSED)
        if spec is None and data or closed and at + len(CLOSED) != len(data):
            session = str(getattr(spec, "session", ""))
            where = (Affected(session, path.stem, 0, 0),) if spec is not None else ()
            findings.append(
                Finding("journal", path.name, f"damaged at byte {at}; its answer can be read up to there", where)
            )
    return count, findings


def check_sessions(paths: Paths) -> list[Finding]:
    """The gateway's records of sessions and their token lists: whether they can be read. What an older version wrote has no checksum."""
    if not (paths.sessions / "data.mdb").exists():
        return []
    try:
        need_whole_sessions(paths)
        file = SessionFile(paths.sessions, sealing=Sealing(Keyring.from_environment()))
        try:
            file.read_lists()
        finally:
            file.close()
    except (BadData, lmdb.Error) as error:
        return [Finding("sessions", "data.mdb", str(error))]
    return unreadable_records(file)


def unreadable_records(file: SessionFile) -> list[Finding]:
    """Sessions whose record, or token list where those were looked at, could not be read."""
    found = [*((name, "record") for name in file.bad), *((name, "token list") for name in file.bad_lists)]
    return [Finding("sessions", name, f"its {what} can't be read", (Affected(name, "", 0, 0),)) for name, what in found]


def print_finding(finding: Finding) -> None:
    """One thing that is wrong, and whom it concerns."""
    click.echo(f"bad {finding.kind} {finding.key}: {finding.reason}")
    for part in finding.affected:
        span = f", tokens [{part.token_start}, {part.token_end})" if part.token_end else ""
        stream = f", stream {part.stream}" if part.stream else ""
        click.echo(f"    session {part.session or '-'}{stream}{span}")


def finding_row(finding: Finding) -> dict[str, Any]:
    """The same for programs."""
    return {
        "kind": finding.kind,
        "key": finding.key,
        "reason": finding.reason,
        "affected": [part._asdict() for part in finding.affected],
    }


# ---------------------------------------------------------------- files


def _check_export(target: Path, bar: Bar) -> dict[str, Any]:
    """What an exported file is, all of it read. Of one whose key isn't there the checksums are checked. Raises BadFile, OtherFormat."""
    row: dict[str, Any] = {"path": str(target), "kind": "export", "bytes": target.stat().st_size}
    try:
        m = check_exported(target, bar, ExportKeys(Keyring.from_environment())).manifest
    except LockedFile as error:
        for item in read_items(target):
            bar(item.offset_after, row["bytes"])
        return {**row, "session": None, "tokens": None, "locked": str(error)}
    return {**row, "session": m.session, "tokens": m.position, "locked": None}


def run_on(target: Path, as_json: bool) -> None:
    """Check an exported file or a backup. Raises BadData, OpsError."""
    if not target.exists():
        raise OpsError(f"there is no {target}")
    with Bar(f"checking {target.name}", quiet=as_json) as bar:
        try:
            if target.is_dir():
                manifest, wrong = check_backup(target, lambda _, done, total: bar(done, total))
                row: dict[str, Any] = {
                    "path": str(target),
                    "kind": "backup",
                    "files": len(manifest.files),
                    "bytes": manifest.total_bytes,
                }
            else:
                row, wrong = _check_export(target, bar), []
        except (BadFile, OtherFormat) as error:
            row, wrong = {"path": str(target)}, [str(error)]
    if as_json:
        print_json({"ok": not wrong, **row, "findings": wrong})
    elif not wrong:
        click.echo(f"{target}: {row['kind']} is whole, {size(row['bytes'])}")
        if row.get("locked"):
            click.echo(f"only its checksums were checked: {row['locked']}")
    for text in wrong if not as_json else ():
        click.echo(f"bad: {text}")
    sys.stdout.flush()
    if wrong:
        raise BadData(f"{target} can't be trusted; make it again from its source")
