"""Several choices of one request (`n`, `best_of`) as one stream for its client. Stages: deliver, resume; on the event loop.

Each choice is a stream of its own: own seed, journal, engine and recovery. A group adds what its client needs beyond that: one
numbering of all their events. The order in which events of different choices were merged is journaled before they are sent,
so a replay at any later gateway gives the same events under the same ids.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from gateway import journal as j
from gateway.sealing import Seal, Sealing
from gateway.sse import EventForm
from gateway.streams import (
    Reader,
    Stream,
    StreamTable,
    expired,
    not_deleted,
    seal_late,
    unlink_all,
    unreadable,
    write_anew_if_lost,
)
from gateway.tenancy import own_name
from tiers.keys import Locked

log = structlog.get_logger()

RECENT_COUNT = 64  # finished groups kept in memory; others are read back from their journals
_encode = msgspec.json.encode


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice: the request's own for the first, for the others 63 bits of BLAKE2b over (seed, choice)."""
    if not choice:
        return seed
    data = f"{seed}:{choice}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"concordia-chose").digest(), "little") >> 1


class Group:
    """The choices of one request, in the order of their index. Followed by readers as a stream is."""

    def __init__(self, spec: j.GroupSpec, streams: list[Stream], journal: j.Journal | None) -> None:
        self.spec = spec
        self.id = spec.group
        self.streams = streams
        self.journal = journal
        self.readers: set[Reader] = set()
        self.end: bool | None = None  # True once every choice has ended and every event has its place
        self.on_end: Callable[[Group], None] = lambda group: None
        # Calls back once what is written is as durable as is asked for.
        self.before_end: Callable[[Group, Callable[[], None]], object] = lambda group, tell: tell()
        self.places: list[tuple[int, int]] = []  # event -> (choice, event of that choice)
        self._counts = [0] * len(streams)
        self._ready = 0
        self._scheduled = False
        self._ending = False

    # ------------------------------------------------------------ order

    def apply(self, record: j.Order) -> None:
        """Give places to events."""
        for choice in record.choices:
            self.places.append((choice, self._counts[choice]))
            self._counts[choice] += 1

    def sync(self) -> None:
        """Give places to what choices have said since, journal them, then tell readers."""
        if self.end or self._ending or self.journal is None:
            return
        order = sorted(range(len(self.streams)), key=lambda choice: self.streams[choice].failed)
        record = j.Order(b"".join(bytes([c]) * (said(self.streams[c]) - self._counts[c]) for c in order))
        if record.choices:
            self.journal.append(record)
        self._ending = all(stream.end is not None for stream in self.streams)
        if self._ending:
            self.before_end(self, partial(self._tell, record))
        else:
            self._tell(record)

    def _tell(self, record: j.Order) -> None:
        self.apply(record)
        if self._ending:
            assert self.journal is not None, "it was just written to"
            self.end = True
            self.journal.close()
            self.on_end(self)
        for reader in tuple(self.readers):
            reader.advance()

    @property
    def ready_count(self) -> int:
        """Placed events that can be rendered: all, unless a disk lost a choice's journal that is being computed again."""
        while self._ready < len(self.places):
            choice, event = self.places[self._ready]
            if event >= said(self.streams[choice]):
                break
            self._ready += 1
        return self._ready

    # ------------------------------------------------------------ reader of its choices, while it is read itself

    def advance(self) -> None:
        """A choice has something new: look at all of them once this engine step is delivered."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._advance_now)

    def _advance_now(self) -> None:
        self._scheduled = False
        self.sync()

    def comment(self, text: str) -> None:
        for reader in tuple(self.readers):
            reader.comment(text)

    def fail(self, status: int, code: str, message: str) -> None:
        for reader in tuple(self.readers):
            reader.fail(status, code, message)

    def add_reader(self, reader: Reader) -> None:
        self.readers.add(reader)
        for stream in self.streams:
            stream.add_reader(self)
        self.sync()

    def drop_reader(self, reader: Reader) -> None:
        self.readers.discard(reader)
        if not self.readers:
            for stream in self.streams:
                stream.drop_reader(self)

    # ------------------------------------------------------------ views

    @property
    def stored(self) -> bool:
        return self.spec.stored

    @property
    def failure(self) -> Stream | None:
        """The first choice that failed."""
        return next((stream for stream in self.streams if stream.failed), None)

    @property
    def state(self) -> str:
        if self.failure is not None:
            return "failed"
        return "finished" if self.end else "live"

    def best(self) -> list[Stream]:
        """The choices that are shown: all, or of `best_of` the likeliest a token, best first."""
        if self.spec.shown == len(self.streams):
            return self.streams
        return sorted(self.streams, key=_mean_logprob, reverse=True)[: self.spec.shown]

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, the tokens of all choices (also of those that `best_of` dropped) are added up."""
        firsts = [stream.usage() for stream in self.firsts]
        prompt = sum(usage["prompt_tokens"] for usage in firsts)
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in firsts)
        completion = sum(stream.token_count for stream in self.streams)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    def firsts(self) -> list[Stream]:
        """The first choice of each prompt."""
        return self.streams[:: len(self.streams) // self.spec.prompts]

    def concordia(self) -> dict[str, Any]:
        return {
            "stream_id": self.id,
            "session_id": own_name(self.spec.session) or None,
            "choices": [stream.concordia() for stream in self.streams],
        }


def said(stream: Stream) -> int:
    """Events of a choice within its group so far: opening, tokens, finish or error."""
    if stream.end is None:
        return stream.token_count + 1 if stream.token_count else 0
    return stream.token_count + 2


def _mean_logprob(stream: Stream) -> float:
    known = [row.chosen for row in stream.logprobs if row is not None]
    return sum(known) / len(known) if known else float("-inf")


class GroupTable:
    """All groups of this gateway. Journals: DATA/journal/<group>.group, beside those of the choices."""

    def __init__(
        self, directory: Path, table: StreamTable, written: j.Written = j.untold, sealing: Sealing | None = None
    ) -> None:
        self._sealing = sealing or Sealing()
        self._directory = directory
        self._table = table
        self._written = written
        self._recent: OrderedDict[str, Group] = OrderedDict()
        self.live: dict[str, Group] = {}
        self.before_end: Callable[[Group, Callable[[], None]], object] = lambda group, tell: tell()

    def open(self, spec: j.GroupSpec, streams: list[Stream]) -> Group:
        """Start a group whose choices are open already."""
        journal = j.Journal(self._path(spec.group), written=self._written, seal=self._seal(spec, streams))
        journal.append(spec)
        return self._keep(Group(spec, streams, journal))

    def load(self) -> None:
        """Groups of an earlier process that have not ended, once the table has read its live streams back."""
        for path in sorted(self._directory.glob("*.group")):
            try:
                seal_late(path, self._sealing, self._namespace_of)
                if not j.is_closed(path):
                    self._load_one(path)
            except OSError as error:
                unreadable(path, error)

    def _load_one(self, path: Path) -> None:
        try:
            parts = _read(path, self._sealing)
        except Locked as error:  # it stays as it is: the key may come back
            log.error("resume.group_locked", path=str(path), error=str(error))
            return
        streams = [self._table.load(stream_id) for stream_id in parts[0].streams] if parts else []
        if parts is None or None in streams:
            log.warning("resume.group_broken", path=str(path), hint="its choices can be read one by one")
            path.rename(path.with_suffix(".bad"))
            return
        spec, orders, good = parts
        journal = j.Journal(path, good_bytes=good, written=self._written, seal=self._seal(spec, streams))
        journal.hold()
        group = Group(spec, [stream for stream in streams if stream], journal)
        for order in orders:
            group.apply(order)
        self._keep(group)
        group.sync()

    async def fetch(self, group_id: str) -> Group | None:
        """A group by id: live, ended lately, or read back."""
        group = self.live.get(group_id) or self._recent.get(group_id)
        try:
            parts = None if group else _read(self._path(group_id), self._sealing)
        except Locked:
            return None
        if parts is None:
            return group
        spec, orders, _ = parts
        streams = [await self._table.fetch(stream_id) for stream_id in spec.streams]
        group = Group(spec, [stream for stream in streams if stream], None)
        if len(group.streams) < len(spec.streams):
            return None
        for order in orders:
            group.apply(order)
        group.end = True
        return self._remember(group)

    def choice_ended(self, stream: Stream) -> None:
        """A stream has its end record: it may be the last one of a group."""
        group = self.live.get(stream.spec.group)
        if group is not None:
            group.sync()

    def forget(self, group_ids: list[str]) -> None:
        """Delete the journals of ended groups. Raises OSError (some are still there)."""
        for group_id in group_ids:
            _let_go(self._recent.pop(group_id, None))
        unlink_all([self._path(group_id) for group_id in group_ids if group_id not in self.live])

    def look_for_files(self) -> None:
        """Journals that were deleted, of groups in memory, are written anew."""
        write_anew_if_lost(self._journals())

    def _journals(self) -> list[j.Journal]:
        """Those that this process has open: of live groups, and of those that ended lately."""
        groups = (*self.live.values(), *self._recent.values())
        return [group.journal for group in groups if group.journal is not None]

    def _namespace_of(self, path: Path) -> str:
        """Whose a group is, by its first choice. Raises Locked."""
        spec = j.read_spec(path)
        return self._table.namespace_of(spec.streams[0]) if isinstance(spec, j.GroupSpec) else ""

    def sweep(self, retention_s: float) -> None:
        """Retry what the disk refused; delete what ended too long ago."""
        for group in (*self.live.values(), *self._recent.values()):
            if group.journal is not None and group.journal.backlog_bytes:
                group.journal.flush()
        try:
            self.forget([path.stem for path in expired(self._directory, "*.group", time.time() - retention_s)])
        except OSError as error:
            not_deleted(error)

    def close(self) -> None:
        """Let go of all files; live groups go on in the next process."""
        for group in self.live.values():
            if group.journal is not None:
                group.journal.flush()
        self.look_for_files()
        for journal in self._journals():
            journal.release()

    def _keep(self, group: Group) -> Group:
        self.live[group.id] = group
        group.on_end, group.before_end = self._ended, self.before_end
        return group

    def _ended(self, group: Group) -> None:
        self.live.pop(group.id, None)
        self._remember(group)

    def _remember(self, group: Group) -> Group:
        self._recent[group.id] = group
        for old in list(self._recent)[: max(0, len(self._recent) - RECENT_COUNT)]:
            journal = self._recent[old].journal
            if journal is None or not journal.backlog_bytes:  # else it is still to be written
                _let_go(self._recent.pop(old))
        return group

    def _path(self, group_id: str) -> Path:
        return self._directory / f"{group_id}.group"

    def _seal(self, spec: j.GroupSpec, streams: Sequence[Stream | None]) -> Seal:
        """A group is its choices' tenant's."""
        namespaces = [stream.spec.namespace for stream in streams if stream is not None]
        return self._sealing.of_journal(namespaces[0] if namespaces else "", spec.group)


def _let_go(group: Group | None) -> None:
    """Close the journal of a group that is remembered no longer."""
    if group is not None and group.journal is not None:
        group.journal.release()


def _read(path: Path, sealing: Sealing) -> tuple[j.GroupSpec, list[j.Order], int] | None:
    """The records of a group's journal, and how many bytes of it are whole. Raises Locked."""
    try:
        records = list(j.read_records(path.read_bytes(), sealing.opens_journal(path.stem)))
    except FileNotFoundError:
        return None
    if not records or not isinstance(records[0][0], j.GroupSpec):
        return None
    return records[0][0], [record for record, _ in records[1:] if isinstance(record, j.Order)], records[-1][1]


class GroupForm:
    """Renders a group's events: those of its choices in the order of their places, then usage and [DONE]."""

    def __init__(self, form: EventForm) -> None:
        self._form = form

    def ready_count(self, group: Group) -> int:
        """How many events there are by now."""
        count = group.ready_count
        if not group.end or group.failure is not None:
            return count
        return count + 1 + group.spec.include_usage

    def events(self, group: Group, start: int, end: int) -> bytes:
        """Events [start, end), each `id:` and `data:`."""
        return b"".join([b"id: %d\ndata: %b\n\n" % (k, self._data(group, k)) for k in range(start, end)])

    def _data(self, group: Group, k: int) -> bytes:
        if k < len(group.places):
            choice, event = group.places[k]
            return self._form.data(group.streams[choice], event)
        if k == len(group.places) and group.spec.include_usage:
            head = self._form.head(group.streams[0])
            return b'%b],"usage":%b,"concordia":%b}' % (head, _encode(group.usage()), _encode(group.concordia()))
        return b"[DONE]"

    def answer(self, group: Group) -> dict[str, Any]:
        """The answer so far, as one JSON object."""
        whole = self._form.answer(group.streams[0])
        shown = group.spec.logprobs
        choices = [self._form.choice(stream, index, logprobs=shown) for index, stream in enumerate(group.best())]
        return {**whole, "choices": choices, "usage": group.usage(), "concordia": group.concordia()}
