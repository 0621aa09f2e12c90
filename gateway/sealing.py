"""Encryption of what the gateway keeps on disk, stream journals and sessions, with the tenants' keys. Off unless a key is given.

A sealed value begins with the name of its namespace, which isn't hidden, so that a key made for it can be found; then comes a value as
the store seals it (`tiers/keys.py`). Source: docs/log-format.md, "Encryption at rest"
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from tiers.keys import Keyring, derived_key

MAGIC = b"CENN"  # no msgpack map and no token begins so
HEAD = struct.Struct("<4sH")  # magic, bytes of the namespace's name
NAME_PERSON = b"concordia-sname"

Seal = Callable[[bytes], bytes]


def as_it_is(value: bytes) -> bytes:
    """What nothing is sealed with."""
    return value


class Sealing:
    """The gateway's use of the tenants' keys."""

    def __init__(self, keys: Keyring | None = None) -> None:
        self.keys = keys or Keyring()

    def seal(self, namespace: str, kind: str, name: bytes, value: bytes) -> bytes:
        """A value as it is to be written: sealed if the namespace has a key. kind, name: what it is, sealed into it."""
        if not self.keys.has(namespace):
            return value
        space = namespace.encode()
        return HEAD.pack(MAGIC, len(space)) + space + bytes(self.keys.seal(namespace, kind, name, value))

    def open(self, kind: str, name: bytes, raw: bytes) -> bytes:
        """What was sealed; a value that isn't comes back as it is. Raises Locked (no key), BadBlock (changed)."""
        if raw[: len(MAGIC)] != MAGIC:
            return raw
        _, size = HEAD.unpack_from(raw)
        self.keys.know(raw[HEAD.size : HEAD.size + size].decode(errors="replace"))
        return bytes(self.keys.open(kind, name, raw[HEAD.size + size :]))

    def hidden(self, namespace: str, name: bytes) -> bytes:
        """A name as a key of a database: a keyed hash, if the namespace has a key."""
        if not self.keys.has(namespace):
            return name
        return b"\1" + derived_key(self.keys.key_of(namespace)[1], NAME_PERSON, name)

    def of_journal(self, namespace: str, stream: str) -> Seal:
        """Seals the records of one stream's journal."""
        return lambda body: self.seal(namespace, "journal", stream.encode(), body)

    def opens_journal(self, stream: str) -> Seal:
        """Opens them. Raises Locked, BadBlock."""
        return lambda body: self.open("journal", stream.encode(), body)
