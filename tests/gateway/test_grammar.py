"""A grammar travels with its stream: to every engine that goes on with it, and through a restart of the gateway."""

from __future__ import annotations

import asyncio

from tests.gateway.conftest import World, chat

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}


async def test_a_grammar_reaches_each_engine_of_its_stream(make_world) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    e0, e1 = await world.engine("e0", budget=3), await world.engine("e1")
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(response_format=FORM)))
    serving = await world.until(lambda: _serving(world))
    await serving.kill()
    sse = await task
    first, second = e0.submits[-1], e1.submits[-1]
    assert sse.finish_reason == "length"
    assert first.grammar and first.grammar == second.grammar
    assert '"a"' in first.grammar


async def _serving(world: World):  # type: ignore[no-untyped-def]
    return next((e for e in world.engines if e.sequences and e.budget == 0), None)


async def test_a_grammar_survives_the_gateway(make_world) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    engine = await world.engine("e0", budget=4)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(regex="[a-z]+", store=True)))
    await world.until(lambda: _serving(world))
    grammar = engine.submits[-1].grammar
    await world.kill_gateway()
    await task
    await engine.kill(tell=False)
    del world.host.engines["e0"]
    await world.start_gateway()
    again = await world.engine("e0", 2)
    await world.until(lambda: _submitted(again))
    assert again.submits[-1].grammar == grammar != ""


async def _submitted(engine) -> bool:  # type: ignore[no-untyped-def]
    return bool(engine.submits)


async def test_a_schema_that_does_not_compile_is_a_400(world: World) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "not": {}}}}
    status, _, answer = await world.post("/v1/chat/completions", chat(response_format=form))
    assert status == 400
    assert answer["error"]["code"] == "invalid_grammar"
    assert answer["error"]["param"] == "response_format.json_schema.schema"
    assert "not" in answer["error"]["message"]


async def test_a_model_without_text_or_end_token_takes_no_grammar(make_world, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "config.json").write_text('{"vocab_size": 260, "eos_token_id": 1}')
    world: World = await make_world(model=tmp_path)
    status, _, answer = await world.post("/v1/completions", {"model": "tiny", "prompt": [5], "regex": "a"})
    assert (status, answer["error"]["param"]) == (400, "regex")
    assert "tokenizer.json" in answer["error"]["message"]
