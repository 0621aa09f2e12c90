"""Journals onto the disk: what a loss of power may take of them. Stage: deliver; one thread beside the event loop.

`process`: never. `interval` and `turn`: what was written is synced `tiers.sync_interval_ms` later, names of new files included; `turn`
also syncs a stream's journal before its answer ends (`gateway/durability.py`). A sync that failed has marked its pages clean, so the next
one writes the file's bytes again first. Source: docs/log-format.md, "Stream journals"
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from gateway import metrics
from tiers.pages import start_writing
from tiers.settings import Durability

log = structlog.get_logger()


class JournalSync:
    """Owner of what isn't on the disk yet; `run` is its task. Journals tell it what they write (`written`), on the event loop."""

    def __init__(self, directory: Path, *, durability: Durability = "process", interval_ms: int = 1000) -> None:
        self._directory = directory
        self._interval_s = interval_ms / 1000
        self.is_on = durability != "process"
        self._thread = ThreadPoolExecutor(1, "journal-sync")
        self._unsynced: dict[Path, float] = {}  # since when
        self._is_renamed = False  # a file has a new name since the directory was synced
        self._failed: set[Path] = set()  # of the thread: the last sync of these failed
        self._names_failed = False  # of the thread: the directory's did
        self._told = False

    def written(self, path: Path, *, is_new: bool) -> None:
        """Bytes were given to the kernel; `is_new`: by a file that it has made."""
        if self.is_on:
            self._unsynced.setdefault(path, time.monotonic())
            self._is_renamed |= is_new

    async def run(self) -> None:
        """Sync what was written, every interval, for ever."""
        while self.is_on:
            await asyncio.sleep(self._interval_s)
            await self.sync()

    async def sync(self, paths: Iterable[Path] | None = None) -> bool:
        """Have these journals (None: all) on the disk when it returns; False if the disk refused, then it is tried again by `run`."""
        if not self.is_on:
            return True
        wanted = list(self._unsynced) if paths is None else list(paths)
        since = {path: self._unsynced.pop(path) for path in wanted if path in self._unsynced}
        is_renamed, self._is_renamed = self._is_renamed, False
        # One thread: what an earlier call has in hand is done before.
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._sync, wanted, is_renamed)
        try:
            failed, is_renamed = await asyncio.shield(work)
        except asyncio.CancelledError:
            self._unsynced = since | self._unsynced
            self._is_renamed |= is_renamed
            raise
        self._is_renamed |= is_renamed
        for path in failed:
            self._unsynced[path] = since.get(path, time.monotonic())
        now = time.monotonic()
        metrics.journal_unsynced_ms.set(1000 * max((now - at for at in self._unsynced.values()), default=0.0))
        return not failed and not is_renamed

    def close(self) -> None:
        """Sync once more, and end the thread."""
        if self.is_on:
            self._thread.submit(self._sync, list(self._unsynced), self._is_renamed).result()
        self._thread.shutdown()

    # ------------------------------------------------------------ the thread

    def _sync(self, paths: list[Path], is_renamed: bool) -> tuple[list[Path], bool]:
        """What couldn't be synced: journals, and whether the directory couldn't."""
        if len(paths) > 1:
            for path in paths:
                self._start(path)
        failed = [path for path in paths if not self._sync_one(path)]
        if is_renamed or self._names_failed:  # or a call before this one has failed at it: nobody's name is certain
            is_renamed = not self._attempt(self._directory, os.O_RDONLY | os.O_DIRECTORY, os.fsync)
            self._names_failed = is_renamed
        if not failed and not is_renamed:
            self._told = False
        return failed, is_renamed

    def _start(self, path: Path) -> None:
        """Let the disk take many journals side by side."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        start_writing(file)
        os.close(file)

    def _sync_one(self, path: Path) -> bool:
        again = path in self._failed
        done = self._attempt(path, os.O_RDWR, _write_again) if again else True
        done = done and self._attempt(path, os.O_RDONLY, os.fdatasync)
        (self._failed.discard if done else self._failed.add)(path)
        return done

    def _attempt(self, path: Path, flags: int, act: object) -> bool:
        try:
            file = os.open(path, flags | os.O_CLOEXEC)
        except FileNotFoundError:
            return True  # deleted meanwhile
        except OSError as error:
            return self._tell(path, error)
        try:
            act(file)  # type: ignore[operator]
        except OSError as error:
            return self._tell(path, error)
        finally:
            os.close(file)
        return True

    def _tell(self, path: Path, error: OSError) -> bool:
        metrics.journal_sync_failures.inc()
        if not self._told:  # once a trouble, not once a journal
            self._told = True
            log.error(
                "deliver.journal_unsynced", path=str(path), error=str(error),
                hint="answers go on; a loss of power may take what isn't on the disk. It is tried again",
            )  # fmt: skip
        return False


def _write_again(file: int) -> None:
    """Make all pages of a file dirty again, with the bytes that they have. A journal only grows, so nothing of it is undone."""
    size, at = os.fstat(file).st_size, 0
    while at < size:
        data = os.pread(file, min(1 << 20, size - at), at)
        if not data:
            return
        os.pwrite(file, data, at)
        at += len(data)
