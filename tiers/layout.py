"""How the state of a token range lies in a frame, and how block ids are made. Pure; every tier and the engine share it.

A frame is the concatenation of its groups. A group is (planes, tokens, row_bytes), C-contiguous: one plane is one
layer's K or V of one head, so a frame of n tokens goes to or from an arena as `planes` runs of n * row_bytes bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NewType

import numpy as np

BlockId = NewType("BlockId", bytes)  # 16 bytes
RootId = NewType("RootId", bytes)  # 16 bytes, the state fingerprint
SequenceId = NewType("SequenceId", bytes)  # 16 bytes, one submission of one stream


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of a frame: ((plane_count, row_bytes), ...), one entry a group of equally shaped planes."""

    groups: tuple[tuple[int, int], ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of state that one token adds."""
        return sum(planes * row for planes, row in self.groups)

    def frame_bytes(self, token_count: int) -> int:
        """Bytes of a frame of `token_count` tokens."""
        return self.token_bytes * token_count

    def views(self, frame: np.ndarray | memoryview | bytes, token_count: int) -> list[np.ndarray]:
        """Split a frame into its groups without copying: one uint8 array (planes, tokens, row_bytes) a group."""
        flat = np.frombuffer(frame, dtype=np.uint8)
        assert flat.size == self.frame_bytes(token_count), "frame size does not match its token count"
        views, start = [], 0
        for planes, row in self.groups:
            end = start + planes * row * token_count
            views.append(flat[start:end].reshape(planes, token_count, row))
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


def chain_root(root: RootId, namespace: str) -> BlockId:
    """The parent of every first block of a tenant under one state fingerprint."""
    return BlockId(hashlib.blake2b(root + namespace.encode(), digest_size=16, person=b"concordia-root").digest())


def block_id(parent: BlockId, tokens: np.ndarray | bytes) -> BlockId:
    """Id of the block that holds `tokens` (int32 little-endian) after `parent`."""
    data = tokens if isinstance(tokens, bytes) else np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    return BlockId(hashlib.blake2b(parent + data, digest_size=16, person=b"concordia-block").digest())


def block_chain(root: RootId, namespace: str, tokens: np.ndarray, block_tokens: int) -> list[BlockId]:
    """Ids of all whole blocks of a token list, the tenant's root first.

    Entry k is the parent of the block that starts at k * block_tokens.
    """
    ids = [chain_root(root, namespace)]
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        ids.append(block_id(ids[-1], tokens[start : start + block_tokens]))
    return ids
