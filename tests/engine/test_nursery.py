"""What the nursery is asked for, and what it answers to what nobody should ask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.nursery import Nursery
from tiers.paths import Paths


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    paths = Paths.at(tmp_path / "data", tmp_path / "lanes")
    paths.make()
    made = Nursery({"data_dir": str(paths.data_dir), "lane_dir": str(paths.lane_dir)}, lambda *_: 0)
    yield made
    for each in (made._acceptor, made._listener, made._wake_read, made._wake_write, made._selector):
        each.close()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[1]",
        b"\xff",
        b"[" * 60_000,
        b'{"op": "spawn"}',
        b'{"op": "spawn", "engine": "e0", "incarnation": null}',
        b'{"op": "spawn", "engine": "e0", "incarnation": 1e999}',
        b'{"op": "status", "pid": []}',
        b'{"op": "dance"}',
    ],
)
def test_whatever_is_wrong_is_answered_and_ends_no_nursery(nursery: Nursery, line: bytes) -> None:
    assert list(nursery._answer(line)) == ["error"]
    assert nursery._answer(b'{"op": "ping"}') == {"pid": os.getpid()}
