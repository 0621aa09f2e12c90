"""What an operator meets on the way: not allowed, a later version's store, numbers that make no sense."""

from __future__ import annotations

import errno
from pathlib import Path

import lmdb
import pytest

from ops import backups, show
from ops.errors import BadData
from ops.flags import system_problem
from ops.serve import refuse_early
from tests.ops.conftest import TOKENS, Place
from tiers.errors import OtherFormat
from tiers.offline import writer_lock
from tiers.view import VERSION_KEYS

PAGE = 4096
ABOUT_A_STORE: list[tuple[str, ...]] = [
    ("sessions", "ls"), ("sessions", "show", "chat"), ("sessions", "rm", "chat", "--yes"), ("sessions", "pin", "chat"),
    ("inspect", "chat"), ("verify",), ("recover",), ("repair",), ("compact",), ("gc",), ("stats",), ("export", "chat"),
    ("backup", "somewhere"),
]  # fmt: skip


def test_a_store_of_a_later_version_is_left_alone_by_every_command(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place.session("chat", TOKENS)
    environment = lmdb.open(str(place.paths.store), max_dbs=32, map_size=place.world.settings.store_map_bytes)
    with environment.begin(write=True, db=environment.open_db(b"meta")) as transaction:
        for key in VERSION_KEYS:
            transaction.put(key, b"9")
    environment.close()
    before = (place.paths.store / "data.mdb").read_bytes()
    for command in ABOUT_A_STORE[:-1]:  # a backup copies what is there, whatever it is
        assert "the store has version 9, this is 2" in place.refused(1, *command), command
    assert (place.paths.store / "data.mdb").read_bytes() == before
    assert place.world.restorable(TOKENS) == 0, "an engine finds nothing in it, and goes on"


def test_serve_refuses_it_before_it_starts_anything(place: Place) -> None:
    from ops import config

    place.session("chat", TOKENS)
    environment = lmdb.open(str(place.paths.store), max_dbs=32, map_size=place.world.settings.store_map_bytes)
    with environment.begin(write=True, db=environment.open_db(b"meta")) as transaction:
        for key in VERSION_KEYS:
            transaction.put(key, b"3")
    environment.close()
    settings = config.load({"data_dir": str(place.paths.data_dir), "gateway.port": 1}, environment={})
    with pytest.raises(OtherFormat, match="version 3"):
        refuse_early(settings)


@pytest.mark.parametrize(
    "command",
    [
        ("verify", "--limit-mb-s", "-1"), ("repair", "--limit-mb-s", "-1"), ("compact", "--settle-s", "-1"),
        ("backup", "somewhere", "--limit-mb-s", "-1"),
        ("compact", "--grace-s", "-1"), ("gc", "--grace-s", "-1"), ("inspect", "e0", "--limit", "0"),
        ("inspect", "e0", "--from", "-1"), ("verify", "--limit-mb-s", "nan"), ("compact", "--settle-s", "inf"),
        ("drain", "e0", "--timeout", "nan"), ("migrate", "chat", "e0", "--timeout", "-1"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_numbers_that_make_no_sense_are_wrong_usage(place: Place, command: tuple[str, ...]) -> None:
    result = place.run(*command)
    assert result.exit_code == 2 and "not in the range" in result.stderr


def test_what_the_system_refuses_is_one_line_that_says_what_to_do(place: Place) -> None:
    denied = system_problem(PermissionError(errno.EACCES, "Permission denied", "/data/store"))
    assert denied == (
        "/data/store: Permission denied. Run it as the user whom that belongs to: the one who runs `concordia serve`"
    )
    assert "Free some room" in system_problem(OSError(errno.ENOSPC, "No space left on device", "/data/f"))
    place.paths.store.rmdir()
    place.paths.store.write_text("not a directory")
    for command in (("stats",), ("recover",), ("compact",)):
        assert str(place.paths.store) in place.refused(1, *command), command


def test_questions_name_only_flags_that_there_are(place: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    place.json("export", "chat", "-o", str(tmp_path / "f"))
    said = place.refused(5, "export", "chat", "-o", str(tmp_path / "f"))
    assert "--yes" in said and "--dry-run" not in said
    assert "there is no directory" in place.refused(1, "restore", str(tmp_path / "nowhere"))


def test_long_work_says_how_far_it_is_unless_json_is_wanted(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "PLAIN_INTERVAL_S", 0.0)
    place.session("chat", TOKENS, drained=False)
    file, backup = str(tmp_path / "f"), str(tmp_path / "backup")
    for command in (
        ("recover",), ("verify",), ("repair", "--yes"), ("export", "chat", "-o", file), ("verify", file), ("backup", backup),
        ("verify", backup), ("import", file, "--as", "copy"), ("compact",), ("gc",), ("doctor",), ("restore", backup, "--replace", "--yes"),
    ):  # fmt: skip
        said = place.run(*command)
        assert said.exit_code == 0 and " %" in said.stderr, (command, said.stderr, said.exception)
    assert " %" not in place.run("verify", "--json").stderr


def test_work_goes_on_when_nobody_reads_how_far_it_is(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object, **more: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(show, "PLAIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(show, "print", broken, raising=False)
    place.session("chat", TOKENS)
    assert place.run("backup", str(tmp_path / "backup")).exit_code == 0 and (tmp_path / "backup").is_dir()
    monkeypatch.setattr(backups.click, "echo", broken)
    said = place.run("backup", str(tmp_path / "second"))
    assert said.exit_code == 1 and isinstance(said.exception, SystemExit), "its last line could not be said"


def test_restore_says_where_what_was_there_is_now(place: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    place.json("backup", str(tmp_path / "backup"))
    for number in range(2):
        result = place.run("restore", str(tmp_path / "backup"), "--replace", "--yes")
        assert (
            result.exit_code == 0 and f"what was there is in {place.paths.data_dir}/replaced-{number}" in result.stdout
        )


@pytest.mark.process
@pytest.mark.parametrize("how", ["cut", "no database", "a record"])
def test_a_damaged_table_of_sessions_is_said_by_every_command_and_nobody_dies_of_it(
    place: Place, tmp_path: Path, how: str
) -> None:
    from ops import config

    place.session("chat", TOKENS)
    file = place.paths.sessions / "data.mdb"
    if how == "a record":
        environment = lmdb.open(str(place.paths.sessions), max_dbs=8)
        with environment.begin(write=True, db=environment.open_db(b"records")) as transaction:
            transaction.put(b"chat", b"\x81\xa1x\x01")
        environment.close()
    else:
        file.write_bytes(file.read_bytes()[: 3 * 4096] if how == "cut" else b"x" * 20_000)
    (found,) = place.json("verify", code=6)["findings"]
    assert found["kind"] == "sessions"
    for command in (("sessions", "show", "chat"), ("export", "chat", "-o", str(tmp_path / "f"))):
        said = place.refused(6, *command)
        assert ("Only this value" if how == "a record" else str(place.paths.sessions)) in said, said
        assert ("Restore a backup" in said) == (how != "a record") and "Compute the range" not in said
    if how == "a record":
        place.record("other", TOKENS)
        listed = place.json("sessions", "ls", code=6)
        assert [row["id"] for row in listed["data"]] == ["other"]
        assert [finding["key"] for finding in listed["findings"]] == ["chat"]
    else:
        for command in (("sessions", "ls"), ("sessions", "rm", "chat", "--yes"), ("backup", str(tmp_path / "b"))):
            assert "Restore a backup" in place.refused(6, *command), command
        with pytest.raises(BadData, match="Restore a backup"):
            refuse_early(config.load({"data_dir": str(place.paths.data_dir), "gateway.port": 1}, environment={}))
    assert place.world.restorable(TOKENS) == 43


@pytest.mark.parametrize("how", ["cut", "no database"])
def test_sessions_are_listed_though_the_store_cannot_be_read(place: Place, how: str) -> None:
    place.session("chat", TOKENS)
    file = place.paths.store / "data.mdb"
    file.write_bytes(file.read_bytes()[:-PAGE] if how == "cut" else b"x" * 20_000)
    for command in (("sessions", "ls"), ("sessions", "show", "chat")):
        said = place.run(*command)
        assert said.exit_code == 6 and "chat" in said.stdout, (command, said.stdout, said.exception)
        (line,) = said.stderr.splitlines()
        assert (
            line.startswith("concordia: not everything could be read: store data.mdb: ") and "concordia repair" in line
        )
    listed = place.json("sessions", "ls", code=6)
    assert [finding["kind"] for finding in listed["findings"]] == ["store"]
    (row,) = listed["data"]
    assert (row["tokens"], row["durable"], row["durable_lag"], row["pinned"]) == (len(TOKENS), None, None, None)
    file.unlink()  # as the manual says where nothing of it can be read
    assert place.json("sessions", "ls")["data"][0]["durable"] == 0


@pytest.mark.parametrize("name", ["", "x" * 600, "a\udcff"], ids=["empty", "long", "no text"])
def test_a_name_that_no_session_can_have_is_no_damage(place: Place, name: str) -> None:
    place.session("chat", TOKENS)
    for command in (("sessions", "show"), ("sessions", "rm", "--yes"), ("export",)):
        said = place.run(*command, name)
        assert said.exit_code in (1, 2) and "damage" not in said.stderr and "Restore" not in said.stderr, said.stderr
        assert isinstance(said.exception, SystemExit), (command, said.exception)


def test_a_session_that_is_named_twice_is_deleted_once(place: Place) -> None:
    place.session("chat", TOKENS)
    assert [row["id"] for row in place.json("sessions", "rm", "chat", "chat", "--yes")["data"]] == ["chat"]


def test_a_command_beside_another_one_that_works_in_the_keepers_place_is_told_to_wait(place: Place) -> None:
    place.session("chat", TOKENS)
    with writer_lock(place.paths):
        for command in (("compact", "--yes"), ("stats",), ("sessions", "pin", "chat"), ("recover",), ("gc",)):
            said = place.refused(5, *command)
            assert "Ask again soon" in said or "does not answer" in said, (command, said)
