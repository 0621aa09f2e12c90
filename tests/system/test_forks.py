"""A session is forked, everything is killed, and both branches go on from what is stored."""

from __future__ import annotations

from bench.driver import System
from tests.system import harness as h

OWN_TOKENS = 12


def test_tiny_fork_then_kill_everything(tiny: System) -> None:
    prompt = [3 + index % 500 for index in range(300)]
    session = {"X-Session-Id": "trunk"}
    first = tiny.stream(h.COMPLETIONS, h.completion(tiny, prompt, tokens=20), headers=session)
    h.assert_whole(first)
    status, _, fork = tiny.call("POST", "/v1/sessions/trunk/fork", {"session_id": "branch", "position": 310})
    assert (status, fork["tokens"], fork["forked_from"]) == (200, 310, "trunk"), fork
    h.settled(tiny)
    tiny.kill_all()
    h.settled(tiny.start())
    listed = {item["id"] for item in tiny.get("/v1/sessions")["data"]}
    assert {"trunk", "branch"} <= listed
    branch = tiny.get("/v1/sessions/branch?tokens=true")["token_ids"]
    trunk = tiny.get("/v1/sessions/trunk?tokens=true")["token_ids"]
    assert branch == trunk[:310] and len(trunk) == 320
    for name, tokens in (("branch", branch), ("trunk", trunk)):
        body = h.completion(tiny, [*tokens, 7, 8, 9], tokens=OWN_TOKENS)
        went_on = tiny.stream(h.COMPLETIONS, body, headers={"X-Session-Id": name})
        h.assert_whole(went_on)
        assert h.cached(went_on) >= len(tokens) - 1, went_on.concordia
        assert went_on.concordia["verdict"] in ("restored", "resident")
    assert tiny.get("/v1/sessions/branch")["tokens"] == 310 + 3 + OWN_TOKENS
    assert tiny.call("DELETE", "/v1/sessions/trunk")[0] == 200
    again = h.completion(tiny, tiny.get("/v1/sessions/branch?tokens=true")["token_ids"] + [5], tokens=4)
    answer = tiny.stream(h.COMPLETIONS, again, headers={"X-Session-Id": "branch"})
    assert h.cached(answer) >= 310, "the branch outlives its trunk"
    assert tiny.call("DELETE", "/v1/sessions/branch")[0] == 200
