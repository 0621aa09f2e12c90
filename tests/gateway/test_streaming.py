"""The whole path of a request at a gateway with fake engines: events, usage, ends, cursors."""

from __future__ import annotations

import asyncio
import json

from structlog.testing import capture_logs

from engine import messages as m
from gateway import metrics
from tests.gateway.conftest import MODEL, World, byte_tokenizer, chat
from tests.gateway.fake_engine import token_at


async def test_stream_has_one_event_a_token_and_says_what_was_reused(world: World) -> None:
    sse = await world.events("POST", "/v1/chat/completions", chat(stream_options={"include_usage": True}))
    assert sse.status == 200
    assert sse.headers["Content-Type"].startswith("text/event-stream")
    assert sse.ids == list(range(1 + 12 + 3))  # opening, tokens, finish, usage, [DONE]
    assert sse.chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert sse.finish_reason == "length"
    assert sse.events[-1][1] == "[DONE]"
    usage = sse.chunks[-1]["usage"]
    prompt_count = len("<user>Hello\n<assistant>")
    assert usage["prompt_tokens"] == prompt_count
    assert usage["completion_tokens"] == 12
    assert usage["prompt_tokens_details"]["cached_tokens"] == (prompt_count - 1) // 2
    assert sse.concordia["verdict"] == "restored"
    assert sse.concordia["restored_from"]["lane"] == (prompt_count - 1) // 2
    tokens = [token_at(7, prompt_count + k) for k in range(12)]
    assert sse.text == byte_tokenizer().decode(tokens)


async def test_whole_answer_equals_the_streamed_one(world: World) -> None:
    sse = await world.events("POST", "/v1/chat/completions", chat())
    status, headers, answer = await world.post("/v1/chat/completions", chat(stream=False))
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == sse.text
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["id"].endswith(headers["X-Stream-Id"])
    assert answer["concordia"]["stream_id"] == headers["X-Stream-Id"]


async def test_every_cursor_gives_exactly_what_comes_after(world: World) -> None:
    sse = await world.events("POST", "/v1/chat/completions", chat(stream_options={"include_usage": True}))
    path = f"/v1/streams/{sse.headers['X-Stream-Id']}"
    assert (await world.events("GET", path)).events == sse.events
    for cursor in range(len(sse.events)):
        by_query = await world.events("GET", path, params={"from": str(cursor)})
        by_header = await world.events("GET", path, headers={"Last-Event-ID": str(cursor)})
        assert by_query.events == by_header.events == sse.events[cursor + 1 :]


async def test_a_cursor_behind_the_last_event_is_said(world: World) -> None:
    engine = world.engines[0]
    sse = await world.events("POST", "/v1/chat/completions", chat())
    path, last = f"/v1/streams/{sse.headers['X-Stream-Id']}", sse.ids[-1]
    assert (await world.events("GET", path, params={"from": str(last - 1)})).events == [(last, "[DONE]")]
    at_end = await world.events("GET", path, params={"from": str(last)})
    assert (at_end.status, at_end.events, at_end.errors) == (200, [], [])
    for cursor in (last + 1, 9999):
        for options in ({"params": {"from": str(cursor)}}, {"headers": {"Last-Event-ID": str(cursor)}}):
            answer = await world.get(path, **options)
            assert answer["error"]["code"] == "out_of_range"
            assert f"at most {last}" in answer["error"]["message"]
    engine.allow(3)
    live, begun = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat())), live_reads()
    stream_id = await world.until(lambda: delivered(world, 3))
    early, late = (
        asyncio.create_task(world.events("GET", f"/v1/streams/{stream_id}", params={"from": cursor}))
        for cursor in ("5", "9999")
    )
    await world.until(lambda: has_read(begun + 2))
    engine.allow(None)
    assert (await early).events == (await live).events[6:], "it comes: it waits for it"
    assert (await late).events == []
    assert (await late).errors[0]["code"] == "out_of_range"


def live_reads() -> float:
    return metrics.registry.get_sample_value("concordia_resumed_readers_total", {"state": "live"}) or 0.0


async def has_read(count: float) -> bool:
    return live_reads() >= count


