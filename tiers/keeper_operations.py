"""What is done to stored sessions on request, between two drains: list, pin, forget, remove, import, repair.

The keeper's thread, or a command's while no keeper runs (`tiers/offline.py`).

Source: docs/log-format.md
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog

from tiers.base import Base, SessionKey, session_key
from tiers.compaction import key_of, make_base, sequences_of, session_uses
from tiers.drain import Drain
from tiers.errors import BadBlock
from tiers.export import find_under, import_slice
from tiers.export_seal import ExportKeys
from tiers.group import Group
from tiers.keys import Locked
from tiers.layout import BlockId, RootId, SequenceId, block_chain, point_id
from tiers.rebuild import TokenList
from tiers.repair import ASIDE, Damaged, repair_store
from tiers.values import Pin, TailPiece
from tiers.view import View

log = structlog.get_logger()


class Operations:
    """On the store of a drain, whose lanes are emptied first where something is deleted or repaired."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain

    def forget(
        self, root: RootId, namespace: str, tokens: np.ndarray, session: str = "", keep_tokens: int = 0
    ) -> dict[str, int]:
        """Delete a token list's state, from its end up to the first block that something else needs as well.

        keep_tokens  of the list's beginning: what a fork that has computed nothing yet begins with
        """
        self._drain.settle()
        store = self._drain.store()
        blocks = tails = points = 0
        with store.group(freeing=True) as group:
            info = group.root(root)
            sequences = _delete_session(group, namespace, session) if session else 0
            ends, needed = _needed(group, live_only=not session)
            if info is not None:
                chain = block_chain(root, namespace, tokens, info.block_tokens)
                packed = np.ascontiguousarray(tokens, "<i4").tobytes()
                size = 4 * info.block_tokens
                for at in range(len(chain) - 1, -1, -1):
                    start = at * info.block_tokens
                    if start >= keep_tokens:
                        rest = packed[at * size :]
                        goes_on = chain[at] in ends or start == keep_tokens > 0 or bool(group.children(chain[at], 1))
                        block = group.best_child(chain[at], rest)
                        shared = block[1] if block is not None else 0 if goes_on else -1
                        shared = max(_shared(group, chain[at], rest, needed), shared)
                        points += _delete_points(group, chain[at], rest, shared)
                        tails += _delete_tails(group, chain[at], rest, needed)
                    is_kept = at == 0 or (at - 1) * info.block_tokens < keep_tokens or chain[at] in ends
                    if is_kept or self._in_use(group, chain[at]):
                        break
                    if group.node(chain[at]) is not None:
                        group.delete_block(chain[at - 1], packed[(at - 1) * size : at * size], chain[at])
                        blocks += 1
        self._drain.forget_tracks()
        self._drain.note_loss()
        self._drain.owe_sync()
        log.info("drain.forgot", blocks=blocks, tails=tails, points=points, sequences=sequences)
        return {"blocks": blocks, "tails": tails, "points": points, "sequences": sequences}

    def import_slice(self, request: dict[str, Any]) -> dict[str, Any]:
        """One group commit of an exported file on this machine: {path, session, namespace, offset, index, key}.

        Raises BadFile, LockedFile, StoreFailed
        """
        key = bytes.fromhex(request["key"]) if request.get("key") else None
        with self._drain.store().group() as group:
            done = import_slice(
                group, Path(request["path"]), session=request["session"], namespace=request["namespace"],
                offset=request.get("offset", 0), index=request.get("index", 0), named=self._drain.named,
                keys=ExportKeys(key=key),
            )  # fmt: skip
        self._drain.owe_sync()
        if done.done:
            self._drain.sync()
            log.info("drain.imported", session=request["session"], path=request["path"])
        return {"imported": msgspec.to_builtins(done)}

    def mend(self, bases: Iterable[SessionKey], lists: Iterable[TokenList] = ()) -> dict[str, Any]:
        """Make damaged bases again; `left` are those that can't be. Raises StoreFailed."""
        left = self._drain.mend_bases(bases, lists)
        return {"left": [key.hex() for key in left]}

    def stored(self, lists: Iterable[TokenList]) -> dict[str, Any]:
        """How much of each token list has its state in the store, under whichever fingerprint has most. Raises StoreFailed."""
        with self._drain.store().snapshot() as view:
            return {"stored": [stored_of(view, one) for one in lists]}

    def repair(self, damaged: list[tuple[str, bytes]], lists: Iterable[TokenList] = ()) -> dict[str, Any]:
        """Drop what is damaged and end what leans on it, in one group commit; bases are made again as far as they can be.

        lists  what is known of sessions whose base may be damaged
        Raises StoreFailed
        """
        lanes = self._drain.mend_lanes(set_aside=True)
        self._drain.settle()
        bases = {SessionKey(key) for kind, key in damaged if kind == "base"}
        rebuilt = bases - set(self._drain.mend_bases(bases, lists))
        live = frozenset(sequence for sequence, track in self._drain.tracks.items() if not track.closed)
        with self._drain.store().group(freeing=True) as group:
            things = [Damaged(kind, key) for kind, key in damaged]
            done = repair_store(group, things, self._drain.paths.store / ASIDE, live=live)
            done.rebuilt, done.lanes = [key.hex() for key in sorted(rebuilt)], lanes
            for key in rebuilt:
                base = group.base(key)
                if base is not None:
                    done.kept_aside.append(str(self._drain.paths.store / ASIDE / f"base-{key.hex()}.broken"))
        self._drain.forget_tracks()
        self._drain.note_loss()
        self._drain.sync()
        log.warning("drain.repaired", dropped=done.dropped, kept_aside=len(done.kept_aside))
        return {"repaired": asdict(done) | {"recompute": [part._asdict() for part in done.recompute]}}

    def _in_use(self, group: Group, block: BlockId) -> bool:
        return bool(group.children(block, 1) or group.tails(block, limit=1) or group.points(block))

    def tenants(self) -> dict[str, dict[str, Any]]:
        """By namespace: what it has on the disk, {kind: [count, bytes]}, in the lanes, and its limits. Raises StoreFailed."""
        store, settings = self._drain.store(), self._drain.settings
        usage = store.usage()
        with store.snapshot() as view:
            names = {chain: tenant.namespace for chain, tenant in view.tenants()}
            in_lanes = self._drain.lane_bytes(view)
        found: dict[str, dict[str, Any]] = {
            name: {
                "bytes": 0,
                "limit": settings.tenant_limit(name, "disk"),
                "lane_bytes": in_lanes[name],
                "lane_limit": settings.tenant_limit(name, "lane"),
                "memory_limit": settings.tenant_limit(name, "memory"),
            }
            for name in sorted({*names.values(), *in_lanes, *settings.tenants})
        }
        for (chain, kind), (count, size) in usage.items():
            kinds = found.setdefault(names.get(chain, ""), {"bytes": 0, "limit": 0})
            entry = kinds.setdefault(kind, [0, 0])
            entry[0] += count
            entry[1] += size
            kinds["bytes"] += size
        return found

    def sessions(self, namespace: str | None = None, session: str | None = None) -> list[dict[str, Any]]:
        """Every stored session (or those that match): how far it is and what it takes. Raises StoreFailed."""
        found: dict[SessionKey, dict[str, Any]] = {}
        with self._drain.store().snapshot() as view:
            stored = sequences_of(view, self._drain.now())
            for use in session_uses(view, self._drain.now()):
                if namespace in (None, use.namespace) and session in (None, use.session):
                    base = _readable_base(view, use.key)
                    found[use.key] = {
                        "namespace": use.namespace, "session": use.session, "stream": use.stream,
                        "root": base.root.hex() if base else "", "stored": base.position if base else 0,
                        "captured": base.position if base else 0, "points": len(base.points) if base else 0,
                        "bytes": use.bytes, "used_ms": use.used_ms, "live": use.live, "pinned": use.pinned,
                        "compacted": base is not None, "sequences": 0, "epoch": base.epoch if base else 0,
                    }  # fmt: skip
        for one in stored:
            entry = found.get(key_of(one.progress))
            if entry is not None:
                track = self._drain.tracks.get(one.id)
                entry["sequences"] += 1
                entry["root"] = one.progress.root.hex()
                entry["stored"] = max(entry["stored"], one.progress.position)
                entry["captured"] = max(entry["captured"], track.position if track else one.progress.position)
                entry["epoch"] = max(entry["epoch"], one.progress.epoch)
        return sorted(found.values(), key=lambda entry: -entry["used_ms"])

    def pin(self, namespace: str, session: str, pinned: bool) -> None:
        """Never evict a session, or let it be evicted again. It need not be stored yet. Raises StoreFailed."""
        key = session_key(namespace, session)
        with self._drain.store().group(freeing=True) as group:
            if pinned:
                group.put_pin(key, Pin(namespace, session))
            else:
                group.delete_pin(key)
        self._drain.owe_sync()

    def pins(self) -> list[tuple[str, str]]:
        """(namespace, session) of every pinned session. Raises StoreFailed."""
        with self._drain.store().snapshot() as view:
            return [(pin.namespace, pin.session) for pin in view.pins().values()]

    def remove(self, namespace: str, session: str, *, force: bool, dry_run: bool) -> dict[str, int]:
        """Delete a session and what only it needs. Raises ValueError (it is live, and not `force`), StoreFailed."""
        self._drain.settle()
        key, lists = session_key(namespace, session), list[tuple[RootId, bytes]]()
        with self._drain.store().snapshot() as view:
            base = _readable_base(view, key)
            if base is not None:
                lists.append((RootId(base.root), base.tokens))
            for one in sequences_of(view, self._drain.now()):
                if key_of(one.progress) == key:
                    if one.live and not force:
                        raise ValueError(f"session {session} is live: end its streams first")
                    made = make_base(view, one.id, one.progress)
                    if made is not None:
                        lists.append((RootId(made.root), made.tokens))
        if dry_run:
            return {"token_lists": len(lists)}
        deleted: Counter[str] = Counter()
        for root, tokens in lists:
            deleted.update(self.forget(root, namespace, np.frombuffer(tokens, "<i4"), session))
        self.pin(namespace, session, False)
        return dict(deleted)

    def drop_locked(self) -> dict[str, int]:
        """Remove the names of what is sealed with keys that aren't there: the next collection frees the rest. Raises StoreFailed."""
        self._drain.settle()
        dropped: Counter[str] = Counter()
        with self._drain.store().group(freeing=True) as group:
            for key in [key for key, _ in group.scan_raw("sequences")]:
                if _is_locked(group, "sequences", key):
                    group.delete_sequence(SequenceId(key))
                    dropped["sequences"] += 1
            for key in [key for key, _ in group.scan_raw("bases")]:
                if _is_locked(group, "bases", key):
                    group.delete_base(SessionKey(key))
                    dropped["bases"] += 1
        self._drain.owe_sync()
        log.warning("drain.dropped_locked", **dropped)
        return dict(dropped)


