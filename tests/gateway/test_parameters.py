"""What a request can ask beyond a plain answer: echo, several prompts, stop tokens of its own, special tokens, a tokenizer to talk to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engine.messages import Sampling, unpack_tokens
from gateway.admit import Admission
from gateway.chat_template import ChatTemplate
from gateway.choices import choice_seed
from gateway.errors import ApiError
from gateway.tokenizer import ModelFacts
from tests.gateway.conftest import MODEL, World, byte_tokenizer, chat
from tests.gateway.fake_engine import FakeEngine, token_at

END = 1  # the model's own stop token


def text_of(prompt: str, choice: int = 0, tokens: int = 6) -> str:
    seed, start = choice_seed(7, choice), len(prompt)
    return byte_tokenizer().decode([token_at(seed, start + k) for k in range(tokens)])


def completion(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 6, "seed": 7, **more}


async def test_sampling_reaches_each_engine_of_a_stream(make_world) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    e0, e1 = await world.engine("e0", budget=3), await world.engine("e1")
    asked = {"logit_bias": {"17": -100, "9": 1.5}, "repetition_penalty": 1.3, "min_tokens": 4, "stop_token_ids": [250]}
    asked |= {"allowed_token_ids": [9, 17, 250], "bad_words": ["no", "\n"]}
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", chat(**asked)))

    async def serving() -> Any:
        return next((e for e in world.engines if e.sequences and e.budget == 0), None)

    await (await world.until(serving)).kill()
    sse = await task
    assert sse.finish_reason in ("length", "stop")
    barred = [[4 + byte for byte in b"no"], [4 + ord("\n")]]
    want = Sampling(
        seed=7,
        logit_bias={17: -100.0, 9: 1.5},
        repetition_penalty=1.3,
        min_tokens=4,
        allowed=[9, 17, 250],
        barred=barred,
    )
    for engine in (e0, e1):
        assert engine.submits[-1].sampling == want
        assert engine.submits[-1].stop_tokens == [END, 250]


async def test_tokens_outside_the_vocabulary_are_named(world: World) -> None:
    for more, field in (
        ({"logit_bias": {"260": 1}}, "logit_bias"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"allowed_token_ids": [5, 260]}, "allowed_token_ids"),
    ):
        status, _, answer = await world.post("/v1/chat/completions", chat(**more))
        assert (status, answer["error"]["param"]) == (400, field)
        assert "outside the vocabulary of 260" in answer["error"]["message"]


def test_a_bad_word_is_barred_as_it_begins_a_text_and_behind_a_space() -> None:
    ids = {"have": [5, 6], " have": [7], "log": [8], " log": [9, 8], "\n": [10]}

    class Codec:
        has_text = True

        def encode(self, text: str, *, add_special: bool) -> list[int]:
            return ids[text]

    admission = Admission("m", Codec(), None, ModelFacts([], 0, 0), 0, lambda: (0, 0))  # type: ignore[arg-type]
    assert admission._barred(["have", " log", "\n"]) == [[5, 6], [7], [8], [10]]


def test_the_begin_token_is_left_out_on_request() -> None:
    class Codec:
        has_text = True

        def encode(self, text: str, *, add_special: bool) -> list[int]:
            return [0, 5] if add_special else [5]

    admission = Admission("m", Codec(), None, ModelFacts([], 0, 0), 0, lambda: (0, 0))  # type: ignore[arg-type]
    for more, tokens in (({}, [0, 5]), ({"add_special_tokens": False}, [5])):
        request = admission.parse("text", json.dumps({"model": "m", "prompt": "x", **more}).encode())
        specs, _ = admission.specs(request, None)
        assert unpack_tokens(specs[0].prompt) == tokens


async def test_allowed_tokens_and_a_grammar_are_not_mixed(world: World) -> None:
    status, _, answer = await world.post("/v1/chat/completions", chat(allowed_token_ids=[5], regex="[a-z]+"))
    assert (status, answer["error"]["param"]) == (400, "allowed_token_ids")


async def test_ignoring_the_end_token_leaves_the_requests_own(world: World) -> None:
    await world.post("/v1/completions", completion("x", ignore_eos=True))
    await world.post("/v1/completions", completion("y", ignore_eos=True, stop_token_ids=[42]))
    assert [submit.stop_tokens for submit in world.engines[0].submits] == [[], [42]]
    status, _, answer = await world.post("/v1/chat/completions", chat(ignore_eos=True, regex="[a-z]+"))
    assert (status, answer["error"]["param"]) == (400, "ignore_eos")


async def test_echo_begins_with_the_prompt_streamed_and_not_and_after_a_restart(make_world) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    engine = await world.engine("e0")
    prompt = "Héllo, "
    _, headers, whole = await world.post("/v1/completions", completion(prompt, echo=True))
    said = whole["choices"][0]["text"]
    assert said.startswith(prompt) and len(said) > len(prompt)
    assert whole["usage"]["completion_tokens"] == 6
    sse = await world.events("POST", "/v1/completions", completion(prompt, echo=True, stream=True))
    assert sse.text == said
    by_ids = byte_tokenizer().encode(prompt).ids
    _, _, answer = await world.post("/v1/completions", completion(by_ids, echo=True))
    assert answer["choices"][0]["text"] == said
    await world.kill_gateway()
    await engine.kill(tell=False)
    await world.start_gateway()
    again = await world.get(f"/v1/streams/{headers['X-Stream-Id']}?format=json")
    assert again["choices"][0]["text"] == said


async def test_echo_has_the_prompts_log_probabilities_whoever_dies(make_world) -> None:  # type: ignore[no-untyped-def]
    """Told in overlapping parts, of which an engine's death takes some; the rest is asked for. Streamed, and after a restart, too."""
    world: World = await make_world()
    first = await world.engine("e0")
    first.dies_scoring = 4
    prompt = byte_tokenizer().encode("Héllo, ").ids
    body = completion(prompt, echo=True, logprobs=1, seed=3)
    asked = asyncio.create_task(world.post("/v1/completions", body))
    await world.until(lambda: _is_dead(first))
    second = await world.engine("e1")
    status, headers, whole = await asked
    assert (status, [submit.scored for submit in (*first.submits, *second.submits)]) == (200, [0, 4])
    choice = whole["choices"][0]
    rows, count = choice["logprobs"], len(prompt)
    assert rows["token_logprobs"] == [None, *(-float(at) for at in range(1, count)), *[-0.5] * 6]
    assert rows["top_logprobs"][0] is None and rows["top_logprobs"][1][byte_tokenizer().decode([5])] == -0.25
    assert rows["text_offset"][:3] == [0, 1, 1] and rows["text_offset"][count] == len("Héllo, ")
    assert [len(values) for values in rows.values()] == [count + 6] * 4
    sse = await world.events("POST", "/v1/completions", {**body, "stream": True})
    parts = [chunk["choices"][0]["logprobs"] for chunk in sse.chunks if chunk["choices"][0]["logprobs"]]
    assert {name: sum((part[name] for part in parts), []) for name in rows} == rows
    await world.kill_gateway()
    await second.kill(tell=False)
    await world.start_gateway()
    again = await world.get(f"/v1/streams/{headers['X-Stream-Id']}?format=json")
    assert again["choices"] == whole["choices"]


