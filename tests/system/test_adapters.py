"""LoRA adapters at real processes: beside the base model, through a kill of the engine and of everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai

from bench.driver import System
from tests.engine.test_adapters import make_adapter
from tests.system import harness as h


def test_tiny_adapter_loaded_killed_restarted_unloaded(tiny: System, tiny_model: Path, tmp_path: Path) -> None:
    make_adapter(tiny_model, tmp_path / "one", 11)
    make_adapter(tiny_model, tmp_path / "two", 12)
    for name in ("one", "two"):
        status, _, said = tiny.call(
            "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(tmp_path / name)}
        )
        assert status == 200, said
    api = openai.OpenAI(base_url=f"http://127.0.0.1:{tiny.port}/v1", api_key="-", max_retries=0)
    assert {"one", "two"} <= {model.id for model in api.models.list().data}
    body = h.chat(tiny, h.prompts(seed=81, count=1)[0], h.SAMPLED, tokens=24)
    want: dict[str, Any] = {}
    for name in (tiny.model_name(), "one", "two"):
        want[name] = tiny.stream(h.CHAT, {**body, "model": name})
        h.assert_whole(want[name])
        if name != tiny.model_name():  # of whose state earlier tests may have left some
            assert want[name].concordia["verdict"] == "new", "no other adapter's state is reused"
    assert len({answer.text for answer in want.values()}) == 3
    got = h.until(h.recoveries, tiny, lambda: tiny.stream(h.CHAT, {**body, "model": "one"}, watch=h.kill_at(tiny, 9)))
    h.assert_same(got, want["one"], "killed after 9 tokens")
    assert len(h.recoveries(got)) == 1
    h.settled(tiny)
    tiny.kill_all()
    h.settled(tiny.start())
    again = tiny.stream(h.CHAT, {**body, "adapter": "two"})
    assert again.text == want["two"].text
    assert h.cached(again) > 0, "its own state was put back"
    for name in ("one", "two"):
        assert tiny.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})[0] == 200
    assert tiny.call("POST", h.CHAT, {**body, "model": "one"})[0] == 404
