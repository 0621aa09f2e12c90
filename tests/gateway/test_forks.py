"""Forks: a name for the beginning of another session's list; both go on, survive restarts, and cost next to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.messages import pack_tokens
from gateway.errors import ApiError
from gateway.forks import ForkRequest, fork_position, parse_fork
from gateway.sessions import SessionFile, SessionRecord, SessionTable
from tests.gateway.conftest import World, chat

PROMPT_COUNT = len("<user>Hello\n<assistant>")


async def fork(world: World, session: str, **body: Any) -> tuple[int, Any]:
    status, _, answer = await world.post(f"/v1/sessions/{session}/fork", body if body else b"")
    return status, answer


async def test_a_fork_has_the_tokens_of_its_parent_and_goes_its_own_way(world: World) -> None:
    await world.post("/v1/chat/completions", chat(stream=False, session_id="a"))
    status, view = await fork(world, "a", session_id="b", position=PROMPT_COUNT + 3)
    assert (status, view["id"], view["forked_from"]) == (200, "b", "a")
    assert (view["tokens"], view["fork_position"]) == (PROMPT_COUNT + 3, PROMPT_COUNT + 3)
    whole = (await world.get("/v1/sessions/a?tokens=true"))["token_ids"]
    assert (await world.get("/v1/sessions/b?tokens=true"))["token_ids"] == whole[: PROMPT_COUNT + 3]
    await world.post("/v1/completions", {"model": "tiny", "prompt": whole[:20], "max_tokens": 4, "session_id": "b"})
    assert (await world.get("/v1/sessions/b"))["tokens"] == 24
    assert (await world.get("/v1/sessions/a?tokens=true"))["token_ids"] == whole
    names = {session["id"] for session in (await world.get("/v1/sessions"))["data"]}
    assert names == {"a", "b"}


def test_a_position_of_thousands_of_digits_is_named() -> None:
    with pytest.raises(ApiError, match="position: the number does not fit") as caught:
        parse_fork(b'{"position": %s}' % (b"9" * 5000))
    assert (caught.value.status, caught.value.param) == (400, "position")


async def test_forks_survive_a_restart_and_their_parent(make_world) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    await world.engine("e0")
    await world.post("/v1/chat/completions", chat(stream=False, session_id="a"))
    _, made = await fork(world, "a")
    assert made["id"].startswith("a-fork-")
    whole = (await world.get("/v1/sessions/a?tokens=1"))["token_ids"]
    async with world.http.delete("/v1/sessions/a") as response:
        assert response.status == 200
    await world.end_gateway()
    await world.start_gateway()
    again = await world.get(f"/v1/sessions/{made['id']}?tokens=1")
    assert again["token_ids"] == whole
    assert again["forked_from"] == "a"


async def test_a_fork_that_was_answered_is_on_disk(world: World) -> None:
    await world.post("/v1/chat/completions", chat(stream=False, session_id="a"))
    await fork(world, "a", session_id="b", position=5)
    with world.config.paths.sessions.joinpath("data.mdb").open("rb") as file:
        assert b"fork_position" in file.read(), "a gateway that is killed now loses nothing of it"


async def test_a_choice_that_the_session_did_not_take_can_be_forked(world: World) -> None:
    await world.post("/v1/chat/completions", chat(stream=False, n=3, session_id="a"))
    streams = (await world.get("/v1/sessions/a"))["streams"]
    _, view = await fork(world, "a", stream=streams[2], session_id="third")
    tokens = (await world.get(f"/v1/streams/{streams[2]}?format=json"))["stream"]["tokens"]
    assert (await world.get("/v1/sessions/third?tokens=1"))["token_ids"][PROMPT_COUNT:] == tokens
    assert view["tokens"] == PROMPT_COUNT + 12


async def test_what_is_wrong_with_a_fork_is_said(world: World) -> None:
    await world.post("/v1/chat/completions", chat(stream=False, session_id="a"))
    cases: list[tuple[int, str, dict[str, Any]]] = [
        (400, "position", {"position": 0}),
        (400, "position", {"position": PROMPT_COUNT + 13}),
        (400, "message", {"message": 5}),
        (400, "message", {"message": 0, "position": 1}),
        (400, "session_id", {"session_id": "../x"}),
        (400, "session_id", {"session_id": ""}),
        (404, "stream", {"stream": "00" * 12}),
        (409, "", {"session_id": "a"}),
    ]
    for status, param, body in cases:
        got, answer = await fork(world, "a", **body)
        assert (got, answer["error"]["param"] or "") == (status, param), answer
    assert (await fork(world, "nobody"))[0] == 404


def test_a_message_ends_at_its_end_token() -> None:
    tokens = [7, 8, 2, 9, 2, 10, 11]
    assert fork_position(ForkRequest(message=0), tokens, [2]) == 3
    assert fork_position(ForkRequest(message=1), tokens, [2]) == 5
    assert fork_position(ForkRequest(), tokens, [2]) == 7
    with pytest.raises(ApiError, match="below 2"):
        fork_position(ForkRequest(message=2), tokens, [2])
    with pytest.raises(ApiError, match="none of its messages has ended"):
        fork_position(ForkRequest(message=0), tokens, [3])
    with pytest.raises(ApiError, match="no tokens"):
        fork_position(ForkRequest(), [], [2])
    with pytest.raises(ApiError, match="7 tokens is damaged"):
        fork_position(ForkRequest(), [], [2], 7)
    assert parse_fork(b"") == ForkRequest()


def table_with(directory: Path, tokens: list[int]) -> SessionTable:
    table = SessionTable(directory)
    table.adopt(SessionRecord("a", 1.0, 1.0, token_count=len(tokens)), pack_tokens(tokens))
    return table


def test_a_thousand_forks_of_a_4k_session_cost_kilobytes(tmp_path: Path) -> None:
    tokens = list(range(4096))
    table = table_with(tmp_path / "s", tokens)
    for index in range(1000):
        table.fork("a", f"f{index}", table.tokens("a"), 4000)
    table.close()
    assert sum(file.stat().st_size for file in (tmp_path / "s").iterdir() if file.name == "data.mdb") < 1 << 20
    file = SessionFile(tmp_path / "s")
    assert len(file.all()) == 1001
    assert file.tokens("f999") == pack_tokens(tokens[:4000])
    file.close()


def test_a_borrowed_list_goes_with_its_last_borrower(tmp_path: Path) -> None:
    table = table_with(tmp_path / "s", [1, 2, 3, 4])
    table.fork("a", "b", table.tokens("a"), 3)
    table.fork("b", "c", table.tokens("b"), 2)
    assert table.shared_with_relatives("a") == 3
    assert table.shared_with_relatives("c") == 2
    key = table.get("b").list_key  # type: ignore[union-attr]
    table.remove("b")
    assert table.tokens("c") == pack_tokens([1, 2])
    table.remove("c")
    table.close()
    again = SessionTable(tmp_path / "s")
    assert again._file.read("tokens", key) is None
    assert again.tokens("a") == pack_tokens([1, 2, 3, 4])
    again.close()
