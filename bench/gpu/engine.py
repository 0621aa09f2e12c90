"""What capture costs the engine on this device, and how long a recovered session waits.

Question  Tokens/s of batched decode with capture on and off; time from "the slot is empty" to the next token.
Regime    A random model in the shape of Qwen3 0.6B (28 layers, 8 KV heads of 128, bfloat16), the engine's own arena, cache, capture
          and lane in shared memory; batch 1, 8 and 32 after a prompt of 64 tokens; contexts of 1,024 and 32,768 tokens. Rounds with
          and without capture take turns. Nothing drains the lane: it holds all that is measured.
Baselines capture off; computing the prefix again, a chunk at a time.
Unit      tokens/s (ratio on / off, wanted 0.99) and milliseconds (ratio recomputing / restoring).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.gpu.lab import Lab, Row
from engine.arena import Arena, Slot
from engine.attention import ArenaCache
from engine.capture import Capture
from engine.capture.device_rows import build
from engine.model import Model, load
from engine.settings import EngineSettings
from tiers.lane import LaneReader, LaneWriter, RecordType

_BATCHES = (1, 8, 32)
_CONTEXTS = (1024, 32768)
_PROMPT, _STEPS, _CHUNK, _ROUNDS = 64, 48, 1024, 4
_BLOCK = 32


@dataclass(slots=True)
class Bench:
    """An engine without its processes."""

    lab: Lab
    model: Model
    arena: Arena
    cache: ArenaCache
    capture: Capture

    def forward(self, slots: list[Slot], tokens: list[list[int]]) -> torch.Tensor:
        """One step of every slot, from its length on; waits for the logits as an engine does before it samples."""
        starts, count = [slot.length for slot in slots], len(tokens[0])
        self.cache.begin(slots, starts, count)
        logits = self.model.forward(tokens, starts, self.cache, logits=True)
        assert logits is not None
        chosen = logits.argmax(dim=-1).tolist()
        for slot, row in zip(slots, tokens, strict=True):
            slot.tokens[slot.length : slot.length + count] = row
            slot.length += count
        return torch.tensor(chosen)


def measure(lab: Lab) -> list[Row]:
    """Decode at each batch, then recovery at each context."""
    batches, contexts = (_BATCHES[:1], _CONTEXTS[:1]) if lab.quick else (_BATCHES, _CONTEXTS)
    with tempfile.TemporaryDirectory(prefix="concordia-gpu-") as where:
        write_model(lab, Path(where))
        bench = _bench(lab, Path(where), [_tokens(lab, context) for context in contexts], batches)
        try:
            rows = [_decode(bench, batch) for batch in batches]
            rows += [_recovery(bench, _tokens(lab, context)) for context in contexts]
        finally:
            path = bench.capture.lane.path
            bench.capture.let_go()
            path.unlink()
    return rows


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


def _bench(lab: Lab, directory: Path, contexts: list[int], batches: tuple[int, ...]) -> Bench:
    slots, room = max(2, *batches), max(*contexts, _PROMPT + _STEPS) + 64
    options = EngineSettings(device=str(lab.device), context_tokens=room, slots=slots, prefill_chunk=_CHUNK)
    model = load(directory, "random-0.6B", options)
    arena = Arena.allocate(
        model.layers, slots, model.context_tokens, model.dtype, model.device, states=model.states, step_tokens=_CHUNK,
        block_tokens=_BLOCK,
    )  # fmt: skip
    cache = ArenaCache(arena, lambda: None, model.layers)
    captured = sum(contexts) + _ROUNDS * sum(batches) * (_PROMPT + _STEPS + _BLOCK)
    lane_bytes = int(1.1 * captured * arena.layout.token_bytes) + (16 << 20)
    path = Path("/dev/shm") / f"concordia-gpu-bench-{id(arena):x}.lane"
    lane = LaneWriter.open(path, lane_bytes=lane_bytes, record_count=1 << 16, incarnation=1)
    capture = Capture(lane, arena, model.root(arena.layout, _BLOCK), _BLOCK)
    capture.rows = build(arena, lab.driver, "auto" if lab.on_gpu else "stream")
    capture.rows.reach_lane(lane.ring)
    capture.rows.rows.wait_ready()
    return Bench(lab, model, arena, cache, capture)


def _decode(bench: Bench, batch: int) -> Row:
    rates: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 if bench.lab.quick else _ROUNDS):
        for captured in (turn % 2 == 0, turn % 2 == 1):
            rates[captured].append(_rate(bench, batch, captured, turn))
    on, off = (statistics.median(rates[captured]) for captured in (True, False))
    way = bench.capture.rows.way if bench.capture.rows else "copy"
    return Row("engine", f"decode, batch {batch}, capture on", on, "tokens/s", off, on / off, ">= 0.99", f"by {way}")


def _rate(bench: Bench, batch: int, captured: bool, turn: int) -> float:
    slots = bench.arena.slots[:batch]
    prompt = np.random.default_rng(turn).integers(3, bench.model.vocab_count, _PROMPT).tolist()
    cursors = []
    for slot in slots:
        bench.arena.forget(slot)
        bench.forward([slot], [prompt])
        cursors.append(bench.capture.cursor(f"decode-{batch}-{turn}-{captured}-{slot.index}", 1, 0))
    if captured:
        for cursor, slot in zip(cursors, slots, strict=True):
            assert bench.capture.advance(cursor, slot), "the lane is too small"
    began, token = time.perf_counter(), [prompt[-1]] * batch
    for _ in range(_STEPS):
        token = bench.forward(slots, [[one] for one in token]).tolist()
        if captured:
            pairs = list(zip(cursors, slots, strict=True))
            bench.capture.ahead([(cursor, slot, slot.length) for cursor, slot in pairs])
            for cursor, slot in pairs:
                assert bench.capture.advance(cursor, slot), "the lane is too small"
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
    for record in reader.records(0):
        if record.type == RecordType.ROWS and record.sequence == cursor.sequence:
            frame = reader.frame(record)
            bench.arena.copy_in(other, record.token_start, frame, record.token_count, (0, record.token_count))
            other.length = record.token_end
    got = bench.forward([other], [[tokens[-1]]])
    restoring = time.perf_counter() - began
    reader.close()
    assert got.tolist() == expected.tolist(), "the restored slot goes on with another token"
    return Row("engine", f"recovery of {count:,} tokens", restoring * 1e3, "ms", recomputing * 1e3, recomputing / restoring, "> 1",
               f"{count * bench.arena.layout.token_bytes / restoring / 1e9:.1f} GB/s with checksums")  # fmt: skip
