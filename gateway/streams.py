"""Streams: what was asked, which tokens there are, who reads. Stage: deliver, resume; owned by the event loop.

The state of a stream is a fold over its journal's records: `record()` writes one and applies it, a replay only applies.
So a stream that is read back after a restart gives the same text, usage and events, byte for byte.
Any number of readers follow by cursor; the tokens are held once, and a slow reader holds nothing but its cursor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import structlog

from engine.messages import TokenLogprobs, unpack_tokens
from gateway import journal as j
from gateway import metrics
from gateway.awake import AwakeTimer
from gateway.poison import Deaths
from gateway.renderer import Renderer, text_offsets
from gateway.sealing import Sealing
from gateway.tenancy import own_name
from gateway.tokenizer import TextCodec
from gateway.tool_parser import CallDelta, ToolParser
from tiers.keys import Locked

log = structlog.get_logger()

STREAM_ID = re.compile(r"(?:chatcmpl-|cmpl-)?([0-9a-f]{24})")
UNSURE_S = 120.0  # longer than the kernel keeps what isn't synced to itself
JOURNALS_AT_ONCE = 50  # looked for before the event loop has its turn
RECENT_COUNT = 256  # finished streams kept in memory; others are read back from their journals


def new_stream_id() -> str:
    return secrets.token_hex(12)


def parse_stream_id(text: str) -> str | None:
    """The stream id in a path, with or without the prefix that an answer's `id` carries."""
    match = STREAM_ID.fullmatch(text)
    return match[1] if match else None


class Reader(Protocol):
    """Whoever follows a stream."""

    def advance(self) -> None:
        """Something new can be read."""

    def comment(self, text: str) -> None:
        """Tell the client something that is no event."""

    def fail(self, status: int, code: str, message: str) -> None:
        """The stream can't be followed any longer, though it may go on."""


