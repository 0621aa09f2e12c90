"""The device contract by compiled handlers, over a driver (CUDA; in tests, the same sources on the CPU) and a way to launch.

Results come through mapped host memory, a part at a time where they do not fit. A region's handlers are compiled on a thread of
their own; until they are there, its owner uses what it has. Not thread-safe: one thread captures.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import structlog

from engine.capture import source
from engine.capture.driver import Buffer, Driver, Event, Module, aligned, constant_words
from engine.capture.errors import BadRegion
from engine.capture.handlers import Applied, Delta, RowRange
from engine.capture.launch import Launcher, SideStream, Ticket
from engine.capture.regions import Memory
from engine.capture.source import PageShape, RowShape, StateShape

log = structlog.get_logger()

_STAGING_BYTES = 16 << 20  # 4,096 pages of 4 KB: more of them are another scan
_ROW_STAGING_BYTES = 8 << 20
_REPORT_WORDS = 32
_ITEM = np.dtype(
    [
        ("frame", "<u8"),
        ("slot", "<u4"),
        ("start", "<u4"),
        ("count", "<u4"),
        ("frame_tokens", "<u4"),
        ("frame_first", "<u4"),
        ("unused", "<u4"),
    ]
)
_EVERYTHING = 1
# Warps of work from which on one block alone is not enough.
_WIDE_UNITS = 128
_ABSENT = 1 << 31
RANGES_A_LAUNCH = 64


class KernelDevice:
    """A device that runs handlers."""

    def __init__(self, driver: Driver, launcher: Launcher, *, seed: int | None = None, hash_bits: int = 64) -> None:
        self.driver = driver
        self.launcher = launcher
        self.name = f"{driver.name}/{launcher.name}"
        self.seed = secrets.randbits(64) if seed is None else seed
        self.hash_bits = hash_bits
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="capture-compile")
        self._side: SideStream | None = None

    def compile(self, handler: source.HandlerSource) -> Future[Module]:
        """Load a handler on the compiler's thread."""
        return self._compiler.submit(self.driver.load, handler)

    def pages(self, memory: Memory, page_bytes: int = 4096, *, bitmap: bool = False) -> KernelPages:
        """See HandlerDevice."""
        return KernelPages(self, memory, page_bytes, bitmap)

    def rows(self, groups: Sequence[Memory], shape: RowShape) -> KernelRows:
        """See HandlerDevice."""
        return KernelRows(self, groups, shape)

    def state(self, parts: Sequence[Memory], shape: StateShape) -> KernelState:
        """See HandlerDevice."""
        return KernelState(self, parts, shape)

    def start(self, module: Module, words: Sequence[int], units: int, after: Event | None = None) -> None:
        """Start a handler for about `units` warps of work, and wait for its results."""
        self.launch(module, words, units, after).wait()

    def launch(self, module: Module, words: Sequence[int], units: int, after: Event | None = None) -> Ticket:
        """Start a handler; where the way to launch has one block only, what is too much for it goes to a side stream."""
        launcher: Launcher = self.launcher
        if not launcher.is_wide and units > _WIDE_UNITS:
            self._side = launcher = self._side or SideStream(self.driver)
        return launcher.launch(module, words, self.blocks(module, units), after)

    def blocks(self, module: Module, units: int) -> int:
        """How many blocks: enough for a warp a unit, at most as many as are resident at once; a rest would run half as wide."""
        warps, most = module.source.threads // 32, module.source.residents * self.driver.multiprocessors
        return max(1, min(-(-units // warps), most))

    def step_event(self) -> Event:
        """A point behind all that the framework's stream holds by now: the step whose changes are wanted."""
        return self.driver.current_stream().record()

    def close(self) -> None:
        """See HandlerDevice."""
        self._compiler.shutdown(wait=True, cancel_futures=True)
        self.launcher.close()
        if self._side is not None:
            self._side.close()


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of a scanner's out buffer begin: 256 bytes of report, indices, hashes, pages (kernels/page_scan.cuh)."""

    indices: int
    hashes: int
    pages: int
    byte_count: int

    @classmethod
    def of(cls, room: int, page_bytes: int) -> Places:
        """For `room` pages."""
        hashes = 256 + aligned(4 * room)
        pages = hashes + aligned(8 * room)
        return cls(256, hashes, pages, pages + room * page_bytes)


@dataclass(slots=True)
class _PageHandlers:
    """The handlers of one shape of a region, and what they keep on the device."""

    shape: PageShape
    scan: Future[Module]
    apply: Future[Module]
    mark: Future[Module] | None
    table: Buffer
    bitmap: Buffer | None

    def ready(self) -> bool:
        return self.scan.done() and self.apply.done() and (self.mark is None or self.mark.done())


class KernelPages:
    """Pages of a region; see PageRegion."""

    def __init__(self, device: KernelDevice, memory: Memory, page_bytes: int, bitmap: bool) -> None:
        self._device = device
        self._memory = memory
        self._first = True
        self._next: tuple[Memory, _PageHandlers] | None = None
        self._block_table: Buffer | None = None
        self._now = self._prepare(memory, page_bytes, bitmap)
        self._stage(page_bytes)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, as of the last scan."""
        return self._now.shape.page_bytes

    @property
    def page_count(self) -> int:
        """Pages, as of the last scan."""
        return self._now.shape.page_count

    def _prepare(self, memory: Memory, page_bytes: int, bitmap: bool) -> _PageHandlers:
        device = self._device
        page_count = -(-memory.byte_count // page_bytes)
        warps = source.THREADS // 32 * source.SCAN_RESIDENTS * device.driver.multiprocessors
        batch = 32 if bitmap else max(1, min(32, page_count // warps))
        try:
            shape = PageShape(page_bytes, memory.byte_count, memory.alignment, bitmap, batch, device.hash_bits)
        except ValueError as error:
            raise BadRegion(str(error)) from error
        driver = device.driver
        return _PageHandlers(
            shape,
            device.compile(source.page_scanner(shape)),
            device.compile(source.page_applier(shape)),
            device.compile(source.page_marker(shape)) if bitmap else None,
            driver.device_buffer(8 * shape.page_count),
            driver.device_buffer(aligned(4 * -(-shape.page_count // 32))) if bitmap else None,
        )

    def _stage(self, page_bytes: int) -> None:
        """Mapped memory for one part of a delta, laid out as kernels/page_scan.cuh says, and the counters on the device."""
        # A word of marks is taken whole, so all of its pages must find room.
        least = 32 if self._now.shape.bitmap else 1
        self._room = min(self._now.shape.page_count, max(least, _STAGING_BYTES // page_bytes))
        self._places = Places.of(self._room, page_bytes)
        self._staging = self._device.driver.mapped_buffer(self._places.byte_count)
        self._counters = self._device.driver.device_buffer(4 * (_REPORT_WORDS + 1))

    # ------------------------------------------------------------ scan

    def scan(self, *, everything: bool = False) -> Delta:
        """See PageRegion. A region that was reshaped is scanned by its new handlers as soon as they are compiled."""
        self._swap()
        after = self._device.step_event()
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        count = self._now.shape.page_count
        if everything or self._first:
            for first in range(0, count, self._whole_part()):
                self._part(parts, first, min(count, first + self._whole_part()), _EVERYTHING, after)
            self._first = False
        else:
            while self._part(parts, 0, count, 0, after) > self._room:
                continue
        indices, hashes, pages = (np.concatenate([part[k] for part in parts]) for k in range(3))
        order = np.argsort(indices, kind="stable")
        return Delta(indices[order], hashes[order], pages[order], self._device.seed)

    def _whole_part(self) -> int:
        """Pages of one launch that takes every page: a multiple of 32 where a bitmap is cut, never more than there is room for."""
        return self._room if self._room < 32 or self._now.bitmap is None else self._room // 32 * 32

    def _part(
        self, parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]], first: int, end: int, flags: int, after: Event
    ) -> int:
        """One launch over pages [first, end); returns how many changed, with or without room."""
        now, staging, room = self._now, self._staging, self._room
        words = (
            self._memory.address,
            now.table.address,
            now.bitmap.address if now.bitmap else 0,
            staging.address,
            self._counters.address,
            0,
            0,
            room,
            self._device.seed,
            flags,
            first,
            end,
        )
        self._device.start(now.scan.result(), words, -(-(end - first) // now.shape.batch), after)
        found = int(staging.array("<u4", 1)[0])
        taken = min(found, room)
        pages = staging.array("u1", taken * now.shape.page_bytes, self._places.pages).reshape(
            taken, now.shape.page_bytes
        )
        indices = staging.array("<u4", taken, self._places.indices)
        parts.append((indices.copy(), staging.array("<u8", taken, self._places.hashes).copy(), pages.copy()))
        return found

    def mark(self, pages: Sequence[int]) -> None:
        """See PageRegion."""
        self._swap()
        now = self._now
        if now.mark is None or now.bitmap is None:
            return
        listed = self._staging.array("<u4", min(len(pages), self._room), self._places.indices)
        for start in range(0, len(pages), len(listed) or 1):
            part = pages[start : start + len(listed)]
            listed[: len(part)] = part
            words = (now.bitmap.address, self._staging.address + self._places.indices, len(part))
            self._device.start(now.mark.result(), words, -(-len(part) // 32))

    # ------------------------------------------------------------ apply

    def apply(self, delta: Delta, block_table: Sequence[int] | None = None) -> Applied:
        """See PageRegion."""
        self._swap()
        table = None if block_table is None else self._placed(block_table)
        length = 0 if block_table is None else len(block_table)
        count, refused = 0, []
        after = self._device.step_event()
        for start in range(0, len(delta.indices), self._room):
            done, bad = self._apply_part(
                delta, start, min(len(delta.indices), start + self._room), table, length, after
            )
            count += done
            refused += bad
        return Applied(count, sorted(refused))

    def _placed(self, block_table: Sequence[int]) -> Buffer:
        """The block table where the device reads it; the memory is kept for the next one."""
        if self._block_table is None or self._block_table.byte_count < 4 * len(block_table):
            self._block_table = self._device.driver.mapped_buffer(aligned(4 * max(1, len(block_table))))
        self._block_table.array("<u4", len(block_table))[:] = block_table
        return self._block_table

    def _apply_part(
        self, delta: Delta, start: int, end: int, table: Buffer | None, length: int, after: Event
    ) -> tuple[int, list[int]]:
        now, staging, n = self._now, self._staging, end - start
        report = staging.array("<u4", _REPORT_WORDS)
        staging.array("<u4", n, self._places.indices)[:] = delta.indices[start:end]
        staging.array("<u8", n, self._places.hashes)[:] = delta.hashes[start:end]
        staging.array("u1", n * now.shape.page_bytes, self._places.pages)[:] = delta.pages[start:end].reshape(-1)
        words = (
            self._memory.address,
            # Under another seed the table would hold hashes that no scan computes: those pages are found changed again.
            now.table.address if delta.seed == self._device.seed else 0,
            staging.address + self._places.pages,
            staging.address + self._places.indices,
            table.address if table else 0,
            staging.address + self._places.hashes,
            n,
            delta.seed,
            self._counters.address,
            length,
            staging.address,
        )
        self._device.start(now.apply.result(), words, n, after)
        return int(report[0]), self._refused(report, delta, start, end, words)

    def _refused(self, report: np.ndarray, delta: Delta, start: int, end: int, words: tuple[int, ...]) -> list[int]:
        """Numbers of refused pages; the report names the first thirty, a page at a time finds out the others."""
        refused = int(report[1])
        if refused <= _REPORT_WORDS - 2:
            return [start + int(number) for number in report[2 : 2 + refused]]
        found = []
        for number in range(end - start):
            one = list(words)
            one[2] += number * self._now.shape.page_bytes
            one[3] += 4 * number
            one[5] += 8 * number
            one[6] = 1
            self._device.start(self._now.apply.result(), one, 1)
            if report[1]:
                found.append(start + number)
        return found

    # ------------------------------------------------------------ hot swap

    def reshape(self, memory: Memory, *, page_bytes: int | None = None, bitmap: bool | None = None) -> None:
        """See PageRegion. The old handlers go on until the new ones are compiled, as long as the memory is the same."""
        shape = self._now.shape
        bitmap = shape.bitmap if bitmap is None else bitmap
        prepared = self._prepare(memory, page_bytes or shape.page_bytes, bitmap)
        self._next = (memory, prepared)

    def _swap(self) -> None:
        """Change over to new handlers between two scans.

        The first scan by new handlers takes every page, so whatever was written meanwhile is in it: nothing is missed.
        """
        if self._next is None:
            return
        memory, prepared = self._next
        same_memory = (memory.address, memory.byte_count) == (self._memory.address, self._memory.byte_count)
        if same_memory and not prepared.ready():
            return
        log.info("capture.handler_swapped", page_bytes=prepared.shape.page_bytes, bitmap=prepared.shape.bitmap)
        self._memory, self._now, self._next, self._first = memory, prepared, None, True
        self._stage(prepared.shape.page_bytes)


class RowList:
    """Up to RANGES_A_LAUNCH ranges in mapped memory, as the row handlers read them (kernels/rows.cuh). One launch at a time reads it."""

    def __init__(self, driver: Driver, bases: Buffer, group_count: int) -> None:
        self._bases = bases
        self._group_count = group_count
        places = RANGES_A_LAUNCH * max(1, group_count)
        self._items = driver.mapped_buffer(_ITEM.itemsize * RANGES_A_LAUNCH)
        self._firsts = driver.mapped_buffer(4 * places)
        self._spans = driver.mapped_buffer(8 * places)

    def write(self, ranges: Sequence[RowRange], addresses: Sequence[int]) -> tuple[int, ...]:
        """Write ranges, each with the address of its frame; returns the words of the launch that moves them."""
        count, groups = len(ranges), self._group_count
        items = self._items.array(_ITEM, count)
        firsts = self._firsts.array("<u4", count * groups).reshape(count, groups)
        spans = self._spans.array("<u4", 2 * count * groups).reshape(count, groups, 2)
        cut = any(item.spans for item in ranges)
        for index, (item, address) in enumerate(zip(ranges, addresses, strict=True)):
            entry, tokens = items[index], item.frame_tokens or item.token_count
            entry["frame"], entry["slot"], entry["start"] = address, item.slot, item.start
            entry["count"], entry["frame_tokens"], entry["frame_first"] = item.token_count, tokens, item.frame_first
            firsts[index] = [row % (1 << 32) for row in item.rows] if item.rows else item.start
            if cut:
                whole = (0, item.token_count)
                spans[index] = [span or (_ABSENT, 0) for span in item.spans] if item.spans else [whole] * groups
        places = self._spans.address if cut else 0
        return self._bases.address, self._items.address, count, self._firsts.address, places


class KernelRows:
    """An arena; see RowRegion. Frames in memory that the device reaches are filled in place, others through a staging ring."""

    def __init__(self, device: KernelDevice, groups: Sequence[Memory], shape: RowShape) -> None:
        if len(groups) != len(shape.groups):
            raise BadRegion(f"{len(groups)} ranges of memory for {len(shape.groups)} groups")
        self._device = device
        self._groups = list(groups)
        self.shape = shape
        self._gather = device.compile(source.row_gatherer(shape))
        self._scatter = device.compile(source.row_scatterer(shape))
        self._bases = constant_words(device.driver, [memory.address for memory in groups])
        self._list = self.new_list()
        self._staging = device.driver.mapped_buffer(_ROW_STAGING_BYTES)
        self._reachable: list[Buffer] = []

    def ready(self) -> bool:
        """Whether the gatherer is compiled. Raises CompileFailed if it cannot be."""
        return self._gather.done() and bool(self._gather.result())

    def can_scatter(self) -> bool:
        """Whether the scatterer is compiled. Raises CompileFailed if it cannot be."""
        return self._scatter.done() and bool(self._scatter.result())

    def new_list(self) -> RowList:
        """A list of ranges of this arena."""
        return RowList(self._device.driver, self._bases, len(self._groups))

    @property
    def gatherer(self) -> Module:
        """The compiled gatherer; blocks until there is one."""
        return self._gather.result()

    def wait_ready(self) -> None:
        """Block until both handlers are compiled."""
        self._gather.result()
        self._scatter.result()

    def reach(self, buffer: Buffer) -> None:
        """Frames inside this registered memory are read and written in place."""
        self._reachable.append(buffer)

    def forget(self, buffer: Buffer) -> None:
        """The memory is registered no more: other memory may come to lie at its addresses."""
        self._reachable = [known for known in self._reachable if known is not buffer]

    def words_for(self, ranges: Sequence[RowRange]) -> tuple[int, ...]:
        """Write ranges whose frames the device reaches into the list; the words of the launch that gathers them."""
        return self._list.write(ranges, [self._address(item.frame) for item in ranges])

    def gather(self, ranges: Sequence[RowRange]) -> None:
        """See RowRegion."""
        self._move(self._gather.result(), ranges, inward=False)

    def scatter(self, ranges: Sequence[RowRange]) -> None:
        """See RowRegion."""
        self._move(self._scatter.result(), ranges, inward=True)

    def start_scatter(self, ranges: Sequence[RowRange], into: RowList) -> Ticket:
        """Scatter ranges whose frames the device reaches, behind the framework's stream; done when the ticket is, `into` is free then."""
        words = into.write(ranges, [self._address(item.frame) for item in ranges])
        return self._device.launch(self._scatter.result(), words, self._units(ranges), self._device.step_event())

    def _units(self, ranges: Sequence[RowRange]) -> int:
        return sum(item.token_count for item in ranges) * self.shape.token_bytes // (16 * 32)

    def _move(self, module: Module, ranges: Sequence[RowRange], *, inward: bool) -> None:
        after = self._device.step_event()
        for group in self._rounds(ranges):
            addresses, staged = self._place(group, inward)
            self._device.start(module, self._list.write(group, addresses), self._units(group), after)
            if not inward:
                for item, at in staged:
                    item.frame[:] = self._staging.array("u1", item.frame.size, at)

    def _rounds(self, ranges: Sequence[RowRange]) -> list[list[RowRange]]:
        """Ranges in groups that fit the list of items and the staging ring."""
        rounds: list[list[RowRange]] = []
        room = 0
        current: list[RowRange] = []
        for item in ranges:
            size = 0 if self._address(item.frame) else aligned(item.frame.size)
            if size > self._staging.byte_count:
                self._staging = self._device.driver.mapped_buffer(size)
            if current and (len(current) == RANGES_A_LAUNCH or room + size > self._staging.byte_count):
                rounds.append(current)
                room, current = 0, []
            current.append(item)
            room += size
        return [*rounds, current] if current else rounds

    def _place(self, group: list[RowRange], inward: bool) -> tuple[list[int], list[tuple[RowRange, int]]]:
        """Where each frame lies for the device; and those that lie in the staging ring, with their places."""
        addresses, staged, at = [], [], 0
        for item in group:
            address = self._address(item.frame)
            if not address:
                if inward or item.spans or item.token_count != (item.frame_tokens or item.token_count):
                    self._staging.array("u1", item.frame.size, at)[:] = item.frame
                staged.append((item, at))
                address = self._staging.address + at
                at += aligned(item.frame.size)
            addresses.append(address)
        return addresses, staged

    def _address(self, frame: np.ndarray) -> int:
        """Where the device sees a frame, or 0. A frame in odd places (the handlers' accesses are aligned) goes through the ring."""
        host = frame.ctypes.data
        for buffer in self._reachable:
            if buffer.host is not None:
                offset = host - buffer.host.ctypes.data
                if offset >= 0 and offset + frame.size <= buffer.byte_count and host % 16 == 0:
                    return buffer.address + offset
        return 0


@dataclass(slots=True)
class Snapshot:
    """A copy of one slot's state on the device, and the event after which it is whole."""

    buffer: Buffer
    byte_count: int


class KernelState:
    """Recurrent state; see StateRegion."""

    def __init__(self, device: KernelDevice, parts: Sequence[Memory], shape: StateShape) -> None:
        if len(parts) != len(shape.parts):
            raise BadRegion(f"{len(parts)} ranges of memory for {len(shape.parts)} parts")
        self._device = device
        self._parts = list(parts)
        self._shape = shape
        self.byte_count = shape.byte_count
        self._save = device.compile(source.snapshotter(shape))
        self._restore = device.compile(source.snapshot_restorer(shape))
        self._bases = constant_words(device.driver, [memory.address for memory in parts])
        self._copies = device.driver.stream()
        self._host = device.driver.mapped_buffer(aligned(shape.byte_count))

    def save(self, slot: int) -> Snapshot:
        """See StateRegion."""
        device = self._device
        snapshot = Snapshot(device.driver.device_buffer(aligned(self.byte_count)), self.byte_count)
        words = (self._bases.address, slot, snapshot.buffer.address)
        device.start(self._save.result(), words, self.byte_count // 512 + 1, device.step_event())
        return snapshot

    def read(self, snapshot: Snapshot) -> np.ndarray:
        """See StateRegion."""
        self._device.driver.copy(self._host.address, snapshot.buffer.address, snapshot.byte_count, self._copies)
        self._copies.synchronize()
        return self._host.array("u1", snapshot.byte_count).copy()

    def restore(self, slot: int, state: np.ndarray) -> None:
        """See StateRegion."""
        device = self._device
        self._host.array("u1", self.byte_count)[:] = state
        words = (self._bases.address, slot, self._host.address)
        device.start(self._restore.result(), words, self.byte_count // 512 + 1, device.step_event())
