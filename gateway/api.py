"""What all HTTP handlers share: the parts of the gateway, JSON answers, errors in OpenAI's shape, the key, one log line a request.

Runs on the event loop. `docs/api.md` documents every endpoint, header and error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from aiohttp import web

from gateway import metrics
from gateway.adapters import AdapterTable
from gateway.admit import Admission
from gateway.choices import Group, GroupForm, GroupTable
from gateway.config import GatewayConfig
from gateway.dispatch import Dispatcher
from gateway.durability import Durability
from gateway.encodings import TooLarge, unpack
from gateway.errors import ApiError, bad_request, forbidden, foreign_page, not_found, quoted, unauthorized
from gateway.host_link import HostLink
from gateway.sessions import SessionRecord, SessionTable
from gateway.sse import EventForm
from gateway.streams import Stream, StreamTable, parse_stream_id
from gateway.supervisors import HOST_AWAY, Supervisors
from gateway.tenancy import Caller, Keys, own_name

log = structlog.get_logger()

QUIET_PATHS = ("/health", "/metrics")  # asked all the time; logged at debug
# What a tenant's key opens, as the routes are written; all the rest is the operator's.
TENANT_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/streams",
        "/v1/streams/{stream}",
        "/v1/sessions",
        "/v1/sessions/{session}",
        "/v1/sessions/{session}/fork",
        "/v1/sessions/{session}/park",
        "/health",
    }
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Gateway:
    """The parts of one gateway process."""

    config: GatewayConfig
    admission: Admission
    table: StreamTable
    groups: GroupTable
    adapters: AdapterTable
    sessions: SessionTable
    dispatcher: Dispatcher
    host: HostLink
    supervisors: Supervisors
    form: EventForm
    group_form: GroupForm
    durability: Durability
    keys: Keys
    started_at: float
    draining: bool = False

    @property
    def host_agent(self) -> bool:
        """It is connected, and `degraded` doesn't say that it is away."""
        return self.host.connected and all(row["state"] != HOST_AWAY for row in self.durability.rows())


STREAM = web.RequestKey("stream", str)
ERROR = web.RequestKey("error", str)
CALLER = web.RequestKey("caller", Caller)
GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, headers=headers, content_type="application/json"
    )


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> web.Response:
    return json_response(error.body, error.status, {**(headers or {}), **error.headers})


def stream_headers(stream: Stream | Group) -> dict[str, str]:
    """Headers of every answer about a stream."""
    headers = {"X-Stream-Id": stream.id}
    if stream.spec.session:
        headers["X-Session-Id"] = own_name(stream.spec.session)
    return headers


async def find_stream(request: web.Request) -> Stream | Group:
    """The stream of a path, or the group of a request with several choices. Raises ApiError."""
    gateway, text = request.app[GATEWAY], request.match_info["stream"]
    stream_id = parse_stream_id(text)
    stream = await gateway.table.fetch(stream_id) or await gateway.groups.fetch(stream_id) if stream_id else None
    if stream is None or not request[CALLER].owns(namespace_of(stream)):
        raise not_found(
            f"there is no stream {quoted(text)}, or it ended longer ago than streams are kept", "stream_not_found"
        )
    return stream


def namespace_of(stream: Stream | Group) -> str:
    """Whose it is: a group is its choices' tenant's."""
    return (stream.streams[0] if isinstance(stream, Group) else stream).spec.namespace


def asks_all(request: web.Request) -> bool:
    """A list is to hold everything that the caller may see."""
    return is_set(request, "all")


def is_set(request: web.Request, name: str) -> bool:
    """A yes or no of the query; no if it isn't there. Raises ApiError if it is neither."""
    given = request.query.get(name, "").lower()
    if given not in ("", "0", "1", "false", "true"):
        raise bad_request(f"{name}: expected true or false, got {quoted(given)}", name)
    return given in ("1", "true")


def find_session(request: web.Request) -> SessionRecord:
    """The session of a path. Another tenant's is as unknown as one that isn't there. Raises ApiError."""
    caller = request[CALLER]
    session = caller.session(request.match_info["session"])
    record = request.app[GATEWAY].sessions.get(session)
    if record is None or not caller.owns(record.namespace):
        raise not_found(f"there is no session {quoted(caller.shown(session))}", "session_not_found")
    return record


