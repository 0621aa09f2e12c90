"""Names of sessions on a command line, held to what the API takes."""

from __future__ import annotations

import click

from gateway.errors import ApiError
from gateway.tenancy import OPERATOR
from ops.client import for_commands


def check_spelling(session: str, advice: str = "") -> None:
    """Raise click.UsageError if no request could name such a session; `advice` is said with it."""
    try:
        OPERATOR.session(session)
    except ApiError as error:
        said = f"no session can be called {session!r}: {for_commands(error.message)}"
        raise click.UsageError(f"{said}. {advice}" if advice else said) from error
