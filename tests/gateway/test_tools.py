"""Tools: told through the template, calls parsed in both forms at any split, streamed and not, whatever dies in between."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import numpy as np
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway import openai_schema as schema
from gateway.errors import ApiError
from gateway.grammar import answer_rule
from gateway.tool_parser import Said, ToolParser
from gateway.tools import ToolPlan, calls_or, form_of_template, plan_of
from tests.gateway.conftest import MODEL, World, byte_tokenizer, chat

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/place"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["place", "days"],
            "additionalProperties": False,
            "$defs": {"place": {"enum": ["Rome", "Oslo"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
HERMES = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Rome {\\"}", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {}, "name": "clock"}\n</tool_call>'
)
LLAMA = '{"name": "weather", "parameters": {"place": "Rome", "days": 3}}; {"name": "clock", "parameters": {}}'


def parsed(form: str, pieces: list[str]) -> tuple[str, list[dict[str, Any]]]:
    parser = ToolParser(form, ["weather", "clock"], "s")
    said = [*(parser.push(piece) for piece in pieces), parser.finish()]
    calls: dict[int, dict[str, Any]] = {}
    for part in said:
        for delta in part.calls:
            call = calls.setdefault(delta.index, {"id": delta.id, "name": delta.name, "arguments": ""})
            call["arguments"] += delta.arguments
    return "".join(part.content for part in said), list(calls.values())


@pytest.mark.parametrize(
    ("form", "text", "content", "arguments"),
    [
        ("hermes", HERMES, "I look.\n", ['{"place": "Rome {\\"}", "days": 3}', "{}"]),
        ("hermes", '<tool_call>{"name": "clock"}</tool_call>', "", ["{}"]),
        ("hermes", '<tool_call>{"name": "clock", "arguments": "{\\"a\\": 1}"}</tool_call> done', " done", ['{"a": 1}']),
        ("hermes", "No <tool> is needed <tool_cal", "No <tool> is needed <tool_cal", []),
        ("hermes", "<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", []),
        ("hermes", '<tool_call>{"name"', '<tool_call>{"name"', []),
        ("llama", LLAMA, "", ['{"place": "Rome", "days": 3}', "{}"]),
        ("llama", '<|python_tag|>{"name": "clock", "parameters": null}', "", ["{}"]),
        ("llama", 'It is {"name": 3}.', 'It is {"name": 3}.', []),
        ("llama", '{"name": "Bob", "age": 3} it is', '{"name": "Bob", "age": 3} it is', []),
    ],
)
def test_a_call_is_read_at_any_split(form: str, text: str, content: str, arguments: list[str]) -> None:
    whole = parsed(form, [text])
    assert whole[0] == content
    assert [call["arguments"] for call in whole[1]] == arguments
    assert parsed(form, list(text)) == whole
    draw = random.Random(5)
    for _ in range(50):
        cuts = sorted(draw.sample(range(len(text)), 4))
        assert parsed(form, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole


def test_arguments_are_given_out_as_they_are_written() -> None:
    parser = ToolParser("hermes", ["weather"], "s")
    parser.push('<tool_call>\n{"name": "weather", "arguments": {"pla')
    said = parser.push('ce": "Ro')
    assert isinstance(said, Said)
    assert [delta.arguments for delta in said.calls] == ['ce": "Ro']


def request(**more: Any) -> schema.ChatRequest:
    return schema.parse_chat(json.dumps({**chat(), **more}).encode())


def taking(parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A tool with these arguments."""
    return {"type": "function", "function": {"name": "a", "parameters": parameters, **more}}


REFUSED = [
    ({"tools": [{"type": "function"}]}, "tools", "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
    ({"tools": [CLOCK, CLOCK]}, "tools", "same name"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [CLOCK], "tool_choice": "maybe"}, "tool_choice", "expected"),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "no tool 'x'",
    ),
    (
        {"tools": [CLOCK, taking({"not": {}}, strict=True)], "tool_choice": "required"},
        "tools[1].function.parameters",
        'compiled: Unimplemented keys: ["not"]',
    ),
    (
        {"tools": [CLOCK, taking({"properties": {"a": {"type": "set"}}})], "tool_choice": "required"},
        "tools[1].function.parameters",
        "compiled: Invalid type: set",
    ),
]


