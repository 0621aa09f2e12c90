"""Sessions for the commands: by the gateway where one runs, from the data directory where none does. Runs in the command's process."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from gateway.journal import read_unfinished
from gateway.sealing import Sealing
from gateway.sessions import SessionRecord
from ops.errors import OpsError
from ops.installation import Installation, session_file
from ops.verify import unreadable_records
from tiers.base import session_key
from tiers.errors import NoRoom, OverBudget, StoreFailed
from tiers.export import Found, find_stored
from tiers.keeper_operations import Operations, stored_of
from tiers.keys import Keyring, Locked
from tiers.layout import Layout
from tiers.offline import offline_drain, recover
from tiers.rebuild import TokenList
from tiers.verify import Finding
from tiers.view import StoreReader


def listed(here: Installation, findings: list[Finding]) -> dict[str, Any]:
    """All sessions, most lately used first, as GET /v1/sessions answers. What can't be read of the disk is added to `findings`."""
    if here.gateway is not None or _nothing_on_disk(here):
        answer = dict(here.need_gateway("this list").get("/v1/sessions?all=true"))
        return {**answer, "data": _with_pins(here, answer["data"], findings)}
    with session_file(here) as file:
        records, locked = file.all(), file.locked
        findings += unreadable_records(file)
    rows = [_offline_row(here, record, _list_now(here, record), findings) for record in records]
    return {"object": "list", "data": _with_pins(here, rows, findings), "locked": locked}


@contextlib.contextmanager
def _noting(findings: list[Finding]) -> Iterator[None]:
    """A store that can't be read is one finding, and what doesn't need it is shown all the same."""
    try:
        yield
    except StoreFailed as error:
        if not any(finding.kind == "store" for finding in findings):
            findings.append(Finding("store", "data.mdb", str(error)))


def _with_pins(here: Installation, rows: list[dict[str, Any]], findings: list[Finding]) -> list[dict[str, Any]]:
    """Rows that also say whether a session is pinned, if its store is on this machine and can be read."""
    if here.foreign or not (here.paths.store / "data.mdb").exists():
        return rows
    store = StoreReader(here.paths.store, map_bytes=here.config.tiers.store_map_bytes)
    pinned: list[bool | None] = [None] * len(rows)
    try:
        with _noting(findings), store.snapshot() as view:
            keys = [session_key(row.get("namespace", "default"), str(row["id"])) for row in rows]
            pinned = [view.is_pinned(key) for key in keys]
    finally:
        store.close()
    return [{**row, "pinned": is_pinned} for row, is_pinned in zip(rows, pinned, strict=True)]


def view(here: Installation, session: str, findings: list[Finding]) -> dict[str, Any]:
    """One session. What can't be read of the store is added to `findings`. Raises OpsError if there is no such session."""
    sizes = dict[str, Any]()
    if here.gateway is not None or _nothing_on_disk(here):
        client = here.need_gateway("this session")
        row = dict(client.get(client.session_path(session)))
        with _noting(findings):
            sizes = {} if _nothing_on_disk(here) else _sizes_of(here, _record(here, session))
    else:
        record = _record(here, session)
        now = _list_now(here, record)
        row = {**_offline_row(here, record, now, findings), "streams": record.streams}
        with _noting(findings):
            sizes = _sizes(_find(here, record.namespace, np.frombuffer(now.tokens, "<i4")))
    return _with_pins(here, [row | sizes], findings)[0]


def remove(here: Installation, session: str) -> dict[str, Any]:
    """Delete one session and what only it has stored. Raises OpsError, StateRefused."""
    if here.gateway is not None:
        return dict(here.gateway.delete(here.gateway.session_path(session)))
    return _remove_offline(here, session)


def _nothing_on_disk(here: Installation) -> bool:
    return bool(here.foreign) or not (here.paths.sessions / "data.mdb").exists()


# ---------------------------------------------------------------- without a gateway


def token_lists(here: Installation, keys: Collection[bytes]) -> list[TokenList]:
    """Token lists of the sessions whose bases these are, as the gateway left them in the data directory."""
    lists = []
    with session_file(here) as file:
        for record in file.all() if keys else ():
            if session_key(record.namespace, record.session) in keys:
                tokens, used_ms = file.tokens(record.session), int(1000 * record.last_used)
                lists.append(TokenList(record.namespace, record.session, tokens, used_ms))
    return lists


def _record(here: Installation, session: str) -> SessionRecord:
    with session_file(here) as file:
        record = file.get(session)
    if record is None:
        raise OpsError(f"there is no session {session!r} in {here.paths.data_dir}; `concordia sessions ls` lists them")
    return record


