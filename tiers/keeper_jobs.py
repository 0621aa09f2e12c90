"""Compaction, shrinking and copying as jobs: when one begins, and its slices between two drains. Stage *compact*; the keeper's thread.

Source: docs/log-format.md
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import structlog

from tiers import late_keys
from tiers.compaction import (
    EVICT_FROM,
    GRACE_S,
    Compaction,
    damaged_bases,
    plan_abandoned,
    plan_folds,
    sequences_of,
    tenant_bytes,
)
from tiers.drain import Drain
from tiers.errors import TierError
from tiers.shrink import Duplicate, Shrink

log = structlog.get_logger()

JOB_SLICE_S = 0.02  # of compaction between two looks at the lanes and the socket
JOB_PAUSE_S = 0.005  # between slices of what was asked for
BACKGROUND_PAUSE_S = 0.06
BASES_LOOKED_AT = 1024  # in one compaction interval: some ms
COPY_ORPHAN_S = 60.0
COPY_SILENT_S = 5.0  # who waits for a copy asks ten times a second
COLLECT_EVERY = 10  # background compactions fold each time, and collect once in so many: that looks at every base


class Busy(TierError):
    """The keeper does something else that excludes this."""

    hint = "Wait until it is done, then ask again"


class Job:
    """A compaction or a copy in hand: advanced in slices, looked at by number."""

    def __init__(
        self, number: int, compaction: Compaction | Shrink, background: bool, shrink: Shrink | None = None
    ) -> None:
        self._what = "copy" if isinstance(compaction, Shrink) else "compact"
        self.number = number
        self.background = background
        self.finished = False
        self.error = ""
        self._now: Compaction | Shrink = compaction
        self._counts: Counter[str] = Counter()
        self._steps = self._run(compaction, shrink)
        self._began = time.monotonic()

    def _run(self, compaction: Compaction | Shrink, shrink: Shrink | None) -> Generator[None, None, None]:
        yield from compaction.run()
        if shrink is not None:
            self._counts = compaction.progress.counts
            self._now = shrink
            yield from shrink.run()

    def advance(self) -> None:
        """Work for JOB_SLICE_S at most, apart from the transaction in hand."""
        until = time.monotonic() + JOB_SLICE_S
        try:
            while time.monotonic() < until:
                next(self._steps)
                if self._now.progress.phase == "wait" or self._now.progress.is_paced:
                    return
        except StopIteration:
            self.finished = True
            log.info(f"{self._what}.done", s=round(time.monotonic() - self._began, 2), **self.state()["counts"])
        except (TierError, OSError) as error:
            self.finished, self.error = True, str(error)
            log.warning(f"{self._what}.stopped", error=str(error))

    def cancel(self, why: str = "another compaction was asked for") -> None:
        """Stop where it is; what a compaction has done stays."""
        self._steps.close()
        self.finished, self.error = True, why

    def state(self) -> dict[str, Any]:
        """For the control socket."""
        at = self._now.progress
        counts = dict(self._counts + at.counts) if at.counts is not self._counts else dict(at.counts)
        return {
            "id": self.number, "phase": at.phase, "done": at.done, "total": at.total, "counts": counts,
            "finished": self.finished, "error": self.error, "background": self.background,
        }  # fmt: skip


class Jobs:
    """Compactions, one at a time: begun on request, or in the background when it is time. The keeper calls `work` between drains."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._job: Job | None = None
        self._copy: Job | None = None  # beside compactions: it may take hours
        self._copy_asked_at = 0.0
        self._number = secrets.randbits(40)  # who waits for the job of a keeper that died isn't told of another one's
        self._aged_at = -1e9
        self._looked_at = b""  # key of the last base that was looked at
        self._collected_at = time.monotonic()
        self._compacted_at = time.monotonic()

    @property
    def idle(self) -> bool:
        """Whether no job is in hand."""
        return self._is_free and (self._copy is None or self._copy.finished)

    @property
    def _is_free(self) -> bool:
        """Whether no compaction is in hand."""
        return self._job is None or self._job.finished

    def state(self) -> dict[str, Any] | None:
        """Of the newest job, for the control socket; None if there was none."""
        return self._job.state() if self._job is not None else None

    def hurry(self) -> None:
        """The budget is used up: look for something to compact a second from now."""
        if self._is_free:
            self._compacted_at = min(self._compacted_at, time.monotonic() - self._drain.settings.compact_interval_s + 1)

    def pause_s(self) -> float:
        """Between two slices of the job in hand."""
        asked = not self._is_free and self._job is not None and not self._job.background
        asked = asked or (self._copy is not None and not self._copy.finished)
        return JOB_PAUSE_S if asked else BACKGROUND_PAUSE_S

    def work(self) -> None:
        """A slice of the job in hand; a new one when it is time."""
        self._work_on_copy()
        if self._job is not None and not self._is_free:
            self._job.advance()
            if self._job.finished and not self._job.background:
                self._compacted_at = (
                    time.monotonic()
                )  # whoever asked for it sees that it is done before the next one begins
            return
        interval = self._drain.settings.compact_interval_s
        if not interval or time.monotonic() - self._compacted_at < interval:
            return
        self._compacted_at = time.monotonic()
        try:
            self.look_at_bases()
            grows = self._drain.grows_by_snapshot()
            with self._drain.store().snapshot() as view:
                unscrubbed, unsealed = late_keys.is_unscrubbed(view), late_keys.marked(view)
            shrink = grows or unscrubbed
            if shrink or unsealed or self.wants_compaction():
                self.start(self._drain.settings.compact_after_s, GRACE_S, background=True, shrink=shrink)
        except TierError as error:
            log.warning("compact.postponed", error=str(error))

    def look_at_bases(self) -> None:
        """Read the next BASES_LOOKED_AT bases, and make the damaged ones again. Raises StoreFailed."""
        with self._drain.store().snapshot() as view:
            keys = [key for key, _ in view.scan_raw("bases", self._looked_at, BASES_LOOKED_AT)]
            damaged = damaged_bases(view, self._looked_at, BASES_LOOKED_AT)
        self._looked_at = keys[-1] if len(keys) == BASES_LOOKED_AT else b""
        if damaged:
            self._drain.mend_bases(damaged)

    def start(
        self, settle_s: float, grace_s: float, *, dry_run: bool = False, background: bool = False, shrink: bool = False
    ) -> Job:
        """Begin a compaction; one in the background makes room for what is asked for. Raises Busy, StoreFailed."""
        if self._job is not None and not self._is_free:
            if not self._job.background:
                raise Busy(f"compaction {self._job.number} is running")
            self._job.cancel()
        self._number += 1
        budget = self._drain.budget()
        collect = (
            not background
            or time.monotonic() - self._collected_at >= COLLECT_EVERY * self._drain.settings.compact_interval_s
        )
        if collect:
            self._collected_at = time.monotonic()
        compaction = Compaction(
            self._drain, settle_s=settle_s, grace_s=grace_s, budget=budget, dry_run=dry_run, collect=collect
        )
        self._job = Job(self._number, compaction, background, Shrink(self._drain) if shrink and not dry_run else None)
        return self._job

    def cancel(self, number: int) -> None:
        """End the compaction of that number if it is still in hand; what it has done stays."""
        if self._job is not None and not self._is_free and self._job.number == number:
            self._job.cancel("it was cancelled")

    def start_copy(self, target: Path, limit_bytes_s: float) -> Job:
        """Begin a copy of the store into the new directory `target`, for a backup. Ends if nobody asks for COPY_ORPHAN_S. Raises Busy.

        One that nobody has asked about for COPY_SILENT_S gives way: its command was killed.
        """
        if self._copy is not None and not self._copy.finished:
            if time.monotonic() - self._copy_asked_at < COPY_SILENT_S:
                raise Busy("another backup is being made")
            self.cancel_copy()
        self._number += 1
        self._copy_asked_at = time.monotonic()
        self._copy = Job(self._number, Duplicate(self._drain, target, limit_bytes_s=limit_bytes_s), background=False)
        return self._copy

    def cancel_copy(self) -> None:
        """End the copy in hand, if there is one; nothing of it is left."""
        if self._copy is not None and not self._copy.finished:
            self._copy.cancel("it was cancelled")

    def copy_state(self) -> dict[str, Any] | None:
        """Of the newest copy; None if there was none."""
        self._copy_asked_at = time.monotonic()
        return self._copy.state() if self._copy is not None else None

    def _work_on_copy(self) -> None:
        if self._copy is None or self._copy.finished:
            return
        if time.monotonic() - self._copy_asked_at > COPY_ORPHAN_S:
            log.warning("copy.stopped", error="whoever wanted it has gone")
            self._copy.cancel("nobody asked for it any more")
        else:
            self._copy.advance()

    def wants_compaction(self) -> bool:
        """Whether there is something to fold or to evict. Raises StoreFailed."""
        store, budget = self._drain.store(), self._drain.budget()
        usage = store.usage()
        with store.snapshot() as view:
            now = self._drain.now()
            sequences = sequences_of(view, now)
            folds = plan_folds(sequences, now.ms, int(1000 * self._drain.settings.compact_after_s))
            if folds or plan_abandoned(sequences, now.ms) or self._ttl_due(budget.ttl_s):
                return True
            tenants = tenant_bytes(view, usage) if budget.has_tenants else {}
        if self._drain.counts["over_budget"] and self._drain.failing:
            return True
        if any(budget.is_near(namespace, used) for namespace, used in tenants.items()):
            return True
        return bool(budget.disk_bytes) and usage.total_bytes > EVICT_FROM * budget.disk_bytes

    def _ttl_due(self, ttl_s: float) -> bool:
        """Whether sessions' age is to be looked at again, which reads every base: twenty times within the time they may live."""
        if not ttl_s or time.monotonic() - self._aged_at < ttl_s / 20:
            return False
        self._aged_at = time.monotonic()
        return True
