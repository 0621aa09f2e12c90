"""Named sessions: what a client can list, fork, park and delete. DATA/sessions (LMDB), written by the thread `sessions`.

Records live in memory; the thread makes them durable in groups, so the event loop never waits for a disk. A session is
a name for a token list: losing a record loses no state, since blocks are found by their content. A fork is a record that
borrows the beginning of a list which is stored once, under its digest, for as long as a fork borrows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import math
import queue
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import msgspec
import structlog
import xxhash

from engine.messages import pack_tokens
from gateway import metrics
from gateway.placement import common_prefix
from gateway.sealing import MAGIC, Sealing
from gateway.streams import Stream
from gateway.table_file import ASIDE, DATABASES, MAP_BYTES, TO_REBUILD, TableFile, mend
from tiers.errors import BadBlock
from tiers.keys import Locked
from tiers.store_file import DAMAGED, allocate_lock, opening

log = structlog.get_logger()

STREAMS_KEPT = 100  # ids of the latest streams of a session
LOOK_S = 1.0  # until it is noticed that the file was deleted, or that there is room again
CHECKED = struct.Struct("<4sQ")  # magic, checksum of what follows
CHECKED_MAGIC = b"CSUM"  # no msgpack map begins so
VALUE_HINT = "Only this value is damaged, other sessions are whole; the next turn of its session writes it anew"
TOKEN_LIMIT = 1 << 24  # beyond any vocabulary: no token begins as the magic does, one of its bits flipped or not


class SessionRecord(msgspec.Struct, omit_defaults=True):
    """One session at rest; what a turn is at meanwhile, its stream knows.

    token_count   tokens of its list, that of the turn which ended last
    captured      how far the state of that list is in a lane or further: at least durable, at most token_count
    durable       how far it is on disk, as the keeper last said
    parked        taken off the devices by a park, and not used since
    list_id       digest of the list that a fork borrows the first token_count tokens of, until its first own turn; else empty
    forked_from, fork_position   what it is a fork of, "" if of nothing
    family        the session that all of its relatives descend from, "" if it has none
    """

    session: str
    created: float
    last_used: float
    namespace: str = "default"
    turns: int = 0
    token_count: int = 0
    streams: list[str] = []
    captured: int = 0
    durable: int = 0
    parked: bool = False
    list_id: bytes = b""
    forked_from: str = ""
    fork_position: int = 0
    family: str = ""

    @property
    def list_key(self) -> bytes:
        """Where its token list lies in the database `tokens`."""
        return b"\0" + self.list_id if self.list_id else self.session.encode()

    def place(self, captured: int, durable: int) -> None:
        """Set both positions, within the bounds that always hold."""
        self.durable = min(durable, self.token_count)
        self.captured = min(max(captured, durable), self.token_count)


class Change(NamedTuple):
    """A value to be written, None: to be deleted. waiting: the token list that it is, by its key among those that wait."""

    database: str
    key: bytes
    value: bytes | None
    waiting: tuple[bytes, bytes] | None = None


class SessionTable:
    """All sessions of this gateway. Called on the event loop; `close` waits for the disk."""

    def __init__(self, directory: Path, sealing: Sealing | None = None) -> None:
        self._sealing = sealing or Sealing()
        mend(directory)
        self._file = TableFile(directory)
        self._aside = sorted(directory.glob(ASIDE))
        self._to_rebuild = directory / TO_REBUILD
        self.to_rebuild = self._to_rebuild.exists()  # `read_back` is to be given all that the journals have
        self._damage: Future[None] = Future()
        self._records = {record.session: record for record in self._load()}
        self._work: queue.SimpleQueue[list[Change] | Callable[[], None] | None] = queue.SimpleQueue()
        self._tokens_waiting: dict[bytes, bytes] = {}  # by key, until they are written
        self._refused: dict[
            tuple[str, bytes], Change
        ] = {}  # of the thread: what the disk did not take, the latest of each key
        self._refusal = ""  # why it did not
        self._list_of: dict[str, str] = {}  # by session: the stream that its list is of
        self._live_durable: dict[str, int] = {}  # by stream that has not ended: how much of its list is on disk
        self._borrowers = Counter(record.list_id for record in self._records.values() if record.list_id)
        self._thread = threading.Thread(target=self._write_loop, name="sessions", daemon=True)
        self._thread.start()
        metrics.sessions_known.set(len(self._records))

    def get(self, session: str) -> SessionRecord | None:
        return self._records.get(session)

    def all(self) -> list[SessionRecord]:
        """Most lately used first."""
        return sorted(self._records.values(), key=lambda record: -record.last_used)

    def tokens(self, session: str) -> bytes:
        """The last turn's whole token list, packed."""
        record = self._records.get(session)
        if record is None:
            return b""
        held = self._tokens_waiting.get(record.list_key)
        if held is None:
            try:
                held = _read_tokens(self._file.read, self._sealing, record)
            except lmdb.Error as error:  # damaged; or not opened anew yet
                log.error("sessions.bad_tokens", session=session, error=str(error))
                if isinstance(error, DAMAGED):
                    self._is_damaged(error)
                return b""
        return held[: 4 * record.token_count]

    @property
    def trouble(self) -> str:
        """Why something that has changed would be forgotten with this process; "" if all is on the disk, or on its way."""
        return self._refusal or self._file.trouble

    @property
    def damaged(self) -> list[Path]:
        """Tables that could not be read, and lie beside this one."""
        return [path for path in self._aside if path.exists()]

    async def watch(self) -> None:
        """Raises lmdb.Error once the open file is found to be damaged: the process is to end, and the next one mends it."""
        await asyncio.wrap_future(self._damage)

    def _is_damaged(self, error: lmdb.Error) -> None:
        if not self._damage.done():
            log.error("sessions.damaged", error=str(error), hint="the gateway starts anew, and makes the table anew")
            self._damage.set_exception(error)

    async def written(self, timeout_s: float) -> str:
        """Wait until everything so far is on disk. Returns "", or why it isn't: the disk has refused it, or takes longer."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        self._work.put(partial(_tell, loop, done))
        try:
            async with asyncio.timeout(timeout_s):
                await done.wait()
        except TimeoutError:
            return f"the disk has not taken it within {timeout_s:g} s"
        return self.trouble

    def fork(self, source: str, name: str, tokens: bytes, position: int) -> SessionRecord:
        """A new session that begins with the first `position` of `tokens`, which `source` holds or held. Costs its record."""
        parent, now = self._records[source], time.time()
        parent.family = parent.family or source
        list_id = hashlib.blake2b(tokens, digest_size=16, person=b"concordia-lists").digest()
        fork = SessionRecord(
            name, now, now, parent.namespace, token_count=position, list_id=list_id, forked_from=source,
            fork_position=position, family=parent.family, parked=parent.parked,
        )  # fmt: skip
        shared = common_prefix(self.tokens(source), tokens)  # it may be the list of another turn
        fork.place(min(parent.captured, shared), min(parent.durable, shared))
        self._records[name] = fork
        if not self._borrowers[list_id]:
            self._tokens_waiting[fork.list_key] = tokens
            self._work.put(self._changes("tokens", fork, fork.list_key, tokens))
        self._borrowers[list_id] += 1
        self._put(parent, None)
        self._put(fork, None)
        metrics.sessions_known.set(len(self._records))
        return fork

    def shared_with_relatives(self, session: str) -> int:
        """How many tokens of its list another session of its family begins with as well."""
        record, own = self._records[session], self.tokens(session)
        if not record.family:
            return 0
        relatives = [r.session for r in self._records.values() if r.family == record.family and r is not record]
        return max((common_prefix(own, self.tokens(name)) for name in relatives), default=0)

    def begin_turn(self, stream: Stream, others: Sequence[str] = ()) -> None:
        """A request names a session: make or touch its record. `others`: streams of its other choices."""
        session = stream.spec.session
        now = time.time()
        record = self._records.get(session)
        if record is None:
            record = self._records[session] = SessionRecord(session, now, now, stream.spec.namespace)
            metrics.sessions_known.set(len(self._records))
        record.last_used = now
        record.turns += 1
        record.parked = False
        record.streams = [*record.streams, stream.id, *others][-STREAMS_KEPT:]
        self._put(record, None)

    def end_turn(self, stream: Stream) -> None:
        """The turn's whole token list is what the session now is."""
        record = self._records.get(stream.spec.session)
        durable = self._durable_of(stream, record)
        self._live_durable.pop(stream.id, None)
        if record is not None and stream.token_count:
            record.last_used = time.time()
            record.token_count = len(stream.tokens)
            record.place(stream.captured, durable)
            self._list_of[record.session] = stream.id
            self._give_back(record)
            self._put(record, pack_tokens(stream.tokens))

    def read_back(self, streams: Sequence[Stream]) -> list[str]:
        """Streams of a process that was killed: of what their journals tell, write what it had not written here yet.

        After the table or a record of it was damaged (`to_rebuild`): all that they tell of turns, oldest first.
        Returns the sessions that it is of
        """
        found = []
        for stream in sorted(streams, key=lambda stream: stream.end.ended if stream.end else math.inf):
            session = stream.spec.session
            record = self._records.get(session)
            if session and (record is None or self._is_missing(stream, record)):
                self.begin_turn(stream, other_choices(stream, streams))
            elif record is None or not (_ended_since(stream, record) or self._lacks_list(stream, record)):
                continue
            if stream.end is not None:
                self.end_turn(stream)
            found.append(session)
            if self.to_rebuild and stream.end is not None:
                self._records[session].last_used = stream.end.ended  # else later ones would seem to be known
            else:
                log.info("sessions.read_back", session=session, stream=stream.id, ended=stream.end is not None)
        if self.to_rebuild:
            log.warning("sessions.rebuilt", sessions=len(self._records), turns=len(found))
            self._work.put(self._rebuilt)
        return found

    def _is_missing(self, stream: Stream, record: SessionRecord) -> bool:
        """A turn that the record knows nothing of. One that has ended may also be older than what it keeps."""
        unknown = stream.id not in record.streams
        return unknown and (stream.end is None or (self.to_rebuild and stream.end.ended > record.last_used))

    def _lacks_list(self, stream: Stream, record: SessionRecord) -> bool:
        """The record's last turn is this one, and its list could not be read."""
        is_it = self.to_rebuild and stream.end is not None and record.token_count == len(stream.tokens)
        return is_it and stream.id in record.streams and not self.tokens(record.session)

    def _rebuilt(self) -> None:
        """On the thread, after all of it was written."""
        if not self._refused:
            with contextlib.suppress(OSError):  # then the next process reads the journals once more
                self._to_rebuild.unlink(missing_ok=True)

    def positions(self, stream: Stream) -> tuple[int, int]:
        """(captured, durable) of the list of a turn that has not ended."""
        count = len(stream.tokens)
        durable = min(self._durable_of(stream, self._records.get(stream.spec.session)), count)
        return min(max(stream.captured, durable), count), durable

    def _durable_of(self, stream: Stream, record: SessionRecord | None) -> int:
        """Until the keeper has heard of the stream: what its list shares with the session's so far."""
        if record is None:
            return 0
        if stream.id not in self._live_durable:
            shared = common_prefix(self.tokens(record.session), pack_tokens(stream.tokens)) if record.durable else 0
            self._live_durable[stream.id] = min(record.durable, shared)
        return self._live_durable[stream.id]

    def captured(self, stream: Stream) -> None:
        """In memory only: it changes with every step."""
        record = self._record_of(stream)
        if record is not None:
            record.place(stream.captured, record.durable)

    def progressed(self, stream: Stream, durable: int) -> None:
        """How far a stream's state is on disk; in memory, since it changes all the time and the store knows it anyway."""
        if stream.end is None and stream.spec.session:
            self._live_durable[stream.id] = durable
        record = self._record_of(stream)
        if record is not None:
            record.place(stream.captured, durable)

    def settled(self, stream: Stream) -> None:
        """All of its latest turn is on disk, or as much as will ever be: worth remembering beyond this process."""
        record = self._record_of(stream)
        if record is not None:
            self._put(record, None)

    def _record_of(self, stream: Stream) -> SessionRecord | None:
        """The session whose list is this stream's; None if that of another turn has taken its place, or none has ended yet."""
        if self._list_of.get(stream.spec.session) != stream.id:
            return None
        return self._records.get(stream.spec.session)

    def found_stored(self, session: str, position: int) -> None:
        """How much of a session at rest the store has now: less than was known, if it was evicted."""
        record = self._records.get(session)
        if record is None:
            return
        known = record.captured, record.durable
        # The lanes were drained before anything could be dropped.
        record.place(min(record.captured, position) if position < record.durable else record.captured, position)
        if (record.captured, record.durable) != known:
            self._put(record, None)

    def park(self, session: str, captured: int, durable: int) -> SessionRecord:
        """Remember that the devices are free of it."""
        record = self._records[session]
        record.parked = True
        record.place(captured, durable)
        self._put(record, None)
        return record

    def adopt(self, record: SessionRecord, tokens: bytes) -> None:
        """Take a session that was imported; its name must be free or its own."""
        replaced = self._records.get(record.session)
        if replaced is not None:
            self._give_back(replaced)
        record.list_id = b""
        self._list_of.pop(record.session, None)
        self._records[record.session] = record
        self._put(record, tokens)
        metrics.sessions_known.set(len(self._records))

    def remove(self, session: str) -> None:
        record = self._records.pop(session, None)
        self._list_of.pop(session, None)
        if record is not None:
            self._give_back(record)
            self._tokens_waiting.pop(record.list_key, None)
            name = session.encode()
            self._work.put([*self._changes("records", record, name), *self._changes("tokens", record, name)])
        metrics.sessions_known.set(len(self._records))

    def close(self) -> None:
        """Everything to disk."""
        self._work.put(None)
        self._thread.join(timeout=10)

    def _give_back(self, record: SessionRecord) -> None:
        """It borrows a list no longer; the last borrower's goes."""
        if record.list_id:
            self._borrowers[record.list_id] -= 1
            if not self._borrowers[record.list_id]:
                del self._borrowers[record.list_id]
                self._tokens_waiting.pop(record.list_key, None)
                self._work.put(self._changes("tokens", record, record.list_key))
            record.list_id = b""

    # ------------------------------------------------------------ thread

    def _put(self, record: SessionRecord, tokens: bytes | None) -> None:
        changes = self._changes("records", record, record.session.encode(), msgspec.msgpack.encode(record))
        if tokens is not None:
            self._tokens_waiting[record.list_key] = tokens
            changes += self._changes("tokens", record, record.list_key, tokens)
        self._work.put(changes)

    def _changes(self, database: str, record: SessionRecord, key: bytes, value: bytes | None = None) -> list[Change]:
        """One value, or its removal; a sealed one takes the place of what was written before there was a key."""
        hidden = self._sealing.hidden(record.namespace, key)
        changes = [Change(database, key, None)] if hidden != key else []
        if value is not None:
            sealed = self._sealing.seal(record.namespace, database, hidden, checked(value))
            return [*changes, Change(database, hidden, sealed, (key, value) if database == "tokens" else None)]
        return [*changes, Change(database, hidden, None)]

    def _load(self) -> Iterator[SessionRecord]:
        locked = 0
        for key, value in self._file.items("records"):
            try:
                yield _read_record(self._sealing, key, value)
            except Locked:
                locked += 1
            except BadBlock as error:
                self.to_rebuild = True
                log.error("sessions.bad_record", session=key.decode(errors="replace"), error=str(error))
        if locked:
            hint = "they are not listed, and stay as they are: give their tenants' keys and restart"
            log.error("sessions.locked", sessions=locked, hint=hint)

    def _write_loop(self) -> None:
        self._seal_late()
        ended, looked_at = False, time.monotonic()
        while not ended:
            group = self._next_group()
            if time.monotonic() - looked_at >= LOOK_S:
                looked_at = time.monotonic()
                self._file.look()
            self._write([change for item in group if isinstance(item, list) for change in item])
            for item in group:
                if callable(item):
                    item()
            ended = None in group
        self._write([])  # what was refused, for the last time
        self._file.close()

    def _next_group(self) -> list[list[Change] | Callable[[], None] | None]:
        """All that waits; nothing if nothing came in LOOK_S."""
        try:
            group = [self._work.get(timeout=LOOK_S)]
        except queue.Empty:
            return []
        while not self._work.empty():
            group.append(self._work.get())
        return group

    def _write(self, changes: list[Change]) -> None:
        """Changes, and before them those that the disk has refused until now."""
        wanted = self._refused | {(change.database, change.key): change for change in changes}
        if not wanted:
            return
        try:
            self._file.write([change[:3] for change in wanted.values()])
        except lmdb.Error as error:
            if isinstance(error, DAMAGED):
                self._is_damaged(error)
            if isinstance(error, lmdb.PanicError):  # after the disk failed at a root page, until it is opened anew
                self._file.reopen()
            if not self._refused:  # once a trouble
                hint = "sessions go on from memory, and it is tried again every second; free disk space"
                log.error("sessions.write_failed", error=str(error), hint=hint)
            self._refused, self._refusal = wanted, str(error)
            return
        if self._refused:
            log.info("sessions.written_late", values=len(wanted))
        self._refused, self._refusal = {}, ""
        for change in wanted.values():
            if change.waiting is not None and self._tokens_waiting.get(change.waiting[0]) is change.waiting[1]:
                self._tokens_waiting.pop(change.waiting[0], None)

    def _seal_late(self) -> None:
        """What was written before its tenant had a key: into a new file, sealed, so that no free page holds it either."""
        if not self._sealing.keys:
            return
        owners = _owners(self._file, self._sealing)
        late = {
            (name, key): owners[name][key]
            for name in DATABASES
            for key, head in self._file.heads(name, len(MAGIC))
            if head != MAGIC and self._sealing.keys.has(owners[name].get(key, ""))
        }

        def sealed(database: str, key: bytes, value: bytes) -> tuple[bytes, bytes]:
            namespace = late.get((database, key))
            if namespace is None:
                return key, value
            hidden = self._sealing.hidden(namespace, key)
            return hidden, self._sealing.seal(namespace, database, hidden, value)

        if late and self._file.rewrite(sealed):
            log.info("sessions.sealed", values=len(late), reason="they were written before their tenant had a key")