class _ListNow(NamedTuple):
    """A session's token list, packed, and its streams that have no end yet: of these, the list is that of the one begun last."""

    tokens: bytes
    unfinished: list[str]


def _list_now(here: Installation, record: SessionRecord) -> _ListNow:
    """As a gateway that starts now would have it: from the journals of what it was answering, else that of the turn which ended last."""
    sealing, tokens, unfinished = Sealing(Keyring.from_environment()), b"", []
    for stream in record.streams:
        # OSError: a bad sector, which `verify` names; a gateway passes over it, too.
        with contextlib.suppress(Locked, OSError):
            found = read_unfinished(here.paths.journal(stream), sealing.opens_journal(stream))
            if found is not None:
                unfinished.append(stream)
                tokens = found[1] if found[0].session == record.session else tokens
    if tokens:
        return _ListNow(tokens, unfinished)
    with session_file(here) as file:
        return _ListNow(file.tokens(record.session), unfinished)


def _sizes_of(here: Installation, record: SessionRecord) -> dict[str, Any]:
    """`_sizes` of what the store holds of the turn that ended last."""
    with session_file(here) as file:
        tokens = np.frombuffer(file.tokens(record.session), "<i4")
    return _sizes(_find(here, record.namespace, tokens))


def _find(here: Installation, namespace: str, tokens: np.ndarray) -> Found | None:
    store = StoreReader(here.paths.store, map_bytes=here.config.tiers.store_map_bytes)
    try:
        return find_stored(store, namespace, tokens)
    finally:
        store.close()


def _sizes(found: Found | None) -> dict[str, Any]:
    """Bytes of stored rows, and the positions and bytes of stored rollback points."""
    if found is None:
        return {}
    layout = Layout.from_entries(found.info.layout, found.info.state_bytes)
    return {
        "row_bytes": found.position * layout.token_bytes,
        "rollback_points": [position for position, _, _ in found.points],
        "rollback_point_bytes": len(found.points) * layout.state_bytes,
    }


def _durable(here: Installation, record: SessionRecord, tokens: bytes) -> int:
    """How much of a session's list the store has, counted as the keeper counts it for a gateway."""
    one = TokenList(record.namespace, record.session, tokens, int(1000 * record.last_used))
    store = StoreReader(here.paths.store, map_bytes=here.config.tiers.store_map_bytes)
    try:
        with store.snapshot() as view:
            return stored_of(view, one)
    finally:
        store.close()


def _offline_row(here: Installation, record: SessionRecord, now: _ListNow, findings: list[Finding]) -> dict[str, Any]:
    """The same fields as the gateway's, as far as the disk knows them: of a list that a turn broke off, captured is what is on disk.

    durable, durable_lag  None if the store can't be read
    """
    captured = 0 if len(now.tokens) != 4 * record.token_count else record.captured
    record.token_count = len(now.tokens) // 4
    durable = None
    with _noting(findings):
        durable = _durable(here, record, now.tokens)
    record.place(captured, durable or 0)
    return {
        "id": record.session,
        "object": "session",
        "namespace": record.namespace,
        "state": "broken off" if now.unfinished else "parked",
        "created": int(record.created),
        "last_used": int(record.last_used),
        "turns": record.turns,
        "tokens": record.token_count,
        "captured": record.captured,
        "durable": None if durable is None else record.durable,
        "capture_lag": record.token_count - record.captured,
        "durable_lag": None if durable is None else record.captured - record.durable,
        "engines": [],
        "live_streams": now.unfinished,
    }


def _remove_offline(here: Installation, session: str) -> dict[str, Any]:
    tokens = np.frombuffer(_list_now(here, _record(here, session)).tokens, "<i4").astype(np.int32)
    with session_file(here, writable=True) as file:
        record = file.get(session)
        assert record is not None, "looked up before"
        with contextlib.suppress(OverBudget, NoRoom):  # deleting is what makes room
            recover(here.paths, here.config.tiers)
        found = _find(here, record.namespace, tokens)
        if found is not None:
            with offline_drain(here.paths, here.config.tiers) as drain:
                Operations(drain).forget(
                    found.root, record.namespace, tokens, session, file.shared_with_relatives(session)
                )
        for stream in record.streams:
            here.paths.journal(stream).unlink(missing_ok=True)
        file.remove(session)
    return {"id": session, "object": "session", "deleted": True, "forgotten": True}
