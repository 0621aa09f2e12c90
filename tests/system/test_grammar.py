"""Answers under a JSON schema at real processes: killed at any token, they are the same valid JSON."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from bench.driver import System
from tests.system import harness as h

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 8},
        "year": {"type": "integer", "minimum": 0, "maximum": 2100},
        "kind": {"enum": ["ship", "tide", "clock"]},
    },
    "required": ["title", "year", "kind"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


def assert_valid(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"title", "year", "kind"}
    assert 0 <= value["year"] <= 2100 and len(value["title"]) <= 8
    assert value["kind"] in SCHEMA["properties"]["kind"]["enum"]


@pytest.mark.timeout(280)
def test_tiny_killed_within_a_json_answer(tiny: System) -> None:
    """Every token is the engine's own test (`tests/engine/test_grammar.py`); here whole processes, at a sample of them."""
    body = h.chat(tiny, "Name a thing.", h.SAMPLED, tokens=200, response_format=FORM)
    want = tiny.stream(h.CHAT, body)
    h.assert_whole(want)
    assert want.finish_reason == "stop"
    assert_valid(want.text)
    for position in range(0, len(want.tokens), max(1, len(want.tokens) // 12)):
        h.settled(tiny)
        got = tiny.stream(h.CHAT, body, watch=h.kill_at(tiny, position))
        h.assert_same(got, want, f"killed after {position} tokens")


def test_official_client_parses_what_it_gets(tiny: System) -> None:
    api = openai.OpenAI(base_url=f"http://127.0.0.1:{tiny.port}/v1", api_key="-", max_retries=0)
    options: dict[str, Any] = {"model": tiny.model_name(), "messages": [{"role": "user", "content": "Now."}], "seed": 3}
    answer = api.chat.completions.create(**options, max_tokens=200, response_format=FORM)
    assert answer.choices[0].finish_reason == "stop"
    assert_valid(answer.choices[0].message.content or "")
    chosen = api.chat.completions.create(**options, max_tokens=20, extra_body={"guided_choice": ["yes", "no"]})
    assert chosen.choices[0].message.content in ("yes", "no")
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(**options, extra_body={"regex": "(a"})
    assert caught.value.param == "regex"
