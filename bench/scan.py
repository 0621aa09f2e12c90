"""How long until a lane of a gigabyte can be restored from?

Question  Time to attach a lane that is full of one-token records and to index it: its records found, their blocks known.
Regime    The records are one token of the demo model each (46 KB), of 16 sequences, in a warm file in shared memory.
          `attach`: map it and find the last record. `index`: from nothing to a PrefixFinder that can say what is
          restorable. New objects each time; payloads aren't checked, that is done by the restore that reads them.
Baseline  attach: parsing and checking every entry. index: reading every payload's first page, as a log without a
          directory of entries would have to.
Unit      ms; ratio is baseline / ours (no bound is set)
Seed      of tokens
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from bench import report, rows
from tiers.lane_reader import LaneReader
from tiers.paths import Paths
from tiers.prefix import PrefixFinder
from tiers.view import StoreReader

SEQUENCES = 16


def main() -> None:
    options = report.arguments(__doc__)
    megabytes, repeats = (256, 5) if options.quick else (1024, 9)
    result = report.Report("scan", options)
    with rows.installation() as paths:
        tokens = fill(paths, megabytes << 20, options.seed)
        records = len(LaneReader.open(paths.lane("e0")).records(0))
        cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "attach": (lambda: LaneReader.open(paths.lane("e0")).head(), lambda: walk(paths)),
            "index": (lambda: index(paths, tokens), lambda: touch(paths)),
        }
        for case, (ours, baseline) in cases.items():
            pairs = [(milliseconds(ours), milliseconds(baseline)) for _ in range(repeats)]
            value, theirs = (report.median([pair[side] for pair in pairs]) for side in (0, 1))
            result.add(report.Row(case, value, "ms", theirs, theirs / value, "", f"{records} records"))
    result.finish()


def fill(paths: Paths, size: int, seed: int) -> list[np.ndarray]:
    """A lane of about `size` bytes, one token a record, its sequences taking turns. Returns their tokens."""
    lane = rows.writer(paths, rows.settings(size + (64 << 20)))
    source = rows.Source(lane, seed, record_tokens=1)
    count = size // (rows.LAYOUT.token_bytes + 64) // SEQUENCES
    tokens = [rows.tokens_of(seed + index, count) for index in range(SEQUENCES)]
    for index in range(SEQUENCES):
        source.open(f"s{index}")
    for position in range(count):
        for index in range(SEQUENCES):
            source.append(f"s{index}", tokens[index][: position + 1], start=position)
    lane.close()
    return tokens


def index(paths: Paths, tokens: list[np.ndarray]) -> None:
    """Index the lane and look one sequence up."""
    finder = PrefixFinder(StoreReader(paths.store), paths.lane_dir)
    found = finder.find(rows.STATE, "bench", tokens[0], limit=len(tokens[0]), block_tokens=rows.BLOCK)
    assert found[-1].token_end == len(tokens[0])
    finder.close()


def walk(paths: Paths) -> int:
    return len(LaneReader.open(paths.lane("e0")).records(0))


def touch(paths: Paths) -> int:
    reader = LaneReader.open(paths.lane("e0"))
    return sum(int(reader.payload(header, verify=False)[0]) for header in reader.records(0))


def milliseconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return 1000 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
