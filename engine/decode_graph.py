"""Stage *decode* without launches: steps of a fixed shape bucket, recorded once and replayed (on a GPU as one CUDA graph each).

A step's shape is the bucket of its row count and the bucket of its longest context. In each bucket the first steps run as ever and
are timed (`auto`), the next ones run the fixed-shape step unrecorded, then it is recorded and replayed; if that turns out slower than the
steps before, the bucket goes back to them. What can't be recorded is computed as ever, with the reason in the log, in
`concordia status` and in the engine's metrics. The launch that gathers new rows for the lane is part of the graph where capture is
launched by graphs. Main thread only.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import structlog
import torch

from engine.arena import Arena, Range, Slot
from engine.attention import ArenaCache
from engine.decode_table import TableCache
from engine.model import Model
from engine.settings import EngineSettings
from engine.step_graph import StepGraph, StepRecorder, recorder_for

log = structlog.get_logger()

_LEAST_CONTEXT = 256
_TIMED_STEPS = 4  # of each kind before one is preferred
_WARM_STEPS = 2
# Rows that all sequences of a step see in one layer are brought together; beyond this the steps as ever need less memory.
_MOST_GATHERED_BYTES = 1 << 30
# Largest difference of logits between the two kinds of step, relative to their spread.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
_PROVED_TOKENS = (24, 11)


class RowRecorder(Protocol):
    """Who adds the gathering of new rows to a step (engine/capture/device_rows.py)."""

    def recordable(self) -> str:
        """Names the handler that would be recorded now; "" if none."""

    def record_into_step(self, row_count: int) -> None:
        """Launch it on the framework's stream, which may be recording."""

    def arm(self, ranges: Iterable[Range]) -> bool:
        """What the next replay gathers; False: nothing."""

    def disarm(self) -> None:
        """The replay did not happen."""


def row_bucket(row_count: int, slot_count: int) -> int:
    """Rows of the recorded step that serves this many: a power of two, or all slots."""
    return min(slot_count, 1 << (row_count - 1).bit_length())


def context_bucket(position: int, context_tokens: int) -> int:
    """Columns of the recorded step whose longest row ends at `position`."""
    return min(context_tokens, max(_LEAST_CONTEXT, 1 << (position - 1).bit_length()))


@dataclass(slots=True)
class Bucket:
    """One shape. `left` says why its steps are computed as ever; the times are of whole steps, milliseconds."""

    plain_ms: list[float] = field(default_factory=list)
    graph_ms: list[float] = field(default_factory=list)
    warm_steps: int = 0
    graph: StepGraph | None = None
    compared: bool = False
    left: str = ""


