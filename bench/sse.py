"""What a client sees of a stream: server-sent events with their ids, comments and times, over one or many connections.

Used by `bench/driver.py`. Plain http.client on the caller's thread: what it reads is what came over the wire, and the
clock is read right after an event's last line.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


class StreamError(AssertionError):
    """A stream said something else than was waited for."""


@dataclass(frozen=True)
class Event:
    """One SSE frame. `at` is the client's clock (perf_counter) when its last line was read."""

    id: str
    data: str
    at: float

    @property
    def done(self) -> bool:
        return self.data == "[DONE]"

    @cached_property
    def body(self) -> dict[str, Any]:
        return {} if self.done else json.loads(self.data)

    @cached_property
    def text(self) -> str:
        """What this event adds to the answer."""
        choices = self.body.get("choices") or []
        if not choices:
            return ""
        choice = choices[0]
        return (
            str(choice.get("text") or "") if "text" in choice else str((choice.get("delta") or {}).get("content") or "")
        )

    @cached_property
    def is_token(self) -> bool:
        """Whether it stands for one token of the answer: not the opening chunk (id 0), not the finish or usage chunk."""
        choices = self.body.get("choices") or []
        return bool(choices) and choices[0].get("finish_reason") is None and self.number > 0

    @property
    def number(self) -> int:
        """Its number in the stream; events are counted from 0."""
        return int(self.id)


@dataclass(slots=True)
class Answer:
    """Everything a client saw of one stream, however many connections it took."""

    sent_at: float = 0.0
    stream_id: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    comments: list[tuple[str, float]] = field(default_factory=list)
    broken: str = ""

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def ids(self) -> list[int]:
        return [event.number for event in self.events]

    @property
    def tokens(self) -> list[Event]:
        """Events of tokens, also of those whose text is held back."""
        return [event for event in self.events if event.is_token]

    @property
    def done(self) -> bool:
        return bool(self.events) and self.events[-1].done

    @property
    def finish_reason(self) -> str | None:
        reasons = [c.get("finish_reason") for e in self.events for c in e.body.get("choices") or []]
        return next((reason for reason in reversed(reasons) if reason), None)

    @property
    def usage(self) -> dict[str, Any]:
        return next((e.body["usage"] for e in reversed(self.events) if e.body.get("usage")), {})

    @property
    def concordia(self) -> dict[str, Any]:
        return next((e.body["concordia"] for e in reversed(self.events) if e.body.get("concordia")), {})

    @property
    def error(self) -> dict[str, Any]:
        return next((e.body["error"] for e in self.events if e.body.get("error")), {})

    @property
    def first_token_s(self) -> float:
        """Time to first token, client's clock."""
        if not self.tokens:
            raise StreamError(f"no token came: {self.describe()}")
        return self.tokens[0].at - self.sent_at

    def describe(self) -> str:
        last = [event.data[:300] for event in self.events[-3:]]
        seen = f"status {self.status}, {len(self.events)} events, broken={self.broken!r}"
        return f"{seen}, comments={self.comments}, last={last}"


Watcher = Callable[[Answer], None]


class SseConnection:
    """One HTTP request whose answer is a stream of server-sent events. Iterate to read; close to hang up."""

    def __init__(self, port: int, method: str, path: str, body: Any, headers: dict[str, str], timeout_s: float) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        payload = None if body is None else json.dumps(body).encode()
        if payload is not None:
            headers = {"Content-Type": "application/json", **headers}
        self.sent_at = time.perf_counter()
        self._http.request(method, path, body=payload, headers=headers)
        self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.response = self._http.getresponse()
        self.status = self.response.status
        self.headers = {key.lower(): value for key, value in self.response.getheaders()}

    def frames(self) -> Iterator[Event | str]:
        """Events, and comments as plain strings, until the server ends the body."""
        event_id, data = "", []
        while True:
            raw = self.response.readline()
            if not raw:
                return
            line = raw.decode().rstrip("\r\n")
            if line.startswith(":"):
                yield line[1:].strip()
            elif line.startswith("id:"):
                event_id = line[3:].strip()
            elif line.startswith("data:"):
                data.append(line[5:].strip())
            elif not line and data:
                yield Event(event_id, "\n".join(data), time.perf_counter())
                event_id, data = "", []

    def close(self) -> None:
        """Hang up, also in mid-stream."""
        if self._http.sock:
            with contextlib.suppress(OSError):
                self._http.sock.shutdown(socket.SHUT_RDWR)
        self.response.close()
        self._http.close()
