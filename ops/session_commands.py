"""`concordia sessions …`. Thin: flags, and how results look. Runs in the command's process."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from ops.config import Config
from ops.errors import BadData
from ops.flags import Group, client_flags, configured, confirm, destructive_flags, json_flag, print_json

if TYPE_CHECKING:
    from tiers.verify import Finding


@click.group(cls=Group)
def sessions() -> None:
    """List, show, fork, park, pin and delete sessions."""


COMMANDS = (sessions,)
_SHOWN = ("id", "namespace", "state", "turns", "tokens", "captured", "durable", "pinned", "degraded")


@sessions.command("ls", exits=(4, 6))
@client_flags
@json_flag
@configured
def sessions_ls(config: Config, url: str | None, as_json: bool) -> None:
    """List the sessions, most lately used first; from the data directory where no gateway runs.

    What can be read is listed also where something can't be, which is named (exit code 6).
    """
    from ops.installation import find
    from ops.sessions import listed
    from ops.verify import finding_row

    findings: list[Finding] = []
    answer = listed(find(config, url), findings)
    if as_json:
        print_json({**answer, "findings": [finding_row(finding) for finding in findings]})
    else:
        _print_list(answer)
    _tell_damage(findings)


def _print_list(answer: dict[str, Any]) -> None:
    from ops.show import console, table

    rows = answer["data"]
    if answer.get("locked"):
        click.echo(
            f"{answer['locked']} sessions can't be shown: they are sealed with keys that are not given", err=True
        )
    if not rows:
        click.echo("no sessions; a request with the header X-Session-Id makes one")
        return
    said = {row.get("namespace", "default") for row in rows} - {"default"}
    columns = [key for key in _SHOWN if any(key in row for row in rows) and (said or key != "namespace")]
    console.print(table("", columns, [[_cell(row.get(key)) for key in columns] for row in rows]))


@sessions.command("show", exits=(4, 6))
@click.argument("session")
@client_flags
@json_flag
@configured
def sessions_show(config: Config, session: str, url: str | None, as_json: bool) -> None:
    """Show one session: its tokens, how many of them have their state in a lane and on disk, its latest streams."""
    from ops.installation import find
    from ops.sessions import view

    findings: list[Finding] = []
    answer = view(find(config, url), session, findings)
    if as_json:
        print_json(answer)
    else:
        from ops.show import console, table

        console.print(table("", ("", ""), [(key, _cell(value)) for key, value in answer.items()]))
    _tell_damage(findings)


def _tell_damage(findings: list[Finding]) -> None:
    """After what could be read has been shown: what could not. Raises BadData."""
    sys.stdout.flush()
    if findings:
        said = "; ".join(f"{finding.kind} {finding.key}: {finding.reason}" for finding in findings)
        raise BadData(f"not everything could be read: {said}")


@sessions.command("park", exits=(4, 5))
@click.argument("session")
@client_flags
@json_flag
@configured
def sessions_park(config: Config, session: str, url: str | None, as_json: bool) -> None:
    """Take a session off the devices; all of it is on disk when this returns. It goes on from there with its next turn."""
    from ops.client import say_unwritten
    from ops.installation import find

    client = find(config, url).need_gateway("parking")
    answer = client.post(client.session_path(session) + "/park")
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{session} is parked, {answer.get('durable', 0)} tokens on disk")
        say_unwritten(answer)


@sessions.command("fork", exits=(4, 5))
@click.argument("session")
@click.option("--name", metavar="NAME", help="Name of the fork; one is made up if it is missing.")
@click.option("--position", type=int, metavar="N", help="Begin with the first N tokens.")
@click.option("--message", type=int, metavar="N", help="Begin with messages 0 to N.")
@click.option("--stream", metavar="ID", help="Fork one of the session's streams: an earlier turn, or another choice.")
@client_flags
@json_flag
@configured
def sessions_fork(
    config: Config,
    session: str,
    name: str | None,
    position: int | None,
    message: int | None,
    stream: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Make a session that begins as this one does. Nothing is copied; both go on."""
    from ops.client import say_unwritten
    from ops.installation import find

    client = find(config, url).need_gateway("forking")
    wish = {"session_id": name, "position": position, "message": message, "stream": stream}
    answer = client.post(client.session_path(session) + "/fork", {k: v for k, v in wish.items() if v is not None})
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{answer['id']} begins with {answer['tokens']} tokens of {session}")
        say_unwritten(answer)


@sessions.command("rm", exits=(4, 5))
@click.argument("session_names", metavar="SESSION...", nargs=-1, required=True)
@destructive_flags
@client_flags
@json_flag
@configured
def sessions_rm(
    config: Config, session_names: tuple[str, ...], yes: bool, dry_run: bool, url: str | None, as_json: bool
) -> None:
    """Delete sessions and what only they have stored: their answers end, their blocks, journals and records go."""
    from ops.client import say_unwritten
    from ops.installation import find
    from ops.sessions import remove, view

    here = find(config, url)
    session_names = tuple(dict.fromkeys(session_names))
    views = [view(here, name, []) for name in session_names]
    if not dry_run:
        confirm(f"Delete {', '.join(session_names)}?", yes=yes)
    results = [_dry_row(row) if dry_run else remove(here, row["id"]) for row in views]
    if as_json:
        print_json({"dry_run": dry_run, "data": results})
        return
    for row in results:
        if dry_run:
            click.echo(f"{row['id']} would be deleted: {row['turns']} turns, {row['tokens']} tokens")
        else:
            click.echo(f"{row['id']} is deleted" + ("" if row["forgotten"] else "; its blocks are collected later"))
            say_unwritten(row)


def _namespace_flag(function: Any) -> Any:
    return click.option(
        "--namespace",
        default="",
        metavar="NAME",
        help="The session's tenant, default what its name says (TENANT~NAME).",
    )(function)


@sessions.command("pin", exits=(5,))
@click.argument("session")
@_namespace_flag
@client_flags
@json_flag
@configured
def sessions_pin(config: Config, session: str, namespace: str, url: str | None, as_json: bool) -> None:
    """Never evict a session, whatever budgets and times to live say. It need not be stored yet."""
    from ops.compaction import run_pin
    from ops.installation import find

    run_pin(find(config, url), session, as_json, namespace=namespace, pinned=True)


@sessions.command("unpin", exits=(5,))
@click.argument("session")
@_namespace_flag
@client_flags
@json_flag
@configured
def sessions_unpin(config: Config, session: str, namespace: str, url: str | None, as_json: bool) -> None:
    """Let a session be evicted again."""
    from ops.compaction import run_pin
    from ops.installation import find

    run_pin(find(config, url), session, as_json, namespace=namespace, pinned=False)


def _dry_row(view: dict[str, Any]) -> dict[str, Any]:
    return {key: view.get(key) for key in ("id", "turns", "tokens", "live_streams")}


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, list | dict):
        return json.dumps(value) if value else None
    return value
