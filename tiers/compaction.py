"""Compaction: ended sequences become one base a session, and what nothing names is freed. Stage *compact*; the keeper's thread.

Plans are pure functions of values. The doer is a generator that yields between small transactions, so that the drain goes first
and a crash at any instruction loses nothing: a base is put in the transaction that removes what it replaces, and only
what was found unnamed, and stayed so, is freed. Blocks are shared by id, so collection is mark and sweep: bases and sequences name
whole chains; what records name while a collection runs is noted by the drain. Source: docs/log-format.md
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import structlog

from tiers import failpoints, late_keys
from tiers.base import Base, SessionKey, session_key
from tiers.errors import BadBlock, NoRoom
from tiers.export import is_importing
from tiers.group import Group
from tiers.keys import Locked
from tiers.layout import ALL_GROUPS, BlockId, PointId, RootId, SequenceId, chain_root, point_id
from tiers.store import Store
from tiers.thinning import kept_points, kept_windows, window_positions
from tiers.usage import Usage
from tiers.values import Progress, disk_bytes, stream_key, unpack_node
from tiers.view import View

log = structlog.get_logger()

ABANDONED_MS = 3_600_000  # an open sequence without a record for so long has no engine any more
GRACE_S = 10.0  # a restore that found a block before it was unnamed has opened its sequence by then
BATCH = 256  # small records looked at in one transaction
FREE_BATCH_BYTES = 16 << 20  # blocks freed or written again in one transaction
EVICT_FROM, EVICT_TO = 0.9, 0.8  # shares of a budget: from where on, and down to where
MAP_SHARE = 0.8  # of the map that is used at most, so that deleting always finds room


# ---------------------------------------------------------------- plans, pure


class Now(NamedTuple):
    """The time, and since when records have been drained without a failure; milliseconds since 1970."""

    ms: int
    healthy_ms: int


class Stored(NamedTuple):
    """A stored sequence, and whether it is live (has an engine that may go on with it)."""

    id: SequenceId
    progress: Progress
    live: bool


class Fold(NamedTuple):
    """Sequences of one session that one base replaces; `head` is the newest: its tokens are the session's."""

    key: SessionKey
    head: SequenceId
    replaced: list[SequenceId]


class SessionUse(NamedTuple):
    """What eviction asks of a session. bytes: on disk, shared blocks counted in full."""

    key: SessionKey
    namespace: str
    session: str
    stream: str
    used_ms: int
    bytes: int
    live: bool
    pinned: bool


class Budget(NamedTuple):
    """Limits in bytes and seconds; 0: none. `tenant_bytes` holds for each namespace by itself, unless `tenants` has another for it."""

    disk_bytes: int = 0
    tenant_bytes: int = 0
    ttl_s: float = 0.0
    tenants: Mapping[str, int] = {}

    def of(self, namespace: str) -> int:
        """What a tenant may have on the disk."""
        return self.tenants.get(namespace, self.tenant_bytes)

    @property
    def has_tenants(self) -> bool:
        """Whether any tenant has a limit of its own."""
        return bool(self.tenant_bytes) or any(self.tenants.values())

    def is_near(self, namespace: str, used: int) -> bool:
        """Whether a tenant has used so much that sessions of it are to be evicted."""
        limit = self.of(namespace)
        return bool(limit) and used > EVICT_FROM * limit


def is_live(progress: Progress, newest_epoch: int, now: Now) -> bool:
    """Whether a sequence may still grow: open, of its stream's newest epoch, and heard of within an hour in which it could be."""
    heard_ms = max(progress.used_ms, now.healthy_ms)
    return not progress.closed and progress.epoch >= newest_epoch and now.ms - heard_ms < ABANDONED_MS


