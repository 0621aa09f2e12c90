"""The truth about one stream on disk: DATA/journal/<stream>.journal. Stage: deliver; written on the event loop, before the socket.

One `os.write` a stream and engine step, into the page cache: that survives the process. What survives the machine's power is
`gateway/journal_sync.py`.
A torn tail is the end of the journal. A full disk never stops a stream: what couldn't be written waits in memory and is
tried again; `journal_backlog_bytes` and the degraded state `journal_failing` show it.

Record: 16-byte header (u32 body length, u16 type, u16 magic, u64 xxh3_64 of type and body), then the body in msgpack.
Bodies of a tenant that has a key are sealed (`gateway/sealing.py`); the checksum is of the sealed body.
A finished journal ends with one empty record of type CLOSED: 16 constant bytes, so the end of a file tells whether it is live.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import structlog
import xxhash

from engine.messages import Sampling, TokenLogprobs
from gateway import metrics
from gateway.sealing import MAGIC as SEALED_MAGIC
from gateway.sealing import Seal, as_it_is
from tiers.errors import BadBlock
from tiers.keys import Locked

log = structlog.get_logger()

_HEADER = struct.Struct("<IHHQ")
_MAGIC = 0x4A43  # "CJ"
_CLOSED_TYPE = 255
RECORD_LIMIT_BYTES = 256 << 20
DRAFT = ".new"  # behind the name of a journal that isn't whole yet


class StreamSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """First record: all that a stream is a function of, besides its tokens.

    prompt      packed tokens
    seed        in `sampling`; chosen by the gateway if the request named none
    streamed    asked for as SSE (a resume is always SSE)
    stored      goes on without a client
    grammar     what the answer must match, as the engine takes it; "" if anything goes
    capture     False: its state is never written to a tier; a recovery computes it anew
    tool_form   how calls are written in the answer, "" if it isn't searched for any; tool_names: the tools on offer
    adapter     digest of the adapter that computes it, "" for the model alone
    echo        its text begins with the prompt's; scored: log probabilities of the prompt's tokens are part of the answer
    echoed      the prompt's text; "" in journals that don't have it, then it is that of its tokens
    silent      the prompt is the whole answer: the token that is drawn behind it is dropped
    special     special tokens are part of its text; stop_shown: a stop string too
    group       id under which its request's choices are answered together, "" if it is the only one; choice: its index
    """

    stream: str
    kind: str  # "chat" or "text"
    created: int
    model: str
    prompt: bytes
    sampling: Sampling
    stop: list[str]
    stop_tokens: list[int]
    max_position: int
    include_usage: bool = False
    streamed: bool = False
    stored: bool = False
    session: str = ""
    namespace: str = "default"
    grammar: str = ""
    capture: bool = True
    group: str = ""
    choice: int = 0
    tool_form: str = ""
    tool_names: list[str] = []
    adapter: str = ""
    echo: bool = False
    special: bool = False
    stop_shown: bool = False
    scored: bool = False
    silent: bool = False
    echoed: str = ""


class Lost(msgspec.Struct, frozen=True, array_like=True):
    """A loss of an engine that no token has followed yet; at: its last sign of life, in seconds of Unix time."""

    engine: str
    reason: str
    at: float


class Placed(msgspec.Struct, frozen=True, omit_defaults=True):
    """Before each submission: which epoch went to which engine, and after which loss, so that the next gateway knows of it."""

    epoch: int
    engine: str
    incarnation: int
    lost: Lost | None = None


class StartedRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the first engine found; what usage, verdict and timing of the answer come from."""

    verdict: str
    reason: str
    reused: dict[str, int]
    recomputed: int
    prefill_start: int
    wait_ms: float = 0.0
    restore_ms: float = 0.0


class Scored(msgspec.Struct, frozen=True):
    """Log probabilities of the next tokens of the prompt, beginning with its second."""

    rows: list[TokenLogprobs]


class Tokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens from `position` on; finish belongs to the last one, prefill_ms to the first of the answer."""

    position: int
    tokens: bytes
    finish: str = ""
    logprobs: list[TokenLogprobs | None] = []
    prefill_ms: float = 0.0


class Recovery(msgspec.Struct, frozen=True, omit_defaults=True):
    """One loss of an engine, from the last sign of life to the next delivered token, in ms (parts add up to the gap).

    cut_short  no token ended it: the next loss came first, and the gap goes to the first sign of that one
    """

    engine: str
    reason: str
    position: int
    to_engine: str = ""
    gap_ms: float = 0.0
    detect_ms: float = 0.0
    fence_ms: float = 0.0
    wait_ms: float = 0.0
    restore_ms: float = 0.0
    force_ms: float = 0.0
    next_token_ms: float = 0.0
    restored_tokens: int = 0
    forced_tokens: int = 0
    cut_short: bool = False


class Migration(msgspec.Struct, frozen=True, omit_defaults=True):
    """One move to another engine, written before the target's first token; downtime_ms: from the source's last token to that one.

    carried  "state" (copied while it went on) or "tokens" (computed again there; reason says why)
    """

    from_engine: str
    to_engine: str
    why: str
    position: int
    carried: str
    reason: str = ""
    downtime_ms: float = 0.0
    copied_tokens: int = 0


class End(msgspec.Struct, frozen=True, omit_defaults=True):
    """Last record. finish_reason is the client's word; cause is ours (stop, length, cancelled, disconnected, expired, error)."""

    finish_reason: str
    cause: str
    ended: float
    error_status: int = 0
    error_code: str = ""
    error_message: str = ""


class GroupSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """First record of a group's journal. The choices' journals lie beside it; only the order of their events is in here.

    shown     choices that are answered: all, or fewer for `best_of`
    prompts   how many prompts they answer: the first choices the first one, and so on, as many each
    logprobs  the client asked for them (`best_of` needs them for itself)
    """

    group: str
    streams: list[str]
    shown: int
    include_usage: bool = False
    streamed: bool = False
    stored: bool = False
    session: str = ""
    logprobs: bool = False
    prompts: int = 1


class Order(msgspec.Struct, frozen=True):
    """Before they are sent: one byte for each event, the choice whose next event it is."""

    choices: bytes


TYPES: dict[int, type[Any]] = {
    1: StreamSpec, 2: Placed, 3: StartedRecord, 4: Tokens, 5: Recovery, 6: End,
    7: GroupSpec, 8: Order, 9: Scored, 20: Migration,
}  # fmt: skip
_NUMBERS = {form: number for number, form in TYPES.items()}
_DECODERS = {number: msgspec.msgpack.Decoder(form) for number, form in TYPES.items()}
_encoder = msgspec.msgpack.Encoder()
Record = StreamSpec | Placed | StartedRecord | Scored | Tokens | Recovery | Migration | End | GroupSpec | Order


def _frame(number: int, body: bytes) -> bytes:
    return _HEADER.pack(len(body), number, _MAGIC, xxhash.xxh3_64_intdigest(body, seed=number)) + body


CLOSED = _frame(_CLOSED_TYPE, b"")


def encode(record: Record, seal: Seal = as_it_is) -> bytes:
    """One record as it lies in the file."""
    return _frame(_NUMBERS[type(record)], seal(_encoder.encode(record)))


Written = Callable[..., None]  # (path, is_new=whether the file was made)


def untold(path: Path, *, is_new: bool) -> None:
    """Nobody syncs journals."""


