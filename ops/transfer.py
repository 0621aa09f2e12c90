"""`concordia export` and `concordia import`: one session, one file. In the command's process; the keeper, if one runs, does the import.

A session's token list and record come from DATA/sessions, its state from the store. Source: tiers/export.py.
"""

from __future__ import annotations

import base64
import contextlib
import time
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from gateway.sessions import SessionRecord
from gateway.tenancy import named
from ops.client import ApiError, say_unwritten
from ops.errors import BadData, ModelError, OpsError, StateRefused
from ops.flags import confirm, print_json
from ops.installation import Installation, drain_what_can_be, need_data, session_file
from ops.names import check_spelling
from ops.show import Bar, size
from tiers import keeper_client
from tiers.errors import BadBlock, BadFile, FileBusy, OtherFormat, TierError
from tiers.export import (
    Found,
    Manifest,
    Opened,
    Slice,
    check_exported,
    export_session,
    find_stored,
    is_sealed_file,
    opened_with,
)
from tiers.export_seal import ExportKeys, LockedFile
from tiers.keeper_operations import Operations
from tiers.keys import Locked
from tiers.offline import offline_drain
from tiers.view import StoreReader

_NAME_IT = "Name it by --as, its tenant by --namespace"

# ---------------------------------------------------------------- export


def run_export(
    here: Installation, session: str, target: Path, as_json: bool, *, yes: bool, keys: ExportKeys, plain: bool
) -> None:
    """Write one session to `target`. Raises OpsError, StateRefused, BadData.

    keys   what it is encrypted with, if anything; plain: not at all, though its tenant has a key
    """
    need_data(here)
    keys = ExportKeys() if plain else keys
    if target.exists() and not target.is_file():
        raise OpsError(f"{target} is a directory or a device; name a file to write by --output")
    if not target.parent.is_dir():
        raise OpsError(f"there is no directory {target.parent}; name a file to write by --output")
    if target.exists():
        confirm(f"{target} exists. Replace it?", yes=yes, dry_run=False)
    drain_what_can_be(here)
    record, tokens = _session(here, session)
    store = StoreReader(here.paths.store, map_bytes=here.config.tiers.store_map_bytes)
    try:
        with Bar(f"exporting {session}", quiet=as_json) as bar:
            found, written, resumed = _write(here, store, record, tokens, target, bar, keys)
    except (Locked, FileBusy) as error:
        raise StateRefused(str(error)) from error
    except OSError as error:
        raise OpsError(
            f"{target} can't be written: {error.strerror or error}; the same command goes on with what is in {target}.part"
        ) from error
    except BadBlock as error:
        raise BadData(f"{error}. `concordia repair` takes it out; then what is whole can be exported") from error
    finally:
        store.close()
    row = {
        "session": session, "path": str(target), "bytes": written, "tokens": len(tokens), "position": found.position,
        "root": found.root.hex(), "resumed_records": resumed, "encrypted": is_sealed_file(target),
    }  # fmt: skip
    if as_json:
        print_json(row)
        return
    rest = len(tokens) - found.position
    secret = ", encrypted" if row["encrypted"] else ""
    what = f"{len(tokens)} tokens, state of {found.position}, {size(written)} in {target}{secret}"
    click.echo(f"{session}: {what}")
    if resumed:
        click.echo(f"{resumed} records were there from an export that was interrupted")
    if rest > 1:  # the last token of an answer is never fed to the model
        click.echo(f"the state of the last {rest} tokens isn't stored; they are computed again where it is imported")


def _write(
    here: Installation, store: StoreReader, record: SessionRecord, tokens: np.ndarray, target: Path, bar: Bar,
    keys: ExportKeys,
) -> tuple[Found, int, int]:  # fmt: skip
    """Export what is stored now; (what that is, bytes of the file, records that were there already). What is freed meanwhile is left out.

    Raises StateRefused (nothing is stored), BadBlock, FileBusy, OSError
    """
    served = {bytes.fromhex(root) for root in here.roots}
    found = find_stored(store, record.namespace, tokens, served)
    while True:
        if found is None:
            raise StateRefused(
                f"nothing is stored of session {record.session!r}: it has been forgotten, or was never captured"
            )
        manifest = Manifest(
            record.session, record.namespace, found.root, found.info.layout, found.info.state_bytes,
            found.info.block_tokens, len(tokens), found.position, found.block_count, len(found.points), int(time.time()),
            _about(here, record, found.root),
        )  # fmt: skip
        try:
            return found, *export_session(store, target, found, manifest, tokens, bar, keys)
        except BadBlock:
            was, found = found, find_stored(store, record.namespace, tokens, served)
            if found == was:
                raise  # it is damaged, not gone: a turn of it was stored meanwhile, or it was compacted


