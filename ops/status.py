"""`concordia status`: what runs, from the gateway and from the files in the lane directory, which work with the gateway down.

Reads only; runs in the command's process (and `engine_state` in `serve`).
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import pid_file
from engine.status_page import StatusPage
from tiers import heartbeat
from tiers.paths import Paths

if TYPE_CHECKING:
    from ops.config import Config
    from ops.errors import OpsError
    from ops.installation import Installation


SESSIONS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process. state: running, stopped (by SIGSTOP), dead, or for an engine what its page says."""

    name: str
    pid: int
    state: str
    incarnation: int
    beat_age_ms: float | None = None
    step_count: int | None = None


@dataclass(frozen=True, slots=True)
class LaneRow:
    """One lane file."""

    name: str
    file_bytes: int


def engine_state(paths: Paths, engine: str) -> str:
    """`not started`, `dead`, or the state its page says."""
    known = pid_file.read(paths.pid_file(engine))
    if known is None:
        return "not started"
    if not known.alive:
        return "dead"
    with contextlib.suppress(FileNotFoundError, ValueError):
        page = StatusPage.open(paths.status(engine))
        if page.pid == known.pid:
            return page.state
    return "starting"


def processes(paths: Paths) -> list[ProcessRow]:
    """Every process that left a pid file."""
    return [_row(paths, path) for path in sorted(paths.lane_dir.glob("*.pid"), key=_order)]


def lanes(paths: Paths) -> list[LaneRow]:
    """Every lane."""
    rows = []
    for path in sorted(paths.lane_dir.glob("*.lane")):
        with contextlib.suppress(FileNotFoundError):  # just now
            rows.append(LaneRow(path.stem, path.stat().st_blocks * 512))
    return rows


# ---------------------------------------------------------------- the command


@dataclass(slots=True)
class Shown:
    """All that is shown. problem: why the gateway said nothing; local: whether its directories are on this machine."""

    paths: Paths
    problem: OpsError | None = None
    local: bool = True
    engines: list[dict[str, Any]] | None = None
    degraded: list[dict[str, Any]] = field(default_factory=list)
    keeper: dict[str, Any] = field(default_factory=dict)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    processes: list[ProcessRow] = field(default_factory=list)
    lanes: list[LaneRow] = field(default_factory=list)


def look(config: Config, url: str | None) -> Shown:
    """What `collect` finds; of a gateway that wants a key which isn't given, what its directories say."""
    from ops.client import UNAUTHORIZED, ApiError
    from ops.installation import find

    try:
        return collect(find(config, url))
    except ApiError as error:
        if error.status != UNAUTHORIZED:
            raise
        return Shown(config.paths, error, processes=processes(config.paths), lanes=lanes(config.paths))


def collect(here: Installation) -> Shown:
    """Ask the gateway, and look at the directories of the installation that it serves (else at those that were named)."""
    from ops.client import ApiError
    from ops.errors import NotRunning

    shown = Shown(here.foreign_paths or here.paths)
    client = here.gateway or here.foreign_gateway
    if client is None:
        advice = _advice(here.paths) or "start one by `concordia serve`, or name it by --url"
        shown.problem = NotRunning(f"no gateway of {here.paths.data_dir} answers at {here.asked}; {advice}")
    else:
        shown.engines = [*here.engines, *here.foreign_engines]
        with contextlib.suppress(ApiError, NotRunning):
            answer = client.get("/admin/sessions")
            shown.degraded, shown.keeper = answer.get("degraded", []), answer.get("keeper", {})
            shown.sessions = answer.get("data", [])
    shown.local = shown.paths.data_dir.is_dir() or not client
    if shown.local:
        shown.processes, shown.lanes = processes(shown.paths), lanes(shown.paths)
    return shown


def _advice(paths: Paths) -> str:
    """What helps where the gateway and `serve` are there and don't answer; "" if they aren't."""
    states = {name: _row(paths, paths.pid_file(name)) for name in ("serve", "gateway") if paths.pid_file(name).exists()}
    stopped = [f"kill -CONT {row.pid}" for row in states.values() if row.state == "stopped"]
    if stopped:
        return f"it is there and stopped: `{'; '.join(stopped)}` lets it go on"
    serving = states.get("serve")
    if serving is not None and serving.state == "running":
        return f"`concordia serve` (pid {serving.pid}) is there: it starts a gateway that died or is stuck again, see its log"
    return ""


