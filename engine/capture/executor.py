"""The host's side of the persistent executor: the ring of tasks, the operator table, the lease and its watchdog.

Any thread submits (one lock); tasks run in the order of their positions. The resident block leaves after its lease or when idle,
and is started again while tasks wait: two launches follow each other on one stream, so there is never a second one. It can always
be stopped: at exit, before a fork, at an error. Memory is mapped, and 8-byte stores are published in program order: x86 only,
elsewhere the constructor refuses. Layout and protocol: docs/cuda.md, kernels/executor.cu.
"""

from __future__ import annotations

import atexit
import os
import platform
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from engine.capture import source
from engine.capture.driver import Driver, Module, Stream
from engine.capture.errors import CaptureError, ExecutorStuck, RingFull

log = structlog.get_logger()

TASK_WORDS = 16  # state, operator, 12 words, result, finished_ns
_STATE, _OPERATOR, _WORDS, _RESULT, _FINISHED = 0, 1, 2, 14, 15
_POSTED, _DONE = 1, 3
# Words of the control page.
_STOP, _LEASE, _IDLE, _POLL = 0, 1, 2, 3
_ALIVE, _POSITION, _LEFT, _HEARTBEAT, _BUSY, _STARTED, _LAPS = 16, 17, 18, 19, 20, 21, 22
_CONTROL_WORDS = 32
_REASONS = {0: "", 1: "idle", 2: "lease", 3: "stopped"}
_RESULTS = {1: "the operator's entry was empty when the task began"}
_GRACE_S = 2.0
NOTHING = 0  # operator that does nothing


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """Bounds of the resident block.

    lease_ms  longest stay: what waits for the whole device waits this long plus one task, at most
    idle_us   it leaves after this long without a task
    poll_ns   pause between two looks at the ring
    """

    capacity: int = 256
    operators: int = 64
    threads: int = 256
    lease_ms: float = 5.0
    idle_us: float = 300.0
    poll_ns: int = 200


def unsupported() -> str:
    """Why this machine can have no executor; "" if it can."""
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        return ""
    return f"the executor's ring is published by stores in program order, which {machine} does not keep; launch by stream or graph"


class TaskTicket:
    """One task of the ring."""

    __slots__ = ("_executor", "completed", "finished_ns", "position", "result")

    def __init__(self, executor: Executor, position: int) -> None:
        self._executor = executor
        self.position = position
        self.completed = False
        self.result = 0
        self.finished_ns = 0

    def done(self) -> bool:
        """Whether the task ran; brings the executor back if it left too early."""
        if not self.completed:
            self._executor.tend()
        return self.completed

    def wait(self) -> None:
        """Block until it ran. Raises ExecutorStuck, or CaptureError if it could not run."""
        pause = 0.0
        while not self.done():
            self._executor.check()
            time.sleep(pause)
            pause = min(2e-4, pause + 1e-6)
        if self.result:
            raise CaptureError(f"task {self.position}: {_RESULTS.get(self.result, f'result {self.result}')}")