class Stream:
    """One request for an answer, from admission to its end."""

    def __init__(self, spec: j.StreamSpec, codec: TextCodec, journal: j.Journal | None) -> None:
        self.spec = spec
        self.id = spec.stream
        self.journal = journal
        self.tokens = unpack_tokens(spec.prompt)  # prompt, then every delivered token
        self.prompt_count = len(self.tokens)
        self.deltas: list[str] = []
        self.offsets: list[int] = []  # where each token's text begins in the answer's; kept for log probabilities only
        self.logprobs: list[TokenLogprobs | None] = []
        self.scored: list[TokenLogprobs] = []  # of the prompt's tokens from the second on
        self.epoch = 0
        self.engine = ""
        self.incarnation = 0
        self.lost: j.Lost | None = None
        self.started: j.StartedRecord | None = None
        self.started_epoch = 0  # the epoch that `started` tells of
        self.recoveries: list[j.Recovery] = []
        self.migrations: list[j.Migration] = []
        self.finish = ""
        self.end: j.End | None = None
        self.tail = ""  # text that only the end made certain
        self.calls: dict[
            int, list[CallDelta]
        ] = {}  # token of the answer (-1: the end) -> what it made known of tool calls
        self.echoed = spec.echoed or (codec.decode(self.tokens, special=spec.special) if spec.echo else "")
        self.prompt_offsets = text_offsets(codec, self.tokens, self.echoed) if spec.scored else []
        self._renderer = Renderer(codec, self.tokens, spec.stop, special=spec.special, stop_shown=spec.stop_shown)
        self._tools = ToolParser(spec.tool_form, spec.tool_names, spec.stream) if spec.tool_form else None
        # Below: of this process only, not in the journal.
        self.readers: set[Reader] = set()
        self.ended = asyncio.Event()
        self.unread = asyncio.Event()  # set while nobody reads
        self.unread.set()
        self.resumed = False  # read back at the start of this process, not claimed by an engine yet
        self.last_written = 0.0  # then: Unix time at which an earlier process last wrote of it
        self.captured = 0
        self.opened_at = time.monotonic()
        self.first_token_at = 0.0
        self.waited_ms = 0.0  # before it was given to an engine the first time
        self.prefill_ms = 0.0
        self.recovery: Any = None  # failover.Recovering, while the engine is lost and no token has come since
        self.timer: AwakeTimer | None = None
        self.begun_epoch = -1  # the epoch under which an engine was heard to start it
        self.deaths = Deaths()
        self.alone = False  # it may be what kills engines: nothing else of that kind is tried beside it

    # ------------------------------------------------------------ records

    def record(self, record: j.Record) -> None:
        """Journal, then apply: what a client sees was written first."""
        assert self.journal is not None, "a finished stream gets no records"
        self.journal.append(record)
        self.apply(record)

    def apply(self, record: j.Record) -> None:
        """Fold one record into the state."""
        match record:
            case j.Tokens():
                self._apply_tokens(record)
            case j.Placed():
                self.epoch, self.engine, self.incarnation = record.epoch, record.engine, record.incarnation
                self.lost = record.lost
            case j.StartedRecord():
                if self.started is None:
                    self.started, self.started_epoch = record, self.epoch
            case j.Scored():
                self.scored += record.rows
            case j.Recovery():
                self.recoveries.append(record)
                self.lost = None
            case j.Migration():
                self.migrations.append(record)
            case j.End():
                self.tail = self._end_text()
                self.end = record

    def _apply_tokens(self, record: j.Tokens) -> None:
        assert record.position == len(self.tokens), "positions in a journal have no gap"
        tokens = unpack_tokens(record.tokens)
        self.prefill_ms = record.prefill_ms or self.prefill_ms
        self.lost = None
        if self.spec.silent:
            self.finish = "length"
            return
        for index, token in enumerate(tokens):
            last = index == len(tokens) - 1
            silent = last and record.finish == "stop"  # the stop token has no text
            if self.spec.sampling.logprobs >= 0:
                self.offsets.append(self._renderer.char_count)
                self.logprobs.append(record.logprobs[index] if record.logprobs else None)
            self._apply_token(token, "" if silent else self._renderer.push(token))
            if self._renderer.stopped:
                self.finish = "stop"
                return  # tokens after the one that completed a stop string are no part of the truth
        self.finish = record.finish

    def _end_text(self) -> str:
        tail = self._renderer.finish()
        if self._tools is None:
            return tail
        said, last = self._tools.push(tail), self._tools.finish()
        if said.calls:
            self.calls[-1] = said.calls
        return said.content + last.content

    def _apply_token(self, token: int, delta: str) -> None:
        self.tokens.append(token)
        if self._tools is not None:
            said = self._tools.push(delta)
            delta = said.content
            if said.calls:
                self.calls[len(self.deltas)] = said.calls
        self.deltas.append(delta)

    # ------------------------------------------------------------ views

    @property
    def token_count(self) -> int:
        """Tokens of the answer so far."""
        return len(self.deltas)

    @property
    def stopped_by_text(self) -> bool:
        return self._renderer.stopped

    @property
    def text(self) -> str:
        return "".join(self.deltas) + self.tail

    def tool_calls(self) -> list[dict[str, Any]]:
        """Whole calls, as OpenAI answers them."""
        whole: dict[int, dict[str, Any]] = {}
        for _, deltas in sorted(self.calls.items(), key=lambda item: item[0] if item[0] >= 0 else len(self.deltas)):
            for delta in deltas:
                function = {"name": delta.name, "arguments": ""}
                call = whole.setdefault(delta.index, {"id": delta.id, "type": "function", "function": function})
                call["function"]["arguments"] += delta.arguments
        return list(whole.values())

    @property
    def failed(self) -> bool:
        return self.end is not None and self.end.error_status != 0

    @property
    def state(self) -> str:
        if self.end is None:
            return "waiting" if self.started is None else "live"
        return "failed" if self.failed else "finished"

    @property
    def lacks_scores(self) -> bool:
        """Log probabilities of its prompt are wanted and not all known yet."""
        return self.spec.scored and len(self.scored) < self.prompt_count - 1

    @property
    def stored(self) -> bool:
        return self.spec.stored

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; cached_tokens is what the first engine put back instead of computing."""
        reused = sum(self.started.reused.values()) if self.started else 0
        return {
            "prompt_tokens": self.prompt_count,
            "completion_tokens": self.token_count,
            "total_tokens": self.prompt_count + self.token_count,
            "prompt_tokens_details": {"cached_tokens": min(reused, self.prompt_count)},
        }

    def concordia(self) -> dict[str, Any]:
        """What was reused and from where, what was recomputed and why, and each recovery."""
        started = self.started or j.StartedRecord("unknown", "the engine's report was lost", {}, 0, -1)
        tiers = {tier: started.reused.get(tier, 0) for tier in ("device", "lane", "disk")}
        return {
            "stream_id": self.id,
            "session_id": own_name(self.spec.session) or None,
            "verdict": started.verdict,
            "reason": started.reason,
            "restored_tokens": sum(tiers.values()),
            "restored_from": tiers,
            "recomputed_tokens": started.recomputed,
            "timing": {
                "wait_ms": started.wait_ms,
                "restore_ms": started.restore_ms,
                "prefill_ms": self.prefill_ms,
            },
            "recoveries": [_recovery_view(recovery) for recovery in self.recoveries],
            "migrations": [_recovery_view(migration) for migration in self.migrations],
            "end": self.end.cause if self.end else None,
        }

    def add_reader(self, reader: Reader) -> None:
        self.readers.add(reader)
        self.unread.clear()

    def drop_reader(self, reader: Reader) -> None:
        self.readers.discard(reader)
        if not self.readers:
            self.unread.set()

    def advance_readers(self) -> None:
        for reader in tuple(self.readers):
            reader.advance()

    def comment(self, text: str) -> None:
        for reader in tuple(self.readers):
            reader.comment(text)


def _recovery_view(recovery: j.Recovery | j.Migration) -> dict[str, Any]:
    fields = {name: getattr(recovery, name) for name in recovery.__struct_fields__}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}


class StreamTable:
    """All streams of this gateway: live ones, a few finished ones, and the journals of the rest."""

    def __init__(
        self, directory: Path, codec: TextCodec, written: j.Written = j.untold, sealing: Sealing | None = None
    ) -> None:
        self._directory = directory
        self._sealing = sealing or Sealing()
        self._written = written
        self._codec = codec
        self._thread = ThreadPoolExecutor(1, "journal")
        self._recent: OrderedDict[str, Stream] = OrderedDict()
        self._unwritten: set[Stream] = set()
        self.live: dict[str, Stream] = {}
        directory.mkdir(parents=True, exist_ok=True)

    def open(self, spec: j.StreamSpec) -> Stream:
        """Start a stream: its first record is in the journal when this returns."""
        seal = self._sealing.of_journal(spec.namespace, spec.stream)
        journal = j.Journal(self._path(spec.stream), written=self._written, seal=seal)
        stream = Stream(spec, self._codec, journal)
        journal.append(spec)
        self.live[stream.id] = stream
        metrics.streams_opened.labels(spec.kind).inc()
        return stream

    async def fetch(self, stream_id: str) -> Stream | None:
        """A stream by id: live, finished lately, or read back from its journal."""
        stream = self.find(stream_id)
        if stream is not None:
            return stream
        loop = asyncio.get_running_loop()
        stream = await loop.run_in_executor(self._thread, self._read, self._path(stream_id))
        if stream is None or stream.end is None:
            return self.find(stream_id)
        stream.ended.set()
        return self._remember(stream)

    def load(self, stream_id: str) -> Stream | None:
        """As `fetch`, before serving."""
        stream = self.find(stream_id) or self._read(self._path(stream_id))
        if stream is not None and stream.end is not None:
            stream.ended.set()
            self._remember(stream)
        return stream

    def find(self, stream_id: str) -> Stream | None:
        """A stream in memory."""
        return self.live.get(stream_id) or self._recent.get(stream_id)

    def retire(self, stream: Stream) -> None:
        """The stream has its end record: close the journal, keep it readable."""
        assert stream.end is not None and stream.journal is not None
        stream.journal.close()
        if stream.journal.backlog_bytes:
            self._unwritten.add(stream)
        self.live.pop(stream.id, None)
        self._remember(stream)

    def load_live(
        self, ended: Callable[[Stream], object] = lambda stream: None, *, every: bool = False
    ) -> list[Stream]:
        """Streams of an earlier process that have no end yet. Called once, before serving.

        ended  told those that ended last; `every`: all that have
        """
        streams = []
        _delete_what_can_be(list(self._directory.glob(f"*{j.DRAFT}")))
        changed = {path: _changed_at(path) for path in sorted(self._directory.glob("*.journal"))}
        # A loss of power may have taken a page before the mark of the end, of those that were written last.
        unsure_since = max(changed.values(), default=0.0) - UNSURE_S
        for path, at in changed.items():
            if every or at >= unsure_since or not _is_closed(path):
                self._seal_late(path)
                stream = self._read(path)
                if stream is not None and stream.end is not None:
                    ended(stream)
                elif stream is not None:
                    assert stream.journal is not None, "it goes on"
                    stream.journal.hold()
                    stream.resumed = True
                    stream.last_written = at
                    self.live[stream.id] = stream
                    streams.append(stream)
        return streams

    def journal_troubles(self) -> list[str]:
        """Of each stream whose journal can't be written right now: why."""
        journals = [stream.journal for stream in (*self.live.values(), *self._unwritten)]
        return [journal.trouble for journal in journals if journal is not None and journal.trouble]

    async def look_for_files(self) -> None:
        """Journals that were deleted, of streams in memory, are written anew; a few at a time, as others wait meanwhile."""
        journals = list(self._journals())
        for start in range(0, len(journals), JOURNALS_AT_ONCE):
            write_anew_if_lost(journals[start : start + JOURNALS_AT_ONCE])
            await asyncio.sleep(0)

    def _journals(self) -> Iterable[j.Journal]:
        """Those that this process has open: of live streams, and of those that ended lately."""
        streams = (*self.live.values(), *self._recent.values(), *self._unwritten)
        return dict.fromkeys(stream.journal for stream in streams if stream.journal is not None)

    async def seal_late(self) -> None:
        """Journals that were written before their tenant had a key are sealed; those of live streams were when they were read back."""
        if not self._sealing.keys:
            return
        loop, sealed = asyncio.get_running_loop(), 0
        for path in sorted(self._directory.glob("*.journal")):
            if path.stem not in self.live:
                sealed += await loop.run_in_executor(self._thread, self._seal_late, path)
        if sealed:
            log.info(
                "gateway.journals_sealed", journals=sealed, reason="they were written before their tenant had a key"
            )

    def namespace_of(self, stream_id: str) -> str:
        """Whose a stream is, in memory or by its journal's first record; "" if nobody can say. Raises Locked."""
        spec = self._spec(stream_id)
        return spec.namespace if spec is not None else ""

    async def groups_of(self, stream_ids: list[str]) -> set[str]:
        """The groups that streams are choices of. What can't be read is of none."""

        def read() -> set[str]:
            found = set()
            for stream_id in stream_ids:
                with contextlib.suppress(OSError, Locked):
                    spec = self._spec(stream_id)
                    found.add(spec.group if spec is not None else "")
            return found - {""}

        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    async def of_session(self, session: str) -> list[str]:
        """All streams of a session's requests, by the first records of all journals, on the thread: a session's record names the latest."""

        def read() -> list[str]:
            specs = list[j.StreamSpec]()
            for path in self._directory.glob("*.journal"):
                with contextlib.suppress(OSError, Locked):
                    spec = self._spec(path.stem)
                    specs += [spec] if spec is not None else []
            groups = {spec.group for spec in specs if spec.session == session} - {""}
            return [spec.stream for spec in specs if spec.session == session or spec.group in groups]

        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    def _spec(self, stream_id: str) -> j.StreamSpec | None:
        """Raises Locked, OSError."""
        stream = self.find(stream_id)
        if stream is not None:
            return stream.spec
        spec = j.read_spec(self._path(stream_id), self._sealing.opens_journal(stream_id))
        return spec if isinstance(spec, j.StreamSpec) else None

    def _seal_late(self, path: Path) -> bool:
        return seal_late(path, self._sealing, lambda path: self.namespace_of(path.stem))

    async def forget(self, stream_ids: list[str]) -> None:
        """Delete finished streams and their journals. Raises OSError (some are still there)."""
        self._drop(stream_ids)
        paths = [self._path(stream_id) for stream_id in stream_ids if stream_id not in self.live]
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, unlink_all, paths)
        self._drop(stream_ids)  # somebody who asked just before may have had them read back

    def _drop(self, stream_ids: list[str]) -> None:
        for stream_id in stream_ids:
            stream = self._recent.pop(stream_id, None)
            if stream is not None:
                self._let_go(stream)

    async def sweep(self, retention_s: float) -> None:
        """Retry what the disk refused; delete journals of streams that ended too long ago."""
        waiting = [s.journal for s in (*self.live.values(), *self._unwritten) if s.journal and s.journal.backlog_bytes]
        for journal in waiting:
            journal.flush()
        metrics.journal_backlog.set(sum(journal.backlog_bytes for journal in waiting))
        for stream in [s for s in self._unwritten if s.journal and not s.journal.backlog_bytes]:
            self._unwritten.discard(stream)
            self._let_go(stream)
        loop = asyncio.get_running_loop()
        before = time.time() - retention_s
        old = await loop.run_in_executor(self._thread, expired, self._directory, "*.journal", before)
        aside = await loop.run_in_executor(self._thread, _set_aside_before, self._directory, before)
        try:
            await self.forget([path.stem for path in old if path.stem not in self.live])
            await loop.run_in_executor(self._thread, unlink_all, aside)
        except OSError as error:
            not_deleted(error)

    def close(self) -> None:
        """Let go of all files; live streams go on in the next process."""
        for stream in self.live.values():
            if stream.journal is not None:
                stream.journal.flush()
        write_anew_if_lost(self._journals())
        for journal in self._journals():
            journal.release()
        self._thread.shutdown()

    def _path(self, stream_id: str) -> Path:
        return self._directory / f"{stream_id}.journal"

    def _remember(self, stream: Stream) -> Stream:
        self._recent[stream.id] = stream
        for old in list(self._recent)[: max(0, len(self._recent) - RECENT_COUNT)]:
            if not self._recent[old].readers and self._recent[old] not in self._unwritten:
                self._let_go(self._recent.pop(old))
        return stream

    def _let_go(self, stream: Stream) -> None:
        """Close the journal of a stream that has ended, unless it is remembered or still to be written."""
        if stream.journal is not None and stream.id not in self._recent and stream not in self._unwritten:
            stream.journal.release()

    def _read(self, path: Path) -> Stream | None:
        """Fold a journal. Without a whole first record nothing was ever promised: the file is dropped. None if the disk can't read it."""
        try:
            return self._fold(path, path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            unreadable(path, error)
            return None
        except Locked as error:  # it stays as it is: the key may come back
            log.error("resume.journal_locked", path=str(path), error=str(error))
            return None

    def _fold(self, path: Path, data: bytes) -> Stream | None:
        """Raises Locked, OSError."""
        records = j.read_records(data, self._sealing.opens_journal(path.stem))
        first = next(records, None)
        if first is None or not isinstance(first[0], j.StreamSpec):
            log.warning("resume.journal_empty", path=str(path), bytes=len(data))
            os.rename(path, path.with_suffix(".bad"))
            return None
        stream = Stream(first[0], self._codec, None)
        seal = self._sealing.of_journal(stream.spec.namespace, stream.id)
        good = first[1]
        for record, end in records:
            stream.apply(record)
            good = end
        if good < len(data) - len(j.CLOSED) or (stream.end is None and good < len(data)):
            log.warning("resume.journal_torn", stream=stream.id, good_bytes=good, bytes=len(data))
        if stream.end is None:
            stream.journal = j.Journal(path, good_bytes=good, written=self._written, seal=seal)
        elif data[good:] != j.CLOSED:  # killed before the mark of the end, or in the midst of it
            journal = j.Journal(path, good_bytes=good, written=self._written)
            journal.close()
            journal.release()
        return stream


def seal_late(path: Path, sealing: Sealing, namespace_of: Callable[[Path], str]) -> bool:
    """Seal a journal that was written before its tenant had a key; whether that was done now. `namespace_of` may raise Locked."""
    try:
        if not sealing.keys or not j.is_open(path):
            return False
        namespace = namespace_of(path)
        seals = bool(namespace) and sealing.keys.has(namespace)
        return seals and j.write_sealed(path, sealing.of_journal(namespace, path.stem))
    except (FileNotFoundError, Locked):
        return False  # swept meanwhile; sealed
    except OSError as error:
        hint = "free some room; it is tried again at the next start"
        log.error("gateway.journal_not_sealed", path=str(path), error=str(error), hint=hint)
        return False


def write_anew_if_lost(journals: Iterable[j.Journal]) -> None:
    """Those whose files were deleted, moved or replaced get new ones, with all that was written."""
    lost = [journal for journal in journals if journal.is_lost()]
    count = sum([journal.write_anew() for journal in lost])
    if lost:
        metrics.files_deleted.labels("journal").inc(len(lost))
        log.error(
            "deliver.journals_written_anew", journals=count, failed=len(lost) - count, path=str(lost[0].path.parent),
            hint="files of live streams were deleted or moved: find out who writes to the data directory",
        )  # fmt: skip


def expired(directory: Path, pattern: str, before: float) -> list[Path]:
    """Journals of what has ended, last changed before that time. What isn't marked as ended stays: its key may come back."""
    found = []
    for path in directory.glob(pattern):
        try:
            if path.stat().st_mtime < before and j.is_closed(path):
                found.append(path)
        except OSError:
            continue
    return found


def _set_aside_before(directory: Path, before: float) -> list[Path]:
    """Journals that could not be read back (`.bad`), renamed so before that time: a rename changes the ctime alone."""
    found = []
    for path in directory.glob("*.bad"):
        with contextlib.suppress(OSError):
            if path.stat().st_ctime < before:
                found.append(path)
    return found


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # whoever reads it says why


def _is_closed(path: Path) -> bool:
    try:
        return j.is_closed(path)
    except OSError:
        return False  # the same


def unreadable(path: Path, error: OSError) -> None:
    """A journal is passed over: one bad sector doesn't keep all others from being served."""
    hint = "it stays as it is; look at the disk, or restore it from a backup and restart"
    log.error("resume.journal_unreadable", path=str(path), error=str(error), hint=hint)


def not_deleted(error: OSError) -> None:
    """Journals that are kept longer than asked for."""
    log.warning("deliver.not_deleted", error=str(error), hint="it is tried again every few seconds")


def _delete_what_can_be(paths: list[Path]) -> None:
    try:
        unlink_all(paths)
    except OSError as error:
        not_deleted(error)


def unlink_all(paths: list[Path]) -> None:
    """Delete what can be. Raises OSError (the last of those that were met)."""
    refused = None
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            refused = error
    if refused is not None:
        raise refused
