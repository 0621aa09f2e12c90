"""Asking the keeper: JSON lines on its unix socket, one connection a request, every wait with a deadline.

For the engine and the host agent (plain functions) and for event loops (`a...` functions).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from tiers.errors import KeeperAway, StoreFailed, TierError
from tiers.rebuild import TokenList, to_wire

Answer = dict[str, Any]
ANSWER_LIMIT_BYTES = 64 << 20
ASKED_BYTES = 4 << 20  # of token lists in one question


class JobState(msgspec.Struct, frozen=True):
    """How far a compaction is: `done` of `total` within its phase (fold, evict, mark, wait, free; shrinking copy, verify, switch; done).

    counts  folded sessions, folded_sequences, evicted, freed_blocks, freed_tails, freed_points, freed_streams, freed_bytes,
            rewritten_blocks and rewritten_bytes (window rows dropped), kept_broken (sequences with a block missing), bad_bases;
            shrinking copied_records, copied_bytes, bad_records (copied as they are); freed_bytes then counts the file's as well
    error   why it ended early; "" if it didn't
    """

    id: int
    phase: str
    done: int
    total: int
    counts: dict[str, int]
    finished: bool
    error: str
    background: bool


class SessionInfo(msgspec.Struct, frozen=True):
    """A session as the keeper has it.

    stream     names it where it has no session name
    root       state fingerprint, hex
    stored     position up to which it is in the store (on the disk at most `unsynced_ms` of `stats` later)
    captured   position up to which the keeper has seen it, in the store or waiting in a lane
    points     rollback points that its base keeps; 0 until it is compacted
    bytes      of its blocks, those shared with others included
    used_ms    last use, milliseconds since 1970
    live       it has an open sequence: never evicted
    compacted  it has a base; `sequences` counts what isn't folded into it yet
    """

    namespace: str
    session: str
    stream: str
    root: str
    stored: int
    captured: int
    points: int
    bytes: int
    used_ms: int
    live: bool
    pinned: bool
    compacted: bool
    sequences: int
    epoch: int


class TenantUse(msgspec.Struct, frozen=True):
    """What a namespace has on the disk, (count, bytes) by kind, and in the lanes; limits of 0: none."""

    bytes: int
    limit: int
    lane_bytes: int = 0
    lane_limit: int = 0
    memory_limit: int = 0
    blocks: tuple[int, int] = (0, 0)
    tails: tuple[int, int] = (0, 0)
    points: tuple[int, int] = (0, 0)
    bases: tuple[int, int] = (0, 0)


def drain(path: str | os.PathLike[str], *, sync: bool = False, timeout_s: float = 10.0) -> dict[str, int]:
    """Wait until everything committed so far in the lanes is in the store, with `sync` on the disk. Returns lanes' tails.

    Raises KeeperAway (not there, or not within timeout_s), StoreFailed (disk or map full; the lanes keep it)
    """
    return _ask(path, {"op": "drain", "sync": sync}, timeout_s)["durable"]


def stats(path: str | os.PathLike[str], *, timeout_s: float = 5.0) -> Answer:
    """The keeper's counters and lags. Raises KeeperAway."""
    return _ask(path, {"op": "stats"}, timeout_s)["stats"]


def forget(
    path: str | os.PathLike[str],
    root: bytes,
    namespace: str,
    tokens: list[int],
    *,
    session: str = "",
    keep_tokens: int = 0,
    timeout_s: float = 30.0,
) -> dict[str, int]:
    """Delete a list's stored state behind `keep_tokens` where nothing else shares it. Returns counts. Raises KeeperAway, StoreFailed."""
    return _ask(path, _forget_request(root, namespace, tokens, session, keep_tokens), timeout_s)["deleted"]


def import_slice(
    path: str | os.PathLike[str],
    file: str,
    session: str,
    namespace: str,
    offset: int,
    index: int,
    *,
    key: str = "",
    timeout_s: float = 60.0,
) -> Answer:
    """Have the keeper put the next state of an exported file into the store; a `tiers.export.Slice`.

    key  opens an encrypted file, hex; the socket is this user's alone
    Raises KeeperAway, StoreFailed
    """
    request = {
        "op": "import",
        "path": file,
        "session": session,
        "namespace": namespace,
        "offset": offset,
        "index": index,
        "key": key,
    }
    return _ask(path, request, timeout_s)["imported"]


