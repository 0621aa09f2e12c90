"""The commands' side of the HTTP API: small, synchronous, with deadlines. Runs in the command's process."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, urlsplit

import click

from gateway.config import is_loopback
from ops.config import Config
from ops.errors import ConfigError, NotRunning, OpsError, StateRefused

TIMEOUT_S = 10.0
UNAUTHORIZED = 401
_EXIT_CODES = {400: ConfigError.exit_code, 409: StateRefused.exit_code}
# What the gateway tells users of its API, as users of commands say it.
_SAID_HERE = (
    (re.compile(r"(GET )?/admin/(engines|sessions)\b"), "`concordia status`"),
    (re.compile(r"(GET )?/v1/sessions\b"), "`concordia sessions ls`"),
    (re.compile(r"\banother session_id\b"), "another --name"),
    (re.compile(r"^session_id: expected\b"), "a session's name is"),
    (re.compile(r"^(position|message|stream): "), r"--\1: "),
)
_ADVICE = {"session_not_found": "; `concordia sessions ls` lists them"}


def base_url(config: Config) -> str:
    """Where this machine reaches the gateway."""
    host = config.gateway.host
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{config.gateway.port}"


class ApiError(OpsError):
    """The gateway answered with an error; `status` is its HTTP status. Wrong requests and states exit as the command's own do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.exit_code = _EXIT_CODES.get(status, OpsError.exit_code)


class Client:
    """One gateway."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> Any:
        """Decoded answer. Raises NotRunning or ApiError."""
        return self._ask("GET", path)

    def post(self, path: str, body: Any = None, *, timeout_s: float = TIMEOUT_S) -> Any:
        """The same with a body."""
        return self._ask("POST", path, body, timeout_s)

    def delete(self, path: str) -> Any:
        """The same for DELETE."""
        return self._ask("DELETE", path)

    def healthy(self) -> bool:
        """An engine can serve."""
        try:
            self.get("/health")
        except OpsError:
            return False
        return True

    def session_path(self, session: str) -> str:
        """Path of a session, whatever characters its name has."""
        return f"/v1/sessions/{quote(session, safe='', errors='replace')}"

    def _ask(self, method: str, path: str, body: Any = None, timeout_s: float = TIMEOUT_S) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": "application/json"} if data is not None else {})
        try:
            request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
            with _opener(self.url).open(request, timeout=timeout_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from error
        except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise NotRunning(
                f"no gateway answers at {self.url} ({reason}); start one by `concordia serve`, or name it by --url"
            ) from error
        try:
            return json.loads(text) if text.strip() else {}
        except ValueError as error:
            raise self._other_server("something that isn't JSON") from error

    def _refusal(self, error: urllib.error.HTTPError) -> OpsError:
        """What a status that isn't 200 means; one without the gateway's own words comes from another server, or from a proxy before it."""
        try:
            said = json.loads(error.read())["error"]
            message = for_commands(str(said["message"])) + _ADVICE.get(str(said.get("code")), "")
        except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
            answered = f"{error.code} {error.reason}"
            if error.code < 500:
                return self._other_server(answered)
            message = f"the gateway answered {answered}"
        if error.code == UNAUTHORIZED:
            message = "the gateway wants an API key: --api-key, CONCORDIA_API_KEY or api_key_file"
        return ApiError(error.code, message)

    def _other_server(self, answered: str) -> NotRunning:
        return NotRunning(
            f"what listens at {self.url} is no gateway, it answered {answered}; start one by `concordia serve`, or name it by --url"
        )


def _opener(url: str) -> urllib.request.OpenerDirector:
    """A proxy of the environment can't know of this machine's own addresses."""
    here = is_loopback(urlsplit(url).hostname or "")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if here else []))


def for_commands(message: str) -> str:
    """A message of the gateway that names commands and flags where it named endpoints and fields."""
    for pattern, command in _SAID_HERE:
        message = pattern.sub(command, message)
    return message


def say_unwritten(answer: dict[str, Any]) -> None:
    """Of an answer to what has changed a session: that the gateway could not write it down, if so."""
    if answer.get("degraded") == "sessions_failing":
        said = (
            "the gateway could not write that down yet (`concordia status` says why), and forgets it if it ends before"
        )
        click.echo(said, err=True)
