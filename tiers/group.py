"""The store's write side: Group, one group commit in the making. Stage *drain*; the keeper's main thread.

Values are built in one buffer that is used again and again (Scratch). Source: docs/log-format.md
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import structlog
from xxhash import xxh3_64_intdigest

from tiers.base import Base, SessionKey, pack_base
from tiers.errors import BadBlock
from tiers.keys import Keyring, is_sealed
from tiers.layout import ALL_GROUPS, BlockId, Layout, RootId, SequenceId, chain_root
from tiers.store_file import reach
from tiers.track import PointPlace, Track, WholeBlock
from tiers.usage import base_tenant, tail_tenant
from tiers.values import (
    KIND_BLOCK,
    KIND_POINT,
    KIND_TAIL,
    LEADING,
    NODE,
    Pin,
    PointEntry,
    Progress,
    RootInfo,
    StreamOwner,
    Tenant,
    child_prefix,
    disk_bytes,
    encode,
    frame_offset,
    pack_value,
    point_key,
)
from tiers.view import View

log = structlog.get_logger()


class Scratch:
    """One reusable buffer in which values are built; LMDB copies it into its pages."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def value(self, token_count: int, layout: Layout) -> np.ndarray:
        """Room for a value of `token_count` tokens; the same memory every time."""
        return self.room(frame_offset(token_count) + layout.frame_bytes(token_count))

    def room(self, size: int) -> np.ndarray:
        """The first `size` bytes of the buffer; the same memory every time."""
        if self._buffer.size < size:
            self._buffer = np.empty(size, np.uint8)
        return self._buffer[:size]


