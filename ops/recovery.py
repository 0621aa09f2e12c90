"""`concordia recover` and `concordia repair`: after a crash, and after damage. Run in the command's process.

Where a keeper runs it does the work, asked by its control socket; else the command takes the keeper's place (`tiers/offline.py`).
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ops.errors import BadData, StateRefused
from ops.flags import confirm, print_json
from ops.installation import Installation, need_data
from ops.sessions import token_lists
from ops.show import Bar, size
from ops.verify import Pace, check_journals, find_damage, finding_row, print_finding
from tiers import keeper_client
from tiers.errors import OtherFormat
from tiers.keeper_operations import Operations
from tiers.lane_reader import LaneReader
from tiers.offline import Recovered, offline_drain, open_names, recover, waiting, writer_lock
from tiers.repair import ASIDE, Recompute, Repaired, damaged_records, keep_aside
from tiers.salvage import Salvaged, salvage
from tiers.verify import Checked, Finding


def run_recover(here: Installation, as_json: bool) -> None:
    """Lanes to disk. Raises StateRefused, StoreFailed."""
    need_data(here)
    if here.owner:
        before = sum(waiting(here.paths).values())
        here.drained()
        if as_json:
            print_json({"by": here.owner, "records": before, "lanes": {}, "sessions": []})
        else:
            click.echo(
                f"a {here.owner} runs and drains by itself; asked, it has brought all {before} records to the disk"
            )
        return
    with Bar("draining", quiet=as_json) as bar:
        found = recover(here.paths, here.config.tiers, bar)
    if as_json:
        print_json(_recovered_row(found))
    else:
        _print_recovered(found)


def _recovered_row(found: Recovered) -> dict[str, Any]:
    sessions = [
        {"session": session, "stream": stream, "durable": position}
        for (session, stream), position in sorted(found.sessions.items())
    ]
    counts = {
        "records": found.record_count,
        "bad_records": found.bad_record_count,
        "unusable_records": found.lost_record_count,
        "put_bytes": found.put_bytes,
        "blocks_put": found.blocks_put,
    }
    return {"by": "command", **counts, "lanes": found.lanes, "sessions": sessions}


def _print_recovered(found: Recovered) -> None:
    if not found.lanes:
        click.echo("nothing waits in the lanes")
        return
    for name, count in found.lanes.items():
        click.echo(f"lane {name}: {count} records")
    for (session, stream), position in sorted(found.sessions.items()):
        click.echo(f"session {session or '-'}, stream {stream}: on disk up to {position}")
    click.echo(
        f"{found.record_count} records are on disk, {size(found.put_bytes)} in {found.blocks_put} new blocks and tails"
    )
    if found.bad_record_count or found.lost_record_count:
        click.echo(
            f"{found.bad_record_count} damaged and {found.lost_record_count} records that follow on them were passed over; "
            "what they held is computed again"
        )


# ---------------------------------------------------------------- repair


def run_repair(here: Installation, as_json: bool, *, yes: bool, dry_run: bool, limit_mb_s: float) -> None:
    """Find damage, keep it aside, drop it, say what is computed again. Raises StateRefused, StoreFailed."""
    need_data(here)
    saved = None
    with Bar("checking blocks", quiet=as_json) as bar:
        try:
            findings = find_damage(here.config, Checked(), Pace(limit_mb_s, 0, bar))
        except BadData as error:
            saved = _salvage(here, str(error), bar, yes=yes, dry_run=dry_run)
            findings = find_damage(here.config, Checked(), Pace(limit_mb_s, 0, bar))
            yes = True
    if saved is not None and not as_json:
        _print_salvaged(saved)
    records = _lane_damage(here)
    journals = check_journals(here.paths)[1]
    aside = [saved.kept_aside] if saved is not None else []
    if not findings:
        _report(here, as_json, dry_run, [], journals, Repaired(kept_aside=aside), saved)
        return
    if not as_json:
        for finding in findings:
            print_finding(finding)
    if dry_run:
        would = Repaired(recompute=[*_would_recompute(here, findings), *(span for _, _, span in records)])
        _report(here, as_json, True, findings, journals, would, saved)
        return
    confirm(f"Drop {len(findings)} damaged and keep their bytes in {here.paths.store / ASIDE}?", yes=yes)
    done = _repair(here, findings, records)
    done.kept_aside = aside + done.kept_aside
    _report(here, as_json, False, findings, journals, done, saved)


def _salvage(here: Installation, problem: str, bar: Bar, *, yes: bool, dry_run: bool) -> Salvaged:
    """The store's file itself is damaged. Raises StateRefused, BadData (dry run: nothing more can be said)."""
    if here.owner:
        raise StateRefused(f"{problem}. Stop `concordia serve` on that data directory first")
    if dry_run:
        raise BadData(f"{problem}. What can be read of it would be copied to a new one")
    confirm(f"{problem}. Copy what can be read of it to a new one, and keep the old one aside?", yes=yes)
    with writer_lock(here.paths):
        return salvage(
            here.paths.store, here.paths.store / ASIDE, map_bytes=here.config.tiers.store_map_bytes,
            progress=lambda done, total: bar(done, total, "saving what can be read"),
        )  # fmt: skip


def _print_salvaged(saved: Salvaged) -> None:
    if saved.no_root:
        click.echo("no root of the store's file could be read: nothing was saved, all stored state is computed again")
        return
    if saved.root:
        click.echo(f"the store's root could not be read; it was read by {saved.root}")
    lost = ", ".join(f"{count} {name}" for name, count in saved.lost.items())
    said = f", could not be read: {lost}" if lost else "" if saved.cut_short else ", none was lost on the way"
    click.echo(f"the store's file was copied: {saved.records} records were saved{said}")
    if saved.cut_short:
        click.echo(f"a stretch of {', '.join(saved.cut_short)} could not be read; how many were in it isn't known")


