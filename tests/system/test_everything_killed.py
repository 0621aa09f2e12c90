"""Case 3, and the rest of the failure model: all processes, the host agent, the keeper are killed; nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from bench.driver import System, alive, wait_for
from bench.sse import Answer
from tests.system import harness as h
from tiers.lock import is_held
from tiers.offline import keeper_lock


@pytest.mark.timeout(200)
def test_demo_everything_killed_in_mid_answer_goes_on_after_the_restart(demo: System, reference: System) -> None:
    question = h.prompts(seed=51, count=1)[0]
    want = reference.stream(h.CHAT, h.chat(reference, question, tokens=32))
    session = {"X-Session-Id": "case-3"}

    def run() -> Answer:
        kill = h.after(20, lambda answer: demo.kill_all())
        answer = demo.stream(h.CHAT, h.chat(demo, question, tokens=32), headers=session, watch=kill)
        demo.start()
        return answer

    broken = h.until(lambda answer: answer.broken, demo, run)
    whole = demo.fetch(broken.stream_id)
    h.assert_same(whole, want, "fetched whole after everything was killed")
    known = [(event.id, event.data) for event in broken.events]
    assert [(event.id, event.data) for event in whole.events][: len(known)] == known, "what the client saw changed"
    tail = demo.resume(broken)
    h.assert_same(tail, want, "resumed by cursor after everything was killed")

    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": want.text},
        {"role": "user", "content": "Go on."},
    ]
    second = demo.stream(h.CHAT, h.chat_of(demo, messages, tokens=8), headers=session)
    h.assert_whole(second)
    stored = whole.usage["prompt_tokens"] + whole.usage["completion_tokens"] - 1  # the last token was never fed
    assert h.cached(second) >= stored, f"{h.cached(second)} of {stored} stored tokens were reused: {second.concordia}"
    later = reference.stream(h.CHAT, h.chat_of(reference, messages, tokens=8))
    assert second.text == later.text
    assert h.counts(second) == h.counts(later)


def test_demo_parked_session_comes_back_from_disk(demo: System) -> None:
    """Park takes it off the device; a restart leaves only the disk; the next turn computes only what is new."""
    session = {"X-Session-Id": "parked"}
    tokens = h.random_tokens(seed=52, count=200)
    first = demo.stream(h.COMPLETIONS, h.completion(demo, tokens, tokens=4), headers=session)
    h.assert_whole(first)
    status, _, body = demo.call("POST", "/v1/sessions/parked/park")
    assert status == 200, body
    demo.kill_all()
    demo.start()
    names = [row.get("id") or row.get("session") for row in sessions(demo)]
    assert "parked" in names, names
    second = demo.stream(h.COMPLETIONS, h.completion(demo, [*tokens, 1000, 1001], tokens=4), headers=session)
    assert h.cached(second) >= len(tokens) - 1, second.concordia
    assert second.concordia["verdict"] in ("restored", "partial"), second.concordia
    assert second.concordia["recomputed_tokens"] <= 4, second.concordia
    status, _, body = demo.call("DELETE", "/v1/sessions/parked")
    assert status in (200, 204), body
    assert demo.call("GET", "/v1/sessions/parked")[0] == 404


def sessions(system: System) -> list[dict]:
    body = system.get("/v1/sessions")
    return body if isinstance(body, list) else body.get("sessions") or body.get("data") or []


def test_tiny_host_agent_killed_engines_go_on_and_are_adopted(tiny: System) -> None:
    body = h.chat(tiny, h.prompts(seed=53, count=1)[0], tokens=400)
    want = tiny.stream(h.CHAT, body)
    h.settled(tiny)
    before = {engine.id: engine.pid for engine in tiny.engines()}
    host = tiny.pid("host")
    got = tiny.stream(h.CHAT, body, watch=h.after(20, lambda answer: tiny.signal("host")))
    h.assert_same(got, want, "host agent killed")
    assert not h.recoveries(got), "the engine went on"
    tiny.wait("a new host agent", lambda: tiny.pid("host") not in (0, host))
    h.settled(tiny)
    assert {engine.id: engine.pid for engine in tiny.engines()} == before, (
        "running engines are adopted, not started again"
    )

    # The new host agent watches the engines that it adopted.
    again = h.until(h.recoveries, tiny, lambda: tiny.stream(h.CHAT, body, watch=h.kill_at(tiny, 20)))
    h.assert_same(again, want, "engine killed under the new host agent")


def test_tiny_keeper_killed_streams_go_on_and_records_reach_the_disk(tiny: System) -> None:
    keeper = tiny.pid("keeper")
    assert keeper
    session = {"X-Session-Id": "keeper-killed"}
    body = h.chat(tiny, h.prompts(seed=54, count=1)[0], tokens=300)
    first = tiny.stream(
        h.CHAT, body, headers=session, watch=h.after(20, lambda answer: os.kill(keeper, signal.SIGKILL))
    )
    h.assert_whole(first)
    assert not h.recoveries(first)
    tiny.wait("a new keeper", lambda: tiny.pid("keeper") not in (0, keeper))
    tiny.kill_all()
    tiny.start()
    again = tiny.stream(h.CHAT, body, headers=session)
    h.assert_same(again, first, "the same request after keeper and everything else were killed")
    assert h.cached(again) >= first.usage["prompt_tokens"] - 1, again.concordia


def test_tiny_everything_killed_again_and_again_in_one_answer(tiny: System) -> None:
    """Every restart adds a few tokens; the text is the uninterrupted run's."""
    body = h.chat(tiny, h.prompts(seed=55, count=1)[0], h.SAMPLED, tokens=500)
    want = tiny.stream(h.CHAT, body)
    assert len(want.tokens) > 300, "choose another seed"
    h.settled(tiny)
    got = tiny.stream(
        h.CHAT, body, headers={"X-Session-Id": "again"}, watch=h.after(30, lambda answer: tiny.kill_all())
    )
    hits = []
    if got.broken:
        tiny.start()
        hits.append(len(got.tokens))
        got = tiny.resume(got, watch=h.after(hits[0] + 60, lambda answer: tiny.kill_all()))
    if got.broken:
        tiny.start()
        hits.append(len(got.tokens))
        got = tiny.resume(got)
    h.assert_same(got, want, "everything killed again and again")
    lost = [recovery for recovery in h.recoveries(got) if recovery["reason"] == "lost with its gateway"]
    assert len(lost) == len(hits) and all(recovery["gap_ms"] > 0 for recovery in lost), (hits, h.recoveries(got))


