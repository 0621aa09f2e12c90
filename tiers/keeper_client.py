"""Asking the keeper: JSON lines on its unix socket, one connection a request, every wait with a deadline.

For the engine and the host agent (plain functions) and for event loops (`a...` functions).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from typing import Any

from tiers.errors import KeeperAway, StoreFailed, TierError

Answer = dict[str, Any]
ANSWER_LIMIT_BYTES = 8 << 20


def drain(path: str | os.PathLike[str], *, sync: bool = False, timeout_s: float = 10.0) -> dict[str, int]:
    """Wait until everything committed so far in the lanes is in the store, with `sync` on the disk. Returns lanes' tails.

    Raises KeeperAway (not there, or not within timeout_s), StoreFailed (disk or map full; the lanes keep it)
    """
    return _ask(path, {"op": "drain", "sync": sync}, timeout_s)["durable"]


def stats(path: str | os.PathLike[str], *, timeout_s: float = 5.0) -> Answer:
    """The keeper's counters and lags. Raises KeeperAway."""
    return _ask(path, {"op": "stats"}, timeout_s)["stats"]


def forget(
    path: str | os.PathLike[str],
    root: bytes,
    namespace: str,
    tokens: list[int],
    *,
    session: str = "",
    keep_tokens: int = 0,
    timeout_s: float = 30.0,
) -> dict[str, int]:
    """Delete a list's stored state behind `keep_tokens` where nothing else shares it. Returns counts. Raises KeeperAway, StoreFailed."""
    return _ask(path, _forget_request(root, namespace, tokens, session, keep_tokens), timeout_s)["deleted"]


def import_slice(
    path: str | os.PathLike[str],
    file: str,
    session: str,
    namespace: str,
    offset: int,
    index: int,
    *,
    timeout_s: float = 60.0,
) -> Answer:
    """Have the keeper put the next state of an exported file into the store; a `tiers.export.Slice`. Raises KeeperAway, StoreFailed."""
    request = {
        "op": "import",
        "path": file,
        "session": session,
        "namespace": namespace,
        "offset": offset,
        "index": index,
    }
    return _ask(path, request, timeout_s)["imported"]


def repair(path: str | os.PathLike[str], damaged: list[tuple[str, bytes]], *, timeout_s: float = 300.0) -> Answer:
    """Have the keeper drop damaged values, given as (kind, key); `tiers.repair.Repaired` as a dict. Raises KeeperAway, StoreFailed."""
    return _ask(path, {"op": "repair", "damaged": [(kind, key.hex()) for kind, key in damaged]}, timeout_s)["repaired"]


async def adrain(path: str | os.PathLike[str], *, sync: bool = False, timeout_s: float = 10.0) -> dict[str, int]:
    """`drain` for an event loop."""
    return (await _aask(path, {"op": "drain", "sync": sync}, timeout_s))["durable"]


async def astats(path: str | os.PathLike[str], *, timeout_s: float = 5.0) -> Answer:
    """`stats` for an event loop."""
    return (await _aask(path, {"op": "stats"}, timeout_s))["stats"]


async def apositions(
    path: str | os.PathLike[str], sequences: list[str], *, timeout_s: float = 5.0
) -> dict[str, tuple[int, int]]:
    """(committed, on disk) positions of sequences, by their ids in hex; unknown ones are left out. Raises KeeperAway, StoreFailed."""
    return (await _aask(path, {"op": "positions", "sequences": sequences}, timeout_s))["positions"]


async def aforget(
    path: str | os.PathLike[str],
    root: bytes,
    namespace: str,
    tokens: list[int],
    *,
    session: str = "",
    keep_tokens: int = 0,
    timeout_s: float = 30.0,
) -> dict[str, int]:
    """`forget` for an event loop."""
    return (await _aask(path, _forget_request(root, namespace, tokens, session, keep_tokens), timeout_s))["deleted"]


def _forget_request(root: bytes, namespace: str, tokens: list[int], session: str, keep_tokens: int) -> dict[str, Any]:
    return {
        "op": "forget", "root": root.hex(), "namespace": namespace, "tokens": list(tokens), "session": session,
        "keep_tokens": keep_tokens,
    }  # fmt: skip


def _ask(path: str | os.PathLike[str], request: dict[str, Any], timeout_s: float) -> Answer:
    deadline = time.monotonic() + timeout_s
    received = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(os.fspath(path))
            connection.sendall(json.dumps(request).encode() + b"\n")
            while not received.endswith(b"\n"):
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                data = connection.recv(1 << 16)
                if not data:
                    break
                received += data
    except OSError as error:
        raise KeeperAway("the keeper doesn't answer", where=str(path), cause=str(error)) from error
    return _checked(bytes(received), str(path))


async def _aask(path: str | os.PathLike[str], request: dict[str, Any], timeout_s: float) -> Answer:
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(os.fspath(path), limit=ANSWER_LIMIT_BYTES)
            try:
                writer.write(json.dumps(request).encode() + b"\n")
                received = await reader.readline()
            finally:
                writer.close()
    except OSError as error:  # TimeoutError is one
        raise KeeperAway("the keeper doesn't answer", where=str(path), cause=str(error) or "timeout") from error
    return _checked(received, str(path))


def _checked(received: bytes, where: str) -> Answer:
    if not received.endswith(b"\n"):
        raise KeeperAway("the keeper went away in mid-answer", where=where)
    answer: Answer = json.loads(received)
    if answer.get("ok"):
        return answer
    error = StoreFailed if answer.get("retry") else TierError
    raise error("the keeper could not do it", where=where, cause=str(answer.get("error", "")))
