"""A loss of power, leaving any subset of what was not synced: a journal ends where something is missing, behind what was promised."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from gateway import journal as j
from gateway.streams import StreamTable
from gateway.tokenizer import TokenIdText
from tests.faults.layer import Disk, Layer, Op

pytestmark = pytest.mark.process
SEED = int(os.environ.get("CONCORDIA_TEST_SEED", "20261130"))

# Several streams side by side; a mark says how many bytes of each journal are promised, as soon as they are.
WORKLOAD = """
import asyncio, json, os, sys
from pathlib import Path
import numpy as np
from engine.messages import Sampling, pack_tokens
from gateway import journal as j
from gateway.journal_sync import JournalSync
from gateway.streams import StreamTable, new_stream_id
from gateway.tokenizer import TokenIdText

mode, directory, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
random = np.random.default_rng(seed)
sync = JournalSync(directory, durability=mode, interval_ms=10**6)
table = StreamTable(directory, TokenIdText(), sync.written)
mark = os.open(directory / "mark", os.O_WRONLY | os.O_CREAT, 0o600)
promised = {}

def length(stream):
    return stream.journal._end

def say():
    os.pwrite(mark, json.dumps(promised).encode(), 0)

async def main():
    for step in range(160):
        live = list(table.live.values())
        if len(live) < 3:
            name = f"{step:024x}"
            table.open(j.StreamSpec(name, "text", 1, "tiny", pack_tokens([10, 11]), Sampling(seed=3), [], [1], 10**6, stored=True))
            continue
        stream = live[int(random.integers(len(live)))]
        tokens = random.integers(20, 50_000, int(random.integers(1, 400))).tolist()
        stream.record(j.Tokens(len(stream.tokens), pack_tokens(tokens)))
        if random.random() < 0.1:
            if mode == "turn" and await sync.sync([stream.journal.path]):
                promised[stream.id] = length(stream)
                say()
            stream.record(j.End("length", "length", 2.0))
            table.retire(stream)
        elif random.random() < 0.15 and mode != "process":
            now = {s.id: length(s) for s in table.live.values()}
            assert await sync.sync()
            promised.update(now)
            say()
    print("ended")
    os._exit(0)

asyncio.run(main())
"""


def recorded(mode: str, tmp_path: Path) -> list[Op]:
    directory = tmp_path / "journal"
    directory.mkdir()
    layer = Layer.over(directory, tmp_path, trace=True)
    assert "ended" in layer.run(WORKLOAD, mode, str(directory), str(SEED))
    return layer.operations()


def applied(disk: Disk, op: Op) -> None:
    if op.kind != "T":  # of a file that was just made
        disk.apply(op)


def prefix(image: bytes, whole: bytes) -> int:
    """How far a journal can be read; what is read is what was written."""
    end = max((end for _, end in j.read_records(image)), default=0)
    assert image[:end] == whole[:end], "a journal says what was never written"
    return end


@pytest.mark.parametrize("mode", ["process", "interval", "turn"])
def test_every_subset_of_unsynced_pages_leaves_what_was_promised(mode: str, tmp_path: Path) -> None:
    """`interval`: all that was written when a sync began that is over. `turn`: also an answer, before its end. `process`: nothing."""
    print("seed", SEED)
    random = np.random.default_rng(SEED)
    operations = recorded(mode, tmp_path)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "journal").glob("*.journal")}
    disks: dict[str, Disk] = {}
    named: set[str] = set()
    promised: dict[str, int] = {}
    tried = 0
    for op in operations:
        if op.name == "mark":
            promised = json.loads(op.data) if op.kind == "W" else promised
        elif op.name == "" and op.kind == "S":
            named = set(disks)
        elif op.name.endswith(".journal"):
            applied(disks.setdefault(op.name, Disk()), op)
        if random.random() < 0.3:
            for name, disk in disks.items():
                least = promised.get(name.removesuffix(".journal"), 0)
                assert name in named or not least, "nothing may be promised before the file's name is on the disk"
                for image in disk.after_power_loss(random, samples=1, exhaustive=4):
                    assert prefix(image, whole[name]) >= least
                    tried += 1
    assert tried > 300
    assert (max(promised.values(), default=0) > 3000) == (mode != "process")
    assert any(op.kind == "S" for op in operations) == (mode != "process")


def test_next_start_goes_on_with_what_is_left(tmp_path: Path) -> None:
    """A hole before the mark of the end doesn't pass for an answer that is over."""
    random = np.random.default_rng(SEED)
    operations = recorded("process", tmp_path)
    files: dict[str, Disk] = {}
    for op in operations:
        if op.name.endswith(".journal"):
            applied(files.setdefault(op.name, Disk()), op)
    holes = 0
    for attempt in range(20):
        directory = tmp_path / f"after-{attempt}"
        directory.mkdir()
        expected = {}
        for name, disk in files.items():
            image = list(disk.after_power_loss(random, samples=3, exhaustive=4))[-1]
            (directory / name).write_bytes(image)
            records = [record for record, _ in j.read_records(image)]
            is_over = any(isinstance(record, j.End) for record in records)
            if records and not is_over:
                expected[name.removesuffix(".journal")] = sum(
                    len(record.tokens) // 4 for record in records if isinstance(record, j.Tokens)
                )
            holes += image.endswith(j.CLOSED) and not is_over
        table = StreamTable(directory, TokenIdText())
        found = {stream.id: stream.token_count for stream in table.load_live()}
        assert found == expected
        for stream in table.live.values():
            stream.record(j.Tokens(len(stream.tokens), b"\x05\0\0\0"))
        table.close()
        again = StreamTable(directory, TokenIdText())
        assert {s.id: s.token_count for s in again.load_live()} == {name: n + 1 for name, n in expected.items()}
        again.close()
    assert holes, "the case was not met: another seed"
