"""One session in one file: `concordia export` and `concordia import`. Reads the store beside a running keeper; imports inside the keeper.

A file is a magic word and records, each with its index and a checksum over header and payload; the last one holds a digest of all of them.
So any flipped byte is found, and any cut. Blocks are named anew from the tokens when they are read, so they can't be passed off as
another prefix's. An interrupted export or import goes on where it stopped. Source: docs/log-format.md, "Exported session".
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_64, xxh3_128

from tiers.errors import BadBlock, BadFile, OtherFormat
from tiers.export_seal import MAGIC as SEALED_MAGIC
from tiers.export_seal import SCRYPT, SEALING_BYTES, ExportKeys, FileSealer, LockedFile, read_header
from tiers.group import Group
from tiers.layout import ALL_GROUPS, BlockId, Layout, PointId, RootId, SequenceId, block_chain, is_possible, point_id
from tiers.lock import hold
from tiers.store_file import sync_file
from tiers.track import PointPlace, Track, WholeBlock
from tiers.values import RootInfo
from tiers.view import StoreReader, View

MAGIC = b"CONCEXP1"
RECORD_MAGIC = b"CXRC"
RECORD_VERSION = 1
# magic, version, type, index, payload bytes, checksum of the fields before it and the payload
HEADER = struct.Struct("<4sHHQQQ")
CHECKED_HEADER_BYTES = HEADER.size - 8
MANIFEST, TOKENS, BLOCK, TAIL, POINT, END = 1, 2, 3, 4, 5, 6
NAMES = {1: "MANIFEST", 2: "TOKENS", 3: "BLOCK", 4: "TAIL", 5: "POINT", 6: "END"}
# token_start, token_count, mask of the groups in the frame, kind of a rollback point; then the frame, or the point's state
STATE = struct.Struct("<IIII")
PAYLOAD_LIMIT_BYTES = 1 << 32
BATCH = 16
PERSON = b"concordia-import"
IMPORTING = "importing-"  # begins the name of the stream that has what an unfinished import has put


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """First record: what the file is.

    root         fingerprint of everything that the numbers depend on: state of another one is refused
    layout       groups of a frame, as in Layout.entries; state_bytes: of one rollback point
    token_count  length of the session's token list; position: how much of it has its state in the file
    block_count  whole blocks in the file; point_count: rollback points
    about        what the gateway knows of the session, and of the model that it was made with
    """

    session: str
    namespace: str
    root: bytes
    layout: list[tuple[int, ...]]
    state_bytes: int
    block_tokens: int
    token_count: int
    position: int
    block_count: int
    point_count: int
    created: int
    about: dict[str, Any] = {}

    @property
    def shape(self) -> Layout:
        return Layout.from_entries(self.layout, self.state_bytes)


class EndRecord(msgspec.Struct, frozen=True):
    """Last record: how many there are before it, and the digest of their checksums."""

    record_count: int
    digest: bytes


class Item(NamedTuple):
    """A record that was read and verified. offset_after: where the next one begins."""

    type: int
    payload: memoryview
    checksum: bytes
    offset_after: int


_encode = msgspec.msgpack.Encoder().encode


# ---------------------------------------------------------------- what to export


@dataclass(frozen=True, slots=True)
class Found:
    """The longest stored prefix of a token list under one fingerprint: whole blocks, pieces of a tail, rollback points within."""

    root: RootId
    info: RootInfo
    chain: list[BlockId]
    tail_keys: list[tuple[bytes, int]]  # key, tokens of it that count
    points: list[tuple[int, int, PointId]]  # position, kind, id

    @property
    def block_count(self) -> int:
        return len(self.chain) - 1

    @property
    def position(self) -> int:
        return self.block_count * self.info.block_tokens + sum(count for _, count in self.tail_keys)


def find_stored(
    store: StoreReader, namespace: str, tokens: np.ndarray, preferred: Collection[bytes] = ()
) -> Found | None:
    """What is stored of a token list, under the fingerprint that has most of it; one of `preferred` first. None if nothing is."""
    with store.snapshot() as view:
        found = [find_under(view, RootId(bytes(key)), namespace, tokens) for key, _ in view.scan("roots")]
    stored = [one for one in found if one is not None and one.position]
    return max(stored, key=lambda one: (one.root in preferred, one.position), default=None)


def find_under(view: View, root: RootId, namespace: str, tokens: np.ndarray) -> Found | None:
    """What is stored of a token list under one fingerprint; None if it isn't known."""
    info = view.root(root)
    if info is None:
        return None
    packed = np.ascontiguousarray(tokens, "<i4").tobytes()
    size = 4 * info.block_tokens
    ids = block_chain(root, namespace, tokens, info.block_tokens)
    count = 0
    while count + 1 < len(ids) and view.node(ids[count + 1]) is not None:
        count += 1
    tail_keys = _tail_keys(view, ids[count], packed[count * size : (count + 1) * size])
    position = count * info.block_tokens + sum(taken for _, taken in tail_keys)
    points = list(_points(view, ids[: count + 1], packed[: 4 * position], size))
    return Found(root, info, ids[: count + 1], tail_keys, points)