class Journal:
    """Append end of one file. Single writer; opened again after a restart at the end of its whole records.

    written  told after each write
    seal     what encrypts the records' bodies, if their tenant has a key
    """

    def __init__(
        self, path: Path, *, good_bytes: int | None = None, written: Written = untold, seal: Seal = as_it_is
    ) -> None:
        self.path = path
        self._seal = seal
        self._written = written
        self._fd: int | None = None
        self._end = 0 if good_bytes is None else good_bytes
        self._backlog = bytearray()
        self._told = False
        self._write_trouble = ""  # why the last write failed; "" once one succeeded
        self._loss_trouble = ""  # why a file that was deleted can't be written anew
        self._fresh = good_bytes is None

    def append(self, *records: Record) -> None:
        """Put records at the end of the file; if the disk refuses, keep them and try again with the next."""
        self._backlog += b"".join([encode(record, self._seal) for record in records])
        self.flush()

    def close(self) -> None:
        """Mark the journal as finished. The file stays open until `release`: as long as it is it can be written anew."""
        self._backlog += CLOSED
        self.flush()

    def release(self) -> None:
        """Let go of the file, finished or not: the next process may go on with it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @property
    def backlog_bytes(self) -> int:
        return len(self._backlog)

    @property
    def trouble(self) -> str:
        """Why what was appended isn't in the file, or the file not where it belongs; "" if all is well."""
        return self._write_trouble or self._loss_trouble

    def hold(self) -> None:
        """Open the file now: what is open can be written anew if it is deleted."""
        try:
            self._fd = self._open() if self._fd is None else self._fd
        except OSError as error:
            self._failed(error.strerror or str(error), 0)

    def is_lost(self) -> bool:
        """Whether its file was deleted, moved or replaced under it. Two system calls."""
        if self._fd is None:
            return False
        mine = os.fstat(self._fd)
        try:
            named = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # nobody knows; asked again
        return (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino)

    def write_anew(self) -> bool:
        """After `is_lost`: put all that was written, which the open file still has, into a file of its name again. False: the disk refused.

        A file that has the name meanwhile is somebody's copy: this process knows more.
        """
        assert self._fd is not None, "only what is open can be lost"
        draft = self.path.with_name(self.path.name + DRAFT)
        try:
            if not self.path.parent.is_dir():
                self._make_directory()
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _copy(self._fd, fd, self._end)
                os.rename(draft, self.path)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            self._loss_trouble = f"its file was deleted, and can't be written anew: {error.strerror or error}"
            self._failed(self._loss_trouble, self._end)
            return False
        os.close(self._fd)
        self._fd, self._loss_trouble = fd, ""
        self._written(self.path, is_new=True)
        return True

    def flush(self) -> None:
        """Try to write what waits."""
        waiting = bytes(self._backlog)
        try:
            written = self._write(waiting)
            trouble = "" if written == len(waiting) else "short write"
        except OSError as error:
            written, trouble = 0, error.strerror or str(error)
        self._write_trouble = trouble
        if trouble:
            self._failed(trouble, len(waiting) - written)
        self._end += written
        del self._backlog[:written]

    def _failed(self, trouble: str, backlog_bytes: int) -> None:
        metrics.journal_write_failures.inc()
        if not self._told:  # once a stream, not once a token
            self._told = True
            log.error("deliver.journal_failed", path=str(self.path), error=trouble, backlog_bytes=backlog_bytes)

    def _write(self, data: bytes) -> int:
        if self._fd is None:
            self._fd = self._open()
        written = os.pwrite(self._fd, data, self._end)
        self._written(self.path, is_new=False)
        return written

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if self._fresh else 0)
        try:
            fd = os.open(self.path, flags, 0o600)
        except FileNotFoundError:
            self._make_directory()
            fd = os.open(self.path, flags, 0o600)
        self._written(self.path, is_new=self._fresh)
        self._fresh = False
        if (
            os.fstat(fd).st_size != self._end
        ):  # else its time of change is left: it says when a stream was last heard of
            os.ftruncate(fd, self._end)  # drops a torn tail
        return fd

    def _make_directory(self) -> None:
        """Somebody deleted it, and the journals of streams that have ended with it."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log.error(
            "deliver.journal_directory_made", path=str(self.path.parent),
            hint="it was deleted or moved: streams that ended before can't be read back; those that are live are written anew",
        )  # fmt: skip


def read_records(data: bytes, opened: Seal = as_it_is) -> Iterator[tuple[Record, int]]:
    """Whole records from the start, each with the offset after it. Stops at a torn or flipped one, or at CLOSED.

    opened  opens sealed bodies
    Raises  Locked (they are sealed with a key that isn't there)
    """
    at = 0
    while at + _HEADER.size <= len(data):
        length, number, magic, checksum = _HEADER.unpack_from(data, at)
        start, end = at + _HEADER.size, at + _HEADER.size + length
        if magic != _MAGIC or length > RECORD_LIMIT_BYTES or end > len(data) or number not in _DECODERS:
            return
        body = data[start:end]
        if xxhash.xxh3_64_intdigest(body, seed=number) != checksum:
            return
        try:
            record = _DECODERS[number].decode(opened(body))
        except Locked:
            raise
        except (msgspec.MsgspecError, BadBlock):
            return
        yield record, end
        at = end


def read_spec(path: Path, opened: Seal = as_it_is) -> StreamSpec | GroupSpec | None:
    """A journal's first record, which says what it is of; None if it isn't whole or there is no file. Raises Locked."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size:
                return None
            data = head + file.read(min(_HEADER.unpack(head)[0], RECORD_LIMIT_BYTES))
    except FileNotFoundError:
        return None
    first = next(read_records(data, opened), None)
    return first[0] if first is not None and isinstance(first[0], StreamSpec | GroupSpec) else None


def read_unfinished(path: Path, opened: Seal = as_it_is) -> tuple[StreamSpec, bytes] | None:
    """A stream that has no end yet, with its tokens so far (packed: the prompt, then what was delivered); None if it has, or there is none.

    Raises Locked
    """
    try:
        if is_closed(path):
            return None
        records = [record for record, _ in read_records(path.read_bytes(), opened)]
    except FileNotFoundError:
        return None
    if not records or not isinstance(records[0], StreamSpec) or isinstance(records[-1], End):
        return None
    fresh = [record.tokens for record in records if isinstance(record, Tokens)]
    return records[0], b"".join([records[0].prompt, *fresh])


def is_open(path: Path) -> bool:
    """Whether its first record is readable by anyone: written for a tenant that had no key."""
    with open(path, "rb") as file:
        head = file.read(_HEADER.size + len(SEALED_MAGIC))
    return len(head) > _HEADER.size and not head.startswith(SEALED_MAGIC, _HEADER.size)


def write_sealed(path: Path, seal: Seal) -> bool:
    """Put a journal's records into a new file of its name, sealed, with the times of the old one. False: it is damaged, and stays as it is.

    Raises OSError
    """
    data, times, draft = path.read_bytes(), path.stat(), path.with_name(path.name + DRAFT)
    records, closed = list(read_records(data)), data.endswith(CLOSED)
    if closed and (not records or records[-1][1] != len(data) - len(CLOSED)):
        return False
    frames = b"".join(encode(record, seal) for record, _ in records)
    with open(draft, "wb", opener=_private) as file:
        file.write(frames + (CLOSED if closed else b""))
        file.flush()
        os.fsync(file.fileno())
    os.utime(draft, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.rename(draft, path)
    return True


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _copy(source: int, target: int, size: int) -> None:
    """The first `size` bytes of one file into another. Raises OSError (fewer are there, or no room)."""
    at = 0
    while at < size:
        data = os.pread(source, min(1 << 20, size - at), at)
        if not data:
            raise OSError(errno.EIO, "it was cut short")
        at += os.pwrite(target, data, at)


def is_closed(path: Path) -> bool:
    """True if the journal is finished, from its last 16 bytes."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(CLOSED)))
        return file.read() == CLOSED
