"""Stage *capture* on a GPU: the arena's new rows by the row gatherer, instead of a copy a group by the framework. With them come the
handlers that restore (device_restore.py) and the gatherer inside a decode step's graph (engine/decode_graph.py).

One launch takes the rows of all layers and all sequences of a step (`ahead`) straight into the records that the lane holds ready for
them, where the lane's memory could be registered with CUDA, else into tier 0. Anything that is missing (CuPy, a compiler, memory that can
be pinned) leaves the framework's copies in charge, with a reason that `concordia doctor`, the log and the engine's statistics show.
Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog

from engine.arena import Arena, Range, Slot
from engine.capture.device_restore import DeviceRestore
from engine.capture.driver import Buffer, Driver, constant_words
from engine.capture.errors import CaptureError
from engine.capture.executor import Executor, unsupported
from engine.capture.handlers import RowRange
from engine.capture.kernel_device import RANGES_A_LAUNCH, KernelDevice, KernelRows
from engine.capture.launch import ExecutorLaunch, GraphLaunch, LaunchCost, Launcher, SideStream, choose, measure
from engine.capture.regions import memory_of
from engine.capture.source import WORD_COUNT, RowGroup, RowShape

log = structlog.get_logger()

_WAYS: dict[str, Callable[[Driver], Launcher]] = {
    "stream": SideStream,
    "graph": GraphLaunch,
    "executor": lambda driver: ExecutorLaunch(Executor(driver)),
}


def shape_of(arena: Arena) -> RowShape:
    """What the row handlers of an arena are specialised for."""
    groups = []
    for group in arena.groups:
        _, planes, rows, dim = group.shape
        row = dim * group.element_size()
        alignment = memory_of(group).alignment
        groups.append(RowGroup(planes, row, planes * rows * row, rows * row, alignment=alignment))
    return RowShape(tuple(groups))


@dataclass(slots=True)
class DeviceRows:
    """The arena's rows, by handlers.

    way    how they are launched: stream, graph or executor
    lane   why the lane's memory is not written in place; empty if it is
    failed why the handlers were given up; empty while they work
    costs  what each way cost, where it was measured
    in_lane  ranges of steps that were gathered into the lane in place
    """

    arena: Arena
    device: KernelDevice
    rows: KernelRows
    way: str
    lane: str = ""
    failed: str = ""
    costs: list[LaunchCost] = field(default_factory=list)
    launches: int = 0
    in_lane: int = 0
    restore: DeviceRestore = field(init=False)
    _registered: Buffer | None = None
    # By slot and range, the frames that hold gathered rows, and those that the next replay of a step fills.
    _staged: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict)
    _armed: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict)
    _in_lane: set[tuple[int, int, int]] = field(default_factory=set)  # of both, those that are the lane's own memory
    _is_armed: bool = False
    _in_flight: bool = False
    _words: Buffer | None = None
    _ring: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint8))

    def __post_init__(self) -> None:
        self.restore = DeviceRestore(self.arena, self.rows, self._mapped)

    def _mapped(self, byte_count: int) -> Buffer:
        """Tier 0: memory that the host fills or reads and the handlers reach in place."""
        buffer = self.device.driver.mapped_buffer(byte_count)
        self.rows.reach(buffer)
        return buffer

    def ready(self) -> bool:
        """Whether handlers gather; until they are compiled, and after they failed, the framework copies."""
        if self.failed:
            return False
        try:
            return self.rows.ready()
        except CaptureError as error:
            self._give_up(error)
            return False

    def _gather(self, items: list[RowRange]) -> bool:
        self._end_flight()  # a replay that nobody collected reads the same list
        try:
            self.rows.gather(items)
        except CaptureError as error:
            self._give_up(error)
            return False
        self.launches += 1
        return True

    def _give_up(self, error: CaptureError) -> None:
        self.failed = str(error)
        log.error("capture.handlers_failed", reason=self.failed, way="the framework copies rows from now on")

    def gathered(self) -> bool:
        """Whether the step that just ran has gathered what it was armed with; returns when that can be read."""
        self._staged.clear()
        if not self._is_armed:
            return False
        self._end_flight()
        self._staged, self._armed, self._is_armed = self._armed, {}, False
        self.launches += 1
        self.in_lane += len(self._in_lane)
        return True

    def ahead(self, ranges: Iterable[Range]) -> None:
        """Gather the ranges of a step together, so that each `copy_out` of one of them finds it in host memory."""
        wanted = self._on_device(ranges)
        if len(wanted) < 2 or not self.ready():
            return  # a single range goes into the lane without a stop
        try:
            items, staged = self._lay_out(wanted)
        except CaptureError as error:
            self._give_up(error)
            return
        if self._gather(items):
            self._staged = staged
            self.in_lane += len(self._in_lane)

    def _on_device(self, ranges: Iterable[Range]) -> list[Range]:
        """Those whose rows the arena still holds: a window may have slid on since they were announced."""
        return [item for item in ranges if self.arena.oldest(item.slot) <= item.start < item.end]

    def _lay_out(self, wanted: list[Range]) -> tuple[list[RowRange], dict[tuple[int, int, int], np.ndarray]]:
        """Where ranges go, in the lane or in tier 0, and who will look for them there."""
        self._in_lane.clear()
        token_bytes = self.rows.shape.token_bytes
        sizes = [((item.end - item.start) * token_bytes + 15) & -16 for item in wanted if item.frame is None]
        if sum(sizes) > self._ring.size:
            self._grow(sum(sizes))
        items, staged, at = [], {}, 0
        for slot, start, end, place in wanted:
            key, frame = (slot.index, start, end), place
            if frame is None:
                size = (end - start) * token_bytes
                frame = self._ring[at : at + size]
                at += (size + 15) & -16
            else:
                self._in_lane.add(key)
            items.append(self._range(slot, start, end, frame))
            staged[key] = frame
        return items, staged

    # ------------------------------------------------------------ straight into the lane

    @property
    def reaches_lane(self) -> bool:
        """Whether rows can be gathered into the lane in place."""
        return self._registered is not None and self.ready()

    def leave_lane(self) -> None:
        """What of the lane was promised to ranges is somebody else's from now on: nothing is written there, nothing looked for."""
        self._end_flight()
        for key in self._in_lane:
            self._staged.pop(key, None)
            self._armed.pop(key, None)
        self._in_lane.clear()

    def drop_gathered(self) -> None:
        """A sequence begins, maybe in the slot of one whose gathered rows found no room in the lane: nobody takes those any more."""
        self._staged.clear()

    def _end_flight(self) -> None:
        """Wait for a step that gathers its own rows."""
        if self._in_flight:
            self.device.step_event().wait()
            self._in_flight = False

    # ------------------------------------------------------------ inside a step's graph

    def recordable(self) -> str:
        """Names the gatherer that a step's graph can have inside now; "" where rows are not launched by graphs, or not by handlers."""
        if self.way != "graph" or not self.ready() or not self._has_words():
            return ""
        return self.rows.gatherer.source.digest

    def _has_words(self) -> bool:
        """Where the recorded gatherer reads what it is to do: made before anything is recorded."""
        if self._words is None:
            assert isinstance(self.device.launcher, GraphLaunch), "recorded by graphs only"
            try:
                self._words = self.device.launcher.words()
            except CaptureError as error:
                self._give_up(error)
        return self._words is not None

    def record_into_step(self, row_count: int) -> None:
        """Put the gatherer on the framework's stream, behind a step of so many rows; it reads what `arm` wrote last."""
        launcher, module = self.device.launcher, self.rows.gatherer
        assert isinstance(launcher, GraphLaunch) and self._words is not None, "armed before it is recorded"
        blocks = self.device.blocks(module, row_count * self.rows.shape.token_bytes // 512)
        launcher.record(module, blocks, self.device.driver.current_stream(), self._words)

    def arm(self, ranges: Iterable[Range]) -> bool:
        """Say what the next replay of a step gathers; False: nothing, and `ahead` gathers what there is."""
        self._end_flight()  # the last replay may still read these words
        assert self._words is not None, "what is not recordable is not armed"
        wanted = self._on_device(ranges)
        if len(wanted) > RANGES_A_LAUNCH:
            wanted = []
        try:
            items, self._armed = self._lay_out(wanted)
        except CaptureError as error:
            self._give_up(error)  # the replay to come has the gatherer still: it finds nothing to do
            items, wanted = [], []
        words = self._words.array("<u8", WORD_COUNT)
        words[:] = 0
        given = self.rows.words_for(items)
        words[: len(given)] = given
        self._in_flight, self._is_armed = True, bool(wanted)
        return self._is_armed

    def disarm(self) -> None:
        """No replay came; rows are gathered as ever."""
        self._armed, self._is_armed = {}, False

    def copy_out(self, slot: Slot, start: int, end: int, frame: np.ndarray) -> None:
        """State of [start, end) -> `frame`, as Arena.copy_out does it."""
        staged = self._staged.pop((slot.index, start, end), None)
        if staged is not None:
            if staged is not frame:
                np.copyto(frame, staged)
            return
        if not self.ready() or not self._gather([self._range(slot, start, end, frame)]):
            self.arena.copy_out(slot, start, end, frame)

    def _range(self, slot: Slot, start: int, end: int, frame: np.ndarray) -> RowRange:
        return RowRange(slot.index, start, end, frame, rows=tuple(self.arena.rows_at(slot, start)))

    def _grow(self, byte_count: int) -> None:
        buffer = self._mapped(2 * byte_count + 4096)
        assert buffer.host is not None
        self._ring = buffer.host

    def reach_lane(self, ring: np.ndarray) -> None:
        """Register the lane's ring, so that rows are gathered into it in place; says why not in `lane`."""
        try:
            self._registered = self.device.driver.register(ring)
        except CaptureError as error:
            self.lane = str(error)
            log.warning("capture.lane_not_mapped", reason=self.lane, way="rows go through tier 0")
            return
        self.rows.reach(self._registered)

    def move_lane(self, ring: np.ndarray) -> None:
        """The engine goes on in another lane: register its ring instead. Call before the old lane is closed."""
        self.leave_lane()
        old, self._registered, self.lane = self._registered, None, ""
        self.reach_lane(ring)
        if old is not None:
            self.rows.forget(old)
            self.device.driver.unregister(old)

    def close(self) -> None:
        """Let the device and the lane's memory go; call before the lane is closed."""
        self.arena.applier = None
        self.leave_lane()
        self.device.close()
        if self._registered is not None:
            self.device.driver.unregister(self._registered)
            self._registered = None


def build(arena: Arena, driver: Driver, way: str, proven: Path | None = None, *, in_steps: bool = False) -> DeviceRows:
    """Handlers for an arena.

    way     `stream`, `graph` or `executor`; `auto` measures them and takes the best
    proven  a file that says that the executor was proven on this device and driver: only then does `auto` try it, since an error
            inside a resident block takes the process's CUDA context along
    in_steps  decode steps are graphs: then `auto` takes `graph`, which is part of them and no launch at all
    Raises  CaptureError: nothing can be launched here
    """
    shape = shape_of(arena)
    if way != "auto":
        return _made(arena, driver, _WAYS[way](driver), shape, [])
    executor = proven is not None and proven.exists() and not unsupported()
    names = ["stream", "graph", *(["executor"] if executor else [])]
    launchers = {name: _WAYS[name](driver) for name in names}
    chosen, costs = _measured(arena, driver, launchers, shape)
    if in_steps and not next(cost.failed for cost in costs if cost.name == "graph"):
        chosen = "graph"
    for name, launcher in launchers.items():
        if name != chosen:
            launcher.close()
    log.info("capture.launch_chosen", way=chosen, **{f"{cost.name}_us": round(cost.ready_us, 1) for cost in costs})
    return _made(arena, driver, launchers[chosen], shape, costs)


def _made(arena: Arena, driver: Driver, launcher: Launcher, shape: RowShape, costs: list[LaunchCost]) -> DeviceRows:
    device = KernelDevice(driver, launcher)
    rows = device.rows([memory_of(group) for group in arena.groups], shape)
    made = DeviceRows(arena, device, rows, launcher.name, costs=costs)
    arena.applier = made.restore
    return made


def _measured(
    arena: Arena, driver: Driver, launchers: dict[str, Launcher], shape: RowShape
) -> tuple[str, list[LaunchCost]]:
    """Which way is best for one token's rows of one sequence, and what each cost."""
    from engine.capture import source

    module = driver.load(source.row_gatherer(shape))
    bases = constant_words(driver, [memory_of(group).address for group in arena.groups])
    frame = driver.mapped_buffer(shape.token_bytes)
    item = driver.mapped_buffer(32)
    item.array("<u8", 1)[0] = frame.address
    item.array("<u4", 6, 8)[:] = (0, 0, 1, 1, 0, 0)
    words = (bases.address, item.address, 1)
    blocks = max(1, min(-(-shape.token_bytes // (16 * shape.threads)), 3 * driver.multiprocessors))
    costs = measure(list(launchers.values()), lambda way: way.launch(module, words, blocks))
    return choose(costs).name, costs


def for_engine(arena: Arena, way: str, ring: np.ndarray, *, in_steps: bool = False) -> tuple[DeviceRows | None, str]:
    """The handlers of an engine on CUDA, or None and the reason why the framework's copies stay in charge."""
    if way == "copy":
        return None, "capture_launch is set to copy"
    if not arena.groups:
        return None, "the model has no rows, only recurrent state"
    from engine.capture.cuda_driver import CudaDriver

    try:
        driver = CudaDriver(arena.groups[0].device.index or 0)
        rows = build(arena, driver, way, driver.proof_of_executor(), in_steps=in_steps)
    except CaptureError as error:
        log.warning("capture.without_handlers", reason=str(error))
        return None, str(error)
    rows.reach_lane(ring)
    return rows, ""
