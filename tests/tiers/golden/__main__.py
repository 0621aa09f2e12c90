"""Write lane-v2.bin, lane-v3.bin (sealed) and store-v2.bin, as this version's writers make them, into the directory that is named."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.tiers.sample import BLOCK, LAYOUT, ROOT, SETTINGS, World, append_point, append_rows, sequence, some_tokens
from tiers.keys import KEYS_VARIABLE
from tiers.lane_format import PointKind
from tiers.paths import Paths

TOKENS = some_tokens(5 * BLOCK + 3)
GOLDEN_KEY = "5a" * 32
GOLDEN = dataclasses.replace(LAYOUT, windows=(0, 12), state_bytes=40)


def make(out: Path) -> None:
    with tempfile.TemporaryDirectory() as data, tempfile.TemporaryDirectory() as lanes:
        settings = dataclasses.replace(SETTINGS, lane_bytes=8192, lane_record_count=16, store_map_bytes=1 << 20)
        world = World(Paths.at(data, lanes).make(), settings)
        fill(world)
        shutil.copy(world.paths.lane("e0"), out / "lane-v2.bin")
        world.drain()
        shutil.copy(world.paths.store / "data.mdb", out / "store-v2.bin")
    with tempfile.TemporaryDirectory() as data, tempfile.TemporaryDirectory() as lanes:
        os.environ[KEYS_VARIABLE] = f"default = {GOLDEN_KEY}"
        world = World(Paths.at(data, lanes).make(), dataclasses.replace(settings, lane_encryption="always"))
        fill(world)
        shutil.copy(world.paths.lane("e0"), out / "lane-v3.bin")


def fill(world: World) -> None:
    lane = world.lane()
    no_tokens = np.zeros(0, np.int32)
    lane.append_open(sequence("a"), 1, ROOT, GOLDEN, BLOCK, "default", "chat", "a", no_tokens)
    append_rows(lane, "a", 0, TOKENS[:20], namespace="default")
    append_point(lane, "a", 20, PointKind.CHUNK, 40, namespace="default")
    append_rows(lane, "a", 20, TOKENS[20:43], namespace="default")
    append_point(lane, "a", 43, PointKind.TIP, 40, namespace="default")
    lane.append_close(sequence("a"), 1, 43)
    lane.close()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