def stored_of(view: View, one: TokenList) -> int:
    """Tokens of a list that can be restored, under whichever fingerprint has most."""
    roots = [RootId(bytes(key)) for key, _ in view.scan("roots")]
    return max((_stored_under(view, root, one) for root in roots), default=0)


def _stored_under(view: View, root: RootId, one: TokenList) -> int:
    """Tokens of a list that can be restored, those at the beginning of a block that goes on otherwise included."""
    view.keys.know(one.namespace)
    found = find_under(view, root, one.namespace, np.frombuffer(one.tokens, "<i4"))
    if found is None:
        return 0
    whole = found.block_count * found.info.block_tokens
    child = view.best_child(found.chain[-1], one.tokens[4 * whole : 4 * (whole + found.info.block_tokens)])
    return max(found.position, whole + child[1] if child else 0)


def _readable_base(view: View, key: SessionKey) -> Base | None:
    try:
        return view.base(key)
    except BadBlock:
        return None  # it is made again, or named by `verify`


def _tails_of(group: Group, parent: BlockId) -> dict[SequenceId, list[TailPiece]]:
    """Pieces of the unfinished blocks after `parent`, by sequence."""
    found: dict[SequenceId, list[TailPiece]] = {}
    for piece in group.tails(parent):
        found.setdefault(piece.sequence, []).append(piece)
    return found


