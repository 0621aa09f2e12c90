"""State that changes nobody says where: registered tensors, captured as the pages that differ, restored to any version since the last base.

A public API for training loops: register the tensors of an adapter and its optimiser, capture after a step, restore after a
crash. The device's page handler finds what changed by a 64-bit hash a page, without a shadow copy, on the host or on a GPU
(engine/capture/handlers.py); the changed pages are appended as one record to one file. Constant regions (frozen weights) are named and
checked, never scanned or written. Runs on the caller's thread; one writer.
Format: docs/log-format.md, "Opaque state".

    log = OpaqueLog.open(path)
    log.register("lora", tensor)
    restored = log.restore()                   # None: nothing is stored yet
    for step in range(restored.note["step"] + 1 if restored else 0, steps):
        train(step)
        log.capture({"step": step})
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
import torch
import xxhash

from engine.capture.handlers import Delta, HandlerDevice, PageRegion
from engine.capture.plain import PlainDevice
from engine.capture.regions import memory_of
from engine.errors import OtherState
from tiers.store_file import sync_file

log = structlog.get_logger()

PAGE_BYTES = 4096
BASE, DELTA = 1, 2
_MAGIC = 0x51504F43  # "COPQ"
_FORMAT = 1
_HEADER = struct.Struct("<IHHQQQQ")  # magic, format, kind, version, meta bytes, payload bytes, checksum of both


class RegionPages(msgspec.Struct, frozen=True, array_like=True):
    """One region in a record: the pages of it that follow in the payload (u32, ascending), and their hashes (u64) under `seed`."""

    name: str
    byte_count: int
    pages: bytes
    hashes: bytes
    seed: int


class RecordMeta(msgspec.Struct, frozen=True, array_like=True):
    """What a record's payload is. `constants`: digest of each region that is not in the log."""

    page_bytes: int
    regions: list[RegionPages]
    constants: dict[str, str]
    note: Any


