"""The persistent executor: its own source on the CPU, its ring, its lease, what happens at a swap, a stop and a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.capture import executor as executor_module
from engine.capture import source
from engine.capture.errors import CaptureError, ExecutorStuck, RingFull
from engine.capture.executor import NOTHING, Executor, ExecutorOptions
from engine.capture.nvrtc import Usage
from engine.capture.source import HandlerSource, StatePart, StateShape
from tests.engine.capture.shim_driver import ShimDriver, ShimModule

COPY = StateShape((StatePart(64, 64),), threads=64)


def until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.001)


@pytest.fixture
def executor(shim_driver: ShimDriver) -> Iterator[Executor]:
    made = Executor(shim_driver, ExecutorOptions(capacity=8, threads=64, lease_ms=50, idle_us=20_000))
    yield made
    if not made.stuck:
        made.close()


class Copies:
    """Tasks that copy one slot's 64 bytes to a place of its own."""

    def __init__(self, driver: ShimDriver, slots: int) -> None:
        self.state = driver.mapped_buffer(64 * slots)
        self.out = driver.mapped_buffer(64 * slots)
        self.bases = driver.mapped_buffer(8)
        self.bases.array("<u8", 1)[0] = self.state.address
        self.state.array("<u4", 16 * slots)[:] = np.arange(16 * slots)

    def words(self, slot: int) -> tuple[int, int, int]:
        return (self.bases.address, slot, self.out.address + 64 * slot)

    def copied(self) -> bool:
        return bool(np.array_equal(self.state.host, self.out.host))


def scaled(source_: HandlerSource, name: str) -> HandlerSource:
    """A copying operator under another name and text."""
    return HandlerSource(name, source_.text + f"\n// {name}\n", source_.threads)


def test_tasks_run_in_order_through_many_laps_of_a_small_ring(shim_driver: ShimDriver, executor: Executor) -> None:
    copies = Copies(shim_driver, 100)
    operator = executor.install(shim_driver.load(source.snapshotter(COPY)))
    tickets = []
    for slot in range(100):
        until(lambda: executor._head - executor._freed < 8 or executor.tend() or False, "room in the ring")
        tickets.append(executor.submit(operator, copies.words(slot)))
    for ticket in tickets:
        ticket.wait()
    assert copies.copied()
    finished = [ticket.finished_ns for ticket in tickets]
    assert finished == sorted(finished)
    assert executor.busy_ns > 0


def test_a_full_ring_says_so(shim_driver: ShimDriver) -> None:
    executor = Executor(shim_driver, ExecutorOptions(capacity=4, threads=64, lease_ms=50, idle_us=20_000))
    gate = threading.Event()
    executor._stream.put(lambda: gate.wait(30) and None)  # the block waits for a free multiprocessor
    for _ in range(4):
        executor.submit(NOTHING, ())
    with pytest.raises(RingFull):
        executor.submit(NOTHING, ())
    gate.set()
    executor.tend()
    until(lambda: executor.tend() or executor._freed == executor._head, "the ring to empty")
    executor.submit(NOTHING, ()).wait()
    executor.close()


def test_two_producers_share_the_ring(shim_driver: ShimDriver, executor: Executor) -> None:
    copies = Copies(shim_driver, 120)
    operator = executor.install(shim_driver.load(source.snapshotter(COPY)))

    def produce(slots: range) -> None:
        for slot in slots:
            while True:
                try:
                    executor.submit(operator, copies.words(slot)).wait()
                    break
                except RingFull:
                    time.sleep(0.001)

    producers = [threading.Thread(target=produce, args=(range(start, 120, 3),)) for start in range(3)]
    for producer in producers:
        producer.start()
    for producer in producers:
        producer.join(60)
    assert copies.copied()


def test_it_leaves_when_idle_and_comes_back_for_the_next_task(executor: Executor) -> None:
    executor.submit(NOTHING, ()).wait()
    until(lambda: not executor.running, "an idle executor to leave")
    assert executor.left_because in ("idle", "lease")
    laps = executor.laps
    executor.submit(NOTHING, ()).wait()
    until(lambda: not executor.running, "an idle executor to leave")
    assert executor.laps > laps


