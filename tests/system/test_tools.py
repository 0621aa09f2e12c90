"""A tool call streamed by real processes, with its engine killed in the middle of it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from bench.driver import System
from bench.sse import Answer
from tests.system import harness as h

PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def called(answer: Answer) -> tuple[str, str]:
    """Name and arguments of the one call, put together from its deltas."""
    name = arguments = ""
    for event in answer.events:
        for choice in event.body.get("choices") or []:
            for call in choice["delta"].get("tool_calls", []):
                assert call["index"] == 0
                name += call["function"].get("name", "")
                arguments += call["function"]["arguments"]
    return name, arguments


def assert_call(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    assert name == "weather" and value["place"] in ("Rome", "Oslo") and 1 <= value["days"] <= 99


@pytest.mark.timeout(280)
def test_tiny_killed_in_the_middle_of_a_call(tiny: System) -> None:
    body = h.chat(tiny, "Weather?", h.SAMPLED, tokens=300, tools=[TOOL], tool_choice=NAMED)
    want = tiny.stream(h.CHAT, body)
    h.assert_whole(want)
    assert want.finish_reason == "tool_calls"
    assert want.text == ""
    assert_call(*called(want))
    for position in range(0, len(want.tokens), 7):
        h.settled(tiny)
        got = tiny.stream(h.CHAT, body, watch=h.kill_at(tiny, position))
        h.assert_same(got, want, f"killed after {position} tokens")
        assert called(got) == called(want)


def test_official_client_streams_a_call(tiny: System) -> None:
    api = openai.OpenAI(base_url=f"http://127.0.0.1:{tiny.port}/v1", api_key="-", max_retries=0)
    options: dict[str, Any] = {
        "model": tiny.model_name(), "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 300, "seed": 2,
        "tools": [TOOL], "tool_choice": NAMED,
    }  # fmt: skip
    with api.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        call = (stream.get_final_completion().choices[0].message.tool_calls or [])[0]
    assert_call(call.function.name, call.function.arguments)
    history = [
        *options["messages"],
        {"role": "assistant", "tool_calls": [call.model_dump(include={"id", "type", "function"})]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    said = api.chat.completions.create(**{**options, "messages": history, "tool_choice": "none", "max_tokens": 8})
    assert said.choices[0].message.content is not None
