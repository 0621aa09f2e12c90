"""`concordia compact`, `gc`, `stats` and `sessions pin`: what the store holds, and making it smaller. Run in the command's process.

The keeper does the work in slices between its drains, if one runs; else the command does it in its place.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import click
import msgspec

from gateway.tenancy import named
from ops.errors import StateRefused
from ops.flags import confirm, print_json
from ops.installation import Installation, need_data
from ops.names import check_spelling
from ops.show import Bar, console, size, table
from tiers import keeper_client
from tiers.compaction import Compaction
from tiers.errors import TierError
from tiers.keeper_client import JobState
from tiers.keeper_operations import Operations
from tiers.offline import offline_drain
from tiers.shrink import Shrink

PHASES = {
    "fold": "folding sessions",
    "evict": "evicting",
    "seal": "sealing what was stored before its tenant had a key",
    "mark": "marking",
    "wait": "waiting for restores under way",
    "free": "freeing",
    "copy": "copying to a smaller file",
    "verify": "verifying the copy",
    "switch": "switching",
}
GC_SETTLE_S = 1e9  # fold nothing


def run_compact(
    here: Installation, as_json: bool, *, settle_s: float, grace_s: float | None, shrink: bool, yes: bool, dry_run: bool
) -> None:
    """Fold, evict, free. Raises StateRefused, StoreFailed, TierError."""
    need_data(here)
    if not dry_run and _evicts(here):
        confirm("Sessions beyond the budgets or their time to live are evicted. Go on?", yes=yes)
    counts, took_s = _compact(here, as_json, settle_s, grace_s, dry_run, shrink)
    _report(counts, as_json, dry_run, took_s)


def run_gc(
    here: Installation, as_json: bool, *, grace_s: float | None, dry_run: bool, drop_locked: bool, yes: bool
) -> None:
    """Free what nothing names. Raises StateRefused, StoreFailed, TierError."""
    need_data(here)
    if drop_locked and not dry_run:
        confirm("Give up everything that is sealed with keys that are not given?", yes=yes)
        if here.owner:
            keeper_client.drop_locked(here.paths.keeper_socket)
        else:
            with offline_drain(here.paths, here.config.tiers, without_keys=True) as drain:
                Operations(drain).drop_locked()
    counts, took_s = _compact(here, as_json, GC_SETTLE_S, grace_s, dry_run, shrink=False)
    _report(counts, as_json, dry_run, took_s)


def _evicts(here: Installation) -> bool:
    tiers = here.config.tiers
    tenants = any(limits.disk_bytes for limits in tiers.tenants.values())
    return bool(tiers.disk_budget_bytes or tiers.tenant_budget_bytes or tiers.session_ttl_s or tenants)


def _compact(
    here: Installation, as_json: bool, settle_s: float, grace_s: float | None, dry_run: bool, shrink: bool
) -> tuple[dict[str, int], float]:
    started = time.monotonic()
    with Bar("compacting", quiet=as_json) as bar:

        def show(state: JobState) -> None:
            bar(state.done, state.total, PHASES.get(state.phase, state.phase))

        if here.owner:
            try:
                state = keeper_client.compact(
                    here.paths.keeper_socket, settle_s=settle_s, grace_s=grace_s, dry_run=dry_run, shrink=shrink,
                    on_progress=show,
                )  # fmt: skip
            except TierError as error:
                if "is running" in str(error):
                    raise StateRefused(f"{error}") from error
                raise
            counts = state.counts
        else:
            counts = _compact_offline(here, bar, settle_s, dry_run, shrink)
    return counts, time.monotonic() - started


def _compact_offline(here: Installation, bar: Bar, settle_s: float, dry_run: bool, shrink: bool) -> dict[str, int]:
    """No engine restores anything, so nothing need be left alone for a while."""
    with offline_drain(here.paths, here.config.tiers) as drain:
        compaction = Compaction(drain, settle_s=settle_s, grace_s=0.0, budget=drain.budget(), dry_run=dry_run)
        counts: Counter[str] = Counter()
        works: list[Compaction | Shrink] = [compaction, *([Shrink(drain)] if shrink and not dry_run else [])]
        for work in works:
            for _ in work.run():
                at = work.progress
                bar(at.done, at.total, PHASES.get(at.phase, at.phase))
            counts.update(work.progress.counts)
        return dict(counts)


SAID = {
    "folded": "sessions compacted",
    "folded_sequences": "submissions folded into them",
    "evicted": "sessions evicted",
    "freed_blocks": "blocks freed",
    "freed_tails": "tail pieces freed",
    "freed_points": "rollback points freed",
    "freed_streams": "epochs of gone streams freed",
    "rewritten_blocks": "blocks rewritten without rows outside kept windows",
    "sealed_values": "values sealed that were stored before their tenant had a key",
    "copied_records": "records copied to a smaller file",
    "bad_records": "of them damaged, copied as they are (`concordia repair`)",
    "kept_broken": "sessions left alone because a block is missing (`concordia repair`)",
    "bad_bases": "damaged bases left alone (`concordia repair`)",
}


def _report(counts: dict[str, int], as_json: bool, dry_run: bool, took_s: float) -> None:
    if as_json:
        print_json({"dry_run": dry_run, "took_s": round(took_s, 3), "counts": counts})
        return
    for key, text in SAID.items():
        if counts.get(key):
            click.echo(f"{counts[key]} {text}")
    if counts.get("sealed_values") and not counts.get("copied_records"):
        click.echo(
            "pages that are free now may still hold what they were: `concordia compact --shrink` leaves none of them"
        )
    saved = counts.get("freed_bytes", 0) + counts.get("rewritten_bytes", 0)
    verb = "would be free" if dry_run else "are free"
    again = "" if counts.get("copied_records") else " for use again"
    click.echo(f"{size(saved)} {verb}{again}, after {took_s:.1f} s" if saved else "there was nothing to free")


# ---------------------------------------------------------------- stats


def run_stats(here: Installation, as_json: bool) -> None:
    """What is stored, by tenant and by session, and the keeper's counters. Raises StateRefused, StoreFailed."""
    need_data(here)
    if here.owner:
        socket = here.paths.keeper_socket
        stats = keeper_client.stats(socket)
        tenants = {name: msgspec.to_builtins(use) for name, use in keeper_client.tenants(socket).items()}
        sessions = [msgspec.to_builtins(info) for info in keeper_client.sessions(socket)]
    else:
        with offline_drain(here.paths, here.config.tiers) as drain:
            stats, tenants, sessions = drain.stats(), Operations(drain).tenants(), Operations(drain).sessions()
    _add_engines(here, tenants)
    if as_json:
        print_json({"by": here.owner or "command", "stats": stats, "tenants": tenants, "sessions": sessions})
    else:
        _print_stats(here, stats, tenants, sessions)


