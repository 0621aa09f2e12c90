"""Tenants over HTTP: a key says whose a request is; another's sessions and streams are as unknown as those that never were."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.app import Refused, check_listen
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.settings import TenantAccess
from gateway.tenancy import OPERATOR, Caller, Keys, named, own_name, whole_name
from tests.gateway.conftest import World, chat
from tests.gateway.test_api import fake_keeper

TENANTS = {"acme": TenantAccess("key-a"), "zeta": TenantAccess("key-z"), "idle": TenantAccess()}
OPERATOR_KEY, ACME, ZETA = ({"Authorization": f"Bearer {key}"} for key in ("key-o", "key-a", "key-z"))
CHAT = "/v1/chat/completions"
ALL = (OPERATOR_KEY, ACME, ZETA)


@pytest.fixture
async def shared(make_world) -> World:  # type: ignore[no-untyped-def]
    """A gateway with one engine and three keys; what sends none is the operator's."""
    world: World = await make_world(api_key="key-o", tenants=TENANTS)
    world.http.headers.update(OPERATOR_KEY)
    await world.engine("e0")
    return world


async def refusal(world: World, method: str, path: str, key: dict[str, str], body: Any = None) -> tuple[int, str, str]:
    data = None if body is None else json.dumps(body)
    async with world.http.request(method, path, headers=key, data=data) as response:
        error = (await response.json())["error"]
        return response.status, error["code"], error["message"]


# ---------------------------------------------------------------- keys