def repair(
    path: str | os.PathLike[str],
    damaged: list[tuple[str, bytes]],
    lists: Iterable[TokenList] = (),
    *,
    timeout_s: float = 300.0,
) -> Answer:
    """Have the keeper drop damaged values, given as (kind, key), and make bases again; `tiers.repair.Repaired` as a dict.

    lists  what is known of sessions whose base may be damaged
    Raises KeeperAway, StoreFailed
    """
    given = [(kind, key.hex()) for kind, key in damaged]
    return _ask(path, {"op": "repair", "damaged": given, "lists": to_wire(lists)}, timeout_s)["repaired"]


def mend(
    path: str | os.PathLike[str], bases: list[str], lists: Iterable[TokenList] = (), *, timeout_s: float = 60.0
) -> list[str]:
    """Have the keeper make damaged bases (keys in hex) again; returns those that it can't. Raises KeeperAway, StoreFailed."""
    return _ask(path, {"op": "mend", "bases": bases, "lists": to_wire(lists)}, timeout_s)["left"]


async def amend(
    path: str | os.PathLike[str], bases: list[str], lists: Iterable[TokenList] = (), *, timeout_s: float = 60.0
) -> list[str]:
    """`mend` for an event loop."""
    return (await _aask(path, {"op": "mend", "bases": bases, "lists": to_wire(lists)}, timeout_s))["left"]


async def astored(path: str | os.PathLike[str], lists: Iterable[TokenList], *, timeout_s: float = 10.0) -> list[int]:
    """How much of each token list has its state in the store now, asked in parts, each in timeout_s. Raises KeeperAway, StoreFailed."""
    positions: list[int] = []
    for part in _parts(lists):
        positions += (await _aask(path, {"op": "stored", "lists": to_wire(part)}, timeout_s))["stored"]
    return positions


def _parts(lists: Iterable[TokenList]) -> Iterator[list[TokenList]]:
    """Lists of about ASKED_BYTES together: while it looks at them the keeper does nothing else."""
    part, size = list[TokenList](), 0
    for one in lists:
        if part and size + len(one.tokens) > ASKED_BYTES:
            yield part
            part, size = [], 0
        part.append(one)
        size += len(one.tokens)
    if part:
        yield part


def start_compact(
    path: str | os.PathLike[str],
    *,
    settle_s: float = 0.0,
    grace_s: float | None = None,
    dry_run: bool = False,
    shrink: bool = False,
    timeout_s: float = 10.0,
) -> JobState:
    """Begin a compaction; ask `job` how far it is. One runs at a time; one that the keeper began by itself gives way.

    settle_s  sessions used since then are left alone; 0: only those that are live
    grace_s   how long what is unnamed is left alone before it is freed; None: the keeper's default
    dry_run   change nothing; the counts say what would be freed
    shrink    afterwards make the store's file as small as what is in it, while serving: copy, verify, switch
    Raises KeeperAway, StoreFailed (also while another one runs)
    """
    request: dict[str, Any] = {"op": "compact", "settle_s": settle_s, "dry_run": dry_run, "shrink": shrink}
    if grace_s is not None:
        request["grace_s"] = grace_s
    return msgspec.convert(_ask(path, request, timeout_s)["job"], JobState)


def job(path: str | os.PathLike[str], *, timeout_s: float = 10.0) -> JobState | None:
    """The compaction in hand or the last one; None if there was none since the keeper began. Raises KeeperAway."""
    return msgspec.convert(_ask(path, {"op": "job"}, timeout_s)["job"], JobState | None)