def other_choices(stream: Stream, streams: Sequence[Stream]) -> list[str]:
    """Of these streams, those that answer the same request."""
    group = stream.spec.group
    if not group:
        return []  # of thousands that are read back few answer with others
    others = [other for other in streams if other.spec.group == group and other is not stream]
    return [other.id for other in sorted(others, key=lambda other: other.spec.choice)]


def _ended_since(stream: Stream, record: SessionRecord) -> bool:
    """A turn of the session has ended, and its record doesn't tell of it."""
    return stream.end is not None and stream.id in record.streams and stream.end.ended > record.last_used


def _owners(file: TableFile, sealing: Sealing) -> dict[str, dict[bytes, str]]:
    """By database and key, as it was without a tenant's key: the namespace that a record and its token list belong to."""
    owners: dict[str, dict[bytes, str]] = {name: {} for name in DATABASES}
    for key, value in file.items("records"):
        try:
            record = _read_record(sealing, key, value)
        except BadBlock:
            continue  # it was named when the table was read
        owners["records"][record.session.encode()] = owners["tokens"][record.list_key] = record.namespace
    return owners


def _read_record(sealing: Sealing, key: bytes, value: bytes) -> SessionRecord:
    """Raises Locked, BadBlock."""
    packed = _opened(sealing, "records", key, value)
    try:
        record = msgspec.msgpack.decode(packed, type=SessionRecord)
    except msgspec.MsgspecError as error:
        where = _place("records", key)
        raise BadBlock("a record can't be decoded", where=where, cause=str(error), hint=VALUE_HINT) from error
    record.place(record.captured, record.durable)
    return record


