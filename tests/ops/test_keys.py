"""The commands on a store that is sealed for a tenant: with its key as ever, without it nothing is lost, nothing is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ops.processes import child_environment
from tests.ops.conftest import TOKENS, Place
from tests.ops.test_compaction import close
from tests.tiers.sample import some_tokens
from tiers.keys import FILE_VARIABLE, KEYS_VARIABLE

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
    assert other.json("import", str(tmp_path / "f"))["position"] == 43, "the file itself is not sealed"


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
