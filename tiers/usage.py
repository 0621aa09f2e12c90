"""What is stored, counted by tenant and kind: measured at the first look, then kept up to date by each group commit."""

from __future__ import annotations

from tiers.base import SessionKey
from tiers.errors import BadBlock
from tiers.layout import BlockId, RootId, chain_root
from tiers.values import disk_bytes, unpack_node
from tiers.view import View


class Usage(dict[tuple[bytes, str], list[int]]):
    """[count, bytes on disk] by (tenant's chain root, kind): blocks, tails, points, bases."""

    def add(self, changes: dict[tuple[bytes, str], list[int]]) -> None:
        """Take in what a commit has changed."""
        for key, (count, size) in changes.items():
            entry = self.setdefault(key, [0, 0])
            entry[0] += count
            entry[1] += size

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.values())

    def tenant_bytes(self, chains: set[bytes]) -> int:
        """Bytes of all kinds under these chain roots."""
        return sum(size for (chain, _), (_, size) in self.items() if chain in chains)


def measure_usage(view: View) -> Usage:
    """Count all records of a snapshot, without touching a frame."""
    usage = Usage()

    def count(tenant: bytes, kind: str, size: int) -> None:
        usage.add({(bytes(tenant), kind): [1, disk_bytes(size)]})

    for _, raw in view.scan("nodes"):
        node = unpack_node(raw)
        count(node.tenant, "blocks", node.value_bytes)
    for _, raw in view.scan("points"):
        entry = view.decode_point(raw)
        count(entry.tenant, "points", entry.value_bytes)
    for key, raw in view.scan("tails"):
        count(tail_tenant(view, key), "tails", len(raw))
    for key, raw in view.scan_raw("bases"):
        count(base_tenant(view, SessionKey(key)), "bases", len(raw))
    return usage


def base_tenant(view: View, key: SessionKey) -> bytes:
    """Chain root of whose base `key` is; empty if the base can't be read."""
    try:
        base = view.base(key)
    except BadBlock:
        return b""
    return chain_root(RootId(base.root), base.namespace) if base is not None else b""


def tail_tenant(view: View, key: bytes) -> bytes:
    """Chain root of whose tail piece `key` is."""
    node = view.node(BlockId(key[:16]))
    return node.tenant if node is not None else key[:16]
