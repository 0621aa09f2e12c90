"""Sealing of exported files: AES-256-GCM under a key of the file's own, made from the tenant's key, a key file or a passphrase.

An encrypted file begins with a header that says how its key is found, then has the same records as an open one with their payloads sealed.
Checksums are of what is stored, so that anybody can check whether the file is whole. Source: docs/log-format.md, "Exported session"
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from xxhash import xxh3_64_intdigest

from tiers.errors import BadFile, OtherFormat, Refused
from tiers.keys import KEY_BYTES, KEYS_VARIABLE, BadKeys, Keyring, derived_key, key_id

MAGIC = b"CONCEXPE"
VERSION = 1
KEY, SCRYPT = 0, 1
# magic, version, where the key comes from, log2 of scrypt's N, its r and p, salt, id of the key, bytes of the namespace's name
HEAD = struct.Struct("<8sHHHHH16s8sH")
SALT_BYTES, NONCE_BYTES, TAG_BYTES = 16, 12, 16
SEALING_BYTES = NONCE_BYTES + TAG_BYTES  # that each payload grows by
PERSON = b"concordia-export"
SCRYPT_LOG_N, SCRYPT_R, SCRYPT_P = 15, 8, 1  # 32 MB and about a tenth of a second
SCRYPT_LIMIT_BYTES = 1 << 29


class LockedFile(Refused):
    """An exported file that is encrypted, and what opens it wasn't given."""

    hint = f"Give the tenant's key in {KEYS_VARIABLE}, or what it was exported with by --key-file or --passphrase-file"


class Header(NamedTuple):
    """How the key of a file is found. source: KEY or SCRYPT; namespace: of the tenant whose key it is, "" if it is another's."""

    source: int
    log_n: int
    r: int
    p: int
    salt: bytes
    key_id: bytes
    namespace: str

    @property
    def data(self) -> bytes:
        name = self.namespace.encode()
        fixed = HEAD.pack(
            MAGIC, VERSION, self.source, self.log_n, self.r, self.p, self.salt, self.key_id, len(name)
        )  # fmt: skip
        return fixed + name + xxh3_64_intdigest(fixed + name).to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class ExportKeys:
    """What may open an exported file, and seal one: this process's tenant keys, a key that was given, a passphrase."""

    ring: Keyring = field(default_factory=Keyring)
    key: bytes | None = None
    passphrase: bytes | None = None

    @classmethod
    def given(cls, *, key_file: Path | None = None, passphrase_file: Path | None = None) -> ExportKeys:
        """From files that were named, beside the keys in the environment. Raises BadKeys."""
        key = _read(key_file).strip() if key_file is not None else None
        passphrase = _read(passphrase_file).rstrip(b"\r\n") if passphrase_file is not None else None
        if passphrase is not None and not passphrase:
            raise BadKeys("the passphrase file is empty", where=str(passphrase_file))
        try:
            raw = bytes.fromhex(key.decode()) if key is not None else None
        except ValueError:
            raw = b""
        if raw is not None and len(raw) != KEY_BYTES:
            raise BadKeys(f"a key file holds {2 * KEY_BYTES} hex digits", where=str(key_file))
        return cls(Keyring.from_environment(), raw, passphrase)

    def sealer(self, namespace: str) -> FileSealer | None:
        """What a new file is sealed with: a passphrase or a key that was given, else the tenant's; None: it is open."""
        salt = os.urandom(SALT_BYTES)
        if self.passphrase is not None:
            header = Header(SCRYPT, SCRYPT_LOG_N, SCRYPT_R, SCRYPT_P, salt, b"", "")
            base = _stretched(self.passphrase, header)
        elif self.key is not None:
            header, base = Header(KEY, 0, 0, 0, salt, b"", ""), self.key
        elif self.ring.has(namespace):
            header, base = Header(KEY, 0, 0, 0, salt, b"", namespace), self.ring.key_of(namespace)[1]
        else:
            return None
        return FileSealer(header._replace(key_id=key_id(base)), base)

    def opener(self, header: Header, where: str) -> FileSealer:
        """What opens a file. Raises LockedFile (with the id of the key that it wants)."""
        base = self.key if self.key is not None and key_id(self.key) == header.key_id else None
        if base is None and header.source == SCRYPT:
            if self.passphrase is None:
                raise LockedFile("the file is encrypted with a passphrase", where=where)
            base = _stretched(self.passphrase, header)
            if key_id(base) != header.key_id:
                raise LockedFile("the file is encrypted with another passphrase", where=where)
        if base is None:
            if header.namespace:
                self.ring.know(header.namespace)
            base = self.ring.key_by_id(header.key_id)
        if base is None:
            whose = f"the key of tenant {header.namespace}" if header.namespace else "a key"
            raise LockedFile(f"the file is encrypted with {whose}, id {header.key_id.hex()}", where=where)
        return FileSealer(header, base)


class FileSealer:
    """Seals and opens the payloads of one file. `base` is what its key is made from: it opens the file, too."""

    def __init__(self, header: Header, base: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self.header, self.base = header, base
        self._cipher: Any = AESGCM(derived_key(base, PERSON, header.salt))

    def seal(self, head: bytes, payload: bytes) -> bytes:
        """A payload as it is stored; `head`: the record's header up to its checksum."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + bytes(self._cipher.encrypt(nonce, payload, head))

    def open(self, head: bytes, stored: bytes, where: str) -> bytes:
        """What was sealed. Raises BadFile."""
        from cryptography.exceptions import InvalidTag

        if len(stored) < SEALING_BYTES:
            raise BadFile("a sealed record is cut short", where=where)
        try:
            return bytes(self._cipher.decrypt(stored[:NONCE_BYTES], stored[NONCE_BYTES:], head))
        except InvalidTag:
            raise BadFile("a sealed record was changed", where=where) from None


def read_header(file: BinaryIO, where: str) -> Header:
    """The header of an encrypted file after its magic word; the file is left at its first record. Raises BadFile, OtherFormat."""
    fixed = MAGIC + file.read(HEAD.size - len(MAGIC))
    if len(fixed) < HEAD.size:
        raise BadFile("the header of an encrypted file is cut", where=where)
    _, version, source, log_n, r, p, salt, name_id, name_bytes = HEAD.unpack(fixed)
    name = file.read(name_bytes)
    if xxh3_64_intdigest(fixed + name) != int.from_bytes(file.read(8), "little"):
        raise BadFile("the header of an encrypted file is damaged", where=where)
    if version != VERSION or source not in (KEY, SCRYPT):
        raise OtherFormat(f"an encrypted file of version {version}", where=where)
    if source == SCRYPT and 128 * r * (1 << min(log_n, 60)) > SCRYPT_LIMIT_BYTES:
        raise BadFile("the header of an encrypted file asks for too much memory", where=where)
    return Header(source, log_n, r, p, salt, name_id, name.decode(errors="replace"))


def _stretched(passphrase: bytes, header: Header) -> bytes:
    cost = 1 << header.log_n
    return hashlib.scrypt(
        passphrase, salt=header.salt, n=cost, r=header.r, p=header.p, maxmem=2 * SCRYPT_LIMIT_BYTES, dklen=KEY_BYTES
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadKeys("a key file can't be read", where=str(path), cause=error.strerror or str(error)) from error