def _points(view: View, ids: list[BlockId], packed: bytes, size: int) -> Iterator[tuple[int, int, PointId]]:
    """Rollback points that stand within the stored tokens `packed`, `size` bytes of them a block."""
    for number, parent in enumerate(ids):
        rest = packed[number * size : (number + 1) * size]
        for key, entry in view.points(parent):
            count = int.from_bytes(key[16:20], "big")
            point = point_id(parent, rest[: 4 * count])
            if 4 * count <= len(rest) and point == key[20:]:
                yield number * size // 4 + count, entry.kind, point


def _tail_keys(view: View, parent: BlockId, rest: bytes) -> list[tuple[bytes, int]]:
    """Pieces of one unfinished block after `parent` that agree with `rest` for longest."""
    by_sequence: dict[bytes, list[tuple[bytes, int]]] = {}
    at: dict[bytes, int] = {}
    for piece in view.tails(parent):
        pieces, start = by_sequence.setdefault(piece.sequence, []), at.setdefault(piece.sequence, 0)
        expected = rest[4 * start : 4 * start + len(piece.tokens)]
        if not piece.tokens or (pieces and start == 0) or (not pieces and start):
            continue
        same = 0
        while 4 * same < len(expected) and piece.tokens[4 * same : 4 * same + 4] == expected[4 * same : 4 * same + 4]:
            same += 1
        if same:
            pieces.append((piece.key, same))
        at[piece.sequence] = start + same if same == len(piece.tokens) // 4 else 0
    return max(by_sequence.values(), key=lambda pieces: sum(count for _, count in pieces), default=[])


# ---------------------------------------------------------------- write


class Exporter:
    """Writes PATH.part, then renames it. A PATH.part of the same manifest is continued after its last whole record.

    keys    what seals the file, if anything does; a part that they don't open is begun anew
    Raises  FileBusy (another export writes it)
    """

    def __init__(self, path: Path, manifest: Manifest, keys: ExportKeys | None = None) -> None:
        self.path = path
        self._keys = keys or ExportKeys()
        self._sealer = self._keys.sealer(manifest.namespace)
        self.part = path.with_name(path.name + ".part")
        self.manifest = manifest
        self.resumed_records = 0
        self._digest = xxh3_128()
        self._index = 0
        self._file = self._open()

    def _open(self) -> BinaryIO:
        whole = 0
        kept: list[bytes] = []
        file = open(hold(self.part), "r+b")
        with contextlib.suppress(FileNotFoundError, BadFile, OtherFormat, LockedFile):
            sealer = opened_with(self.part, self._keys)
            for item in read_items(self.part, whole_file=False, keys=self._keys):
                if not _same_seal(sealer, self._sealer):
                    break
                if item.type == END or (item.type == MANIFEST and not self._same(item.payload)):
                    break
                kept.append(item.checksum)
                whole = item.offset_after
        if kept:
            self.resumed_records, self._sealer = len(kept), sealer
        file.truncate(whole)
        if not kept:
            file.write(MAGIC if self._sealer is None else self._sealer.header.data)
        file.seek(0, os.SEEK_END)
        for checksum in kept:
            self._digest.update(checksum)
        self._index = len(kept)
        return file

    def _same(self, payload: memoryview) -> bool:
        """Everything but when it was begun."""
        found = msgspec.msgpack.decode(payload, type=Manifest)
        return msgspec.structs.replace(found, created=self.manifest.created) == self.manifest

    def write(self, index: int, kind: int, *parts: Any) -> None:
        """Put record `index`, unless an interrupted export has it already."""
        if index < self._index:
            return
        assert index == self._index, "records are written in order"
        checksum = write_record(self._file, kind, index, *parts, sealer=self._sealer)
        self._digest.update(checksum)
        self._index += 1

    def has(self, index: int) -> bool:
        """Whether record `index` is in the file already."""
        return index < self._index

    def finish(self) -> int:
        """Write the end, sync, rename; bytes of the file."""
        end = EndRecord(self._index, self._digest.digest())
        write_record(self._file, END, self._index, _encode(end))
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        self.part.replace(self.path)
        sync_file(self.path.parent)
        return size

    def abandon(self) -> None:
        """Close what was written so far; the next export goes on from there."""
        with contextlib.suppress(OSError):
            self._file.close()