def compact(
    path: str | os.PathLike[str],
    *,
    settle_s: float = 0.0,
    grace_s: float | None = None,
    dry_run: bool = False,
    shrink: bool = False,
    on_progress: Callable[[JobState], None] | None = None,
    poll_s: float = 0.1,
    timeout_s: float = 86_400.0,
) -> JobState:
    """Compact and wait until it is done; interrupted, it ends where it is. Arguments as of `start_compact`.

    Raises KeeperAway, StoreFailed, TierError (it ended early)
    """
    deadline = time.monotonic() + timeout_s
    state = start_compact(path, settle_s=settle_s, grace_s=grace_s, dry_run=dry_run, shrink=shrink)
    number = state.id
    try:
        while not state.finished:
            if on_progress is not None:
                on_progress(state)
            if time.monotonic() > deadline:
                raise KeeperAway(f"compaction {number} isn't done after {timeout_s:g} s", where=str(path))
            time.sleep(poll_s)
            newest = job(path)
            if newest is None or newest.id != number:
                raise KeeperAway(f"the keeper has lost sight of compaction {number}", where=str(path))
            state = newest
    except KeyboardInterrupt:
        with contextlib.suppress(TierError):
            _ask(path, {"op": "job", "cancel": number}, 10.0)
        raise
    if on_progress is not None:
        on_progress(state)
    if state.error:
        raise TierError("the compaction ended early", where=str(path), cause=state.error)
    return state


def copy(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    limit_mb_s: float = 0.0,
    on_progress: Callable[[JobState], None] = lambda state: None,
    poll_s: float = 0.1,
) -> JobState:
    """Have the keeper copy its store into the new directory `target` on this machine, and wait until it is done.

    Raises KeeperAway, StoreFailed (also while another copy is made), TierError (it ended early)
    """
    request = {"op": "copy", "path": os.path.abspath(target), "limit_mb_s": limit_mb_s}
    state = msgspec.convert(_ask(path, request, 10.0)["job"], JobState)
    number = state.id
    try:
        while not state.finished:
            on_progress(state)
            time.sleep(poll_s)
            newest = msgspec.convert(_ask(path, {"op": "copy"}, 30.0)["job"], JobState | None)
            if newest is None or newest.id != number:
                raise KeeperAway("the keeper has lost sight of the copy: it was started anew", where=str(path))
            state = newest
    except KeyboardInterrupt:
        with contextlib.suppress(TierError):
            _ask(path, {"op": "copy", "cancel": True}, 10.0)
        raise
    if state.error:
        raise TierError("the copy of the store ended early", where=str(path), cause=state.error)
    return state


def gc(path: str | os.PathLike[str], *, dry_run: bool = True, timeout_s: float = 86_400.0) -> dict[str, int]:
    """Free what nothing names, without folding anything younger than the keeper's own setting; dry_run: only count it."""
    return compact(path, settle_s=1e9, dry_run=dry_run, timeout_s=timeout_s).counts


def sessions(
    path: str | os.PathLike[str], *, namespace: str | None = None, session: str | None = None, timeout_s: float = 30.0
) -> list[SessionInfo]:
    """Stored sessions, last used first; those of a namespace or of a name, if given. Raises KeeperAway, StoreFailed."""
    request = {"op": "sessions", "namespace": namespace, "session": session}
    return msgspec.convert(_ask(path, request, timeout_s)["sessions"], list[SessionInfo])


def drop_locked(path: str | os.PathLike[str], *, timeout_s: float = 60.0) -> dict[str, int]:
    """Give up what is sealed with keys that aren't there; a compaction then frees it. Counts of sequences and bases.

    Raises KeeperAway, StoreFailed
    """
    return _ask(path, {"op": "drop_locked"}, timeout_s)["dropped"]


def tenants(path: str | os.PathLike[str], *, timeout_s: float = 30.0) -> dict[str, TenantUse]:
    """What each namespace has on the disk, and its limit. Raises KeeperAway, StoreFailed."""
    return msgspec.convert(_ask(path, {"op": "tenants"}, timeout_s)["tenants"], dict[str, TenantUse])


def pin(
    path: str | os.PathLike[str], namespace: str, session: str, *, pinned: bool = True, timeout_s: float = 10.0
) -> None:
    """Never evict a session (or let it be evicted again). It need not be stored yet. Raises KeeperAway, StoreFailed."""
    _ask(path, {"op": "pin", "namespace": namespace, "session": session, "pinned": pinned}, timeout_s)