def lag(shown: Shown) -> dict[str, int]:
    """Sums over sessions: tokens whose state is in no lane yet, and tokens whose state is captured but not on disk."""
    live = [row for row in shown.sessions if row.get("state") == "live"]
    return {
        "capture_lag": sum(row.get("capture_lag", 0) for row in live),
        "durable_lag": sum(row.get("durable_lag", 0) for row in shown.sessions),
    }


def _is_behind(row: dict[str, Any]) -> bool:
    """More than the one token that an answer's end may leave."""
    return bool(row.get("capture_lag", 0) > 1 or row.get("durable_lag", 0) or row.get("degraded"))


def as_json(shown: Shown) -> dict[str, Any]:
    """For programs."""
    from ops.errors import NotRunning

    state = "up" if shown.problem is None else "down" if isinstance(shown.problem, NotRunning) else "locked"
    return {
        "gateway": state,
        "engines": shown.engines,
        "processes": [asdict(row) for row in shown.processes],
        "lanes": [asdict(row) for row in shown.lanes],
        "sessions": {
            "count": len(shown.sessions),
            **lag(shown),
            "behind": [row for row in shown.sessions if _is_behind(row)],
        },
        "degraded": shown.degraded,
        "keeper": shown.keeper,
        "data_dir": str(shown.paths.data_dir),
        "lane_dir": str(shown.paths.lane_dir),
    }


def show(shown: Shown) -> None:
    """For people."""
    from ops.show import console, counted, table

    where = shown.paths.data_dir if shown.local else f"{shown.paths.data_dir} (not on this machine)"
    console.print(f"data directory {where}", highlight=False)
    columns = ("name", "pid", "state", "incarnation", "last beat ms", "steps")
    rows = [(row.name, row.pid, row.state, row.incarnation, row.beat_age_ms, row.step_count) for row in shown.processes]
    if rows:
        console.print(table("processes", columns, rows))
    elif shown.local:
        console.print("none of its processes is running")
    if shown.engines:
        keys = [
            key
            for key, value in shown.engines[0].items()
            if not isinstance(value, dict | list) and any(row.get(key) is not None for row in shown.engines)
        ]
        console.print()
        cells = [[row.get(key) for key in keys] for row in shown.engines]
        console.print(table("engines, as the gateway sees them", keys, cells))
    if shown.lanes:
        waiting = {name: ends["head"] - ends["tail"] for name, ends in shown.keeper.get("lanes", {}).items()}
        lane_rows = [(row.name, f"{row.file_bytes / 2**20:.0f}", waiting.get(row.name)) for row in shown.lanes]
        console.print()
        console.print(table("lanes", ("engine", "size of the file, MiB", "records not freed"), lane_rows))
    if shown.engines is not None:
        behind = lag(shown)
        console.print(
            f"\n{counted(len(shown.sessions), 'session')}; tokens that wait for a lane: {behind['capture_lag']}, "
            f"for the disk: {behind['durable_lag']}",
            highlight=False,
        )
    behind_most = sorted(shown.sessions, key=lambda row: -row.get("capture_lag", 0) - row.get("durable_lag", 0))
    rows_behind = [row for row in behind_most if _is_behind(row)][:SESSIONS_SHOWN]
    if rows_behind:
        names = ("id", "state", "tokens", "captured", "durable", "capture_lag", "durable_lag", "degraded")
        console.print(
            table("sessions that are behind", names, [[row.get(key) for key in names] for row in rows_behind])
        )
    for row in shown.degraded:
        engine = f" ({row['engine']})" if row.get("engine") else ""
        console.print(f"[red]degraded[/]: {row['state']}{engine}: {row['reason']}. {row['hint']}", highlight=False)


def _order(path: Path) -> tuple[int, str]:
    first = ["serve", "gateway", "host", "keeper", "nursery"]
    return (first.index(path.stem) if path.stem in first else len(first), path.stem)


def _row(paths: Paths, path: Path) -> ProcessRow:
    known = pid_file.read(path)
    if known is None:
        return ProcessRow(path.stem, 0, "unreadable pid file", 0)
    if not known.alive:
        return ProcessRow(path.stem, known.pid, "dead", known.incarnation)
    with contextlib.suppress(FileNotFoundError, ValueError):
        page = StatusPage.open(paths.status(path.stem))
        if page.pid == known.pid:
            state = "stopped" if known.stopped else page.state
            return ProcessRow(
                path.stem, known.pid, state, known.incarnation, round(page.beat_age_ms(), 1), page.step_count
            )
    beat = heartbeat.read(paths.beat(path.stem))
    age_ms = round(beat.age_ms, 1) if beat is not None and beat.pid == known.pid else None
    return ProcessRow(path.stem, known.pid, "stopped" if known.stopped else "running", known.incarnation, age_ms)
