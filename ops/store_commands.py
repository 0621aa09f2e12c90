"""Commands about what is stored: look, check, mend, move, back up. Thin: each reads its flags and calls its doer in `ops/`.

Runs in the command's process. What needs the store's writer asks the keeper if one runs, and takes its place if none does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ops.config import Config
from ops.flags import AT_LEAST_0, Command, client_flags, configured, destructive_flags, json_flag, place_flags

_FILE = click.Path(path_type=Path)


def _key_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """What seals or opens an exported file, beside the tenants' keys in the environment."""
    for option in (
        click.option("--passphrase-file", type=_FILE, metavar="FILE", help="File whose text is a passphrase."),
        click.option("--key-file", type=_FILE, metavar="FILE", help="File that holds a key, 64 hex digits."),
    ):
        function = option(function)
    return function


@click.command(cls=Command, exits=(5, 6))
@click.argument("target", required=False, type=_FILE, metavar="[FILE]")
@click.option(
    "--limit-mb-s",
    type=AT_LEAST_0,
    default=0.0,
    metavar="N",
    help="Read at most so many MB a second, default as fast as it goes.",
)
@place_flags
@json_flag
@configured
def verify(config: Config, target: Path | None, limit_mb_s: float, as_json: bool) -> None:
    """Check every checksum and every chain: blocks, tails and rollback points on disk, records in the lanes, journals.

    Says which tokens of which session are damaged (exit code 6). Reads only, and may run while the installation serves. With FILE,
    checks an exported session or a backup instead.
    """
    from ops import verify as doer

    if target is not None:
        doer.run_on(target, as_json)
    else:
        doer.run(config, as_json, limit_mb_s=limit_mb_s)


