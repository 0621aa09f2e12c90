"""The command `concordia`. Each command reads the configuration, does one thing, and prints for people or, with --json, for programs.

Runs in the foreground process. Results go to stdout, everything else to stderr; OpsError becomes one line and its exit code.
Commands about what is stored are in `ops/store_commands.py`, those about sessions in `ops/session_commands.py`,
those about engines in `ops/engine_commands.py`.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import click

from ops import config as configuration
from ops import engine_commands, session_commands, store_commands
from ops.config import Config
from ops.flags import (
    Function,
    Group,
    client_flags,
    configured,
    json_flag,
    place_flags,
    print_json,
    setting,
)

_SERVE_FLAGS = (
    setting("gateway.host", metavar="ADDRESS", help="Address to listen on; beyond loopback an API key is needed."),
    setting("gateway.port", metavar="PORT", help="Port to listen on, default 8080."),
    setting("model", metavar="MODEL", help="Name, directory, or .gguf file; default smollm2."),
    setting("model_cache", metavar="DIR", help="Where pulled models lie, default ~/.cache/concordia/models."),
    setting("host.engines", metavar="N", help="Engine processes, default 2."),
    setting("engine.device", metavar="DEVICE", help="cpu, cuda, cuda:N or auto."),
    setting("engine.dtype", metavar="DTYPE", help="float32, bfloat16, float16 or auto."),
    setting("engine.threads", metavar="N", help="Torch threads of an engine, default cores / engines."),
    setting(
        "engine.deterministic",
        is_flag=True,
        help="Answers have the same bits whatever runs beside them or dies; slower.",
    ),
    setting("engine.slots", metavar="N", help="Sequences resident at once in an engine, default 8."),
    setting("gateway.failover", metavar="POLICY", help="What stands ready for a lost engine: cold, warm or hot."),
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


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="concordia", message="concordia %(version)s")
def main() -> None:
    """Concordia keeps LLM sessions alive: kill any process, the client's stream goes on from the next token.

    Settings come from defaults, DATA/concordia.toml, environment (CONCORDIA_...) and flags, the later wins; `concordia config`
    shows each and where it came from.
    """


# ---------------------------------------------------------------- serve, pull


@main.command(exits=(3, 5, 6))
@_serve_flags
@place_flags
@configured
def serve(config: Config) -> None:
    """Start gateway, host agent and engines, and stay in the foreground.

    SIGTERM or Ctrl-C ends it after a graceful drain, a second one kills. Several can run on one machine with different --data-dir
    and --port. The model is pulled first if it is missing.
    """
    from ops import log, pull
    from ops.serve import refuse_early
    from ops.serve import serve as run

    log.configure("serve", format=config.log.format, level=config.log.level)
    refuse_early(config)
    model = pull.ensure(config.model, config.model_cache)
    run(config, model.directory, model.name)


@main.command("pull", exits=(3,))
@click.argument("wanted", metavar="MODEL")
@setting("model_cache", metavar="DIR", help="Where pulled models lie, default ~/.cache/concordia/models.")
@click.option("--again", is_flag=True, help="Pull even if it is there.")
@click.option("--if-missing", is_flag=True, help="Say nothing if it is there.")
@json_flag
@place_flags
@configured
def pull_command(config: Config, wanted: str, again: bool, if_missing: bool, as_json: bool) -> None:
    """Fetch MODEL into the model cache, convert it if need be, and check it.

    MODEL is smollm2 (the demo model), gemma3-270m, owner/name of a model on the hub, or a .gguf file.
    """
    from ops import models, pull

    there = None if again or os.path.isdir(wanted) else models.resolve(wanted, config.model_cache)
    found = there or pull.pull(wanted, config.model_cache, again=again)
    if as_json:
        print_json({"model": found.name, "directory": str(found.directory), "pulled": there is None})
    elif there is None or not if_missing:
        click.echo(f"{found.name} is ready in {found.directory}")


# ---------------------------------------------------------------- looking


@main.command("config")
@_serve_flags
@place_flags
@json_flag
@configured
def config_command(config: Config, as_json: bool) -> None:
    """Show every setting, its value, and where it came from; what holds now, where a running `serve` or the machine says otherwise."""
    from ops import running
    from ops.resolved import resolved

    served = running.differing(config)
    there = dataclasses.replace(config, lane_dir=(served or {}).get("lane_dir", config.lane_dir))
    found = resolved(there) | (served or {})
    if as_json:
        click.echo(configuration.as_json(config, found))
        return
    from ops.show import console, table

    rows = []
    for key, value in config.values().items():
        shown = configuration.shown_value(key, value)
        now = f"{shown} (now {found[key]})".strip() if key in found else shown
        rows.append((key, now, config.sources[key], configuration.environment_name(key)))
    console.print(table("", ("key", "value", "from", "environment variable"), rows))
    console.print(f"\nlanes and sockets: {found.get('lane_dir', config.paths.lane_dir)}", highlight=False)
    if served is not None:
        console.print(
            "`concordia serve` runs on this data directory; (now …) is what it was given or has found", highlight=False
        )


@main.command(exits=(4,))
@client_flags
@json_flag
@configured
def status(config: Config, url: str | None, as_json: bool) -> None:
    """Show processes, engines, lanes, sessions' lag, and what is degraded.

    From the files in the lane directory where the gateway is down (exit code 4), or wants a key that isn't given (exit code 1).
    """
    from ops import status as local

    shown = local.look(config, url)
    if as_json:
        print_json(local.as_json(shown))
    else:
        local.show(shown)
    if shown.problem:
        raise shown.problem


# ---------------------------------------------------------------- demo


@main.command(exits=(3,))
@setting("model", metavar="MODEL", help="Name, directory, or .gguf file; default smollm2.")
@setting("model_cache", metavar="DIR", help="Where pulled models lie.")
@click.option(
    "--keep", "keep_dir", metavar="DIR", help="Use this data directory and leave it; default a temporary one."
)
@click.option(
    "--tokens", type=click.IntRange(8), default=96, show_default=True, help="Length of the answer that is interrupted."
)
@json_flag
@configured
def demo(config: Config, keep_dir: str | None, tokens: int, as_json: bool) -> None:
    """Kill an engine while it answers, then kill everything; watch the answer go on. Exit code 1 if it does not."""
    from ops.demo import run

    run(config, Path(keep_dir) if keep_dir else None, tokens, as_json)


for command in (*session_commands.COMMANDS, *engine_commands.COMMANDS, *store_commands.COMMANDS):
    main.add_command(command)

if __name__ == "__main__":
    main()
