"""Case 8: every kind of bad input is refused in OpenAI's error shape, and says what to do about it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from bench.driver import System, at_once
from tests.system import harness as h
from tests.system.tiny_model import CONTEXT_TOKENS


def refused(system: System, status: int, body: Any = None, *, raw: bytes | None = None, path: str = h.CHAT) -> str:
    """Send it, expect that status and OpenAI's shape; return the message."""
    got, _, answer = system.call("POST", path, body, raw=raw)
    assert got == status, (got, answer)
    assert isinstance(answer, dict) and set(answer["error"]) >= {"message", "type", "param", "code"}, answer
    return f"{answer['error']['message']} (param {answer['error']['param']})"


def test_unknown_model_is_named(tiny: System) -> None:
    assert "no-such-model" in refused(tiny, 404, {**h.chat(tiny, "x"), "model": "no-such-model"})


def test_prompt_too_long_says_how_long_and_how_much_fits(tiny: System) -> None:
    tokens = [5] * (CONTEXT_TOKENS + 10)
    message = refused(tiny, 400, h.completion(tiny, tokens), path=h.COMPLETIONS)
    numbers = {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", message)}
    assert CONTEXT_TOKENS + 10 in numbers, message
    assert CONTEXT_TOKENS in numbers or CONTEXT_TOKENS - 1 in numbers, message


def test_malformed_json_says_where(tiny: System) -> None:
    raw = b'{"model": "x", "messages": [}'
    message = refused(tiny, 400, raw=raw)
    assert re.search(r"\d+", message), f"no position in {message!r}"


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b'"text"', b"\xff\xfe", b"{" * 5000])
def test_body_that_is_no_object_is_refused(tiny: System, raw: bytes) -> None:
    refused(tiny, 400, raw=raw)


WRONG = [
    ("temperature", "hot"),
    ("temperature", -1),
    ("temperature", float("1e9")),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", "many"),
    ("min_p", 2),
    ("seed", "dice"),
    ("max_tokens", 0),
    ("max_tokens", "lots"),
    ("max_tokens", 1.5),
    ("stop", 5),
    ("stop", ["a", 1]),
    ("stream", "yes"),
    ("messages", "hello"),
    ("messages", []),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": 5, "content": "x"}]),
    ("logprobs", "all"),
    ("top_logprobs", 99),
    ("presence_penalty", 5),
    ("frequency_penalty", "x"),
    ("stream_options", 3),
    ("n", 17),
    ("n", 0),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={json.dumps(value)[:20]}" for name, value in WRONG])
def test_wrong_value_names_its_field(tiny: System, name: str, value: Any) -> None:
    assert name in refused(tiny, 400, {**h.chat(tiny, "x", tokens=2), name: value})


@pytest.mark.parametrize("prompt", [None, 5, [], [-1], [512], ["a", 5], ["a", [512]], [1.5], {"a": 1}], ids=str)
def test_wrong_prompt_of_a_completion_is_refused(tiny: System, prompt: Any) -> None:
    refused(tiny, 400, h.completion(tiny, prompt, tokens=2), path=h.COMPLETIONS)


def test_missing_fields_are_named(tiny: System) -> None:
    body = h.chat(tiny, "x")
    del body["messages"]
    assert "messages" in refused(tiny, 400, body)
    assert "prompt" in refused(tiny, 400, {"model": tiny.model_name()}, path=h.COMPLETIONS)


def test_body_too_large_is_refused_with_the_limit(tiny: System) -> None:
    raw = b'{"model": "x", "messages": [{"role": "user", "content": "' + b"x" * (9 << 20) + b'"}]}'
    message = refused(tiny, 413, raw=raw)
    assert re.search(r"\d", message), message


def test_session_id_that_is_no_name_is_refused(tiny: System) -> None:
    status, _, answer = tiny.call("POST", h.CHAT, h.chat(tiny, "x", tokens=2), headers={"X-Session-Id": "x" * 5000})
    assert status == 400, answer
    assert "error" in answer


def test_unknown_path_and_wrong_method_are_refused_in_the_same_shape(tiny: System) -> None:
    for method, path, status in [("GET", "/v1/nothing", 404), ("GET", h.CHAT, 405), ("DELETE", "/v1/models", 405)]:
        got, _, answer = tiny.call(method, path)
        assert got == status, (method, path, answer)
        assert "message" in answer["error"], answer


def test_queue_full_is_429_with_retry_after(guarded: System) -> None:
    body = h.chat(guarded, "x", tokens=300)
    results = h.until(
        lambda results: any(status != 200 for status, _, _ in results),
        guarded,
        lambda: at_once([lambda: guarded.call("POST", h.CHAT, body) for _ in range(12)]),
    )
    assert {status for status, _, _ in results} == {200, 429}, results
    for status, headers, answer in results:
        if status == 429:
            assert int(headers["retry-after"]) >= 1
            assert "message" in answer["error"], answer


def test_server_still_answers_after_all_of_it(tiny: System) -> None:
    h.assert_whole(tiny.stream(h.CHAT, h.chat(tiny, "Still here?", tokens=8)))
    status, headers, text = tiny.call("GET", "/metrics")
    assert status == 200 and "concordia" in text, headers
