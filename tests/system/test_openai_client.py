"""Case 8: the official `openai` client, streaming and not, sync and async, needs to know nothing of Concordia."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from bench.driver import System

QUESTION = [{"role": "user", "content": "Name three colours."}]


def client(system: System) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{system.port}/v1", api_key=system.api_key or "unused", max_retries=0
    )


def async_client(system: System) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{system.port}/v1", api_key=system.api_key or "unused", max_retries=0
    )


@pytest.fixture(params=["tiny", "demo"])
def served(request: pytest.FixtureRequest) -> System:
    return request.getfixturevalue(request.param)


def test_models_and_chat_streamed_and_not_agree(served: System) -> None:
    api = client(served)
    model = api.models.list().data[0].id
    options: dict[str, Any] = {"model": model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = api.chat.completions.create(**options)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason in ("stop", "length")
    chunks = list(api.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert whole.model_extra and "concordia" in whole.model_extra


async def test_async_client_streamed_and_not_agree(served: System) -> None:
    async with async_client(served) as api:
        model = (await api.models.list()).data[0].id
        options: dict[str, Any] = {"model": model, "messages": QUESTION, "max_completion_tokens": 8, "temperature": 0}
        whole = await api.chat.completions.create(**options)
        stream = await api.chat.completions.create(**options, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(parts) == whole.choices[0].message.content


def test_completions_with_text_and_with_token_ids(served: System) -> None:
    api = client(served)
    model = api.models.list().data[0].id
    options: dict[str, Any] = {"model": model, "max_tokens": 8, "temperature": 0}
    whole = api.completions.create(prompt="Once upon a time", **options)
    streamed = api.completions.create(prompt="Once upon a time", stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == whole.choices[0].text
    by_ids = api.completions.create(prompt=[40, 41, 42, 43], **options)
    assert by_ids.usage is not None and by_ids.usage.prompt_tokens == 4


def test_same_seed_same_text_and_another_seed_another(tiny: System) -> None:
    api = client(tiny)
    model = api.models.list().data[0].id

    def say(seed: int, **more: Any) -> str:
        answer = api.chat.completions.create(
            model=model,
            messages=QUESTION,
            max_tokens=24,
            temperature=0.9,
            seed=seed,
            **more,  # type: ignore[arg-type]
        )
        return answer.choices[0].message.content or ""

    assert say(1) == say(1)
    assert say(1) != say(2)
    assert say(3, top_p=0.5) == say(3, top_p=0.5)
    assert say(4, extra_body={"top_k": 5, "min_p": 0.02}) == say(4, extra_body={"top_k": 5, "min_p": 0.02})
    penalised = say(5, presence_penalty=1.5, frequency_penalty=1.5)
    assert penalised == say(5, presence_penalty=1.5, frequency_penalty=1.5)


def test_logprobs_of_the_chosen_and_the_likeliest(tiny: System) -> None:
    api = client(tiny)
    model = api.models.list().data[0].id
    answer = api.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,  # type: ignore[arg-type]
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 5
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob), "greedy takes the likeliest"


def test_session_named_in_the_body_is_listed_and_deleted(tiny: System) -> None:
    api = client(tiny)
    model = api.models.list().data[0].id
    api.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=4,
        extra_body={"session_id": "from-body"},  # type: ignore[arg-type]
    )
    assert tiny.call("GET", "/v1/sessions/from-body")[0] == 200
    assert "from-body" in str(tiny.get("/v1/sessions"))
    assert "from-body" in str(tiny.get("/admin/sessions"))
    assert tiny.call("DELETE", "/v1/sessions/from-body")[0] in (200, 204)
    assert tiny.call("GET", "/v1/sessions/from-body")[0] == 404


def test_client_raises_the_right_errors(tiny: System) -> None:
    api = client(tiny)
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="no-such-model", messages=QUESTION)  # type: ignore[arg-type]
    model = api.models.list().data[0].id
    with pytest.raises(openai.BadRequestError):
        api.chat.completions.create(model=model, messages=QUESTION, n=17)  # type: ignore[arg-type]