class Executor:
    """One persistent executor on one device."""

    def __init__(self, driver: Driver, options: ExecutorOptions | None = None) -> None:
        if reason := unsupported():
            raise CaptureError(reason)
        self.options = options or ExecutorOptions()
        assert self.options.capacity & (self.options.capacity - 1) == 0, "capacity is a power of two"
        self._driver = driver
        self._module = driver.load(source.executor(self.options.threads))
        self._stream = driver.stream()
        self._control = driver.mapped_buffer(8 * _CONTROL_WORDS)
        self._ring = driver.mapped_buffer(8 * TASK_WORDS * self.options.capacity)
        self._table = driver.mapped_buffer(8 * self.options.operators)
        assert self._control.host is not None and self._ring.host is not None and self._table.host is not None
        self._control_words = self._control.host.data.cast("B").cast("Q")
        self._ring_words = self._ring.host.data.cast("B").cast("Q")
        self._table_words = self._table.host.data.cast("B").cast("Q")
        self._lock = threading.RLock()
        self._tickets: list[TaskTicket | None] = [None] * self.options.capacity
        self._modules: list[Module | None] = [None] * self.options.operators
        self._head = self._freed = self._launches = 0
        self._watchdog: threading.Thread | None = None
        self._wake = threading.Event()
        self._quit = threading.Event()
        self._closed = False
        self.stuck = False
        for slot in range(self.options.capacity):
            self._ring_words[slot * TASK_WORDS] = slot * 4
        self._set_bounds()
        self._install_first()
        _live.add(self)

    # ------------------------------------------------------------ operators

    def install(self, module: Module, operator: int | None = None) -> int:
        """Put a handler into the table, in place of `operator` if given; returns its number. Tasks that begin after it run it.

        Raises  CaptureError: the handler needs more registers than the resident block was started with; launch it another way
        """
        self._check_registers(module)
        address = self._address_of(module, "operator_address", 1)[0]
        with self._lock:
            if operator is None:
                operator = self._free_entry()
            old = self._modules[operator]
            self._modules[operator] = module
            self._table_words[operator] = address
        if old is not None:
            # The old code may still be running; it must not be unloaded before the ring has moved past it.
            self.quiesce()
        return operator

    def remove(self, operator: int) -> None:
        """Empty an entry, and wait until nothing runs it."""
        with self._lock:
            self._table_words[operator] = 0
        self.quiesce()
        self._modules[operator] = None

    def quiesce(self) -> None:
        """Return when every task submitted so far is over."""
        self.submit(NOTHING, ()).wait()

    def _free_entry(self) -> int:
        for operator in range(1, self.options.operators):
            if self._modules[operator] is None and not self._table_words[operator]:
                return operator
        raise CaptureError(f"all {self.options.operators} operators are in use; remove one, or raise `operators`")

    def _check_registers(self, module: Module) -> None:
        own = self._module.usage.get("executor")
        need = module.usage.get("operator_address")
        if own and need and need.registers > own.registers:
            raise CaptureError(
                f"{module.source.name} needs {need.registers} registers, the executor has {own.registers}; launch it on a stream"
            )

    def _install_first(self) -> None:
        self._table_words[NOTHING] = self._address_of(self._module, "first_operators", 2)[0]

    def _address_of(self, module: Module, kernel: str, count: int) -> list[int]:
        out = self._driver.mapped_buffer(8 * count)
        stream = self._driver.stream()
        module.launch(kernel, stream, 1, 32, (out.address,))
        stream.synchronize()
        return [int(address) for address in out.array("u8", count)]

    # ------------------------------------------------------------ tasks

    def submit(self, operator: int, words: Sequence[int]) -> TaskTicket:
        """Post a task. Raises RingFull (wait for one to be done), ExecutorStuck."""
        with self._lock:
            ticket, base = self._claim(operator, words)
            # Published last: a block that sees it sees the words.
            self._ring_words[base + _STATE] = ticket.position * 4 + _POSTED
            self._run()
        return ticket

    def submit_after(self, stream: Stream, operator: int, words: Sequence[int]) -> TaskTicket:
        """Post a task from a stream: it starts when what is on the stream by now is over, with no host in between."""
        with self._lock:
            ticket, base = self._claim(operator, words)
            state = ticket.position * 4 + _POSTED
            self._module.launch("post_task", stream, 1, 1, (self._ring.address + 8 * base, state))
            self._run()
        return ticket

    def _claim(self, operator: int, words: Sequence[int]) -> tuple[TaskTicket, int]:
        self.check()
        self._reap()
        position = self._head
        slot = position % self.options.capacity
        base = slot * TASK_WORDS
        if position - self._freed >= self.options.capacity:
            raise RingFull(f"{self.options.capacity} tasks wait")
        ring = self._ring_words
        ring[base + _OPERATOR] = operator
        for index, word in enumerate(words):
            ring[base + _WORDS + index] = word
        ticket = TaskTicket(self, position)
        self._tickets[slot] = ticket
        self._head = position + 1
        return ticket, base

    def _reap(self) -> None:
        """Complete tickets in order, and free their places."""
        ring, capacity = self._ring_words, self.options.capacity
        while self._freed < self._head:
            position, slot = self._freed, self._freed % capacity
            base = slot * TASK_WORDS
            if ring[base + _STATE] != position * 4 + _DONE:
                return
            ticket = self._tickets[slot]
            if ticket is not None:
                ticket.result, ticket.finished_ns = ring[base + _RESULT], ring[base + _FINISHED]
                ticket.completed = True
            self._tickets[slot] = None
            ring[base + _STATE] = (position + capacity) * 4
            self._freed = position + 1

    def tend(self) -> None:
        """Complete what is done, and bring the executor back if tasks wait for one that left."""
        with self._lock:
            if self._closed:  # in a forked child the ring's memory may not even be there
                return
            self._reap()
            if self._freed < self._head and not self.stuck:
                self._run()

    # ------------------------------------------------------------ the resident block

    @property
    def running(self) -> bool:
        """Whether a launch has not left yet."""
        return self._launches > self._control_words[_LAPS]

    @property
    def left_because(self) -> str:
        """Why the last one left: idle, lease or stopped; empty if none did yet."""
        return _REASONS[self._control_words[_LEFT]]

    @property
    def laps(self) -> int:
        """How often it was launched and left."""
        return int(self._control_words[_LAPS])

    @property
    def busy_ns(self) -> int:
        """Device time spent inside tasks."""
        return int(self._control_words[_BUSY])

    def check(self) -> None:
        """Raises ExecutorStuck, or CaptureError after `close`."""
        if self.stuck:
            raise ExecutorStuck("the executor is past its lease and does not leave; capture goes on by a side stream")
        if self._closed:
            raise CaptureError("the executor is closed")

    def _run(self) -> None:
        if self.running:
            return
        self._control_words[_STOP] = 0
        self._launches += 1
        arguments = (
            self._control.address,
            self._ring.address,
            self.options.capacity - 1,
            self._table.address,
            self.options.operators,
        )
        self._module.launch("executor", self._stream, 1, self.options.threads, arguments)
        self._watch()

    def _set_bounds(self) -> None:
        self._control_words[_LEASE] = int(self.options.lease_ms * 1e6)
        self._control_words[_IDLE] = int(self.options.idle_us * 1e3)
        self._control_words[_POLL] = self.options.poll_ns

    def stop(self, timeout_s: float = _GRACE_S) -> None:
        """Make the block leave at the next task's end; posted tasks wait for the next start. Raises ExecutorStuck."""
        with self._lock:  # else the watchdog would start it again for the tasks that wait, and take the stop back
            self._control_words[_STOP] = 1
            deadline = time.monotonic() + timeout_s + self.options.lease_ms / 1e3
            while self.running:
                if time.monotonic() > deadline:
                    self._give_up()
                    self.check()
                time.sleep(1e-4)

    def close(self) -> None:
        """Stop for good. Tasks that were not run stay undone."""
        if self._closed:
            return
        with self._lock:
            if not self.stuck:
                self.stop()
            self._reap()
            self._closed = True
        self._quit.set()
        self._wake.set()
        if self._watchdog is not None and self._watchdog is not threading.current_thread():
            self._watchdog.join()
        _live.discard(self)

    # ------------------------------------------------------------ watchdog

    def _watch(self) -> None:
        self._wake.set()
        if self._watchdog is None:
            self._watchdog = threading.Thread(target=self._guard, name="capture-watchdog", daemon=True)
            self._watchdog.start()

    def _guard(self) -> None:
        """Complete tickets nobody waits for, restart an executor that left with tasks waiting, notice one that does not leave."""
        lease_s, launch, resident_since = self.options.lease_ms / 1e3, 0, 0.0
        while not self._closed and not self.stuck:
            if not self.running and self._freed == self._head:
                self._wake.wait(1.0)
                self._wake.clear()
                continue
            if self._quit.wait(min(lease_s, 0.05)):
                return
            self.tend()
            now = time.monotonic()
            if not (self.running and self._control_words[_ALIVE]) or launch != self._launches:
                # Not resident yet, however long its launch waits for a free multiprocessor.
                launch, resident_since = self._launches, now
                continue
            overdue_s = now - resident_since - lease_s
            if overdue_s > _GRACE_S:
                self._control_words[_STOP] = 1
            if overdue_s > 2 * _GRACE_S:
                self._give_up()

    def _give_up(self) -> None:
        self.stuck = True
        # Its block may still be resident and use them; to free pinned memory or unload code would wait for it for ever.
        _kept_for_ever.extend([self._control, self._ring, self._table, self._module, *self._modules])
        log.error(
            "capture.executor_stuck",
            position=self._control_words[_POSITION],
            launches=self._launches,
            left=self._control_words[_LAPS],
            heartbeat_ns=self._control_words[_HEARTBEAT],
        )


_live: weakref.WeakSet[Executor] = weakref.WeakSet()
_held: list[Executor] = []  # while a fork is under way; others may be made or let go of meanwhile
_kept_for_ever: list[Any] = []  # of executors that are stuck


def _hold_all() -> None:
    """Before a fork: no executor is resident, and none starts until the fork is over."""
    _held.extend(_live)
    for executor in _held:
        executor._lock.acquire()
        try:
            executor.stop()
        except CaptureError:
            continue


def _let_all_go() -> None:
    while _held:
        _held.pop()._lock.release()


def _disown_all() -> None:
    """In a forked child the device is not ours: whatever the parent had is out of reach."""
    for executor in [*_live, *_held]:
        executor._closed = True
    # Not freed either: the driver's memory and code are the parent's.
    _kept_for_ever.extend(_live)
    _let_all_go()
    _live.clear()


def _close_all() -> None:
    for executor in list(_live):
        try:
            executor.close()
        except CaptureError:
            continue


atexit.register(_close_all)
os.register_at_fork(before=_hold_all, after_in_parent=_let_all_go, after_in_child=_disown_all)