async def test_echo_without_an_answer(make_world) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    engine = await world.engine("e0")
    body = completion("Hello", echo=True, logprobs=0, max_tokens=0)
    _, headers, whole = await world.post("/v1/completions", body)
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0]
    assert whole["usage"]["completion_tokens"] == 0
    sse = await world.events("POST", "/v1/completions", {**body, "stream": True, "n": 2})
    assert sse.text == "HelloHello" and [chunk["choices"][0]["index"] for chunk in sse.chunks] == [0, 0, 1, 1]
    await world.kill_gateway()
    await engine.kill(tell=False)
    await world.start_gateway()
    again = await world.get(f"/v1/streams/{headers['X-Stream-Id']}?format=json")
    assert again["choices"] == whole["choices"]


async def test_a_score_that_is_cancelled_is_no_answer(make_world) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    await world.engine("e0", budget=0)

    async def live() -> Any:
        return (await world.get("/v1/streams"))["data"]

    body = completion("Hello", echo=True, logprobs=0)
    for asked in (
        world.post("/v1/completions", body),
        world.events("POST", "/v1/completions", {**body, "stream": True}),
    ):
        task = asyncio.create_task(asked)
        stream_id = (await world.until(live))[0]["id"]
        view = await world.get(f"/v1/streams/{stream_id}?format=json")
        assert view["choices"][0]["logprobs"] is None, "not yet"
        async with world.http.delete(f"/v1/streams/{stream_id}") as response:
            assert (await response.json())["cancelled"] is True
        told = await task
        if isinstance(told, tuple):
            assert (told[0], told[2]["error"]["code"]) == (410, "cancelled")
        else:
            assert told.errors[0]["code"] == "cancelled" and told.chunks[0]["choices"][0]["logprobs"] is None
        view = await world.get(f"/v1/streams/{stream_id}?format=json")
        assert (view["stream"]["state"], view["concordia"]["end"]) == ("failed", "cancelled")
        assert view["choices"][0]["logprobs"] is None


