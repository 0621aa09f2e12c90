"""The engine's device memory for attention state: one preallocated region, cut into slots of one sequence each.

Every layer's K and V of one head is a plane; a slot is (planes, tokens, dim) for each group of planes with equal rows and
window, so attention reads each head's rows contiguously, and what a step wrote for a token range is one strided slice.
Measured on the demo model at 7k tokens of context, decode took 89 ms a step in this layout, 115 to 146 with a layer's heads
side by side in a row, 122 to 164 with one row per token over all layers (docs/lab.md). A window layer's rows lie in a buffer
of fixed size that slides along the context: the rows in use stay contiguous and in order, whatever the position, and are
moved to the front when the end is reached (once in `window` tokens or more). Main thread only.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from engine.plan import Kinds
from engine.states import Snapshot, StateRows, StateShape
from tiers.copy_sum import Memory, copy
from tiers.layout import ALL_GROUPS, Layout
from tiers.pages import give_back

# Frames that are restored lie in read-only maps; they are only ever the source of a copy.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores for a token: K and V of `heads` heads.

    window   tokens that the layer sees, the query's own among them; 0: all
    derived  K and V for attention are computed from what is stored (latent attention): the model wants the stored rows back
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    derived: bool = False


@dataclass(frozen=True, slots=True)
class PlaneRange:
    """Where a layer's K or V lies: planes [start, end) of a group."""

    group: int
    start: int
    end: int


