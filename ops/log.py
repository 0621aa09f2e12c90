"""How events look: for people on a terminal, one JSON object a line otherwise. Called once by each process, before its first event.

Events are named `stage.verb`; every one carries the time and the process it comes from. All go to stderr. One that can't be
written (a full disk, a pipe whose reader is gone) is lost, and ends nobody.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any

import structlog


def configure(process: str, *, format: str = "auto", level: str = "info") -> None:
    """Set structlog up for this process; `format` and `level` are those of LogSettings."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    console = format == "console" or (format == "auto" and terminal)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if console else "iso", utc=not console),
    ]
    last: list[Any] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=terminal, pad_event_to=28, exception_formatter=structlog.dev.plain_traceback
            )
        ]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=shared + last,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: Stderr(),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(process=process)


class Stderr:
    """Where events go, each by one write: nothing that failed waits in a buffer for the next flush."""

    def msg(self, message: str) -> None:
        """Write one line, or lose it."""
        with contextlib.suppress(OSError, AttributeError):  # AttributeError: it was closed before this process began
            try:
                target = sys.stderr.fileno()
            except OSError:  # no file, but what a test reads
                sys.stderr.write(f"{message}\n")
                return
            os.write(target, f"{message}\n".encode(errors="backslashreplace"))

    debug = info = warning = warn = error = critical = fatal = exception = log = msg
