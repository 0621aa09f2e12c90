"""How far every session's state is in a lane and on disk, and what keeps it from getting there. One task on the event loop.

Asks the keeper about once a second, one request for all streams that still grow or whose end isn't on disk yet; a keeper that is away costs
nothing but the answer. What it learns is in GET /v1/sessions, /admin, /health and the metrics. Source: docs/operations.md, "Degraded".
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

from engine.messages import TenantStats
from gateway import metrics, supervisors
from gateway.choices import Group
from gateway.engines import Engine
from gateway.journal_sync import JournalSync
from gateway.sessions import SessionTable
from gateway.streams import Stream, StreamTable
from tiers import keeper_client
from tiers.base import session_key
from tiers.errors import KeeperAway, TierError
from tiers.layout import sequence_id
from tiers.rebuild import TokenList

log = structlog.get_logger()

INTERVAL_S = 1.0
PINS_INTERVAL_S = 5.0
ASK_TIMEOUT_S = 5.0
ENDED_KEPT_S = 120.0
TURN_WAIT_S = 5.0
ENDED_UNKNOWN_S = 5.0  # by then the keeper has heard of a sequence
SESSIONS_ASKED = 32  # whose stored position is looked up again in one round
STREAMS_A_REQUEST = 4096
SESSIONS_FAILING, SESSIONS_DAMAGED = "sessions_failing", "sessions_damaged"


@dataclass(frozen=True, slots=True)
class Degraded:
    """One thing that keeps state from a lane or from the disk. Answers go on meanwhile.

    state   `keeper_away`, `disk_full`, `map_full`, `over_budget`, `store_failing`, `store_deleted`, `lane_full`, `lane_share_full`
            or `lane_gone`; `journal_failing` and `sessions_failing` keep no state, but streams and sessions from being written
            down; `sessions_damaged` keeps nothing back; `budget_held` keeps nothing back yet: a budget is used up by what may not
            be evicted; `host_away` and `serve_away` keep nothing back, but nobody would be started again
    since   unix time at which it was first seen
    tenant  whom alone it concerns; "": everybody
    """

    state: str
    since: int
    reason: str
    hint: str
    engine: str = ""
    tenant: str = ""


HINTS = {
    "keeper_away": "the host agent starts it again, or continues it after a minute if it was stopped; state stays in the lanes meanwhile",
    "disk_full": "free disk space or move the data directory; the keeper tries again every second",
    "map_full": "raise tiers.store_map_bytes and restart, or run `concordia gc` and `concordia compact --shrink`",
    "over_budget": "sessions least recently used are evicted; if none can be: raise tiers.disk_budget_bytes or store_map_bytes, "
    "unpin or end sessions",
    "budget_held": "what is live or pinned isn't evicted: unpin or end sessions, or raise the budget",
    "journal_failing": "answers go on, but would not survive the gateway: free disk space, or make the journal directory writable; "
    "it is tried again every few seconds",
    SESSIONS_FAILING: "sessions go on from memory, but what was begun, forked, imported or deleted since would be forgotten "
    "with the gateway: free disk space, or make DATA/sessions writable; it is tried again every second",
    SESSIONS_DAMAGED: "look at the disk; forks and imports without a turn, and sessions whose journals are gone, may be missing: if "
    "they are wanted, stop and restore a backup. Then move that file away",
    **supervisors.HINTS,
    "store_failing": "see the keeper's log; state stays in the lanes, `concordia doctor` looks at the disk",
    "store_deleted": "find out who writes to the data directory; if state was lost and is wanted back, stop and restore a backup",
    "lane_full": "the keeper is behind or stopped; what is missing is captured from the device when there is room, "
    "raise tiers.lane_bytes if it happens under normal load",
    "lane_gone": "a new one is made by itself; if it can't be, the engine's log says why (no room in shared memory, no rights)",
    "lane_share_full": "its other state is captured from the device when the keeper has freed some; raise its lane_bytes if it happens "
    "under normal load",
}
KEEP_NO_STATE = (
    "store_deleted",
    "budget_held",
    "journal_failing",
    SESSIONS_FAILING,
    SESSIONS_DAMAGED,
    *supervisors.HINTS,
)
Cause = tuple[str, str, str]  # state, engine, tenant


@dataclass(slots=True)
class Position:
    """Of one stream: how far its state is committed to the store, and how far that is on the disk."""

    stored: int = 0
    durable: int = 0
    epoch: int = 0


@dataclass(slots=True)
class Keeper:
    """The keeper's last answer."""

    up: bool = False
    stats: dict[str, Any] = field(default_factory=dict)


