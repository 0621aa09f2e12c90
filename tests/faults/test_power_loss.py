"""A loss of power at any moment, leaving any subset of what was not synced: the store opens, verifies clean and holds what was promised."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.faults.layer import Disk, Layer, Op
from tests.tiers.sample import World, some_tokens
from tiers.drain import Drain
from tiers.paths import Paths
from tiers.verify import verify

SEED = int(os.environ.get("CONCORDIA_TEST_SEED", "20261129"))
TOKENS = 700

WORKLOAD = """
import dataclasses, os, sys
from tests.tiers.sample import World, append_rows, sequence, some_tokens
from tiers.drain import Drain
from tiers.paths import Paths
mode, data, lanes, seed = sys.argv[1:5]
import numpy as np
random = np.random.default_rng(int(seed))
world = World(Paths.at(data, lanes))
world = dataclasses.replace(world, settings=dataclasses.replace(world.settings, durability=mode))
mark = os.open(data + "/store/mark", os.O_WRONLY | os.O_CREAT, 0o600)
drain = Drain(world.paths, world.settings)
drain.open()
lane, tokens, position = world.lane(), some_tokens(700), 0
world.capture(lane, "a", tokens, [])
while position < 700:
    end = min(700, position + int(random.integers(1, 40)))
    append_rows(lane, "a", position, tokens[position:end])
    position = end
    if random.random() < 0.6:
        drain.flush(sync=False)
        if random.random() < 0.4:
            drain.sync()
            os.pwrite(mark, str(position).encode(), 0)
    elif random.random() < 0.2:
        drain.flush(sync=True)
        os.pwrite(mark, str(position).encode(), 0)
print("ended at", position)
os._exit(0)
"""


def recorded(mode: str, tmp_path: Path, lanes: str) -> list[Op]:
    data = tmp_path / "data"
    paths = Paths.at(data, lanes).make()
    layer = Layer.over(paths.store, tmp_path, trace=True)
    assert "ended at 700" in layer.run(WORKLOAD, mode, str(data), lanes, str(SEED))
    return layer.operations()


def check(image: bytes | None, promised: int, directory: Path, boot_id: str | None = None) -> None:
    """What the next start finds in a directory that holds only this."""
    shutil.rmtree(directory, ignore_errors=True)
    world = World(Paths.at(directory / "data", directory / "lanes").make())
    if image is not None:
        (world.paths.store / "data.mdb").write_bytes(image)
    if boot_id is not None:
        (world.paths.store / "unsynced").write_text(boot_id)
    drain = Drain(world.paths, world.settings)
    drain.open()
    drain.close()
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []
    held = world.restorable(some_tokens(TOKENS))
    assert held >= promised, f"{held} tokens are left of {promised} that were promised"


@pytest.mark.parametrize("mode", ["interval", "turn"])
def test_every_subset_of_unsynced_pages_leaves_a_clean_store(mode: str, world: World, tmp_path: Path) -> None:
    """Bound of both: what was committed when the last sync began. They differ in who asks for the sync."""
    print("seed", SEED)
    random = np.random.default_rng(SEED)
    disk, promised, tried, named_before = Disk(), 0, 0, True
    for op in recorded(mode, tmp_path, str(world.paths.lane_dir)):
        if op.name == "mark" and op.kind == "W":
            promised = int(op.data)
        elif op.name == "data.mdb" and op.kind == "R":
            named_before = False
            disk.named = True
        elif op.name == "" and op.kind == "S" and disk.named:
            named_before = True
        elif op.name in ("data.mdb", "new/data.mdb"):
            disk.apply(op)
        else:
            continue
        if not disk.named or not named_before:
            assert promised == 0, "nothing may be promised before the file's name is on the disk"
        if disk.named and random.random() < 0.4:
            for image in disk.after_power_loss(random, samples=1, exhaustive=6):
                check(image, promised, tmp_path / "after")
                tried += 1
    assert promised > 300 and tried > 30


def test_without_syncs_a_lost_machine_means_an_empty_store_set_aside(world: World, tmp_path: Path) -> None:
    """Bound of `process`: every process may die, the machine may not. The next boot sees that, whatever the file looks like."""
    random = np.random.default_rng(SEED)
    operations = recorded("process", tmp_path, str(world.paths.lane_dir))
    marker = [index for index, op in enumerate(operations) if op.name.endswith("unsynced") and op.kind == "S"]
    first_write = next(index for index, op in enumerate(operations) if op.name == "data.mdb" and op.kind == "W")
    assert marker and marker[0] < first_write, "the marker must be on the disk before the first unsynced write"
    disk = Disk()
    for op in operations:
        if op.name in ("data.mdb", "new/data.mdb") and op.kind in "WS":
            disk.apply(op)
    for image in disk.after_power_loss(random, samples=5, exhaustive=1):
        check(image, 0, tmp_path / "after", boot_id="another boot")
        assert (tmp_path / "after" / "data" / "store" / "damaged" / "data.mdb").exists()


def test_process_mode_loses_nothing_while_the_machine_is_up(world: World, tmp_path: Path) -> None:
    """The workload ended without closing the store, as a killed keeper does: the page cache holds all that was committed."""
    recorded("process", tmp_path, str(world.paths.lane_dir))
    left = World(Paths.at(tmp_path / "data", world.paths.lane_dir))
    assert left.restorable(some_tokens(TOKENS)) == TOKENS
    assert list(verify(left.paths.store, map_bytes=left.settings.store_map_bytes)) == []
