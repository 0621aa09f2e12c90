"""The store's read side: View, one snapshot, and StoreReader, which opens the store in any process. Stage *restore*.

A snapshot pins the file's old pages: never hold one across a wait. Values are handed out as views into the map, valid
inside the with-block. Source: docs/log-format.md
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import structlog
from xxhash import xxh3_64_intdigest

from tiers import whole_file
from tiers.base import Base, SessionKey, unpack_base
from tiers.errors import BadBlock, OtherFormat, StoreFailed
from tiers.keys import Keyring, is_sealed
from tiers.layout import ALL_GROUPS, BlockId, PointId, RootId, SequenceId, block_id, chain_root, point_id
from tiers.store_file import identity, opening, prepare_lock, translated
from tiers.track import Part, PointPlace, Track, common_tokens
from tiers.values import (
    DATABASES,
    KIND_BLOCK,
    KIND_POINT,
    KIND_TAIL,
    READERS,
    VALUE,
    Node,
    Pin,
    PointEntry,
    Progress,
    RootInfo,
    StreamOwner,
    TailPiece,
    Tenant,
    Value,
    child_prefix,
    decode_pin,
    decode_point,
    decode_progress,
    decode_tenant,
    frame_offset,
    point_key,
    unpack_value,
    value_tokens,
)

log = structlog.get_logger()

STORE_VERSION = 2
VERSION_KEYS = (b"version", b"version_copy")
OPENED = ("sequences", "bases", "children")  # small sealed values that a scan opens


class View:
    """One snapshot of the store. Everything it hands out is valid inside its with-block only."""

    def __init__(self, txn: Any, databases: dict[bytes, Any], keys: Keyring) -> None:
        self._txn = txn
        self._db = databases
        self.keys = keys
        self.locked = 0  # values that were passed over because their key isn't there
        self._children = databases[b"children"]
        self._nodes = databases[b"nodes"]

    @property
    def snapshot_number(self) -> int:
        """Grows with every commit."""
        return self._txn.id()

    def has_block(self, block: BlockId) -> bool:
        """Whether a block is stored. Brings its pages in: py-lmdb touches every page of a value that it looks up."""
        return self._txn.get(block, db=self._db[b"blocks"]) is not None

    def node(self, block: BlockId) -> Node | None:
        """What is known of a stored block, without touching its pages; None if it isn't stored.

        A find of 219 cached blocks took 0.7 ms through a small database and 2.1 to 2.6 ms through `has_block`.
        """
        return self._entry("nodes", block, self._txn.get(block, None, self._nodes))

    def _entry(self, database: str, key: bytes, raw: Any) -> Any:
        """A small record; None if there is none, or if it can't be read: then it is as if it weren't there, and is named once."""
        if raw is None:
            return None
        try:
            return READERS[database](raw)
        except BadBlock as error:
            _name_unreadable(database, key, error)
            return None

    def block(self, block: BlockId) -> Value:
        """A whole block, verified. Raises BadBlock."""
        where = f"block {block.hex()}"
        value = self._value("blocks", block, KIND_BLOCK, "a block", where)
        if block_id(value.parent, value.tokens) != block:
            raise BadBlock("a block's tokens are not those of its id", where=where)
        return value

    def leading(self, block: BlockId) -> Value | None:
        """A block's rows without a window, verified; `last` are the groups that are left out. The others aren't looked at.

        None if they can't be had alone: then `block` gives all, or says what is wrong
        """
        node, raw = self.node(block), self._txn.get(block, db=self._db[b"blocks"])
        if node is None or node.leading is None or raw is None or len(raw) != node.value_bytes or is_sealed(raw):
            return None
        _, _, _, _, count, start, parent, root, _, _ = VALUE.unpack_from(raw)
        offset, tokens = frame_offset(count), bytes(raw[VALUE.size : VALUE.size + 4 * count])
        rows = np.frombuffer(raw, np.uint8)[offset : offset + node.leading.byte_count]
        if block_id(BlockId(parent), tokens) != block or xxh3_64_intdigest(rows.data) != node.leading.checksum:
            return None
        return Value(count, start, BlockId(parent), RootId(root), tokens, rows, ALL_GROUPS & ~node.leading.groups)

    def tail(self, key: bytes) -> Value:
        """A piece of an unfinished block, verified. Raises BadBlock."""
        where = f"tail of sequence {key[16:32].hex()} at {int.from_bytes(key[32:], 'big')}"
        value = self._value("tails", key, KIND_TAIL, "a tail piece", where)
        if value.parent != key[:16] or value.token_start != int.from_bytes(key[32:], "big"):
            raise BadBlock("a tail piece is not the one that was asked for", where=where)
        return value

    def _value(self, database: str, key: bytes, kind: int, what: str, where: str) -> Value:
        """A stored value, opened and its checksum verified. Raises BadBlock."""
        raw = self._txn.get(key, db=self._db[database.encode()])
        if raw is None:
            raise BadBlock(f"{what} is gone", where=where)
        return unpack_value(self.keys.open(database, key, raw), kind, where)

    def best_child(self, parent: BlockId, tokens: bytes) -> tuple[BlockId, int] | None:
        """The stored block after `parent` that shares most first tokens with `tokens`, and how many; None if there is none.

        Keys are ordered by tokens, so the best is a neighbour of where `tokens` itself would stand; sealed ones are all looked at.
        """
        best: tuple[BlockId, int] | None = None
        if self.keys:
            for block in self.children(parent, limit=1 << 30):
                shared = common_tokens(self.child_tokens(parent, block) or b"", tokens)
                if shared and (best is None or shared > best[1]):
                    best = block, shared
            return best
        with self._txn.cursor(db=self._db[b"children"]) as cursor:
            after = cursor.set_range(child_prefix(parent, tokens))
            neighbours = [(bytes(cursor.key()), bytes(cursor.value()))] if after else []
            if cursor.prev() if after else cursor.last():
                neighbours.append((bytes(cursor.key()), bytes(cursor.value())))
        for key, child_tokens in neighbours:
            shared = common_tokens(child_tokens, tokens) if key[:16] == parent else 0
            if shared and (best is None or shared > best[1]):
                best = BlockId(key[-16:]), shared
        return best

    def children(self, parent: BlockId, limit: int = 2) -> list[BlockId]:
        """Ids of blocks after `parent`, at most `limit`."""
        found: list[BlockId] = []
        with self._txn.cursor(db=self._db[b"children"]) as cursor:
            more = cursor.set_range(parent)
            while more and len(found) < limit and (key := bytes(cursor.key()))[:16] == parent:
                found.append(BlockId(key[-16:]))
                more = cursor.next()
        return found

    def tails(self, parent: BlockId, sequence: SequenceId = SequenceId(b""), limit: int = 1 << 30) -> list[TailPiece]:
        """Pieces of unfinished blocks after `parent` (of one sequence, or of all), ordered by sequence and position."""
        prefix, found = parent + sequence, list[TailPiece]()
        with self._txn.cursor(db=self._db[b"tails"]) as cursor:
            more = cursor.set_range(prefix)
            while more and len(found) < limit and (key := bytes(cursor.key())).startswith(prefix):
                start = int.from_bytes(key[32:], "big")
                found.append(TailPiece(key, SequenceId(key[16:32]), start, self._tail_tokens(key, cursor.value())))
                more = cursor.next()
        return found

    def _tail_tokens(self, key: bytes, raw: Any) -> bytes:
        try:
            return value_tokens(self.keys.open("tails", key, raw))
        except BadBlock:
            return b""

    def progress(self, sequence: SequenceId) -> Progress | None:
        """How far a sequence is stored; None also if its record is sealed and can't be opened."""
        raw = self._txn.get(sequence, db=self._db[b"sequences"])
        if raw is None:
            return None
        try:
            return decode_progress(self.keys.open("sequences", sequence, raw))
        except BadBlock:
            self.locked += 1
            return None

    def decode_progress(self, raw: Any) -> Progress:
        """A value of the `sequences` database."""
        return decode_progress(raw)

    def load_track(self, sequence: SequenceId) -> Track | None:
        """The track of a sequence as far as it is stored; parts of its unfinished block have their tail's key as source."""
        p = self.progress(sequence)
        info = self.root(p.root) if p is not None else None
        if p is None or info is None:
            return None
        layout = info.shape
        at, parent, root = p.block_start, BlockId(p.parent), RootId(p.root)
        if not self._ends_at(parent, at, chain_root(root, p.namespace)):
            cause = BadBlock("a sequence's unfinished block begins where its last whole one doesn't end")
            _name_unreadable("sequences", sequence, cause)
            return None
        track = Track(
            root, layout, info.block_tokens, p.namespace, p.session, p.stream, p.epoch, parent, at, at, p.closed
        )
        for piece in self.tails(parent, sequence):
            count = len(piece.tokens) // 4
            if piece.token_start != track.position or not count or piece.token_start + count > p.position:
                break  # a piece is missing: what follows it can't be used
            track.parts.append(Part(piece.key, count, 0, count))
            track.tokens += piece.tokens
            track.position += count
        return track

    def _ends_at(self, block: BlockId, position: int, top: BlockId) -> bool:
        """Whether a stored block, or the chain's root `top`, ends there, as far as that is known: rows would go under another's id."""
        if block == top:
            return position == 0
        node = self.node(block)
        return node is None or node.token_end in (position, 0)  # 0: a chain of version 1 whose tenant isn't known

    def child_tokens(self, parent: BlockId, block: BlockId) -> bytes | None:
        """Packed token ids of a block after `parent`, without touching its pages."""
        with self._txn.cursor(db=self._children) as cursor:
            more = cursor.set_range(parent)
            while more and (key := bytes(cursor.key()))[:16] == parent:
                if key[-16:] == block:
                    try:
                        return bytes(self.keys.open("children", key, cursor.value()))
                    except BadBlock:
                        return None
                more = cursor.next()
        return None

    def chain(self, root: RootId, namespace: str, last: BlockId) -> tuple[list[BlockId], bytes] | None:
        """Ids of the whole blocks up to `last`, first to last, and their packed tokens; None if a block on the way is gone."""
        top, blocks, tokens, block = chain_root(root, namespace), list[BlockId](), list[bytes](), last
        while block != top:
            node = self.node(block)
            piece = self.child_tokens(node.parent, block) if node is not None else None
            if node is None or piece is None:
                return None
            blocks.append(block)
            tokens.append(piece)
            block = node.parent
        return blocks[::-1], b"".join(reversed(tokens))

    def base(self, key: SessionKey) -> Base | None:
        """What is kept of a compacted session. Raises BadBlock."""
        raw = self._txn.get(key, db=self._db[b"bases"])
        return unpack_base(self.keys.open("bases", key, raw), f"base {key.hex()}") if raw is not None else None

    def is_pinned(self, key: SessionKey) -> bool:
        """Whether a session is never evicted."""
        return self._txn.get(key, db=self._db[b"pins"]) is not None

    def tenants(self) -> list[tuple[bytes, Tenant]]:
        """All (chain root, tenant)."""
        return [(key, decode_tenant(raw)) for key, raw in self.scan("tenants")]

    def pins(self) -> dict[SessionKey, Pin]:
        """All pinned sessions."""
        return {SessionKey(key): decode_pin(raw) for key, raw in self.scan("pins")}

    def root(self, root: bytes) -> RootInfo | None:
        """Layout of a state fingerprint's frames."""
        return self._entry("roots", root, self._txn.get(root, db=self._db[b"roots"]))

    def tenant(self, chain: bytes) -> Tenant | None:
        """Whose blocks the chain's root `chain` stands for."""
        return self._entry("tenants", chain, self._txn.get(chain, db=self._db[b"tenants"]))

    def points(self, parent: BlockId) -> list[tuple[bytes, PointEntry]]:
        """(key, entry) of the stored rollback points in the block after `parent`, by position; no state is touched."""
        found: list[tuple[bytes, PointEntry]] = []
        with self._txn.cursor(db=self._db[b"points"]) as cursor:
            more = cursor.set_range(parent)
            while more and (key := bytes(cursor.key()))[:16] == parent:
                entry = self._entry("points", key, cursor.value())
                if entry is not None:
                    found.append((key, entry))
                more = cursor.next()
        return found

    def decode_point(self, raw: Any) -> PointEntry:
        """A value of the `points` database."""
        return decode_point(raw)

    def has_point(self, place: PointPlace) -> bool:
        """Whether a rollback point is stored, without touching its state."""
        return self._txn.get(point_key(place), db=self._db[b"points"]) is not None

    def point(self, point: PointId) -> Value:
        """A rollback point, verified; `frame` is its state. Raises BadBlock."""
        where = f"rollback point {point.hex()}"
        value = self._value("states", point, KIND_POINT, "a rollback point", where)
        if point_id(value.parent, value.tokens) != point:
            raise BadBlock("a rollback point's tokens are not those of its id", where=where)
        return value

    def owner(self, stream_key: bytes) -> StreamOwner | None:
        """Newest epoch of a stream."""
        return self._entry("streams", stream_key, self._txn.get(stream_key, db=self._db[b"streams"]))

    def scan(self, database: str, after: bytes = b"", limit: int = 1 << 30) -> Iterator[tuple[bytes, Any]]:
        """(key, value) pairs of a database, from the first key greater than `after`.

        Sealed values of `sequences`, `bases` and `children` are opened; those that can't be are passed over and counted in `locked`.
        Small records that can't be read are passed over, sequences counted in `locked` too.
        """
        for key, raw in self.scan_raw(database, after, limit):
            if database in OPENED:
                try:
                    raw = self.keys.open(database, key, raw)
                except BadBlock:
                    self.locked += 1
                    continue
            if database in READERS and self._entry(database, key, raw) is None:
                self.locked += database == "sequences"  # what it names isn't known: nothing may be freed
                continue
            yield key, raw

    def scan_raw(self, database: str, after: bytes = b"", limit: int = 1 << 30) -> Iterator[tuple[bytes, Any]]:
        """As `scan`, with every value as it is stored."""
        with self._txn.cursor(db=self._db[database.encode()]) as cursor:
            more = cursor.set_range(after + b"\0") if after else cursor.first()
            while more and limit:
                yield bytes(cursor.key()), cursor.value()
                more, limit = cursor.next(), limit - 1

    def raw(self, database: str, key: bytes) -> Any:
        """A stored value as it lies there, not verified; None if there is none."""
        return self._txn.get(key, db=self._db[database.encode()])

    def count(self, database: str) -> int:
        """Entries of a database."""
        return self._txn.stat(self._db[database.encode()])["entries"]