@dataclass(slots=True)
class DecodeGraphs:
    """The fixed-shape steps of one engine.

    off      why there are none; "" while there are
    skipped  while there are, steps that were computed as ever, by reason
    """

    model: Model
    cache: TableCache
    recorder: StepRecorder
    setting: Literal["auto", "on", "off"] = "auto"
    rows: RowRecorder | None = None
    off: str = ""
    replayed: int = 0
    recorded: int = 0
    dropped: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    _buckets: dict[tuple[int, int], Bucket] = field(default_factory=dict)
    _logits: torch.Tensor | None = None
    _handler: str = ""
    _timed: list[float] | None = None

    @property
    def state(self) -> str:
        """For operators: `on`, or why not; "" on a device where nobody expects any."""
        if self.setting == "auto" and not self.recorder.is_graph:
            return ""
        return self.off or "on"

    def step(
        self,
        slots: list[Slot],
        starts: list[int],
        tokens: list[int],
        *,
        adapted: bool = False,
        captures: Iterable[Range] = (),
    ) -> torch.Tensor | None:
        """One token of each slot. Returns logits (rows, vocab), valid until the next step; None: compute it as ever.

        adapted   a row uses an adapter
        captures  ranges that will be captured behind the step: gathered by it where that is recorded
        """
        self._timed = None
        if self.off:
            return None
        reason = self._refusal(slots, starts, adapted)
        key = row_bucket(len(slots), len(self.cache.arena.slots)), self._context(starts)
        if not reason:
            reason = self._refused_shape(*key)
        if reason:
            self.skipped[reason] += 1
            return None
        self._follow_handler()
        bucket = self._buckets.setdefault(key, Bucket())
        if bucket.left or self._times_plain(bucket):
            self.skipped[bucket.left or "being timed"] += 1
            return None
        self.cache.fill(slots, starts, tokens, key[0])
        if self._handler and self.rows is not None:
            self.rows.arm(captures)
        if not self._run(bucket, *key):
            return None
        for slot, start in zip(slots, starts, strict=True):
            slot.state_position = start + 1
        assert self._logits is not None, "a step leaves logits"
        return self._logits[: len(slots)]

    def saw(self, step_ms: float) -> None:
        """How long the step took that `step` was asked for last, its sampling and capture included."""
        if self._timed is not None:
            self._timed.append(step_ms)
            self._timed = None

    # ------------------------------------------------------------ what goes as ever

    def _refusal(self, slots: list[Slot], starts: list[int], adapted: bool) -> str:
        if adapted:
            return "a row uses an adapter"
        if self.cache.arena.states.state_bytes and min(starts) == 0:
            return "a sequence begins"
        return ""

    def _context(self, starts: list[int]) -> int:
        return context_bucket(max(starts) + 1, self.cache.arena.context_tokens)

    def _refused_shape(self, row_count: int, context_tokens: int) -> str:
        arena = self.cache.arena
        layer = max((r.end - r.start) * arena.groups[r.group].shape[-1] for r in (*arena.keys.values(), *arena.values.values())) \
            if arena.keys else 0  # fmt: skip
        byte_count = 2 * row_count * context_tokens * layer * self.model.dtype.itemsize
        return "its contexts are too long" if byte_count > _MOST_GATHERED_BYTES else ""

    def _times_plain(self, bucket: Bucket) -> bool:
        """Whether the next step of a bucket is one to compare with."""
        if self.setting != "auto" or len(bucket.plain_ms) >= _TIMED_STEPS:
            return False
        self._timed = bucket.plain_ms
        return True

    # ------------------------------------------------------------ running

    def _run(self, bucket: Bucket, row_count: int, context_tokens: int) -> bool:
        """Warm up, record, replay; False if it can't be, and then nothing was computed that the step as ever does not compute again."""
        try:
            if bucket.graph is None and bucket.warm_steps < _WARM_STEPS:
                bucket.warm_steps += 1
                self._call(row_count, context_tokens)
                return True
            if bucket.graph is None:
                bucket.graph = self.recorder.record(lambda: self._call(row_count, context_tokens))
                self.recorded += 1
                log.info("decode.graph_recorded", rows=row_count, context=context_tokens, with_rows=bool(self._handler))
            bucket.graph.replay()
        except Exception as error:  # noqa: BLE001 - whatever the model's own code raises, the step as ever is still there
            self._give_up(bucket, error)
            return False
        self.replayed += 1
        if not bucket.compared:
            self._compare(bucket)
        return True

    @torch.inference_mode()
    def _call(self, row_count: int, context_tokens: int) -> None:
        """The step itself, over static memory."""
        ids, positions = self.cache.start(row_count, context_tokens)
        logits = self.model.decode(ids, positions, self.cache)
        self._static_logits(logits)[:row_count].copy_(logits)
        if self._handler and self.rows is not None:
            self.rows.record_into_step(row_count)
        self.cache.finish()  # last: a step that failed before it has left the recurrent state as it was

    def _static_logits(self, like: torch.Tensor) -> torch.Tensor:
        """Where all steps leave their logits; made in a step that is not recorded."""
        if self._logits is None:
            self._logits = torch.empty(len(self.cache.arena.slots), like.shape[1], dtype=like.dtype, device=like.device)
        return self._logits

    def _give_up(self, bucket: Bucket, error: Exception) -> None:
        if self.rows is not None:
            self.rows.disarm()
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        if _is_out_of_memory(error):
            bucket.left, bucket.graph = "no memory for its graph", None
            log.warning("decode.graph_left", reason=reason)
            return
        self.turn_off(f"a step can't be recorded ({reason})")

    def turn_off(self, reason: str) -> None:
        """Steps are computed as ever from now on."""
        self.off = reason
        self._buckets.clear()
        log.warning("decode.graph_off", reason=reason, way="steps are launched one operation at a time")

    def _compare(self, bucket: Bucket) -> None:
        """Time a few replays against the steps before them, once; the slower kind of step is left."""
        if len(bucket.graph_ms) < _TIMED_STEPS:
            self._timed = bucket.graph_ms
            return
        bucket.compared = True
        if not bucket.plain_ms:
            return
        plain, graph = statistics.median(bucket.plain_ms), statistics.median(bucket.graph_ms)
        if graph > plain:
            bucket.left, bucket.graph = "launches are faster at this shape", None
            log.info("decode.graph_left", reason=bucket.left, graph_ms=round(graph, 3), plain_ms=round(plain, 3))

    def _follow_handler(self) -> None:
        """A handler was compiled, replaced or given up: what was recorded with the old one is recorded anew."""
        handler = self.rows.recordable() if self.rows is not None else ""
        if handler == self._handler:
            return
        self._handler = handler
        for bucket in self._buckets.values():
            if bucket.graph is not None:
                self.dropped += 1
            bucket.graph, bucket.warm_steps = None, 0

    # ------------------------------------------------------------ proof

    def prove(self, plain: ArenaCache) -> None:
        """Before anything is served: unrecorded and recorded steps give the logits of the steps as ever, else there are none."""
        arena = self.cache.arena
        lengths = [min(count, arena.context_tokens - 1) for count in _PROVED_TOKENS[: len(arena.slots)]]
        slots = arena.slots[: len(lengths)]
        try:
            difference = self._difference(plain, slots, lengths)
        finally:
            for slot in slots:
                arena.forget(slot)
        if not self.off and not difference < _TOLERANCE[self.model.dtype]:
            self.turn_off(f"its logits differ by {difference:.2g} of their spread from those of the steps as ever")

    def _difference(self, plain: ArenaCache, slots: list[Slot], lengths: list[int]) -> float:
        arena, token = self.cache.arena, 3
        for slot, count in zip(slots, lengths, strict=True):
            plain.begin([slot], [0], count)
            self.model.forward([list(range(3, 3 + count))], [0], plain, logits=False)
        kept = [arena.states.take(slot.index, 0) for slot in slots]
        plain.begin(slots, lengths, 1)
        expected = self.model.forward([[token]] * len(slots), lengths, plain, logits=True)
        assert expected is not None, "logits were asked for"
        key = row_bucket(len(slots), len(arena.slots)), self._context(lengths)
        bucket, worst = self._buckets.setdefault(key, Bucket()), expected.new_zeros((), dtype=torch.float32)
        for _ in range(_WARM_STEPS + 2):
            for slot, snapshot in zip(slots, kept, strict=True):
                arena.states.put(slot.index, snapshot.state)
            self.cache.fill(slots, lengths, [token] * len(slots), key[0])
            if not self._run(bucket, *key):
                return float(worst)
            assert self._logits is not None, "a step leaves logits"
            apart = (self._logits[: len(slots)].float() - expected.float()).abs().max()
            worst = torch.maximum(worst, apart / expected.float().std().clamp_min(1e-6))  # what is no number stays none
        self._timed, bucket.graph_ms = None, []
        self.replayed = 0
        return float(worst)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Also where the end of the broken capture raised another error on top."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False


def graphs_for(
    model: Model, arena: Arena, plain: ArenaCache, options: EngineSettings, rows: RowRecorder | None
) -> DecodeGraphs:
    """The decode graphs of an engine, proven; with the reason in `off` where it has none."""
    cache = TableCache(arena, plain.beat, model.layers)
    graphs = DecodeGraphs(model, cache, recorder_for(model.device), options.decode_graph, rows)
    if options.decode_graph == "off":
        graphs.off = "engine.decode_graph is off"
    elif options.deterministic:
        graphs.off = "engine.deterministic: the bits of a step of a bucket depend on the bucket"
    elif options.decode_graph == "auto" and not graphs.recorder.is_graph:
        graphs.off = f"{model.device} has no graphs"
    else:
        graphs.prove(plain)
    return graphs
