"""Keys of tenants, and sealing what is written to the disk for them: AES-256-GCM. Off unless a key is given.

Keys come from the environment, never from the configuration or a command line, which others can read: CONCORDIA_STORE_KEYS holds
lines of `namespace = 64 hex digits`, or CONCORDIA_STORE_KEY_FILE names a file of such lines (`#` begins a comment). `*` stands for
every namespace that has no line; its key is then mixed with the namespace's name. A tenant whose key is forgotten can't be read by anyone.
What is hidden and what isn't: docs/log-format.md
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiers.errors import BadBlock, Refused

KEYS_VARIABLE = "CONCORDIA_STORE_KEYS"
FILE_VARIABLE = "CONCORDIA_STORE_KEY_FILE"
KEY_BYTES = 32
SEALED_MAGIC = b"CENC"
SEALED_VERSION = 1
# magic, version, zero, id of the key, nonce; then ciphertext and the tag of 16 bytes
HEAD = struct.Struct("<4sHH8s12s")
SEALED_BYTES = HEAD.size + 16  # that sealing adds
OTHERS = "*"


class BadKeys(Refused):
    """Keys that can't be used."""

    hint = f"Give lines of `namespace = 64 hex digits` in {KEYS_VARIABLE}, or in the file that {FILE_VARIABLE} names"


class Locked(BadBlock):
    """A stored value that is sealed with a key that isn't there."""

    hint = "Give the tenant's key again; if it is gone for good, have the keeper drop what is locked (op drop_locked), then compact"


def is_sealed(raw: Any) -> bool:
    """Whether a stored value is sealed."""
    return bytes(raw[:4]) == SEALED_MAGIC


class Keyring:
    """Keys by namespace. `cryptography` is imported when the first key is used."""

    def __init__(self, keys: Mapping[str, bytes] | None = None) -> None:
        self._keys = dict(keys or {})
        self._ciphers: dict[bytes, Any] = {}
        self._by_id: dict[bytes, bytes] = {}
        self._by_namespace: dict[str, tuple[bytes, Any] | None] = {}
        for namespace, key in self._keys.items():
            if namespace != OTHERS:
                self._cipher(key)

    @classmethod
    def parse(cls, text: str, where: str) -> Keyring:
        """From lines of `namespace = hex`. Raises BadKeys, which never shows a key."""
        keys: dict[str, bytes] = {}
        for number, line in enumerate(text.splitlines(), 1):
            line = line.partition("#")[0].strip()
            if not line:
                continue
            namespace, _, digits = (part.strip() for part in line.rpartition("="))
            try:
                key = bytes.fromhex(digits)
            except ValueError:
                key = b""
            if len(key) != KEY_BYTES or not namespace:
                raise BadKeys("a key can't be read", where=f"{where}, line {number}")
            keys[namespace] = key
        return cls(keys)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Keyring:
        """The keys that this process was given; none if neither variable is set. Raises BadKeys."""
        given = os.environ if environment is None else environment
        if given.get(KEYS_VARIABLE):
            return cls.parse(given[KEYS_VARIABLE], KEYS_VARIABLE)
        path = given.get(FILE_VARIABLE, "")
        if not path:
            return cls()
        try:
            return cls.parse(Path(path).read_text(), path)
        except OSError as error:
            raise BadKeys("the key file can't be read", where=path, cause=error.strerror or str(error)) from error

    def __bool__(self) -> bool:
        return bool(self._keys)

    def has(self, namespace: str) -> bool:
        """Whether what is stored for a namespace is sealed."""
        return self._of(namespace) is not None

    def seal(self, namespace: str, database: str, key: bytes, value: Any) -> Any:
        """The value as it is to be stored under `key`: sealed if the namespace has a key, else as it is."""
        found = self._of(namespace)
        if found is None:
            return value
        name, cipher = found
        nonce = os.urandom(12)
        head = HEAD.pack(SEALED_MAGIC, SEALED_VERSION, 0, name, nonce)
        return head + cipher.encrypt(nonce, bytes(value), database.encode() + key)

    def open(self, database: str, key: bytes, raw: Any) -> Any:
        """What was sealed; a value that isn't comes back as it is. Raises Locked (no key), BadBlock (changed, or not its place)."""
        if not is_sealed(raw):
            return raw
        where = f"{database} {key.hex()}"
        if len(raw) < SEALED_BYTES:
            raise BadBlock("a sealed value is cut short", where=where)
        _, version, zero, name, nonce = HEAD.unpack_from(raw)
        if version != SEALED_VERSION or zero:
            raise BadBlock("a sealed value has no valid header", where=where)
        cipher = self._ciphers.get(name)
        if cipher is None and OTHERS in self._keys:
            raise Locked("a value is sealed for a tenant that isn't known yet", where=where)
        if cipher is None:
            raise Locked("a value is sealed with a key that isn't there", where=where)
        from cryptography.exceptions import InvalidTag

        try:
            return cipher.decrypt(nonce, bytes(raw[HEAD.size :]), database.encode() + key)
        except InvalidTag:
            raise BadBlock("a sealed value was changed", where=where) from None

    def key_of(self, namespace: str) -> tuple[bytes, bytes]:
        """(id, key) of a namespace that has one, to derive others from."""
        found = self._of(namespace)
        assert found is not None, f"namespace {namespace} has no key"
        return found[0], self._by_id[found[0]]

    def key_by_id(self, key_id: bytes) -> bytes | None:
        """A key by its id; None if it isn't there, or belongs to a namespace that isn't known yet (see `know`)."""
        return self._by_id.get(key_id)

    def know(self, namespace: str) -> None:
        """Derive the key of a namespace that has no line of its own, so that what is sealed with it can be opened."""
        self._of(namespace)

    def _of(self, namespace: str) -> tuple[bytes, Any] | None:
        if namespace not in self._by_namespace:
            key = self._keys.get(namespace) or _derived(self._keys.get(OTHERS), namespace)
            self._by_namespace[namespace] = self._cipher(key) if key else None
        return self._by_namespace[namespace]

    def _cipher(self, key: bytes) -> tuple[bytes, Any]:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        name = key_id(key)
        if name not in self._ciphers:
            self._ciphers[name], self._by_id[name] = AESGCM(key), key
        return name, self._ciphers[name]


def key_id(key: bytes) -> bytes:
    """What names a key without telling it, 8 bytes."""
    return hashlib.blake2b(key, digest_size=8, person=b"concordia-keyid").digest()


def derived_key(key: bytes, person: bytes, salt: bytes) -> bytes:
    """A key for one purpose and one salt; nobody who has it can tell `key`."""
    return hashlib.blake2b(salt, key=key, digest_size=KEY_BYTES, person=person).digest()


def _derived(master: bytes | None, namespace: str) -> bytes | None:
    if master is None:
        return None
    return hashlib.blake2b(namespace.encode(), key=master, digest_size=KEY_BYTES, person=b"concordia-tenant").digest()
