"""Case 5: the gateway is killed in mid-stream; the client resumes by cursor at the new one; no engine is touched."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal

import pytest

from bench.driver import DriverError, System
from bench.sse import Answer
from tests.system import harness as h


def resume_when_back(system: System, answer: Answer, **options: object) -> Answer:
    """Try again until the new gateway answers, as a client with a reconnect loop does."""

    def attempt() -> bool:
        try:
            system.resume(answer, **options)  # type: ignore[arg-type]
        except (OSError, http.client.HTTPException, DriverError):
            return False
        return not answer.broken

    system.wait("the stream at a new gateway", attempt, every_s=0.02)
    return answer


@pytest.mark.parametrize(
    ("headers", "by"),
    [({}, "header"), ({"X-Session-Id": "case-5"}, "query")],
    ids=["anonymous, by header", "session, by query"],
)
def test_demo_gateway_killed_client_resumes_by_cursor(
    demo: System, reference: System, headers: dict[str, str], by: str
) -> None:
    seed = 71 + len(headers)
    want = reference.stream(h.COMPLETIONS, h.story(reference, seed, h.SAMPLED, tokens=20))
    before = {engine.id: engine.pid for engine in demo.engines()}
    killed: list[int] = []

    def run() -> Answer:
        kill = h.after(10, lambda answer: killed.append(demo.signal("gateway")))
        return demo.stream(h.COMPLETIONS, h.story(demo, seed, h.SAMPLED, tokens=20), headers=headers, watch=kill)

    got = h.until(lambda answer: answer.broken, demo, run)
    resume_when_back(demo, got, by=by)
    h.assert_same(got, want, "gateway killed after 10 tokens")
    assert demo.pid("gateway") not in (0, *killed)
    h.settled(demo)
    assert {engine.id: engine.pid for engine in demo.engines()} == before, "an engine was restarted"
    whole = demo.fetch(got.stream_id)
    assert [(e.id, e.data) for e in whole.events] == [(e.id, e.data) for e in got.events]


def test_tiny_gateway_killed_twice_and_engine_once_in_one_answer(tiny: System) -> None:
    body = h.chat(tiny, h.prompts(seed=74, count=1)[0], tokens=400)
    want = tiny.stream(h.CHAT, body)

    def run() -> Answer:
        return tiny.stream(h.CHAT, body, watch=h.after(20, lambda answer: tiny.signal("gateway")))

    got = h.until(lambda answer: answer.broken, tiny, run)
    resume_when_back(tiny, got, watch=h.after(len(got.tokens) + 50, h.killer(tiny)))
    h.assert_same(got, want, "gateway and engine killed")


def test_tiny_table_of_sessions_cut_under_a_running_serve_is_set_aside_and_made_anew(tiny: System) -> None:
    body, headers = h.chat(tiny, h.prompts(seed=75, count=1)[0], tokens=4), {"X-Session-Id": "cut"}
    for _ in range(2):
        tiny.stream(h.CHAT, body, headers=headers)
    before = tiny.get("/v1/sessions/cut")
    gateway, table = tiny.pid("gateway"), tiny.paths.sessions
    os.truncate(table / "data.mdb", 2 * 4096)
    with contextlib.suppress(OSError, http.client.HTTPException, DriverError):
        tiny.stream(h.CHAT, body, headers={"X-Session-Id": "cut-2"})  # written down, which somebody dies of
    tiny.wait("another gateway", lambda: tiny.pid("gateway") not in (0, gateway))
    h.settled(tiny)
    after = tiny.get("/v1/sessions/cut")
    assert (after["turns"], after["tokens"], after["streams"]) == (before["turns"], before["tokens"], before["streams"])
    tiny.wait("a degraded state", lambda: "sessions_damaged" in str(tiny.get("/health")["degraded"]))
    (table / "damaged-0.mdb").unlink()
    tiny.wait("no damage", lambda: not tiny.get("/health")["degraded"])


def test_tiny_who_connects_while_no_gateway_is_there_waits_and_is_not_refused(tiny: System) -> None:
    """`serve` holds the port: these requests are sent once, to nobody, and the next gateway answers them."""
    body = h.chat(tiny, h.prompts(seed=73, count=1)[0], tokens=4)
    want = tiny.stream(h.CHAT, body)
    supervisor = tiny.pid("serve")
    os.kill(supervisor, signal.SIGSTOP)  # so that nobody is there for as long as we like
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=60.0)
    try:
        tiny.wait_dead(tiny.signal("gateway"))
        connection.request("GET", "/v1/models")
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert connection.getresponse().status == 200
    connection.close()
    tiny.wait_dead(tiny.signal("gateway"))
    h.assert_same(tiny.stream(h.CHAT, body), want, "sent while the gateway was killed")


def test_tiny_cursor_gives_exactly_what_comes_after_each_event(tiny: System) -> None:
    """A finished stream from every event on, by header and by query."""
    stream = tiny.stream(h.CHAT, h.chat(tiny, h.prompts(seed=75, count=1)[0], tokens=12, store=True))
    h.assert_whole(stream)
    for index in range(len(stream.events)):
        for by in ("header", "query"):
            part = Answer(stream_id=stream.stream_id, events=stream.events[: index + 1])
            tiny.resume(part, by=by)  # type: ignore[arg-type]
            assert [(e.id, e.data) for e in part.events] == [(e.id, e.data) for e in stream.events], (index, by)
    assert tiny.call("GET", "/v1/streams/no-such-stream")[0] == 404