async def test_stop_string_ends_the_stream_and_tells_the_engine_where(world: World) -> None:
    whole = await world.events("POST", "/v1/completions", completion(max_tokens=60, seed=3))
    stop = next(c for c in whole.text[20:] if c.isascii() and c not in whole.text[:20])
    sse = await world.events("POST", "/v1/completions", completion(max_tokens=60, seed=3, stop=[stop, "never"]))
    assert sse.finish_reason == "stop"
    assert sse.text == whole.text.split(stop)[0]
    engine = world.engines[0]
    stream_id = sse.headers["X-Stream-Id"]
    cancel = next(c for c in engine.cancels if c.stream == stream_id)
    view = (await world.get(f"/v1/streams/{stream_id}?format=json"))["stream"]
    assert cancel.keep_position == 2 + view["delivered_tokens"]
    assert view["tokens"] == [token_at(3, 2 + k) for k in range(view["delivered_tokens"])]


def completion(**more: object) -> dict:
    return {"model": MODEL, "prompt": [10, 11], "max_tokens": 12, "seed": 7, "stream": True, **more}


async def test_stop_token_counts_but_has_no_text(world: World, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("tests.gateway.fake_engine.token_at", lambda seed, position: 1 if position == 6 else 70)
    sse = await world.events("POST", "/v1/completions", completion(stream_options={"include_usage": True}))
    assert sse.finish_reason == "stop"
    assert sse.text == "B" * 4
    assert sse.chunks[-1]["usage"]["completion_tokens"] == 5


async def test_logprobs_in_both_forms(world: World) -> None:
    _, _, chat_answer = await world.post(
        "/v1/chat/completions", chat(stream=False, logprobs=True, top_logprobs=2, max_tokens=3)
    )
    content = chat_answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert all(len(row["top_logprobs"]) == 2 and row["logprob"] == -0.5 for row in content)
    assert (
        b"".join(bytes(row["bytes"]) for row in content).decode(errors="replace")
        == chat_answer["choices"][0]["message"]["content"]
    )
    _, _, answer = await world.post("/v1/completions", completion(stream=False, logprobs=3, max_tokens=3))
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 3
    sse = await world.events("POST", "/v1/completions", completion(logprobs=3, max_tokens=3))
    streamed = [c["logprobs"] for chunk in sse.chunks for c in chunk["choices"] if c["logprobs"]]
    assert [row["tokens"][0] for row in streamed] == logprobs["tokens"]
    assert [row["text_offset"][0] for row in streamed] == logprobs["text_offset"]


async def test_the_drawn_token_is_always_among_the_likeliest_of_a_completion(world: World) -> None:
    _, _, answer = await world.post("/v1/completions", completion(stream=False, logprobs=0, max_tokens=3))
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{token: -0.5} for token in logprobs["tokens"]]


async def test_what_a_query_can_not_mean_is_named(world: World) -> None:
    _, headers, _ = await world.post("/v1/completions", completion(stream=False, session_id="s", max_tokens=3))
    stream = f"/v1/streams/{headers['X-Stream-Id']}"
    for path, params, field in (
        (stream, {"from": "\u0663"}, "from"),
        (stream, {"from": "1_0"}, "from"),
        (stream, {"from": "9" * 5000}, "from"),
        ("/v1/sessions/s", {"tokens": "maybe"}, "tokens"),
        ("/v1/streams", {"all": "2"}, "all"),
    ):
        answer = await world.get(path, params=params)
        assert answer["error"]["param"] == field
    assert "token_ids" not in await world.get("/v1/sessions/s", params={"tokens": "0"})


async def test_seed_is_chosen_once_and_kept(world: World) -> None:
    body = chat(stream=False)
    del body["seed"]
    answers = [await world.post("/v1/chat/completions", body) for _ in range(2)]
    assert answers[0][2]["choices"] != answers[1][2]["choices"]
    for _, headers, _ in answers:
        view = (await world.get(f"/v1/streams/{headers['X-Stream-Id']}?format=json"))["stream"]
        assert view["tokens"] == [token_at(view["seed"], view["prompt_tokens"] + k) for k in range(12)]


async def test_disconnect_cancels_an_anonymous_stream_but_no_stored_one(world: World) -> None:
    engine = world.engines[0]
    engine.step_s = 0.002
    for more, cancelled in [({}, True), ({"store": True}, False), ({"session_id": "s-1"}, False)]:
        async with world.http.post("/v1/chat/completions", data=json.dumps(chat(max_tokens=100, **more))) as response:
            stream_id = response.headers["X-Stream-Id"]
            await response.content.readany()
        view = await world.until(lambda stream_id=stream_id: ended(world, stream_id))
        assert (view["concordia"]["end"] == "disconnected") is cancelled, more
        assert view["stream"]["delivered_tokens"] == 100 or cancelled


