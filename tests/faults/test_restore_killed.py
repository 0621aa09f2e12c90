"""A restore that is killed before any of its changes to the file system: again, it ends with the backup in place and nothing else lost."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from tests.faults.each_change import killed_before
from tiers.backup import DRAFT, MANIFEST, BackupManifest, CopiedFile, is_half_restored, occupied, read_manifest, restore
from tiers.errors import BadFile
from tiers.paths import Paths

pytestmark = pytest.mark.process

OLD = {"store/data.mdb": b"old state", "sessions/data.mdb": b"old sessions", "journal/old.journal": b"old answer"}
NEW = {
    "store/data.mdb": b"state",
    "sessions/data.mdb": b"sessions",
    "journal/a.journal": b"answer",
    "adapters/00/adapter_config.json": b"{}",
    "concordia.toml": b"[host]\n",
}


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory where a sync costs nothing."""
    made = Path(tempfile.mkdtemp(prefix="concordia-test-", dir="/dev/shm")) if os.access("/dev/shm", os.W_OK) else None
    yield made or tmp_path
    if made:
        shutil.rmtree(made)


def write(directory: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)


def make_backup(directory: Path, files: dict[str, bytes]) -> Path:
    write(directory, files)
    rows = [CopiedFile(name, len(data), xxh3_128_hexdigest(data)) for name, data in sorted(files.items())]
    (directory / MANIFEST).write_bytes(BackupManifest(1, rows).encoded())
    return directory


def held(directory: Path) -> dict[str, bytes]:
    """All files, those in a part that is a link included."""
    linked = [path for link in directory.rglob("*") if link.is_symlink() for path in link.rglob("*")]
    found = [path for path in (*directory.rglob("*"), *linked) if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def parts(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name.split("/")[0] in ("store", "sessions", "journal")}


@pytest.mark.parametrize("linked", [False, True])
def test_a_restore_that_is_killed_before_any_change_goes_on(memory: Path, linked: bool) -> None:
    """linked: the store is on another disk."""
    source, changes = make_backup(memory / "backup", NEW), 0
    paths, disk = Paths(memory / "data", memory / "lanes"), memory / "disk"
    while True:
        if linked:
            (disk / "store").mkdir(parents=True)
            paths.data_dir.mkdir()
            paths.store.symlink_to(disk / "store")
        write(paths.data_dir, OLD)
        if not killed_before(changes, lambda: restore(source, paths)):
            break
        found = held(paths.data_dir)
        assert set(OLD.values()) <= set(found.values()), "what was there is somewhere at any moment"
        assert is_half_restored(paths) or parts(found) in (parts(OLD), parts(NEW)), "else `serve` refuses it"
        restore(source, paths)
        found = held(paths.data_dir)
        there = {name: data for name, data in found.items() if not name.startswith("replaced-")}
        assert there == NEW, changes
        assert set(OLD.values()) <= set(found.values())
        assert paths.store.is_symlink() == linked and paths.store.resolve().is_relative_to(disk if linked else memory)
        shutil.rmtree(paths.data_dir)
        shutil.rmtree(disk, ignore_errors=True)
        changes += 1 + linked  # half of them are enough for what is the same in both
    assert changes > 20


def test_nothing_of_another_backup_whose_restore_was_interrupted_is_restored(memory: Path) -> None:
    other = {**NEW, "store/data.mdb": b"other state", "journal/b.journal": b"another's answer"}
    first, second = make_backup(memory / "first", other), make_backup(memory / "second", NEW)
    paths = Paths(memory / "data", memory / "lanes")
    for changes in (9, 14, 18):
        paths.data_dir.mkdir()
        assert killed_before(changes, lambda: restore(first, paths))
        assert (paths.data_dir / DRAFT).exists() or occupied(paths)
        restore(second, paths)
        there = {name: data for name, data in held(paths.data_dir).items() if not name.startswith("replaced-")}
        assert there == NEW, json.dumps(sorted(there))
        shutil.rmtree(paths.data_dir)


def test_a_flipped_version_of_a_manifest_is_damage_and_no_later_version(tmp_path: Path) -> None:
    whole = BackupManifest(1, []).encoded()
    assert whole.count(b'"version": 1') == 1
    (tmp_path / MANIFEST).write_bytes(whole.replace(b'"version": 1', b'"version": 3'))
    with pytest.raises(BadFile, match="damaged"):
        read_manifest(tmp_path)
