"""Bad input of every kind is a 400 that names the field; common extras are ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.messages import Sampling
from gateway import openai_schema as schema
from gateway.errors import ApiError
from gateway.grammar import grammar_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": "tiny", "prompt": "x"}


def refusal(body: Any, parse: Any = schema.parse_chat) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        request = parse(raw)
        schema.wish_of(request, None, 1)
        grammar_of(request)
        if isinstance(request, schema.ChatRequest):
            schema.template_messages(request.messages)
        else:
            schema.prompts_of(request)
    assert caught.value.status == 400
    assert set(caught.value.body["error"]) == {"message", "type", "param", "code"}
    return caught.value


CASES = [
    ({"temperature": "hot"}, "temperature", "expected number or null, got string"),
    ({"temperature": -0.1}, "temperature", "at least 0"),
    ({"temperature": 2.1}, "temperature", "at most 2"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.01}, "top_p", "at most 1"),
    ({"top_k": 1.5}, "top_k", "int"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"min_p": 1.2}, "min_p", "at most 1"),
    ({"seed": "x"}, "seed", "int"),
    ({"seed": 1 << 64}, "seed", ""),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "at least 1"),
    ({"max_tokens": True}, "max_tokens", "int"),
    ({"stop": 3}, "stop", "str"),
    ({"stop": ["a", 3]}, "stop[1]", "str"),
    ({"stop": [""]}, "stop", "empty string"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"n": 17}, "n", "at most 16"),
    ({"n": 0}, "n", "at least 1"),
    ({"stream": "yes"}, "stream", "bool"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "bool"),
    ({"logprobs": 3}, "logprobs", "bool"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"presence_penalty": 3}, "presence_penalty", "at most 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "at least -2"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hi"}, "messages", "array"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "not null"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "str"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 4}]}]}, "messages[0].content[0]", "int"),
    ({"tools": "all"}, "tools", "array"),
    ({"functions": [{"name": "x"}]}, "functions", "send them as tools"),
    ({"function_call": "auto"}, "function_call", "tool_choice"),
    (
        {"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}]},
        "messages[0].function_call",
        "tool_calls",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "messages[0].content[0]", "refusal"),
    ({"web_search_options": {}}, "web_search_options", "a tool"),
    ({"json_schema": {"type": "object"}}, "json_schema", "response_format"),
    ({"n_predict": 5}, "n_predict", "max_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", "required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
        "response_format.json_schema.schema",
        "objekt",
    ),
    ({"guided_json": "{"}, "guided_json", "no JSON"),
    ({"guided_json": {"not": {}}}, "guided_json", "compiled"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_json": {"oneOf": [{"minimum": 0}, {"maximum": 9}]}}, "guided_json", "use anyOf"),
    ({"guided_json": 5}, "guided_json", "int"),
    ({"regex": "(a"}, "regex", "unclosed group"),
    ({"guided_regex": ["a"]}, "guided_regex", "text"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"grammar": "start: nothing"}, "grammar", "unknown name"),
    ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not served"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "compiled"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "send one"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"user": 5}, "user", "str"),
    ({"max_tokens": 1e30}, "max_tokens", "must be a whole number of 64 bits"),
    ({"max_tokens": 10**30}, "max_tokens", "at most"),
    ({"top_k": 10**30}, "top_k", "at most"),
    ({"min_tokens": 10**30}, "min_tokens", "at most"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "5000 digits"),
    ({"guided_json": {"type": "integer", "minimum": 10**400}}, "guided_json", "compiled"),
    ({"guided_json": "[" * 100_000}, "guided_json", "no JSON"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "a way out of itself"),
    ({"regex": "(a{1000}){1000}"}, "regex", "stands for too much"),
    ({"grammar": "start: /(a{1000}){1000}/"}, "grammar", "stands for too much"),
    ({"guided_json": {"type": "string", "pattern": "^(a{1000}){1000}$"}}, "guided_json", "stands for too much"),
    ({"grammar": "start: b\nb: b"}, "grammar", "a way out of itself"),
    *[
        ({"grammar": text}, "grammar", "can't be compiled")
        for text in ('foo: "a"', "hello world", ":", "root ::= (", "root ::= foo", 'foo ::= "a"')
    ],
    *[
        ({"grammar": text}, "grammar", "can't be compiled")
        for text in ('root ::= "a', 'root ::= "\\q"', "root ::= \\", "root ::= " + "(" * 20_000)
    ],
    ({"logit_bias": {"x": 1}}, "logit_bias", "must be token ids, got 'x'"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "at most 100"),
    ({"logit_bias": [5]}, "logit_bias", "object"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "at most 1024"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"repetition_penalty": 2.5}, "repetition_penalty", "at most 2"),
    ({"min_tokens": -1}, "min_tokens", "at least 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "at most max_tokens, 4"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids[0]", "int"),
    ({"ignore_eos": 1}, "ignore_eos", "bool"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens", "bool"),
    ({"use_beam_search": True}, "use_beam_search", "not served"),
    ({"bad_words": "x"}, "bad_words", "array"),
    ({"bad_words": ["x", ""]}, "bad_words", "empty word"),
    ({"bad_words": ["x"] * 129}, "bad_words", "at most 128"),
    ({"allowed_token_ids": ["x"]}, "allowed_token_ids[0]", "int"),
    ({"allowed_token_ids": [5] * 4097}, "allowed_token_ids", "at most 4096"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "name at least one"),
    ({"length_penalty": 2}, "length_penalty", "not served"),
    ({"repeat_penalty": 1.1}, "repeat_penalty", "send repetition_penalty"),
    ({"add_generation_prompt": 0}, "add_generation_prompt", "bool"),
    ({"continue_final_message": True}, "continue_final_message", "the assistant's"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "send one"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs", "object"),
    ({"session_id": "../x"}, "session_id", "letters"),
    ({"session_id": 5}, "session_id", "str"),
    ({"session_id": ""}, "session_id", "is empty"),
    ({"model": None}, "model", "str"),
]


@pytest.mark.parametrize(("more", "param", "said"), CASES, ids=[json.dumps(more)[:40] for more, _, _ in CASES])
def test_chat_field_is_named(more: dict, param: str, said: str) -> None:
    error = refusal({**CHAT, **more})
    assert error.param == param
    assert error.message.startswith(param)
    assert said in error.message


TEXT_CASES = [
    ({"prompt": ["a"] * 129}, "prompt", "more than 128"),
    ({"prompt": ["a"] * 20, "n": 7}, "prompt", "more than 128"),
    ({"prompt": ["a", "b"], "best_of": 2}, "best_of", "one prompt"),
    ({"prompt": [[1], [2, "a"]]}, "prompt", "prompt[1][1]: expected a token id, got str"),
    ({"prompt": [1, "a"]}, "prompt", "prompt[1]: expected a token id, got str"),
    ({"prompt": [1.5]}, "prompt", "got number"),
    ({"prompt": 5}, "prompt", "int"),
    ({"logprobs": True}, "logprobs", "int"),
    ({"suffix": "x"}, "suffix", "fill-in-the-middle"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "not served"),
    ({"best_of": 17}, "best_of", "at most 16"),
    ({"best_of": 1, "n": 2}, "best_of", "at least n"),
    ({"best_of": 2, "stream": True}, "best_of", "streamed"),
]


@pytest.mark.parametrize(("more", "param", "said"), TEXT_CASES, ids=[json.dumps(more) for more, _, _ in TEXT_CASES])
def test_completion_field_is_named(more: dict, param: str, said: str) -> None:
    error = refusal({**TEXT, **more}, schema.parse_completion)
    assert error.param == param
    assert said in error.message


def test_what_a_request_says_is_repeated_in_part_only() -> None:
    long = "x" * 100_000
    for more in (
        {"messages": [{"role": long, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": long}]}]},
        {"response_format": {"type": long}},
        {"response_format": {"type": {long: long}}},
        {"logit_bias": {long: 1}},
    ):
        assert len(refusal({**CHAT, **more}).message) < 300


def test_malformed_json_says_where() -> None:
    assert "line 2 column 13" in refusal(b'{"model": "x",\n "messages" [}').message
    assert "empty" in refusal(b"").message
    assert "UTF-8" in refusal(b'{"model": "\xff"}').message
    assert "the body: expected object" in refusal(b"[]").message
    half = refusal(b'{"model": "x", "messages": [{"role": "user", "content": "\\ud83d\\ude00 \\uD800"}]}')
    assert (half.code, "\\ud800, half of a surrogate pair" in half.message) == ("invalid_value", True)
    refusal(b"[" * 100_000)
    assert refusal({}).param in ("model", "messages")


@pytest.mark.parametrize(
    "field", ["max_tokens", "seed", "top_k", "n", "temperature", "min_tokens", "stop_token_ids", "top_p", "logit_bias"]
)
def test_a_number_of_thousands_of_digits_is_named(field: str) -> None:
    whole = {"stop_token_ids": "[1, %s]", "logit_bias": '{"5": %s}'}.get(field, "%s")
    for number in ("9" * 5000, "1e999"):
        raw = json.dumps({**CHAT, field: "HERE"}).replace('"HERE"', whole % number).encode()
        error = refusal(raw)
        assert (error.param or "").startswith(field)
        assert "does not fit in 64 bits" in error.message


def test_what_is_wrong_first_is_named_even_if_the_rest_is_no_json() -> None:
    assert refusal(b'{"model": "x", "max_tokens": "y", "messages" [').param == "max_tokens"
    assert "column" not in refusal(b'{"model": %s "x"' % (b"9" * 5000)).message


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1, 2], "b"], [[1, 2], "b"]),
        ([], [[]]),
    ],
)
def test_a_prompt_is_text_or_token_ids_or_a_list_of_these(given: Any, prompts: list[Any]) -> None:
    body = json.dumps({"model": "tiny", "prompt": given}).encode()
    assert schema.prompts_of(schema.parse_completion(body)) == prompts


def test_what_changes_nothing_is_taken() -> None:
    neutral = {name: values[0] for name, values in schema.UNSERVED.items() if values}
    schema.parse_chat(json.dumps({**CHAT, **neutral, "top_logprobs": 0}).encode())
    schema.parse_completion(json.dumps({**TEXT, **neutral, "echo": True, "logprobs": None}).encode())


def test_what_clients_send_besides_is_ignored_and_null_is_not_set() -> None:
    nulls = {name: None for name in ("temperature", "top_p", "stop", "max_tokens", "n", "seed", "tools", "session_id")}
    extra = {
        "parallel_tool_calls": True,
        "metadata": {},
        "user": "me",
        "service_tier": "auto",
        "reasoning_effort": "low",
    }
    request = schema.parse_chat(json.dumps({**CHAT, **nulls, **extra, "response_format": {"type": "text"}}).encode())
    wish = schema.wish_of(request, None, 77)
    assert wish.sampling == Sampling(seed=77)
    assert (wish.stop, wish.max_tokens, wish.session) == ([], 0, "")


def test_values_reach_the_sampler() -> None:
    body = {
        **CHAT,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "seed": -1,
        "stop": "x",
        "presence_penalty": 1,
    }
    more = {"frequency_penalty": -1, "logit_bias": {"17": -100, "4": 2.5}, "repetition_penalty": 1.2, "min_tokens": 3}
    wish = schema.wish_of(schema.parse_chat(json.dumps({**body, **more}).encode()), "s-1", 1)
    biases = {17: -100.0, 4: 2.5}
    assert wish.sampling == Sampling(0.0, 0.5, 0, 0.1, (1 << 63) - 1, 1.0, -1.0, -1, biases, 1.2, 3)
    assert (wish.stop, wish.session) == (["x"], "s-1")


def test_max_completion_tokens_wins() -> None:
    request = schema.parse_chat(json.dumps({**CHAT, "max_tokens": 5, "max_completion_tokens": 9}).encode())
    assert schema.wish_of(request, None, 1).max_tokens == 9


def test_session_in_header_and_body_must_agree() -> None:
    request = schema.parse_chat(json.dumps({**CHAT, "session_id": "a"}).encode())
    assert schema.wish_of(request, "a", 1).session == "a"
    with pytest.raises(ApiError, match="send one"):
        schema.wish_of(request, "b", 1)
    with pytest.raises(ApiError, match="is empty"):
        schema.wish_of(schema.parse_chat(json.dumps(CHAT).encode()), "", 1)


def test_what_is_not_captured_has_no_name_and_is_not_stored() -> None:
    body = {"model": "tiny", "prompt": "x", "capture": False}
    assert schema.wish_of(schema.parse_completion(json.dumps(body).encode()), None, 0).capture is False
    for more in ({"store": True}, {"session_id": "s"}):
        with pytest.raises(ApiError, match="capture: "):
            schema.wish_of(schema.parse_completion(json.dumps(body | more).encode()), None, 0)
    with pytest.raises(ApiError, match="capture: "):
        schema.wish_of(schema.parse_completion(json.dumps(body).encode()), "s", 0)


def test_parts_of_text_are_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = schema.parse_chat(json.dumps({**CHAT, "messages": [{"role": "user", "content": parts}]}).encode())
    assert schema.template_messages(request.messages) == [{"role": "user", "content": "a\nb"}]


def test_a_refusal_is_what_the_assistant_said() -> None:
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    for message in (part, {"role": "assistant", "content": None, "refusal": "No."}):
        request = schema.parse_chat(json.dumps({**CHAT, "messages": [message]}).encode())
        assert schema.template_messages(request.messages) == [{"role": "assistant", "content": "No."}]


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}},
        {"response_format": {"type": "json_object", "schema": {"type": "object", "required": ["a"]}}},
        {"response_format": {"type": "json_schema", "json_schema": {"strict": False, "schema": {"not": {}}}}},
        {"guided_json": '{"type": "integer"}'},
        {"guided_json": {"type": "string", "format": "password"}},
        {"guided_choice": ['say "a"', "b"]},
        {"guided_grammar": 'root ::= "yes" | "no"'},
        {"structured_outputs": {"regex": "[a-z]+", "choice": None}},
        {"structured_outputs": {"json_object": True}},
        {"regex": "a+"},
        {"grammar": 'start: "a"+'},
    ],
    ids=json.dumps,
)
def test_forms_of_a_grammar_are_taken(more: dict) -> None:
    grammar, field = grammar_of(schema.parse_chat(json.dumps({**CHAT, **more}).encode()))
    assert grammar
    assert field.startswith(next(iter(more)))


def test_no_wish_is_no_grammar() -> None:
    for more in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": None}):
        assert grammar_of(schema.parse_chat(json.dumps({**CHAT, **more}).encode())) == ("", "")
