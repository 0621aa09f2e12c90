"""A lane whose file was deleted, moved or replaced under its engine: noticed, and a new one made, without holding up a step.

Stage *capture*. Looked at between two steps, once a second; the new lane is allocated on a thread of its own, since the first touch of
its pages takes up to a second. What of the live streams the tiers don't hold is then captured again from the device (`Engine.watch_lane`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from tiers.errors import TierError
from tiers.lane import LaneWriter

log = structlog.get_logger()

LOOK_S = 1.0
RETRY_S = 5.0


class LaneWatch:
    """`open_lane` makes and opens a lane under the engine's name; it runs on another thread."""

    def __init__(self, open_lane: Callable[[], LaneWriter]) -> None:
        self._open_lane = open_lane
        self._thread: ThreadPoolExecutor | None = None
        self._making: Future[LaneWriter] | None = None
        self._due = 0.0
        self.is_gone = False
        self.renewed = 0

    def look(self, lane: LaneWriter) -> LaneWriter | None:
        """The lane to go on in, if the present one's file is gone and another one is there by now."""
        if self._making is None:
            if time.monotonic() >= self._due:
                self._due = time.monotonic() + LOOK_S
                self._check(lane)
            return None
        if not self._making.done():
            return None
        made, self._making = self._making, None
        try:
            fresh = made.result()
        except (OSError, TierError) as error:
            self._due = time.monotonic() + RETRY_S
            log.error("capture.lane_not_made", error=str(error), again_in_s=RETRY_S)
            return None
        self.is_gone, self.renewed = False, self.renewed + 1
        return fresh

    def _check(self, lane: LaneWriter) -> None:
        if not lane.is_gone():
            return
        if not self.is_gone:
            log.error(
                "capture.lane_gone", lane=str(lane.path),
                hint="somebody deleted or moved it; streams go on, and a new lane is made. Nothing but Concordia should write there",
            )  # fmt: skip
        self.is_gone = True
        self._thread = self._thread or ThreadPoolExecutor(1, "lane-watch")
        self._making = self._thread.submit(self._open_lane)