def plan_folds(sequences: Iterable[Stored], now_ms: int, settle_ms: int) -> list[Fold]:
    """Sessions to compact: nothing of them is live, and the last use was `settle_ms` ago or earlier."""
    by_session: dict[SessionKey, list[Stored]] = {}
    for sequence in sequences:
        p = sequence.progress
        if is_importing(p.stream):
            continue
        by_session.setdefault(session_key(p.namespace, p.session, p.stream), []).append(sequence)
    folds = []
    for key, found in by_session.items():
        newest = max(found, key=lambda one: (one.progress.used_ms, one.progress.epoch, one.progress.position))
        idle_ms = max(0, now_ms - newest.progress.used_ms)  # a stamp may be a little ahead (tiers/clock.py)
        if not any(one.live for one in found) and idle_ms >= settle_ms:
            folds.append(Fold(key, newest.id, [one.id for one in found]))
    return folds


def plan_abandoned(sequences: Iterable[Stored], now_ms: int) -> list[SequenceId]:
    """What imports have put that were interrupted, and were not repeated within an hour."""
    return [
        one.id
        for one in sequences
        if is_importing(one.progress.stream) and now_ms - one.progress.used_ms >= ABANDONED_MS
    ]


def plan_eviction(
    sessions: Iterable[SessionUse], used_bytes: int, tenants: dict[str, int], budget: Budget, now_ms: int
) -> list[SessionUse]:
    """Sessions to drop, least recently used first: those past their time, then until every budget is kept again.

    used_bytes  of the whole store
    tenants     bytes by namespace
    Shared blocks are counted with each session, so this may free too little, never more than it must: plan again afterwards
    """
    order = sorted((s for s in sessions if not s.live and not s.pinned), key=lambda s: s.used_ms)
    chosen: dict[SessionKey, SessionUse] = {}
    if budget.ttl_s:
        chosen = {s.key: s for s in order if now_ms - s.used_ms > 1000 * budget.ttl_s}
    for namespace, used in tenants.items():
        _choose(chosen, [s for s in order if s.namespace == namespace], used, budget.of(namespace))
    _choose(chosen, order, used_bytes, budget.disk_bytes)
    return list(chosen.values())


class Held(NamedTuple):
    """A budget that can't be kept: what is live or pinned alone takes nine tenths of it. namespace: "" is the whole store."""

    namespace: str
    used: int
    limit: int


def plan_held(
    sessions: Sequence[SessionUse],
    chosen: Sequence[SessionUse],
    used_bytes: int,
    tenants: dict[str, int],
    budget: Budget,
) -> list[Held]:
    """Budgets that stay nine tenths full when the chosen sessions are gone, for what may not be evicted. As `plan_eviction`."""
    held = []
    for namespace, used, limit in (
        ("", used_bytes, budget.disk_bytes),
        *((n, u, budget.of(n)) for n, u in tenants.items()),
    ):
        left = used - sum(one.bytes for one in chosen if namespace in ("", one.namespace))
        kept = sum(one.bytes for one in sessions if (one.live or one.pinned) and namespace in ("", one.namespace))
        if limit and min(left, kept) > EVICT_FROM * limit:
            held.append(Held(namespace, used, limit))
    return held


def _choose(chosen: dict[SessionKey, SessionUse], order: list[SessionUse], used: int, limit: int) -> None:
    """Add sessions in order, while what is left after those that were chosen is too much."""
    used -= sum(s.bytes for s in order if s.key in chosen)
    if not limit or used <= EVICT_FROM * limit:
        return
    for session in order:
        if used <= EVICT_TO * limit:
            return
        if session.key not in chosen:
            chosen[session.key] = session
            used -= session.bytes


# ---------------------------------------------------------------- the doer


class Drained(Protocol):
    """What compaction needs of the drain."""

    named: set[bytes] | None
    held: list[Held]

    def now(self) -> Now: ...
    def store(self) -> Store: ...
    def is_open(self, store: Store) -> bool: ...
    def catch_up(self) -> None: ...
    def settle(self) -> None: ...
    def mend_bases(self, keys: Iterable[SessionKey]) -> list[SessionKey]: ...
    def note_loss(self) -> None: ...


Phase = Literal["fold", "evict", "seal", "mark", "wait", "free", "copy", "verify", "switch", "done"]


