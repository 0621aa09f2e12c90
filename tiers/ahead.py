"""The next group commit's bytes, verified and joined while the present one waits for the disk. Stage *drain*; a thread beside the keeper's.

Nothing here decides what is stored. It foresees what the next group will need; the drain uses that where it comes true, and does
the work itself where it doesn't. The thread works during commits only, and reads lanes and a snapshot of the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import structlog

from tiers.errors import TierError
from tiers.lane_format import RecordHeader, RecordType
from tiers.lane_reader import LaneReader, LaneRef
from tiers.layout import BlockId, SequenceId
from tiers.store import Store
from tiers.track import Part, Track, WholeBlock, open_track
from tiers.values import KIND_BLOCK, frame_offset, pack_value

log = structlog.get_logger()

PUSH_PAUSE_S = 0.001

Records = list[tuple[LaneReader, RecordHeader]]


class Ahead:
    """What is ready for the next group: records whose checksum is right, and values of blocks that become whole.

    Used by the drain's thread between commits, by its own thread during one: from `start` to the end of the with-block.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "ahead")  # kept: to start a thread is to wait for it
        self._running: Future[None] | None = None
        self._ends = threading.Event()
        self._verified: dict[tuple[int, int], RecordHeader] = {}  # by lane id and number
        self._values: dict[BlockId, tuple[list[Part], np.ndarray]] = {}
        self._buffers: list[np.ndarray] = []  # as many as a group has had blocks, used again for each

    def start(self, store: Store, records: Records, tracks: dict[SequenceId, Track]) -> None:
        """Begin with the records of the next group. `tracks` must not change before the with-block ends."""
        self._verified.clear()
        self._values.clear()
        self._ends.clear()
        self._running = self._threads.submit(self._run, store, records, tracks)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        """End after the block at hand, and wait for that."""
        if self._running is None:
            return
        self._ends.set()
        error, self._running = self._running.exception(), None
        if error is not None:
            log.error("drain.ahead_failed", error=repr(error), hint="blocks are stored all the same, only slower")

    @property
    def is_ready(self) -> bool:
        """Whether there is anything for the next group."""
        return bool(self._verified)

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown()

    def forget(self) -> None:
        """Let go of everything that is ready."""
        self._verified.clear()
        self._values.clear()
        self._buffers.clear()

    def is_verified(self, lane: LaneReader, header: RecordHeader) -> bool:
        """Whether this record's checksum was found right since the last group."""
        return self._verified.get((lane.lane_id, header.number)) == header

    def value(self, block: WholeBlock) -> np.ndarray | None:
        """A block's whole value (uint8), if it was made of these very parts. Valid until the next `start`."""
        parts, value = self._values.pop(block.id, (None, None))
        return value if parts == block.parts else None

    def _run(self, store: Store, records: Records, tracks: dict[SequenceId, Track]) -> None:
        with store.writing() as push:
            self._build_all(store, records, tracks, push)
            while not self._ends.wait(PUSH_PAUSE_S):
                push()

    def _build_all(
        self, store: Store, records: Records, tracks: dict[SequenceId, Track], push: Callable[[], None]
    ) -> None:
        foreseen: dict[SequenceId, Track] = {}
        used = 0
        for lane, header in records:
            push()
            try:
                for track, block in self._foresee(lane, header, tracks, foreseen):
                    if self._is_ending():
                        return
                    if self._is_new(store, block):
                        push()
                        used += self._build(track, block, used)
            except (TierError, ValueError):
                continue  # the drain will find the same, and say so
            if self._is_ending():
                return
        del self._buffers[used:]

    def _is_ending(self) -> bool:
        return self._ends.is_set()

    def _foresee(
        self, lane: LaneReader, header: RecordHeader, tracks: dict[SequenceId, Track], foreseen: dict[SequenceId, Track]
    ) -> list[tuple[Track, WholeBlock]]:
        """Verify a record; the blocks that it will make whole."""
        sequence = header.sequence
        if sequence not in foreseen and sequence in tracks:
            track = tracks[sequence]
            foreseen[sequence] = replace(track, parts=list(track.parts), passed={})
        if header.type == RecordType.OPEN and sequence not in foreseen:
            foreseen[sequence] = open_track(lane.open_payload(header), header.epoch)
        if header.type != RecordType.ROWS:
            return []
        lane.frame(header)
        self._verified[lane.lane_id, header.number] = header
        if sequence not in foreseen:
            return []
        track = foreseen[sequence]
        whole = track.add(header.token_start, header.token_end, lane.tokens(header), LaneRef(lane, header))
        return [(track, block) for block in whole or ()]

    def _is_new(self, store: Store, block: WholeBlock) -> bool:
        """Whether a block is neither stored nor ready, and made of records in lanes alone."""
        if block.id in self._values or not all(isinstance(part.source, LaneRef) for part in block.parts):
            return False
        with store.snapshot() as view:
            return view.node(block.id) is None

    def _build(self, track: Track, block: WholeBlock, used: int) -> int:
        """Build a block's value in the first buffer after `used` others; returns how many buffers that takes."""
        count, layout = len(block.tokens) // 4, track.layout
        size = frame_offset(count) + layout.frame_bytes(count)
        if used == len(self._buffers):
            self._buffers.append(np.empty(size, np.uint8))
        elif self._buffers[used].size < size:
            self._buffers[used] = np.empty(size, np.uint8)
        value = self._buffers[used][:size]
        frames = []
        for source, frame_tokens, start, end, _ in block.parts:
            waited = (source.lane.lane_id, source.header.number) not in self._verified
            frames.append((source.lane.frame(source.header, verify=waited), frame_tokens, start, end))
        layout.join(frames, value[frame_offset(count) :])
        pack_value(value, KIND_BLOCK, track.root, track.block_tokens, block.parent, block.token_start, block.tokens)
        if all(source.lane.intact(source.header) for source, *_ in block.parts):
            self._values[block.id] = block.parts, value
        return 1