def _read_tokens(read: Callable[..., tuple[bytes, bytes] | None], sealing: Sealing, record: SessionRecord) -> bytes:
    """A session's token list, sealed or written before there was a key; empty if there is none, or it can't be read."""
    try:
        return _open_tokens(read, sealing, record)
    except BadBlock as error:
        log.error("sessions.bad_tokens", session=record.session, error=str(error))
        return b""


def _open_tokens(read: Callable[..., tuple[bytes, bytes] | None], sealing: Sealing, record: SessionRecord) -> bytes:
    """The same. Raises BadBlock, if it was changed."""
    found = read("tokens", sealing.hidden(record.namespace, record.list_key), record.list_key)
    if found is None:
        return b""
    tokens = _opened(sealing, "tokens", *found)
    if len(tokens) >= 4 and int.from_bytes(tokens[:4], "little") >= TOKEN_LIMIT:
        where = _place("tokens", found[0])
        raise BadBlock("a token list's magic is flipped", where=where, hint=VALUE_HINT)
    return tokens


def _opened(sealing: Sealing, database: str, key: bytes, raw: bytes) -> bytes:
    """A value without its seal and its checksum. Raises Locked, BadBlock."""
    try:
        return whole(sealing.open(database, key, raw))
    except Locked:
        raise
    except BadBlock as error:
        raise BadBlock(error.what, where=_place(database, key), cause=error.cause, hint=VALUE_HINT) from error


