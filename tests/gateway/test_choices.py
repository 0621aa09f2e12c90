"""Several choices of one request: each a stream of its own, one numbering for their client, whatever dies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engine import messages as m
from gateway.choices import choice_seed
from tests.gateway.conftest import MODEL, Sse, World, byte_tokenizer, chat
from tests.gateway.fake_engine import token_at

PROMPT_COUNT = len("<user>Hello\n<assistant>")
COUNT = 4


def expected(choice: int, tokens: int = 12) -> str:
    seed = choice_seed(7, choice)
    return byte_tokenizer().decode([token_at(seed, PROMPT_COUNT + k) for k in range(tokens)])


def by_choice(sse: Sse) -> dict[int, list[dict[str, Any]]]:
    """Each choice's parts, in order."""
    parts: dict[int, list[dict[str, Any]]] = {}
    for chunk in sse.chunks:
        for choice in chunk.get("choices", []):
            parts.setdefault(choice["index"], []).append(choice)
    return parts


def texts(sse: Sse) -> dict[int, str]:
    return {c: "".join(p["delta"].get("content", "") for p in parts) for c, parts in by_choice(sse).items()}


def assert_whole(sse: Sse) -> None:
    assert sse.ids == list(range(COUNT * (1 + 12 + 1) + 2)), "opening, tokens and finish of each, usage, [DONE]"
    assert sse.events[-1][1] == "[DONE]"
    assert texts(sse) == {choice: expected(choice) for choice in range(COUNT)}
    for parts in by_choice(sse).values():
        assert parts[0]["delta"]["role"] == "assistant"
        assert [p["finish_reason"] for p in parts] == [None] * 13 + ["length"]
    usage = sse.chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (PROMPT_COUNT, 12 * COUNT)
    assert usage["total_tokens"] == PROMPT_COUNT + 12 * COUNT
    assert {chunk["id"] for chunk in sse.chunks} == {"chatcmpl-" + sse.headers["X-Stream-Id"]}


BODY = chat(n=COUNT, stream_options={"include_usage": True})


async def test_streamed_and_not_agree(world: World) -> None:
    sse = await world.events("POST", "/v1/chat/completions", BODY)
    assert_whole(sse)
    status, headers, answer = await world.post("/v1/chat/completions", chat(n=COUNT, stream=False))
    assert status == 200
    assert [c["index"] for c in answer["choices"]] == list(range(COUNT))
    assert {c["index"]: c["message"]["content"] for c in answer["choices"]} == texts(sse)
    assert answer["usage"]["completion_tokens"] == 12 * COUNT
    assert answer["id"].endswith(headers["X-Stream-Id"])
    assert len({c["stream_id"] for c in answer["concordia"]["choices"]}) == COUNT


async def test_every_cursor_gives_exactly_what_comes_after(world: World) -> None:
    sse = await world.events("POST", "/v1/chat/completions", BODY)
    path = f"/v1/streams/{sse.headers['X-Stream-Id']}"
    assert (await world.events("GET", path)).events == sse.events
    for cursor in range(len(sse.events)):
        assert (await world.events("GET", path, params={"from": str(cursor)})).events == sse.events[cursor + 1 :]
    view = await world.get(path + "?format=json")
    assert view["stream"]["state"] == "finished"
    one = view["stream"]["choices"][2]
    alone = await world.get(f"/v1/streams/{one['id']}?format=json")
    assert alone["choices"][0]["message"]["content"] == expected(2)
    assert alone["choices"][0]["index"] == 2


async def test_killed_at_every_token(make_world) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    engine = await world.engine("e0")
    for k in range(11):
        engine.kill_at = PROMPT_COUNT + k
        task = asyncio.create_task(world.events("POST", "/v1/chat/completions", BODY))

        async def died() -> bool:
            return engine.dead  # noqa: B023

        await world.until(died)
        engine = await world.engine("e0", engine.incarnation + 1)
        got = await task
        assert_whole(got)
        recovered = got.chunks[-1]["concordia"]["choices"]
        assert [len(choice["recoveries"]) for choice in recovered] == [1] * COUNT, "each choice recovers on its own"


async def test_gateway_killed_in_the_middle(make_world) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    engine = await world.engine("e0", budget=5)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", BODY))

    async def five_each() -> bool:
        streams = (await world.get("/v1/streams"))["data"]
        return len(streams) == COUNT and all(s["delivered_tokens"] == 5 for s in streams)

    await world.until(five_each)
    await world.kill_gateway()
    first = await task
    assert first.ids == list(range(COUNT * 6))
    await world.start_gateway()
    path = f"/v1/streams/{first.headers['X-Stream-Id']}"
    engine.allow(None)
    rest = await world.events("GET", path, headers={"Last-Event-ID": str(first.ids[-1])})
    again = await world.events("GET", path)
    assert first.events + rest.events == again.events
    again.headers["X-Stream-Id"] = first.headers["X-Stream-Id"]
    assert_whole(again)
    await world.kill_gateway()
    await world.start_gateway()
    assert (await world.events("GET", path)).events == again.events


