"""What aiohttp says of connections, as events in our log. Stage: admit; on the event loop.

Bytes that are no HTTP (`gateway/http_server.py` answers them) are one line here: anybody can send them.
"""

from __future__ import annotations

from typing import Any

import structlog
from aiohttp.http_exceptions import HttpProcessingError

log = structlog.get_logger()


class HttpLog:
    """Stands in for the `logging.Logger` that aiohttp's server takes."""

    def debug(self, message: str, *arguments: object, **more: Any) -> None:
        """Connections that end early, and the like."""

    def warning(self, message: str, *arguments: object, **more: Any) -> None:
        log.warning("http.warning", said=message % arguments)

    def exception(self, message: str, *arguments: object, exc_info: Any = True, **more: Any) -> None:
        """A request that can't be read, or a bug of the server's."""
        if isinstance(exc_info, HttpProcessingError):
            lines = str(exc_info.message).strip().splitlines() or [type(exc_info).__name__]
            log.info("request.malformed", error=lines[0][:200])
        else:
            log.error("http.failed", said=message % arguments, exc_info=exc_info)
