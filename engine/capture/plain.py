"""The device contract on host memory, with numpy. The CPU engine's opaque regions; the reference of the others in tests.

Changed pages are found by xxh3 (10 GB/s); the page hash that travels with a delta is computed for those alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from engine.capture.errors import BadRegion
from engine.capture.handlers import Applied, Delta, RowRange
from engine.capture.hashing import page_hashes
from engine.capture.regions import CPU, Memory
from engine.capture.source import PageShape, RowShape, StateShape

# Pages that are looked at together before each alone: what didn't change costs one call for so many of them.
_RUN_PAGES = 64


class PlainPages:
    """Pages of host memory."""

    def __init__(self, memory: Memory, page_bytes: int, bitmap: bool, seed: int) -> None:
        self._seed = seed
        self._bitmap = bitmap
        self._take(memory, page_bytes)

    def _take(self, memory: Memory, page_bytes: int) -> None:
        self._bytes = _host(memory)
        self.page_bytes = page_bytes
        self.page_count = PageShape(page_bytes, memory.byte_count).page_count
        self._known: list[int | None] = [None] * self.page_count
        self._runs: list[int | None] = [None] * -(-self.page_count // _RUN_PAGES)
        self._marked = np.ones(self.page_count, dtype=bool)

    def scan(self, *, everything: bool = False) -> Delta:
        """See PageRegion."""
        if everything:
            found = list(range(self.page_count))
            self._know(found)
        elif self._bitmap:
            found = [int(page) for page in np.nonzero(self._marked)[0]]
            self._know(found)
        else:
            found = self._changed()
        self._marked[:] = False
        pages = self._copied(found)
        indices = np.array(found, dtype=np.uint32)
        return Delta(indices, page_hashes(pages, self._seed), pages, self._seed)

    def _changed(self) -> list[int]:
        """Pages whose digest is not the known one; it is known from now on."""
        found = []
        for run, known in enumerate(self._runs):
            first, end = run * _RUN_PAGES, min((run + 1) * _RUN_PAGES, self.page_count)
            digest = xxh3_64_intdigest(self._bytes[first * self.page_bytes : end * self.page_bytes].data)
            if digest == known:
                continue
            for page in range(first, end):
                page_digest = self._digest(page)
                if page_digest != self._known[page]:
                    self._known[page] = page_digest
                    found.append(page)
            self._runs[run] = digest
        return found

    def _know(self, pages: list[int]) -> None:
        """Their digests as they are now."""
        for page in pages:
            self._known[page] = self._digest(page)
            self._runs[page // _RUN_PAGES] = None

    def _copied(self, found: list[int]) -> np.ndarray:
        """(count, page_bytes) uint8; the end of a last page that is not full is zeros."""
        pages = np.empty((len(found), self.page_bytes), dtype=np.uint8)
        full = self._bytes.size // self.page_bytes
        whole = [page for page in found if page < full]
        source = self._bytes[: full * self.page_bytes].reshape(full, self.page_bytes)
        np.take(source, whole, axis=0, out=pages[: len(whole)], mode="clip")  # clip: no copy of a copy
        if len(whole) < len(found):
            last = self._page(full)
            pages[-1, : last.size], pages[-1, last.size :] = last, 0
        return pages

    def mark(self, pages: Sequence[int]) -> None:
        """See PageRegion."""
        self._marked[np.asarray(pages, dtype=np.int64)] = True

    def apply(self, delta: Delta, block_table: Sequence[int] | None = None) -> Applied:
        """See PageRegion."""
        good = page_hashes(delta.pages, delta.seed) == delta.hashes
        refused = []
        for number, logical in enumerate(delta.indices):
            place = _place(int(logical), block_table, self.page_count)
            if place is None or not good[number]:
                refused.append(number)
                continue
            view = self._page(place)
            view[:] = delta.pages[number, : view.size]
            self._know([place])
        return Applied(len(delta.indices) - len(refused), refused)

    def reshape(self, memory: Memory, *, page_bytes: int | None = None, bitmap: bool | None = None) -> None:
        """See PageRegion."""
        self._bitmap = self._bitmap if bitmap is None else bitmap
        self._take(memory, page_bytes or self.page_bytes)

    def _page(self, page: int) -> np.ndarray:
        return self._bytes[page * self.page_bytes : (page + 1) * self.page_bytes]

    def _digest(self, page: int) -> int:
        return xxh3_64_intdigest(self._page(page).data)


class PlainRows:
    """An arena in host memory."""

    def __init__(self, groups: Sequence[Memory], shape: RowShape) -> None:
        self._groups = [_host(memory) for memory in groups]
        self._shape = shape

    def gather(self, ranges: Sequence[RowRange]) -> None:
        """See RowRegion."""
        for item in ranges:
            for rows, frame in self._runs(item):
                frame[:] = rows

    def scatter(self, ranges: Sequence[RowRange]) -> None:
        """See RowRegion."""
        for item in ranges:
            for rows, frame in self._runs(item):
                rows[:] = frame

    def _runs(self, item: RowRange) -> list[tuple[np.ndarray, np.ndarray]]:
        """Pairs of equally long byte ranges: of the arena, of the frame."""
        pairs, base, tokens = [], 0, item.frame_tokens or item.token_count
        for index, (group, data) in enumerate(zip(self._shape.groups, self._groups, strict=True)):
            span = item.spans[index] if item.spans else (0, item.token_count)
            if span is None:
                continue
            begin, end = span
            row = (item.rows[index] if item.rows else item.start) + begin
            for plane in range(group.planes):
                start = item.slot * group.slot_stride + plane * group.plane_stride
                at = base + (plane * tokens + item.frame_first + begin) * group.row_bytes
                for first, count in _wrapped(row, row + end - begin, group.ring_rows):
                    size = count * group.row_bytes
                    here = start + first * group.row_bytes
                    pairs.append((data[here : here + size], item.frame[at : at + size]))
                    at += size
            base += group.planes * group.row_bytes * tokens
        return pairs


class PlainState:
    """Recurrent state in host memory."""

    def __init__(self, parts: Sequence[Memory], shape: StateShape) -> None:
        self._parts = [_host(memory) for memory in parts]
        self._shape = shape
        self.byte_count = shape.byte_count

    def save(self, slot: int) -> np.ndarray:
        """See StateRegion."""
        return np.concatenate([view.copy() for view in self._views(slot)])

    def read(self, snapshot: np.ndarray) -> np.ndarray:
        """See StateRegion."""
        return snapshot

    def restore(self, slot: int, state: np.ndarray) -> None:
        """See StateRegion."""
        at = 0
        for view in self._views(slot):
            view[:] = state[at : at + view.size]
            at += view.size

    def _views(self, slot: int) -> list[np.ndarray]:
        return [
            data[slot * part.slot_stride : slot * part.slot_stride + part.byte_count]
            for data, part in zip(self._parts, self._shape.parts, strict=True)
        ]


class PlainDevice:
    """Host memory as a device of the contract."""

    name = "cpu"

    def __init__(self, seed: int | None = None) -> None:
        self._seed = secrets.randbits(64) if seed is None else seed

    def pages(self, memory: Memory, page_bytes: int = 4096, *, bitmap: bool = False) -> PlainPages:
        """See HandlerDevice."""
        return PlainPages(memory, page_bytes, bitmap, self._seed)

    def rows(self, groups: Sequence[Memory], shape: RowShape) -> PlainRows:
        """See HandlerDevice."""
        return PlainRows(groups, shape)

    def state(self, parts: Sequence[Memory], shape: StateShape) -> PlainState:
        """See HandlerDevice."""
        return PlainState(parts, shape)

    def close(self) -> None:
        """Nothing to let go."""


def _host(memory: Memory) -> np.ndarray:
    if memory.device != CPU:
        raise BadRegion(f"memory of CUDA device {memory.device} cannot be registered with the CPU device")
    return memory.host_bytes()


def _place(logical: int, block_table: Sequence[int] | None, page_count: int) -> int | None:
    if block_table is not None:
        if logical >= len(block_table):
            return None
        logical = int(block_table[logical])
    return logical if logical < page_count else None


def _wrapped(start: int, end: int, ring_rows: int) -> list[tuple[int, int]]:
    """Runs (first row, count) of positions [start, end), cut where a ring wraps."""
    if not ring_rows:
        return [(start, end - start)]
    runs = []
    while start < end:
        row = start % ring_rows
        count = min(end - start, ring_rows - row)
        runs.append((row, count))
        start += count
    return runs