def test_tiny_killed_serve_takes_gateway_and_host_along(tiny: System) -> None:
    """Nothing listens on behalf of a supervisor that is gone; the next serve has everything again."""
    gateway, host = tiny.pid("gateway"), tiny.pid("host")
    assert tiny.serve is not None
    tiny.serve.kill()
    tiny.serve.wait(60.0)
    wait_for("the end of gateway and host", lambda: not alive(gateway) and not alive(host), 60.0)
    before = {name: tiny.pid(name) for name in ("e0", "e1")}
    tiny.start()
    assert {name: tiny.pid(name) for name in ("e0", "e1")} == before, "a restarted system adopts engines that still run"
    h.assert_whole(tiny.stream(h.CHAT, h.chat(tiny, "Still here?", tokens=8)))


def test_tiny_data_directory_deleted_while_it_serves_is_written_anew(tiny: System) -> None:
    """Then everything is killed: the stream goes on, sessions have their names, and what was stored is found."""
    idle = {"X-Session-Id": "deleted-idle"}
    first = tiny.stream(h.CHAT, h.chat(tiny, "Before it was deleted.", tokens=24), headers=idle)
    body = h.chat(tiny, h.prompts(seed=56, count=1)[0], h.SAMPLED, tokens=500)
    want = tiny.stream(h.CHAT, body)
    h.settled(tiny)

    def delete(answer: Answer) -> None:
        shutil.rmtree(tiny.paths.data_dir, ignore_errors=True)  # files are made in it all the time
        journals = [tiny.paths.journal(stream) for stream in (answer.stream_id, first.stream_id)]
        there = [*journals, tiny.paths.sessions / "data.mdb", tiny.paths.store / "data.mdb"]
        tiny.wait("new files", lambda: all(path.exists() for path in there), 60.0)
        tiny.wait("their locks", lambda: is_held(tiny.paths.serve_lock) and is_held(keeper_lock(tiny.paths)))
        tiny.kill_all()

    got = tiny.stream(h.CHAT, body, headers={"X-Session-Id": "deleted-live"}, watch=h.after(20, delete))
    tiny.start()
    got = tiny.resume(got)
    h.assert_same(got, want, "data directory deleted, then everything killed")
    names = {row["id"] for row in sessions(tiny)}
    assert {"deleted-idle", "deleted-live"} <= names
    again = tiny.stream(h.CHAT, h.chat(tiny, "Before it was deleted.", tokens=24), headers=idle)
    h.assert_same(again, first, "the same request after the data directory was deleted")
    assert h.cached(again) >= first.usage["prompt_tokens"] - 1, again.concordia
    whole = tiny.fetch(first.stream_id)
    h.assert_same(whole, first, "a stream that had ended before")
