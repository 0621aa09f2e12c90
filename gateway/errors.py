"""Errors of the gateway, by what the caller does next. One shape on the wire: OpenAI's.

ApiError                 answered as {"error": {"message", "type", "param", "code"}}
|- bad_request(...)      stop: the request is wrong; `param` names the field
|- not_found(...)        stop: there is no such model, stream or session
|- unauthorized()        stop: send the key
|- forbidden(...)        stop: send the operator's key
|- conflict(...)         retry after the named thing has ended
|- overloaded(...)       retry after `retry_after_s`; nothing was started
`- unavailable(...)      retry: no engine could serve
"""

from __future__ import annotations

from typing import Any

import msgspec

QUOTED_LIMIT = 100  # characters of a request's own value in a message
UNAVAILABLE_RETRY_S = 2
NOT_AGAIN = ("poison_request",)  # a 500 that official clients would send again by themselves, were they not told
TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    417: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


class ApiError(Exception):
    """An answer that is an error. message tells the user what to do; code is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "",
        param: str | None = None,
        retry_after_s: int | None = None,
        allowed: str = "",
    ) -> None:
        """allowed: methods of a path that another one was sent to (RFC 9110 has them told in a header)."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or None
        self.param = param
        self.retry_after_s = UNAVAILABLE_RETRY_S if status == 503 and retry_after_s is None else retry_after_s
        self.allowed = allowed

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = TYPES.get(self.status, "server_error")
        message = self.message.encode(errors="backslashreplace").decode()  # an address may be no text
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.code in NOT_AGAIN:
            headers["X-Should-Retry"] = "false"
        return {**headers, "Allow": self.allowed} if self.allowed else headers


def quoted(value: object) -> str:
    """A value of a request as a message repeats it, cut where it is long: text in quotes, anything else as JSON."""
    said = repr(value) if isinstance(value, str) else msgspec.json.encode(value).decode()
    return said if len(said) <= QUOTED_LIMIT else said[:QUOTED_LIMIT] + "…"


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def not_supported(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="unsupported_parameter", param=param)


def not_found(message: str, code: str, param: str | None = None) -> ApiError:
    return ApiError(404, message, code=code, param=param)


def unauthorized() -> ApiError:
    hint = "This server requires an API key: send it as `Authorization: Bearer <key>`."
    return ApiError(401, hint, code="invalid_api_key")


def forbidden(path: str) -> ApiError:
    message = (
        f"{path} is the operator's: it takes the operator's API key (gateway.api_key), and this one is a tenant's."
    )
    return ApiError(403, message, code="operator_only")


def foreign_page(origin: str) -> ApiError:
    message = (
        f"a web page of {quoted(origin)} sent this, and without an API key any page that is open in a browser on this "
        "machine could: start the server with --api-key, and have the page send it"
    )
    return ApiError(403, message, code="foreign_page")


def conflict(message: str) -> ApiError:
    return ApiError(409, message, code="conflict")


def overloaded(message: str, retry_after_s: int) -> ApiError:
    return ApiError(429, message, code="queue_full", retry_after_s=retry_after_s)


def unavailable(message: str, code: str = "no_engine", retry_after_s: int | None = None) -> ApiError:
    return ApiError(503, message, code=code, retry_after_s=retry_after_s)
