"""A gateway in the test's loop, with fake engines and a fake host agent around it; its model directory is made here."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.ports import free_port
from gateway.app import serve
from gateway.config import GatewayConfig
from gateway.settings import GatewaySettings
from gateway.tokenizer import _byte_alphabet
from tests.gateway.fake_engine import CONTEXT_TOKENS, VOCAB_COUNT, FakeEngine, FakeHost

MODEL = "tiny"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def byte_tokenizer() -> Tokenizer:
    """One token a byte; ids 0 to 3 are special, 4 + byte the rest."""
    special = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3}
    vocab = {**special, **{char: 4 + byte for char, byte in _byte_alphabet().items()}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    config = {"vocab_size": VOCAB_COUNT, "max_position_embeddings": CONTEXT_TOKENS, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class World:
    """One gateway and its surroundings. `restart` is what SIGKILL leaves: no drain, no goodbye."""

    def __init__(self, directory: Path, model_dir: Path, **settings: Any) -> None:
        self.directory = directory
        self.port = free_port()
        defaults: dict[str, Any] = {"engine_wait_s": 5.0, "drain_s": 2.0, "keepalive_s": 1.0}
        gateway = GatewaySettings(port=self.port, **{**defaults, **settings})
        self.config = GatewayConfig(directory / "data", directory, model_dir, MODEL, gateway)
        self.host = FakeHost(self.config.paths.host_socket)
        self.engines: list[FakeEngine] = []
        self.stop = asyncio.Event()
        self.http = aiohttp.ClientSession(base_url=f"http://127.0.0.1:{self.port}")
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> World:
        await self.host.start()
        await self.start_gateway()
        return self

    async def start_gateway(self) -> None:
        self.stop = asyncio.Event()
        self._task = asyncio.create_task(serve(self.config, self.stop))
        await self.until(self._listens)

    async def _listens(self) -> bool:
        assert self._task is not None
        if self._task.done():
            self._task.result()
        try:
            async with self.http.get("/health"):
                return True
        except aiohttp.ClientError:
            return False

    async def engine(self, name: str, incarnation: int = 1, **options: Any) -> FakeEngine:
        budget, root, slots = options.pop("budget", None), options.pop("root", ""), options.pop("slots", 0)
        pid = options.pop("pid", os.getpid())
        engine = FakeEngine(name, incarnation, self.directory, **options)
        engine.root, engine.slots = root or engine.root, slots or engine.slots
        engine.budget, engine.pid = budget, pid
        await engine.start()
        self.engines.append(engine)
        self.host.up(engine)

        async def attached() -> bool:
            rows = (await self.get("/admin/engines"))["data"]
            return any(r["id"] == name and r["incarnation"] == incarnation and r["state"] == "ready" for r in rows)

        await self.until(attached)
        return engine

    async def kill_gateway(self) -> None:
        """End it without a drain: connections break, journals stay as they are."""
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def ended(self) -> None:
        """Wait until it ends by itself."""
        assert self._task is not None
        await self._task

    async def end_gateway(self) -> None:
        """As SIGTERM does."""
        self.stop.set()
        assert self._task is not None
        await self._task

    async def close(self) -> None:
        for engine in self.engines:
            await engine.kill(tell=False)
        await self.http.close()
        if self._task is not None and not self._task.done():
            await self.kill_gateway()
        await self.host.stop()

    async def until(self, probe: Callable[[], Awaitable[Any]], timeout_s: float = 60.0) -> Any:
        async with asyncio.timeout(timeout_s):
            while True:
                found = await probe()
                if found:
                    return found
                await asyncio.sleep(0.005)

    # ------------------------------------------------------------ requests

    async def get(self, path: str, **options: Any) -> Any:
        async with self.http.get(path, **options) as response:
            return await response.json()

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, dict[str, str], Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(path, data=data, **options) as response:
            return response.status, dict(response.headers), await response.json(content_type=None)

    async def events(self, method: str, path: str, body: Any = None, **options: Any) -> Sse:
        """Read an SSE answer to its end, or to where the connection breaks."""
        sse = Sse()
        data = None if body is None else json.dumps(body).encode()
        try:
            async with self.http.request(method, path, data=data, **options) as response:
                sse.status = response.status
                sse.headers = dict(response.headers)
                async for chunk in response.content.iter_any():
                    sse.feed(chunk)
        except (aiohttp.ClientError, ConnectionError) as error:
            sse.broken = str(error)
        return sse


class Sse:
    """What came over one connection."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.events: list[tuple[int, str]] = []
        self.comments: list[str] = []
        self.errors: list[dict[str, Any]] = []
        self.broken = ""
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        self._buffer += data
        *frames, self._buffer = self._buffer.split(b"\n\n")
        for frame in frames:
            self._frame(frame.decode())

    def _frame(self, frame: str) -> None:
        if frame.startswith(":"):
            self.comments.append(frame[1:].strip())
            return
        fields = dict(line.split(": ", 1) for line in frame.split("\n"))
        if "id" in fields:
            self.events.append((int(fields["id"]), fields["data"]))
        if fields["data"].startswith('{"error"'):
            self.errors.append(json.loads(fields["data"])["error"])

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(data) for _, data in self.events if data != "[DONE]"]

    @property
    def text(self) -> str:
        choices = [c for chunk in self.chunks for c in chunk.get("choices", [])]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)

    @property
    def ids(self) -> list[int]:
        return [number for number, _ in self.events]

    @property
    def finish_reason(self) -> str | None:
        reasons = [c["finish_reason"] for chunk in self.chunks for c in chunk.get("choices", []) if c["finish_reason"]]
        assert len(reasons) <= 1
        return reasons[0] if reasons else None

    @property
    def concordia(self) -> dict[str, Any]:
        return next(chunk["concordia"] for chunk in reversed(self.chunks) if "concordia" in chunk)


@pytest.fixture
async def make_world(tmp_path: Path, model_dir: Path) -> AsyncIterator[Callable[..., Awaitable[World]]]:
    worlds: list[World] = []

    async def make(directory: Path | None = None, **settings: Any) -> World:
        where = directory or tmp_path / f"w{len(worlds)}"
        where.mkdir(exist_ok=True)
        world = World(where, settings.pop("model", model_dir), **settings)
        worlds.append(world)
        return await world.start()

    yield make
    for world in worlds:
        await world.close()


@pytest.fixture
async def world(make_world: Callable[..., Awaitable[World]]) -> World:
    """A gateway with one engine, e0."""
    made = await make_world()
    await made.engine("e0")
    return made


def chat(**more: Any) -> dict[str, Any]:
    """Body of a short streamed chat request."""
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 12, "seed": 7, "stream": True, **more}
