"""The commands on a store that is sealed for a tenant: with its key as ever, without it nothing is lost, nothing is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ops.processes import child_environment
from tests.ops.conftest import TOKENS, Place
from tests.ops.test_compaction import close
from tests.tiers.sample import rows, some_tokens
from tiers.export import opened_with
from tiers.export_seal import ExportKeys, LockedFile
from tiers.keeper_operations import Operations
from tiers.keys import FILE_VARIABLE, KEYS_VARIABLE, Keyring

KEY = f"default = {'ab' * 32}"


@pytest.fixture
def sealed(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv(KEYS_VARIABLE, KEY)
    place.environment[KEYS_VARIABLE] = KEY
    place.session("chat", TOKENS)
    return place


def forget(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE)
    place.environment.clear()


def test_with_its_key_everything_is_as_ever(sealed: Place, places: Callable[[str], Place], tmp_path: Path) -> None:
    assert sealed.json("verify")["checked"]["locked"] == 0
    assert {row["state"] for row in sealed.json("inspect", "chat")["sequences"][0]["stored"]} == {"ok"}
    assert sealed.json("export", "chat", "-o", str(tmp_path / "f"))["position"] == 43
    assert sealed.json("backup", str(tmp_path / "backup"))["checked"]
    taken = sealed.json("import", str(tmp_path / "f"), "--as", "copy")
    assert taken["position"] == 43
    other = places("other")
    assert "id " in other.refused(5, "import", str(tmp_path / "f")), "the file is encrypted with the tenant's key"
    other.environment[KEYS_VARIABLE] = KEY
    assert other.json("import", str(tmp_path / "f"))["position"] == 43


def test_an_exported_file_holds_nothing_that_can_be_read(sealed: Place, tmp_path: Path) -> None:
    file, plain = tmp_path / "f", tmp_path / "plain"
    assert sealed.json("export", "chat", "-o", str(file))["encrypted"]
    assert not sealed.json("export", "chat", "-o", str(plain), "--plain")["encrypted"]
    whats = [TOKENS[:4].astype("<i4").tobytes(), rows(0, TOKENS[:8])[:16].tobytes(), b"chat"]
    assert [what in plain.read_bytes() for what in whats] == [True] * 3
    assert not any(what in file.read_bytes() for what in whats)
    assert sealed.json("verify", str(file))["session"] == "chat"
    assert sealed.json("inspect", str(file))["export"]["tokens"] == 43


@pytest.mark.process
def test_a_passphrase_or_a_key_file_instead(
    sealed: Place, places: Callable[[str], Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, other_words, key = tmp_path / "words", tmp_path / "other", tmp_path / "key"
    words.write_text("correct horse\n")
    other_words.write_text("battery staple\n")
    key.write_text("cd" * 32 + "\n")
    by = {"words": ("--passphrase-file", str(words)), "key": ("--key-file", str(key))}
    for name, flags in by.items():
        assert sealed.json("export", "chat", "-o", f"{tmp_path}/{name}.f", *flags)["encrypted"]
    forget(sealed, monkeypatch)
    for name, flags in by.items():
        place, file = places(f"to-{name}"), f"{tmp_path}/{name}.f"
        assert place.json("verify", file)["locked"]
        assert "--passphrase-file" in place.refused(5, "import", file)
        assert place.json("import", file, *flags)["position"] == 43
        assert place.world.restorable(TOKENS) == 43
    assert "another passphrase" in place.refused(
        5, "import", f"{tmp_path}/words.f", "--passphrase-file", str(other_words)
    )
    assert place.run("export", "chat", "--plain", "--key-file", str(key)).exit_code == 2
    key.write_text("12")
    assert "64 hex" in place.refused(5, "import", f"{tmp_path}/key.f", "--key-file", str(key))
    assert "can't be read" in place.refused(5, "import", f"{tmp_path}/key.f", "--key-file", "/nowhere")


def test_an_encrypted_file_is_imported_by_a_running_keeper(
    sealed: Place, places: Callable[[str], Place], tmp_path: Path
) -> None:
    """The command hands the file's key to the keeper, which may not have it."""
    file = tmp_path / "f"
    sealed.json("export", "chat", "-o", str(file))
    target = places("target").world.drained()
    sealer = opened_with(file, ExportKeys(Keyring.parse(KEY, "")))
    assert sealer is not None
    request = {"path": str(file), "session": "chat", "namespace": "other"}
    with pytest.raises(LockedFile):
        Operations(target).import_slice(request)
    done = Operations(target).import_slice({**request, "key": sealer.base.hex()})["imported"]
    assert done["done"] and done["blocks_put"] == 6
    target.close()


