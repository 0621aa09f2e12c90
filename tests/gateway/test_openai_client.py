"""The official client against the gateway, sync and async, streaming or not."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.gateway.conftest import MODEL, World

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
OPTIONS: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "seed": 5}


async def test_async_client_streaming_or_not(world: World) -> None:
    async with openai.AsyncOpenAI(base_url=world.url, api_key="-", max_retries=0) as client:
        whole = await client.chat.completions.create(messages=MESSAGES, **OPTIONS)
        stream = await client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **OPTIONS
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
        answer = await client.completions.create(prompt="Hello", **OPTIONS)
        parts = await client.completions.create(prompt="Hello", stream=True, **OPTIONS)
        assert "".join([c.choices[0].text async for c in parts]) == answer.choices[0].text
        assert [model.id async for model in client.models.list()] == [MODEL]


async def test_sync_client_streaming_or_not(world: World) -> None:
    def talk() -> None:
        with openai.OpenAI(base_url=world.url, api_key="-", max_retries=0) as client:
            whole = client.chat.completions.create(messages=MESSAGES, extra_headers={"X-Session-Id": "s"}, **OPTIONS)
            chunks = client.chat.completions.create(messages=MESSAGES, stream=True, **OPTIONS)
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
            assert whole.model_extra is not None
            assert whole.model_extra["concordia"]["session_id"] == "s"

    await asyncio.to_thread(talk)


async def test_errors_become_the_clients_exceptions(world: World) -> None:
    async with openai.AsyncOpenAI(base_url=world.url, api_key="-", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="no model"):
            await client.chat.completions.create(messages=MESSAGES, model="other")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(messages=MESSAGES, n=17, **OPTIONS)
        assert caught.value.param == "n"
        await world.engines[0].kill()


async def test_stream_that_fails_raises_in_the_client(make_world) -> None:  # type: ignore[no-untyped-def]
    world = await make_world(engine_wait_s=0.05)
    async with openai.AsyncOpenAI(base_url=world.url, api_key="-", max_retries=0) as client:
        stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **OPTIONS)
        with pytest.raises(openai.APIError, match="no engine could serve"):
            async for _ in stream:
                pass