async def _is_dead(engine: FakeEngine) -> bool:
    return engine.dead


async def test_the_stop_string_is_part_of_the_text_on_request(make_world) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    await world.engine("e0", script=b"one, two")
    body = completion("x", stop=[", t"], max_tokens=9)
    _, _, without = await world.post("/v1/completions", body)
    _, headers, shown = await world.post("/v1/completions", {**body, "include_stop_str_in_output": True})
    assert (without["choices"][0]["text"], shown["choices"][0]["text"]) == ("one", "one, t")
    assert shown["choices"][0]["finish_reason"] == "stop"
    again = await world.get(f"/v1/streams/{headers['X-Stream-Id']}?format=json")
    assert again["choices"] == shown["choices"]


async def test_an_answer_goes_on_within_the_last_message(world: World) -> None:
    asked = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello to "}]

    async def prompt(**more: Any) -> str:
        status, _, answer = await world.post("/v1/chat/completions", {**chat(stream=False, **more), "messages": asked})
        assert status == 200, answer
        return byte_tokenizer().decode(unpack_tokens(world.engines[0].submits[-1].tokens))

    whole = "<user>Hello\n<assistant>Hello to "
    assert await prompt() == whole + "\n<assistant>"
    assert await prompt(add_generation_prompt=False) == whole + "\n"
    assert await prompt(continue_final_message=True, add_generation_prompt=False) == whole.rstrip()
    asked[-1]["content"] = " "
    status, _, answer = await world.post(
        "/v1/chat/completions", {**chat(stream=False, continue_final_message=True), "messages": asked}
    )
    assert (status, answer["error"]["param"]) == (400, "continue_final_message")


async def test_special_tokens_are_shown_on_request(make_world) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    await world.engine("e0", script=b"ab")
    _, _, plain = await world.post("/v1/completions", completion([0, 69, 70], echo=True))
    _, _, shown = await world.post("/v1/completions", completion([0, 69, 70], echo=True, skip_special_tokens=False))
    assert plain["choices"][0]["text"] == shown["choices"][0]["text"] == "<s>ABab", "a prompt is echoed as it was sent"
    _, _, sent = await world.post("/v1/completions", completion("A<s>B</s>", echo=True, logprobs=0))
    choice = sent["choices"][0]
    assert choice["text"] == "A<s>B</s>ab" and choice["logprobs"]["text_offset"] == [0, 1, 4, 5, 9, 10, 11]


async def test_offsets_are_those_of_the_text_however_it_was_delivered(make_world) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    await world.engine("e0", script="one, twö".encode())
    body = completion("x", stop=["e, x"], max_tokens=9, logprobs=0, echo=True)
    _, _, whole = await world.post("/v1/completions", body)
    choice = whole["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("xone, twö", [*range(9), 8])
    sse = await world.events("POST", "/v1/completions", {**body, "stream": True})
    rows = [chunk["choices"][0]["logprobs"] for chunk in sse.chunks]
    assert sum((row["text_offset"] for row in rows if row), []) == choice["logprobs"]["text_offset"]


async def test_several_prompts_are_answered_as_each_would_be_alone(world: World) -> None:
    prompts = ["One", "Another", "A third"]
    _, _, answer = await world.post("/v1/completions", completion(prompts, n=2))
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [text_of(prompt, choice) for prompt in prompts for choice in range(2)]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(map(len, prompts))
    assert (usage["completion_tokens"], usage["total_tokens"]) == (36, 36 + usage["prompt_tokens"])
    _, _, alone = await world.post("/v1/completions", completion("Another"))
    assert alone["choices"][0]["text"] == texts[2]


async def test_several_prompts_streamed_and_echoed(world: World) -> None:
    prompts = ["One", [4 + byte for byte in b"Another"]]
    body = completion(prompts, stream=True, echo=True, stream_options={"include_usage": True})
    sse = await world.events("POST", "/v1/completions", body)
    texts = {0: "", 1: ""}
    for chunk in sse.chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "One" + text_of("One"), 1: "Another" + text_of("Another")}
    assert sse.chunks[-1]["usage"]["prompt_tokens"] == 10
    assert sse.events[-1][1] == "[DONE]"