def _same_seal(one: FileSealer | None, other: FileSealer | None) -> bool:
    """Whether what opens a part is what its file was to be sealed with. A passphrase makes another key with each salt."""
    if one is None or other is None:
        return one is other
    there, here = one.header, other.header
    return there.source == here.source and (there.source == SCRYPT or there.key_id == here.key_id)


def write_record(file: BinaryIO, kind: int, index: int, *parts: Any, sealer: FileSealer | None = None) -> bytes:
    """Append one record, sealed if there is a sealer, and return its checksum's bytes."""
    size = sum(len(memoryview(part).cast("B")) for part in parts) + (SEALING_BYTES if sealer is not None else 0)
    head = HEADER.pack(RECORD_MAGIC, RECORD_VERSION, kind, index, size, 0)[:CHECKED_HEADER_BYTES]
    if sealer is not None:
        parts = (sealer.seal(head, b"".join(parts)),)
    hasher = xxh3_64(head)
    for part in parts:
        hasher.update(part)
    checksum = hasher.intdigest().to_bytes(8, "little")
    file.write(head + checksum)
    for part in parts:
        file.write(part)
    return checksum


def export_session(
    store: StoreReader,
    path: Path,
    found: Found,
    manifest: Manifest,
    tokens: np.ndarray,
    progress: Callable[[int, int], None] = lambda done, total: None,
    keys: ExportKeys | None = None,
) -> tuple[int, int]:
    """Write one session to `path`; (bytes of the file, records that an interrupted export had written already).

    Raises BadBlock (a stored block is damaged: repair first), FileBusy (another export writes that file), OSError
    """  # fmt: skip
    exporter = Exporter(path, manifest, keys)
    total = found.block_count + 1
    try:
        exporter.write(0, MANIFEST, _encode(manifest))
        exporter.write(1, TOKENS, np.ascontiguousarray(tokens, "<i4").tobytes())
        for first in range(0, found.block_count, BATCH):
            with store.snapshot() as view:
                for number in range(first, min(first + BATCH, found.block_count)):
                    if not exporter.has(2 + number):
                        _write_block(exporter, view, found, number)
            progress(min(first + BATCH, found.block_count), total)
        with store.snapshot() as view:
            index = 2 + found.block_count + _write_tail(exporter, view, found)
        for number, (position, kind, point) in enumerate(found.points, index):
            if not exporter.has(number):
                with store.snapshot() as view:
                    exporter.write(number, POINT, STATE.pack(position, 0, 0, kind), view.point(point).frame.data)
        size = exporter.finish()
        progress(total, total)
    except BaseException:
        exporter.abandon()
        raise
    return size, exporter.resumed_records


def _write_block(exporter: Exporter, view: View, found: Found, number: int) -> None:
    value = view.block(found.chain[number + 1])
    start = number * found.info.block_tokens
    exporter.write(2 + number, BLOCK, STATE.pack(start, value.token_count, value.groups, 0), value.frame.data)


def _write_tail(exporter: Exporter, view: View, found: Found) -> int:
    """Records written: one, or none if there is no tail."""
    count = sum(taken for _, taken in found.tail_keys)
    if not count:
        return 0
    layout = exporter.manifest.shape
    frames: list[tuple[Any, int, int, int]] = []
    for key, taken in found.tail_keys:
        value = view.tail(key)
        frames.append((value.frame, value.token_count, 0, taken))
    frame = np.empty(layout.frame_bytes(count), np.uint8)
    layout.join(frames, frame)
    start = found.block_count * found.info.block_tokens
    exporter.write(2 + found.block_count, TAIL, STATE.pack(start, count, ALL_GROUPS, 0), frame.data)
    return 1


# ---------------------------------------------------------------- read


