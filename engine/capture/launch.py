"""Three ways to start a handler, behind one interface: a side stream, a captured graph, the persistent executor.

Which is best depends on the device and is measured (`measure`), then chosen purely (`choose`). A ticket is done when all that the
handler wrote can be read on the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.capture.driver import Buffer, Driver, Event, Graph, Module, Stream
from engine.capture.executor import Executor
from engine.capture.source import WORD_COUNT


class Ticket(Protocol):
    """One started task."""

    def done(self) -> bool:
        """Whether its results can be read."""

    def wait(self) -> None:
        """Block until they can. Raises CaptureError if they never will."""


class Launcher(Protocol):
    """A way to start handlers."""

    name: str
    is_wide: bool  # whether a launch may have as many blocks as it asks for

    def launch(self, module: Module, words: Sequence[int], blocks: int, after: Event | None = None) -> Ticket:
        """Start a handler with its words, after an event of the step's stream if given. `blocks` is how wide it may run."""

    def close(self) -> None:
        """Wait for what was started and let everything go."""


@dataclass(slots=True)
class EventTicket:
    """Done when the event behind the launch is."""

    event: Event

    def done(self) -> bool:
        """Whether the event came."""
        return self.event.done()

    def wait(self) -> None:
        """Block until it does."""
        self.event.wait()


class SideStream:
    """A stream of its own, behind the step by an event: the step's stream never waits for a capture."""

    name = "stream"
    is_wide = True

    def __init__(self, driver: Driver) -> None:
        self._stream = driver.stream()

    def launch(self, module: Module, words: Sequence[int], blocks: int, after: Event | None = None) -> EventTicket:
        """See Launcher."""
        if after is not None:
            self._stream.wait(after)
        module.launch("run", self._stream, blocks, module.source.threads, _padded(words))
        return EventTicket(self._stream.record())

    def close(self) -> None:
        """See Launcher."""
        self._stream.synchronize()


class GraphLaunch:
    """A launch inside a captured graph: its words lie in mapped memory and are written anew before each replay.

    `record` puts the handler into a graph that the caller is capturing (a decode step of a fixed shape): replaying the step then
    starts the handler with no launch of its own. `launch` replays a graph of the handler alone.
    """

    name = "graph"
    is_wide = True

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._stream = driver.stream()
        self._captured: dict[tuple[str, int], _Captured] = {}

    def words(self) -> Buffer:
        """Room for the words of a recorded handler. Make it before the capture begins: nothing may be allocated inside."""
        return self._driver.mapped_buffer(8 * WORD_COUNT)

    def record(self, module: Module, blocks: int, stream: Stream, words: Buffer) -> None:
        """Add the handler to the graph that `stream` is capturing; write `words` anew before each replay."""
        module.launch("run_indirect", stream, blocks, module.source.threads, (words.address,))

    def launch(self, module: Module, words: Sequence[int], blocks: int, after: Event | None = None) -> EventTicket:
        """See Launcher."""
        key = module.source.digest, blocks
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = _Captured(self.words())
        if captured.last is not None:
            captured.last.wait()  # the words of the last replay are free to be written once it is over
        captured.words.array("u8", WORD_COUNT)[:] = _padded(words)
        if after is not None:
            self._stream.wait(after)
        if captured.last is None:
            # The first one is no replay: a driver that loads code lazily must not meet a kernel for the first time inside a capture.
            self.record(module, blocks, self._stream, captured.words)
        else:
            self._replay(captured, module, blocks)
        captured.last = self._stream.record()
        return EventTicket(captured.last)

    def _replay(self, captured: _Captured, module: Module, blocks: int) -> None:
        if captured.graph is None:
            side = self._driver.stream()
            self._driver.begin_graph(side)
            try:
                self.record(module, blocks, side, captured.words)
            finally:
                graph = self._driver.end_graph(side)  # a stream that goes on recording would swallow whatever comes
            captured.graph = graph
        captured.graph.launch(self._stream)

    def close(self) -> None:
        """See Launcher."""
        self._stream.synchronize()
        self._captured.clear()


@dataclass(slots=True)
class _Captured:
    """One handler's graph, the words that it reads, and its last replay."""

    words: Buffer
    graph: Graph | None = None
    last: Event | None = None


class ExecutorLaunch:
    """A task in the ring of the block that is resident already: no launch at all."""

    name = "executor"
    is_wide = False

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._operators: dict[str, int] = {}

    def launch(self, module: Module, words: Sequence[int], blocks: int, after: Event | None = None) -> Ticket:
        """See Launcher. One block works, whatever `blocks` says: keep tasks small."""
        if after is not None:
            after.wait()
        digest = module.source.digest
        if digest not in self._operators:
            self._operators[digest] = self.executor.install(module)
        return self.executor.submit(self._operators[digest], _padded(words))

    def close(self) -> None:
        """See Launcher."""
        self.executor.close()


def _padded(words: Sequence[int]) -> tuple[int, ...]:
    assert len(words) <= WORD_COUNT, f"a task has {WORD_COUNT} words"
    return (*words, *([0] * (WORD_COUNT - len(words))))


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """What one way costs. `host_us` is taken from the step's thread, `ready_us` from start to readable results."""

    name: str
    host_us: float
    ready_us: float
    failed: str = ""


def measure(launchers: list[Launcher], start: Callable[[Launcher], Ticket], rounds: int = 50) -> list[LaunchCost]:
    """Time every way on the same task, medians of `rounds`; a way that fails is kept with its reason."""
    costs = []
    for launcher in launchers:
        host, ready = [], []
        try:
            for turn in range(rounds + 3):
                began = time.perf_counter()
                ticket = start(launcher)
                started = time.perf_counter()
                ticket.wait()
                if turn >= 3:
                    host.append(started - began)
                    ready.append(time.perf_counter() - began)
        except Exception as error:  # noqa: BLE001 - whatever a driver raises, the other ways are still there
            costs.append(LaunchCost(launcher.name, 0.0, 0.0, f"{type(error).__name__}: {error}"))
            continue
        costs.append(LaunchCost(launcher.name, statistics.median(host) * 1e6, statistics.median(ready) * 1e6))
    return costs


def choose(costs: list[LaunchCost]) -> LaunchCost:
    """The way that takes least from the step's thread; of those within a tenth of it, the one that is ready first."""
    usable = [cost for cost in costs if not cost.failed]
    assert usable, "no way to launch works: " + "; ".join(f"{c.name}: {c.failed}" for c in costs)
    bar = min(cost.host_us for cost in usable) * 1.1
    return min((cost for cost in usable if cost.host_us <= bar), key=lambda cost: cost.ready_us)