def test_no_stay_is_longer_than_the_lease_however_many_tasks_come(shim_driver: ShimDriver) -> None:
    executor = Executor(shim_driver, ExecutorOptions(capacity=64, threads=64, lease_ms=2, idle_us=1e6))
    until(lambda: executor.submit(NOTHING, ()).wait() or executor.laps >= 3, "three leases to end")
    assert executor.left_because == "lease"
    executor.close()


def test_a_task_posted_while_the_block_leaves_is_not_lost(shim_driver: ShimDriver) -> None:
    executor = Executor(shim_driver, ExecutorOptions(capacity=16, threads=64, lease_ms=1, idle_us=1))
    for _ in range(100):
        executor.submit(NOTHING, ()).wait()
    assert executor.laps >= 3
    executor.close()


def test_an_operator_is_replaced_while_tasks_run(shim_driver: ShimDriver, executor: Executor) -> None:
    first = source.snapshotter(COPY)
    copies = Copies(shim_driver, 200)
    operator = executor.install(shim_driver.load(first))
    done = threading.Event()

    def swap() -> None:
        number = 0
        while not done.is_set():
            number += 1
            executor.install(shim_driver.load(scaled(first, f"copy{number % 2}")), operator)

    swapper = threading.Thread(target=swap)
    swapper.start()
    for slot in range(200):
        while True:
            try:
                executor.submit(operator, copies.words(slot)).wait()
                break
            except RingFull:
                time.sleep(0.001)
    done.set()
    swapper.join(60)
    assert copies.copied(), "every task ran, with the old operator or the new one"


def test_a_task_of_a_removed_operator_fails_alone(shim_driver: ShimDriver, executor: Executor) -> None:
    operator = executor.install(shim_driver.load(source.snapshotter(COPY)))
    executor.remove(operator)
    with pytest.raises(CaptureError, match="entry was empty"):
        executor.submit(operator, ()).wait()
    executor.submit(NOTHING, ()).wait()


def test_an_operator_that_needs_too_many_registers_is_not_let_in(shim_driver: ShimDriver, executor: Executor) -> None:
    module: ShimModule = shim_driver.load(source.snapshotter(COPY))
    executor._module.usage["executor"] = Usage(104, 112, 0, 0)
    module.usage["operator_address"] = Usage(128, 0, 0, 0)
    with pytest.raises(CaptureError, match="needs 128 registers, the executor has 104"):
        executor.install(module)


def test_a_task_is_posted_from_a_stream_behind_the_step(shim_driver: ShimDriver, executor: Executor) -> None:
    copies = Copies(shim_driver, 1)
    operator = executor.install(shim_driver.load(source.snapshotter(COPY)))
    stream, gate = shim_driver.stream(), threading.Event()

    def step() -> None:
        gate.wait(30)
        copies.state.array("<u4", 16)[:] = 7

    stream.put(step)
    ticket = executor.submit_after(stream, operator, copies.words(0))
    assert not ticket.done()
    gate.set()
    ticket.wait()
    assert (copies.out.array("<u4", 16) == 7).all(), "the task saw what the step wrote"


def test_a_stop_ends_it_between_tasks_and_close_is_for_good(shim_driver: ShimDriver) -> None:
    executor = Executor(shim_driver, ExecutorOptions(capacity=8, threads=64, lease_ms=60_000, idle_us=6e7))
    executor.submit(NOTHING, ()).wait()
    assert executor.running
    executor.stop()
    assert not executor.running and executor.left_because == "stopped"
    executor.submit(NOTHING, ()).wait()
    executor.close()
    executor.close()
    with pytest.raises(CaptureError, match="closed"):
        executor.submit(NOTHING, ())


