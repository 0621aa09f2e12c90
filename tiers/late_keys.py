"""What was stored before its tenant had a key: marked when the store is opened, then sealed. Stage *compact*; the keeper's thread.

The mark (`unsealed/` and the tenant's chain root, in `meta`) stays until all of the tenant is sealed. The pages that open values had are
free then, and hold them until they are used again: a second mark (`unscrubbed`) stays until the store has another file.
Values move under a checksum of their own, so a damaged one is still found to be damaged. Source: docs/log-format.md, "Encryption at rest"
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tiers.errors import BadBlock
from tiers.group import Group
from tiers.keys import SEALED_BYTES, Keyring, is_sealed
from tiers.usage import base_tenant, tail_tenant
from tiers.values import Tenant, decode_tenant, encode, frame_offset, unpack_node
from tiers.view import View

UNSEALED = b"unsealed/"  # + chain root of a tenant
UNSCRUBBED = b"unscrubbed"
CHECKED = b"late_keys"  # stores of versions that knew no marks were looked at
DATABASES = ("nodes", "points", "tails", "sequences", "bases")  # each leads to one kind of value

Tenants = dict[bytes, Tenant]  # by chain root


class OpenValue(NamedTuple):
    """A value that is to be sealed. database, key: what leads to it (a block's node, a point's entry), else its own."""

    database: str
    key: bytes
    namespace: str
    size: int


def mark(txn: Any, databases: dict[bytes, Any], keys: Keyring) -> None:
    """When a store is opened: note the tenants that have a key now and had none before. Writes nothing if there are none."""
    meta, tenants = databases[b"meta"], databases[b"tenants"]
    known = [(bytes(chain), _readable(raw)) for chain, raw in txn.cursor(tenants)]
    checked = txn.get(CHECKED, db=meta) is not None
    for chain, tenant in known:
        if tenant is not None and keys.has(tenant.namespace) and not (tenant.sealed and checked):
            txn.put(UNSEALED + chain, b"", db=meta)
            txn.put(chain, encode(Tenant(tenant.root, tenant.namespace, True)), db=tenants)
    if keys and not checked:
        txn.put(CHECKED, b"1", db=meta)


def _readable(raw: Any) -> Tenant | None:
    try:
        return decode_tenant(raw)
    except BadBlock:
        return None  # `verify` names it, `repair` drops it, the tenant's next sequence writes it anew


def marked(view: View) -> Tenants:
    """Tenants of which values may be stored openly, though their keys are given."""
    found = {}
    for key, _ in view.scan_raw("meta", UNSEALED):
        if not key.startswith(UNSEALED):
            break
        tenant = view.tenant(key[len(UNSEALED) :])
        if tenant is not None and view.keys.has(tenant.namespace):
            found[key[len(UNSEALED) :]] = tenant
    return found


def is_unscrubbed(view: View) -> bool:
    """Whether free pages of the file may hold what was stored openly."""
    return view.raw("meta", UNSCRUBBED) is not None


def open_values(
    view: View, tenants: Tenants, database: str, after: bytes = b"", limit: int = 1 << 30
) -> Iterator[OpenValue]:
    """Open values of these tenants that a database leads to; of its first `limit` records after the key `after`. Touches no frame."""
    names = {tenant.namespace for tenant in tenants.values()}
    for key, raw in view.scan_raw(database, after, limit):
        try:
            found = _open_value(view, tenants, names, database, key, raw)
        except BadBlock:
            continue  # `verify` names it, `repair` drops it
        if found is not None:
            yield found


def _open_value(
    view: View, tenants: Tenants, names: set[str], database: str, key: bytes, raw: Any
) -> OpenValue | None:  # fmt: skip
    if database == "nodes":
        node = unpack_node(raw)
        tenant = tenants.get(node.tenant)
        if tenant is None or _is_sealed_size(view, tenant, node.groups, node.value_bytes):
            return None
        return OpenValue(database, key, tenant.namespace, node.value_bytes)
    if database == "points":
        entry = view.decode_point(raw)
        tenant = tenants.get(entry.tenant)
        info = view.root(tenant.root) if tenant is not None else None
        size = frame_offset(int.from_bytes(key[16:20], "big")) + info.state_bytes if info is not None else 0
        if tenant is None or entry.value_bytes == size + SEALED_BYTES:
            return None
        return OpenValue(database, key, tenant.namespace, entry.value_bytes)
    if is_sealed(raw):
        return None
    if database == "tails":
        tenant = tenants.get(tail_tenant(view, key))
        return OpenValue(database, key, tenant.namespace, len(raw)) if tenant is not None else None
    namespace = view.decode_progress(raw).namespace if database == "sequences" else _base_namespace(view, key)
    return OpenValue(database, key, namespace, len(raw)) if namespace in names else None


def _is_sealed_size(view: View, tenant: Tenant, groups: int, size: int) -> bool:
    """Whether a block's value has the size of a sealed one: an open one has 44 bytes less, so none need be touched to tell."""
    info = view.root(tenant.root)
    if info is None:
        return True  # nobody can read it either
    return size == frame_offset(info.block_tokens) + info.shape.frame_bytes(info.block_tokens, groups) + SEALED_BYTES


def _base_namespace(view: View, key: bytes) -> str:
    base = view.base(key)  # type: ignore[arg-type]
    return base.namespace if base is not None else ""


def count_open(view: View) -> int:
    """Values that are stored openly though their tenant's key is given."""
    tenants = marked(view)
    if not tenants:
        return 0
    return sum(1 for database in DATABASES for _ in open_values(view, tenants, database))


def seal(group: Group, value: OpenValue) -> int:
    """Write one value again, sealed; returns the bytes written. Nothing if it is gone, or sealed meanwhile."""
    before = group.put_bytes
    if value.database == "nodes":
        group.seal_block(value.key, value.namespace)  # type: ignore[arg-type]
    elif value.database == "points":
        group.seal_point(value.key, value.namespace)
    else:
        tenant = b""
        if value.database == "tails":
            tenant = tail_tenant(group, value.key)
        elif value.database == "bases":
            tenant = base_tenant(group, value.key)  # type: ignore[arg-type]
        group.seal_value(value.database, value.key, value.namespace, tenant)
    if group.put_bytes > before:
        group.put_meta(UNSCRUBBED, b"1")
    return group.put_bytes - before


def unmark(group: Group, tenants: Tenants) -> None:
    """Nothing of these tenants is stored openly any more."""
    for chain in tenants:
        group.delete_raw("meta", UNSEALED + chain)