@click.command(cls=Command, exits=(5, 6))
@click.argument("target")
@click.option("--from", "from_number", type=click.IntRange(0), metavar="N", help="First record of a lane to show.")
@click.option(
    "--limit", type=click.IntRange(1), default=1000, show_default=True, metavar="N", help="Show at most so many."
)
@click.option(
    "--freed", is_flag=True, help="Records of a lane that are on disk already, too, as far as they are still there."
)
@click.option("--no-check", "check", flag_value=False, default=True, help="Don't read payloads.")
@client_flags
@json_flag
@configured
def inspect(
    config: Config,
    target: str,
    from_number: int | None,
    limit: int,
    freed: bool,
    check: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """Show TARGET record by record.

    TARGET is a lane (an engine's name, or a .lane file), a session, stream or sequence id (what is on disk of it), or an exported file.
    """
    from ops.inspection import run
    from ops.installation import find

    run(find(config, url), target, as_json, from_number=from_number, limit=limit, freed=freed, check=check)


@click.command(cls=Command, exits=(5,))
@client_flags
@json_flag
@configured
def recover(config: Config, url: str | None, as_json: bool) -> None:
    """Bring what the lanes hold to the disk, without starting a server: after a crash, before a reboot, before a copy.

    Doing it again changes nothing. While the installation runs, its keeper is asked to do it.
    """
    from ops.installation import find
    from ops.recovery import run_recover

    run_recover(find(config, url), as_json)


@click.command(cls=Command, exits=(5, 6))
@click.option("--limit-mb-s", type=AT_LEAST_0, default=0.0, metavar="N", help="Read at most so many MB a second.")
@destructive_flags
@client_flags
@json_flag
@configured
def repair(config: Config, limit_mb_s: float, yes: bool, dry_run: bool, url: str | None, as_json: bool) -> None:
    """Find damage as `verify` does, and take it out.

    Only what is bad is dropped; its bytes are kept in DATA/store/broken/*.broken. Says which tokens of which session are computed
    again when they are needed; no token of a conversation is lost. Also while the installation serves.
    """
    from ops.installation import find
    from ops.recovery import run_repair

    run_repair(find(config, url), as_json, yes=yes, dry_run=dry_run, limit_mb_s=limit_mb_s)


@click.command(cls=Command, exits=(5, 6))
@click.argument("session")
@click.option("--output", "-o", type=_FILE, metavar="FILE", help="Default SESSION.concordia here.")
@click.option("--yes", "-y", is_flag=True, help="Replace FILE without asking.")
@_key_flags
@click.option("--plain", is_flag=True, help="Don't encrypt the file, though its tenant has a key.")
@client_flags
@json_flag
@configured
def export(
    config: Config, session: str, output: Path | None, yes: bool, key_file: Path | None, passphrase_file: Path | None,
    plain: bool, url: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Write SESSION into one file: tokens, state, fingerprint, checksums. Also while the installation serves.

    Interrupted, the same command goes on where it stopped (FILE.part). Where the session's tenant has a key, the file is encrypted with it;
    --passphrase-file or --key-file encrypt it with something else. Otherwise the tokens and their state are in it as plain bytes.
    """
    from ops.installation import find
    from ops.transfer import run_export
    from tiers.export_seal import ExportKeys

    if (key_file is not None) + (passphrase_file is not None) + plain > 1:
        raise click.UsageError("--key-file, --passphrase-file and --plain exclude each other")
    target = output or Path(f"{session.replace('/', '_')}.concordia")
    keys = ExportKeys.given(key_file=key_file, passphrase_file=passphrase_file)
    run_export(find(config, url), session, target, as_json, yes=yes, keys=keys, plain=plain)


@click.command("import", cls=Command, exits=(3, 4, 5, 6))
@click.argument("source", metavar="FILE", type=_FILE)
@click.option(
    "--as", "name", default="", metavar="SESSION", help="Under this name, default the one that it was exported with."
)
@click.option(
    "--namespace", default="", metavar="NAME", help="For this tenant, default the one that it was exported from."
)
@click.option("--replace", is_flag=True, help="Replace a session of that name.")
@click.option(
    "--any-model", is_flag=True, help="Also if another model is served here: its state waits until its own is."
)
@_key_flags
@destructive_flags
@client_flags
@json_flag
@configured
def import_command(
    config: Config, source: Path, name: str, namespace: str, replace: bool, any_model: bool, key_file: Path | None,
    passphrase_file: Path | None, yes: bool, dry_run: bool, url: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Take an exported session: its next turn here computes only what is new. Also while the installation serves.

    The whole file is checked first; a damaged one is refused (exit code 6), and one of another model too (exit code 3). Interrupted, the
    same command goes on; blocks that are there already are not stored again. An encrypted file needs what it was encrypted with: the
    tenant's key in the environment, --key-file or --passphrase-file; without, it is refused (exit code 5).
    """
    from ops.installation import find
    from ops.transfer import run_import
    from tiers.export_seal import ExportKeys

    keys = ExportKeys.given(key_file=key_file, passphrase_file=passphrase_file)
    run_import(
        find(config, url), source, as_json, name=name, namespace=namespace, replace=replace, any_model=any_model, yes=yes,
        dry_run=dry_run, keys=keys,
    )  # fmt: skip


@click.command(cls=Command, exits=(5, 6))
@click.argument("target", metavar="DIRECTORY", type=_FILE)
@click.option("--no-check", "check", flag_value=False, default=True, help="Don't read it back.")
@click.option(
    "--limit-mb-s", type=AT_LEAST_0, default=0.0, metavar="N", help="Read at most so many MB a second, default as fast as it goes.",
)  # fmt: skip
@client_flags
@json_flag
@configured
def backup(config: Config, target: Path, check: bool, limit_mb_s: float, url: str | None, as_json: bool) -> None:
    """Copy everything durable to a new DIRECTORY, while the installation serves or not.

    Store, sessions, journals, adapters and concordia.toml. The lanes are drained first. The copy is read back and compared.
    An unfinished one is DIRECTORY.part and is begun anew.
    """
    from ops.backups import run_backup
    from ops.installation import find

    run_backup(find(config, url), target, as_json, check=check, limit_mb_s=limit_mb_s)


@click.command(cls=Command, exits=(5, 6))
@click.argument("source", metavar="DIRECTORY", type=_FILE)
@click.option("--replace", is_flag=True, help="Move what the data directory holds aside, to DATA/replaced-N.")
@destructive_flags
@client_flags
@json_flag
@configured
def restore(
    config: Config, source: Path, replace: bool, yes: bool, dry_run: bool, url: str | None, as_json: bool
) -> None:
    """Put a backup into the data directory, which nobody may be serving. Every byte is checked on the way.

    Interrupted, the same command goes on. Sessions go on with their next request to the `serve` that is started there.
    """
    from ops.backups import run_restore
    from ops.installation import find

    run_restore(find(config, url), source, as_json, replace=replace, yes=yes, dry_run=dry_run)


@click.command(cls=Command, exits=(5,))
@click.option(
    "--settle-s",
    type=AT_LEAST_0,
    default=0.0,
    show_default=True,
    metavar="S",
    help="Leave alone what was used in the last S seconds.",
)
@click.option("--grace-s", type=AT_LEAST_0, metavar="S", help="How long what is unnamed stays for restores under way.")
@click.option(
    "--shrink", is_flag=True, help="Then make the store's file as small as what is in it: copy, verify, switch."
)
@destructive_flags
@client_flags
@json_flag
@configured
def compact(
    config: Config,
    settle_s: float,
    grace_s: float | None,
    shrink: bool,
    yes: bool,
    dry_run: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """Fold what is stored of each session into one base, evict what is beyond the budgets, free what nothing names.

    Superseded rollback points and window rows outside of kept windows go. Sessions that are being answered are left alone. The keeper
    does it in the background anyway (tiers.compact_interval_s); it can be interrupted at any moment and begun again.
    """
    from ops.compaction import run_compact
    from ops.installation import find

    run_compact(find(config, url), as_json, settle_s=settle_s, grace_s=grace_s, shrink=shrink, yes=yes, dry_run=dry_run)


@click.command(cls=Command, exits=(5,))
@click.option("--grace-s", type=AT_LEAST_0, metavar="S", help="How long what is unnamed stays for restores under way.")
@click.option(
    "--drop-locked", is_flag=True, help="Give up what is sealed with keys that are not given: they are forgotten."
)
@destructive_flags
@client_flags
@json_flag
@configured
def gc(
    config: Config, grace_s: float | None, drop_locked: bool, yes: bool, dry_run: bool, url: str | None, as_json: bool
) -> None:
    """Free what no session names: blocks, tail pieces and rollback points of what was deleted or evicted. Folds nothing."""
    from ops.compaction import run_gc
    from ops.installation import find

    run_gc(find(config, url), as_json, grace_s=grace_s, dry_run=dry_run, drop_locked=drop_locked, yes=yes)


@click.command(cls=Command, exits=(5,))
@client_flags
@json_flag
@configured
def stats(config: Config, url: str | None, as_json: bool) -> None:
    """Show what is stored, by tenant and by session, and the keeper's counters."""
    from ops.compaction import run_stats
    from ops.installation import find

    run_stats(find(config, url), as_json)


@click.command(cls=Command)
@place_flags
@json_flag
@configured
def doctor(config: Config, as_json: bool) -> None:
    """Look at this machine's limits, measure its disk, and say what to change. Exit code 1 if something that is set can't work."""
    from ops.doctor import run

    run(config, as_json)


COMMANDS = (verify, inspect, recover, repair, export, import_command, backup, restore, compact, gc, stats, doctor)