def _damaged(findings: list[Finding]) -> list[tuple[str, bytes]]:
    found = [(f.kind, bytes.fromhex(f.key)) for f in findings if f.kind in ("block", "tail", "point", "base")]
    entries = [f.key.split("/") for f in findings if f.kind == "entry"]
    return found + [(database, bytes.fromhex(key)) for database, key in entries]


def _repair(here: Installation, findings: list[Finding], records: list[tuple[str, bytes, Recompute]]) -> Repaired:
    aside = here.paths.store / ASIDE
    kept = [keep_aside(aside, name, data) for name, data, _ in records]
    lists = token_lists(here, {bytes.fromhex(finding.key) for finding in findings if finding.kind == "base"})
    if here.owner:
        answer = keeper_client.repair(here.paths.keeper_socket, _damaged(findings), lists)
        done = Repaired(**{**answer, "recompute": [Recompute(**part) for part in answer["recompute"]]})
    else:
        with offline_drain(here.paths, here.config.tiers) as drain:
            drain.settle()  # the drain passes over damaged records, and what it stores is verified
            answer = Operations(drain).repair(_damaged(findings), lists)["repaired"]
        done = Repaired(**{**answer, "recompute": [Recompute(**part) for part in answer["recompute"]]})
        done.lanes = drain.mended_lanes | done.lanes
    done.kept_aside += kept
    done.dropped += len(records)
    done.recompute += [span for _, _, span in records]
    return done


def _lane_damage(here: Installation) -> list[tuple[str, bytes, Recompute]]:
    """(name for its file, bytes, what it costs) of each damaged record: the rest of its sequence in the lane can't be used either."""
    names, found = open_names(here.paths), []
    for path in sorted(here.paths.lane_dir.glob("*.lane")) if here.paths.lane_dir.exists() else []:
        try:
            lane = LaneReader.open(path)
        except (FileNotFoundError, OtherFormat):
            continue  # it was drained meanwhile, or is made good first
        try:
            for header, data in damaged_records(lane):
                session, stream = names.get(header.sequence, ("", ""))
                ends = [other.token_end for other in lane.records(lane.tail) if other.sequence == header.sequence]
                span = Recompute(session, stream, header.token_start, max(ends, default=header.token_end))
                found.append((f"record-{lane.name}-{header.number}", data, span))
        finally:
            lane.close()
    return found


def _would_recompute(here: Installation, findings: list[Finding]) -> list[Recompute]:
    """From the first bad token of each stream to the end of what is stored of it."""
    from tiers.inspect import sequences
    from tiers.view import StoreReader

    starts: dict[tuple[str, str], int] = {}
    for finding in findings:
        for part in finding.affected if finding.kind != "record" else ():
            key = part.session, part.stream
            starts[key] = min(starts.get(key, part.token_start), part.token_start)
    store = StoreReader(here.paths.store, map_bytes=here.config.tiers.store_map_bytes)
    rows: dict[tuple[str, str], int] = {}
    for row in sequences(store):
        rows[row.session, row.stream] = max(row.position, rows.get((row.session, row.stream), 0))
    store.close()
    return [Recompute(*key, start, rows.get(key, start)) for key, start in sorted(starts.items())]


def merged(parts: list[Recompute]) -> list[Recompute]:
    """One range a session: turns of a session lean on the same blocks."""
    by_name: dict[tuple[str, str], Recompute] = {}
    for part in parts:
        key = (part.session, "" if part.session else part.stream)
        known = by_name.get(key, part)
        by_name[key] = Recompute(
            part.session, part.stream, min(known.token_start, part.token_start), max(known.token_end, part.token_end)
        )
    return sorted(by_name.values())


def _report(
    here: Installation, as_json: bool, dry_run: bool, findings: list[Finding], journals: list[Finding], done: Repaired,
    saved: Salvaged | None,
) -> None:  # fmt: skip
    recompute = merged(done.recompute)
    if as_json:
        row = {**asdict(done), "recompute": [part._asdict() for part in recompute]}
        listed = [finding_row(finding) for finding in findings]
        salvaged = asdict(saved) if saved is not None else None
        print_json(
            {
                "dry_run": dry_run,
                "findings": listed,
                "journals": [finding_row(f) for f in journals],
                "saved": salvaged,
                **row,
            }
        )
        sys.stdout.flush()
        return
    for name, what in done.lanes.items():
        click.echo(f"lane {name}: {what}")
    for path in done.kept_aside:
        click.echo(f"kept aside: {Path(path).relative_to(here.paths.data_dir)}")
    verb = "would be" if dry_run else "will be"
    for part in recompute:
        click.echo(
            f"session {part.session or '-'}: tokens [{part.token_start}, {part.token_end}) {verb} computed again"
        )
    if done.live:
        click.echo(f"{done.live} streams that are being answered lean on what is damaged: run repair again after them")
    for finding in journals:
        click.echo(f"journal {finding.key}: {finding.reason}, nothing is changed")
    if not findings:
        click.echo("nothing is damaged in store and lanes" if saved is None else "what the new file holds is whole")
    elif not dry_run:
        if done.rebuilt:
            click.echo(f"{len(done.rebuilt)} damaged bases were made again from what is stored")
        click.echo(f"{done.dropped} damaged were dropped; everything else is as it was")
