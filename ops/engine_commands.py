"""`concordia migrate`, `drain`, `upgrade`: move streams between engines, and replace engines under them. Runs in the command's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from ops.config import Config
from ops.errors import OpsError
from ops.flags import AT_LEAST_0, Command, client_flags, configured, json_flag, print_json

if TYPE_CHECKING:
    from ops.installation import Installation


def _timeout_flag(seconds: float, what: str) -> Any:
    return click.option(
        "--timeout", "timeout_s", type=AT_LEAST_0, metavar="S", default=seconds, show_default=True, help=what
    )


# Not required of click, which could not say what engines there are.
_engine_argument = click.argument("engine", required=False, metavar="ENGINE")


def _known(engine: str | None, here: Installation, usage: str) -> str:
    """The engine that was named. Raises click.UsageError where none was, OpsError where it is none of the gateway's."""
    there = ", ".join(f"{row['id']} ({row.get('state', 'unknown')})" for row in here.engines)
    listed = f"there are {there}" if there else "`concordia status` lists them"
    if not engine:
        raise click.UsageError(f"which engine? `{usage}`; {listed}")
    if there and engine not in [row["id"] for row in here.engines]:
        raise OpsError(f"there is no engine {engine!r}; {listed}. `concordia status` shows what they do")
    return engine


@click.command("migrate", cls=Command, exits=(4, 5))
@click.argument("session")
@_engine_argument
@_timeout_flag(60.0, "Seconds to wait for the end of the move.")
@client_flags
@json_flag
@configured
def migrate(config: Config, session: str, engine: str | None, timeout_s: float, url: str | None, as_json: bool) -> None:
    """Move a session to another engine: what it answers goes on without a gap, an idle one is taken up there next time.

    Its state is copied while the source goes on. An engine that refuses or dies on the way leaves the session where it is.
    """
    from ops.installation import find

    here = find(config, url)
    engine = _known(engine, here, f"concordia migrate {session} ENGINE")
    client = here.need_gateway("moving a session")
    path = f"/admin/sessions/{quote(session, safe='')}/migrate"
    answer = client.post(path, {"engine": engine, "timeout_s": timeout_s}, timeout_s=timeout_s + 10)
    if as_json:
        print_json(answer)
    else:
        for move in answer["moves"]:
            click.echo(_move_line(move))
        if not answer["moves"]:
            click.echo(f"{session}: {answer['outcome']}")
    if answer["outcome"] != "moved" and answer["moves"]:
        raise OpsError(f"not moved: {answer['outcome']}")


@click.command("drain", cls=Command, exits=(4, 5))
@_engine_argument
@click.option("--undo", is_flag=True, help="Let it take streams again.")
@_timeout_flag(60.0, "Seconds to wait for the last stream.")
@client_flags
@json_flag
@configured
def drain(config: Config, engine: str | None, undo: bool, timeout_s: float, url: str | None, as_json: bool) -> None:
    """Take every stream off an engine, and give it nothing new until `--undo` or its restart. SIGTERM to an engine does it, too."""
    from ops.installation import find

    here = find(config, url)
    engine = _known(engine, here, "concordia drain ENGINE")
    client = here.need_gateway("draining an engine")
    path = f"/admin/engines/{quote(engine, safe='')}/drain"
    answer = client.delete(path) if undo else client.post(path, {"timeout_s": timeout_s}, timeout_s=timeout_s + 10)
    if as_json:
        print_json(answer)
    elif undo:
        click.echo(f"{engine} is {answer['state']}")
    else:
        click.echo(f"{engine}: {answer['moved']} streams moved, {answer['left']} left")
        if not answer["engines_left"]:
            click.echo(f"no engine takes streams now: requests wait until `concordia drain {engine} --undo`", err=True)
    if answer.get("left"):
        raise OpsError(f"{answer['left']} streams stay on {engine}: {answer['reason']}")


@click.command("upgrade", cls=Command, exits=(4, 5))
@_timeout_flag(120.0, "Seconds for each process.")
@click.option("--host", is_flag=True, help="The host agent and the keeper, too.")
@click.option(
    "--gateway", is_flag=True, help="And the gateway: clients of long answers lose their connection, and resume."
)
@client_flags
@json_flag
@configured
def upgrade(config: Config, timeout_s: float, host: bool, gateway: bool, url: str | None, as_json: bool) -> None:
    """Replace every engine by a new process with the code and model files that are there now, one after the other; no stream breaks.

    Needs at least two engines. The nursery, which holds the old code, is started anew first. Settings stay those of `serve`.
    """
    from ops.installation import find
    from ops.upgrade import replace_all

    here = find(config, url)
    client = here.need_gateway("an upgrade")
    report = replace_all(
        client, here.paths, timeout_s, lambda text: None if as_json else click.echo(text), host=host, gateway=gateway
    )
    if as_json:
        print_json({"object": "list", "data": report})


COMMANDS = (migrate, drain, upgrade)


def _move_line(move: dict[str, Any]) -> str:
    said = f"{move['stream']}: {move['from_engine']} -> {move['to_engine']}: {move['outcome']}"
    if move["outcome"] != "moved":
        return said
    reason = f" ({move['reason']})" if move["reason"] else ""
    return f"{said}, {move['carried']} carried{reason}, stood still for {move['downtime_ms']:.0f} ms"