@pytest.mark.parametrize(("more", "param", "said"), REFUSED)
def test_what_is_wrong_with_tools_is_said(more: dict, param: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        plan_of(request(**more), "hermes")
    assert (caught.value.status, caught.value.param) == (400, param)
    assert said in caught.value.message


@pytest.mark.parametrize(
    "of_a", [{"uniqueItems": True}, {"propertyNames": {}}, {"oneOf": [{"minimum": 0}, {"maximum": 9}]}, {"not": {}}]
)
def test_what_can_not_be_enforced_of_arguments_is_left_to_the_model(of_a: dict[str, Any]) -> None:
    tool, strict = taking({"properties": {"a": of_a}}), {"type": "function", "function": {"name": "b", "strict": True}}
    for tools in ([tool], [tool, strict]):
        assert plan_of(request(tools=tools, tool_choice="required"), "hermes").grammar


@pytest.mark.parametrize("form", ["hermes", "llama"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_a_call_whatever_the_model_wants(form: str, choice: Any) -> None:
    plan = plan_of(request(tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=False), form)
    tokenizer = LLTokenizer(byte_tokenizer().to_str(), n_vocab=260, eos_token=1)
    for seed in range(20):
        draw, matcher, text = random.Random(seed), LLMatcher(tokenizer, plan.grammar), ""
        while not matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            token = draw.choice(np.flatnonzero(bits).tolist()[:60])
            if token == 1:
                break
            matcher.consume_token(token)
            text += chr(token - 4)
            assert len(text) < 4000
        content, calls = parsed(form, [text])
        assert content == ""
        (call,) = calls
        value = json.loads(call["arguments"])
        if call["name"] == "weather":
            assert value["place"] in ("Rome", "Oslo") and 1 <= value["days"] <= 9
        else:
            assert choice == "required" and isinstance(value, dict)
        if len(text) > 300:
            break


@pytest.mark.parametrize("form", ["hermes", "llama"])
@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [{"kind": 1}, {"kind": 2}]}}}},
        {"guided_choice": ["yes", "no"]},
        {"regex": "a/b{1,3}"},
    ],
    ids=json.dumps,
)
def test_an_answer_is_a_call_or_what_was_asked_for(form: str, more: dict) -> None:
    asked_for = request(tools=[WEATHER], **more)
    plan = plan_of(asked_for, form)
    grammar = calls_or(plan, answer_rule(asked_for), "x")
    tokenizer = LLTokenizer(byte_tokenizer().to_str(), n_vocab=260, eos_token=1)
    calls = 0
    for seed in range(24):
        draw, matcher, text = random.Random(seed), LLMatcher(tokenizer, grammar), ""
        while not matcher.is_stopped() and len(text) < 400:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            token = draw.choice(np.flatnonzero(bits).tolist())
            if token == 1:
                break
            matcher.consume_token(token)
            text += chr(token - 4)
        content, called = parsed(form, [text])
        calls += bool(called)
        assert bool(called) != bool(content)
        if "regex" in more and content:
            assert content in ("a/b", "a/bb", "a/bbb")
    assert 0 < calls < 24


def test_a_choice_of_none_or_auto_needs_no_tools() -> None:
    for more in ({"tool_choice": "none"}, {"tool_choice": "auto"}, {"tool_choice": "auto", "tools": []}):
        assert plan_of(request(**more), "") == ToolPlan()


def test_forms_of_templates() -> None:
    assert form_of_template("{{ messages }}") == "hermes", "told in a system message"
    assert form_of_template("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert form_of_template("{% if tools %}<|python_tag|>{% endif %}") == "llama"
    assert form_of_template("{% if tools %}[TOOL_CALLS]{% endif %}") == ""


# ---------------------------------------------------------------- over HTTP


def asked(**more: Any) -> dict[str, Any]:
    return chat(max_tokens=300, tools=[WEATHER, CLOCK], **more)


async def test_calls_streamed_and_not(world: World) -> None:
    engine = world.engines[0]
    engine.script = HERMES.encode()
    _, _, answer = await world.post("/v1/chat/completions", asked(stream=False))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look.\n"
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "clock"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"place": 'Rome {"}', "days": 3}
    sse = await world.events("POST", "/v1/chat/completions", asked())
    assert sse.finish_reason == "tool_calls"
    assert sse.text == "I look.\n"
    streamed: dict[int, str] = {}
    for chunk in sse.chunks:
        for delta in chunk["choices"][0]["delta"].get("tool_calls", []) if chunk["choices"] else []:
            streamed[delta["index"]] = streamed.get(delta["index"], "") + delta["function"]["arguments"]
    assert list(streamed.values()) == [call["function"]["arguments"] for call in calls]
    prompt = byte_tokenizer().decode(engine.sequences[sse.headers["X-Stream-Id"]].tokens[:2000])
    assert '"name": "weather"' in prompt and "<tools>" in prompt
    again = await world.events("GET", f"/v1/streams/{sse.headers['X-Stream-Id']}", params={"from": "20"})
    assert again.events == sse.events[21:]