def _session(here: Installation, session: str) -> tuple[SessionRecord, np.ndarray]:
    with session_file(here) as file:
        record, packed = file.get(session), file.tokens(session)
    if record is None:
        raise OpsError(f"there is no session {session!r} in {here.paths.data_dir}; `concordia sessions ls` lists them")
    if not packed and record.token_count:
        raise BadData(
            f"the list of the {record.token_count} tokens of session {session!r} is damaged (checksum) or gone; its next turn writes it "
            "anew, export it after that"
        )
    if not packed:
        raise StateRefused(f"session {session!r} has not finished its first turn; export it after that")
    return record, np.frombuffer(packed, "<i4")


def _about(here: Installation, record: SessionRecord, root: bytes) -> dict[str, Any]:
    row = here.roots.get(root.hex(), {})
    model = {key: row[key] for key in ("model", "dtype", "adapter") if row.get(key)}
    alone = msgspec.structs.replace(record, streams=[], list_id=b"", forked_from="", fork_position=0, family="")
    return {"record": msgspec.to_builtins(alone), **model}


# ---------------------------------------------------------------- import


def run_import(
    here: Installation, source: Path, as_json: bool, *, name: str, namespace: str, replace: bool, any_model: bool,
    yes: bool, dry_run: bool, keys: ExportKeys,
) -> None:  # fmt: skip
    """Take one session from `source`. Everything that may refuse it is asked before anything is stored.

    Raises click.UsageError (no session can have that name), BadData (damaged), ModelError (another model), StateRefused (the name is taken)
    """
    if name:
        check_spelling(named(name, namespace)[0], _NAME_IT)
    opened = _checked(source, as_json, keys)
    m = opened.manifest
    session, namespace = named(name or m.session, namespace, m.namespace)
    check_spelling(session, _NAME_IT)
    note = _check_model(here, opened, any_model)
    _check_name(here, session, replace)
    row = {
        "session": session, "namespace": namespace, "tokens": m.token_count, "position": m.position,
        "root": m.root.hex(), "dry_run": dry_run, "note": note,
    }  # fmt: skip
    if not dry_run:
        if replace:
            confirm(f"Replace session {session} if it is there?", yes=yes)
        record = _record(opened, session, namespace)
        _hand_over(here, opened, record, replace, check=True)
        row |= _put_state(here, source, session, namespace, as_json, keys)
        _put_record(here, opened, record, replace)
    if as_json:
        print_json(row)
        return
    verb = "would be imported" if dry_run else "is imported"
    click.echo(f"{session} {verb}: {m.token_count} tokens, state of {m.position}")
    if not dry_run:
        click.echo(f"{row['blocks_put']} blocks and tails were put, {row['blocks_there']} were there already")
    if note:
        click.echo(note)


def _checked(source: Path, as_json: bool, keys: ExportKeys) -> Opened:
    if not source.is_file():
        raise OpsError(f"there is no file {source}")
    with Bar(f"checking {source.name}", quiet=as_json) as bar:
        try:
            return check_exported(source, bar, keys)
        except LockedFile as error:
            raise StateRefused(f"{error}") from error
        except (BadFile, OtherFormat) as error:
            raise BadData(f"{error}") from error


def _check_model(here: Installation, opened: Opened, any_model: bool) -> str:
    """What is to be said about the fingerprint. Raises ModelError."""
    root = opened.manifest.root.hex()
    made_by = opened.manifest.about.get("model") or "an unnamed model"
    if here.gateway is not None and here.engines:
        known, what = set(here.roots), "is served"
    else:
        known, what = _stored_roots(here), "has been served"
    if root in known:
        return ""
    if known and not any_model:
        served = ", ".join(sorted({str(row.get("model")) for row in here.roots.values()})) or "another model"
        raise ModelError(
            f"the file holds state of {made_by} (fingerprint {root[:12]}…), here {served} {what} (fingerprint "
            f"{', '.join(sorted(k[:12] + '…' for k in known))}): weights, dtype or options differ, so its numbers can't be used. Serve the "
            "model that it was made with, or send the conversation as a new request"
        )
    return f"it can only be used by {made_by} with fingerprint {root[:12]}…; no engine is here to compare with"


