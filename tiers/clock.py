"""The time of day, for "when was it used last": it never goes back and never jumps, whatever is done to the machine's clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyClock:
    """Milliseconds since 1970 as they were when it was made, going on with the monotonic clock. A later start catches up."""

    def __init__(
        self, wall_s: Callable[[], float] = time.time, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic_s = monotonic_s
        self._offset_s = wall_s() - monotonic_s()
        self._stamped = 0

    def __call__(self) -> int:
        return int(1000 * (self._offset_s + self._monotonic_s()))

    def stamp(self) -> int:
        """The time as a mark of order: no two are equal, if need be a little ahead."""
        self._stamped = max(self._stamped + 1, self())
        return self._stamped
