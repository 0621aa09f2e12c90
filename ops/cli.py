"""The command `concordia`. Each command reads the configuration, does one thing, and prints for people or, with --json, for programs.

Runs in the foreground process. Results go to stdout, everything else to stderr; OpsError becomes one line and its exit code.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ops import config as configuration
from ops.config import Config
from ops.errors import NotRunning, OpsError

EXIT_CODES = """\b
Exit codes:
  0  done
  1  failed; the message says what to do
  2  wrong usage, or a key, value or file of the configuration
  3  the model can't be fetched, converted or read
  4  nobody answers at that address
  5  the data directory or the port is taken
  6  `verify` found damage
"""

Function = TypeVar("Function", bound=Callable[..., Any])


class Group(click.Group):
    """Turns OpsError into one line on stderr and its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OpsError as error:
            click.echo(f"concordia: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(130)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)


def setting(key: str, flag: str = "", **more: Any) -> Callable[[Function], Function]:
    """A flag that sets a key of the configuration."""
    name = flag or configuration.flag_name(key)
    return click.option(name, key.replace(".", "__"), default=None, **more)


def _place(function: Function) -> Function:
    """Flags of every command that needs to know which installation is meant."""
    for option in (
        click.option(
            "--config", "config_file", metavar="FILE", help="Configuration file, default DATA/concordia.toml."
        ),
        setting("lane_dir", metavar="DIR", help="Lanes and sockets, default a directory in /dev/shm."),
        setting("data_dir", metavar="DIR", help="Everything durable, default ~/.local/share/concordia."),
    ):
        function = option(function)
    return function


_SERVE_FLAGS = (
    setting("gateway.host", metavar="ADDRESS", help="Address to listen on; beyond loopback an API key is needed."),
    setting("gateway.port", metavar="PORT", help="Port to listen on, default 8080."),
    setting("model", metavar="MODEL", help="Name, directory, or .gguf file; default smollm2."),
    setting("model_cache", metavar="DIR", help="Where pulled models lie, default ~/.cache/concordia/models."),
    setting("host.engines", metavar="N", help="Engine processes, default 2."),
    setting("engine.device", metavar="DEVICE", help="cpu, cuda, cuda:N or auto."),
    setting("engine.dtype", metavar="DTYPE", help="float32, bfloat16, float16 or auto."),
    setting("engine.threads", metavar="N", help="Torch threads of an engine, default cores / engines."),
    setting("engine.slots", metavar="N", help="Sequences resident at once in an engine, default 8."),
    setting("gateway.spares", metavar="N", help="Engines kept idle while another can serve, default 1."),
    setting("tiers.durability", metavar="MODE", help="process, interval or turn."),
    setting("gateway.api_key", metavar="KEY", help="Key that every request must carry (better: CONCORDIA_API_KEY)."),
    setting("api_key_file", metavar="FILE", help="File whose first line is the API key."),
    setting("log.format", "--log-format", metavar="FORMAT", help="console, json or auto."),
    setting("log.level", "--log-level", metavar="LEVEL", help="debug, info, warning or error."),
)


def _serve_flags(function: Function) -> Function:
    for option in reversed(_SERVE_FLAGS):
        function = option(function)
    return function


def _configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hand the command a Config made of its setting flags; its other flags stay keywords."""

    @functools.wraps(function)
    def wrapper(**given: Any) -> Any:
        config_file = given.pop("config_file", None)
        known = {key.replace(".", "__"): key for key in configuration.all_keys()}
        flags = {known[name]: given.pop(name) for name in list(given) if name in known}
        return function(configuration.load(flags, config_file=config_file), **given)

    return wrapper


def _json_flag(function: Function) -> Function:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def _client_flags(function: Function) -> Function:
    for option in (
        setting("api_key_file", metavar="FILE", help="File whose first line is the API key."),
        setting("gateway.api_key", metavar="KEY", help="API key of the gateway."),
        setting("gateway.port", metavar="PORT", help="Port of the gateway on this machine."),
        click.option(
            "--url", envvar="CONCORDIA_URL", metavar="URL", help="The gateway, default from the configuration."
        ),
    ):
        function = option(function)
    return _place(function)


def _client(config: Config, url: str | None) -> Any:
    from ops.client import Client
    from ops.serve import base_url

    return Client(url or base_url(config), config.gateway.api_key)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


@click.group(
    cls=Group, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(package_name="concordia", message="concordia %(version)s")
def main() -> None:
    """Concordia keeps LLM sessions alive: kill any process, the client's stream goes on from the next token.

    Settings come from defaults, DATA/concordia.toml, environment (CONCORDIA_...) and flags, the later wins; `concordia config`
    shows each and where it came from.
    """


# ---------------------------------------------------------------- serve, pull


@main.command()
@_serve_flags
@_place
@_configured
def serve(config: Config) -> None:
    """Start gateway, host agent and engines, and stay in the foreground.

    SIGTERM or Ctrl-C ends it after a graceful drain, a second one kills. Several can run on one machine with different --data-dir
    and --port. The model is pulled first if it is missing.
    """
    from ops import log, pull
    from ops.serve import serve as run

    log.configure("serve", format=config.log.format, level=config.log.level)
    model = pull.ensure(config.model, config.model_cache)
    run(config, model.directory, model.name)


@main.command("pull")
@click.argument("wanted", metavar="MODEL")
@setting("model_cache", metavar="DIR", help="Where pulled models lie, default ~/.cache/concordia/models.")
@click.option("--again", is_flag=True, help="Pull even if it is there.")
@click.option("--if-missing", is_flag=True, help="Say nothing if it is there.")
@_json_flag
@_place
@_configured
def pull_command(config: Config, wanted: str, again: bool, if_missing: bool, as_json: bool) -> None:
    """Fetch MODEL into the model cache, convert it if need be, and check it.

    MODEL is smollm2 (the demo model), owner/name of a model on the hub, or a .gguf file.
    """
    from ops import models, pull

    there = None if again or os.path.isdir(wanted) else models.resolve(wanted, config.model_cache)
    found = there or pull.pull(wanted, config.model_cache, again=again)
    if as_json:
        _print_json({"model": found.name, "directory": str(found.directory), "pulled": there is None})
    elif there is None or not if_missing:
        click.echo(f"{found.name} is ready in {found.directory}")


# ---------------------------------------------------------------- looking


@main.command("config")
@_serve_flags
@_place
@_json_flag
@_configured
def config_command(config: Config, as_json: bool) -> None:
    """Show every setting, its value, and where it came from."""
    if as_json:
        click.echo(configuration.as_json(config))
        return
    from ops.show import console, table

    rows = [
        (key, configuration.shown_value(key, value), config.sources[key], configuration.environment_name(key))
        for key, value in config.values().items()
    ]
    console.print(table("", ("key", "value", "from", "environment variable"), rows))
    console.print(f"\nlanes and sockets: {config.paths.lane_dir}", highlight=False)


@main.command()
@_client_flags
@_json_flag
@_configured
def status(config: Config, url: str | None, as_json: bool) -> None:
    """Show processes, engines and lanes; from the files in the lane directory where the gateway is down (exit code 4)."""
    from dataclasses import asdict

    from ops import status as local

    engines, problem = None, ""
    try:
        engines = _engine_rows(_client(config, url).get("/admin/engines"))
    except NotRunning as error:
        problem = str(error)
    processes, lanes = local.processes(config.paths), local.lanes(config.paths)
    if as_json:
        _print_json(
            {
                "gateway": "down" if problem else "up",
                "engines": engines,
                "processes": [asdict(row) for row in processes],
                "lanes": [asdict(row) for row in lanes],
                "data_dir": str(config.paths.data_dir),
                "lane_dir": str(config.paths.lane_dir),
            }
        )
    else:
        _print_status(config, engines, processes, lanes)
    if problem:
        raise NotRunning(problem)


def _engine_rows(answer: Any) -> list[dict[str, Any]]:
    rows = answer if isinstance(answer, list) else answer.get("data", answer.get("engines", []))
    return [dict(row) for row in rows]


def _print_status(config: Config, engines: list[dict[str, Any]] | None, processes: list[Any], lanes: list[Any]) -> None:
    from ops.show import console, table

    process_columns = ("name", "pid", "state", "incarnation", "last beat ms", "steps")
    rows = [(row.name, row.pid, row.state, row.incarnation, row.beat_age_ms, row.step_count) for row in processes]
    console.print(
        table("processes", process_columns, rows) if rows else f"no process of {config.paths.data_dir} is running"
    )
    if engines:
        columns = [key for key in engines[0] if not isinstance(engines[0][key], dict | list)]
        console.print()
        console.print(
            table("engines, as the gateway sees them", columns, [[row.get(key) for key in columns] for row in engines])
        )
    if lanes:
        console.print()
        console.print(
            table("lanes", ("engine", "MiB in use"), [(row.name, f"{row.file_bytes / 2**20:.0f}") for row in lanes])
        )


# ---------------------------------------------------------------- sessions


@main.group(cls=Group)
def sessions() -> None:
    """List, show, park and delete sessions."""


@sessions.command("ls")
@_client_flags
@_json_flag
@_configured
def sessions_ls(config: Config, url: str | None, as_json: bool) -> None:
    """List the sessions."""
    answer = _client(config, url).get("/v1/sessions")
    if as_json:
        _print_json(answer)
        return
    from ops.show import console, table

    rows = answer if isinstance(answer, list) else answer.get("data", answer.get("sessions", []))
    if not rows:
        click.echo("no sessions; a request with the header X-Session-Id makes one")
        return
    columns = [key for key in rows[0] if not isinstance(rows[0][key], dict | list)]
    console.print(table("", columns, [[row.get(key) for key in columns] for row in rows]))


@sessions.command("show")
@click.argument("session")
@_client_flags
@_json_flag
@_configured
def sessions_show(config: Config, session: str, url: str | None, as_json: bool) -> None:
    """Show one session."""
    client = _client(config, url)
    answer = client.get(client.session_path(session))
    if as_json:
        _print_json(answer)
        return
    from ops.show import console, table

    rows = [(key, json.dumps(value) if isinstance(value, dict | list) else value) for key, value in answer.items()]
    console.print(table("", ("", ""), rows))


@sessions.command("park")
@click.argument("session")
@_client_flags
@_json_flag
@_configured
def sessions_park(config: Config, session: str, url: str | None, as_json: bool) -> None:
    """Take a session off the device; it stays in the lane and on disk."""
    client = _client(config, url)
    answer = client.post(client.session_path(session) + "/park")
    if as_json:
        _print_json(answer)
    else:
        click.echo(f"{session} is parked")


@sessions.command("rm")
@click.argument("session")
@_client_flags
@_json_flag
@_configured
def sessions_rm(config: Config, session: str, url: str | None, as_json: bool) -> None:
    """Delete a session and what only it has stored."""
    client = _client(config, url)
    answer = client.delete(client.session_path(session))
    if as_json:
        _print_json(answer)
    else:
        click.echo(f"{session} is deleted")


# ---------------------------------------------------------------- verify, demo


@main.command()
@_place
@_json_flag
@_configured
def verify(config: Config, as_json: bool) -> None:
    """Check the checksum of every stored block and record; say which range of which session is bad (exit code 6).

    Reads only, and may run while the installation serves.
    """
    from ops.verify import run

    run(config, as_json)


@main.command()
@setting("model", metavar="MODEL", help="Name, directory, or .gguf file; default smollm2.")
@setting("model_cache", metavar="DIR", help="Where pulled models lie.")
@click.option(
    "--keep", "keep_dir", metavar="DIR", help="Use this data directory and leave it; default a temporary one."
)
@click.option("--tokens", default=96, show_default=True, help="Length of the answer that is interrupted.")
@_json_flag
@_configured
def demo(config: Config, keep_dir: str | None, tokens: int, as_json: bool) -> None:
    """Kill an engine while it answers, then kill everything; watch the answer go on. Exit code 1 if it does not."""
    from ops.demo import run

    run(config, Path(keep_dir) if keep_dir else None, tokens, as_json)


if __name__ == "__main__":
    main()