def _stored_roots(here: Installation) -> set[str]:
    store = StoreReader(here.paths.store, map_bytes=here.config.tiers.store_map_bytes)
    try:
        with store.snapshot() as view:
            return {key.hex() for key, _ in view.scan("roots")}
    finally:
        store.close()


def _check_name(here: Installation, session: str, replace: bool) -> None:
    if replace or not here.paths.sessions.exists():
        return
    with session_file(here) as file:
        taken = file.get(session) is not None
    if taken:
        raise StateRefused(f"there is a session {session!r} already; import it --as another name, or --replace it")


def _put_state(
    here: Installation, source: Path, session: str, namespace: str, as_json: bool, keys: ExportKeys
) -> dict[str, int]:
    """All state of the file, one group commit after another. Interrupted, the next import finds what is there."""
    put = there = 0
    size_bytes = source.stat().st_size
    path, sealer = str(source.resolve()), opened_with(source, keys)
    key = sealer.base.hex() if sealer is not None else ""
    with Bar(f"importing {session}", quiet=as_json) as bar:
        if here.owner:
            here.need_gateway("taking over the session's record")
            step = Slice(0, 0, False, 0, 0)
            while not step.done:
                answer = keeper_client.import_slice(
                    here.paths.keeper_socket, path, session, namespace, step.offset, step.index, key=key
                )
                step = msgspec.convert(answer, Slice)
                put, there = put + step.blocks_put, there + step.blocks_there
                bar(step.offset, size_bytes)
        else:
            here.paths.make()
            with offline_drain(here.paths, here.config.tiers) as drain:
                step = Slice(0, 0, False, 0, 0)
                while not step.done:
                    request = {"path": path, "session": session, "namespace": namespace, "key": key}
                    answer = Operations(drain).import_slice({**request, "offset": step.offset, "index": step.index})
                    step = msgspec.convert(answer["imported"], Slice)
                    put, there = put + step.blocks_put, there + step.blocks_there
                    bar(step.offset, size_bytes)
    return {"blocks_put": put, "blocks_there": there}


def _record(opened: Opened, session: str, namespace: str) -> SessionRecord:
    """What is to be known of the session here. Raises BadData."""
    about = opened.manifest.about.get("record") or {}
    now = time.time()
    base = {"session": session, "created": now, "last_used": now}
    try:
        record = msgspec.convert({**base, **about, "session": session, "namespace": namespace}, SessionRecord)
    except msgspec.ValidationError as error:
        raise BadData(f"what the file says of its session can't be read: {error}") from error
    position, count = opened.manifest.position, opened.manifest.token_count
    return msgspec.structs.replace(
        record, streams=[], parked=True, token_count=count, captured=position, durable=position
    )


def _hand_over(here: Installation, opened: Opened, record: SessionRecord, replace: bool, *, check: bool) -> None:
    """Give the record to the gateway, if there is one; check: only ask whether it would take it. Raises StateRefused, ApiError."""
    if here.gateway is None:
        return
    body = {
        "record": msgspec.to_builtins(record),
        "tokens": base64.b64encode(opened.tokens).decode(),
        "replace": replace,
        "check": check,
    }
    try:
        answer = here.gateway.post(here.gateway.session_path(record.session).replace("/v1/", "/admin/", 1), body)
    except ApiError as error:
        if error.status == 409:
            raise StateRefused(str(error)) from error
        raise
    say_unwritten(answer)


def _put_record(here: Installation, opened: Opened, record: SessionRecord, replace: bool) -> None:
    if here.gateway is None:
        with session_file(here, writable=True) as file:
            file.put(record, opened.tokens)
        return
    try:
        _hand_over(here, opened, record, replace, check=False)
    except (StateRefused, ApiError):
        if _is_unknown(here, record.session):  # else what was put belongs to the session of that name, and goes with it
            with contextlib.suppress(TierError):  # the refusal is what is to be said
                keeper_client.remove(here.paths.keeper_socket, record.namespace, record.session, force=True)
        raise


def _is_unknown(here: Installation, session: str) -> bool:
    """Whether the gateway says that there is no such session."""
    assert here.gateway is not None, "asked of a gateway"
    try:
        here.gateway.get(here.gateway.session_path(session))
    except ApiError as error:
        return error.status == 404
    return False