@dataclass(slots=True)
class Progressing:
    """How far a compaction or a shrink is; `done` of `total` is within the phase."""

    phase: Phase = "fold"
    done: int = 0
    total: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    is_paced: bool = False  # it has nothing to do just now, to keep below a speed

    def at(self, phase: Phase, total: int = 0) -> None:
        """Begin a phase."""
        self.phase, self.done, self.total = phase, 0, total


@dataclass(slots=True)
class Marks:
    """What is named. A chain root stands for the points before a session's first block ends."""

    whole: set[bytes] = field(default_factory=set)  # blocks of sequences: everything in them is needed
    masks: dict[bytes, int] = field(default_factory=dict)  # blocks of bases: groups that are needed
    points: set[bytes] = field(default_factory=set)
    sequences: set[bytes] = field(default_factory=set)  # whose tail pieces are needed
    streams: set[bytes] = field(default_factory=set)  # which have sequences


class Compaction:
    """One run: fold what has settled, evict what budgets ask for, free what nothing names.

    settle_s   how long ago a session's last use must be; 0: every session that isn't live
    grace_s    how long what is unnamed is left alone, for restores that are under way
    dry_run    count what would be freed, change nothing
    collect    free what nothing names, which looks at every base; else only if something was evicted
    """

    def __init__(
        self,
        drain: Drained,
        *,
        settle_s: float = 600.0,
        grace_s: float = GRACE_S,
        budget: Budget = Budget(),
        dry_run: bool = False,
        collect: bool = True,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drain = drain
        self._settle_ms = int(1000 * settle_s)
        self._grace_s = grace_s
        self._budget = budget
        self._dry_run = dry_run
        self.collect = collect
        self._now_s = now_s
        self.progress = Progressing()

    def run(self) -> Iterator[None]:
        """Do it, one small piece at each `next`. Closing the generator anywhere leaves a whole store. Raises StoreFailed."""
        if not self._dry_run:
            self._drain.settle()
        self._drain.named = set()
        try:
            self._drain.catch_up()
            yield
            if not self._dry_run:
                yield from self._fold()
                yield from self._evict()
            yield from self._seal()
            if not (self._dry_run or self.collect or self.progress.counts["evicted"]):
                self.progress.at("done")
                return
            marks = yield from self._mark()
            if not self._dry_run:
                self.progress.at("wait")
                until = self._now_s() + self._grace_s
                while self._now_s() < until:
                    yield
            yield from self._free(marks)
            self.progress.at("done")
        finally:
            self._drain.named = None

    # ------------------------------------------------------------ fold

    def _fold(self) -> Iterator[None]:
        with self._drain.store().snapshot() as view:
            now = self._drain.now()
            sequences = sequences_of(view, now)
            folds, abandoned = plan_folds(sequences, now.ms, self._settle_ms), plan_abandoned(sequences, now.ms)
        if abandoned:
            with self._drain.store().group(freeing=True) as group:
                for sequence in abandoned:
                    group.delete_sequence(sequence)
            self.collect = True
            log.info("compact.import_abandoned", count=len(abandoned))
        self.progress.at("fold", len(folds))
        for fold in folds:
            try:
                self._fold_one(fold)
            except NoRoom:
                return  # what is evicted and freed next makes some
            self.progress.done += 1
            yield

    def _fold_one(self, fold: Fold) -> None:
        """Put the base and remove what it replaces, in one transaction."""
        with self._drain.store().group() as group:
            head = group.progress(fold.head)
            if head is None:
                return
            owner = group.owner(stream_key(head.stream))
            if is_live(head, owner.epoch if owner else 0, self._drain.now()):
                return  # it goes on since this was planned
            base = make_base(group, fold.head, head)
            if base is None:
                self.progress.counts["kept_broken"] += 1
                return
            failpoints.reach("compact.base_switch.before")
            group.put_base(fold.key, base)
            for sequence in fold.replaced:
                group.delete_sequence(sequence)
            self.progress.counts["folded_sequences"] += len(fold.replaced)
        failpoints.reach("compact.base_switch.after")
        self.progress.counts["folded"] += 1

    # ------------------------------------------------------------ evict

    def _evict(self) -> Iterator[None]:
        store = self._drain.store()
        limit = int(MAP_SHARE * store.map_bytes())
        budget = self._budget._replace(disk_bytes=min(self._budget.disk_bytes or limit, limit))
        usage = store.usage()
        with store.snapshot() as view:
            tenants = tenant_bytes(view, usage) if budget.has_tenants else {}
            over = [budget.is_near(namespace, used) for namespace, used in tenants.items()]
            if not budget.ttl_s and usage.total_bytes <= EVICT_FROM * budget.disk_bytes and not any(over):
                self._drain.held = []
                return
            now = self._drain.now()
            sessions = session_uses(view, now)
            chosen = plan_eviction(sessions, usage.total_bytes, tenants, budget, now.ms)
        self._note_held(plan_held(sessions, chosen, usage.total_bytes, tenants, budget))
        self.progress.at("evict", len(chosen))
        for session in chosen:
            self._remove(session.key)
            log.info("compact.evicted", session=session.session, stream=session.stream, bytes=session.bytes)
            self._drain.note_loss()
            self.progress.counts["evicted"] += 1
            self.progress.done += 1
            yield

    def _note_held(self, held: list[Held]) -> None:
        known = {one.namespace for one in self._drain.held}
        for one in held:
            if one.namespace not in known:
                log.warning(
                    "compact.budget_held", tenant=one.namespace, used=one.used, limit=one.limit,
                    hint="what is live or pinned is never evicted: unpin or end sessions, or raise the budget",
                )  # fmt: skip
        self._drain.held = held

    def _remove(self, key: SessionKey) -> int:
        """Drop the names of a session that isn't live: its blocks go with the next collection. Returns sequences removed."""
        with self._drain.store().group(freeing=True) as group:
            found = [one for one in sequences_of(group, self._drain.now()) if key_of(one.progress) == key]
            if any(one.live for one in found):
                return 0
            group.delete_base(key)
            for one in found:
                group.delete_sequence(one.id)
        return len(found)

    # ------------------------------------------------------------ seal

    def _seal(self) -> Iterator[None]:
        """Seal what was stored before its tenant had a key."""
        with self._drain.store().snapshot() as view:
            tenants = late_keys.marked(view)
            total = sum(view.count(database) for database in late_keys.DATABASES) if tenants else 0
        if not tenants:
            return
        self.progress.at("seal", total)
        for database in late_keys.DATABASES:
            after: bytes | None = b""
            while after is not None:
                after = self._seal_batch(database, after, tenants)
                yield
        if not self._dry_run:
            with self._drain.store().group(freeing=True) as group:
                late_keys.unmark(group, tenants)
            log.info("compact.sealed", tenants=sorted({t.namespace for t in tenants.values()}), **self.progress.counts)

    def _seal_batch(self, database: str, after: bytes, tenants: late_keys.Tenants) -> bytes | None:
        """One transaction over some records of a database; the last key looked at, None at its end."""
        size, counts = 0, self.progress.counts
        with self._drain.store().group(freeing=True) as group:
            keys = [key for key, _ in group.scan_raw(database, after, BATCH)]
            for value in list(late_keys.open_values(group, tenants, database, after, BATCH)):
                written = value.size if self._dry_run else late_keys.seal(group, value)
                counts["sealed_values"] += bool(written)
                counts["sealed_bytes"] += written
                size += written
                if size >= FREE_BATCH_BYTES:
                    self.progress.done += keys.index(value.key) + 1
                    return value.key
        self.progress.done += len(keys)
        return keys[-1] if keys else None

    # ------------------------------------------------------------ mark

    def _mark(self) -> Generator[None, None, Marks]:
        """Everything that bases and sequences name, seen in short snapshots; what is named meanwhile is in `drain.named`."""
        marks = Marks()
        store = self._drain.store()
        with store.snapshot() as view:
            damaged = damaged_bases(view)
        if damaged and not self._dry_run:
            left = self._drain.mend_bases(damaged)
            self.progress.counts["rebuilt_bases"] += len(damaged) - len(left)
        with store.snapshot() as view:
            sequences = sequences_of(view, self._drain.now())
            if view.locked:
                raise Locked("sequences are sealed with a key that isn't there", where=f"{view.locked} records")
            keys = [SessionKey(key) for key, _ in view.scan_raw("bases")]
        self.progress.at("mark", len(sequences) + len(keys))
        for batch in _batches(sequences, 64):
            with store.snapshot() as view:
                for one in batch:
                    self._mark_sequence(view, one, marks)
            self.progress.done += len(batch)
            yield
        for batch in _batches(keys, 64):
            with store.snapshot() as view:
                for key in batch:
                    self._mark_base(view, key, marks)
            self.progress.done += len(batch)
            yield
        return marks

    def _mark_sequence(self, view: View, one: Stored, marks: Marks) -> None:
        p = one.progress
        marks.sequences.add(one.id)
        top, block = chain_root(RootId(p.root), p.namespace), BlockId(p.parent)
        marks.whole.add(top)
        while block != top and block not in marks.whole:
            marks.whole.add(block)
            node = view.node(block)
            if node is None:
                return  # a block is gone; where the chain goes on can't be known
            block = node.parent

    def _mark_base(self, view: View, key: SessionKey, marks: Marks) -> None:
        try:
            base = view.base(key)
        except BadBlock as error:
            self.progress.counts["bad_bases"] += 1
            log.warning("compact.bad_base", error=str(error))
            raise
        if base is None:
            return
        info = view.root(base.root)
        windows = info.shape.windows if info is not None else ()
        positions = [position for position, _, _ in base.points]
        blocks = base.block_ids
        if windows:
            ends = window_positions(base.position, positions, base.block_tokens)
            masks = kept_windows(windows, ends, len(blocks), base.block_tokens)
        else:
            masks = [ALL_GROUPS] * len(blocks)
        for block, mask in zip(blocks, masks, strict=True):
            marks.masks[block] = marks.masks.get(block, 0) | mask
        marks.points.update(point for _, _, point in base.points)
        if base.tail:
            marks.sequences.add(base.tail)

    # ------------------------------------------------------------ free

    def _free(self, marks: Marks) -> Iterator[None]:
        with self._drain.store().snapshot() as view:
            total = view.count("nodes") + view.count("points") + view.count("tails") + view.count("streams")
        self.progress.at("free", total)
        for database, handle in (
            ("points", self._free_point),
            ("tails", self._free_tail),
            ("nodes", self._free_block),
            ("streams", self._free_stream),
        ):
            after: bytes | None = b""
            while after is not None:
                self._drain.catch_up()  # what waits in the lanes may name what is about to go
                after = self._free_batch(database, after, handle, marks)
                yield

    def _free_batch(
        self, database: str, after: bytes, handle: Callable[[Group, bytes, Any, Marks], int], marks: Marks
    ) -> bytes | None:
        """One transaction over some keys of a database; the last key looked at, None at its end."""
        freed, seen, last = 0, 0, b""
        with self._drain.store().group(freeing=True) as group:
            keys = [key for key, _ in group.scan_raw(database, after, BATCH)]
            if database == "streams":
                marks.streams = {stream_key(one.progress.stream) for one in sequences_of(group, self._drain.now())}
            for key in keys:
                raw = group.raw(database, key)
                if raw is not None:
                    try:
                        freed += handle(group, key, raw, marks)
                    except BadBlock:
                        pass  # an entry that can't be read: `repair` drops it
                seen, last = seen + 1, key
                if freed >= FREE_BATCH_BYTES:
                    break
            if freed:
                failpoints.reach("compact.free.before")
        if freed:
            failpoints.reach("compact.free.after")
            if not self._dry_run:
                self._drain.note_loss()
        self.progress.done += seen
        return last if keys and not (seen == len(keys) < BATCH) else None

    def _is_named(self, marks: Marks, key: bytes) -> bool:
        named = self._drain.named
        return key in marks.whole or (named is not None and key in named)

    def _count_freed(self, kind: str, size: int) -> int:
        self.progress.counts[f"freed_{kind}"] += 1
        self.progress.counts["freed_bytes"] += size
        return size

    def _free_point(self, group: Group, key: bytes, raw: Any, marks: Marks) -> int:
        point = key[20:]
        if point in marks.points or self._is_named(marks, point) or self._is_named(marks, key[:16]):
            return 0
        size = group.decode_point(raw).value_bytes
        if not self._dry_run:
            group.delete_point(key)
        return self._count_freed("points", size)

    def _free_tail(self, group: Group, key: bytes, raw: Any, marks: Marks) -> int:
        sequence = key[16:32]
        if sequence in marks.sequences or self._is_named(marks, sequence):
            return 0
        size = len(raw)
        if not self._dry_run:
            group.delete_tail(key)
        return self._count_freed("tails", size)

    def _free_block(self, group: Group, key: bytes, raw: Any, marks: Marks) -> int:
        if self._is_named(marks, key):
            return 0
        node = unpack_node(raw)
        if key not in marks.masks:
            if not self._dry_run:
                tokens = group.child_tokens(node.parent, BlockId(key))
                group.delete_block(node.parent, tokens or b"", BlockId(key))
            return self._count_freed("blocks", node.value_bytes)
        return self._drop_windows(group, BlockId(key), marks.masks[key])

    def _drop_windows(self, group: Group, block: BlockId, needed: int) -> int:
        """Write a block again without rows of window layers that nobody needs."""
        node = group.node(block)
        tenant = group.tenant(node.tenant) if node is not None else None
        info = group.root(tenant.root) if tenant is not None else None
        if node is None or info is None or not node.groups & info.shape.window_groups & ~needed:
            return 0
        if self._dry_run:
            shape, count = info.shape, info.block_tokens
            saved = shape.frame_bytes(count, node.groups) - shape.frame_bytes(count, node.groups & needed)
        else:
            try:
                saved = group.drop_groups(block, needed)
            except BadBlock as error:
                log.warning("compact.bad_block", error=str(error))
                return 0
            self.progress.counts["rewritten_bytes"] += node.value_bytes - saved
        self.progress.counts["rewritten_blocks"] += 1
        self.progress.counts["freed_bytes"] += saved
        return node.value_bytes

    def _free_stream(self, group: Group, key: bytes, raw: Any, marks: Marks) -> int:
        """A stream none of whose sequences is stored has nothing left to fence."""
        if key in marks.streams:
            return 0
        size = len(raw)
        if not self._dry_run:
            group.delete_owner(key)
        return self._count_freed("streams", size)


# ---------------------------------------------------------------- what is stored


def damaged_bases(view: View, after: bytes = b"", limit: int = 1 << 30) -> list[SessionKey]:
    """Bases that can't be read, though the key that they are sealed with is there; of at most `limit` after the key `after`."""
    found = []
    for key, _ in view.scan_raw("bases", after, limit):
        try:
            view.base(SessionKey(key))
        except Locked:
            continue
        except BadBlock:
            found.append(SessionKey(key))
    return found


def key_of(progress: Progress) -> SessionKey:
    """Key of the session that a sequence belongs to."""
    return session_key(progress.namespace, progress.session, progress.stream)


def sequences_of(view: View, now: Now) -> list[Stored]:
    """All stored sequences that no base has replaced."""
    found = []
    for key, raw in view.scan("sequences"):
        progress = view.decode_progress(raw)
        if not progress.used_ms:  # of version 1: used now
            progress = msgspec.structs.replace(progress, used_ms=now.ms)
        owner = view.owner(stream_key(progress.stream))
        found.append(Stored(SequenceId(key), progress, is_live(progress, owner.epoch if owner else 0, now)))
    return found


def make_base(view: View, sequence: SequenceId, progress: Progress) -> Base | None:
    """The base that a sequence's state makes; None if a block on its way is gone."""
    p, root = progress, RootId(progress.root)
    info, chain = view.root(root), view.chain(root, p.namespace, BlockId(p.parent))
    if info is None or chain is None:
        return None
    blocks, tokens = chain
    has_tail = False
    for piece in view.tails(BlockId(p.parent), sequence):
        if piece.token_start != len(tokens) // 4 or piece.token_start >= p.position:
            break
        tokens, has_tail = tokens + piece.tokens, True
    found = points_on(view, root, p.namespace, blocks, tokens, info.block_tokens)
    kept = kept_points(((position, kind) for position, kind, _ in found), len(tokens) // 4)
    return Base(
        namespace=p.namespace,
        session=p.session,
        stream=p.stream,
        root=p.root,
        block_tokens=info.block_tokens,
        epoch=p.epoch,
        tokens=tokens,
        blocks=b"".join(blocks),
        tail=sequence if has_tail else b"",
        points=[(position, kind, point) for position, kind, point in found if position in kept],
        used_ms=p.used_ms,
    )


def points_on(
    view: View, root: RootId, namespace: str, blocks: Sequence[BlockId], tokens: bytes, block_tokens: int
) -> list[tuple[int, int, PointId]]:
    """(position, kind, id) of the stored rollback points of a token list, ascending."""
    found = []
    for index, parent in enumerate([chain_root(root, namespace), *blocks]):
        start = index * block_tokens
        rest = tokens[4 * start : 4 * (start + block_tokens)]
        for key, entry in view.points(parent):
            count, point = int.from_bytes(key[16:20], "big"), PointId(key[20:])
            if 4 * count <= len(rest) and count < block_tokens and point_id(parent, rest[: 4 * count]) == point:
                found.append((start + count, entry.kind, point))
    return found


def session_uses(view: View, now: Now) -> list[SessionUse]:
    """Every stored session, compacted or not, with its bytes and whether it may be evicted."""
    uses: dict[SessionKey, SessionUse] = {}
    pinned = view.pins()
    for key, _ in view.scan("bases"):
        try:
            base = view.base(SessionKey(key))  # those that are sealed without a key are passed over by the scan
        except BadBlock:
            continue  # it is mended, or named by `verify`
        if base is not None:
            last = base.block_ids[-1] if base.blocks else chain_root(RootId(base.root), base.namespace)
            size = _chain_bytes(view, last, SequenceId(base.tail)) + disk_bytes(len(view.raw("bases", key)))
            uses[SessionKey(key)] = SessionUse(
                SessionKey(key), base.namespace, base.session, base.stream, base.used_ms, size, False, key in pinned
            )
    for one in sequences_of(view, now):
        p, key = one.progress, key_of(one.progress)
        old = uses.get(key)
        size = max(_chain_bytes(view, BlockId(p.parent), one.id), old.bytes if old else 0)
        used, live = max(p.used_ms, old.used_ms if old else 0), one.live or (old is not None and old.live)
        uses[key] = SessionUse(key, p.namespace, p.session, p.stream, used, size, live, key in pinned)
    return list(uses.values())


def _chain_bytes(view: View, last: BlockId, tail: SequenceId) -> int:
    """Bytes on disk of the blocks up to `last`, their rollback points, and the tail pieces of a sequence after it."""
    size, block = 0, last
    if tail:
        size += sum(disk_bytes(len(view.raw("tails", piece.key))) for piece in view.tails(last, tail))
    while True:
        size += sum(disk_bytes(entry.value_bytes) for _, entry in view.points(block))
        node = view.node(block)
        if node is None:
            return size
        size, block = size + disk_bytes(node.value_bytes), node.parent


def tenant_bytes(view: View, usage: Usage) -> dict[str, int]:
    """Bytes on disk by namespace."""
    names = {chain: tenant.namespace for chain, tenant in view.tenants()}
    totals: Counter[str] = Counter()
    for (chain, _), (_, size) in usage.items():
        totals[names.get(chain, "")] += size
    return dict(totals)


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