def _place(database: str, key: bytes) -> str:
    is_name = key[:1] > b"\1"  # else hidden, or a list's digest
    return f"DATA/sessions, {database}, {repr(key.decode(errors='replace')) if is_name else key.hex()}"


def checked(value: bytes) -> bytes:
    """A value of the table as it is written, with a checksum."""
    return CHECKED.pack(CHECKED_MAGIC, xxhash.xxh3_64_intdigest(value)) + value


def whole(raw: bytes) -> bytes:
    """What `checked` was given; what an older version wrote without a checksum comes back as it is. Raises BadBlock."""
    if not raw.startswith(CHECKED_MAGIC):
        return raw
    value = raw[CHECKED.size :]
    if len(raw) < CHECKED.size or CHECKED.unpack_from(raw)[1] != xxhash.xxh3_64_intdigest(value):
        raise BadBlock("a value's checksum is wrong", where="DATA/sessions")
    return value


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(done.set)
    except RuntimeError:
        pass  # the loop has ended: nobody waits


class SessionFile:
    """DATA/sessions as the table left it, for commands: reads beside a gateway, writes only while none runs."""

    def __init__(self, directory: Path, *, writable: bool = False, sealing: Sealing | None = None) -> None:
        self._sealing = sealing or Sealing()
        self.locked = 0  # records whose key isn't there, at the last look
        self.bad: list[str] = []  # names of records that can't be read, at the last look
        self.bad_lists: list[str] = []  # sessions whose token lists can't be, after `read_lists`
        if writable:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._writable = writable
        self._environment: lmdb.Environment | None = None
        if writable or (directory / "data.mdb").exists():
            with opening(directory, fcntl.LOCK_SH):
                allocate_lock(directory)
                self._environment = lmdb.open(
                    str(directory), map_size=MAP_BYTES, max_dbs=2, readonly=not writable, create=writable
                )

    def _database(self, name: bytes) -> Any:
        assert self._environment is not None
        return self._environment.open_db(name, create=self._writable)

    def all(self) -> list[SessionRecord]:
        """Most lately used first."""
        if self._environment is None:
            return []
        try:
            database = self._database(b"records")
        except lmdb.NotFoundError:  # a gateway is just making it
            return []
        records, self.locked, self.bad = [], 0, []
        with self._environment.begin(db=database) as transaction:
            for key, value in transaction.cursor():
                try:
                    records.append(_read_record(self._sealing, bytes(key), bytes(value)))
                except Locked:
                    self.locked += 1
                except BadBlock as error:
                    self.bad.append(bytes(key).decode(errors="replace"))
                    log.error("sessions.bad_record", session=self.bad[-1], error=str(error))
        return sorted(records, key=lambda record: -record.last_used)

    def read_lists(self) -> None:
        """Look at every token list."""
        self.bad_lists = []
        for record in self.all():
            try:
                _open_tokens(self._read, self._sealing, record)
            except BadBlock:
                self.bad_lists.append(record.session)

    def get(self, session: str) -> SessionRecord | None:
        """None if there is none, or none can be called so."""
        key = session.encode(errors="replace")
        if self._environment is None or not 0 < len(key) <= self._environment.max_key_size():
            return None
        try:
            database = self._database(b"records")
        except lmdb.NotFoundError:
            return None
        with self._environment.begin(db=database) as transaction:
            found = transaction.get(key)
        if found is not None:
            return _read_record(self._sealing, key, bytes(found))
        return next((record for record in self.all() if record.session == session), None)

    def tokens(self, session: str) -> bytes:
        """The last finished turn's whole token list, packed; empty if there is none."""
        if self._environment is None:
            return b""
        record = self.get(session)
        if record is None:
            return b""
        return _read_tokens(self._read, self._sealing, record)[: 4 * record.token_count]

    def _read(self, database: str, *keys: bytes) -> tuple[bytes, bytes] | None:
        """(key, value) of the first of these keys that is there."""
        assert self._environment is not None
        try:
            handle = self._database(database.encode())
        except lmdb.NotFoundError:
            return None
        with self._environment.begin(db=handle) as transaction:
            found = ((key, transaction.get(key)) for key in keys)
            return next(((key, bytes(value)) for key, value in found if value is not None), None)

    def put(self, record: SessionRecord, tokens: bytes) -> None:
        """Write a record and its tokens, synced."""
        assert self._environment is not None
        self.remove(record.session)
        record.list_id = b""
        records, token_lists = self._database(b"records"), self._database(b"tokens")
        key = self._sealing.hidden(record.namespace, record.session.encode())
        sealed = [
            self._sealing.seal(record.namespace, kind, key, checked(value))
            for kind, value in (("records", msgspec.msgpack.encode(record)), ("tokens", tokens))
        ]
        with self._environment.begin(write=True) as transaction:
            transaction.put(key, sealed[0], db=records)
            transaction.put(key, sealed[1], db=token_lists)

    def remove(self, session: str) -> None:
        """Forget a record and its tokens, a borrowed list with its last borrower."""
        assert self._environment is not None
        records, token_lists = self._database(b"records"), self._database(b"tokens")
        record = self.get(session)
        borrowed = record.list_id if record is not None else b""
        alone = not any(other.list_id == borrowed for other in self.all() if other.session != session)
        namespace = record.namespace if record is not None else ""
        with self._environment.begin(write=True) as transaction:
            for key in {session.encode(), self._sealing.hidden(namespace, session.encode())}:
                transaction.delete(key, db=records)
                transaction.delete(key, db=token_lists)
            if record is not None and borrowed and alone:
                for key in {record.list_key, self._sealing.hidden(namespace, record.list_key)}:
                    transaction.delete(key, db=token_lists)

    def shared_with_relatives(self, session: str) -> int:
        """As SessionTable says it."""
        record, own = self.get(session), self.tokens(session)
        if record is None or not record.family:
            return 0
        relatives = [r.session for r in self.all() if r.family == record.family and r.session != session]
        return max((common_prefix(own, self.tokens(name)) for name in relatives), default=0)

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()