@web.middleware
async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Key, errors, metrics and the request's one log line."""
    begun = time.monotonic()
    status = 499  # the client left before there was an answer
    try:
        response = await _answer(request, handler)
        status = response.status
        return response
    finally:
        _log_request(request, status, time.monotonic() - begun)


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        _check_key(request)
        return await handler(request)
    except ApiError as error:
        _count_refused(request, error)
        return error_response(error)
    except web.HTTPException as error:
        return error_response(_translate(request, error))
    except web.RequestPayloadError as error:
        log.info("request.unreadable", path=request.path, error=str(error))
        return _unreadable(request)
    except RecursionError:  # nested nearly as deeply as the parser takes is too deeply for what comes after it
        too_deep = bad_request("the body is nested too deeply", code="invalid_json")
        _count_refused(request, too_deep)
        return error_response(too_deep)
    except (ConnectionResetError, TimeoutError):
        raise
    except Exception as error:  # a bug in one request must not end the others
        log.exception("request.failed", path=request.path)
        message = f"the gateway failed on this request: {type(error).__name__}; its log says more"
        return error_response(ApiError(500, message, code="internal_error"))


def _unreadable(request: web.Request) -> web.Response:
    """The body breaks off within its own chunks; what is left of it can't be read either, so the connection ends."""
    hint = "it is not as long, or not in such chunks, as its headers say"
    error = bad_request(f"the body can't be read: {hint}; send it again", code="invalid_body")
    _count_refused(request, error)
    response = error_response(error)
    response.force_close()
    request.content.feed_eof()  # or aiohttp would try to read the rest, and log a traceback
    return response


def _count_refused(request: web.Request, error: ApiError) -> None:
    if request.method == "POST" and request.path.endswith("completions"):
        metrics.admit_refused.labels(error.code or str(error.status)).inc()
    request[ERROR] = error.message


def _check_key(request: web.Request) -> None:
    """Know who sends it. Raises ApiError: nobody who is known, a stranger's web page, or a tenant where only the operator may be."""
    keys = request.app[GATEWAY].keys
    caller = keys.caller(request.headers.get("Authorization", ""))
    if caller is None:
        raise unauthorized()
    is_foreign = request.headers.get("Sec-Fetch-Site") == "cross-site"  # as browsers say, whatever the page
    if is_foreign and not keys and request.method not in ("GET", "HEAD"):
        raise foreign_page(request.headers.get("Origin", "another site"))
    request[CALLER] = caller
    resource = request.match_info.route.resource
    if not caller.operator and resource is not None and resource.canonical not in TENANT_PATHS:
        raise forbidden(request.path)


def _translate(request: web.Request, error: web.HTTPException) -> ApiError:
    """aiohttp's own errors, in our shape."""
    if error.status == 413:
        limit = request.app[GATEWAY].config.gateway.max_body_bytes
        return body_too_large(request, limit)
    if error.status == 404:
        asked = request.path or request.raw_path  # CONNECT has no path, but a host and port
        return not_found(f"there is no endpoint {request.method} {asked}; see docs/api.md", "unknown_url")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} does not take {request.method}; use {allowed}"
        return ApiError(405, message, code="method_not_allowed", allowed=allowed)
    return ApiError(error.status, error.reason or "error", code="http_error")


def body_too_large(request: web.Request, limit: int) -> ApiError:
    size = request.content_length
    said = f"has {size} bytes" if size is not None and size > limit else "is larger"
    message = f"the body {said}; at most {limit} are taken (gateway.max_body_bytes)"
    return ApiError(413, message, code="body_too_large")


async def read_body(request: web.Request) -> bytes:
    """The whole body, unpacked and bounded. Raises ApiError or aiohttp's own 413."""
    limit = request.app[GATEWAY].config.gateway.max_body_bytes
    if request.content_length is not None and request.content_length > limit:
        raise body_too_large(request, limit)
    body = await request.read()
    encoding = ", ".join(request.headers.getall("Content-Encoding", []))
    if not encoding:
        return body
    try:
        return await asyncio.to_thread(unpack, body, encoding, limit)
    except TooLarge as error:
        raise body_too_large(request, limit) from error


def _log_request(request: web.Request, status: int, seconds: float) -> None:
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None else "unknown"
    metrics.requests.labels(path, str(status)).inc()
    write = log.debug if request.path in QUIET_PATHS and status == 200 else log.info
    more = {name: request[key] for name, key in (("stream", STREAM), ("error", ERROR)) if key in request}
    if CALLER in request and not request[CALLER].operator:
        more["tenant"] = request[CALLER].namespace
    write("request.done", method=request.method, path=request.path, status=status, ms=round(seconds * 1000, 1), **more)