def test_without_its_key_nothing_is_shown_and_nothing_is_dropped(
    sealed: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forget(sealed, monkeypatch)
    found = sealed.json("verify")
    assert found["ok"] and found["checked"]["locked"] > 5
    assert sealed.json("repair", "--yes")["dropped"] == 0
    assert sealed.run("inspect", "chat").exit_code == 1
    assert sealed.run("export", "chat", "-o", str(tmp_path / "f")).exit_code == 5
    assert "key" in sealed.refused(5, "gc", "--grace-s", "0"), "what the locked names can't be known"
    monkeypatch.setenv(KEYS_VARIABLE, KEY)
    sealed.environment[KEYS_VARIABLE] = KEY
    assert sealed.world.restorable(TOKENS) == 43


def test_records_in_lanes_are_not_passed_over_for_want_of_a_key(sealed: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    more = some_tokens(20, seed=8)
    sealed.session("later", more, drained=False)
    forget(sealed, monkeypatch)
    assert "key isn't given" in sealed.refused(5, "recover")
    monkeypatch.setenv(KEYS_VARIABLE, KEY)
    sealed.environment[KEYS_VARIABLE] = KEY
    sealed.json("recover")
    assert sealed.world.restorable(more) == 20


def test_the_processes_of_serve_are_given_the_keys_and_no_other_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, KEY)
    monkeypatch.setenv(FILE_VARIABLE, "/keys")
    monkeypatch.setenv("CONCORDIA_API_KEY", "secret")
    given = child_environment()
    assert (given[KEYS_VARIABLE], given[FILE_VARIABLE]) == (KEY, "/keys") and "CONCORDIA_API_KEY" not in given


def test_a_forgotten_key_deletes_for_good(sealed: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    close(sealed, "chat", len(TOKENS))
    forget(sealed, monkeypatch)
    assert "--yes" in sealed.refused(5, "gc", "--drop-locked")
    assert sealed.json("gc", "--drop-locked", "--yes", "--grace-s", "0")["counts"]["freed_blocks"] == 5
    assert sealed.json("verify")["checked"]["blocks"] == 0
    assert sealed.json("stats")["stats"]["stored_blocks"] == 0


def test_what_was_stored_before_the_key_is_named_and_sealed_on_command(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encryption() -> dict[str, str]:
        checks = place.json("doctor", code=place.run("doctor").exit_code)["checks"]
        (found,) = (check for check in checks if check["name"] == "encryption")
        return dict(found)

    place.session("chat", TOKENS)
    assert encryption()["level"] == "ok"
    monkeypatch.setenv(KEYS_VARIABLE, KEY)
    place.environment[KEYS_VARIABLE] = KEY
    place.json("recover")  # whoever opens the store for writing notes that there is a key
    assert place.json("verify")["checked"]["open"] == 7
    assert "compact --shrink" in place.run("verify").stdout and "7 values" in encryption()["advice"]
    assert place.json("compact", "--dry-run")["counts"]["sealed_values"] == 7
    assert "--shrink" in place.run("compact").stdout
    assert place.json("verify")["checked"]["open"] == 0 and "free now" in encryption()["advice"]
    place.json("compact", "--shrink")
    assert encryption()["level"] == "ok" and place.world.restorable(TOKENS) == 43
    assert TOKENS[:4].tobytes() not in (place.paths.store / "data.mdb").read_bytes()
    forget(place, monkeypatch)
    assert "sealed with keys that are not given" in encryption()["advice"]
