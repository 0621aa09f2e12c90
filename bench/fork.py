"""What does a fork of a session cost, against copying the session?

Question  Bytes on disk and time of a fork of a 4k session, and time to the first token of the fork's first turn.
Regime    Demo model, one engine; a session of SESSION_TOKENS is computed, drained and synced; then it is forked many times over
          the HTTP API, and one fork asks for its next turn. Bytes: growth of all files of the data directory (blocks in use), over the
          number of forks, once the gateway has written the last of them.
Baseline  copying the session: the bytes that the store and the session table grew by when it was made; time to copy a file of as many bytes
          beside it, with fdatasync. For the first turn: the same turn at a session that has nothing to begin with (computed whole).
Unit      bytes, ms; ratio is copy / fork. Wanted: at least 1,000 for `bytes 4k`.
Seed      --seed
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from bench import report
from bench.driver import System, request, system, wait_for
from bench.sse import Answer, StreamError
from gateway.sessions import SessionFile
from tiers import keeper_client

SESSION_TOKENS = 4096
TURN_TOKENS = 8
WANTED = {"bytes 4k": ">= 1000"}


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    count = 200 if options.quick else 1000
    rows = report.Report("fork", options)
    prompt = report.random_tokens(draw, SESSION_TOKENS - 2)
    settings = {"engine": {"threads": options.threads}}
    with system(options.model, name="fork", engines=1, settings=settings) as running:
        empty = disk_bytes(running.paths.data_dir)
        cold_ms = 1000 * ask(running, report.random_tokens(draw, SESSION_TOKENS + TURN_TOKENS), "").first_token_s
        keeper_client.drain(running.paths.keeper_socket, sync=True, timeout_s=60)
        before = disk_bytes(running.paths.data_dir)
        ask(running, prompt, "trunk")
        keeper_client.drain(running.paths.keeper_socket, sync=True, timeout_s=60)
        made = disk_bytes(running.paths.data_dir)
        copy_bytes = made - before
        copy_ms = copied(running.paths.data_dir, copy_bytes)
        times = [timed_fork(running, index) for index in range(count)]
        wait_for("the last fork on disk", lambda: written(running) == count + 1, 60.0)
        fork_bytes = max(1.0, (disk_bytes(running.paths.data_dir) - made) / count)
        tokens = running.get("/v1/sessions/fork-0?tokens=true")["token_ids"]
        warm = ask(running, tokens + report.random_tokens(draw, TURN_TOKENS), "fork-0")
    rows.details = {"forks": count, "fork_ms": times, "empty_bytes": empty, "turn": warm.concordia}
    rows.add(report.Row("bytes 4k", fork_bytes, "B", copy_bytes, copy_bytes / fork_bytes, WANTED["bytes 4k"]))
    fork_ms = report.median(times)
    rows.add(report.Row("time 4k", fork_ms, "ms", copy_ms, copy_ms / fork_ms))
    turn_ms = 1000 * warm.first_token_s
    rows.add(report.Row("first turn 4k", turn_ms, "ms", cold_ms, cold_ms / turn_ms))
    rows.finish()


def timed_fork(running: System, index: int) -> float:
    """One fork over the API, in ms."""
    began = time.perf_counter()
    status, _, answer = running.call("POST", "/v1/sessions/trunk/fork", {"session_id": f"fork-{index}"})
    if status != 200:
        raise StreamError(f"fork {index}: {status} {answer}")
    return 1000 * (time.perf_counter() - began)


def written(running: System) -> int:
    """Sessions that are on disk."""
    file = SessionFile(running.paths.sessions)
    try:
        return len(file.all())
    finally:
        file.close()


def disk_bytes(directory: Path) -> int:
    """Bytes in use by all files below."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def copied(directory: Path, byte_count: int) -> float:
    """Copy a file of so many bytes beside itself; ms of the copy alone, on the disk when it ends."""
    source, target = directory / "copy.source", directory / "copy.target"
    data = os.urandom(1 << 20)
    with open(source, "wb") as file:
        for _ in range(-(-byte_count // len(data))):
            file.write(data)
    began = time.perf_counter()
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while piece := reader.read(1 << 20):
            writer.write(piece)
        writer.flush()
        os.fdatasync(writer.fileno())
    took = time.perf_counter() - began
    source.unlink()
    target.unlink()
    return 1000 * took


def ask(running: System, prompt: list[int], session: str) -> Answer:
    headers = {"X-Session-Id": session} if session else {}
    answer = running.stream("/v1/completions", request(prompt, 2), headers=headers, timeout_s=280.0)
    if not answer.done or answer.error:
        raise StreamError(answer.describe())
    return answer


if __name__ == "__main__":
    main()
