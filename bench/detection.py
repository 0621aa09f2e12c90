"""How soon does the host agent know that an engine is dead, or hung, and is it ever wrong?

Question  Death: SIGKILL of a process with touched memory until its watcher knows. Hang: SIGSTOP until the verdict. False alarms: engines
          that beat beside busy loops on every core, for minutes.
Regime    The host agent's own watch (`ops.host.EngineWatch`) over processes with a status page, no model; alone, but for the noise.
Baseline  Death: a pidfd on the same process (the kernel tells it after it has freed the memory). Hang: the floor for an engine that is
          blocked, `host.hang_floor_ms`. False alarms: looks at engines that were late by more than 100 ms.
Unit      ms, and a count; ratio is baseline / ours. Wanted: 10 ms for a death with 2 GB, 250 ms for a hang, no false alarm.
Seed      --seed (not used: nothing is drawn)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from bench import report, scratch
from ops.host import EngineWatch
from ops.settings import HostSettings
from tiers.paths import Paths

TOUCHED_BYTES = 2 << 30
VICTIM = """
import sys, time
from pathlib import Path
from engine.status_page import FIRST_STEPS, StatusPage
page = StatusPage.create(Path(sys.argv[1]), 1)
memory = bytearray(int(sys.argv[2]))
memory[::4096] = b"x" * len(memory[::4096])
page.set_state("ready")
for _ in range(FIRST_STEPS):
    page.count_step()
while True:
    page.count_step()
    time.sleep(0.01)
"""


def main() -> None:
    options = report.arguments(__doc__)
    repeats = 3 if options.quick else 15
    noise_s = 20.0 if options.quick else 600.0
    rows = report.Report("detection", options)
    with scratch.directory("detection") as directory:
        paths = Paths.at(directory / "data", directory / "lanes").make()
        deaths = [asyncio.run(one_death(paths)) for _ in range(repeats)]
        hangs = [asyncio.run(one_hang(paths)) for _ in range(repeats)]
        alarms, late = asyncio.run(false_alarms(paths, noise_s))
    rows.details = {"deaths_ms": deaths, "hangs_ms": hangs, "noise_s": noise_s, "late_looks": late}
    death, pidfd = (report.median([pair[index] for pair in deaths]) for index in (0, 1))
    rows.add(report.Row("death, 2 GB touched", death, "ms", pidfd, pidfd / death, "value <= 10"))
    hang, floor = report.median(hangs), float(HostSettings().hang_floor_ms)
    rows.add(report.Row("hang", hang, "ms", floor, floor / hang, "value <= 250"))
    rows.add(
        report.Row(f"false alarms in {noise_s:g} s of noise", alarms, "count", late, 1.0 if not alarms else 0.0, "0")
    )
    rows.finish()


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone afterwards, whatever becomes of the measurement."""
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def watched(paths: Paths, name: str, touched: int) -> Iterator[tuple[subprocess.Popen[bytes], EngineWatch]]:
    """A process with so much memory, and its watch."""
    with running([sys.executable, "-c", VICTIM, str(paths.status(name)), str(touched)]) as process:
        watch = EngineWatch(name, 1, process.pid, paths, HostSettings())
        try:
            yield process, watch
        finally:
            watch.close()


async def one_death(paths: Paths) -> tuple[float, float]:
    """Milliseconds until the watch knew, and until the pidfd did."""
    with watched(paths, "e0", TOUCHED_BYTES) as (process, watch):
        assert await watch.wait_ready()
        down = asyncio.create_task(watch.wait_down())
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        process.send_signal(signal.SIGKILL)
        await down
        known_ms = 1000 * (time.perf_counter() - began)
        await watch.wait_gone(30.0)
        return known_ms, 1000 * (time.perf_counter() - began)


async def one_hang(paths: Paths) -> float:
    """Milliseconds from SIGSTOP to the certainty."""
    with watched(paths, "e0", 1 << 20) as (process, watch):
        assert await watch.wait_ready()
        down = asyncio.create_task(watch.wait_down())
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        process.send_signal(signal.SIGSTOP)
        verdict = await down
        known_ms = 1000 * (time.perf_counter() - began)
        assert verdict.reason == "hung", verdict
        await watch.wait_gone(30.0)
        return known_ms


async def false_alarms(paths: Paths, noise_s: float) -> tuple[int, int]:
    """Engines that were declared dead beside busy loops, and how often one was late by more than 100 ms."""
    late = 0
    with contextlib.ExitStack() as all_of_them:
        watches = [all_of_them.enter_context(watched(paths, f"e{index}", 1 << 20))[1] for index in range(2)]
        for _ in range(3 * (os.cpu_count() or 1)):
            all_of_them.enter_context(running([sys.executable, "-c", "while True: pass"]))
        for watch in watches:
            assert await watch.wait_ready()
        downs = [asyncio.create_task(watch.wait_down()) for watch in watches]
        end = time.monotonic() + noise_s
        while time.monotonic() < end:
            await asyncio.sleep(0.05)
            late += sum(watch._page is not None and watch._page.beat_age_ms() > 100 for watch in watches)
        alarms = sum(down.done() for down in downs)
        for down in downs:
            down.cancel()
        return alarms, late


if __name__ == "__main__":
    main()
