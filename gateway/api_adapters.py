"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them. On the event loop; every wait has a deadline."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from aiohttp import web

from gateway.api import GATEWAY, json_response, read_body
from gateway.errors import ApiError, bad_request, not_found, quoted, unavailable
from gateway.openai_schema import SESSION_ID, decode

LOAD_TIMEOUT_S = 60.0


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """lora_path: a directory on the machine of the gateway, as `peft` saves it."""

    lora_name: str
    lora_path: str


class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: str


async def load_adapter(request: web.Request) -> web.Response:
    """Load an adapter into every engine, then give it its name."""
    gateway = request.app[GATEWAY]
    wish: LoadRequest = decode(await read_body(request), LoadRequest)
    if not SESSION_ID.fullmatch(wish.lora_name) or wish.lora_name == gateway.config.model_name:
        hint = "1 to 128 letters, digits or any of . _ : @ -, a letter or digit first, and not the model's own name"
        raise bad_request(f"lora_name: expected {hint}", "lora_name")
    digest = await asyncio.to_thread(gateway.adapters.keep, Path(wish.lora_path))
    if not gateway.dispatcher.can_serve:
        raise unavailable("no engine is up that could load it; try again")
    try:
        errors = await gateway.dispatcher.load_adapter(digest, LOAD_TIMEOUT_S)
    except TimeoutError as error:
        raise ApiError(504, "an engine did not load it in time; try again", code="engine_timeout") from error
    if errors:
        raise ApiError(400, f"lora_path: {errors[0]}", code="bad_adapter", param="lora_path")
    gateway.adapters.add(wish.lora_name, digest)
    return json_response({"id": wish.lora_name, "object": "adapter", "digest": digest, "loaded": True})


async def unload_adapter(request: web.Request) -> web.Response:
    """Take the name back; streams that use the adapter end with it."""
    gateway = request.app[GATEWAY]
    wish: UnloadRequest = decode(await read_body(request), UnloadRequest)
    digest = gateway.adapters.names.get(wish.lora_name)
    if digest is None:
        raise not_found(f"lora_name: there is no adapter {quoted(wish.lora_name)}", "adapter_not_found", "lora_name")
    if gateway.adapters.remove(wish.lora_name):
        gateway.dispatcher.unload_adapter(digest)
    return json_response({"id": wish.lora_name, "object": "adapter", "digest": digest, "loaded": False})
