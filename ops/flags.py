"""What the commands share: common flags, the configuration made of them, exit codes, errors as one line, JSON.

Runs in the command's own process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from ops import config as configuration
from ops import log
from ops.client import Client
from ops.config import Config
from ops.errors import BadData, OpsError, StateRefused
from ops.standard_streams import fill_in
from tiers.errors import KeeperAway, Lost, StoreBusy, TierError
from tiers.export_seal import LockedFile
from tiers.keys import BadKeys, Locked

EXITS = {
    0: "done",
    1: "failed; the message says what to do",
    2: "wrong usage, or a key, value or file of the configuration",
    3: "the model can't be fetched, converted, read or served, or is not the one that is wanted",
    4: "nobody answers at that address",
    5: "refused because of the state: taken, in use, already there, or not confirmed",
    6: "damage was found",
}
_LEVELS = ("debug", "info", "warning", "error")
Function = TypeVar("Function", bound=Callable[..., Any])


def exit_codes(codes: Iterable[int]) -> str:
    """The table of exit codes that ends a help page."""
    return "\b\nExit codes:\n" + "\n".join(f"  {code}  {EXITS[code]}" for code in sorted(codes)) + "\n"


# Where to look for what a command's argument may be.
_LISTED = {
    "SESSION": "`concordia sessions ls` lists them",
    "ENGINE": "`concordia status` lists them",
    "TARGET": "that is an engine, a session, a stream, a .lane file or an exported one",
    "MODEL": "that is smollm2, owner/name of a model on the hub, or a .gguf file",
}


class Command(click.Command):
    """A command whose help ends with its exit codes; `exits` names those beyond 0, 1 and 2."""

    def __init__(self, *given: Any, exits: tuple[int, ...] = (), **more: Any) -> None:
        more.setdefault("epilog", None)
        more["epilog"] = more["epilog"] or exit_codes({0, 1, 2, *exits})
        super().__init__(*given, **more)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, but say of a missing argument what it may be."""
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            if error.param is None or error.param.param_type_name != "argument":
                raise
            name = error.param.human_readable_name
            usage = " ".join(["concordia", *ctx.command_path.split()[1:], *self.collect_usage_pieces(ctx)[1:]])
            listed = f"; {_LISTED[name]}" if name in _LISTED else ""
            raise click.UsageError(f"which {name.lower()}? `{usage}`{listed}", ctx) from error


class Group(click.Group):
    """Turns OpsError into one line on stderr and its exit code."""

    command_class = Command

    def __init__(self, *given: Any, **more: Any) -> None:
        more.setdefault("epilog", exit_codes(EXITS))
        super().__init__(*given, **more)

    def main(self, *given: Any, **more: Any) -> Any:
        """As click does, also where a standard stream is closed."""
        fill_in()
        return super().main(*given, **more)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OpsError as error:
            click.echo(f"concordia: {error}", err=True)
            ctx.exit(error.exit_code)
        except TierError as error:
            click.echo(f"concordia: {error}", err=True)
            ctx.exit(tier_exit_code(error))
        except KeyboardInterrupt:
            ctx.exit(130)
        except BrokenPipeError:  # who reads has enough; what was still to be done after that line is not done
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(OpsError.exit_code)
        except OSError as error:
            click.echo(f"concordia: {system_problem(error)}", err=True)
            ctx.exit(OpsError.exit_code)


def system_problem(error: OSError) -> str:
    """What the system has refused, and what to do about it."""
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if isinstance(error, PermissionError):
        return f"{what}. Run it as the user whom that belongs to: the one who runs `concordia serve`"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}. Free some room, and run it again"
    return what


def tier_exit_code(error: TierError) -> int:
    """Exit code of an error that a command didn't expect."""
    if isinstance(error, StoreBusy | KeeperAway | BadKeys | Locked | LockedFile):
        return StateRefused.exit_code
    return BadData.exit_code if isinstance(error, Lost) else OpsError.exit_code


class Number(click.FloatRange):
    """A finite number of a range: `nan` and `inf` are wrong usage."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not in the range of finite numbers.", param, ctx)
        return found


AT_LEAST_0 = Number(min=0)


def setting(key: str, flag: str = "", **more: Any) -> Callable[[Function], Function]:
    """A flag that sets a key of the configuration."""
    name = flag or configuration.flag_name(key)
    return click.option(name, key.replace(".", "__"), default=None, **more)


def place_flags(function: Function) -> Function:
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


def configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hand the command a Config made of its setting flags; its other flags stay keywords."""

    @functools.wraps(function)
    def wrapper(**given: Any) -> Any:
        config_file = given.pop("config_file", None)
        known = {key.replace(".", "__"): key for key in configuration.all_keys()}
        flags = {known[name]: given.pop(name) for name in list(given) if name in known}
        config = configuration.load(flags, config_file=config_file)
        # What a command does is its output; what goes wrong on the way is said on stderr.
        log.configure("concordia", format=config.log.format, level=max(config.log.level, "warning", key=_LEVELS.index))
        return function(config, **given)

    return wrapper


def json_flag(function: Function) -> Function:
    """--json: data for programs on stdout."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def destructive_flags(function: Function) -> Function:
    """--yes and --dry-run of a command that takes something away."""
    function = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")(function)
    return click.option("--yes", "-y", is_flag=True, help="Don't ask.")(function)


def confirm(question: str, *, yes: bool, dry_run: bool = True) -> None:
    """Ask on the terminal unless `yes`. Raises StateRefused if the answer is no, or nobody can be asked.

    dry_run  whether the command has that flag
    """
    if yes:
        return
    if not sys.stdin.isatty():
        more = ", or see what it would do by --dry-run" if dry_run else ""
        raise StateRefused(f"{question} Nobody can be asked here: add --yes{more}")
    if not click.confirm(question, default=False, err=True):
        raise StateRefused("nothing was done")


def client_flags(function: Function) -> Function:
    """Flags of every command that asks a gateway."""
    for option in (
        setting("api_key_file", metavar="FILE", help="File whose first line is the API key."),
        setting("gateway.api_key", metavar="KEY", help="API key of the gateway."),
        setting("gateway.port", metavar="PORT", help="Port of the gateway on this machine."),
        click.option(
            "--url", envvar="CONCORDIA_URL", metavar="URL", help="The gateway, default from the configuration."
        ),
    ):
        function = option(function)
    return place_flags(function)


def client(config: Config, url: str | None) -> Client:
    """The gateway that these flags mean."""
    from ops.installation import gateway_url

    return Client(url or gateway_url(config), config.gateway.api_key)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value, indent=2))