async def test_killed_in_the_middle_of_a_call(make_world) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    calm = await world.engine("e0")
    calm.script = HERMES.encode()
    want = await world.events("POST", "/v1/chat/completions", asked())
    count = calm.submits[0].prompt_count
    for k in range(5, len(HERMES), 23):
        world.engines[-1].kill_at = count + k
        task = asyncio.create_task(world.events("POST", "/v1/chat/completions", asked()))

        async def died() -> bool:
            return world.engines[-1].dead

        await world.until(died)
        spare = await world.engine("e0", world.engines[-1].incarnation + 1, script=HERMES.encode())
        got = await task
        assert got.ids == want.ids
        parts = [[c["choices"][0]["delta"] for c in sse.chunks if c["choices"]] for sse in (got, want)]
        assert without_ids(parts[0]) == without_ids(parts[1]), f"killed at {k}"
        assert spare.submits


def without_ids(deltas: list[dict[str, Any]]) -> str:
    """Ids of calls hold the stream's."""
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            call.pop("id", None)
    return json.dumps(deltas)


async def test_tool_results_in_the_history_reach_the_prompt(world: World) -> None:
    function = {"name": "weather", "arguments": '{"place": "Rome"}'}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    status, headers, _ = await world.post("/v1/chat/completions", {**asked(stream=False), "messages": messages})
    assert status == 200
    prompt = byte_tokenizer().decode(world.engines[0].sequences[headers["X-Stream-Id"]].tokens)
    assert '{"name": "weather", "arguments": {"place": "Rome"}}' in prompt
    assert "<tool_response>\nsunny" in prompt


async def test_tools_go_to_a_template_that_knows_them(make_world, model_dir, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for file in ("tokenizer.json", "config.json"):
        (tmp_path / file).write_bytes((model_dir / file).read_bytes())
    template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.place }}{% endfor %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    world: World = await make_world(model=tmp_path)
    await world.engine("e0")
    function = {"name": "weather", "arguments": '{"place": "Rome"}'}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
    ]
    _, headers, _ = await world.post("/v1/chat/completions", {**asked(stream=False), "messages": messages})
    prompt = byte_tokenizer().decode(world.engines[0].sequences[headers["X-Stream-Id"]].tokens)
    assert prompt.startswith("[weather][clock]<user>x<assistant><tool_call>Rome")
    _, headers, _ = await world.post("/v1/chat/completions", asked(stream=False, tool_choice="none"))
    prompt = byte_tokenizer().decode(world.engines[0].sequences[headers["X-Stream-Id"]].tokens)
    assert prompt.startswith("<user>Hello")


async def test_official_client_with_tools(world: World) -> None:
    world.engines[0].script = HERMES.encode()
    async with openai.AsyncOpenAI(base_url=world.url, api_key="-", max_retries=0) as client:
        options: dict[str, Any] = {
            "model": MODEL, "messages": [{"role": "user", "content": "x"}], "tools": [WEATHER, CLOCK], "max_tokens": 300,
        }  # fmt: skip
        whole = await client.chat.completions.create(**options)
        assert [call.function.name for call in whole.choices[0].message.tool_calls or []] == ["weather", "clock"]
        async with client.chat.completions.stream(**options) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        calls = final.choices[0].message.tool_calls or []
        assert [json.loads(call.function.arguments) for call in calls] == [{"place": 'Rome {"}', "days": 3}, {}]
        named: Any = {"type": "function", "function": {"name": "clock"}}
        await client.chat.completions.create(**options, tool_choice=named)
        assert world.engines[0].submits[-1].grammar