def _add_engines(here: Installation, tenants: dict[str, dict[str, Any]]) -> None:
    """What each tenant has on the devices, if a gateway knows."""
    for engine in here.engines if here.gateway is not None else ():
        for name, use in engine.get("tenants", {}).items():
            row = tenants.setdefault(name, {"bytes": 0, "limit": 0, "lane_bytes": use["lane_bytes"]})
            for key in ("memory_bytes", "lag_tokens", "evicted", "lane_refused"):
                row[key] = row.get(key, 0) + use[key]


def _print_stats(
    here: Installation, stats: dict[str, Any], tenants: dict[str, dict[str, Any]], sessions: list[dict[str, Any]]
) -> None:
    store, live = stats.get("store_bytes", 0), stats.get("live_bytes", 0)
    limit = stats.get("budgets", {}).get("disk", [0, 0])[1]
    of = (
        f" of a budget of {size(limit)}"
        if here.config.tiers.disk_budget_bytes
        else f", evicting from {size(0.9 * limit)} on"
    )
    console.print(f"store {size(store)}{of}, {size(live)} of it in use", highlight=False)
    if stats.get("failing"):
        console.print(f"[red]failing[/]: {stats['failing']}", highlight=False)
    for row in stats.get("held", []):
        whose = f"tenant {row['tenant']}" if row["tenant"] else "the store"
        text = f"{size(row['used'])} of {size(row['limit'])} are taken by sessions that are live or pinned, which are never evicted"
        console.print(f"[yellow]budget of {whose}[/]: {text}", highlight=False)
    for row in stats.get("snapshots", [])[:1]:
        text = f"pid {row['pid']}, for {row['age_s']:.0f} s, {row['commits_behind']} commits behind"
        console.print(f"oldest reader: {text}", highlight=False)
    rows = [
        (
            name or "-",
            _of(use["bytes"], use.get("limit")),
            _of(use.get("lane_bytes", 0), use.get("lane_limit"), " a lane"),
            _of(use["memory_bytes"], use.get("memory_limit"), " an engine") if "memory_bytes" in use else None,
            *_kinds(use),
        )
        for name, use in tenants.items()
    ]
    columns = ("namespace", "on disk", "in lanes", "on devices", "blocks", "tails", "points", "bases")
    console.print(table("\ntenants", columns, rows))
    cells = [
        (
            row["session"] or row["stream"],
            row["namespace"],
            row["stored"],
            size(row["bytes"]),
            row["points"],
            _state(row),
        )
        for row in sessions[:50]
    ]
    console.print(
        table("\nsessions, last used first", ("session", "namespace", "stored", "bytes", "points", "state"), cells)
    )
    if len(sessions) > 50:
        console.print(f"and {len(sessions) - 50} more (--json lists all)", highlight=False)
    lanes = [(name, ends["tail"], ends["head"], ends["head"] - ends["tail"]) for name, ends in stats["lanes"].items()]
    if lanes:
        console.print(table("\nlanes", ("engine", "tail", "head", "records not freed"), lanes))
    captured, written = stats.get("captured_bytes", 0), stats.get("put_bytes", 0)
    if captured:
        console.print(f"\n{written / captured:.2f} bytes put per byte captured since the keeper began", highlight=False)


def _of(used: int, limit: int | None, each: str = "") -> str:
    return f"{size(used)} of {size(limit)}{each}" if limit else size(used)


def _kinds(use: dict[str, Any]) -> list[int]:
    return [use.get(kind, (0, 0))[0] for kind in ("blocks", "tails", "points", "bases")]


def _state(row: dict[str, Any]) -> str:
    words = ("live", "pinned", "compacted")
    return ", ".join(word for word in words if row[word]) or "stored"


# ---------------------------------------------------------------- pin


def run_pin(here: Installation, session: str, as_json: bool, *, namespace: str, pinned: bool) -> None:
    """Keep a session from being evicted, or let it go. Raises StateRefused, StoreFailed, click.UsageError (no such name can be)."""
    need_data(here)
    session, namespace = named(session, namespace)
    check_spelling(session)
    if here.owner:
        keeper_client.pin(here.paths.keeper_socket, namespace, session, pinned=pinned)
    else:
        with offline_drain(here.paths, here.config.tiers) as drain:
            Operations(drain).pin(namespace, session, pinned)
    if as_json:
        print_json({"session": session, "namespace": namespace, "pinned": pinned})
    else:
        click.echo(f"{session} is {'pinned: it is never evicted' if pinned else 'not pinned any more'}")