def opened_with(path: Path, keys: ExportKeys) -> FileSealer | None:
    """What opens a file; None if it is open. Raises LockedFile, BadFile, OtherFormat, FileNotFoundError."""
    with open(path, "rb") as file:
        return _begin(file, str(path), keys)


def _begin(file: BinaryIO, path: str, keys: ExportKeys | None) -> FileSealer | None:
    """Read what stands before the first record. keys: None if the payloads are wanted as they are stored."""
    magic = file.read(len(MAGIC))
    if magic == SEALED_MAGIC:
        header = read_header(file, path)
        return keys.opener(header, path) if keys is not None else None
    if magic != MAGIC:
        raise _no_export(magic, file, path)
    return None


def _no_export(magic: bytes, file: BinaryIO, path: str) -> BadFile | OtherFormat:
    """What a file with another magic word is, of which that was read."""
    at = file.tell()
    for begins in (
        partial(_read_item, file, at, os.fstat(file.fileno()).st_size, 0, path, None),
        partial(read_header, file, path),
    ):
        file.seek(at)
        with contextlib.suppress(BadFile, OtherFormat):
            begins()
            return BadFile("the first bytes of an exported file are damaged", where=path)
    if magic[:-1] == MAGIC[:-1]:
        return OtherFormat("an exported session of another version", where=path)
    what = "not an exported session" if magic else "an empty file, not an exported session"
    return OtherFormat(what, where=path, hint="Name a file that `concordia export` wrote")


def is_sealed_file(path: Path) -> bool:
    """Whether an exported file is encrypted. Raises FileNotFoundError."""
    with open(path, "rb") as file:
        return file.read(len(SEALED_MAGIC)) == SEALED_MAGIC


def read_items(
    path: Path, *, offset: int = 0, index: int = 0, whole_file: bool = True, keys: ExportKeys | None = None
) -> Iterator[Item]:
    """Records of a file from `offset` (0: its beginning) on, each verified. Raises BadFile, OtherFormat, LockedFile, FileNotFoundError.

    whole_file  the file must end with its END record, and nothing after it; otherwise a torn record just ends the reading
    keys        what opens an encrypted file; None: its payloads are given as they are stored
    """
    digest = xxh3_128()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        sealer = _begin(file, str(path), keys)
        at = offset or file.tell()
        file.seek(at)
        last = 0
        while at < size:
            try:
                item = _read_item(file, at, size, index, str(path), sealer)
            except BadFile:
                if whole_file:
                    raise
                return
            if whole_file and not offset:
                _check_end(item, index, digest, str(path))
            yield item
            digest.update(item.checksum)
            at, last, index = item.offset_after, item.type, index + 1
            if last == END:
                break
    if whole_file and (last != END or at != size):
        cause = "it goes on after its end" if last == END else "it was cut"
        raise BadFile("an exported file isn't whole", where=f"{path} at byte {at}", cause=cause)


def _read_item(file: BinaryIO, at: int, size: int, index: int, path: str, sealer: FileSealer | None) -> Item:
    where = f"{path} at byte {at}"
    head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise BadFile("a record is cut", where=where)
    magic, version, kind, found, length, checksum = HEADER.unpack(head)
    if magic != RECORD_MAGIC or found != index or at + HEADER.size + length > size or length > PAYLOAD_LIMIT_BYTES:
        raise BadFile("a record's header is damaged or the file is cut", where=where)
    payload = file.read(length)
    hasher = xxh3_64(head[:CHECKED_HEADER_BYTES])
    hasher.update(payload)
    if len(payload) < length or hasher.intdigest() != checksum:
        raise BadFile("a record's checksum is wrong", where=where)
    if version != RECORD_VERSION:
        raise OtherFormat(f"a record of version {version}", where=where)
    after = at + HEADER.size + length
    if sealer is not None and kind != END:
        payload = sealer.open(head[:CHECKED_HEADER_BYTES], payload, where)
    return Item(kind, memoryview(payload), head[CHECKED_HEADER_BYTES:], after)


def _check_end(item: Item, index: int, digest: xxh3_128, path: str) -> None:
    if item.type == END:
        end = _decode(item.payload, EndRecord, path)
        if end.record_count != index or end.digest != digest.digest():
            raise BadFile("an exported file's digest is wrong", where=path)


def _decode(payload: memoryview, kind: type[Any], path: str) -> Any:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError as error:
        raise BadFile("a record can't be read", where=path, cause=str(error)) from error