class Group(View):
    """One group commit in the making. Views got from it are valid until its next put or delete."""

    def __init__(self, txn: Any, databases: dict[bytes, Any], scratch: Scratch, keys: Keyring) -> None:
        super().__init__(txn, databases, keys)
        self._scratch = scratch
        self.put_bytes = 0
        self.changes: dict[tuple[bytes, str], list[int]] = {}

    def _count(self, tenant: bytes, kind: str, count: int, size: int) -> None:
        """Note what this commit changes in the tenant's use of the disk."""
        entry = self.changes.setdefault((bytes(tenant), kind), [0, 0])
        entry[0] += count
        entry[1] += size

    def frame_buffer(self, token_count: int, layout: Layout) -> np.ndarray:
        """Memory to build the frame of the next `put_block` or `put_tail` in, without another copy."""
        return self._scratch.value(token_count, layout)[frame_offset(token_count) :]

    def good_block(self, block: BlockId) -> bool:
        """Whether a block is stored, intact and with all its groups: else it is to be put again."""
        node = self.node(block)
        if node is None or node.groups != ALL_GROUPS:
            return False
        try:
            self.block(block)
        except BadBlock as error:
            log.warning("drain.bad_block", error=str(error))
            return False
        return True

    def good_point(self, place: PointPlace) -> bool:
        """Whether a rollback point is stored and intact: else it is to be put again."""
        if not self.has_point(place):
            return False
        try:
            self.point(place.id)
        except BadBlock as error:
            log.warning("drain.bad_point", error=str(error))
            return False
        return True

    def put_block(self, track: Track, block: WholeBlock, value: np.ndarray | None = None) -> None:
        """Store a block whose frame was built in `frame_buffer`, or whose whole value (uint8) is given."""
        count = len(block.tokens) // 4
        if value is None:
            value = self._pack(KIND_BLOCK, track, block.parent, block.token_start, block.tokens)
        size = self._put(track.namespace, b"blocks", block.id, value)
        self._put_child(track.namespace, block)
        tenant = chain_root(track.root, track.namespace)
        self._count_block(block.id, tenant, size)
        node = NODE.pack(block.parent, tenant, block.token_start + count, 0, size)
        self._txn.put(block.id, node + self._leading(track, count, value), db=self._db[b"nodes"])

    def _leading(self, track: Track, count: int, value: np.ndarray) -> bytes:
        """What a node says of the rows without a window; nothing where values are sealed."""
        groups = track.layout.leading_groups
        if not groups or self.keys.has(track.namespace):
            return b""
        size = track.layout.frame_bytes(count, groups)
        rows = value[frame_offset(count) :][:size]
        return LEADING.pack(size, xxh3_64_intdigest(rows.data), groups)

    def _count_block(self, block: BlockId, tenant: bytes, size: int) -> None:
        old = self.node(block)
        if old is not None:  # it was damaged, or lacked groups
            self._count(old.tenant, "blocks", -1, -disk_bytes(old.value_bytes))
        self._count(tenant, "blocks", 1, disk_bytes(size))

    def put_frame(self, track: Track, block: WholeBlock, frame: np.ndarray, groups: int = ALL_GROUPS) -> None:
        """Store a block with a frame (uint8) that has the groups of the mask: one that compaction has thinned out, and is imported."""
        count, absent = len(block.tokens) // 4, ALL_GROUPS & ~groups
        value = self._scratch.room(frame_offset(count) + frame.size)
        value[frame_offset(count) :] = frame
        pack_value(
            value, KIND_BLOCK, track.root, track.block_tokens, block.parent, block.token_start, block.tokens, absent
        )
        size = self._put_sealed(track.namespace, "blocks", block.id, value.data)
        self._put_child(track.namespace, block)
        tenant, end = chain_root(track.root, track.namespace), block.token_start + count
        self._count_block(block.id, tenant, size)
        node = NODE.pack(block.parent, tenant, end, absent, size)
        self._txn.put(block.id, node, db=self._db[b"nodes"])

    def put_point(self, track: Track, place: PointPlace, kind: int, state: np.ndarray) -> None:
        """Store a rollback point; `state` is its uint8 bytes."""
        start = frame_offset(len(place.tokens) // 4)
        value = self._scratch.room(start + state.size)
        value[start:] = state
        pack_value(
            value, KIND_POINT, track.root, track.block_tokens, place.parent, place.token_start, place.tokens, kind
        )
        size = self._put_sealed(track.namespace, "states", place.id, value.data)
        position = place.token_start + len(place.tokens) // 4
        self._count_dropped(point_key(place))
        entry = PointEntry(kind, position, size, chain_root(track.root, track.namespace))
        self._txn.put(point_key(place), encode(entry), db=self._db[b"points"])
        self._count(entry.tenant, "points", 1, disk_bytes(size))

    def put_tail(self, track: Track, sequence: SequenceId, token_start: int, tokens: bytes) -> bytes:
        """Store a piece of the unfinished block, built in `frame_buffer`, and return its key."""
        key = track.parent + sequence + token_start.to_bytes(4, "big")
        value = self._pack(KIND_TAIL, track, track.parent, token_start, tokens)
        size = self._put(track.namespace, b"tails", key, value)
        self._count(chain_root(track.root, track.namespace), "tails", 1, disk_bytes(size))
        return key

    def _pack(self, kind: int, track: Track, parent: bytes, token_start: int, tokens: bytes) -> np.ndarray:
        """The whole value whose frame was built in `frame_buffer`."""
        value = self._scratch.value(len(tokens) // 4, track.layout)
        pack_value(value, kind, track.root, track.block_tokens, parent, token_start, tokens)
        return value

    def _put(self, namespace: str, database: bytes, key: bytes, value: np.ndarray) -> int:
        reach("drain.put.before")
        size = self._put_sealed(namespace, database.decode(), key, value.data)
        reach("drain.put.after")
        return size

    def _put_sealed(self, namespace: str, database: str, key: bytes, value: Any) -> int:
        """Put a value, encrypted if the namespace has a key; returns its size as stored."""
        stored = self.keys.seal(namespace, database, key, value)
        self._txn.put(key, stored, db=self._db[database.encode()])
        self.put_bytes += len(stored)
        return len(stored)

    def _put_child(self, namespace: str, block: WholeBlock) -> None:
        """A block's place among its parent's children, ordered by tokens; where those are to be hidden, by id."""
        if self.keys.has(namespace):
            self._put_sealed(namespace, "children", block.parent + block.id, block.tokens)
        else:
            key = child_prefix(block.parent, block.tokens) + block.id
            self._txn.put(key, block.tokens, db=self._db[b"children"])

    def drop_groups(self, block: BlockId, groups: int) -> int:
        """Store a block again without those groups of its frame that aren't in the mask. Returns the bytes that this saves.

        Raises BadBlock
        """
        node, value = self.node(block), self.block(block)
        info = self.root(value.root)
        assert node is not None
        if info is None:
            raise BadBlock("a block's root is gone", where=f"block {block.hex()}")
        count, shape, keep = value.token_count, info.shape, value.groups & groups
        start, was = frame_offset(value.token_count), node.value_bytes
        out = self._scratch.room(start + shape.frame_bytes(count, keep))
        at = start
        for index, view in enumerate(shape.views(value.frame, count, value.groups)):
            if keep >> index & 1 and view.size:
                out[at : at + view.size] = view.reshape(-1)
                at += view.size
        absent = ALL_GROUPS & ~keep
        block_tokens = info.block_tokens
        pack_value(out, KIND_BLOCK, value.root, block_tokens, value.parent, value.token_start, value.tokens, absent)
        tenant = self.tenant(node.tenant)
        size = self._put_sealed(tenant.namespace if tenant is not None else "", "blocks", block, out.data)
        packed = NODE.pack(node.parent, node.tenant, node.token_end, absent, size)
        self._txn.put(block, packed, db=self._db[b"nodes"])
        self._count(node.tenant, "blocks", 0, disk_bytes(size) - disk_bytes(was))
        return was - size

    def seal_block(self, block: BlockId, namespace: str) -> None:
        """Store a block and its place again, sealed for its tenant, whose key came later than it."""
        node, raw = self.node(block), self.raw("blocks", block)
        if node is None or raw is None or is_sealed(raw):
            return
        tokens = self.child_tokens(node.parent, block)
        size = self._put_sealed(namespace, "blocks", block, raw)
        packed = NODE.pack(node.parent, node.tenant, node.token_end, ALL_GROUPS & ~node.groups, size)
        self._txn.put(block, packed, db=self._db[b"nodes"])
        self._count(node.tenant, "blocks", 0, disk_bytes(size) - disk_bytes(node.value_bytes))
        if tokens is not None:
            self._txn.delete(child_prefix(node.parent, tokens) + block, db=self._db[b"children"])
            self._put_sealed(namespace, "children", node.parent + block, tokens)

    def seal_point(self, key: bytes, namespace: str) -> None:
        """The same for a rollback point, by its key in `points`."""
        raw, state = self.raw("points", key), self.raw("states", key[-16:])
        if raw is None or state is None or is_sealed(state):
            return
        entry = self.decode_point(raw)
        size = self._put_sealed(namespace, "states", key[-16:], state)
        self._txn.put(key, encode(msgspec.structs.replace(entry, value_bytes=size)), db=self._db[b"points"])
        self._count(entry.tenant, "points", 0, disk_bytes(size) - disk_bytes(entry.value_bytes))

    def seal_value(self, database: str, key: bytes, namespace: str, tenant: bytes) -> None:
        """The same for a tail piece or a base of the chain root `tenant`, or for a sequence, of which nothing is counted."""
        raw = self.raw(database, key)
        if raw is None or is_sealed(raw):
            return
        was = len(raw)
        size = self._put_sealed(namespace, database, key, raw)
        if database in ("tails", "bases"):
            self._count(tenant, database, 0, disk_bytes(size) - disk_bytes(was))

    def put_meta(self, key: bytes, value: bytes) -> None:
        """Note something about the whole store."""
        self._txn.put(key, value, db=self._db[b"meta"])

    def put_base(self, key: SessionKey, base: Base) -> None:
        """Store a compacted session."""
        self.delete_base(key)
        size = self._put_sealed(base.namespace, "bases", key, pack_base(base))
        self._count(chain_root(RootId(base.root), base.namespace), "bases", 1, disk_bytes(size))

    def delete_base(self, key: SessionKey) -> None:
        """Remove a compacted session; what it named stays until it is collected."""
        raw = self._txn.get(key, db=self._db[b"bases"])
        if raw is None:
            return
        size = len(raw)
        self._count(base_tenant(self, key), "bases", -1, -disk_bytes(size))
        self._txn.delete(key, db=self._db[b"bases"])

    def put_pin(self, key: SessionKey, pin: Pin) -> None:
        """Never evict a session."""
        self._txn.put(key, encode(pin), db=self._db[b"pins"])

    def delete_pin(self, key: SessionKey) -> None:
        """Let a session be evicted again."""
        self._txn.delete(key, db=self._db[b"pins"])

    def delete_owner(self, stream_key: bytes) -> None:
        """Remove the newest epoch of a stream."""
        self._txn.delete(stream_key, db=self._db[b"streams"])

    def put_progress(
        self, sequence: SequenceId, track: Track, position: int | None = None, used_ms: int | None = None
    ) -> None:
        """Store how far a sequence is.

        position  what is stored, its unfinished block included; None: all that the track has
        used_ms   when it was used last; None: now
        """
        t = track
        at = t.position if position is None else position
        used = int(1000 * time.time()) if used_ms is None else used_ms
        progress = Progress(
            t.root, t.namespace, t.session, t.stream, t.epoch, t.parent, t.block_start, at, t.closed, used
        )
        self._put_sealed(progress.namespace, "sequences", sequence, encode(progress))

    def replace_progress(self, sequence: SequenceId, progress: Progress) -> None:
        """Say anew how far a sequence is."""
        self._put_sealed(progress.namespace, "sequences", sequence, encode(progress))

    def put_root(self, root: bytes, info: RootInfo) -> None:
        """Store the layout of a state fingerprint; anew if what stands there is damaged."""
        if self.root(root) != info:
            self._txn.put(root, encode(info), db=self._db[b"roots"])

    def put_tenant(self, root: RootId, namespace: str) -> None:
        """Note whose blocks a chain's root stands for."""
        chain = chain_root(root, namespace)
        known, sealed = self.tenant(chain), self.keys.has(namespace)
        if known is None or sealed > known.sealed:
            self._txn.put(chain, encode(Tenant(root, namespace, sealed)), db=self._db[b"tenants"])

    def put_owner(self, stream_key: bytes, owner: StreamOwner) -> None:
        """Store the newest epoch of a stream."""
        self._txn.put(stream_key, encode(owner), db=self._db[b"streams"])

    def put_child(self, parent: BlockId, tokens: bytes, block: BlockId) -> None:
        """Note a stored block's place among its parent's children."""
        node = self.node(block)
        tenant = self.tenant(node.tenant) if node is not None else None
        self._put_child(tenant.namespace if tenant is not None else "", WholeBlock(block, parent, 0, tokens, []))

    def delete_raw(self, database: str, key: bytes) -> None:
        """Remove a small record that nothing is counted of."""
        self._txn.delete(key, db=self._db[database.encode()])

    def delete_block(self, parent: BlockId, tokens: bytes, block: BlockId) -> None:
        """Remove a block and its place among its parent's children."""
        node = self.node(block)
        if node is not None:
            self._count(node.tenant, "blocks", -1, -disk_bytes(node.value_bytes))
        self._txn.delete(block, db=self._db[b"blocks"])
        self._txn.delete(block, db=self._db[b"nodes"])
        self._txn.delete(child_prefix(parent, tokens) + block, db=self._db[b"children"])
        self._txn.delete(parent + block, db=self._db[b"children"])

    def delete_point(self, key: bytes) -> None:
        """Remove a rollback point, by its key in `points`."""
        self._count_dropped(key)
        self._txn.delete(key[-16:], db=self._db[b"states"])
        self._txn.delete(key, db=self._db[b"points"])

    def _count_dropped(self, key: bytes) -> None:
        """Note that the rollback point of this key in `points`, if there is one, goes or is put anew."""
        entry = self._entry("points", key, self._txn.get(key, db=self._db[b"points"]))
        if entry is not None:
            self._count(entry.tenant, "points", -1, -disk_bytes(entry.value_bytes))

    def delete_tail(self, key: bytes) -> None:
        """Remove a piece of an unfinished block."""
        raw = self._txn.get(key, db=self._db[b"tails"])
        if raw is not None:
            self._count(tail_tenant(self, key), "tails", -1, -disk_bytes(len(raw)))
        self._txn.delete(key, db=self._db[b"tails"])

    def delete_sequence(self, sequence: SequenceId) -> None:
        """Remove what is known of a sequence; its blocks stay."""
        self._txn.delete(sequence, db=self._db[b"sequences"])


class Noting:
    """A write transaction that notes which keys are changed."""

    def __init__(self, txn: Any, databases: dict[bytes, Any]) -> None:
        self._txn = txn
        self._names = {id(handle): name for name, handle in databases.items()}
        self.touched: set[tuple[bytes, bytes]] = set()

    def put(self, key: bytes, value: Any, *, db: Any) -> bool:
        self.touched.add((self._names[id(db)], bytes(key)))
        return self._txn.put(key, value, db=db)

    def delete(self, key: bytes, *, db: Any) -> bool:
        self.touched.add((self._names[id(db)], bytes(key)))
        return self._txn.delete(key, db=db)

    def cursor(self, *, db: Any) -> Any:
        return self._txn.cursor(db=db)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)
