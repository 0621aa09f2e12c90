"""Named sessions: what a client can list, park and delete. DATA/sessions (LMDB), written by the thread `sessions`.

Records live in memory; the thread makes them durable in groups, so the event loop never waits for a disk. A session is
a name for a token list: losing a record loses no state, since blocks are found by their content.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import structlog

from engine.messages import pack_tokens
from gateway import metrics
from gateway.streams import Stream

log = structlog.get_logger()

STREAMS_KEPT = 100  # ids of the latest streams of a session
MAP_BYTES = 1 << 36  # sparse


class SessionRecord(msgspec.Struct, omit_defaults=True):
    """One session.

    token_count   tokens of its longest-lived list, the last turn's
    captured      how far its state is in a lane or further
    durable       how far it is on disk, as the keeper last said
    parked        taken off the devices by a park, and not used since
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


class SessionTable:
    """All sessions of this gateway. Called on the event loop; `close` waits for the disk."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._environment = lmdb.open(str(directory), map_size=MAP_BYTES, max_dbs=2)
        self._records_db = self._environment.open_db(b"records")
        self._tokens_db = self._environment.open_db(b"tokens")
        self._records = {record.session: record for record in self._load()}
        self._work: queue.SimpleQueue[tuple[str, bytes | None, bytes | None] | None] = queue.SimpleQueue()
        self._tokens_waiting: dict[str, bytes] = {}
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
        if session in self._tokens_waiting:
            return self._tokens_waiting[session]
        with self._environment.begin(db=self._tokens_db) as transaction:
            return bytes(transaction.get(session.encode()) or b"")

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
        if record is not None and stream.token_count:
            record.last_used = time.time()
            record.token_count = len(stream.tokens)
            self._put(record, pack_tokens(stream.tokens))

    def captured(self, stream: Stream) -> None:
        """In memory only: it changes with every step."""
        record = self._records.get(stream.spec.session)
        if record is not None:
            record.captured = stream.captured

    def progressed(self, stream: Stream, durable: int) -> None:
        """How far the latest stream's state is on disk; in memory, since it changes all the time and the store knows it anyway."""
        record = self._records.get(stream.spec.session)
        if record is not None and record.streams[-1:] == [stream.id]:
            record.captured, record.durable = stream.captured, durable

    def park(self, session: str, durable: int) -> SessionRecord:
        """Remember that the devices are free of it."""
        record = self._records[session]
        record.parked = True
        record.captured = max(record.captured, durable)
        record.durable = durable
        self._put(record, None)
        return record

    def adopt(self, record: SessionRecord, tokens: bytes) -> None:
        """Take a session that was imported; its name must be free or its own."""
        self._records[record.session] = record
        self._put(record, tokens)
        metrics.sessions_known.set(len(self._records))

    def remove(self, session: str) -> None:
        self._records.pop(session, None)
        self._tokens_waiting.pop(session, None)
        self._work.put((session, None, None))
        metrics.sessions_known.set(len(self._records))

    def close(self) -> None:
        """Everything to disk."""
        self._work.put(None)
        self._thread.join(timeout=10)
        self._environment.close()

    # ------------------------------------------------------------ thread

    def _put(self, record: SessionRecord, tokens: bytes | None) -> None:
        if tokens is not None:
            self._tokens_waiting[record.session] = tokens
        self._work.put((record.session, msgspec.msgpack.encode(record), tokens))

    def _load(self) -> Iterator[SessionRecord]:
        with self._environment.begin(db=self._records_db) as transaction:
            for key, value in transaction.cursor():
                try:
                    yield msgspec.msgpack.decode(value, type=SessionRecord)
                except msgspec.MsgspecError as error:
                    log.error("sessions.bad_record", session=key.decode(errors="replace"), error=str(error))

    def _write_loop(self) -> None:
        while True:
            group = [self._work.get()]
            while not self._work.empty():
                group.append(self._work.get())
            self._write([item for item in group if item is not None])
            if None in group:
                return

    def _write(self, group: list[tuple[str, bytes | None, bytes | None]]) -> None:
        try:
            with self._environment.begin(write=True) as transaction:
                for session, record, tokens in group:
                    self._write_one(transaction, session.encode(), record, tokens)
        except lmdb.Error as error:
            log.error("sessions.write_failed", error=str(error), hint="sessions go on from memory; free disk space")
            return
        for session, _, tokens in group:
            if tokens is not None and self._tokens_waiting.get(session) is tokens:
                self._tokens_waiting.pop(session, None)

    def _write_one(self, transaction: lmdb.Transaction, key: bytes, record: bytes | None, tokens: bytes | None) -> None:
        if record is None:
            transaction.delete(key, db=self._records_db)
            transaction.delete(key, db=self._tokens_db)
            return
        transaction.put(key, record, db=self._records_db)
        if tokens is not None:
            transaction.put(key, tokens, db=self._tokens_db)


class SessionFile:
    """DATA/sessions as the table left it, for commands: reads beside a gateway, writes only while none runs."""

    def __init__(self, directory: Path, *, writable: bool = False) -> None:
        if writable:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._writable = writable
        self._environment: lmdb.Environment | None = None
        if writable or (directory / "data.mdb").exists():
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
        with self._environment.begin(db=database) as transaction:
            records = [msgspec.msgpack.decode(value, type=SessionRecord) for _, value in transaction.cursor()]
        return sorted(records, key=lambda record: -record.last_used)

    def get(self, session: str) -> SessionRecord | None:
        return next((record for record in self.all() if record.session == session), None)

    def tokens(self, session: str) -> bytes:
        """The last finished turn's whole token list, packed; empty if there is none."""
        if self._environment is None:
            return b""
        try:
            database = self._database(b"tokens")
        except lmdb.NotFoundError:
            return b""
        with self._environment.begin(db=database) as transaction:
            return bytes(transaction.get(session.encode()) or b"")

    def put(self, record: SessionRecord, tokens: bytes) -> None:
        """Write a record and its tokens, synced."""
        assert self._environment is not None
        records, token_lists = self._database(b"records"), self._database(b"tokens")
        with self._environment.begin(write=True) as transaction:
            transaction.put(record.session.encode(), msgspec.msgpack.encode(record), db=records)
            transaction.put(record.session.encode(), tokens, db=token_lists)

    def remove(self, session: str) -> None:
        """Forget a record and its tokens."""
        assert self._environment is not None
        records, token_lists = self._database(b"records"), self._database(b"tokens")
        with self._environment.begin(write=True) as transaction:
            transaction.delete(session.encode(), db=records)
            transaction.delete(session.encode(), db=token_lists)

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()