async def test_a_tenants_key_opens_what_is_a_tenants_and_nothing_of_the_operators(shared: World) -> None:
    for path in ("/v1/models", "/v1/models/tiny", "/v1/sessions", "/v1/streams", "/health"):
        assert "error" not in await shared.get(path, headers=ACME)
        assert await shared.get(path, headers=OPERATOR_KEY)
    closed = [("GET", path) for path in ("/admin/engines", "/admin/sessions", "/metrics")]
    closed += [("POST", path) for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")]
    closed += [("POST", f"/admin/{path}") for path in ("sessions/s/migrate", "engines/e0/restart", "engines/e0/drain")]
    for method, path in [*closed, ("GET", "/%61dmin/engines")]:
        status, code, message = await refusal(shared, method, path, ACME)
        assert (status, code) == (403, "operator_only"), path
        assert "operator's API key" in message
    assert (await refusal(shared, "GET", "/v1/nothing", ACME))[:2] == (404, "unknown_url")
    async with shared.http.get("/metrics") as response:
        assert response.status == 200


async def test_every_request_needs_one_of_the_keys_even_if_only_tenants_have_one(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world(tenants=TENANTS)
    for path in ("/health", "/metrics", "/v1/models", "/admin/engines"):
        for header in ({}, {"Authorization": "Bearer key-o"}, {"Authorization": "Bearer "}, {"Authorization": "key-a"}):
            assert (await refusal(world, "GET", path, header))[:2] == (401, "invalid_api_key")
    assert (await world.get("/v1/models", headers=ACME))["data"]


def test_a_tenants_key_is_enough_to_listen_beyond_loopback() -> None:
    about = {"data_dir": "d", "lane_dir": "l", "model_dir": "m", "model_name": "x"}

    def config(**access: str) -> GatewayConfig:
        tenants = {"acme": {"api_key": "", **access}}
        return GatewayConfig.from_json(json.dumps({**about, "gateway": {"host": "0.0.0.0", "tenants": tenants}}))

    check_listen(config(api_key="k"))
    with pytest.raises(Refused, match="API key"):
        check_listen(config())


def test_whose_a_key_is() -> None:
    keys = Keys("key-o", TENANTS)
    assert keys.caller("Bearer key-o") == OPERATOR
    assert keys.caller("bearer  key-a ") == Caller("acme", False)
    for header in ("", "Bearer", "Bearer key", "Bearer key-a1", "Basic key-a", "key-a", "Bearer \udcff"):
        assert keys.caller(header) is None, header
    assert Keys("", {"idle": TenantAccess()}).caller("") == OPERATOR, "no key is set"


def test_names_within_and_without_their_tenant() -> None:
    assert whole_name("acme", "chat") == "acme~chat" and own_name("acme~chat") == "chat"
    assert whole_name("default", "chat") == own_name("chat") == "chat" and whole_name("acme", "") == ""
    assert named("chat") == ("chat", "default") and named("chat", "acme") == ("acme~chat", "acme")
    assert named("acme~chat") == ("acme~chat", "acme") and named("acme~chat", "default") == ("chat", "default")
    assert named("chat", "", "acme") == ("acme~chat", "acme")
    assert OPERATOR.session("acme~chat") == "acme~chat" and OPERATOR.session("default~chat") == "chat"
    for caller, text in ((Caller("zeta", False), "acme~chat"), (OPERATOR, "a~b~c"), (OPERATOR, "~c"), (OPERATOR, "a~")):
        with pytest.raises(ApiError, match="session_id"):
            caller.session(text)


# ---------------------------------------------------------------- isolation


async def test_one_name_at_three_tenants_is_three_sessions(shared: World) -> None:
    for key in ALL:
        status, headers, answer = await shared.post(CHAT, chat(stream=False, session_id="s"), headers=key)
        assert (status, headers["X-Session-Id"], answer["concordia"]["session_id"]) == (200, "s", "s")
    submits = shared.engines[0].submits
    assert [(s.namespace, s.session) for s in submits] == [("default", "s"), ("acme", "acme~s"), ("zeta", "zeta~s")]
    for key, namespace, stream in zip(ALL, ("default", "acme", "zeta"), submits, strict=True):
        rows = (await shared.get("/v1/sessions", headers=key))["data"]
        assert [(row["id"], row["namespace"], row["turns"]) for row in rows] == [("s", namespace, 1)]
        assert (await shared.get("/v1/sessions/s", headers=key))["streams"] == [stream.stream]
    every = (await shared.get("/v1/sessions?all=true"))["data"]
    assert [row["id"] for row in every] == ["zeta~s", "acme~s", "s"]
    assert len((await shared.get("/v1/sessions?all=true", headers=ACME))["data"]) == 1
    assert {row["id"] for row in (await shared.get("/admin/sessions"))["data"]} == {"zeta~s", "acme~s", "s"}
    assert (await shared.get("/v1/sessions/acme~s"))["namespace"] == "acme", "the operator names it whole"

    await shared.kill_gateway()
    await shared.start_gateway()
    assert [row["id"] for row in (await shared.get("/v1/sessions", headers=ZETA))["data"]] == ["s"]
    assert len((await shared.get("/v1/sessions"))["data"]) == 1


async def test_anothers_session_is_as_unknown_as_one_that_never_was(shared: World) -> None:
    await fake_keeper(shared)
    await shared.post(CHAT, chat(stream=False, session_id="mine"), headers=ACME)
    await shared.post(CHAT, chat(stream=False, session_id="boss"))
    asks = [("GET", "", None), ("POST", "/fork", {}), ("POST", "/park", {}), ("DELETE", "", None)]
    for method, rest, body in asks:
        never = await refusal(shared, method, f"/v1/sessions/never{rest}", ZETA, body)
        for name in ("mine", "boss"):
            said = await refusal(shared, method, f"/v1/sessions/{name}{rest}", ZETA, body)
            assert said == (404, never[1], never[2].replace("never", name))
        assert (await refusal(shared, method, f"/v1/sessions/acme~mine{rest}", ZETA, body))[0] == 400
    own = (await shared.get("/v1/sessions/mine", headers=ACME))["streams"][0]
    _, _, theirs = await shared.post(CHAT, chat(stream=False, session_id="mine"), headers=ZETA)
    assert theirs["concordia"]["session_id"] == "mine"
    status, code, _ = await refusal(shared, "POST", "/v1/sessions/mine/fork", ZETA, {"stream": own})
    assert (status, code) == (404, "stream_not_found")


async def test_anothers_stream_is_as_unknown_as_one_that_never_was(shared: World) -> None:
    engine = shared.engines[0]
    engine.allow(2)
    for number, body in enumerate((chat(store=True), chat(store=True, n=2))):
        stream = (await opened(shared, body, ACME))["X-Stream-Id"]
        never = "0" * 24
        for method, query in (("GET", ""), ("GET", "?format=json"), ("DELETE", "")):
            want = await refusal(shared, method, f"/v1/streams/{never}{query}", ZETA)
            said = await refusal(shared, method, f"/v1/streams/{stream}{query}", ZETA)
            assert said == (404, "stream_not_found", want[2].replace(never, stream)) and want[0] == 404
        assert (await shared.get("/v1/streams", headers=ZETA))["data"] == []
        assert (await shared.get("/v1/streams"))["data"] == [], "the operator's own"
        live = (await shared.get("/v1/streams", headers=ACME))["data"]
        assert len(live) == len((await shared.get("/v1/streams?all=true"))["data"]) == (1, 3)[number]
        assert {row["namespace"] for row in live} == {"acme"}
    assert (await shared.get("/health", headers=ZETA))["live_streams"] == 0
    assert (await shared.get("/health", headers=ACME))["live_streams"] == 3
    await shared.kill_gateway()
    await shared.start_gateway()
    assert (await refusal(shared, "DELETE", f"/v1/streams/{stream}", ZETA))[0] == 404, "nor after a restart"
    engine.allow(None)
    whole = await shared.events("GET", f"/v1/streams/{stream}", headers=ACME)
    assert whole.status == 200 and whole.events[-1][1] == "[DONE]"
    assert (await refusal(shared, "GET", f"/v1/streams/{stream}", ZETA))[0] == 404, "nor once it has ended"
    assert (await shared.get(f"/v1/streams/{stream}?format=json"))["stream"]["namespace"] == "acme"


async def opened(world: World, body: dict[str, Any], key: dict[str, str]) -> dict[str, str]:
    """Headers of a streamed answer whose client leaves."""
    async with world.http.post(CHAT, data=json.dumps(body), headers=key) as response:
        assert response.status == 200
        return dict(response.headers)


async def test_a_tenant_forks_parks_and_deletes_its_own_alone(shared: World) -> None:
    asked = await fake_keeper(shared)
    for key in (ACME, ZETA):
        await shared.post(CHAT, chat(stream=False, session_id="s"), headers=key)
    status, headers, fork = await shared.post("/v1/sessions/s/fork", {"session_id": "f"}, headers=ACME)
    assert (status, headers["X-Session-Id"], fork["id"], fork["forked_from"]) == (200, "f", "f", "s")
    assert (await refusal(shared, "GET", "/v1/sessions/f", ZETA))[0] == 404
    status, _, _ = await shared.post("/v1/sessions/s/fork", {"session_id": "f"}, headers=ZETA)
    assert status == 200, "the name is taken at another tenant only"
    status, _, answer = await shared.post("/v1/sessions/s/fork", {"session_id": "f"}, headers=ACME)
    assert status == 409 and "acme" not in answer["error"]["message"]
    status, _, unnamed = await shared.post("/v1/sessions/s/fork", {}, headers=ACME)
    assert unnamed["id"].startswith("s-fork-") and unnamed["namespace"] == "acme"

    status, _, parked = await shared.post("/v1/sessions/s/park", {}, headers=ACME)
    assert (status, parked["id"], parked["state"]) == (200, "s", "parked")
    assert [park.session for park in shared.engines[0].parks] == ["acme~s"]
    assert (await shared.get("/v1/sessions/s", headers=ZETA))["state"] == "resident"

    async with shared.http.delete("/v1/sessions/s", headers=ACME) as response:
        assert (await response.json())["id"] == "s"
    forgotten = [(r["namespace"], r["session"]) for r in asked if r["op"] == "forget"]
    assert forgotten and set(forgotten) == {("acme", "acme~s")}
    assert {row["id"] for row in (await shared.get("/v1/sessions?all=true"))["data"]} >= {"zeta~s", "zeta~f", "acme~f"}
    assert (await refusal(shared, "GET", "/v1/sessions/s", ACME))[0] == 404


async def test_the_operator_forks_and_ends_a_tenants_session_by_its_whole_name(shared: World) -> None:
    await fake_keeper(shared)
    await shared.post(CHAT, chat(stream=False, session_id="s"), headers=ACME)
    _, headers, fork = await shared.post("/v1/sessions/acme~s/fork", {"session_id": "f"})
    assert (headers["X-Session-Id"], fork["id"], fork["forked_from"]) == ("acme~f", "acme~f", "acme~s")
    assert {row["id"] for row in (await shared.get("/v1/sessions", headers=ACME))["data"]} == {"s", "f"}
    status, _, answer = await shared.post("/admin/sessions/acme~s/migrate", {"engine": "e9"})
    assert (status, answer["error"]["code"]) == (404, "engine_not_found"), "the session was found"
    async with shared.http.delete("/v1/sessions/acme~s") as response:
        assert (await response.json())["id"] == "acme~s"
    status, _, answer = await shared.post(CHAT, chat(stream=False, session_id="acme~s"))
    assert status == 400, "no request goes on in another's session, not even the operator's"


async def test_an_imported_session_is_its_tenants(shared: World) -> None:
    record = {"session": "acme~s", "namespace": "acme", "created": 1.0, "last_used": 1.0}
    body = {"record": record, "tokens": "BQAAAAYAAAA="}
    status, _, answer = await shared.post("/admin/sessions/s", body)
    assert status == 400 and "TENANT~NAME" in answer["error"]["message"]
    status, _, _ = await shared.post(f"/admin/sessions/{'€' * 128}~s", {**body, "check": True})
    assert status == 400, "the table of sessions takes no name that long"
    status, _, answer = await shared.post("/admin/sessions/acme~s", {**body, "check": True})
    assert (status, answer["would_take"]) == (200, True)
    assert (await refusal(shared, "GET", "/v1/sessions/s", ACME))[0] == 404, "it was only asked"
    assert (await shared.post("/admin/sessions/acme~s", body))[0] == 201
    assert (await shared.post("/admin/sessions/acme~s", {**body, "check": True}))[0] == 409
    assert (await shared.get("/v1/sessions/s?tokens=1", headers=ACME))["token_ids"] == [5, 6]
    assert (await refusal(shared, "GET", "/v1/sessions/s", ZETA))[0] == 404


async def test_health_tells_a_tenant_of_no_other_ones_trouble(shared: World, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"state": "lane_share_full", "tenant": name} for name in ("acme", "zeta", "")]
    monkeypatch.setattr("gateway.durability.Durability.rows", lambda _: rows)
    seen = [[row["tenant"] for row in (await shared.get("/health", headers=key))["degraded"]] for key in ALL]
    assert seen == [["acme", "zeta", ""], ["acme", ""], ["zeta", ""]]


async def test_without_keys_everything_is_default_as_ever(world: World) -> None:
    _, headers, _ = await world.post(CHAT, chat(stream=False, session_id="s"), headers={"Authorization": "Bearer x"})
    assert headers["X-Session-Id"] == "s"
    assert [(s.namespace, s.session) for s in world.engines[0].submits] == [("default", "s")]


async def test_where_anothers_prompt_lies_has_no_say_in_where_a_request_goes(make_world) -> None:  # type: ignore[no-untyped-def]
    """Or the engine that a stream names would tell whether somebody else has sent that prompt."""
    world: World = await make_world(api_key="key-o", tenants=TENANTS, spares=0)
    world.http.headers.update(OPERATOR_KEY)
    for name in ("e0", "e1"):
        await world.engine(name)
    e0, e1 = world.engines
    body = chat(stream=False, messages=[{"role": "user", "content": "the same long prompt " * 20}])
    e0.allow(1)
    busy = asyncio.create_task(world.post(CHAT, chat(stream=False), headers=ZETA))

    async def occupied() -> bool:
        return len(e0.submits) == 1

    await world.until(occupied)
    await world.post(CHAT, body, headers=ACME)
    assert len(e1.submits) == 1, "the other one was busy"
    e0.allow(None)
    await busy
    for key in (ZETA, OPERATOR_KEY):
        await world.post(CHAT, body, headers=key)
    assert [s.namespace for s in e0.submits] == ["zeta", "zeta", "default"], "the first by name, both idle"
    await world.post(CHAT, body, headers=ACME)
    assert [s.namespace for s in e1.submits] == ["acme", "acme"], "its own prefix decides"