async def ended(world: World, stream_id: str) -> dict | None:
    view = await world.get(f"/v1/streams/{stream_id}?format=json")
    return view if view["stream"]["state"] == "finished" else None


async def test_delete_ends_the_stream_cleanly(world: World) -> None:
    engine = world.engines[0]
    engine.allow(5)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat()))
    stream_id = await world.until(lambda: delivered(world, 5))
    async with world.http.delete(f"/v1/streams/{stream_id}") as response:
        assert (await response.json())["cancelled"] is True
    sse = await task
    assert sse.finish_reason == "stop"
    assert sse.ids == list(range(5 + 3))
    assert sse.concordia["end"] == "cancelled"
    assert sse.concordia["verdict"] == "restored"
    assert engine.cancels[-1].stream == stream_id
    async with world.http.delete(f"/v1/streams/{stream_id}") as response:
        assert (await response.json())["cancelled"] is False


async def delivered(world: World, count: int) -> str | None:
    live = (await world.get("/v1/streams"))["data"]
    return live[0]["id"] if live and live[0]["delivered_tokens"] >= count else None


async def test_two_readers_of_one_stream_see_the_same(world: World) -> None:
    world.engines[0].allow(3)
    first = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat()))
    stream_id = await world.until(lambda: delivered(world, 3))
    second = asyncio.create_task(world.events("GET", f"/v1/streams/{stream_id}", params={"from": "1"}))
    await asyncio.sleep(0.02)
    world.engines[0].allow(None)
    assert (await first).events[2:] == (await second).events


async def test_engine_that_refuses_is_a_clear_error(world: World) -> None:
    world.engines[0].refuse = m.Refused("", 0, "bad_token", "token ids must lie in [0, 260)")
    status, _, answer = await world.post("/v1/chat/completions", chat(stream=False))
    assert status == 400
    assert answer["error"]["code"] == "bad_token"
    sse = await world.events("POST", "/v1/chat/completions", chat())
    assert sse.errors[0]["message"] == "token ids must lie in [0, 260)"
    again = await world.events("GET", f"/v1/streams/{sse.headers['X-Stream-Id']}")
    assert again.events == sse.events


async def test_cursor_that_is_none_or_nonsense(world: World) -> None:
    sse = await world.events("POST", "/v1/chat/completions", chat())
    path = f"/v1/streams/{sse.headers['X-Stream-Id']}"
    empty = await world.events("GET", path, headers={"Last-Event-ID": ""})
    assert empty.events == sse.events, "a browser that saw nothing sends an empty header"
    for query in ("-1", "", "x"):
        async with world.http.get(path, params={"from": query}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "from"


async def test_a_browser_that_comes_back_goes_on_from_what_it_saw_last(world: World) -> None:
    """It sends the address as it was first opened, with `?from=`, and the last id in the header."""
    sse = await world.events("POST", "/v1/chat/completions", chat())
    path = f"/v1/streams/{sse.headers['X-Stream-Id']}"
    again = await world.events("GET", path, params={"from": "3"}, headers={"Last-Event-ID": "9"})
    assert again.events == sse.events[10:]
    first = await world.events("GET", path, params={"from": "3"}, headers={"Last-Event-ID": ""})
    assert first.events == sse.events[4:]


async def test_head_of_a_stream_reads_nothing_and_ends_nothing(world: World) -> None:
    world.engines[0].allow(5)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat()))
    stream_id = await world.until(lambda: delivered(world, 5))
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    for path in (
        f"/v1/streams/{stream_id}",
        "/v1/models",
    ):  # on one connection: a body would be taken for the next answer
        writer.write(f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("HTTP/1.1 200"), head
        assert ("text/event-stream" in head) is (stream_id in path)
    writer.close()
    world.engines[0].allow(None)
    assert (await task).finish_reason == "length"


async def test_each_stage_of_a_request_is_an_event_in_the_log(world: World) -> None:
    with capture_logs() as events:
        await world.post("/v1/chat/completions", chat(stream=False, session_id="s"))
    wanted = ["admit.accepted", "place.submitted", "place.started", "deliver.ended", "request.done"]
    told = [event for event in events if event["event"] in wanted]
    assert [event["event"] for event in told] == wanted
    assert len({event["stream"] for event in told}) == 1
