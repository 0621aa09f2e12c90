"""export and import killed in the middle, as processes: the same command goes on, and nothing is half there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ops.conftest import Place
from tests.tiers.sample import BLOCK, ROOT, World, sequence, some_tokens
from tiers.drain import Drain
from tiers.export import check_exported
from tiers.lane import LaneWriter
from tiers.layout import Layout, block_chain
from tiers.settings import TierSettings
from tiers.view import StoreReader

pytestmark = pytest.mark.process

BIG = Layout(((4, 16384),))  # half a megabyte a block
BLOCKS = 32
TOKENS = some_tokens(BLOCKS * BLOCK, seed=77)
SETTINGS = TierSettings(lane_bytes=64 << 20, lane_record_count=1 << 10, block_tokens=BLOCK, store_map_bytes=1 << 30)


def frame(start: int, count: int) -> np.ndarray:
    return np.random.default_rng(start).integers(0, 256, BIG.frame_bytes(count)).astype(np.uint8)


@pytest.fixture
def source(places: Callable[[str], Place]) -> Place:
    place = places("source")
    place.world = World(place.paths, SETTINGS)
    lane = LaneWriter.open(place.paths.lane("e0"), lane_bytes=64 << 20, record_count=1 << 10, incarnation=1)
    lane.append_open(sequence("big"), 1, ROOT, BIG, BLOCK, "default", "big", "stream-big", TOKENS[:0])
    for start in range(0, len(TOKENS), BLOCK):
        reservation = lane.reserve_rows(BIG, BLOCK)
        np.copyto(reservation.frame, frame(start, BLOCK))
        reservation.commit(sequence("big"), 1, start, TOKENS[start : start + BLOCK])
    lane.append_close(sequence("big"), 1, len(TOKENS))
    lane.close()
    drain = Drain(place.paths, SETTINGS)
    drain.flush(sync=True)
    drain.close()
    place.record("big", TOKENS)
    return place


def start(place: Place, *arguments: str) -> subprocess.Popen[str]:
    where = ["--json", "--data-dir", str(place.paths.data_dir), "--lane-dir", str(place.paths.lane_dir)]
    command = [sys.executable, "-m", "ops.cli", *arguments, *where]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )


def kill_when(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """SIGKILL as soon as it has come that far (or it has ended before: then there was nothing to interrupt)."""
    deadline = time.monotonic() + 120
    while not reached() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.communicate()


def finish(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (process.returncode, out, err)
    return json.loads(out)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@pytest.mark.parametrize("share", [0.1, 0.8])
def test_a_killed_export_goes_on(source: Place, tmp_path: Path, share: float) -> None:
    file = tmp_path / "big.concordia"
    part = tmp_path / "big.concordia.part"
    total = BIG.frame_bytes(len(TOKENS))
    kill_when(start(source, "export", "big", "-o", str(file)), lambda: size(part) > share * total)
    interrupted = not file.exists()
    row = finish(start(source, "export", "big", "-o", str(file), "--yes"))
    assert row["position"] == len(TOKENS)
    assert not interrupted or row["resumed_records"] > 0
    assert check_exported(file).manifest.block_count == BLOCKS
    assert not part.exists()


@pytest.mark.parametrize("share", [0.5])
def test_a_killed_import_goes_on(source: Place, places: Callable[[str], Place], tmp_path: Path, share: float) -> None:
    file = tmp_path / "big.concordia"
    finish(start(source, "export", "big", "-o", str(file)))
    target = places("target")
    total = BIG.frame_bytes(len(TOKENS))
    store = target.paths.store / "data.mdb"
    kill_when(start(target, "import", str(file)), lambda: size(store) > share * total)
    assert target.run("verify").exit_code == 0, "what is there is whole and has a name"
    row = finish(start(target, "import", str(file), "--replace", "--yes"))
    assert row["blocks_put"] + row["blocks_there"] == BLOCKS
    assert target.json("sessions", "show", "big")["durable"] == len(TOKENS)
    reader = StoreReader(target.paths.store, map_bytes=1 << 30)
    with reader.snapshot() as view:
        for number, block in enumerate(block_chain(ROOT, "default", TOKENS, BLOCK)[1:]):
            assert np.array_equal(view.block(block).frame, frame(number * BLOCK, BLOCK))
    reader.close()
