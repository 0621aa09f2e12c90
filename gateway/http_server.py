"""aiohttp's server, but for the answers that it would give by itself in plain text. Stage: admit; on the event loop.

What never becomes a request (bytes that are no HTTP, lines that are too long, lengths that are none) and what fails outside
the handlers is answered as any other error is: in OpenAI's shape, with what to do, and counted.
Source: aiohttp.web_protocol.RequestHandler, `handle_error` and `finish_response`
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod, HttpProcessingError, InvalidURLError, LineTooLong

from gateway import metrics
from gateway.api import error_response
from gateway.errors import QUOTED_LIMIT, ApiError, bad_request

_ONE_LENGTH = (
    "send the length of the body in bytes as one Content-Length, or the body in chunks "
    "(Transfer-Encoding: chunked), and not both"
)


class Runner(web.AppRunner):
    """Runs an application behind such a server."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """One connection of a client."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The last answer of this connection. Raises ConnectionError (another one has begun)."""
        super().handle_error(request, status, exc, message)  # which logs it
        error = unreadable(exc) if isinstance(exc, HttpProcessingError) else _failed(status)
        if isinstance(exc, HttpProcessingError):
            metrics.requests.labels("unknown", str(error.status)).inc()
            metrics.admit_refused.labels(error.code).inc()
        response = error_response(error)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """As aiohttp's, but for what it refuses before a handler is asked."""
        if isinstance(resp, web.HTTPException):
            metrics.requests.labels("unknown", str(resp.status)).inc()
            resp = error_response(ApiError(resp.status, _said(resp), code="http_error"))
        return await super().finish_response(request, resp, start_time)


def unreadable(error: HttpProcessingError) -> ApiError:
    """Why what came can't be read as a request, and what to send instead."""
    reason = (str(error.message).strip().splitlines() or [type(error).__name__])[0].rstrip(":")[:QUOTED_LIMIT]
    if isinstance(error, LineTooLong):
        limit = error.args[1]
        said = f"the request line or a header is longer than {limit} bytes: make it shorter, or say it in the body"
        return ApiError(431, said, code="headers_too_large")
    if reason.startswith("Too many headers"):
        return ApiError(431, "there are more than 128 headers: send fewer", code="headers_too_large")
    if isinstance(error, BadHttpMethod) and "HTTPS" in reason:
        said = "this port speaks HTTP, and TLS came: use http://, or connect to what ends TLS before it"
    elif isinstance(error, InvalidURLError):
        said = f"the request's address can't be read ({reason}): send a path, such as /v1/models"
    else:
        hint = _ONE_LENGTH if any(word in reason for word in ("Content-Length", "Transfer-Encoding", "chunk")) else ""
        said = f"what came can't be read as HTTP ({reason}): {hint or 'send a request of HTTP/1.1, as RFC 9112 says'}"
    return bad_request(said, code="invalid_http")


def _failed(status: int) -> ApiError:
    if status == 504:
        return ApiError(504, "the gateway did not get to an answer in time: send it again", code="http_error")
    return ApiError(status, "the gateway failed on this request; its log says more", code="internal_error")


def _said(refused: web.HTTPException) -> str:
    if refused.status == 417:
        return "the only expectation that is known here is `Expect: 100-continue`: send that one, or none"
    return refused.reason or "error"