def _shared(group: Group, parent: BlockId, rest: bytes, needed: set[SequenceId]) -> int:
    """With how many tokens of `rest` an unfinished block after `parent` begins that something else needs; -1: there is none."""
    tails = [pieces for sequence, pieces in _tails_of(group, parent).items() if sequence in needed]
    said = [b"".join(piece.tokens for piece in pieces) for pieces in tails]
    return max((len(os.path.commonprefix([rest, tokens])) // 4 for tokens in said), default=-1)


def _delete_tails(group: Group, parent: BlockId, rest: bytes, needed: set[SequenceId]) -> int:
    """Delete unfinished blocks after `parent` that say the same as `rest`, as far as both go, unless something else needs them."""
    deleted = 0
    for sequence, pieces in _tails_of(group, parent).items():
        tokens = b"".join(piece.tokens for piece in pieces)
        if sequence not in needed and (rest.startswith(tokens) or tokens.startswith(rest)):
            for piece in pieces:
                group.delete_tail(piece.key)
                deleted += 1
    return deleted


def _delete_points(group: Group, parent: BlockId, rest: bytes, shared: int) -> int:
    """Delete the rollback points in the block after `parent` that stand within `rest`, behind its first `shared` tokens."""
    deleted = 0
    for key, _ in group.points(parent):
        count = int.from_bytes(key[16:20], "big")
        if shared < count and 4 * count <= len(rest) and point_id(parent, rest[: 4 * count]) == key[20:]:
            group.delete_point(key)
            deleted += 1
    return deleted


def _is_locked(group: Group, database: str, key: bytes) -> bool:
    """Whether a value is sealed with a key that isn't there."""
    try:
        group.keys.open(database, key, group.raw(database, key))
    except Locked:
        return True
    except BadBlock:
        pass
    return False


def _needed(group: Group, *, live_only: bool) -> tuple[set[BlockId], set[SequenceId]]:
    """(Last whole blocks, owners of the tails behind them) of all sequences, or of those only that aren't closed, and of all bases."""
    ends, tails = set[BlockId](), set[SequenceId]()
    for key, raw in group.scan("sequences"):
        progress = group.decode_progress(raw)
        if not (live_only and progress.closed):
            ends.add(BlockId(progress.parent))
            tails.add(SequenceId(key))
    for key, _ in group.scan("bases"):
        try:
            base = group.base(SessionKey(key))
        except BadBlock:
            continue
        if base is not None and base.blocks:
            ends.add(BlockId(base.blocks[-16:]))
        if base is not None and base.tail:
            tails.add(SequenceId(base.tail))
    return ends, tails


def _delete_session(group: Group, namespace: str, session: str) -> int:
    """Delete the sequence records that name a session, and its base."""
    group.delete_base(session_key(namespace, session))
    found = []
    for key, raw in group.scan("sequences"):
        progress = group.decode_progress(raw)
        if progress.session == session and progress.namespace == namespace:
            found.append(SequenceId(key))
    for sequence in found:
        group.delete_sequence(sequence)
    return len(found)