class Durability:
    """Owner of what is known about durability; `run` is its task."""

    def __init__(
        self, keeper_socket: Path, table: StreamTable, sessions: SessionTable, engines: Callable[[], Iterable[Engine]],
        journals: JournalSync, away: Callable[[], dict[str, str]] = dict,
    ) -> None:  # fmt: skip
        self._socket = keeper_socket
        self.journals = journals
        self._table = table
        self._sessions = sessions
        self._engines = engines
        self._away = away
        self._positions: dict[str, Position] = {}
        self._ended: dict[str, tuple[Stream, float]] = {}
        self._since: dict[Cause, int] = {}
        self._lane_full: dict[str, int] = {}
        self._share_full: dict[tuple[str, str], int] = {}
        self._tenants_measured: set[str] = set()
        self._seen_keeper = False
        self._pins_at = 0.0
        self.pins: frozenset[tuple[str, str]] = (
            frozenset()
        )  # (namespace, session); asked for only if somebody wants to know
        self.on_pins: Callable[[], None] | None = None
        self._losses: list[int] = []  # what the keeper said of what it has dropped
        # Sessions whose durable position is to be asked again: at first those that the last process saw no settled end of.
        self._doubtful: dict[str, None] = {r.session: None for r in sessions.all() if r.durable + 1 < r.token_count}
        self.keeper = Keeper()
        self.degraded: list[Degraded] = []

    async def run(self) -> None:
        """Ask, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def settle(self, answer: Stream | Group) -> None:
        """Before an answer ends under `turn`: its journal onto the disk, and a stream's state as far as it is captured.

        Waits for TURN_WAIT_S at most: a disk or a keeper that is stuck never keeps an answer from ending, but it is said.
        """
        trouble = ""
        try:
            async with asyncio.timeout(TURN_WAIT_S):
                if not await self.journals.sync([answer.journal.path] if answer.journal else []):
                    trouble = "its journal can't be synced"
                if answer.journal is not None and answer.journal.trouble:
                    trouble = f"its journal can't be written: {answer.journal.trouble}"
                if isinstance(answer, Stream):
                    await keeper_client.adrain(self._socket, sync=True, timeout_s=TURN_WAIT_S)
        except (TierError, TimeoutError, ValueError, KeyError) as error:  # away, or of another version
            trouble = trouble or str(error) or f"not within {TURN_WAIT_S:g} s"
        if trouble:
            metrics.turns_unsynced.inc()
            log.warning("deliver.turn_unsynced", stream=answer.id, session=answer.spec.session or None, error=trouble)

    async def look(self) -> None:
        """One round: positions, the keeper's state, what is degraded."""
        streams = self._interesting()
        names = {sequence_id(stream.id, stream.epoch).hex(): stream for stream in streams.values() if stream.epoch}
        try:
            answer, stats = await self._ask_keeper(list(names))
        except (TierError, ValueError, KeyError) as error:  # away, or of another version
            self.keeper = Keeper(False, self.keeper.stats)
            reason = error.reason if isinstance(error, TierError) else str(error)
        else:
            self.keeper, self._seen_keeper, reason = Keeper(True, stats), True, ""
            for name, (stored, durable) in answer.items():
                if name in names:
                    self._take(names[name], stored, durable)
            if _is_drained(stats):
                self._settle_unknown(stream for name, stream in names.items() if name not in answer)
        self._judge(reason)  # before anything is waited for: a session's positions and what is degraded belong together
        if self.keeper.up:
            await self._ask_again(self.keeper.stats)
            await self._look_at_pins()
        self._measure(streams)

    async def _ask_keeper(self, names: list[str]) -> tuple[dict[str, tuple[int, int]], dict[str, Any]]:
        """Positions and stats. A keeper that answers but can't use its store isn't away: `failing` says why, and what else was known stays.

        Raises KeeperAway, and ValueError or KeyError (an answer of another version)
        """
        refused, answer, stats = "", dict[str, tuple[int, int]](), dict[str, Any]()
        try:
            answer = await keeper_client.apositions(self._socket, names, timeout_s=ASK_TIMEOUT_S)
        except KeeperAway:
            raise
        except TierError as error:
            refused = error.cause
        try:
            stats = await keeper_client.astats(self._socket, timeout_s=ASK_TIMEOUT_S)
        except KeeperAway:
            raise
        except TierError as error:
            refused = refused or error.cause
        failing = stats.get("failing") or refused
        return answer, {**self.keeper.stats, **stats, "failing": failing} if failing else stats

    async def _look_at_pins(self) -> None:
        """Which sessions are pinned, for whoever protects those first."""
        if self.on_pins is None or time.monotonic() - self._pins_at < PINS_INTERVAL_S:
            return
        self._pins_at = time.monotonic()
        with contextlib.suppress(TierError, ValueError, KeyError):  # asked again soon
            pins = await keeper_client.apins(self._socket, timeout_s=ASK_TIMEOUT_S)
            if pins != self.pins:
                self.pins = pins
                self.on_pins()

    async def _ask_again(self, stats: dict[str, Any]) -> None:
        """After sessions were evicted, forgotten or repaired: how much of those at rest is stored now. And what mends a damaged base."""
        if stats.get("losses", []) != self._losses:
            self._losses = stats.get("losses", [])
            self._doubtful |= {record.session: None for record in self._sessions.all() if record.token_count}
        busy = {stream.spec.session for stream in (*self._table.live.values(), *(s for s, _ in self._ended.values()))}
        asked = [name for name in self._doubtful if name not in busy][:SESSIONS_ASKED]
        try:
            await self._mend(stats.get("bad_bases", []))
            lists = [one for name in asked if (one := self._token_list(name)) is not None]
            positions = await keeper_client.astored(self._socket, lists, timeout_s=ASK_TIMEOUT_S) if lists else []
        except (TierError, ValueError, KeyError) as error:
            log.debug("durability.not_asked", error=str(error))
            return  # they stay in doubt
        for name in asked:
            del self._doubtful[name]
        for one, position in zip(lists, positions, strict=True):
            if self._is_latest(one):
                self._sessions.found_stored(one.session, position)
            else:
                self.doubt(one.session)

    async def _mend(self, bases: list[str]) -> None:
        if not bases:
            return
        keys = {bytes.fromhex(key) for key in bases}
        names = [r.session for r in self._sessions.all() if session_key(r.namespace, r.session) in keys]
        lists = [one for name in names if (one := self._token_list(name)) is not None]
        if lists:
            await keeper_client.amend(self._socket, bases, lists)

    def _token_list(self, session: str) -> TokenList | None:
        record = self._sessions.get(session)
        if record is None:
            return None
        return TokenList(record.namespace, session, self._sessions.tokens(session), int(1000 * record.last_used))

    def _is_latest(self, one: TokenList) -> bool:
        """Whether the session still is that list: no turn has begun or ended since."""
        record = self._sessions.get(one.session)
        return record is not None and int(1000 * record.last_used) == one.used_ms

    def doubt(self, session: str) -> None:
        """Ask the keeper again how much of it is stored, when it is at rest."""
        self._doubtful[session] = None

    async def stored(self, session: str) -> int | None:
        """How much of a session at rest is in the store; None if the keeper doesn't say, and it is asked again later."""
        one = self._token_list(session)
        try:
            if one is not None:
                (position,) = await keeper_client.astored(self._socket, [one], timeout_s=ASK_TIMEOUT_S)
                if self._is_latest(one):
                    return position
        except (TierError, ValueError, KeyError) as error:
            log.debug("durability.not_asked", error=str(error))
        self.doubt(session)
        return None

    def ended(self, stream: Stream) -> None:
        """A stream is finished; its last rows may still be on their way."""
        if stream.epoch:
            self._ended[stream.id] = stream, time.monotonic()

    def positions(self, stream: str) -> Position:
        """What is known of a stream."""
        return self._positions.get(stream, Position())

    def _interesting(self) -> dict[str, Stream]:
        now = time.monotonic()
        for stream, at in list(self._ended.values()):
            if now - at > ENDED_KEPT_S:
                self._settle(stream)
                self._doubt(stream)
        live = dict(self._table.live)
        for name in self._positions.keys() - live.keys() - self._ended.keys():
            del self._positions[name]
        found = {name: stream for name, (stream, _) in self._ended.items()} | live
        return dict(list(found.items())[-STREAMS_A_REQUEST:])

    def _take(self, stream: Stream, stored: int, durable: int) -> None:
        known = self._positions.setdefault(stream.id, Position())
        known.stored, known.durable, known.epoch = stored, max(durable, 0), stream.epoch
        stream.captured = max(stream.captured, stored)
        self._sessions.progressed(stream, known.durable)
        if stream.id in self._ended and known.durable >= max(stream.captured, len(stream.tokens) - 1):
            self._settle(stream)

    def _settle_unknown(self, streams: Iterable[Stream]) -> None:
        """The keeper doesn't know their sequences: folded into a base already, evicted, or never captured."""
        now = time.monotonic()
        for stream in streams:
            ended_at = self._ended.get(stream.id, (stream, now))[1]
            if now - ended_at > ENDED_UNKNOWN_S:
                self._settle(stream)
                self._doubt(stream)

    def _doubt(self, stream: Stream) -> None:
        if stream.spec.session:
            self.doubt(stream.spec.session)

    def _settle(self, stream: Stream) -> None:
        """Nothing more will change about a stream that has ended."""
        del self._ended[stream.id]
        self._sessions.settled(stream)

    # ------------------------------------------------------------ degraded states

    def _judge(self, away: str) -> None:
        found: dict[Cause, str] = {}
        if away and self._seen_keeper:
            found["keeper_away", "", ""] = away
        found |= {(state, "", ""): said for state, said in self._away().items()}
        failing = self.keeper.stats.get("failing", "") if self.keeper.up else ""
        if failing:
            found[failing_state(failing), "", ""] = failing
        deleted = self.keeper.stats.get("deleted", "") if self.keeper.up else ""
        if deleted:
            found["store_deleted", "", ""] = deleted
        for row in self.keeper.stats.get("held", []) if self.keeper.up else ():
            whose = f"tenant {row['tenant']}'s" if row["tenant"] else "the store's"
            found["budget_held", "", row["tenant"]] = (
                f"{row['used']} of {whose} {row['limit']} bytes are taken by sessions that are live or pinned"
            )
        troubles = self._table.journal_troubles()
        if troubles:
            found["journal_failing", "", ""] = (
                f"streams whose journal can't be written: {len(troubles)} ({troubles[0]})"
            )
        if self._sessions.trouble:
            found[SESSIONS_FAILING, "", ""] = f"the table of sessions can't be written: {self._sessions.trouble}"
        if aside := self._sessions.damaged:
            found[SESSIONS_DAMAGED, "", ""] = (
                f"the table of sessions was damaged, and made anew from what could be read of it and of the journals: {aside[-1]}"
            )
        for engine in self._engines():
            times, behind = engine.stats.lane_full, engine.stats.capture_lag_tokens
            grew = times > self._lane_full.get(engine.name, times)
            if engine.ready and (grew or behind and ("lane_full", engine.name, "") in self._since):
                cause = f"{engine.name}'s lane has no room; {behind} tokens wait on the device"
                found["lane_full", engine.name, ""] = cause
            self._lane_full[engine.name] = times
            if engine.ready and engine.stats.lane_gone:
                found["lane_gone", engine.name, ""] = f"{engine.name}'s lane was deleted, and there is no new one yet"
            found |= self._judge_shares(engine)
        self._tell(found)

    def _judge_shares(self, engine: Engine) -> dict[Cause, str]:
        """Tenants whose share of an engine's lane has no room."""
        found: dict[Cause, str] = {}
        for tenant, use in engine.tenants.items():
            key = "lane_share_full", engine.name, tenant
            grew = use.lane_refused > self._share_full.get((engine.name, tenant), use.lane_refused)
            if engine.ready and (grew or use.lag_tokens and key in self._since):
                found[key] = (
                    f"tenant {tenant} has used up its share of {engine.name}'s lane; {use.lag_tokens} of its tokens wait on the device"
                )
            self._share_full[engine.name, tenant] = use.lane_refused
        return found

    def _tell(self, found: dict[Cause, str]) -> None:
        now = int(time.time())
        for key in found.keys() - self._since.keys():
            state, engine, tenant = key
            log.warning(
                "degraded.began", state=state, engine=engine, tenant=tenant, reason=found[key], hint=HINTS[state]
            )
        for key in self._since.keys() - found.keys():
            state, engine, tenant = key
            log.info("degraded.ended", state=state, engine=engine, tenant=tenant, lasted_s=now - self._since[key])
        self._since = {key: self._since.get(key, now) for key in found}
        self.degraded = [
            Degraded(key[0], self._since[key], reason, HINTS[key[0]], *key[1:]) for key, reason in sorted(found.items())
        ]

    def rows(self) -> list[dict[str, Any]]:
        """For answers."""
        return [asdict(row) for row in self.degraded]

    def of_session(self, captured: int, durable: int, tokens: int, engines: list[str], namespace: str) -> str:
        """Why a session's state isn't where it should be; "" if nothing is known to hinder it."""
        for row in self.degraded:
            if row.tenant not in ("", namespace):
                continue
            if row.state in ("lane_full", "lane_share_full", "lane_gone"):
                if row.engine in engines and captured + 1 < tokens:
                    return row.state
            elif durable < captured and row.state not in KEEP_NO_STATE:
                return row.state
        return ""

    # ------------------------------------------------------------ metrics

    def _measure(self, streams: dict[str, Stream]) -> None:
        metrics.keeper_up.set(self.keeper.up)
        live = [stream for stream in streams.values() if stream.end is None]
        metrics.capture_lag.set(sum(max(0, len(stream.tokens) - 1 - stream.captured) for stream in live))
        behind = [max(0, stream.captured - self.positions(name).durable) for name, stream in streams.items()]
        metrics.durable_lag.set(sum(behind))
        now = {row.state for row in self.degraded}
        for state in HINTS:
            metrics.degraded.labels(state).set(state in now)
        stats = self.keeper.stats
        metrics.store_bytes.set(stats.get("store_bytes", 0))
        oldest = (stats.get("snapshots") or [{"age_s": 0.0, "commits_behind": 0}])[0]
        metrics.snapshot_oldest_s.set(oldest["age_s"])
        metrics.snapshot_oldest_commits.set(oldest["commits_behind"])
        for outcome in ("rescued", "lost"):
            metrics.stores_deleted.labels(outcome).set(stats.get(f"store_{outcome}", 0))
        metrics.unsynced_ms.set(stats.get("unsynced_ms", 0))
        for lane, ends in stats.get("lanes", {}).items():
            metrics.lane_waiting.labels(lane).set(ends["head"] - ends["tail"])
        self._measure_tenants(stats.get("tenants", {}))

    def _measure_tenants(self, stored: dict[str, list[int]]) -> None:
        by_tenant: dict[str, list[TenantStats]] = {}
        for engine in self._engines():
            for name, use in engine.tenants.items() if engine.ready else ():
                by_tenant.setdefault(name, []).append(use)
        self._tenants_measured |= {name for name in (*by_tenant, *stored) if name}
        for name in self._tenants_measured:  # one that is gone takes nothing
            uses, (disk, disk_limit) = by_tenant.get(name, []), stored.get(name, (0, 0))
            for kind, size, limit in (
                ("disk", disk, disk_limit),
                ("lane", sum(use.lane_bytes for use in uses), max((use.lane_limit for use in uses), default=0)),
                ("memory", sum(use.memory_bytes for use in uses), max((use.memory_limit for use in uses), default=0)),
            ):
                metrics.tenant_bytes.labels(name, kind).set(size)
                metrics.tenant_limit.labels(name, kind).set(limit)
            metrics.tenant_lag.labels(name).set(sum(use.lag_tokens for use in uses))
            metrics.tenant_refused.labels(name).set(sum(use.lane_refused for use in uses))
            metrics.tenant_evicted.labels(name).set(sum(use.evicted for use in uses))


def _is_drained(stats: dict[str, Any]) -> bool:
    """Whether the keeper has taken all that is in the lanes: then it knows every sequence that it will ever hear of."""
    lanes = stats.get("lanes", {}).values()
    return not stats.get("failing") and all(ends["taken"] == ends["head"] for ends in lanes)


def failing_state(reason: str) -> str:
    """Which of the states the keeper's own words mean."""
    if "map is full" in reason:
        return "map_full"
    if "budget is used up" in reason:
        return "over_budget"
    return "disk_full" if "disk is full" in reason or "No space left" in reason else "store_failing"
