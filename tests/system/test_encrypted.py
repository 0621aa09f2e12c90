"""A serving installation with a key: nothing of a conversation stands on its disk, not in a lane, the store, a journal or a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.driver import System
from tests.system import harness

pytestmark = pytest.mark.system

KEY = "7e" * 32
SECRET = "the combination of the safe is seventeen forty-two"


@pytest.fixture
def sealed(tiny_model: Path, tmp_path: Path) -> Iterator[System]:
    tiers = {**harness.SMALL_LANES, "lane_encryption": "always", "durability": "turn"}
    settings = {"engine": harness.ONE_THREAD, "tiers": tiers}
    system = System(
        tiny_model, tmp_path / "data", engines=1, settings=settings, environment={"CONCORDIA_STORE_KEYS": f"* = {KEY}"}
    )
    try:
        yield system.start()
    finally:
        system.close()


def readable(system: System, whats: list[bytes]) -> list[str]:
    """Files that hold any of these."""
    roots = [system.paths.data_dir, system.paths.lane_dir]
    files = [path for root in roots for path in root.rglob("*") if path.is_file()]
    return [str(path) for path in files if any(what in path.read_bytes() for what in whats)]


def ask(system: System, turn: list[dict[str, str]]) -> dict:
    body = harness.chat_of(system, turn, tokens=8)
    status, _, answer = system.call("POST", harness.CHAT, body, headers={"X-Session-Id": "the-secret-session"})
    assert status == 200, answer
    return answer


def test_tiny_nothing_is_readable_and_the_session_goes_on(sealed: System) -> None:
    turn = [{"role": "user", "content": SECRET}]
    said = ask(sealed, turn)
    text = said["choices"][0]["message"]["content"]
    view = sealed.get("/v1/sessions/the-secret-session?tokens=1")
    tokens = np.array(view["token_ids"], "<i4").tobytes()
    whats = [SECRET.encode(), tokens[4:36], b"the-secret-session"]
    assert readable(sealed, whats) == [], "while it serves, with everything still in the lane"
    sealed.kill_all()
    assert readable(sealed, whats) == []

    sealed.start()
    turn += [{"role": "assistant", "content": text}, {"role": "user", "content": "and now?"}]
    again = ask(sealed, turn)
    assert again["concordia"]["restored_tokens"] > 0 and not again["concordia"]["reason"].startswith("bad")
    assert sealed.get("/v1/sessions/the-secret-session")["turns"] == 2
