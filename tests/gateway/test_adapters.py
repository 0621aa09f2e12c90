"""Adapters by name: loaded, chosen by model or field, replaced, unloaded; streams keep to what their name meant."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from pathlib import Path

import pytest

from gateway.adapters import AdapterTable, parse_setting
from gateway.app import Refused, _adapters
from tests.gateway.conftest import World, chat


def make_files(directory: Path, content: bytes) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (directory / "adapter_model.safetensors").write_bytes(content)
    return directory


async def load(world: World, name: str, directory: Path) -> tuple[int, dict]:
    body = {"lora_name": name, "lora_path": str(directory)}
    status, _, answer = await world.post("/v1/load_lora_adapter", body)
    return status, answer


async def test_an_adapter_is_loaded_listed_used_and_unloaded(world: World, tmp_path: Path) -> None:
    engine = world.engines[0]
    status, made = await load(world, "pirate", make_files(tmp_path, b"one"))
    assert status == 200 and made["loaded"]
    models = {model["id"]: model for model in (await world.get("/v1/models"))["data"]}
    assert models["pirate"]["parent"] == "tiny"
    assert (await world.get("/v1/models/pirate"))["adapter"] == made["digest"]
    for more in ({"model": "pirate"}, {"adapter": "pirate"}):
        status, _, answer = await world.post("/v1/chat/completions", {**chat(stream=False), **more})
        assert status == 200 and engine.submits[-1].adapter == made["digest"]
    assert answer["model"] == "tiny"
    assert [item.digest for item in engine.loads] == [made["digest"]], "loaded once"
    status, _, _ = await world.post("/v1/unload_lora_adapter", {"lora_name": "pirate"})
    assert status == 200 and engine.unloads == [made["digest"]]
    assert (await world.post("/v1/chat/completions", {**chat(), "model": "pirate"}))[0] == 404
    assert (await world.post("/v1/chat/completions", chat(adapter="pirate")))[2]["error"]["param"] == "adapter"
    assert (await world.post("/v1/unload_lora_adapter", {"lora_name": "pirate"}))[0] == 404


async def test_new_weights_under_the_same_name_are_another_adapter(make_world, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    engine = await world.engine("e0", budget=3)
    source = make_files(tmp_path / "lora", b"old")
    _, old = await load(world, "x", source)
    task = asyncio.create_task(world.events("POST", "/v1/chat/completions", {**chat(), "model": "x"}))

    async def running() -> bool:
        return engine.budget == 0

    await world.until(running)
    make_files(source, b"new")
    _, new = await load(world, "x", source)
    assert new["digest"] != old["digest"]
    await engine.kill()
    again = await world.engine("e0", 2)
    await task
    assert again.submits[-1].adapter == old["digest"], "a stream keeps to what its name meant"
    assert [item.digest for item in again.loads] == [old["digest"]], "and is given the old files"
    assert Path(again.loads[0].directory, "adapter_model.safetensors").read_bytes() == b"old"
    await world.post("/v1/chat/completions", {**chat(stream=False), "model": "x"})
    assert again.submits[-1].adapter == new["digest"]


async def test_what_an_engine_refuses_is_a_400(world: World, tmp_path: Path) -> None:
    world.engines[0].adapter_error = "its use_dora is True, which is not supported"
    status, answer = await load(world, "x", make_files(tmp_path, b"x"))
    assert (status, answer["error"]["param"]) == (400, "lora_path")
    assert "use_dora" in answer["error"]["message"]
    status, answer = await load(world, "x", tmp_path / "nowhere")
    assert (status, answer["error"]["param"]) == (400, "lora_path")
    for name in ("tiny", "a/b", ""):
        status, answer = await load(world, name, tmp_path)
        assert (status, answer["error"]["param"]) == (400, "lora_name")


async def test_names_survive_a_restart(make_world, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    world: World = await make_world()
    await world.engine("e0")
    _, made = await load(world, "x", make_files(tmp_path, b"x"))
    await world.end_gateway()
    await world.start_gateway()
    assert (await world.get("/v1/models/x"))["adapter"] == made["digest"]


def test_files_go_with_their_last_user(tmp_path: Path) -> None:
    table = AdapterTable(tmp_path / "adapters")
    digest = table.keep(make_files(tmp_path / "a", b"1"))
    table.add("x", digest)
    table.add("y", digest)
    assert table.remove("x") == ""
    assert table.remove("y") == digest
    table.sweep({digest})
    assert table.directory(digest).exists()
    table.sweep(set())
    assert not table.directory(digest).exists()


def test_the_setting_is_names_and_directories() -> None:
    assert parse_setting("") == {}
    assert parse_setting("a=/x, b = /y z") == {"a": Path("/x"), "b": Path("/y z")}
    with pytest.raises(ValueError, match="name=directory"):
        parse_setting("/x")


def test_files_that_were_deleted_are_written_anew(tmp_path: Path) -> None:
    directory = tmp_path / "data" / "adapters"
    table = AdapterTable(directory)
    digest = table.keep(make_files(tmp_path / "lora", b"one"))
    table.add("x", digest)
    for again in (table, AdapterTable(directory)):  # the one that made them, and one that found them
        shutil.rmtree(tmp_path / "data")
        again.look_for_files()
        again.look_for_files()
        assert (again.directory(digest) / "adapter_model.safetensors").read_bytes() == b"one"
        assert AdapterTable(directory).names == {"x": digest}
    table.remove("x")
    table.sweep(set())
    table.look_for_files()
    assert [path.name for path in directory.iterdir()] == ["index.json"]


def test_copies_that_a_full_disk_or_a_kill_cut_short_are_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapters" / ".copy-of-a-killed-one").mkdir(parents=True)
    table = AdapterTable(tmp_path / "adapters")
    digest = table.keep(make_files(tmp_path / "one", b"one"))
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == [digest]

    def no_room(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", no_room)
    monkeypatch.setattr(shutil, "copyfileobj", no_room)
    with pytest.raises(OSError, match="No space left"):
        table.keep(make_files(tmp_path / "two", b"two"))
    shutil.rmtree(table.directory(digest))
    table.look_for_files()  # tried every second
    assert [path for path in (tmp_path / "adapters").iterdir() if path.is_dir()] == []


def test_two_who_bring_the_same_files_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, table = make_files(tmp_path / "one", b"one"), AdapterTable(tmp_path / "adapters")
    copy = shutil.copyfile

    def while_another_one_does(*given: Path) -> None:
        monkeypatch.setattr(shutil, "copyfile", copy)
        AdapterTable(tmp_path / "elsewhere").keep(source)
        shutil.copytree(tmp_path / "elsewhere", tmp_path / "adapters", dirs_exist_ok=True)
        copy(*given)

    monkeypatch.setattr(shutil, "copyfile", while_another_one_does)
    digest = table.keep(source)
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == [digest]


def test_an_index_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(b"")
    with pytest.raises(Refused, match=r"index\.json.*backup"):
        _adapters(tmp_path)