def said_version(meta: Callable[[bytes], Any]) -> int:
    """The store's version by what its `meta` has under a key; 0 if it isn't said or can't be read.

    It stands there twice: of two that differ one was flipped, and this version writes both.
    """
    said = [bytes(raw) for raw in map(meta, VERSION_KEYS) if raw is not None]
    return min((int(version) for version in said if version.isdigit() and int(version)), default=0)


def check_version(meta: Callable[[bytes], Any], path: Path) -> int:
    """As `said_version`. Raises OtherFormat: it is one that this version doesn't know."""
    version = said_version(meta)
    if version > STORE_VERSION:
        raise OtherFormat(f"the store has version {version}, this is {STORE_VERSION}", where=str(path))
    return version


class EmptyView(View):
    """The store before the keeper has made it: nothing is found."""

    snapshot_number = -1

    def __init__(self) -> None:
        self.keys = Keyring()
        self.locked = 0

    def scan_raw(self, database: str, after: bytes = b"", limit: int = 0) -> Iterator[tuple[bytes, Any]]:
        return iter(())

    def has_block(self, block: BlockId) -> bool:
        return False

    def node(self, block: BlockId) -> Node | None:
        return None

    def tenant(self, chain: bytes) -> Tenant | None:
        return None

    def child_tokens(self, parent: BlockId, block: BlockId) -> bytes | None:
        return None

    def base(self, key: SessionKey) -> Base | None:
        return None

    def is_pinned(self, key: SessionKey) -> bool:
        return False

    def points(self, parent: BlockId) -> list[tuple[bytes, PointEntry]]:
        return []

    def has_point(self, place: PointPlace) -> bool:
        return False

    def point(self, point: PointId) -> Value:
        raise BadBlock("a rollback point is gone", where=f"rollback point {point.hex()}", cause="there is no store")

    def block(self, block: BlockId) -> Value:
        raise BadBlock("a block is gone", where=f"block {block.hex()}", cause="there is no store")

    def leading(self, block: BlockId) -> Value | None:
        return None

    def tail(self, key: bytes) -> Value:
        raise BadBlock("a tail piece is gone", cause="there is no store")

    def best_child(self, parent: BlockId, tokens: bytes) -> tuple[BlockId, int] | None:
        return None

    def children(self, parent: BlockId, limit: int = 2) -> list[BlockId]:
        return []

    def tails(self, parent: BlockId, sequence: SequenceId = SequenceId(b""), limit: int = 0) -> list[TailPiece]:
        return []

    def progress(self, sequence: SequenceId) -> Progress | None:
        return None

    def root(self, root: bytes) -> RootInfo | None:
        return None

    def owner(self, stream_key: bytes) -> StreamOwner | None:
        return None

    def scan(self, database: str, after: bytes = b"", limit: int = 0) -> Iterator[tuple[bytes, Any]]:
        return iter(())

    def raw(self, database: str, key: bytes) -> Any:
        return None

    def count(self, database: str) -> int:
        return 0


