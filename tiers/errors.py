"""What can go wrong in the tiers, grouped by what the caller does next.

    TierError
    ├── Retry          nothing is lost: try again after the keeper drained
    │   ├── LaneFull       no room in the ring or its directory
    │   │   └── LaneShareFull  no room in what one tenant may take of it
    │   ├── LaneBusy       another process still holds the lane as its writer
    │   ├── KeeperAway     the keeper didn't answer within the deadline
    │   ├── OverBudget     the store may not grow until sessions were evicted
    │   ├── StoreBusy      a live keeper or host agent owns the data directory
    │   └── FileBusy       another process writes that file
    ├── Lost           that copy is unusable: take another one, or recompute
    │   ├── BadRecord      a record of a lane: overwritten, torn or flipped
    │   ├── BadBlock       a block or tail piece of the store: missing, torn or flipped
    │   └── BadFile        an exported file or a backup: cut, flipped or not one at all
    ├── Refused        stop: the request can't be right
    │   ├── StaleEpoch     another engine owns the stream by now
    │   ├── OtherFormat    the file was written by another version or with another geometry
    │   └── TooLarge       a record that no lane of this size can ever hold
    └── Poisoned       close and open again
        └── StoreFailed    LMDB refused: disk full, map full or an input/output error
            └── NoRoom         the disk is nearly full: nothing was written, and deleting still works

Each carries where (file, session, token range) in its text and one sentence that says what to do.
"""

from __future__ import annotations


class TierError(Exception):
    """Root of all errors of `tiers`.

    hint    what to do about it, if that isn't what the class says
    reason  the text without the hint: for a place that has a hint of its own, or that makes it the cause of another error
    """

    hint = ""

    def __init__(self, what: str, *, where: str = "", cause: str = "", hint: str | None = None) -> None:
        self.what, self.where, self.cause = what, where, cause
        if hint is not None:
            self.hint = hint
        self.reason = " ".join([what, *([f"at {where}"] if where else []), *([f"({cause})"] if cause else [])])
        super().__init__(self.reason + (f". {self.hint}" if self.hint else ""))


class Retry(TierError):
    """Nothing is lost; try again."""


class LaneFull(Retry):
    """The lane has no room for this record until the keeper has drained some."""

    hint = "Nothing is lost: capture the same rows again after the keeper drained"


class LaneShareFull(LaneFull):
    """One tenant's records take all that they may of the lane; others' are appended."""

    hint = "Nothing is lost: its rows are captured after the keeper drained; raise its lane_bytes if it happens under normal load"


class LaneBusy(Retry):
    """Another writer holds this lane."""

    hint = "Make sure that the engine of that name is dead (fenced), then open the lane again"


class KeeperAway(Retry):
    """The keeper doesn't answer."""

    hint = (
        "State stays in the lanes. Ask again soon: the host agent starts a keeper that died, and a command that is at work in its place "
        "is done then"
    )


class StoreBusy(Retry):
    """Somebody else is the store's writer."""

    hint = "Stop `concordia serve` on that data directory or wait for the other command, or do without what needs it to be idle"


class FileBusy(Retry):
    """Another process is writing what was to be written."""

    hint = "Wait until it is done, or name another place"


class Lost(TierError):
    """This copy of a token range can't be used."""


class BadRecord(Lost):
    """A lane record is gone, torn or flipped."""

    hint = "Look for the range in the store, or compute it again"


class BadBlock(Lost):
    """A stored block or tail piece is gone, torn or flipped."""

    hint = "Compute the range again; `concordia verify` lists every bad block"


class BadFile(Lost):
    """An exported file or a backup that can't be trusted."""

    hint = "Make it again from its source; nothing of it was taken"


class Refused(TierError):
    """The request can't be right; don't repeat it."""


class StaleEpoch(Refused):
    """A record of an older epoch than the stream's newest."""

    hint = "Another engine owns the stream: drop what this one has of it"


class OtherFormat(Refused):
    """A file of another version or geometry."""

    hint = "Use a fresh file, or the version that wrote this one"


class TooLarge(Refused):
    """A record that can never fit."""

    hint = "Raise lane_bytes or capture fewer tokens in one record"


class Poisoned(TierError):
    """The object can't be used any more; open it again."""


class OverBudget(Retry):
    """What the store may take of the disk is used up."""

    hint = "State stays in the lanes until sessions are evicted; raise disk_budget_bytes, unpin or end sessions if none can be"


class StoreFailed(Poisoned):
    """LMDB refused a write or a read."""

    hint = (
        "What isn't on the disk stays in the lanes: free disk space or raise tiers.store_map_bytes; a running keeper tries again by "
        "itself, a command is to be run again"
    )


class NoRoom(StoreFailed):
    """Nothing more is put, so that deleting finds room; the store is as good as before."""
