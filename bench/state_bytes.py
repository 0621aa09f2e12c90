"""How many bytes does a session's state take, by kind, and does a window's memory grow with the context?

Question  Bytes stored per token: rows (`KIND rows`) and rollback points (`KIND points`), before and after compaction; device memory of
          window layers at a context of 8k against 1k (`ring 8k / 1k`).
Regime    A tiny model of each kind (tests/engine/kinds.py); one session of TURNS turns, TOKENS tokens in all; the engine, its lane and
          the store in this process. Sizes as the store holds them, without LMDB's own pages.
Baseline  Before compaction; for the ring, its bytes at 1k.
Unit      bytes a token, ratio before / after; bytes a sequence, ratio 8k / 1k. Wanted: at most 1.01 for the ring.
Seed      --seed; --model and --threads are not used
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

from bench import report, scratch
from engine.arena import Arena
from tests.engine.driver import EngineDriver, submit
from tests.engine.kinds import SAMPLE, write_model
from tiers.compaction import Compaction
from tiers.drain import Drain
from tiers.paths import Paths
from tiers.prefix import PrefixFinder
from tiers.settings import TierSettings

TURNS = 4
TOKENS = 1536
ANSWER_TOKENS = 64
RING = "ring 8k / 1k"


def main() -> None:
    options = report.arguments(__doc__)
    torch.set_num_threads(1)
    rows = report.Report("state_bytes", options)
    kinds = {"window": SAMPLE["window"], "linear": SAMPLE["linear"]} if options.quick else SAMPLE
    for kind, architecture in kinds.items():
        with scratch.directory("bytes") as directory:
            before, after, ring = measure(directory, architecture, random.Random(options.seed))
        for part in ("rows", "points"):
            if before[part]:
                value, baseline = after[part] / TOKENS, before[part] / TOKENS
                rows.add(report.Row(f"{kind} {part}", value, "bytes/token", baseline, baseline / max(value, 1e-9)))
        if ring[0]:
            rows.add(report.Row(RING, ring[1], "bytes", ring[0], ring[1] / ring[0], "<= 1.01"))
    rows.finish()


def measure(
    directory: Path, architecture: str, draw: random.Random
) -> tuple[dict[str, int], dict[str, int], tuple[int, int]]:
    """Bytes before compaction, after it, and of window buffers at 1k and at 8k."""
    model = write_model(architecture, directory / "model", context_tokens=8192)
    paths = Paths.at(directory / "data", directory / "lanes")
    paths.make()
    drain = Drain(paths, TierSettings(store_map_bytes=1 << 30))
    drain.open()
    engine = EngineDriver.start(model, paths, context_tokens=8192)
    engine.engine.lookup.finder = PrefixFinder(drain.store(), paths.lane_dir)
    try:
        tokens: list[int] = []
        for turn in range(TURNS):
            tokens += [draw.randrange(3, 512) for _ in range(TOKENS // TURNS - ANSWER_TOKENS)]
            engine.handle(submit(f"turn{turn}", tokens, ANSWER_TOKENS, session="bytes"))
            engine.run()
            tokens += engine.tokens(f"turn{turn}")
        engine.engine._capture_everything()
        drain.flush(sync=True)
        before = stored(drain)
        for _ in Compaction(drain, settle_s=0.0, grace_s=0.0).run():
            pass
        return before, stored(drain), ring_bytes(engine)
    finally:
        engine.close()
        drain.close()


def stored(drain: Drain) -> dict[str, int]:
    """Bytes of values in the store, by what they are."""
    with drain.store().snapshot() as view:
        sizes = {name: sum(len(raw) for _, raw in view.scan(name)) for name in ("blocks", "tails", "states")}
    return {"rows": sizes["blocks"] + sizes["tails"], "points": sizes["states"]}


def ring_bytes(engine: EngineDriver) -> tuple[int, int]:
    """Device bytes that one sequence's window layers take in an engine for 1k tokens, and in one for 8k."""
    model = engine.engine.model
    arenas = [
        Arena.allocate(model.layers, 1, context, model.dtype, model.device, states=model.states)
        for context in (1024, 8192)
    ]
    sizes = [
        sum(group[0].nbytes for group, at in zip(arena.groups, arena.group_windows, strict=True) if at)
        for arena in arenas
    ]
    return sizes[0], sizes[1]


if __name__ == "__main__":
    main()
