"""Named places at which a test can have a process killed or an operation fail. Off, one costs a comparison (under 0.1 us).

Armed by the environment variable CONCORDIA_FAILPOINT when the process starts, or by `arm`: `NAME`, `NAME:3` (the third time) or
`NAME:3:EIO` (raise OSError with that errno instead of SIGKILL). Names are in `NAMES`; each is a place just before or just after
what it is called after. Any process, any thread; never set outside of tests.
"""

from __future__ import annotations

import errno
import os
import signal

VARIABLE = "CONCORDIA_FAILPOINT"
NAMES = tuple(
    f"{place}.{side}"
    for place in (
        "append.payload",
        "append.commit_word",
        "drain.put",
        "drain.assemble",
        "drain.commit",
        "drain.sync",
        "drain.free",
        "compact.base_switch",
        "compact.free",
        "compact.shrink_switch",
    )
    for side in ("before", "after")
)

_armed: str | None = None
_remaining = 0
_errno = 0


def reach(name: str) -> None:
    """Say that the place `name` is reached. Kills the process, or raises OSError, if it is the armed one and its turn has come."""
    if _armed is not None and _armed == name:
        _hit()


def arm(spec: str | None) -> None:
    """Arm one failpoint, as the environment variable would; None or "" disarms. Raises ValueError (no such name)."""
    global _armed, _remaining, _errno
    name, _, rest = (spec or "").partition(":")
    count, _, error = rest.partition(":")
    if name and name not in NAMES:
        raise ValueError(f"no failpoint {name!r}; there are {', '.join(NAMES)}")
    if error and not hasattr(errno, error):
        raise ValueError(f"no errno {error!r}")
    _armed, _remaining = name or None, int(count or 1)
    _errno = getattr(errno, error) if error else 0


def _hit() -> None:
    global _armed, _remaining
    _remaining -= 1
    if _remaining > 0:
        return
    name, _armed = _armed, None
    if _errno:
        raise OSError(_errno, f"{os.strerror(_errno)} (failpoint {name})")
    os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get(VARIABLE))
