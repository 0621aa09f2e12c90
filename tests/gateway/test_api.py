"""Endpoints around the answers: errors over HTTP, models, health, metrics, key, queue, sessions, admin."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway import api_sessions, metrics
from gateway.app import Refused, check_listen
from gateway.config import GatewayConfig, is_loopback
from gateway.table_file import Change, TableFile
from tests.gateway.conftest import MODEL, World, chat
from tests.gateway.fake_engine import CONTEXT_TOKENS


async def test_errors_over_http_have_one_shape(world: World) -> None:
    body = chat(stream=False)
    cases = [
        (404, "model_not_found", {**body, "model": "gpt-9"}),
        (400, "invalid_json", b'{"model": '),
        (400, "invalid_json", b'{"x": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
        (400, "invalid_type", {**body, "temperature": "x"}),
        (400, "invalid_value", {**body, "messages": [{"role": "wizard", "content": "x"}]}),
        (
            400,
            "context_length_exceeded",
            {**body, "messages": [{"role": "user", "content": "x" * (CONTEXT_TOKENS + 88)}]},
        ),
        (413, "body_too_large", b"x" * ((8 << 20) + 1)),
    ]
    for status, code, sent in cases:
        got, _, answer = await world.post("/v1/chat/completions", sent)
        assert (got, answer["error"]["code"]) == (status, code)
    for method, path, status, allowed in [
        ("GET", "/v2", 404, None),
        ("GET", "/v1/completions", 405, "POST"),
        ("OPTIONS", "/v1/sessions/x", 405, "DELETE, GET, HEAD"),
        ("GET", "/v1/streams/zz", 404, None),
    ]:
        async with world.http.request(method, path) as response:
            assert (response.status, response.headers.get("Allow")) == (status, allowed)
            assert (await response.json())["error"]["message"]


async def test_what_is_nested_as_deeply_as_the_parser_takes_is_a_400(world: World) -> None:
    for depth in range(925, 950):
        parameters = b'{"a":' * depth + b"1" + b"}" * depth
        tools = b'"tools": [{"type": "function", "function": {"name": "f", "parameters": %b}}]' % parameters
        sent = json.dumps(chat(stream=False)).encode()[:-1] + b", " + tools + b"}"
        status, _, answer = await world.post("/v1/chat/completions", sent)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), depth


async def test_body_that_is_not_what_its_encoding_says_is_the_clients_error(world: World) -> None:
    cases = [("gzip", b"zzz"), ("br", b"zzz"), ("snappy", b"{}"), ("gzip", gzip.compress(b"{"))]
    for (encoding, sent), code in zip(cases, ["invalid_body"] * 3 + ["invalid_json"], strict=True):
        got, _, answer = await world.post("/v1/completions", sent, headers={"Content-Encoding": encoding})
        assert (got, answer["error"]["code"]) == (400, code)
    bomb = gzip.compress(b" " * (9 << 20), 1)
    got, _, answer = await world.post("/v1/completions", bomb, headers={"Content-Encoding": "gzip"})
    assert (got, answer["error"]["code"]) == (413, "body_too_large")


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
UNREADABLE = [
    (400, "invalid_http", "HTTP/1.1", b"\x00\x01\x02 hello there\r\n\r\n"),
    (400, "invalid_http", "HTTP/1.1", b"GRAB /health HTTP/1.1\r\nHost: x\r\n\r\n"),
    (400, "invalid_http", "HTTP/1.1", b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n"),
    (400, "invalid_http", "use http://", b"\x16\x03\x01\r\n\r\n"),
    (400, "invalid_http", "/v1/models", b"GET /\xff HTTP/1.1\r\n\r\n"),
    (400, "invalid_http", "/v1/models", b"GET http://[::1/ HTTP/1.1\r\nHost: x\r\n\r\n"),
    (400, "invalid_http", "Host", b"GET /health HTTP/1.1\r\n\r\n"),
    (400, "invalid_http", "header", GET + b"no colon\r\n\r\n"),
    (431, "headers_too_large", "shorter", b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
    (431, "headers_too_large", "shorter", GET + b"X: " + b"a" * 20_000 + b"\r\n\r\n"),
    (431, "headers_too_large", "fewer", GET + b"".join(b"X%d: 1\r\n" % n for n in range(200)) + b"\r\n"),
    (400, "invalid_http", "one Content-Length", POST + b"Content-Length: ten\r\n\r\n"),
    (400, "invalid_http", "one Content-Length", POST + b"Content-Length: -1\r\n\r\n"),
    (400, "invalid_http", "one Content-Length", POST + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n"),
    (400, "invalid_http", "one Content-Length", POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
    (400, "invalid_http", "one Content-Length", POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}"),
    (400, "invalid_http", "one Content-Length", POST + b"Transfer-Encoding: bogus\r\n\r\n{}"),
    (400, "invalid_http", "one Content-Length", POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n"),
    (404, "unknown_url", "CONNECT a.b:443", b"CONNECT a.b:443 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
    (417, "http_error", "100-continue", POST + b"Expect: bogus\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"),
]


async def test_what_can_not_be_read_as_http_is_refused_in_the_same_shape(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    before = {code: _refused(code) for code in ("invalid_http", "headers_too_large")}
    with capture_logs() as events:
        for status, code, said, sent in UNREADABLE:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            writer.write(sent)
            head, body = (await reader.read()).split(b"\r\n\r\n", 1)
            writer.close()
            assert int(head.split()[1]) == status, (sent[:80], head)
            assert b"Content-Type: application/json" in head
            error = json.loads(body)["error"]
            assert (error["code"], error["type"]) == (code, "invalid_request_error"), error
            assert said in error["message"] and len(error["message"]) < 300, error
    codes = [code for _, code, _, _ in UNREADABLE]
    assert {code: _refused(code) - count for code, count in before.items()} == {c: codes.count(c) for c in before}
    logged = [event["error"] for event in events if event["event"] == "request.malformed"]
    assert all(len(error) <= 200 for error in logged)
    assert len(logged) == len(UNREADABLE) - 5, (
        "no line for the first bytes that are no HTTP method; 404 and 417 are requests"
    )
    assert not caplog.records


def _refused(code: str) -> float:
    return metrics.registry.get_sample_value("concordia_admit_refused_total", {"code": code}) or 0.0


async def test_what_is_json_and_not_what_an_operator_sends_has_one_code(world: World) -> None:
    record = {"session": 5, "namespace": "default", "created": 1.0, "last_used": 1.0}
    for path, sent, code, said in (
        ("/admin/sessions/x", b"[1]", "invalid_body", "expected object, got array"),
        ("/admin/sessions/x", {"record": record, "tokens": ""}, "invalid_body", "record.session: expected string"),
        ("/admin/sessions/x", b"{", "invalid_json", "line 1"),
        ("/admin/engines/e0/drain", b"[1]", "invalid_body", "expected object, got array"),
        ("/admin/engines/e0/drain", {"timeout": 1}, "invalid_body", "unknown field timeout"),
        ("/admin/engines/e0/drain", b"{", "invalid_json", "line 1"),
    ):
        status, _, answer = await world.post(path, sent)
        assert (status, answer["error"]["code"]) == (400, code), path
        assert said in answer["error"]["message"]


async def test_a_name_that_is_not_there_is_not_repeated_in_full(world: World) -> None:
    long = "m" * 100_000
    for more, code in (({"model": long}, "model_not_found"), ({"adapter": long}, "adapter_not_found")):
        status, _, answer = await world.post("/v1/chat/completions", chat(**more))
        assert (status, answer["error"]["code"]) == (404, code)
        assert len(answer["error"]["message"]) < 300


async def test_a_long_prompt_is_admitted_beside_the_event_loop(world: World) -> None:
    body = chat(stream=False)
    got, _, answer = await world.post(
        "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "word " * 40_000}]}
    )
    assert (got, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_body_without_a_length_is_bounded_too(world: World) -> None:
    async def pieces():  # type: ignore[no-untyped-def]
        for _ in range(9):
            yield b" " * (1 << 20)

    async with world.http.post("/v1/completions", data=pieces()) as response:
        assert response.status == 413
        assert "8388608" in (await response.json())["error"]["message"]


async def test_too_long_prompt_says_how_long_and_how_much_fits(world: World) -> None:
    body = {"model": MODEL, "prompt": [5] * (CONTEXT_TOKENS + 3)}
    _, _, answer = await world.post("/v1/completions", body)
    message = answer["error"]["message"]
    assert f"has {CONTEXT_TOKENS + 3} tokens" in message
    assert f"at most {CONTEXT_TOKENS - 1}" in message
    assert answer["error"]["param"] == "prompt"
    _, _, answer = await world.post("/v1/completions", {**body, "prompt": [5, 999]})
    assert "prompt[1]: token 999 is outside the vocabulary of 260" in answer["error"]["message"]


async def test_answer_ends_at_the_context(world: World) -> None:
    _, _, answer = await world.post(
        "/v1/completions", {"model": MODEL, "prompt": [5] * (CONTEXT_TOKENS - 12), "max_tokens": 100}
    )
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == CONTEXT_TOKENS


async def test_model_without_a_tokenizer_is_driven_by_token_ids(make_world, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "config.json").write_text('{"vocab_size": 260, "eos_token_id": [1, 2]}')
    world = await make_world(model=tmp_path)
    engine = await world.engine("e0")
    _, _, answer = await world.post("/v1/completions", {"model": MODEL, "prompt": "5 6", "max_tokens": 4, "seed": 1})
    text = answer["choices"][0]["text"]
    assert [int(word) for word in text.split()] == world.engines[0].sequences.popitem()[1].tokens[2:]
    assert engine.submits[0].stop_tokens == [1, 2]
    status, _, answer = await world.post("/v1/chat/completions", chat())
    assert (status, answer["error"]["code"]) == (400, "no_chat_template")
    _, _, answer = await world.post("/v1/completions", {"model": MODEL, "prompt": "hello"})
    assert "token ids separated by spaces" in answer["error"]["message"]


async def test_models_health_and_metrics(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world()
    async with world.http.get("/health") as response:
        assert response.status == 503
        assert (await response.json())["status"] == "no engine can serve yet"
    await world.engine("e0")
    health = await world.get("/health")
    assert (health["status"], health["engines_ready"]) == ("ok", ["e0"])
    models = await world.get("/v1/models")
    assert models["data"][0]["id"] == MODEL
    assert (await world.get(f"/v1/models/{MODEL}"))["id"] == MODEL
    await world.post("/v1/chat/completions", chat(stream=False))
    async with world.http.get("/metrics") as response:
        text = await response.text()
    for name in ("concordia_delivered_tokens_total", "concordia_engine_up", "concordia_first_token_seconds_bucket"):
        assert name in text


def test_every_error_code_is_documented_and_no_other() -> None:
    root = Path(__file__).parents[2]
    source = "".join(path.read_text() for path in root.joinpath("gateway").glob("*.py"))
    codes = set(re.findall(r'code="([a-z_]+)"|"([a-z]+_not_found)"', source))
    documented = root.joinpath("docs/api.md").read_text()
    assert not [code for pair in codes for code in pair if code and f"`{code}`" not in documented]
    table = documented.split("\n## Errors\n")[1].split("\n## ")[0]
    source += "".join(path.read_text() for path in root.joinpath("engine").glob("*.py"))
    named = [
        code
        for cell in re.findall(r"^\| [^|]+ \| (`[^|]+) \|", table, re.MULTILINE)
        for code in re.findall(r"`(\w+)`", cell)
    ]
    assert len(named) > 30
    assert not [code for code in named if f'"{code}"' not in source]


async def test_full_queue_is_429_with_retry_after(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world(max_waiting=2)
    engine = await world.engine("e0", budget=0)
    waiting = [asyncio.create_task(world.post("/v1/chat/completions", chat(stream=False))) for _ in range(2)]

    async def both() -> bool:
        return len(engine.submits) == 2

    await world.until(both)
    status, headers, answer = await world.post("/v1/chat/completions", chat())
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert int(headers["Retry-After"]) >= 1
    engine.allow(None)
    assert [(await task)[0] for task in waiting] == [200, 200]


async def test_key_is_asked_of_every_request(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world(api_key="s3cret")
    for path in ("/health", "/metrics", "/v1/models", "/admin/engines", "/v1/nothing"):
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            async with world.http.get(path, headers=header) as response:
                assert response.status == 401, path
                assert (await response.json())["error"]["code"] == "invalid_api_key"
    assert (await world.get("/v1/models", headers={"Authorization": "Bearer s3cret"}))["data"]


async def test_a_page_of_another_site_changes_nothing_unless_it_has_a_key(make_world) -> None:  # type: ignore[no-untyped-def]
    """What a browser sends without asking first: a simple request, whose answer the page could not read."""
    page = {"Sec-Fetch-Site": "cross-site", "Origin": "https://elsewhere.example", "Content-Type": "text/plain"}
    world = await make_world()
    for path in ("/v1/completions", "/admin/engines/e0/restart", "/v1/sessions/chat/park"):
        async with world.http.post(path, data="{}", headers=page) as refused:
            error = (await refused.json())["error"]
            assert (refused.status, error["code"]) == (403, "foreign_page")
            assert "elsewhere.example" in error["message"] and "--api-key" in error["message"]
    for own in ({}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
        async with world.http.post("/v1/sessions/chat/park", headers=own) as answered:
            assert answered.status == 404, own
    async with world.http.get("/health", headers=page) as shown:  # a link that somebody followed
        assert shown.status == 503
    keyed = await make_world(api_key="secret")
    async with keyed.http.post(
        "/v1/sessions/chat/park", headers={**page, "Authorization": "Bearer secret"}
    ) as answered:
        assert answered.status == 404


def test_address_beyond_loopback_needs_a_key(tmp_path) -> None:  # type: ignore[no-untyped-def]
    text = json.dumps(
        {"data_dir": "d", "lane_dir": "l", "model_dir": "m", "model_name": "x", "gateway": {"host": "0.0.0.0"}}
    )
    config = GatewayConfig.from_json(text)
    with pytest.raises(Refused, match="API key"):
        check_listen(config)
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")] == [True] * 3 + [
        False
    ] * 2


# ---------------------------------------------------------------- sessions


async def test_session_is_listed_with_its_positions(world: World) -> None:
    for _ in range(2):
        _, headers, _ = await world.post("/v1/chat/completions", chat(stream=False), headers={"X-Session-Id": "chat-1"})
        assert headers["X-Session-Id"] == "chat-1"
    (row,) = (await world.get("/v1/sessions"))["data"]
    assert (row["id"], row["turns"], row["state"], row["engines"]) == ("chat-1", 2, "resident", ["e0"])
    assert row["tokens"] == len("<user>Hello\n<assistant>") + 12
    assert row["captured"] == row["tokens"] - 1
    assert len((await world.get("/admin/sessions"))["data"][0]["streams"]) == 2
    engines = await world.get("/admin/engines")
    assert engines["data"][0]["sessions"] == ["chat-1"]


async def test_park_frees_the_device_and_waits_for_the_disk(world: World) -> None:
    await world.post("/v1/chat/completions", chat(stream=False, session_id="p"))
    status, _, answer = await world.post("/v1/sessions/p/park", {})
    assert (status, answer["error"]["code"]) == (503, "keeper_unavailable")
    asked = await fake_keeper(world)
    status, _, answer = await world.post("/v1/sessions/p/park", {})
    assert (status, answer["state"], answer["slots_freed"]) == (200, "parked", 1)
    assert answer["durable"] == answer["captured"] == answer["tokens"] < 42, "the slot's position is of a longer list"
    assert {"op": "drain", "sync": True} in asked
    assert [park.session for park in world.engines[0].parks] == ["p", "p"]
    await world.post("/v1/chat/completions", chat(stream=False, session_id="p"))
    assert (await world.get("/v1/sessions/p"))["state"] == "resident"


async def test_session_that_answers_is_not_parked(world: World) -> None:
    world.engines[0].allow(2)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(session_id="p")))

    async def live() -> bool:
        rows = (await world.get("/v1/sessions"))["data"]
        return bool(rows) and rows[0]["state"] == "live"

    await world.until(live)
    status, _, answer = await world.post("/v1/sessions/p/park", {})
    assert (status, answer["error"]["code"]) == (409, "conflict")
    world.engines[0].allow(None)
    await task


async def test_deleted_session_leaves_nothing(world: World) -> None:
    asked = await fake_keeper(world)
    _, headers, _ = await world.post("/v1/chat/completions", chat(stream=False, session_id="d"))
    async with world.http.delete("/v1/sessions/d") as response:
        assert (await response.json())["forgotten"] is True
    forget = next(request for request in asked if request["op"] == "forget")
    assert (forget["op"], forget["namespace"], forget["session"]) == ("forget", "default", "d")
    assert len(forget["tokens"]) == len("<user>Hello\n<assistant>") + 12
    for path in ("/v1/sessions/d", f"/v1/streams/{headers['X-Stream-Id']}"):
        async with world.http.get(path) as response:
            assert response.status == 404
    assert list(world.config.paths.journal_dir.iterdir()) == []
    await world.kill_gateway()
    await world.start_gateway()
    assert (await world.get("/v1/sessions"))["data"] == []


def held_once(monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> tuple[asyncio.Event, asyncio.Event]:
    """The first call of a function waits before it does anything: (it was called, it may go on)."""
    real, called, may = getattr(where, name), asyncio.Event(), asyncio.Event()

    async def held(*given: object) -> object:
        if not called.is_set():
            called.set()
            await may.wait()
        return await real(*given)

    monkeypatch.setattr(where, name, held)
    return called, may


async def test_what_becomes_of_a_session_while_it_is_parked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await fake_keeper(world)
    for act in ("turn", "delete"):
        await world.post("/v1/chat/completions", chat(stream=False, session_id="p"))
        called, may = held_once(monkeypatch, api_sessions, "_drain")
        park = asyncio.create_task(world.post("/v1/sessions/p/park", {}))
        await called.wait()
        if act == "turn":
            await world.post("/v1/chat/completions", chat(stream=False, session_id="p"))
        else:
            async with world.http.delete("/v1/sessions/p") as response:
                assert response.status == 200
        may.set()
        status, _, answer = await park
        if act == "turn":
            assert (status, answer["error"]["code"]) == (409, "conflict")
            assert (await world.get("/v1/sessions/p"))["state"] == "resident"
        else:
            assert (status, answer["error"]["code"]) == (404, "session_not_found")


async def test_a_turn_that_begins_while_its_session_is_deleted_begins_a_new_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fake_keeper(world)
    engine = world.engines[0]
    _, headers, _ = await world.post("/v1/chat/completions", chat(stream=False, session_id="d"))
    called, may = held_once(monkeypatch, api_sessions, "_drain")
    deletion = asyncio.create_task(world.http.delete("/v1/sessions/d"))
    await called.wait()
    engine.allow(0)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(session_id="d", n=2)))
    await world.until(lambda: has_live(world, 2))
    may.set()
    (await deletion).close()
    row = await world.get("/v1/sessions/d")
    assert (row["state"], row["turns"], row["streams"]) == ("live", 1, row["live_streams"]) and len(row["streams"]) == 2
    engine.allow(None)
    await task
    assert (await world.get("/v1/sessions/d"))["tokens"] == len("<user>Hello\n<assistant>") + 12
    async with world.http.get(f"/v1/streams/{headers['X-Stream-Id']}") as response:
        assert response.status == 404


async def has_live(world: World, count: int) -> bool:
    return len((await world.get("/v1/streams"))["data"]) == count


async def test_a_deletion_and_an_import_are_on_the_disk_when_they_are_answered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fake_keeper(world)
    real, may = TableFile.write, threading.Event()

    def write(file: TableFile, changes: list[Change]) -> None:
        assert may.wait(60)
        real(file, changes)

    monkeypatch.setattr(TableFile, "write", write)
    record = {"session": "i", "created": 1.0, "last_used": 1.0}
    asked = asyncio.create_task(world.post("/admin/sessions/i", {"record": record, "tokens": "BQAAAAYAAAA="}))
    await world.until(lambda: is_known(world, True))
    assert not asked.done()
    may.set()
    assert (await asked)[0] == 201
    may.clear()
    deletion = asyncio.create_task(world.http.delete("/v1/sessions/i"))
    await world.until(lambda: is_known(world, False))
    assert not deletion.done()
    may.set()
    (await deletion).close()


async def is_known(world: World, known: bool) -> bool:
    return bool((await world.get("/v1/sessions"))["data"]) == known


async def test_sessions_outlive_the_gateway(world: World) -> None:
    await world.post("/v1/chat/completions", chat(stream=False, session_id="s"))
    before = await world.get("/v1/sessions/s")
    await world.kill_gateway()
    await world.start_gateway()
    after = await world.get("/v1/sessions/s")
    assert [after[k] for k in ("turns", "tokens", "created", "streams")] == [
        before[k] for k in ("turns", "tokens", "created", "streams")
    ]


async def fake_keeper(world: World) -> list[dict]:
    """Says yes, and notes what it was asked."""
    asked: list[dict] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(json.loads(await reader.readline()))
        writer.write(json.dumps({"ok": True, "durable": {}, "deleted": {}}).encode() + b"\n")
        writer.close()

    await asyncio.start_unix_server(serve, str(world.config.paths.keeper_socket))
    return asked