@dataclass(frozen=True, slots=True)
class Captured:
    """One capture: pages that were written, of all pages of opaque regions; bytes of the record; seconds spent hashing, then writing."""

    version: int
    changed_pages: int
    pages: int
    written_bytes: int
    scan_s: float
    write_s: float


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore put back: the note of that version, and what it cost."""

    version: int
    note: Any
    read_bytes: int
    seconds: float


@dataclass(slots=True)
class _Region:
    name: str
    byte_count: int
    pages: PageRegion


@dataclass(slots=True)
class OpaqueLog:
    """One file of versions. `rebase_factor`: deltas may grow to so many times the base before a new base is written."""

    path: Path
    device: HandlerDevice
    page_bytes: int = PAGE_BYTES
    rebase_factor: float = 4.0
    sync: bool = False
    version: int = 0
    _regions: dict[str, _Region] = field(default_factory=dict)
    _constants: dict[str, str] = field(default_factory=dict)
    _end: int = 0  # of the whole records up to `version`
    _base_bytes: int = 0
    _file: int = -1
    _known_alone: bool = False  # the devices know of changes that are in no record: the next one holds everything

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        device: HandlerDevice | None = None,
        page_bytes: int = PAGE_BYTES,
        rebase_factor: float = 4.0,
        sync: bool = False,
    ) -> OpaqueLog:
        """Open or begin a log.

        device  where the tensors are; host memory by default
        sync    each capture is on the disk when it returns (else in the page cache: it survives the process)
        """
        opened = cls(Path(path), device or PlainDevice(), page_bytes, rebase_factor, sync)
        opened.path.parent.mkdir(parents=True, exist_ok=True)
        opened._file = os.open(opened.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return opened

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def register(self, name: str, tensor: torch.Tensor, *, constant: bool = False) -> None:
        """Watch a tensor. Its memory must stay where it is: contiguous, changed in place only.

        constant  it never changes: only its digest is remembered, and a restore checks it
        Raises    BadRegion if the tensor can't be watched
        """
        memory = memory_of(tensor)
        if constant:
            data = tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()
            self._constants[name] = xxhash.xxh3_128_hexdigest(data)
            return
        self._regions[name] = _Region(name, memory.byte_count, self.device.pages(memory, self.page_bytes))

    @property
    def page_count(self) -> int:
        """Pages of all opaque regions."""
        return sum(region.pages.page_count for region in self._regions.values())

    # ------------------------------------------------------------ capture

    def capture(self, note: Any = None) -> Captured:
        """Append what changed since the last version as a new one. `note` is anything msgpack takes: step, seeds, losses.

        Cost    one hash of every page, one write of the changed ones
        Raises  OSError: the disk refused it. The log is as it was, and the next capture takes everything
        """
        began = time.perf_counter()
        rebase = self._known_alone or not self._end or self._end > (1 + self.rebase_factor) * self._base_bytes
        self._known_alone = True  # what a scan has found it finds no second time
        changed = [(region, region.pages.scan(everything=rebase)) for region in self._regions.values()]
        scanned = time.perf_counter()
        count = sum(delta.indices.size for _, delta in changed)
        record = self._record(BASE if rebase else DELTA, changed, note)
        record_bytes = sum(part.nbytes for part in record)
        if rebase:
            self._replace(record)
        else:
            os.ftruncate(self._file, self._end)  # versions that a restore went back behind, or a torn end
            self._append(record)
        self._known_alone = False
        self.version += 1
        seconds = time.perf_counter() - scanned
        return Captured(self.version, count, self.page_count, record_bytes, scanned - began, seconds)

    def _record(self, kind: int, changed: list[tuple[_Region, Delta]], note: Any) -> list[memoryview]:
        """The parts of a record, in order. The pages are those of the deltas, not a copy."""
        regions = [
            RegionPages(
                region.name,
                region.byte_count,
                delta.indices.astype("<u4").tobytes(),
                delta.hashes.astype("<u8").tobytes(),
                delta.seed,
            )
            for region, delta in changed
        ]
        meta = msgspec.msgpack.encode(RecordMeta(self.page_bytes, regions, self._constants, note))
        pages = [np.ascontiguousarray(delta.pages).reshape(-1).data for _, delta in changed if delta.indices.size]
        checksum = xxhash.xxh3_64(meta)
        for part in pages:
            checksum.update(part)
        payload_bytes = sum(part.nbytes for part in pages)
        header = _HEADER.pack(
            _MAGIC, _FORMAT, kind, self.version + 1, len(meta), payload_bytes, checksum.intdigest()
        )  # fmt: skip
        return [memoryview(header + meta), *pages]

    def _append(self, record: list[memoryview]) -> None:
        end = _write_all(self._file, record, self._end)
        if self.sync:
            os.fdatasync(self._file)
        self._end = end

    def _replace(self, record: list[memoryview]) -> None:
        """A new file that begins with this base, put in place by one rename: a crash leaves the old file or the new one."""
        temporary = self.path.with_name(f"{self.path.name}.new")
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            end = _write_all(file, record, 0)
            if self.sync:
                os.fdatasync(file)
            os.replace(temporary, self.path)
        except OSError:
            os.close(file)
            temporary.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file, self._end, self._base_bytes = file, end, end
        if self.sync:  # else a loss of power brings the old file back, without what is appended to the new one
            sync_file(self.path.parent)

    # ------------------------------------------------------------ restore

    def restore(self, version: int | None = None) -> Restored | None:
        """Put the registered tensors back as they were at a version (the last one by default); None if nothing is stored.

        A torn or damaged record ends the log. The next capture goes on from here: later versions are gone then.
        Raises  OtherState if other tensors were captured, or the version is not there
        """
        began, read_bytes, found = time.perf_counter(), 0, None
        self._known_alone = True  # until all that a record holds is there
        for kind, number, meta, payload, end in self._records():
            if version is not None and number > version:
                break
            self._check(meta)
            self._apply(meta, payload)
            self._base_bytes = end if kind == BASE else self._base_bytes
            self.version, self._end, found = number, end, meta
            read_bytes += len(payload)
        if found is None or (version is not None and self.version != version):
            if version is None:
                return None
            raise OtherState(f"{self.path}: version {version} is not there; the oldest is the last base's")
        self._known_alone = False
        return Restored(self.version, found.note, read_bytes, time.perf_counter() - began)

    def versions(self) -> list[int]:
        """Those that can be restored."""
        return [number for _, number, _, _, _ in self._records()]

    def _records(self) -> Iterator[tuple[int, int, RecordMeta, memoryview, int]]:
        """(kind, version, meta, payload, offset of its end) of each whole record."""
        at, size = 0, os.fstat(self._file).st_size
        while at + _HEADER.size <= size:
            header = os.pread(self._file, _HEADER.size, at)
            magic, form, kind, number, meta_bytes, payload_bytes, checksum = _HEADER.unpack(header)
            end = at + _HEADER.size + meta_bytes + payload_bytes
            if magic != _MAGIC or form != _FORMAT or end > size:
                log.warning("opaque.torn", path=str(self.path), good_bytes=at, bytes=size)
                return
            body = _read_all(self._file, meta_bytes + payload_bytes, at + _HEADER.size)
            if xxhash.xxh3_64_intdigest(body) != checksum:
                log.warning("opaque.damaged", path=str(self.path), version=number, good_bytes=at, bytes=size)
                return
            meta = msgspec.msgpack.decode(body[:meta_bytes], type=RecordMeta)
            yield kind, number, meta, body[meta_bytes:], end
            at = end

    def _check(self, meta: RecordMeta) -> None:
        stored = {region.name: region.byte_count for region in meta.regions}
        ours = {region.name: region.byte_count for region in self._regions.values()}
        if stored != ours or meta.page_bytes != self.page_bytes:
            raise OtherState(f"{self.path} holds regions {stored}, registered are {ours}; register the same ones")
        differing = [name for name, digest in meta.constants.items() if self._constants.get(name, digest) != digest]
        if differing:
            raise OtherState(f"{self.path}: {', '.join(differing)} differ from what was captured beside it")

    def _apply(self, meta: RecordMeta, payload: memoryview) -> None:
        at = 0
        for stored in meta.regions:
            indices, size = np.frombuffer(stored.pages, "<u4"), len(stored.pages) // 4 * self.page_bytes
            pages = np.frombuffer(payload[at : at + size], np.uint8).reshape(-1, self.page_bytes)
            delta = Delta(indices.astype(np.uint32), np.frombuffer(stored.hashes, "<u8"), pages, stored.seed)
            applied = self._regions[stored.name].pages.apply(delta)
            if applied.refused:
                raise OtherState(f"{self.path}: {len(applied.refused)} pages of {stored.name} are not what they were")
            at += size


def _write_all(file: int, parts: list[memoryview], at: int) -> int:
    """Write parts one after the other, from `at` on; where they end."""
    for view in parts:
        while view:
            written = os.pwrite(file, view[: 1 << 30], at)
            view, at = view[written:], at + written
    return at


def _read_all(file: int, count: int, at: int) -> memoryview:
    body = bytearray(count)
    view, done = memoryview(body), 0
    while done < count:
        got = os.preadv(file, [view[done : done + (1 << 30)]], at + done)
        if not got:
            raise OSError(f"the file became shorter while it was read, at {at + done}")
        done += got
    return view
