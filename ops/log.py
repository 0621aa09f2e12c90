"""How events look: for people on a terminal, one JSON object a line otherwise. Called once by each process, before its first event.

Events are named `stage.verb`; every one carries the time and the process it comes from. All go to stderr.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def configure(process: str, *, format: str = "auto", level: str = "info") -> None:
    """Set structlog up for this process; `format` and `level` are those of LogSettings."""
    console = format == "console" or (format == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if console else "iso", utc=not console),
    ]
    last: list[Any] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=28)]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=shared + last,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(process=process)
