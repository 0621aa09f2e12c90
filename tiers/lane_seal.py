"""Sealing what is written to a lane, for tenants that have a key: AES-256-GCM, a key and a nonce that no other record has. Stage *append*.

A lane in shared memory is as private as its machine's memory; one on a disk, a DAX file system or a device outlives it. So payloads
of tenants with a key are sealed there. A sealed payload has a small part (token ids, a point's kind, an OPEN record's body) and a large
one (the frame, the state), which are opened apart: indexing a lane needs the small ones only. Source: docs/log-format.md, "Sealed payloads"
"""

from __future__ import annotations

import os
import struct
from typing import Any, NamedTuple

import numpy as np

from tiers.errors import BadRecord
from tiers.keys import Keyring, Locked, derived_key

MAGIC = b"CLNC"
VERSION = 1
# magic, version, bytes of the namespace's name, id of the tenant's key, salt of the writer, number of the sealing
HEAD = struct.Struct("<4sHH8s16sQ")
NONCE = struct.Struct("<QI")
# of the record: type, epoch, sequence, token_start, token_end
WHERE = struct.Struct("<HQ16sII")
TAG_BYTES = 16
ALIGN = 64
SALT_BYTES = 16


class Where(NamedTuple):
    """The record that a payload belongs to: sealed into it, so that no payload can be put under another record."""

    type: int
    epoch: int
    sequence: bytes
    token_start: int
    token_end: int

    @property
    def data(self) -> bytes:
        return WHERE.pack(*self)


class Shape(NamedTuple):
    """Where the parts of a sealed payload lie. large_start: -1 if it has no large part."""

    small_start: int
    small_bytes: int
    large_start: int
    large_bytes: int

    @classmethod
    def of(cls, name_bytes: int, small_bytes: int, large_bytes: int | None) -> Shape:
        start = HEAD.size + name_bytes
        if large_bytes is None:
            return cls(start, small_bytes, -1, 0)
        return cls(start, small_bytes, (start + small_bytes + TAG_BYTES + ALIGN - 1) & -ALIGN, large_bytes)

    @property
    def payload_bytes(self) -> int:
        if self.large_start < 0:
            return self.small_start + self.small_bytes + TAG_BYTES
        return self.large_start + self.large_bytes + TAG_BYTES


class LaneSealer:
    """Seals payloads for one writer of one lane. The salt is drawn when it is opened, so that numbers may begin anew at 0."""

    def __init__(self, keys: Keyring) -> None:
        self._keys = keys
        self._salt = os.urandom(SALT_BYTES)
        self._count = 0
        self._ciphers: dict[bytes, Any] = {}

    def seals(self, namespace: str) -> bool:
        """Whether what is written for a namespace is sealed."""
        return self._keys.has(namespace)

    def seal(
        self, payload: np.ndarray, shape: Shape, namespace: str, where: Where, small: Any, large: Any = None, name: bytes = b""
    ) -> None:  # fmt: skip
        """Fill `payload` (uint8, shape.payload_bytes long) with the sealed parts.

        name  the namespace's name, written openly: of OPEN records, so that a key made for it can be found
        """
        key_id, key = self._keys.key_of(namespace)
        cipher = _cipher(self._ciphers, key_id, key, self._salt)
        number, self._count = self._count, self._count + 1
        HEAD.pack_into(payload.data, 0, MAGIC, VERSION, len(name), key_id, self._salt, number)
        payload[HEAD.size : shape.small_start] = np.frombuffer(name, np.uint8)
        data = where.data + name
        end = shape.small_start + shape.small_bytes + TAG_BYTES
        cipher.encrypt_into(NONCE.pack(number, 0), small, data, payload[shape.small_start : end])
        if shape.large_start >= 0:
            payload[end : shape.large_start] = 0
            cipher.encrypt_into(NONCE.pack(number, 1), large, data, payload[shape.large_start :])


class LaneOpener:
    """Opens what `LaneSealer` made. One a reader; not thread-safe."""

    def __init__(self, keys: Keyring) -> None:
        self.keys = keys
        self._ciphers: dict[bytes, Any] = {}

    def small(self, payload: np.ndarray, where: Where, small_bytes: int | None, record: str) -> bytes:
        """The small part; `small_bytes` None: all that there is. Raises BadRecord (changed), LockedRecord (its key isn't there)."""
        number, name, cipher = self._head(payload, record)
        start = HEAD.size + len(name)
        size = payload.size - start - TAG_BYTES if small_bytes is None else small_bytes
        if size < 0 or start + size + TAG_BYTES > payload.size:
            raise BadRecord("a sealed payload is cut short", where=record)
        out = np.empty(size, np.uint8)
        sealed = payload[start : start + size + TAG_BYTES]
        self._open(cipher, NONCE.pack(number, 0), sealed, where.data + name, out, record)
        return out.tobytes()

    def large(self, payload: np.ndarray, where: Where, small_bytes: int, record: str) -> np.ndarray:
        """The large part, in memory of its own. As `small`."""
        number, name, cipher = self._head(payload, record)
        start = Shape.of(len(name), small_bytes, 0).large_start
        if start + TAG_BYTES > payload.size:
            raise BadRecord("a sealed payload is cut short", where=record)
        out = np.empty(payload.size - start - TAG_BYTES, np.uint8)
        self._open(cipher, NONCE.pack(number, 1), payload[start:], where.data + name, out, record)
        return out

    def _head(self, payload: np.ndarray, record: str) -> tuple[int, bytes, Any]:
        if payload.size < HEAD.size:
            raise BadRecord("a sealed payload is cut short", where=record)
        magic, version, name_bytes, key_id, salt, number = HEAD.unpack_from(payload.data)
        if magic != MAGIC or version != VERSION or HEAD.size + name_bytes > payload.size:
            raise BadRecord("a sealed payload has no valid header", where=record)
        name = payload[HEAD.size : HEAD.size + name_bytes].tobytes()
        if name:
            self.keys.know(name.decode(errors="replace"))
        key = self.keys.key_by_id(key_id)
        if key is None:
            raise LockedRecord("a record is sealed with a key that isn't there", where=record)
        return number, name, _cipher(self._ciphers, key_id, key, salt)

    def _open(self, cipher: Any, nonce: bytes, sealed: np.ndarray, data: bytes, out: np.ndarray, record: str) -> None:
        from cryptography.exceptions import InvalidTag

        try:
            cipher.decrypt_into(nonce, sealed, data, out)
        except InvalidTag:
            raise BadRecord("a sealed record was changed", where=record) from None


class LockedRecord(BadRecord):
    """A record that is sealed with a key that isn't there: whole, as far as anybody without the key can tell."""

    hint = Locked.hint


def _cipher(known: dict[bytes, Any], key_id: bytes, key: bytes, salt: bytes) -> Any:
    """The cipher of a tenant's key and a writer's salt, made once."""
    name = key_id + salt
    cipher = known.get(name)
    if cipher is None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if len(known) >= 64:  # writers of long ago
            known.clear()
        cipher = known[name] = AESGCM(derived_key(key, b"concordia-lane", salt))
    return cipher