async def test_several_prompts_have_no_session(world: World) -> None:
    status, _, answer = await world.post("/v1/completions", completion(["a", "b"], session_id="s"))
    assert (status, answer["error"]["param"]) == (400, "session_id")
    status, _, answer = await world.post("/v1/completions", completion(["a", ""]))
    assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_tokenize_and_detokenize(world: World) -> None:
    text = "Héllo<s>"
    ids = byte_tokenizer().encode(text).ids
    status, _, answer = await world.post("/tokenize", {"model": MODEL, "prompt": text})
    assert (status, answer) == (200, {"tokens": ids, "count": len(ids), "max_model_len": 4096})
    _, _, answer = await world.post("/tokenize", {"content": "ab", "with_pieces": True})
    assert answer["tokens"] == [{"id": 4 + ord(c), "piece": c} for c in "ab"]
    _, _, answer = await world.post("/tokenize", {"prompt": "ab", "return_token_strs": True})
    assert answer["token_strs"] == ["a", "b"]
    _, _, answer = await world.post("/tokenize", {"messages": [{"role": "user", "content": "Hello"}]})
    assert answer["tokens"] == byte_tokenizer().encode("<user>Hello\n<assistant>").ids
    begun = [{"role": "assistant", "content": "Hi"}]
    for more, prompt in (({"add_generation_prompt": False}, "Hi\n"), ({"continue_final_message": True}, "Hi")):
        _, _, answer = await world.post("/tokenize", {"messages": begun, **more})
        assert answer["tokens"] == byte_tokenizer().encode("<assistant>" + prompt).ids
    _, _, answer = await world.post("/detokenize", {"model": MODEL, "tokens": ids})
    assert answer == {"prompt": text, "content": text}
    for path, body, field in (
        ("/tokenize", {"model": MODEL}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "a"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"model": "other", "prompt": "a"}, "model"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        status, _, answer = await world.post(path, body)
        assert status in (400, 404) and answer["error"]["param"] == field, (path, body, answer)


async def test_a_long_text_is_tokenized_beside_the_event_loop(world: World) -> None:
    _, _, answer = await world.post("/tokenize", {"prompt": "x" * 70_000})
    assert answer["count"] == 70_000


def test_a_developer_is_the_system_to_a_template_that_knows_none() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "x"}]
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert ChatTemplate(source, {}).render(messages) == "<system>Be brief.<user>x"
    assert ChatTemplate(source + "{# developer #}", {}).render(messages) == "<developer>Be brief.<user>x"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert ChatTemplate(source, {}).render(messages, tools).count("<system>") == 1, "told in the developer's message"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('no tools ' + 'x' * 10000) }}", "no tools"),
        ("{{ 1 / messages[0].content | length }}", "division by zero"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{% for k in range(1000000) %}{% endfor %}", "Range too big"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(source: str, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": ""}])
    assert (caught.value.status, caught.value.param) == (400, "messages") and len(caught.value.message) < 400


async def test_variables_reach_the_chat_template(make_world, model_dir, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ mode | default('plain') }}:{{ messages[0].content }}")
    world: World = await make_world(model=tmp_path)
    for more, text in (({}, "plain:Hello"), ({"chat_template_kwargs": {"mode": "loud"}}, "loud:Hello")):
        _, _, answer = await world.post("/tokenize", {"messages": [{"role": "user", "content": "Hello"}], **more})
        assert answer["tokens"] == byte_tokenizer().encode(text).ids
    status, _, answer = await world.post("/v1/chat/completions", chat(chat_template_kwargs={"messages": []}))
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs"), json.dumps(answer)
