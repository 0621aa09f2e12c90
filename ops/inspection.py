"""`concordia inspect`: a lane or a session, record by record. Reads only; runs in the command's process."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ops.errors import BadData, OpsError
from ops.flags import print_json
from ops.installation import Installation, need_data
from ops.show import console, size, table
from tiers.errors import BadFile, OtherFormat
from tiers.export import MAGIC, NAMES, open_exported, read_items
from tiers.export_seal import MAGIC as SEALED_MAGIC
from tiers.export_seal import ExportKeys
from tiers.inspect import RecordRow, SequenceRow, StoredRow, lane_facts, lane_records, sequences, stored_rows
from tiers.keys import Keyring
from tiers.view import StoreReader


def run(
    here: Installation, target: str, as_json: bool, *, from_number: int | None, limit: int, freed: bool, check: bool
) -> None:
    """Show what `target` names: a lane (engine or file), an exported file, or a session, stream or sequence. Raises BadData, OpsError."""
    lane = _lane_path(here, target)
    if lane is not None:
        wrong = _show_lane(lane, as_json, from_number, limit, freed, check)
    elif (file := Path(target)).is_file():
        wrong = _show_export(file, as_json, limit)
    else:
        wrong = _show_sequences(here, target, as_json, limit, check)
    sys.stdout.flush()
    if wrong:
        raise BadData(f"{wrong} of these are damaged; `concordia verify` says whom it concerns")


def _lane_path(here: Installation, target: str) -> Path | None:
    for path in (Path(target), here.paths.lane(target)):
        if path.suffix == ".lane" and path.is_file():
            return path
    return None


def _show_lane(path: Path, as_json: bool, from_number: int | None, limit: int, freed: bool, check: bool) -> int:
    try:
        facts = lane_facts(path)
        rows = list(lane_records(path, from_number=from_number, limit=limit, freed=freed, check=check))
    except OtherFormat as error:
        raise BadData(str(error)) from error
    if as_json:
        print_json({"lane": asdict(facts), "records": [asdict(row) for row in rows]})
    else:
        click.echo(
            f"{facts.path}: lane {facts.lane_id}, incarnation {facts.incarnation}, ring {size(facts.lane_bytes)}, "
            f"{facts.record_count} entries, records [{facts.tail}, {facts.head}) wait"
        )
        columns = ("record", "type", "epoch", "session", "stream", "tokens", "bytes", "state")
        console.print(table("", columns, map(_record_cells, rows)))
    return sum(row.state.startswith("bad") for row in rows)


def _record_cells(row: RecordRow) -> tuple[Any, ...]:
    state = f"{row.state} (freed)" if row.freed else row.state
    span = f"[{row.token_start}, {row.token_end})"
    name = row.stream or row.sequence[:12]
    return row.number, row.type, row.epoch, row.session or None, name, span, row.payload_bytes, state


def _show_sequences(here: Installation, target: str, as_json: bool, limit: int, check: bool) -> int:
    need_data(here)
    store = StoreReader(here.paths.store, map_bytes=here.config.tiers.store_map_bytes)
    try:
        found = sequences(store, session=target) or sequences(store, stream=target) or _by_id(store, target)
        if not found:
            raise OpsError(
                f"{target!r} is no lane, file, session, stream or sequence of {here.paths.data_dir}; "
                "`concordia sessions ls` and `concordia status` list what there is"
            )
        shown = [(row, list(stored_rows(store, row, check=check))[:limit]) for row in found]
    finally:
        store.close()
    if as_json:
        print_json({"sequences": [{**asdict(row), "stored": [asdict(part) for part in parts]} for row, parts in shown]})
    else:
        for row, parts in shown:
            _print_sequence(row, parts)
    return sum(part.state.startswith(("bad", "missing")) for _, parts in shown for part in parts)


def _by_id(store: StoreReader, target: str) -> list[SequenceRow]:
    try:
        return sequences(store, sequence=bytes.fromhex(target)) if len(target) == 32 else []
    except ValueError:
        return []


def _print_sequence(row: SequenceRow, parts: list[StoredRow]) -> None:
    state = "compacted" if row.compacted else "ended" if row.closed else "open"
    what = "base" if row.compacted else "sequence"
    click.echo(
        f"{what} {row.sequence}: session {row.session or '-'}, stream {row.stream}, epoch {row.epoch}, "
        f"namespace {row.namespace}, root {row.root[:12]}…, stored up to {row.position}, {state}"
    )
    cells = [
        (part.kind, part.id[:32], f"[{part.token_start}, {part.token_end})", part.bytes, part.state) for part in parts
    ]
    console.print(table("", ("kind", "id", "tokens", "bytes", "state"), cells))


def _show_export(path: Path, as_json: bool, limit: int) -> int:
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) not in (MAGIC, SEALED_MAGIC):
            raise OpsError(f"{path} is neither a lane nor an exported session")
    rows: list[dict[str, Any]] = []
    problem = ""
    keys = ExportKeys(Keyring.from_environment())
    try:
        m = open_exported(path, keys).manifest
        for index, item in enumerate(read_items(path, keys=keys)):
            rows.append({"index": index, "type": NAMES.get(item.type, str(item.type)), "bytes": len(item.payload)})
    except (BadFile, OtherFormat) as error:
        problem = str(error)
    facts = {} if problem and not rows else {
        "session": m.session, "namespace": m.namespace, "root": m.root.hex(), "tokens": m.token_count, "position": m.position,
        "block_tokens": m.block_tokens, "created": m.created, "about": m.about,
    }  # fmt: skip
    if as_json:
        print_json({"export": {"path": str(path), **facts}, "records": rows[:limit], "problem": problem})
    else:
        console.print(table("", ("", ""), [(key, value) for key, value in facts.items() if key != "about"]))
        console.print(table("", ("record", "type", "bytes"), [tuple(row.values()) for row in rows[:limit]]))
        if problem:
            click.echo(f"bad: {problem}")
    return 1 if problem else 0
