"""Whose request it is, and what a session of a tenant is called below the gateway. Stage: admit; pure.

A tenant is a namespace. Its key, `[tenants.NAME] api_key`, makes a request its own; the operator's key, or none where no key is set,
stands for the namespace `default`. Sessions of a tenant other than `default` are called TENANT~NAME wherever no tenant is told beside
them (records, engines, logs, commands). A name that a client chooses has no `~`, so two tenants' names can't meet.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.errors import bad_request
from gateway.openai_schema import check_session_id
from gateway.settings import TenantAccess

DEFAULT = "default"
SCOPE = "~"
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")  # of those that have a key
TENANT_BYTES = 256  # with a session's name still a key that LMDB takes
_SCOPED = re.compile(r"[^~/\x00-\x1f\x7f]{1,128}")  # of those that an import or the engine protocol may have named


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. operator: also sees and ends what belongs to others, by whole names."""

    namespace: str = DEFAULT
    operator: bool = True

    def owns(self, namespace: str) -> bool:
        """What belongs to `namespace` may be shown to it."""
        return self.operator or self.namespace == namespace

    def lists(self, namespace: str, everything: bool) -> bool:
        """What belongs to `namespace` is in its lists: its own, or everything that it may see."""
        return self.owns(namespace) if everything else self.namespace == namespace

    def session(self, text: str) -> str:
        """The whole name of a session that it names in a path. Raises ApiError."""
        if not self.operator:
            return whole_name(self.namespace, check_session_id(text))
        tenant, scope, own = text.rpartition(SCOPE)
        if scope and (not _SCOPED.fullmatch(tenant) or len(tenant.encode()) > TENANT_BYTES):
            raise bad_request("session_id: expected NAME or, with the operator's key, TENANT~NAME", "session_id")
        return whole_name(tenant, check_session_id(own)) if scope else check_session_id(own)

    def shown(self, session: str) -> str:
        """A session's name as it is told to this caller."""
        return session if self.operator else own_name(session)


OPERATOR = Caller()


class Keys:
    """The keys that requests may carry, compared in constant time."""

    def __init__(self, operator: str, tenants: Mapping[str, TenantAccess]) -> None:
        callers = [(operator, OPERATOR), *((row.api_key, Caller(name, False)) for name, row in tenants.items())]
        self._callers = [(_digest(key.encode()), caller) for key, caller in callers if key]

    def __bool__(self) -> bool:
        return bool(self._callers)

    def caller(self, authorization: str) -> Caller | None:
        """Who sends this header; None if nobody does who is known. Without any key everybody is the operator."""
        if not self._callers:
            return OPERATOR
        scheme, _, given = authorization.partition(" ")
        digest = _digest(given.strip().encode(errors="surrogateescape"))
        found = None
        for known, caller in self._callers:  # all of them, whichever it is
            if hmac.compare_digest(digest, known):
                found = caller
        return found if scheme.lower() == "bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def whole_name(namespace: str, session: str) -> str:
    """What a tenant's session is called below the gateway; "" for none."""
    return session if namespace in ("", DEFAULT) or not session else f"{namespace}{SCOPE}{session}"


def own_name(session: str) -> str:
    """What its tenant calls it."""
    return session.rpartition(SCOPE)[2]


def named(session: str, namespace: str = "", otherwise: str = DEFAULT) -> tuple[str, str]:
    """(whole name, namespace) of a session as a command names it: by its whole name, or its own beside a namespace."""
    namespace = namespace or session.rpartition(SCOPE)[0] or otherwise
    return whole_name(namespace, own_name(session)), namespace
