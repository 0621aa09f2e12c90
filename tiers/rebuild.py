"""A damaged base made again: from its own bytes as far as they say anything, the store's chains, or a token list that somebody kept.

A base only names what is stored, so while its blocks and tail pieces are intact nothing of the session is lost. By the keeper, in the
background and for `concordia repair`; what can't be made again stays as it is until a list comes. Source: docs/log-format.md, "Base"
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import structlog

from tiers.base import Base, SessionKey, body_of, session_key
from tiers.compaction import points_on
from tiers.errors import BadBlock
from tiers.export import find_under
from tiers.group import Group
from tiers.keys import Locked
from tiers.layout import BlockId, RootId, SequenceId, chain_root
from tiers.repair import keep_aside
from tiers.thinning import kept_points
from tiers.view import View

log = structlog.get_logger()

YEAR_3000_MS = 32_503_680_000_000


class TokenList(NamedTuple):
    """What somebody knows of a session that may have lost its base. tokens: packed int32."""

    namespace: str
    session: str
    tokens: bytes
    used_ms: int = 0


def to_wire(lists: Iterable[TokenList]) -> list[dict[str, Any]]:
    """As a request of the keeper's control socket holds them."""
    return [{**one._asdict(), "tokens": base64.b64encode(one.tokens).decode()} for one in lists]


def from_wire(rows: Iterable[dict[str, Any]]) -> list[TokenList]:
    """What `to_wire` made. Raises KeyError, ValueError, TypeError."""
    return [TokenList(**{**row, "tokens": base64.b64decode(row["tokens"])}) for row in rows]


class _Way(NamedTuple):
    """A stored chain: its root, the ids of its blocks and their packed tokens."""

    root: RootId
    namespace: str
    blocks: list[BlockId]
    tokens: bytes


def mend_base(group: Group, key: SessionKey, aside: Path, lists: Iterable[TokenList] = ()) -> Base | None:
    """Make a damaged base again and put it in its place; its damaged bytes are kept aside. None: it can't be, or needn't be.

    Raises Locked (its key isn't there: it may well be whole)
    """
    try:
        group.base(key)
        return None
    except Locked:
        raise
    except BadBlock as error:
        reason = str(error)
    made = rebuilt_base(group, key, lists)
    if made is None:
        log.warning("base.damaged", key=key.hex(), error=reason)
        return None
    raw = group.raw("bases", key)
    if raw is not None:
        keep_aside(aside, f"base-{key.hex()}", bytes(raw))
    group.put_base(key, made)
    log.warning("base.rebuilt", session=made.session, stream=made.stream, position=made.position, error=reason)
    return made


def rebuilt_base(view: View, key: SessionKey, lists: Iterable[TokenList] = ()) -> Base | None:
    """The base that stood under `key`, as far as that can be known. Every name in it is of something that is stored and whole."""
    known = next((one for one in lists if session_key(one.namespace, one.session) == key), None)
    said = _said(view, key)
    if said is not None and session_key(said.namespace, said.session, said.stream) != key:
        if known is None:
            return None  # whose it is can't be known
        said = msgspec.structs.replace(said, namespace=known.namespace, session=known.session)
    if said is not None:
        way = _way(view, said.namespace, said.tokens, said.block_ids)
        if known is not None:
            way = max(_way(view, known.namespace, known.tokens), way, key=_length)
        if way is not None:
            return _base(view, way, said, known)
    elif known is not None:
        way = _way(view, known.namespace, known.tokens)
        if way is not None:
            return _base(view, way, None, known)
    return None


def _said(view: View, key: SessionKey) -> Base | None:
    """What the damaged bytes say; None if that can't be read at all, or they are sealed."""
    raw = view.raw("bases", key)
    try:
        return body_of(view.keys.open("bases", key, raw)) if raw is not None else None
    except BadBlock:
        return None


def _length(way: _Way | None) -> int:
    return len(way.tokens) if way is not None else -1


def _way(view: View, namespace: str, tokens: bytes, ids: Iterable[BlockId] = ()) -> _Way | None:
    """The longest stored chain that begins as the tokens do, or that ends with one of the ids."""
    numbers = np.frombuffer(tokens[: len(tokens) & ~3], "<i4")
    found = [find_under(view, RootId(bytes(key)), namespace, numbers) for key, _ in view.scan("roots")]
    ends = [(one.root, one.chain[-1]) for one in found if one is not None and (one.block_count or one.tail_keys)]
    top = _last_named(view, namespace, ids)
    ways = [_chain(view, root, namespace, last) for root, last in [*ends, *([top] if top else [])]]
    return max(ways, key=_length, default=None)