def remove(
    path: str | os.PathLike[str],
    namespace: str,
    session: str,
    *,
    force: bool = False,
    dry_run: bool = False,
    timeout_s: float = 60.0,
) -> dict[str, int]:
    """Delete a session and what only it needs; counts of blocks, tails, points and sequences.

    force    also if it is live: its engine's further records are then lost
    dry_run  only say how many token lists it has (`token_lists`)
    Raises KeeperAway, StoreFailed, TierError (it is live)
    """
    request = {"op": "remove", "namespace": namespace, "session": session, "force": force, "dry_run": dry_run}
    return _ask(path, request, timeout_s)["deleted"]


async def adrain(path: str | os.PathLike[str], *, sync: bool = False, timeout_s: float = 10.0) -> dict[str, int]:
    """`drain` for an event loop."""
    return (await _aask(path, {"op": "drain", "sync": sync}, timeout_s))["durable"]


async def astats(path: str | os.PathLike[str], *, timeout_s: float = 5.0) -> Answer:
    """`stats` for an event loop."""
    return (await _aask(path, {"op": "stats"}, timeout_s))["stats"]


async def apositions(
    path: str | os.PathLike[str], sequences: list[str], *, timeout_s: float = 5.0
) -> dict[str, tuple[int, int]]:
    """(committed, on disk) positions of sequences, by their ids in hex; unknown ones are left out. Raises KeeperAway, StoreFailed."""
    return (await _aask(path, {"op": "positions", "sequences": sequences}, timeout_s))["positions"]


async def apins(path: str | os.PathLike[str], *, timeout_s: float = 5.0) -> frozenset[tuple[str, str]]:
    """(namespace, session) of every pinned session, for an event loop. Raises KeeperAway, StoreFailed."""
    return frozenset((pair[0], pair[1]) for pair in (await _aask(path, {"op": "pins"}, timeout_s))["pins"])


async def aforget(
    path: str | os.PathLike[str],
    root: bytes,
    namespace: str,
    tokens: list[int],
    *,
    session: str = "",
    keep_tokens: int = 0,
    timeout_s: float = 30.0,
) -> dict[str, int]:
    """`forget` for an event loop."""
    return (await _aask(path, _forget_request(root, namespace, tokens, session, keep_tokens), timeout_s))["deleted"]


def _forget_request(root: bytes, namespace: str, tokens: list[int], session: str, keep_tokens: int) -> dict[str, Any]:
    return {
        "op": "forget", "root": root.hex(), "namespace": namespace, "tokens": list(tokens), "session": session,
        "keep_tokens": keep_tokens,
    }  # fmt: skip


def _ask(path: str | os.PathLike[str], request: dict[str, Any], timeout_s: float) -> Answer:
    deadline = time.monotonic() + timeout_s
    received = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(os.fspath(path))
            connection.sendall(json.dumps(request).encode() + b"\n")
            while not received.endswith(b"\n"):
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                data = connection.recv(1 << 16)
                if not data:
                    break
                received += data
    except OSError as error:
        raise KeeperAway("the keeper doesn't answer", where=str(path), cause=str(error)) from error
    return _checked(bytes(received), str(path))


async def _aask(path: str | os.PathLike[str], request: dict[str, Any], timeout_s: float) -> Answer:
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(os.fspath(path), limit=ANSWER_LIMIT_BYTES)
            try:
                writer.write(json.dumps(request).encode() + b"\n")
                received = await reader.readline()
            finally:
                writer.close()
    except OSError as error:  # TimeoutError is one
        raise KeeperAway("the keeper doesn't answer", where=str(path), cause=str(error) or "timeout") from error
    return _checked(received, str(path))


def _checked(received: bytes, where: str) -> Answer:
    if not received.endswith(b"\n"):
        raise KeeperAway("the keeper went away in mid-answer", where=where)
    answer: Answer = json.loads(received)
    if answer.get("ok"):
        return answer
    error = StoreFailed if answer.get("retry") else TierError
    cause, hint = str(answer.get("error", "")), str(answer.get("hint", ""))
    raise error("the keeper could not do it", where=where, cause=cause, hint=hint)
