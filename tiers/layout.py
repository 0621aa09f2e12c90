"""How the state of a token range lies in a frame, and how block ids are made. Pure; every tier and the engine share it.

A frame is the concatenation of its groups. A group is (planes, tokens, row_bytes), C-contiguous: one plane is one
layer's K or V of one head, so a frame of n tokens goes to or from an arena as `planes` runs of n * row_bytes bytes.
Compaction may leave out the groups of window layers; a bit mask says which groups a frame has.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NewType

import numpy as np

BlockId = NewType("BlockId", bytes)  # 16 bytes
RootId = NewType("RootId", bytes)  # 16 bytes, the state fingerprint
SequenceId = NewType("SequenceId", bytes)  # 16 bytes, one submission of one stream
PointId = NewType("PointId", bytes)  # 16 bytes, one rollback point's state
ALL_GROUPS = 0xFFFF_FFFF  # mask of a frame that has all its groups; bit g stands for group g
MAX_GROUPS = 32


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of a frame: ((plane_count, row_bytes), ...), one entry a group of equally shaped planes.

    windows      by group: 0 for rows that are kept for ever, else the number of tokens that its layers see; () means all 0
    state_bytes  bytes of the recurrent state in one rollback point; 0 if the model has none
    """

    groups: tuple[tuple[int, int], ...]
    windows: tuple[int, ...] = ()
    state_bytes: int = 0
    token_bytes: int = field(init=False, compare=False, repr=False)  # of state that one token adds

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_bytes", sum(planes * row for planes, row in self.groups))
        assert len(self.groups) <= MAX_GROUPS, f"a layout has at most {MAX_GROUPS} groups"
        assert len(self.windows) in (0, len(self.groups)), "one window a group"
        if self.windows and not any(self.windows):
            object.__setattr__(self, "windows", ())

    @classmethod
    def from_entries(cls, entries: list[tuple[int, ...]], state_bytes: int = 0) -> Layout:
        """From what OPEN records and `roots` hold: [planes, row_bytes, window] a group; version 1 had no window."""
        windows = tuple(entry[2] if len(entry) > 2 else 0 for entry in entries)
        return cls(tuple((entry[0], entry[1]) for entry in entries), windows, state_bytes)

    @property
    def entries(self) -> list[tuple[int, ...]]:
        """As `from_entries` takes them."""
        windows = self.windows or (0,) * len(self.groups)
        return [(planes, row, window) for (planes, row), window in zip(self.groups, windows, strict=True)]

    @property
    def window_groups(self) -> int:
        """Mask of the groups whose rows are only needed within a window."""
        return sum(1 << index for index, window in enumerate(self.windows) if window)

    @property
    def leading_groups(self) -> int:
        """Mask of the groups that are kept for ever, if a frame begins with them and has others; else 0."""
        kept = [index for index, window in enumerate(self.windows) if not window]
        return (1 << len(kept)) - 1 if kept == list(range(len(kept))) else 0

    def frame_bytes(self, token_count: int, groups: int = ALL_GROUPS) -> int:
        """Bytes of a frame of `token_count` tokens that has the groups of the mask."""
        if groups == ALL_GROUPS:
            return self.token_bytes * token_count
        rows = (planes * row for index, (planes, row) in enumerate(self.groups) if groups >> index & 1)
        return sum(rows) * token_count

    def views(
        self, frame: np.ndarray | memoryview | bytes, token_count: int, groups: int = ALL_GROUPS
    ) -> list[np.ndarray]:
        """Split a frame into its groups without copying: one uint8 array (planes, tokens, row_bytes) a group.

        groups  mask of those that the frame has; one that it hasn't is an empty array (planes, 0, row_bytes)
        """
        flat = np.frombuffer(frame, dtype=np.uint8)
        assert flat.size == self.frame_bytes(token_count, groups), "frame size does not match its token count"
        views, start = [], 0
        for index, (planes, row) in enumerate(self.groups):
            count = token_count if groups >> index & 1 else 0
            end = start + planes * row * count
            views.append(flat[start:end].reshape(planes, count, row))
            start = end
        return views

    def join(self, frames: list[tuple[np.ndarray | memoryview | bytes, int, int, int]], out: np.ndarray) -> None:
        """Join token ranges of frames into one frame `out` (uint8, flat): entries are (frame, token_count, take_start, take_end)."""
        total = sum(end - start for _, _, start, end in frames)
        targets = self.views(out, total)
        at = 0
        for frame, token_count, start, end in frames:
            for target, source in zip(targets, self.views(frame, token_count), strict=True):
                target[:, at : at + end - start] = source[:, start:end]
            at += end - start


def is_possible(entries: list[tuple[int, ...]], block_tokens: int, state_bytes: int) -> bool:
    """Whether state can have this shape; entries as in Layout.from_entries."""
    sizes = all(len(entry) > 1 and min(entry) >= 0 for entry in entries)
    return sizes and len(entries) <= MAX_GROUPS and block_tokens > 0 and state_bytes >= 0


def chain_root(root: RootId, namespace: str) -> BlockId:
    """The parent of every first block of a tenant under one state fingerprint."""
    return BlockId(hashlib.blake2b(root + namespace.encode(), digest_size=16, person=b"concordia-root").digest())


def sequence_id(stream: str, epoch: int) -> SequenceId:
    """Id of one submission of a stream: an epoch's rows are one sequence."""
    name = f"{stream}:{epoch}".encode()
    return SequenceId(hashlib.blake2b(name, digest_size=16, person=b"concordia-seqnc").digest())


def block_id(parent: BlockId, tokens: np.ndarray | bytes) -> BlockId:
    """Id of the block that holds `tokens` (int32 little-endian) after `parent`."""
    data = tokens if isinstance(tokens, bytes) else np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    return _block_id(parent + data)


@lru_cache(1 << 13)  # a restore asks for those of its prefix again for each look and each block
def _block_id(content: bytes) -> BlockId:
    return BlockId(hashlib.blake2b(content, digest_size=16, person=b"concordia-block").digest())


def block_chain(root: RootId, namespace: str, tokens: np.ndarray, block_tokens: int) -> list[BlockId]:
    """Ids of all whole blocks of a token list, the tenant's root first.

    Entry k is the parent of the block that starts at k * block_tokens.
    """
    ids = [chain_root(root, namespace)]
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        ids.append(block_id(ids[-1], tokens[start : start + block_tokens]))
    return ids


def point_id(parent: BlockId, tokens: np.ndarray | bytes) -> PointId:
    """Id of the rollback point after `tokens` (int32 little-endian; fewer than a block, may be none) after block `parent`."""
    data = tokens if isinstance(tokens, bytes) else np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    return PointId(hashlib.blake2b(parent + data, digest_size=16, person=b"concordia-point").digest())
