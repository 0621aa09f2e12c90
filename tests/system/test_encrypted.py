"""A serving installation with a key: nothing of a conversation stands on its disk, not in a lane, the store, a journal or a session."""

from __future__ import annotations

import contextlib

import numpy as np

from bench.driver import System
from tests.system import harness

SECRET = "the combination of the safe is seventeen forty-two"


def readable(system: System, whats: list[bytes]) -> list[str]:
    """Files that hold any of these."""
    found = []
    for path in [path for root in (system.paths.data_dir, system.paths.lane_dir) for path in root.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):  # one that is gone or has another name by now
            if path.is_file() and any(what in path.read_bytes() for what in whats):
                found.append(str(path))
    return found


def ask(system: System, turn: list[dict[str, str]]) -> dict:
    body = harness.chat_of(system, turn, tokens=8)
    status, _, answer = system.call("POST", harness.CHAT, body, headers={"X-Session-Id": "the-secret-session"})
    assert status == 200, answer
    return answer


def test_tiny_nothing_is_readable_and_the_session_goes_on(guarded: System) -> None:
    turn = [{"role": "user", "content": SECRET}]
    said = ask(guarded, turn)
    text = said["choices"][0]["message"]["content"]
    view = guarded.get("/v1/sessions/the-secret-session?tokens=1")
    tokens = np.array(view["token_ids"], "<i4").tobytes()
    whats = [SECRET.encode(), tokens[4:36], b"the-secret-session"]
    assert readable(guarded, whats) == [], "while it serves, with everything still in the lane"
    guarded.kill_all()
    assert readable(guarded, whats) == []

    guarded.start()
    turn += [{"role": "assistant", "content": text}, {"role": "user", "content": "and now?"}]
    again = ask(guarded, turn)
    assert again["concordia"]["restored_tokens"] > 0 and not again["concordia"]["reason"].startswith("bad")
    assert guarded.get("/v1/sessions/the-secret-session")["turns"] == 2
