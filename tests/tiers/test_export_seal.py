"""Encrypted exported files: every byte and every length, the same promises as of open ones, and nothing without the key."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.tiers.sample import BLOCK, World, some_tokens
from tiers import export
from tiers.errors import BadFile, OtherFormat
from tiers.export_seal import ExportKeys, LockedFile
from tiers.keys import Keyring
from tiers.view import StoreReader

TOKENS = some_tokens(2 * BLOCK + 3)
KEY = bytes.fromhex("11" * 32)
KEYS = ExportKeys(Keyring({"default": KEY}))


def write(world: World, path: Path, keys: ExportKeys | None) -> export.Manifest:
    store = StoreReader(world.paths.store, map_bytes=world.settings.store_map_bytes)
    found = export.find_stored(store, "default", TOKENS)
    assert found is not None
    manifest = export.Manifest(
        "chat", "default", found.root, found.info.layout, 0, BLOCK, len(TOKENS), found.position, found.block_count, 0, 1,
    )  # fmt: skip
    export.export_session(store, path, found, manifest, TOKENS, keys=keys)
    store.close()
    return manifest


@pytest.fixture
def file(world: World, tmp_path: Path) -> Path:
    world.capture(world.lane(), "a", TOKENS, [len(TOKENS)])
    world.drain()
    write(world, tmp_path / "f", KEYS)
    return tmp_path / "f"


@pytest.mark.process
def test_every_flipped_byte_and_every_cut_is_found(file: Path) -> None:
    whole = file.read_bytes()
    assert export.check_exported(file, keys=KEYS).manifest.session == "chat"
    for at in range(0, len(whole), 3):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises((BadFile, OtherFormat)):
            export.check_exported(file, keys=KEYS)
    for size in range(0, len(whole), 5):
        file.write_bytes(whole[:size])
        with pytest.raises((BadFile, OtherFormat)):
            export.check_exported(file, keys=KEYS)
    file.write_bytes(whole + b"x")
    with pytest.raises(BadFile, match="after its end"):
        export.check_exported(file, keys=KEYS)


def test_records_cannot_be_swapped_even_with_right_checksums(file: Path, world: World) -> None:
    """Their place is sealed in: whoever has no key can make checksums, but no other order."""
    sealed = list(export.read_items(file))
    head = file.read_bytes()[: sealed[0].offset_after - export.HEADER.size - len(sealed[0].payload)]
    swapped = [sealed[0], sealed[1], sealed[3], sealed[2], *sealed[4:-1]]
    with open(file, "wb") as out:
        out.write(head)
        digest = export.xxh3_128()
        for index, item in enumerate(swapped):
            digest.update(export.write_record(out, item.type, index, item.payload))
        end = export.EndRecord(len(swapped), digest.digest())
        export.write_record(out, export.END, len(swapped), export._encode(end))
    assert len(list(export.read_items(file))) == len(sealed), "whole, as far as checksums go"
    with pytest.raises(BadFile, match="changed"):
        export.check_exported(file, keys=KEYS)


@pytest.mark.parametrize(
    "keys", [None, ExportKeys(Keyring({"default": bytes(32)})), ExportKeys(key=bytes(32)), ExportKeys(passphrase=b"x")]
)
def test_without_its_key_it_says_which_one_it_wants(file: Path, keys: ExportKeys | None) -> None:
    with pytest.raises(LockedFile, match="tenant default"):
        export.check_exported(file, keys=keys)


@pytest.mark.parametrize("records", [1, 3])
@pytest.mark.parametrize("again", ["the same key", "a passphrase", "open"])
def test_an_interrupted_export_goes_on_only_under_the_same_key(
    world: World, file: Path, records: int, again: str
) -> None:
    keys = {"the same key": KEYS, "a passphrase": ExportKeys(KEYS.ring, passphrase=b"words"), "open": None}[again]
    items = list(export.read_items(file))
    part = file.with_name("g.part")
    part.write_bytes(file.read_bytes()[: items[records].offset_after + 7])
    manifest = write(world, file.with_name("g"), keys)
    opened = export.check_exported(file.with_name("g"), keys=keys)
    assert opened.manifest == manifest and np.array_equal(np.frombuffer(opened.tokens, "<i4"), TOKENS)
    assert (file.read_bytes()[:90] == file.with_name("g").read_bytes()[:90]) == (again == "the same key")


def test_no_two_files_of_a_tenant_have_the_same_key(world: World, file: Path) -> None:
    write(world, file.with_name("g"), KEYS)
    one, two = (export.opened_with(path, KEYS) for path in (file, file.with_name("g")))
    assert one is not None and two is not None and one.header.salt != two.header.salt
    assert one.header.key_id == two.header.key_id