async def test_best_of_answers_the_likeliest(world: World) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 6, "seed": 7, "best_of": 3, "n": 2}
    status, headers, answer = await world.post("/v1/completions", body)
    assert status == 200
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert all(c["logprobs"] is None for c in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 18, "what was dropped was computed too"
    assert len({c["text"] for c in answer["choices"]}) == 2
    _, _, shown = await world.post("/v1/completions", {**body, "logprobs": 1})
    assert all(len(c["logprobs"]["tokens"]) == 6 for c in shown["choices"])


async def test_client_that_leaves_ends_all_choices_unless_stored(world: World) -> None:
    engine = world.engines[0]
    engine.step_s = 0.002
    for more, cancelled in [({}, True), ({"store": True}, False)]:
        async with world.http.post("/v1/chat/completions", data=json.dumps({**BODY, "max_tokens": 60, **more})) as got:
            group_id = got.headers["X-Stream-Id"]
            await got.content.readany()

        async def ended(group_id: str = group_id) -> dict[str, Any] | None:
            view = await world.get(f"/v1/streams/{group_id}?format=json")
            return view if view["stream"]["state"] == "finished" else None

        view = await world.until(ended)
        ends = {choice["end"] for choice in view["concordia"]["choices"]}
        assert ends == ({"disconnected"} if cancelled else {"length"})


async def test_delete_ends_all_choices(world: World) -> None:
    world.engines[0].allow(3)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", BODY))

    async def started() -> str | None:
        streams = (await world.get("/v1/streams"))["data"]
        return streams[0]["group"] if len(streams) == COUNT and streams[0]["delivered_tokens"] == 3 else None

    group_id = await world.until(started)
    async with world.http.delete(f"/v1/streams/{group_id}") as response:
        assert (await response.json())["cancelled"] is True
    sse = await task
    assert sse.ids == list(range(COUNT * 5 + 2))
    assert all(parts[-1]["finish_reason"] == "stop" for parts in by_choice(sse).values())


async def test_session_goes_on_with_the_first_choice(world: World) -> None:
    await world.post("/v1/chat/completions", chat(n=3, stream=False, session_id="s"))
    view = await world.get("/v1/sessions/s")
    assert (view["turns"], view["tokens"], len(view["streams"])) == (1, PROMPT_COUNT + 12, 3)
    assert [submit.session for submit in world.engines[0].submits] == ["s", "", ""]


@pytest.mark.parametrize("restarted", [False, True])
async def test_of_a_session_that_is_deleted_the_choices_can_not_be_read_together_either(
    world: World, restarted: bool
) -> None:
    sse = await world.events("POST", "/v1/chat/completions", chat(n=2, session_id="s"))
    if restarted:
        await world.kill_gateway()
        await world.start_gateway()
    for method, path in (("DELETE", "sessions/s"), ("GET", f"streams/{sse.headers['X-Stream-Id']}")):
        async with world.http.request(method, f"/v1/{path}") as response:
            assert response.status == (200 if method == "DELETE" else 404)
    assert not list(world.config.paths.journal_dir.iterdir())


async def test_of_a_session_that_is_deleted_nothing_can_be_read_though_its_record_names_only_the_latest_streams(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.sessions.STREAMS_KEPT", 2)
    for body in (chat(n=3, session_id="s"), chat(session_id="s"), chat(n=2, session_id="other")):
        await world.events("POST", "/v1/chat/completions", body)
    async with world.http.delete("/v1/sessions/s") as response:
        assert response.status == 200
    left = sorted(path.suffix for path in world.config.paths.journal_dir.iterdir())
    assert left == [".group", ".journal", ".journal"], "the other session's"


@pytest.mark.parametrize("n", [1, 2, 16])
def test_seeds_of_choices_differ_and_the_first_is_the_requests_own(n: int) -> None:
    seeds = [choice_seed(5, choice) for choice in range(n)]
    assert seeds[0] == 5
    assert len(set(seeds)) == n
    assert all(0 <= seed < 1 << 63 for seed in seeds)


async def test_a_choice_that_fails_fails_the_answer(world: World) -> None:
    world.engines[0].refuse = m.Refused("", 0, "failed", "it can't")
    status, _, answer = await world.post("/v1/chat/completions", chat(n=2, stream=False))
    assert (status, answer["error"]["code"]) == (500, "failed")
    sse = await world.events("POST", "/v1/chat/completions", {**BODY, "n": 2})
    assert sse.errors and sse.errors[0]["message"] == "it can't"
    assert sse.ids == list(range(len(sse.ids)))
    assert "[DONE]" not in [data for _, data in sse.events]
