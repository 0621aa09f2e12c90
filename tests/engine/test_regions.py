"""Opaque state: only what changed is written, any version since the last base comes back, and damage ends the log."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.capture.handlers import Applied
from engine.errors import OtherState
from engine.regions import OpaqueLog

FLOATS = 10_000  # 40,000 bytes: ten pages, the last one not full


class World:
    def __init__(self, path: Path, **options: float) -> None:
        self.weights = torch.zeros(FLOATS)
        self.moments = torch.zeros(3000, dtype=torch.bfloat16)
        self.log = OpaqueLog.open(path, **options)  # type: ignore[arg-type]
        self.log.register("weights", self.weights)
        self.log.register("moments", self.moments)

    def step(self, number: int) -> None:
        self.weights[number * 1024 : number * 1024 + 10] += number + 1
        self.moments[0] = number


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.opaque"


def test_only_changed_pages_are_written(path: Path) -> None:
    world = World(path)
    first = world.log.capture()
    assert (first.version, first.changed_pages, first.pages) == (1, 12, 12)
    world.step(3)
    second = world.log.capture({"step": 3})
    assert second.changed_pages == 2
    assert second.written_bytes < first.written_bytes / 3
    assert world.log.capture().changed_pages == 0


def test_a_new_process_goes_on_from_the_last_version(path: Path) -> None:
    world = World(path)
    for number in range(6):
        world.step(number)
        world.log.capture({"step": number})
    world.log.close()
    again = World(path)
    restored = again.log.restore()
    assert restored is not None and (restored.version, restored.note) == (6, {"step": 5})
    assert torch.equal(again.weights, world.weights) and torch.equal(again.moments, world.moments)
    assert again.log.capture().changed_pages == 0, "it knows what the log holds"
    again.step(7)
    assert again.log.capture().changed_pages == 2


def test_any_version_since_the_base_comes_back_and_the_rest_is_abandoned(path: Path) -> None:
    world = World(path)
    kept = []
    for number in range(4):
        world.step(number)
        world.log.capture(number)
        kept.append(world.weights.clone())
    restored = world.log.restore(2)
    assert restored is not None and restored.note == 1
    assert torch.equal(world.weights, kept[1])
    world.step(8)
    assert world.log.capture("other").version == 3
    assert world.log.versions() == [1, 2, 3]
    with pytest.raises(OtherState, match="version 9"):
        world.log.restore(9)


def test_a_new_base_replaces_the_file(path: Path) -> None:
    world = World(path, rebase_factor=0.5)
    for number in range(9):
        world.step(number)
        world.log.capture(number)
    assert world.log.versions()[0] > 1
    again = World(path)
    assert again.log.restore().note == 8  # type: ignore[union-attr]
    assert torch.equal(again.weights, world.weights)


@pytest.mark.parametrize("damage", ["torn", "flipped"])
def test_a_damaged_end_is_the_end(path: Path, damage: str) -> None:
    world = World(path)
    world.log.capture(0)
    good, before = path.stat().st_size, world.weights.clone()
    world.step(1)
    world.log.capture(1)
    data = bytearray(path.read_bytes())
    if damage == "torn":
        del data[-100:]
    else:
        data[good + 200] ^= 1
    path.write_bytes(data)
    again = World(path)
    assert again.log.restore().note == 0  # type: ignore[union-attr]
    assert torch.equal(again.weights, before)
    again.step(2)
    again.log.capture(2)
    assert World(path).log.restore().note == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("refused", "rebase_factor"),
    [("pwrite", 4.0), ("fdatasync", 4.0), ("pwrite", -1.0), ("fdatasync", -1.0), ("replace", -1.0), ("fsync", -1.0)],
)
def test_what_the_disk_refused_is_in_the_next_version(
    path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, rebase_factor: float
) -> None:
    world = World(path, rebase_factor=rebase_factor, sync=True)
    world.log.capture(0)
    world.step(1)

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, refused, no_room)
        with pytest.raises(OSError, match="No space"):
            world.log.capture(1)
    world.step(2)
    world.log.capture(2)
    again = World(path)
    assert again.log.restore().note == 2  # type: ignore[union-attr]
    assert torch.equal(again.weights, world.weights), "the step that the disk refused, too"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_after_a_restore_that_was_refused_everything_is_captured(path: Path) -> None:
    world = World(path)
    world.log.capture()
    world.step(1)
    changed = world.weights.clone()
    world.log.capture()
    world.weights[:] = 0
    world.log.capture()
    apply = world.log._regions["moments"].pages.apply
    world.log._regions["moments"].pages.apply = lambda delta: (
        Applied(0, [0]) if delta.indices.size == 1 else apply(delta)
    )  # type: ignore[method-assign]
    with pytest.raises(OtherState, match="not what they were"):
        world.log.restore()
    assert torch.equal(world.weights, changed), "put back before the other was refused"
    world.log.capture("as it is")
    again = World(path)
    assert again.log.restore().note == "as it is"  # type: ignore[union-attr]
    assert torch.equal(again.weights, changed)


def test_logs_side_by_side_are_made_anew_under_names_of_their_own(tmp_path: Path) -> None:
    made = []

    def noted(source: Path, target: Path) -> None:
        made.append(source)
        rename(source, target)

    rename = os.replace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", noted)
        for name in ("rank.0", "rank.1"):
            World(tmp_path / name).log.capture()
    assert len(set(made)) == 2


def test_other_tensors_are_refused(path: Path) -> None:
    frozen = torch.ones(100)
    world = World(path)
    world.log.register("base", frozen, constant=True)
    assert world.log.restore() is None
    world.log.capture()
    other = World(path)
    other.log.register("base", frozen + 1, constant=True)
    with pytest.raises(OtherState, match="base"):
        other.log.restore()
    smaller = OpaqueLog.open(path)
    smaller.register("weights", torch.zeros(5))
    with pytest.raises(OtherState, match="register the same"):
        smaller.restore()


def test_of_many_pages_the_changed_ones_are_found_wherever_they_are(path: Path) -> None:
    """Also after a version was put back, and where the same run of pages changes again."""
    many = torch.zeros(200 * 1024)  # 200 pages
    log = OpaqueLog.open(path)
    log.register("many", many)
    log.capture()
    for pages in ([0], [63, 64], [70], [70, 199], []):
        many.view(200, 1024)[pages, 5] += 1
        assert log.capture().changed_pages == len(pages), pages
    kept = many.clone()
    many[70 * 1024] = 9
    log.capture()
    assert log.restore(6) is not None and torch.equal(many, kept)
    assert log.capture().changed_pages == 0
    many[71 * 1024] = 9
    assert log.capture().changed_pages == 1
