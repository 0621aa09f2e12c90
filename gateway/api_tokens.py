"""POST /tokenize and /detokenize: what the model's tokenizer makes of a text, in vLLM's and llama-server's form. Stage: admit."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway.api import GATEWAY, json_response, read_body
from gateway.api_answers import LONG_BODY_BYTES


async def tokenize(request: web.Request) -> web.Response:
    return await _answered(request, "tokenize")


async def detokenize(request: web.Request) -> web.Response:
    return await _answered(request, "detokenize")


async def _answered(request: web.Request, verb: str) -> web.Response:
    body = await read_body(request)
    answer = getattr(request.app[GATEWAY].admission, verb)
    made = answer(body) if len(body) < LONG_BODY_BYTES else await asyncio.to_thread(answer, body)
    return json_response(made)
