"""`python -m gateway --config-json JSON`: one gateway process. `concordia serve` starts and restarts it."""

from __future__ import annotations

import argparse
import logging
import sys

import structlog

from gateway import app
from gateway.config import GatewayConfig


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gateway", description=__doc__)
    parser.add_argument("--config-json", required=True, help="resolved settings: gateway, tiers, places and model")
    config = GatewayConfig.from_json(parser.parse_args(argv).config_json)
    if not structlog.is_configured():
        configure_log()
    return app.run(config)


def configure_log(level: int = logging.INFO) -> None:
    """For people on a terminal, one JSON object a line otherwise. Under `serve` the log is set up before."""
    renderer: list = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    if sys.stderr.isatty():
        renderer = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    stamp = structlog.processors.TimeStamper(fmt="iso")
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, stamp, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


if __name__ == "__main__":
    sys.exit(main())