@dataclass(frozen=True, slots=True)
class Opened:
    """Beginning of an exported file: manifest and tokens (packed), and where its state begins."""

    manifest: Manifest
    tokens: bytes
    offset: int
    digest: bytes


def open_exported(path: Path, keys: ExportKeys | None = None) -> Opened:
    """Read manifest and tokens. Raises BadFile, OtherFormat, LockedFile, FileNotFoundError."""
    items = read_items(path, keys=keys or ExportKeys())
    try:
        first, second = next(items), next(items)
    except StopIteration as error:
        raise BadFile("an exported file isn't whole", where=str(path), cause="it was cut") from error
    if (first.type, second.type) != (MANIFEST, TOKENS):
        raise BadFile("an exported file doesn't begin with its manifest and tokens", where=str(path))
    manifest = _decode(first.payload, Manifest, str(path))
    if not _is_possible(manifest):
        raise BadFile("a manifest that makes no sense", where=str(path))
    if len(second.payload) != 4 * manifest.token_count:
        raise BadFile("the token list hasn't the length that the manifest says", where=str(path))
    return Opened(manifest, bytes(second.payload), second.offset_after, first.checksum)


def _is_possible(m: Manifest) -> bool:
    """Whether its shape is one that state can have."""
    return len(m.root) == 16 and is_possible(m.layout, m.block_tokens, m.state_bytes)


def _range_of(opened: Opened, item: Item) -> tuple[int, int, int]:
    """(first token, count, mask of groups) of a BLOCK or TAIL record. Raises BadFile."""
    m = opened.manifest
    if len(item.payload) < STATE.size:
        raise BadFile("a record of state is cut", where=NAMES[item.type])
    start, count, groups, _ = STATE.unpack_from(item.payload)
    where = f"record at [{start}, {start + count})"
    if start % m.block_tokens or start + count > m.token_count or (item.type == BLOCK) != (count == m.block_tokens):
        raise BadFile("a record's token range makes no sense", where=where)
    if len(item.payload) - STATE.size != m.shape.frame_bytes(count, groups):
        raise BadFile("a frame doesn't have its layout's size", where=where)
    return start, count, groups


def _point_of(opened: Opened, item: Item) -> tuple[int, int]:
    """(position, kind) of a POINT record. Raises BadFile."""
    m = opened.manifest
    if len(item.payload) != STATE.size + m.state_bytes:
        raise BadFile("a rollback point doesn't have its layout's size", where=NAMES[item.type])
    position, _, _, kind = STATE.unpack_from(item.payload)
    if position > m.token_count:
        raise BadFile("a rollback point makes no sense", where=f"record at {position}")
    return position, kind


def check_exported(
    path: Path, progress: Callable[[int, int], None] = lambda done, total: None, keys: ExportKeys | None = None
) -> Opened:
    """Read the whole file, every checksum. Raises BadFile, OtherFormat, LockedFile, FileNotFoundError."""
    opened = open_exported(path, keys)
    size, position, points = path.stat().st_size, 0, 0
    for item in read_items(path, keys=keys or ExportKeys()):
        if item.type in (BLOCK, TAIL):
            start, count, _ = _range_of(opened, item)
            if start != position:
                raise BadFile("state of another range than the manifest says", where=str(path))
            position += count
        elif item.type == POINT:
            _point_of(opened, item)
            points += 1
        progress(item.offset_after, size)
    if (position, points) != (opened.manifest.position, opened.manifest.point_count):
        raise BadFile("less state than the manifest says", where=str(path), cause=f"{position} tokens")
    return opened


# ---------------------------------------------------------------- import


class Slice(msgspec.Struct, frozen=True):
    """What one group commit of an import did. offset and index: where the next one goes on; done: the end was reached."""

    offset: int
    index: int
    done: bool
    blocks_put: int
    blocks_there: int


def import_sequence(opened: Opened, session: str, namespace: str) -> SequenceId:
    """The sequence that an imported session is stored under: the same each time, so that doing it again changes nothing."""
    name = opened.digest + session.encode() + b"\0" + namespace.encode() + opened.tokens
    return SequenceId(hashlib.blake2b(name, digest_size=16, person=PERSON).digest())