@dataclass(slots=True)
class Slot:
    """Room for one sequence. `tokens[:length]` are those whose state is in the arena, `stored` of them also in a tier.

    captured is False for a sequence of which nothing (more) is captured: it asked for that, or rows of it were lost.
    adapter is the digest of what it was computed with.
    bases           position of the first row in the buffer of each of the arena's windows (the first of which is "all": 0)
    state_position  tokens that the recurrent state has seen; it serves a continuation from exactly there
    points          rollback points on the device: position -> snapshot
    filling         a restore is under way: nobody may take anything over from here
    """

    index: int
    tokens: np.ndarray  # (context_tokens,) int32
    length: int = 0
    stored: int = 0
    namespace: str = ""
    session: str = ""
    captured: bool = True
    busy: bool = False
    last_used: int = 0
    adapter: str = ""
    bases: list[int] = field(default_factory=lambda: [0])
    state_position: int = 0
    points: dict[int, Snapshot] = field(default_factory=dict)
    filling: bool = False

    @property
    def lag_tokens(self) -> int:
        """Tokens whose state no tier has yet."""
        return self.length - self.stored if self.captured else 0

    def common_prefix(self, tokens: np.ndarray) -> int:
        """Count of leading tokens that this slot shares with a token list."""
        count = min(self.length, len(tokens))
        differing = np.nonzero(self.tokens[:count] != tokens[:count])[0]
        return int(differing[0]) if differing.size else count


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [take) of a frame of `token_count` tokens, for the rows of a slot from position `start` on.

    firsts  by window, positions before which nothing is copied (a window's buffer holds only its last rows)
    groups  bit mask of the groups that the frame has
    """

    slot: Slot
    start: int
    frame: np.ndarray
    token_count: int
    take: tuple[int, int]
    firsts: list[int]
    groups: int

    @property
    def end(self) -> int:
        """Position behind the last row."""
        return self.start + self.take[1] - self.take[0]


class Range(NamedTuple):
    """Rows of positions [start, end) of a slot that are to be captured; `frame` is where, if that is known by now."""

    slot: Slot
    start: int
    end: int
    frame: np.ndarray | None = None


class Applier(Protocol):
    """Who puts frames back in the framework's stead (engine/capture/device_restore.py)."""

    def put(self, piece: Piece) -> bool:
        """What was put is there after `flush`, the frame is free at once. False: the framework has to."""

    def flush(self) -> None:
        """Return when everything that was put is in the arena."""


@dataclass(slots=True)
class Arena:
    """All slots of one engine. Build with `Arena.allocate`."""

    layout: Layout
    groups: list[torch.Tensor]  # one a group: (slots, planes, capacity of its window, dim)
    group_windows: list[int]  # by group, the index of its window
    windows: list[int]  # distinct windows, 0 (all) first
    kept: list[int]  # by window, rows that are never given up: what a query sees, or a whole block
    capacities: list[int]
    keys: dict[int, PlaneRange]  # by layer
    values: dict[int, PlaneRange]
    layer_windows: dict[int, int]  # by layer, the index of its window
    slots: list[Slot]
    context_tokens: int
    block_tokens: int
    step_tokens: int
    states: StateRows
    words: list[np.ndarray] = field(
        default_factory=list
    )  # on a host, the groups as (slots, planes, capacity, words of a row)
    addresses: list[int] = field(default_factory=list)  # of the words
    key_views: list[dict[int, torch.Tensor]] = field(default_factory=list)  # [slot][layer] (heads, capacity, dim)
    value_views: list[dict[int, torch.Tensor]] = field(default_factory=list)
    applier: Applier | None = None  # on a GPU, once there are handlers
    _together: bool = False

    @classmethod
    def allocate(
        cls,
        layers: list[LayerShape] | dict[int, LayerShape],
        slot_count: int,
        context_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        states: list[StateShape] | None = None,
        step_tokens: int = 256,
        block_tokens: int = 32,
    ) -> Arena:
        """Reserve memory for `slot_count` sequences of `context_tokens`; pages are touched on first use (see `prefault`).

        layers        by layer index; a list numbers them from 0
        step_tokens   most tokens that one step adds to a sequence
        block_tokens  a window's buffer always holds the whole of the unfinished block, so that it can be captured
        """
        shapes = dict(enumerate(layers)) if isinstance(layers, list) else layers
        shapes = {index: _bounded(shape, context_tokens) for index, shape in shapes.items()}
        windows = [0, *sorted({shape.window for shape in shapes.values()} - {0})]
        kept = [max(window, block_tokens) for window in windows]
        capacities = [context_tokens, *(min(context_tokens, 2 * rows + step_tokens) for rows in kept[1:])]
        kinds = sorted({(shape.window, dim) for shape in shapes.values() for dim in (shape.key_dim, shape.value_dim)})
        plane_counts = [0] * len(kinds)
        keys: dict[int, PlaneRange] = {}
        values: dict[int, PlaneRange] = {}
        for index, shape in sorted(shapes.items()):
            for ranges, dim in ((keys, shape.key_dim), (values, shape.value_dim)):
                group = kinds.index((shape.window, dim))
                start = plane_counts[group]
                plane_counts[group] = start + shape.heads
                ranges[index] = PlaneRange(group, start, start + shape.heads)
        group_windows = [windows.index(window) for window, _ in kinds]
        groups = [
            _zeros((slot_count, planes, capacities[at], dim), dtype, device)
            for planes, at, (_, dim) in zip(plane_counts, group_windows, kinds, strict=True)
        ]
        rows = StateRows.allocate(states or [], slot_count, device)
        layout = Layout(
            tuple((planes, dim * dtype.itemsize) for planes, (_, dim) in zip(plane_counts, kinds, strict=True)),
            tuple(window for window, _ in kinds) if len(windows) > 1 else (),
            rows.state_bytes,
        )
        slots = [Slot(i, np.zeros(context_tokens, dtype=np.int32), bases=[0] * len(windows)) for i in range(slot_count)]
        layer_windows = {index: windows.index(shape.window) for index, shape in shapes.items()}
        arena = cls(
            layout, groups, group_windows, windows, kept, capacities, keys, values, layer_windows, slots,
            context_tokens, block_tokens, step_tokens, rows,
        )  # fmt: skip
        if device.type == "cpu":
            arena.words = [_words(group) for group in groups]
            arena.addresses = [words.ctypes.data for words in arena.words]
        arena.key_views = [{at: arena._plane(i, r) for at, r in keys.items()} for i in range(slot_count)]
        arena.value_views = [{at: arena._plane(i, r) for at, r in values.items()} for i in range(slot_count)]
        return arena

    def _plane(self, slot: int, planes: PlaneRange) -> torch.Tensor:
        return self.groups[planes.group][slot, planes.start : planes.end]

    @property
    def append_only(self) -> bool:
        """Rows alone make a prefix: no windows, no recurrent state."""
        return len(self.windows) == 1 and not self.states.state_bytes

    @property
    def kinds(self) -> Kinds:
        """What is kept, for plans."""
        masks = [0] * len(self.windows)
        for group, window in enumerate(self.group_windows):
            masks[window] |= 1 << group
        return Kinds(tuple(masks[1:]), self.needed_from, self.states.state_bytes > 0)

    def prefault(self, token_count: int) -> None:
        """Touch the first slots' memory for `token_count` tokens, so that a restore does not wait for page faults."""
        for slot in range(min(len(self.slots), -(-token_count // self.context_tokens))):
            for group in self.groups:
                group[slot].zero_()

    def rows_at(self, slot: Slot, position: int) -> list[int]:
        """By group, the row of the slot's buffer that holds a position."""
        return [position - slot.bases[at] for at in self.group_windows]

    # ------------------------------------------------------------ windows

    def needed_from(self, window: int, position: int) -> int:
        """First row of a window (by its index) that going on from `position` reads or has to capture."""
        if window == 0:
            return 0
        seen = position + 1 - self.windows[window]
        return max(0, min(seen, position // self.block_tokens * self.block_tokens))

    def windows_reach(self, slot: Slot, position: int) -> bool:
        """Whether the slot still holds every window's rows for going on from `position` (at most its length)."""
        return all(slot.bases[at] <= self.needed_from(at, position) for at in range(1, len(self.windows)))

    def oldest(self, slot: Slot) -> int:
        """First position whose rows are all on the device."""
        return max(slot.bases)

    def make_room(self, slot: Slot, start: int, end: int) -> None:
        """Slide the slot's window buffers so that rows [start, end) fit behind those that are needed."""
        for at in range(1, len(self.windows)):
            if end - slot.bases[at] > self.capacities[at]:
                self._slide(slot, at, self.needed_from(at, start), start)

    def _slide(self, slot: Slot, window: int, first: int, end: int) -> None:
        base = slot.bases[window]
        for group, at in zip(self.groups, self.group_windows, strict=True):
            if at == window:
                rows = group[slot.index]
                rows[:, : end - first] = rows[:, first - base : end - base].clone()
        slot.bases[window] = first

    def cut(self, slot: Slot, position: int) -> None:
        """Only the first `position` tokens count from now on."""
        slot.length = position
        slot.stored = min(slot.stored, position)
        slot.points = {at: point for at, point in slot.points.items() if at <= position}
        if slot.state_position > position:
            slot.state_position = -1  # it has seen other tokens
        if not position:
            slot.bases = [0] * len(self.windows)

    def forget(self, slot: Slot) -> None:
        """Empty a slot."""
        slot.length = slot.stored = slot.state_position = 0
        slot.bases = [0] * len(self.windows)
        slot.points = {}
        slot.filling = False

    def slot_bytes(self, slot: Slot, token_count: int = -1) -> int:
        """Bytes that a slot's state takes, or would take with `token_count` tokens: rows, live recurrent state, rollback points."""
        count = slot.length if token_count < 0 else token_count
        if not count:
            return 0
        rows = sum(
            planes * row * min(count, self.capacities[at])
            for (planes, row), at in zip(self.layout.groups, self.group_windows, strict=True)
        )
        return rows + self.states.state_bytes * (1 + len(slot.points))

    def release(self, slot: Slot) -> None:
        """Empty a slot and, on a host, give the memory of its rows back. A device's memory stays allocated: the room is used again."""
        self.forget(slot)
        for words in self.words:
            give_back(words[slot.index])

    # ------------------------------------------------------------ copies

    def copy_out(self, slot: Slot, start: int, end: int, frame: np.ndarray) -> None:
        """State of [start, end) -> `frame` (uint8, layout order, writable)."""
        if self.words:  # numpy needs half as long as torch to find the rows of one token
            copy(self.host_rows(slot, start, end), frame)
            return
        for group, at, target in zip(self.groups, self.group_windows, self._typed(frame, end - start), strict=True):
            base = slot.bases[at]
            assert start >= base, "captured rows that the window's buffer no longer holds"
            target.copy_(group[slot.index, :, start - base : end - base])

    def host_rows(self, slot: Slot, start: int, end: int) -> list[Memory]:
        """On a host, the rows of [start, end) where they lie: by group (planes, tokens, words of a row), in layout order."""
        pieces = []
        for words, address, window in zip(self.words, self.addresses, self.group_windows, strict=True):
            base = slot.bases[window]
            assert start >= base, "captured rows that the window's buffer no longer holds"
            slot_bytes, _, row_bytes, _ = words.strides
            at = slot.index * slot_bytes + (start - base) * row_bytes
            pieces.append(Memory(words[slot.index, :, start - base : end - base], address + at))
        return pieces

    def copy_in(
        self,
        slot: Slot,
        start: int,
        frame: np.ndarray,
        token_count: int,
        take: tuple[int, int],
        *,
        firsts: list[int] | None = None,
        groups: int = ALL_GROUPS,
    ) -> None:
        """Tokens [take) of a frame of `token_count` tokens -> rows of the slot from position `start` on. As `Piece`.

        firsts  left out: everything is copied
        """
        given = firsts or [start] * len(self.windows)
        piece = Piece(slot, start, frame, token_count, take, given, groups)
        if self.applier is not None and self.applier.put(piece):
            if not self._together:
                self.applier.flush()
            return
        self.copy_in_by_framework(piece)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Calls of `copy_in` inside go to the device together; their rows are there at the end."""
        self._together = True
        try:
            yield
        finally:
            self._together = False
            if self.applier is not None:
                self.applier.flush()

    def copy_in_by_framework(self, piece: Piece) -> None:
        """`copy_in` by one copy a group; on a host by numpy, which needs less than torch to find the rows."""
        slot, start, end = piece.slot, piece.start, piece.end
        sources = self.layout.views(piece.frame, piece.token_count, piece.groups)
        for index, (at, source) in enumerate(zip(self.group_windows, sources, strict=True)):
            first = max(start, piece.firsts[at])
            if first >= end:
                continue
            assert source.shape[1], "a needed window's rows are missing from the frame"
            base, skip = slot.bases[at], piece.take[0] - start
            rows = source[:, first + skip : end + skip]
            if self.words:
                words = self.words[index][slot.index, :, first - base : end - base]
                np.copyto(words, rows.view(words.dtype))
            else:
                group = self.groups[index]
                group[slot.index, :, first - base : end - base].copy_(torch.from_numpy(rows).view(group.dtype))

    def copy_prefix(self, source: Slot, target: Slot, token_count: int) -> None:
        """Rows of the first `token_count` tokens of one slot -> another, with the points before their end."""
        target.stored = min(source.stored, token_count)
        target.points = {at: point for at, point in source.points.items() if at <= token_count}
        for window in range(1, len(self.windows)):
            target.bases[window] = max(source.bases[window], self.needed_from(window, token_count))
        for group, at in zip(self.groups, self.group_windows, strict=True):
            first, there, here = target.bases[at], source.bases[at], target.bases[at]
            if first < token_count:
                rows = group[source.index, :, first - there : token_count - there]
                group[target.index, :, first - here : token_count - here].copy_(rows)
        if self.states.state_bytes and source.state_position == token_count:
            self.states.copy(source.index, target.index)
            target.state_position = token_count

    def _typed(self, frame: np.ndarray, token_count: int, groups: int = ALL_GROUPS) -> list[torch.Tensor]:
        """A frame's groups as host tensors (planes, tokens, dim) that share its memory; (planes, 0, dim) where it has none."""
        views = self.layout.views(frame, token_count, groups)
        return [torch.from_numpy(view).view(group.dtype) for view, group in zip(views, self.groups, strict=True)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a host, small pages that take memory only once they are written.

    torch.zeros writes them all, and numpy asks for huge pages, which make a slot its full size at its first token.
    """
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def _words(group: torch.Tensor) -> np.ndarray:
    """A host tensor of any dtype as an array of the largest words that divide its rows."""
    rows = group.view(torch.uint8).numpy()
    return rows.view(
        next(word for word in (np.uint64, np.uint32, np.uint16, np.uint8) if rows.shape[-1] % word().nbytes == 0)
    )


def _bounded(shape: LayerShape, context_tokens: int) -> LayerShape:
    """A window as long as the context is none."""
    window = shape.window if 0 < shape.window < context_tokens else 0
    return LayerShape(shape.heads, shape.key_dim, shape.value_dim, window, shape.derived)