def _last_named(view: View, namespace: str, ids: Iterable[BlockId]) -> tuple[RootId, BlockId] | None:
    """The stored block of this tenant among `ids` that ends last, and its root."""
    best: tuple[int, RootId, BlockId] | None = None
    for block in ids:
        node = view.node(block)
        tenant = view.tenant(node.tenant) if node is not None else None
        if node is None or tenant is None or tenant.namespace != namespace:
            continue
        if best is None or node.token_end > best[0]:
            best = node.token_end, RootId(tenant.root), block
    return best[1:] if best is not None else None


def _chain(view: View, root: RootId, namespace: str, last: BlockId) -> _Way | None:
    chain = view.chain(root, namespace, last)
    return _Way(root, namespace, *chain) if chain is not None else None


def _base(view: View, way: _Way, said: Base | None, known: TokenList | None) -> Base | None:
    """The base of a chain, with the tail pieces and the rollback points that are stored on it."""
    info = view.root(way.root)
    if info is None:
        return None
    last = way.blocks[-1] if way.blocks else chain_root(way.root, way.namespace)
    rest = [tokens[len(way.tokens) :] for tokens in _lists(said, known) if tokens.startswith(way.tokens)]
    sequence, tail = _tail(view, last, len(way.tokens) // 4, SequenceId(said.tail) if said else SequenceId(b""), rest)
    tokens = way.tokens + tail
    found = points_on(view, way.root, way.namespace, way.blocks, tokens, info.block_tokens)
    kept = kept_points(((position, kind) for position, kind, _ in found), len(tokens) // 4)
    used_ms = max(known.used_ms if known else 0, said.used_ms if said and said.used_ms < YEAR_3000_MS else 0)
    return Base(
        namespace=way.namespace,
        session=said.session if said else known.session if known else "",
        stream=said.stream if said else "",
        root=way.root,
        block_tokens=info.block_tokens,
        epoch=said.epoch if said else 0,
        tokens=tokens,
        blocks=b"".join(way.blocks),
        tail=sequence if tail else b"",
        points=[(position, kind, point) for position, kind, point in found if position in kept],
        used_ms=used_ms,
    )


def _lists(said: Base | None, known: TokenList | None) -> list[bytes]:
    return [*([said.tokens] if said else []), *([known.tokens] if known else [])]


def _tail(view: View, last: BlockId, start: int, sequence: SequenceId, rests: list[bytes]) -> tuple[SequenceId, bytes]:
    """Tail pieces after the last block: those of the sequence that was named, else those that go on as a token list does."""
    best: tuple[SequenceId, bytes] = (SequenceId(b""), b"")
    for name in sorted({piece.sequence for piece in view.tails(last)}):
        tokens = _whole_pieces(view, last, name, start)
        if name == sequence:
            return name, tokens
        if any(rest.startswith(tokens) for rest in rests) and len(tokens) > len(best[1]):
            best = name, tokens
    return best


def _whole_pieces(view: View, last: BlockId, sequence: SequenceId, start: int) -> bytes:
    tokens = b""
    for piece in view.tails(last, sequence):
        if piece.token_start != start + len(tokens) // 4:
            break
        try:
            tokens += view.tail(piece.key).tokens
        except BadBlock:
            break
    return tokens


def mend_all(
    store: Any, aside: Path, keys: Iterable[SessionKey], lists: Iterable[TokenList] = ()
) -> tuple[list[Base], list[SessionKey]]:
    """Mend each of these that is damaged, a transaction each. Returns what was made again, and the keys that stay damaged."""
    made, left = [], []
    lists = list(lists)
    for key in keys:
        with store.group(freeing=True) as group:  # what it puts takes the place of what it drops
            try:
                base = mend_base(group, key, aside, lists)
                if base is not None:
                    made.append(base)
                elif _is_damaged(group, key):
                    left.append(key)
            except Locked:
                continue
    return made, left


def _is_damaged(view: View, key: SessionKey) -> bool:
    try:
        view.base(key)
    except Locked:
        return False
    except BadBlock:
        return True
    return False