def test_one_that_does_not_leave_is_given_up(shim_driver: ShimDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor(shim_driver, ExecutorOptions(capacity=8, threads=64, lease_ms=20, idle_us=10_000))
    executor.submit(NOTHING, ()).wait()
    until(lambda: not executor.running, "an idle executor to leave")
    executor._launches += 1  # as if a launch never ended
    with pytest.raises(ExecutorStuck):
        executor.stop(timeout_s=0.05)
    assert executor.stuck
    with pytest.raises(ExecutorStuck):
        executor.submit(NOTHING, ())


def test_what_a_stuck_one_uses_is_never_freed(shim_driver: ShimDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    monkeypatch.setattr(executor_module, "_kept_for_ever", kept)
    executor = Executor(shim_driver, ExecutorOptions(capacity=8, threads=64, lease_ms=20, idle_us=10_000))
    operator = shim_driver.load(source.snapshotter(COPY))
    executor.install(operator)
    executor._give_up()
    for used in (executor._control, executor._ring, executor._table, executor._module, operator):
        assert any(known is used for known in kept), "to free it would wait for the block"
    executor.stuck = False
    executor.close()


def test_nobody_starts_it_again_while_it_is_stopped(shim_driver: ShimDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor(shim_driver, ExecutorOptions(capacity=8, threads=64, lease_ms=60_000, idle_us=6e7))
    executor.submit(NOTHING, ()).wait()
    seen: list[bool] = []
    whole = Executor.running.fget
    assert whole is not None

    def running(self: Executor) -> bool:
        if self._control_words[0] and not seen:  # a stop was asked for, and is being waited for
            other = threading.Thread(target=lambda: seen.append(self._lock.acquire(blocking=False)))
            other.start()
            other.join(30)
        return bool(whole(self))

    monkeypatch.setattr(Executor, "running", property(running))
    executor.stop()
    assert seen == [False], "the watchdog's `tend` waits until the block has left"
    monkeypatch.undo()
    executor.close()


def test_a_fork_finds_it_stopped_and_the_child_cannot_use_it(shim_driver: ShimDriver) -> None:
    executor = Executor(shim_driver, ExecutorOptions(capacity=8, threads=64, lease_ms=60_000, idle_us=6e7))
    executor.submit(NOTHING, ()).wait()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answer = b"?"
        try:
            executor.submit(NOTHING, ())
        except CaptureError:
            answer = b"refused" if not executor.running else b"running"
        finally:
            os.write(writing, answer)
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 16) == b"refused"
    os.close(reading)
    os.close(writing)
    executor.submit(NOTHING, ()).wait()
    executor.close()


def test_a_fork_lets_go_of_just_what_it_held(shim_driver: ShimDriver) -> None:
    first = Executor(shim_driver, ExecutorOptions(capacity=4, threads=32, lease_ms=20, idle_us=5_000))
    executor_module._hold_all()
    later = Executor(shim_driver, ExecutorOptions(capacity=4, threads=32, lease_ms=20, idle_us=5_000))  # meanwhile
    executor_module._let_all_go()
    for executor in (first, later):
        executor.submit(NOTHING, ()).wait()
        executor.close()


def test_a_ticket_of_one_that_is_closed_does_not_look_at_its_memory(shim_driver: ShimDriver) -> None:
    executor = Executor(shim_driver, ExecutorOptions(capacity=4, threads=32, lease_ms=20, idle_us=5_000))
    ticket = executor.submit(NOTHING, ())
    executor.close()
    completed = ticket.completed
    executor._ring_words = None  # type: ignore[assignment]  # as in a forked child
    assert ticket.done() == completed


LEFT_BEHIND = """
import atexit, sys
from pathlib import Path
from engine.capture.executor import Executor, ExecutorOptions  # registers its own end first, so that it runs last
from tests.engine.capture.shim_driver import ShimDriver
made = []
def look():
    print("resident" if made[0].running else "gone", made[0].left_because)
atexit._clear()
from engine.capture import executor
atexit.register(look)
atexit.register(executor._close_all)
made.append(Executor(ShimDriver(Path(sys.argv[1])), ExecutorOptions(capacity=4, threads=32, lease_ms=60_000, idle_us=6e7)))
made[0].submit(0, ()).wait()
raise RuntimeError("the engine failed")
"""


@pytest.mark.process
def test_an_exception_that_ends_the_process_leaves_no_block_resident(shim_directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND, str(shim_directory)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "the engine failed" in done.stderr
    assert done.stdout.split() == ["gone", "stopped"]


def test_another_kind_of_processor_is_refused(shim_driver: ShimDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(CaptureError, match="program order"):
        Executor(shim_driver)