def import_slice(
    group: Group, path: Path, *, session: str, namespace: str, offset: int = 0, index: int = 0,
    limit_bytes: int = 8 << 20, named: set[bytes] | None = None, keys: ExportKeys | None = None,
) -> Slice:  # fmt: skip
    """Put the next state of an exported file into a group commit, about `limit_bytes` of it. Raises BadFile, OtherFormat.

    The sequence's record moves on with each slice, so that nothing that was put is ever without a name. It is the session's once the
    end was reached; until then it stands by itself, and takes the place of nothing.

    named  while blocks are being collected: takes the ids that the file names, which are not to be freed
    """
    keys = keys or ExportKeys()
    opened = open_exported(path, keys)
    m = opened.manifest
    group.put_root(m.root, RootInfo(m.layout, m.block_tokens, m.state_bytes))
    group.put_tenant(RootId(m.root), namespace)
    sequence = import_sequence(opened, session, namespace)
    ids = block_chain(RootId(m.root), namespace, np.frombuffer(opened.tokens, "<i4"), m.block_tokens)
    if named is not None:
        named.update([*ids, sequence])
    if not offset:
        offset, index = opened.offset, 2
    size, put, there, done = 0, 0, 0, False
    for item in read_items(path, offset=offset, index=index, keys=keys):
        if item.type == END:
            done = True
            _name(group, sequence, session)
            break
        if size and size + len(item.payload) > limit_bytes:
            break
        if item.type in (BLOCK, TAIL):
            fresh = _put_state(group, opened, namespace, sequence, ids, item)
            put, there = put + fresh, there + (not fresh)
        elif item.type == POINT:
            point = _put_point(group, opened, namespace, ids, item)
            if named is not None:
                named.add(point)
        size += len(item.payload)
        offset, index = item.offset_after, index + 1
    return Slice(offset, index, done, put, there)


def is_importing(stream: str) -> bool:
    """Whether a stream has what an import has put that isn't finished, or never was."""
    return stream.startswith(IMPORTING)


def _name(group: Group, sequence: SequenceId, session: str) -> None:
    """All is there: it is the session's from now on."""
    progress = group.progress(sequence)
    if progress is not None and is_importing(progress.stream):
        stream = f"import-{sequence.hex()}"
        group.replace_progress(sequence, msgspec.structs.replace(progress, session=session, stream=stream))


def _put_state(
    group: Group, opened: Opened, namespace: str, sequence: SequenceId, ids: list[BlockId], item: Item
) -> bool:
    """Put a block or a tail, and move the sequence's record on; whether it was not there."""
    m, (start, count, groups) = opened.manifest, _range_of(opened, item)
    whole, layout = start // m.block_tokens, m.shape
    tokens = opened.tokens[4 * start : 4 * (start + count)]
    stream = IMPORTING + sequence.hex()
    track = Track(RootId(m.root), layout, m.block_tokens, namespace, "", stream, 1, ids[whole], start, start, True)
    if item.type == BLOCK:
        fresh = _lacks(group, ids[whole + 1], groups)
        if fresh:
            frame = np.frombuffer(item.payload[STATE.size :], np.uint8)
            group.put_frame(track, WholeBlock(ids[whole + 1], ids[whole], start, tokens, []), frame, groups)
        track.parent, track.block_start = ids[whole + 1], start + count
    else:
        fresh = not group.tails(ids[whole], sequence)
        if fresh:
            group.frame_buffer(count, layout)[:] = np.frombuffer(item.payload[STATE.size :], np.uint8)
            group.put_tail(track, sequence, start, tokens)
    track.position = start + count
    known = group.progress(sequence)
    if known is None or is_importing(known.stream) or known.position < track.position:
        group.put_progress(sequence, track)
    return fresh


def _lacks(group: Group, block: BlockId, groups: int) -> bool:
    """Whether a block is not stored, or damaged, or there with fewer groups than these."""
    node = group.node(block)
    if node is None or (groups & ~node.groups and not node.groups & ~groups):
        return True
    try:
        group.block(block)
    except BadBlock:
        return True
    return False


def _put_point(group: Group, opened: Opened, namespace: str, ids: list[BlockId], item: Item) -> PointId:
    m, (position, kind) = opened.manifest, _point_of(opened, item)
    whole = position // m.block_tokens
    start = whole * m.block_tokens
    tokens = opened.tokens[4 * start : 4 * position]
    place = PointPlace(point_id(ids[whole], tokens), ids[whole], start, tokens)
    if not group.good_point(place):
        track = Track(RootId(m.root), m.shape, m.block_tokens, namespace, "", "", 1, ids[whole], start, start, True)
        group.put_point(track, place, kind, np.frombuffer(item.payload[STATE.size :], np.uint8))
    return place.id
