"""How the rows of one sequence become blocks: pure bookkeeping, shared by the keeper (*drain*) and the finder (*restore*).

A track follows one sequence, record after record, and says which blocks became whole and which parts of which frames
they are made of. It never touches a payload. Parts of the unfinished block may lie in lanes and on disk alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tiers.lane_format import OpenPayload
from tiers.layout import ALL_GROUPS, BlockId, Layout, PointId, RootId, block_chain, block_id, point_id

PASSED_BLOCKS = 256  # a POINT record comes right after its rows, which may lie some blocks back in one record


class Part(NamedTuple):
    """Rows [take_start, take_end) of a frame of frame_token_count tokens; `source` says where the frame is, opaque here."""

    source: Any
    frame_token_count: int
    take_start: int
    take_end: int
    groups: int = ALL_GROUPS  # that the frame has

    @property
    def token_count(self) -> int:
        return self.take_end - self.take_start

    def cut(self, start: int, end: int) -> Part:
        """The part's own rows [start, end)."""
        return self._replace(take_start=self.take_start + start, take_end=self.take_start + end)


class PointPlace(NamedTuple):
    """Where a rollback point stands: after the first `tokens` (packed, less than a block) of what follows `parent`."""

    id: PointId
    parent: BlockId
    token_start: int
    tokens: bytes


class WholeBlock(NamedTuple):
    """A block that became whole."""

    id: BlockId
    parent: BlockId
    token_start: int
    tokens: bytes
    parts: list[Part]


@dataclass(slots=True)
class Track:
    """One sequence: where its unfinished block stands. `parts` cover [block_start, position), `tokens` are their ids."""

    root: RootId
    layout: Layout
    block_tokens: int
    namespace: str
    session: str
    stream: str
    epoch: int
    parent: BlockId
    block_start: int
    position: int
    closed: bool = False
    tokens: bytes = b""
    parts: list[Part] = field(default_factory=list)
    saved: tuple[Any, ...] = ()  # what the keeper has stored of its progress last
    passed: dict[int, tuple[BlockId, bytes]] = field(default_factory=dict)  # newest whole blocks, by token_start

    def add(self, token_start: int, token_end: int, tokens: bytes, source: Any) -> list[WholeBlock] | None:
        """Take the rows [token_start, token_end) of a record's frame; return the blocks that are whole now.

        Rows that are there already are skipped, so a replay changes nothing. None: there is a gap before token_start,
        and these rows can't be restored by anyone.
        """
        if token_start > self.position:
            return None
        whole: list[WholeBlock] = []
        frame = Part(source, token_end - token_start, 0, token_end - token_start)
        while self.position < token_end:
            end = min(token_end, self.block_start + self.block_tokens)
            start = self.position - token_start
            self.parts.append(frame.cut(start, end - token_start))
            self.tokens += tokens[4 * start : 4 * (end - token_start)]
            self.position = end
            if end == self.block_start + self.block_tokens:
                whole.append(self._finish_block())
        return whole

    def _finish_block(self) -> WholeBlock:
        block = WholeBlock(block_id(self.parent, self.tokens), self.parent, self.block_start, self.tokens, self.parts)
        self.passed[self.block_start] = self.parent, self.tokens
        if len(self.passed) > PASSED_BLOCKS:
            del self.passed[next(iter(self.passed))]
        self.parent, self.block_start, self.tokens, self.parts = block.id, self.position, b"", []
        return block

    def end_before(self, block: WholeBlock) -> None:
        """Be as far as before a block that can't be stored: nothing after it could be restored."""
        self.parent, self.block_start, self.position = block.parent, block.token_start, block.token_start
        self.tokens, self.parts = b"", []
        self.passed = {start: passed for start, passed in self.passed.items() if start < block.token_start}

    def forget_waiting(self) -> None:
        """Be as far as it is stored: what waits in a lane can't be read any more."""
        self.position = self.stored_position
        self.parts = [part for part in self.parts if isinstance(part.source, bytes)]
        self.tokens = self.tokens[: 4 * (self.position - self.block_start)]

    @property
    def stored_position(self) -> int:
        """How far it is in the store: tail pieces have their key as source, what waits in a lane has not."""
        return self.block_start + sum(part.token_count for part in self.parts if isinstance(part.source, bytes))

    def place(self, position: int) -> PointPlace | None:
        """Where a rollback point at `position` stands; None if it is ahead of the rows or too far behind them."""
        if self.block_start <= position <= self.position:
            start, parent, tokens = self.block_start, self.parent, self.tokens
        else:
            start = position - position % self.block_tokens
            if start not in self.passed:
                return None
            parent, tokens = self.passed[start]
        tokens = tokens[: 4 * (position - start)]
        return PointPlace(point_id(parent, tokens), parent, start, tokens)


def open_track(opened: OpenPayload, epoch: int) -> Track:
    """A new sequence, as its OPEN record says: its rows start after whole blocks."""
    o = opened
    root = RootId(bytes(o.root))
    layout = Layout.from_entries(o.layout, o.state_bytes)
    parent = block_chain(root, o.namespace, np.frombuffer(o.tokens, "<i4"), o.block_tokens)[-1]
    at = len(o.tokens) // 4
    return Track(root, layout, o.block_tokens, o.namespace, o.session, o.stream, epoch, parent, at, at)


def common_tokens(left: bytes, right: bytes) -> int:
    """Length in tokens of the longest common prefix of two packed token lists."""
    size = min(len(left), len(right)) & ~3
    if left[:size] == right[:size]:
        return size // 4
    low, high = 0, size // 4  # invariant: low tokens are equal, high tokens are not
    while high - low > 1:
        middle = (low + high) // 2
        if left[4 * low : 4 * middle] == right[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle
    return low


def cut_parts(parts: list[Part], start: int, end: int) -> list[Part]:
    """Tokens [start, end) of what `parts` cover, counted from the first part's first row."""
    cut, at = [], 0
    for part in parts:
        low, high = max(start - at, 0), min(end - at, part.token_count)
        if low < high:
            cut.append(part.cut(low, high))
        at += part.token_count
    return cut
