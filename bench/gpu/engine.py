"""What capture costs the engine on this device, what a decode graph gains, and how long a recovered session waits.

Question  Tokens/s of batched decode with capture on and off, and with decode graphs on and off; time from "the slot is empty" to the
          next token.
Regime    A random model in the shape of Qwen3 0.6B (28 layers, 8 KV heads of 128, bfloat16), the engine's own arena, cache, decode
          graphs, capture and lane in shared memory; batch 1, 8 and 32 after a prompt of 64 tokens; contexts of 1,024 and 32,768
          tokens. Rounds of each kind take turns, after one that is not counted. Between them the lane is freed, as a keeper would.
Baselines capture off, with graphs; graphs off, with capture; computing the prefix again, a chunk at a time.
Unit      tokens/s (ratio on / off, wanted 0.99 for capture) and milliseconds (ratio recomputing / restoring).
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench import scratch
from bench.gpu.lab import Lab, Row
from engine.arena import Arena, Slot
from engine.attention import ArenaCache
from engine.capture import Capture, Cursor
from engine.capture.device_rows import build
from engine.decode_graph import DecodeGraphs, graphs_for
from engine.model import Model, load
from engine.settings import EngineSettings
from tiers.lane import LaneWriter
from tiers.lane_format import RecordType
from tiers.lane_reader import LaneReader

_BATCHES = (1, 8, 32)
_CONTEXTS = (1024, 32768)
_PROMPT, _STEPS, _CHUNK, _ROUNDS = 64, 48, 1024, 4
_BLOCK = 32
SHARED_MEMORY = Path("/dev/shm")
_DECODE_CONTEXT = 2048


@dataclass(slots=True)
class Bench:
    """An engine without its processes."""

    lab: Lab
    model: Model
    arena: Arena
    cache: ArenaCache
    capture: Capture
    graphs: DecodeGraphs
    keeper: LaneReader
    where: str = ""

    def drain(self) -> None:
        """The lane is empty again."""
        self.keeper.advance_tail(self.capture.lane.head)

    def forward(self, slots: list[Slot], tokens: list[list[int]]) -> torch.Tensor:
        """One step of every slot, from its length on; waits for the logits as an engine does before it samples."""
        starts, count = [slot.length for slot in slots], len(tokens[0])
        self.cache.begin(slots, starts, count)
        logits = self.model.forward(tokens, starts, self.cache, logits=True)
        assert logits is not None
        return self._done(slots, tokens, logits)

    def decode(self, slots: list[Slot], tokens: list[int], cursors: list[Cursor], *, graphed: bool) -> list[int]:
        """One token of every slot, captured if there are cursors; by a recorded step or as ever."""
        captures = [(cursor, slot, slot.length + 1) for cursor, slot in zip(cursors, slots, strict=False)]
        logits = None
        if graphed:
            starts = [slot.length for slot in slots]
            logits = self.graphs.step(slots, starts, tokens, captures=self.capture.before_step(captures))
        rows = [[token] for token in tokens]
        chosen = self.forward(slots, rows) if logits is None else self._done(slots, rows, logits)
        self.capture.ahead(captures)
        for cursor, slot in zip(cursors, slots, strict=False):
            assert self.capture.advance(cursor, slot), "the lane is too small"
        return chosen.tolist()

    def _done(self, slots: list[Slot], tokens: list[list[int]], logits: torch.Tensor) -> torch.Tensor:
        chosen = logits.argmax(dim=-1).tolist()
        for slot, row in zip(slots, tokens, strict=True):
            slot.tokens[slot.length : slot.length + len(row)] = row
            slot.length += len(row)
        return torch.tensor(chosen)

    def close(self) -> None:
        """Let the lane go."""
        path = self.capture.lane.path
        self.keeper.close()
        self.capture.let_go()
        path.unlink()


def measure(lab: Lab) -> list[Row]:
    """Decode at each batch, then recovery at each context, each in an arena that just holds it."""
    batches, contexts = (_BATCHES[:1], _CONTEXTS[:1]) if lab.quick else (_BATCHES, _CONTEXTS)
    rows: list[Row] = []
    with scratch.directory("gpu") as where:
        write_model(lab, where)
        longest = max(_tokens(lab, context) for context in contexts)
        options = EngineSettings(
            device=str(lab.device), context_tokens=longest + 64, prefill_chunk=_CHUNK, decode_graph="on"
        )
        model = load(where, "random-0.6B", options)
        a_round = max(batches) * (_PROMPT + _STEPS + 2 * _BLOCK)
        with _bench(lab, model, options, max(2, *batches), _DECODE_CONTEXT, a_round) as bench:
            for batch in batches:
                rows += [_late("decode, batch", batch)] if lab.out_of_time() else _decode(bench, batch)
        with _bench(lab, model, options, 2, longest + 64, longest + _BLOCK) as bench:
            for context in contexts:
                count = _tokens(lab, context)
                rows.append(_late("recovery of", count) if lab.out_of_time() else _recovery(bench, count))
    return rows


def _late(what: str, count: int) -> Row:
    return Row("engine", f"{what} {count:,}", 0.0, "", note="out of time")


def _tokens(lab: Lab, context: int) -> int:
    return max(64, context // lab.scale // 32 * 32)


def write_model(lab: Lab, directory: Path) -> None:
    """Random weights in the shape of Qwen3 0.6B; a toy of the same kind where the CPU stands in."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128,
             "num_key_value_heads": 8, "vocab_size": 151936} if lab.on_gpu else {
             "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
             "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
    torch.manual_seed(1)
    config = Qwen3Config(**shape, max_position_embeddings=40960, tie_word_embeddings=True, initializer_range=0.05)
    with torch.device(lab.device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16 if lab.on_gpu else torch.float32)
    model.save_pretrained(directory)


def lane_directory(lane_bytes: int) -> Path:
    """Shared memory, if it has room: a container's may be small."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        free = 0
    return SHARED_MEMORY if free > 1.1 * lane_bytes else Path(tempfile.gettempdir())


@contextmanager
def _bench(
    lab: Lab, model: Model, options: EngineSettings, slots: int, context_tokens: int, captured_tokens: int
) -> Iterator[Bench]:
    arena = Arena.allocate(
        model.layers, slots, context_tokens, model.dtype, model.device, states=model.states, step_tokens=_CHUNK,
        block_tokens=_BLOCK,
    )  # fmt: skip
    cache = ArenaCache(arena, lambda: None, model.layers)
    lane_bytes = int(1.1 * captured_tokens * arena.layout.token_bytes) + (16 << 20)
    place = lane_directory(lane_bytes)
    with scratch.directory("gpu", place) as directory:
        path = directory / f"{slots}.lane"
        lane = LaneWriter.open(path, lane_bytes=lane_bytes, record_count=1 << 16, incarnation=1)
        capture = Capture(lane, arena, model.root(arena.layout, _BLOCK), _BLOCK)
        rows = capture.rows = build(arena, lab.driver, "auto" if lab.on_gpu else "graph", in_steps=True)
        rows.reach_lane(lane.ring)
        rows.rows.wait_ready()
        keeper = LaneReader.open(path, writable_tail=True)
        where = "" if place == SHARED_MEMORY else f"; lane in {place}: /dev/shm is too small"
        bench = Bench(lab, model, arena, cache, capture, graphs_for(model, arena, cache, options, rows), keeper, where)
        try:
            yield bench
        finally:
            bench.close()


def _decode(bench: Bench, batch: int) -> list[Row]:
    """Both on, capture off, graphs off; a first round of each warms up and records."""
    kinds = {"both": (True, True), "no capture": (False, True), "no graph": (True, False)}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(2 if bench.lab.quick else _ROUNDS + 1):
        names = list(kinds) if turn % 2 else list(reversed(kinds))
        for name in names:
            captured, graphed = kinds[name]
            rates[name].append(_rate(bench, batch, f"{batch}-{turn}-{name}", captured=captured, graphed=graphed))
            bench.drain()
    both, no_capture, no_graph = (statistics.median(rates[name][1:]) for name in kinds)
    way = bench.capture.by
    return [
        Row("engine", f"decode, batch {batch}, capture on", both, "tokens/s", no_capture, both / no_capture, ">= 0.99",
            f"by {way}, {bench.capture.rows.in_lane if bench.capture.rows else 0} rows straight into the lane{bench.where}"),
        Row("engine", f"decode, batch {batch}, graphs on", both, "tokens/s", no_graph, both / no_graph, "> 1",
            bench.graphs.off or f"{bench.graphs.recorded} recorded"),
    ]  # fmt: skip


def _rate(bench: Bench, batch: int, name: str, *, captured: bool, graphed: bool) -> float:
    slots = bench.arena.slots[:batch]
    prompt = np.random.default_rng(batch).integers(3, bench.model.vocab_count, _PROMPT).tolist()
    cursors = []
    for slot in slots:
        bench.arena.forget(slot)
        bench.forward([slot], [prompt])
        if captured:
            cursors.append(bench.capture.cursor(f"decode-{name}-{slot.index}", 1, 0))
            assert bench.capture.advance(cursors[-1], slot), "the lane is too small"
    began, tokens = time.perf_counter(), [prompt[-1]] * batch
    for _ in range(_STEPS):
        tokens = bench.decode(slots, tokens, cursors, graphed=graphed)
    return batch * _STEPS / (time.perf_counter() - began)


def _recovery(bench: Bench, count: int) -> Row:
    """Restore `count` tokens of state from the lane into an empty slot and decode one token, against computing them again."""
    slot, other = bench.arena.slots[0], bench.arena.slots[-1]
    tokens = np.random.default_rng(count).integers(3, bench.model.vocab_count, count).tolist()
    bench.arena.forget(slot)
    began = time.perf_counter()
    for start in range(0, count, _CHUNK):
        expected = bench.forward([slot], [tokens[start : start + _CHUNK]])
    recomputing = time.perf_counter() - began
    cursor = bench.capture.cursor(f"recovery-{count}", 1, 0)
    assert bench.capture.advance(cursor, slot), "the lane is too small"
    expected = bench.forward([slot], [[tokens[-1]]])
    bench.arena.forget(other)
    reader = LaneReader.open(bench.capture.lane.path)
    began = time.perf_counter()
    with bench.arena.together():
        for record in reader.records(reader.tail):
            if record.type == RecordType.ROWS and record.sequence == cursor.sequence:
                frame = reader.frame(record)
                bench.arena.copy_in(other, record.token_start, frame, record.token_count, (0, record.token_count))
                other.length = record.token_end
    got = bench.forward([other], [[tokens[-1]]])
    restoring = time.perf_counter() - began
    reader.close()
    bench.drain()
    assert got.tolist() == expected.tolist(), "the restored slot goes on with another token"
    return Row("engine", f"recovery of {count:,} tokens", restoring * 1e3, "ms", recomputing * 1e3, recomputing / restoring, "> 1",
               f"{count * bench.arena.layout.token_bytes / restoring / 1e9:.1f} GB/s, by {bench.capture.restore_by}")  # fmt: skip