_named: set[tuple[str, bytes]] = set()  # entries that couldn't be read and were said to be so


def _name_unreadable(database: str, key: bytes, error: BadBlock) -> None:
    if (database, key) not in _named and len(_named) < 1000:
        _named.add((database, key))
        log.error(
            "store.bad_entry", database=database, key=key.hex(), error=error.what, hint="`concordia repair` drops it"
        )


class StoreReader:
    """The store for everyone else: read-only, opened at the first snapshot, and again when the file was replaced."""

    def __init__(
        self, store_dir: str | os.PathLike[str], *, map_bytes: int = 1 << 40, keys: Keyring | None = None
    ) -> None:
        self.path = Path(store_dir)
        self.keys = Keyring.from_environment() if keys is None else keys
        self._map_bytes = map_bytes
        self._env: Any = None
        self._db: dict[bytes, Any] = {}
        self._files = (0, 0)

    @contextmanager
    def snapshot(self) -> Iterator[View]:
        """A consistent view of what is committed; an empty one if there is no store yet. Raises StoreFailed, OtherFormat."""
        if not self._open():
            yield EmptyView()
            return
        with translated(self.path):
            with self._env.begin(buffers=True) as txn:
                yield View(txn, self._db, self.keys)

    def _open(self) -> bool:
        try:
            if self._env is not None and identity(self.path) == self._files:
                return True
            with opening(self.path, fcntl.LOCK_SH):
                return self._open_again()
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _open_again(self) -> bool:
        self.close()
        os.stat(self.path / "data.mdb")
        prepare_lock(self.path)
        with translated(self.path):
            env = lmdb.open(
                str(self.path), map_size=self._map_bytes, max_dbs=len(DATABASES), readonly=True, create=False
            )
            try:
                whole_file.refuse_short(env, self.path)
                self._db = {name: env.open_db(name, create=False) for name in DATABASES}
                with env.begin(db=self._db[b"meta"]) as txn:
                    check_version(txn.get, self.path)
            except (StoreFailed, OtherFormat):
                env.close()
                raise
            except lmdb.NotFoundError:  # the keeper is just making it, or hasn't upgraded it yet
                env.close()
                return False
        self._env, self._files = env, identity(self.path)
        if self.keys:
            with env.begin(buffers=True) as txn:
                for _, tenant in View(txn, self._db, self.keys).tenants():
                    self.keys.know(tenant.namespace)
        return True

    def close(self) -> None:
        """Unmap. Views of a snapshot must not be used any more."""
        if self._env is not None:
            self._env.close()
            self._env = None
