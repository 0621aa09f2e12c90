"""export and import, backup and restore: whole or not at all, damage found, interrupted and again, refused with a reason."""

from __future__ import annotations

import errno
import fcntl
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gateway.sessions import SessionFile
from ops import transfer
from ops.client import ApiError, Client
from ops.config import load
from ops.errors import StateRefused
from ops.installation import find
from ops.serve import refuse_early
from ops.transfer import run_import
from tests.ops.conftest import TOKENS, Place
from tests.tiers.sample import BLOCK, flip, sequence, some_tokens
from tiers import backup as backups
from tiers import export as exported
from tiers import keeper_client, store_file
from tiers.backup import Rate
from tiers.errors import BadFile, OtherFormat
from tiers.export_seal import ExportKeys

Make = Callable[[str], Place]


@pytest.fixture
def target(places: Make) -> Place:
    return places("other")


def export(place: Place, file: Path, session: str = "chat") -> dict:
    return dict(place.json("export", session, "-o", str(file), "--yes"))


def test_an_exported_session_goes_on_elsewhere(place: Place, target: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    row = export(place, tmp_path / "chat.concordia")
    assert (row["tokens"], row["position"], row["resumed_records"]) == (43, 43, 0)
    taken = target.json("import", str(tmp_path / "chat.concordia"))
    assert (taken["session"], taken["position"], taken["blocks_put"]) == ("chat", 43, 6)
    assert target.world.restorable(TOKENS) == 43
    assert target.json("verify")["ok"]
    assert target.json("sessions", "show", "chat")["durable"] == 43
    (listed,) = target.json("sessions", "ls")["data"]
    assert (listed["id"], listed["tokens"], listed["turns"]) == ("chat", 43, 1)


def test_an_import_for_a_tenant_is_named_for_it(place: Place, target: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    export(place, tmp_path / "f")
    taken = target.json("import", str(tmp_path / "f"), "--namespace", "acme", "--as", "talk")
    assert (taken["session"], taken["namespace"]) == ("acme~talk", "acme")
    assert target.json("import", str(tmp_path / "f"))["session"] == "chat"
    rows = target.json("sessions", "ls")["data"]
    assert {(row["id"], row["namespace"], row["durable"]) for row in rows} == {
        ("acme~talk", "acme", 43),
        ("chat", "default", 43),
    }
    assert "namespace" in target.run("sessions", "ls").stdout and "namespace" not in place.run("sessions", "ls").stdout
    assert target.json("sessions", "pin", "acme~talk")["namespace"] == "acme"
    assert target.json("sessions", "show", "acme~talk")["pinned"]
    again = export(target, tmp_path / "g", "acme~talk")
    assert again["position"] == 43
    assert place.json("import", str(tmp_path / "g"), "--namespace", "default", "--as", "back")["session"] == "back"


def test_export_takes_what_still_waits_in_the_lanes(place: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS, cuts=[10, 43], drained=False)
    assert export(place, tmp_path / "f")["position"] == 43


def test_importing_twice_changes_nothing(place: Place, target: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    export(place, tmp_path / "f")
    target.json("import", str(tmp_path / "f"))
    assert "already" in target.refused(5, "import", str(tmp_path / "f"))
    again = target.json("import", str(tmp_path / "f"), "--replace", "--yes")
    assert (again["blocks_put"], again["blocks_there"]) == (0, 6)
    other = target.json("import", str(tmp_path / "f"), "--as", "copy")
    assert other["blocks_put"] == 1, "only its own tail piece: blocks are shared"
    assert target.json("verify")["ok"]


def test_another_model_is_refused_with_a_reason(place: Place, target: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    export(place, tmp_path / "f")
    target.session("mine", some_tokens(2 * BLOCK, seed=3))
    opened = exported.open_exported(tmp_path / "f")
    rewrite(tmp_path / "f", root=bytes(16), session="chat")
    said = target.refused(3, "import", str(tmp_path / "f"))
    assert "fingerprint 000000000000" in said and opened.manifest.root.hex()[:12] in said
    assert target.json("import", str(tmp_path / "f"), "--any-model")["position"] == 43
    assert target.world.restorable(TOKENS) == 0, "another fingerprint's state is never found"


@pytest.mark.parametrize("flags", [("--as", "bad name"), ("--as", "good", "--namespace", "a/b")])
def test_a_name_that_no_session_can_have_is_refused_before_anything_is_stored(
    place: Place, target: Place, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    place.session("chat", TOKENS)
    export(place, tmp_path / "f")
    said = target.run("import", str(tmp_path / "f"), *flags)
    assert said.exit_code == 2 and "no session can be called" in said.stderr
    assert target.run("import", str(tmp_path / "f"), *flags, "--dry-run").exit_code == 2
    assert not (target.paths.store / "data.mdb").exists()


class Refusing:
    """A gateway that answers one question after another as it is told: a status, 200 for yes."""

    def __init__(self, *statuses: int) -> None:
        self.left, self.checks = list(statuses), list[bool]()

    def session_path(self, session: str) -> str:
        return f"/v1/sessions/{session}"

    def get(self, path: str) -> dict:
        return self._answer()

    def post(self, path: str, body: dict) -> dict:
        self.checks.append(body["check"])
        return self._answer()

    def _answer(self) -> dict:
        status = self.left.pop(0)
        if status != 200:
            raise ApiError(status, "refused")
        return {}


@pytest.mark.process
@pytest.mark.parametrize(
    "statuses, checks, there",
    [
        ((409,), [True], False),
        ((200, 400, 404), [True, False], False),
        ((200, 409, 200), [True, False], True),
    ],
    ids=["asked before", "afterwards", "afterwards, and it has one of that name"],
)
def test_what_the_gateway_refuses_leaves_nothing_that_nobody_can_delete(
    place: Place, target: Place, keeper: Callable[[], None], tmp_path: Path, statuses: tuple[int, ...],
    checks: list[bool], there: bool,
) -> None:  # fmt: skip
    target.session("chat", TOKENS)
    export(target, tmp_path / "f")
    keeper()
    gateway = Refusing(*statuses)
    here = find(load({"data_dir": str(place.paths.data_dir), "lane_dir": str(place.paths.lane_dir)}))
    here = replace(here, gateway=cast(Client, gateway))
    with pytest.raises((ApiError, StateRefused)):
        run_import(
            here, tmp_path / "f", True, name="copy", namespace="", replace=False, any_model=True, yes=True, dry_run=False,
            keys=ExportKeys(),
        )  # fmt: skip
    assert gateway.checks == checks and not gateway.left
    stored = [info.session for info in keeper_client.sessions(place.paths.keeper_socket)]
    assert stored == (["copy"] if there else [])
    assert there or keeper_client.stats(place.paths.keeper_socket)["stored_blocks"] == 0


def rewrite(path: Path, **changes: object) -> None:
    """The same file with another manifest, all checksums right."""
    import msgspec

    items = [(item.type, bytes(item.payload)) for item in exported.read_items(path)]
    manifest = msgspec.msgpack.decode(items[0][1], type=exported.Manifest)
    manifest = msgspec.structs.replace(manifest, **changes)
    writer = exported.Exporter(path.with_suffix(".new"), manifest)
    writer.write(0, exported.MANIFEST, msgspec.msgpack.encode(manifest))
    for index, (kind, payload) in enumerate(items[1:-1], 1):
        writer.write(index, kind, payload)
    writer.finish()
    path.with_suffix(".new").replace(path)


def test_dry_run_and_bad_input(place: Place, target: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    export(place, tmp_path / "f")
    assert target.json("import", str(tmp_path / "f"), "--dry-run")["dry_run"]
    assert target.world.restorable(TOKENS) == 0
    assert "no file" in target.refused(1, "import", str(tmp_path / "none"))
    (tmp_path / "text").write_text("hello")
    assert "not an exported session" in target.refused(6, "import", str(tmp_path / "text"))
    assert "no session" in place.refused(1, "export", "nobody")
    assert "--yes" in place.refused(5, "export", "chat", "-o", str(tmp_path / "f")), "it would be replaced"


def test_verify_and_inspect_take_an_exported_file(place: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    export(place, tmp_path / "f")
    assert place.json("verify", str(tmp_path / "f"))["kind"] == "export"
    shown = place.json("inspect", str(tmp_path / "f"))
    assert [row["type"] for row in shown["records"]] == ["MANIFEST", "TOKENS", *["BLOCK"] * 5, "TAIL", "END"]
    flip(tmp_path / "f", 200)
    assert not place.json("verify", str(tmp_path / "f"), code=6)["ok"]
    assert place.json("inspect", str(tmp_path / "f"), code=6)["problem"]


@pytest.fixture(scope="module")
def sample_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from tests.tiers.sample import World
    from tiers.paths import Paths

    directory = tmp_path_factory.mktemp("sample")
    place = Place(World(Paths.at(directory / "data", directory / "lanes").make()))
    place.session("chat", TOKENS)
    export(place, directory / "f")
    return (directory / "f").read_bytes()


@pytest.mark.process
def test_every_flipped_byte_is_found(sample_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f"
    for at in range(len(sample_file)):
        data = bytearray(sample_file)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        with pytest.raises((BadFile, OtherFormat)):
            exported.check_exported(path)


@pytest.mark.process
def test_every_cut_is_found(sample_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f"
    for length in range(len(sample_file)):
        path.write_bytes(sample_file[:length])
        with pytest.raises((BadFile, OtherFormat)):
            exported.check_exported(path)
    path.write_bytes(sample_file + b"\0")
    with pytest.raises(BadFile):
        exported.check_exported(path)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_bytes_at_all_crash_the_reader(sample_file: bytes, tmp_path: Path, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(sample_file)))
    path = tmp_path / "f"
    made = sample_file[:start] + data.draw(st.binary(max_size=200))
    assume(made != sample_file)
    path.write_bytes(made)
    with pytest.raises((BadFile, OtherFormat)):
        exported.check_exported(path)


@pytest.mark.parametrize("seed", range(8))
def test_an_interrupted_export_goes_on(place: Place, tmp_path: Path, seed: int) -> None:
    place.session("chat", TOKENS)
    whole = tmp_path / "whole"
    export(place, whole)
    data = whole.read_bytes()
    cut = random.Random(seed).randrange(1, len(data))
    part = tmp_path / "again.part"
    part.write_bytes(data[:cut])
    row = export(place, tmp_path / "again")
    exported.check_exported(tmp_path / "again")
    assert not part.exists()
    assert row["resumed_records"] >= (cut > 700), (cut, row)


def test_an_export_that_was_interrupted_before_the_session_went_on_is_begun_anew(place: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS[: 2 * BLOCK])
    export(place, tmp_path / "f")
    (tmp_path / "f").rename(tmp_path / "f.part")
    place.record("chat", TOKENS)
    assert export(place, tmp_path / "f")["resumed_records"] == 0
    exported.check_exported(tmp_path / "f")


def test_an_interrupted_import_goes_on(place: Place, target: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    export(place, tmp_path / "f")
    from tiers.offline import offline_drain

    request = {"path": str(tmp_path / "f"), "session": "chat", "namespace": "default"}
    with offline_drain(target.paths, target.world.settings) as drain, drain.store().group() as group:
        step = exported.import_slice(group, tmp_path / "f", session="chat", namespace="default", limit_bytes=1000)
    assert not step.done and step.blocks_put, request
    assert target.json("verify")["ok"], "what is there after the interruption is whole and has a name"
    taken = target.json("import", str(tmp_path / "f"))
    assert taken["blocks_there"] == step.blocks_put
    assert target.world.restorable(TOKENS) == 43


def test_a_damaged_block_is_not_exported(place: Place, tmp_path: Path) -> None:
    from tests.ops.test_recovery import damage_block

    place.session("chat", TOKENS)
    damage_block(place, 3)
    assert "repair" in place.refused(6, "export", "chat", "-o", str(tmp_path / "f"))
    assert not (tmp_path / "f").exists()
    place.json("repair", "--yes")
    assert export(place, tmp_path / "f")["position"] == 24


@pytest.mark.process
def test_a_session_that_goes_on_while_it_is_exported_is_exported_as_it_is_then(
    place: Place, keeper: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next turn completes the block that the exported tail begins, so that tail piece goes."""
    place.session("chat", TOKENS)
    keeper()
    said: list[int] = []

    def goes_on(*given: object) -> tuple[int, int]:
        if not said:
            lane, tokens = place.world.lane(), np.concatenate([TOKENS, some_tokens(2 * BLOCK, seed=8)])
            lane.append_close(sequence("stream-chat"), 1, len(TOKENS))
            place.world.capture(lane, "turn", tokens, [56], start=40)
            lane.close()
            keeper_client.drain(place.paths.keeper_socket, sync=True)
        said.append(1)
        return exported.export_session(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer, "export_session", goes_on)
    row = export(place, tmp_path / "f")
    assert len(said) == 2 and (row["position"], row["tokens"]) == (40, 43)
    assert exported.check_exported(tmp_path / "f").manifest.position == 40


def test_a_place_that_no_file_can_have_is_said_before_anything_is_written(place: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    assert "is a directory" in place.refused(1, "export", "chat", "-o", str(tmp_path), "--yes")
    assert "is a directory" in place.refused(1, "export", "chat", "-o", "", "--yes")
    assert "no directory" in place.refused(1, "export", "chat", "-o", str(tmp_path / "none" / "f"))
    assert not list(tmp_path.glob("*.part"))


def test_on_a_full_disk_what_is_stored_can_be_taken_elsewhere_and_removed(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = some_tokens(3 * BLOCK, seed=4)
    place.session("chat", TOKENS)
    place.session("late", other, drained=False)
    monkeypatch.setattr(store_file, "FREE_DISK_RESERVE_BYTES", 1 << 60)
    said = place.run("export", "chat", "-o", str(tmp_path / "f"))
    assert said.exit_code == 0 and "left out: the disk is full" in said.stderr
    assert place.run("backup", str(tmp_path / "backup")).exit_code == 0
    assert "disk is full" in place.refused(1, "recover")
    place.json("sessions", "rm", "chat", "--yes")
    assert place.world.restorable(TOKENS) == 0
    assert place.run("compact").exit_code == place.run("gc").exit_code == 0
    monkeypatch.undo()
    assert place.json("recover")["records"] > 0
    assert place.world.restorable(other) == len(other) and place.json("verify")["ok"]


def test_no_room_for_a_session_is_not_called_damage(
    place: Place, target: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.session("chat", TOKENS)
    export(place, tmp_path / "f")

    def full(*given: object) -> None:
        error = lmdb.Error("mdb_txn_commit: No space left on device")
        error.code = errno.ENOSPC
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(SessionFile, "put", full)
        assert "can't be written" in target.refused(1, "import", str(tmp_path / "f"))
    target.json("import", str(tmp_path / "f"))


# ---------------------------------------------------------------- sessions without a gateway


def test_a_session_is_removed_from_the_disk(place: Place) -> None:
    place.session("chat", TOKENS)
    place.session("other", some_tokens(3 * BLOCK, seed=2))
    assert place.json("sessions", "rm", "chat", "--dry-run")["data"][0]["tokens"] == 43
    assert place.json("sessions", "rm", "chat", "--yes")["data"][0]["forgotten"]
    assert place.world.restorable(TOKENS) == 0
    assert [row["id"] for row in place.json("sessions", "ls")["data"]] == ["other"]
    assert "no session" in place.refused(1, "sessions", "show", "chat")
    assert place.run("sessions", "park", "other").exit_code == 4, "nothing runs"


# ---------------------------------------------------------------- backup and restore


def test_a_backup_brings_everything_back(place: Place, target: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS, drained=False)
    place.paths.config.write_text("[host]\nengines = 3\n")
    place.paths.journal("s1").write_bytes(b"journal")
    adapter = place.paths.data_dir / "adapters" / "00" / "adapter_config.json"
    adapter.parent.mkdir(parents=True)
    adapter.write_text("{}")
    made = place.json("backup", str(tmp_path / "backup"))
    assert made["files"] == 5
    assert place.json("verify", str(tmp_path / "backup"))["ok"]
    put = target.json("restore", str(tmp_path / "backup"))
    assert put["replaces"] == []
    assert target.world.restorable(TOKENS) == 43
    assert (target.paths.data_dir / "adapters" / "00" / "adapter_config.json").read_text() == "{}"
    assert target.json("sessions", "show", "chat")["tokens"] == 43
    assert target.paths.config.read_text() == "[host]\nengines = 3\n"
    assert target.json("verify", code=6)["findings"][0]["kind"] == "journal", "what was damaged stays as it was"


def test_backup_and_restore_never_write_over_anything(place: Place, target: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    place.json("backup", str(tmp_path / "backup"))
    assert "exists already" in place.refused(5, "backup", str(tmp_path / "backup"))
    target.session("mine", some_tokens(2 * BLOCK, seed=5))
    assert "--replace" in target.refused(5, "restore", str(tmp_path / "backup"))
    assert "--yes" in target.refused(5, "restore", str(tmp_path / "backup"), "--replace")
    assert target.json("restore", str(tmp_path / "backup"), "--replace", "--dry-run")["replaces"] == [
        "store",
        "sessions",
    ]
    target.json("restore", str(tmp_path / "backup"), "--replace", "--yes")
    assert (target.paths.data_dir / "replaced-0" / "store" / "data.mdb").exists()
    assert target.world.restorable(TOKENS) == 43


@pytest.mark.parametrize("name", ["store/data.mdb", "sessions/data.mdb", "MANIFEST.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_backup_is_found_and_not_restored(
    place: Place, target: Place, tmp_path: Path, name: str, how: str
) -> None:
    place.session("chat", TOKENS)
    place.json("backup", str(tmp_path / "backup"))
    path = tmp_path / "backup" / name
    if how == "flip":
        flip(path, path.stat().st_size // 2)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    assert place.run("verify", str(tmp_path / "backup"), "--json").exit_code == 6
    before = sorted(target.paths.data_dir.rglob("data.mdb"))
    assert target.run("restore", str(tmp_path / "backup")).exit_code == 6
    assert [path for path in sorted(target.paths.data_dir.rglob("data.mdb")) if ".restore" not in path.parts] == before


def test_an_interrupted_restore_goes_on(place: Place, target: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    place.json("backup", str(tmp_path / "backup"))
    half = target.paths.data_dir / ".restore" / "store" / "data.mdb"
    half.parent.mkdir(parents=True)
    half.write_bytes((tmp_path / "backup" / "store" / "data.mdb").read_bytes()[:5000])
    target.json("restore", str(tmp_path / "backup"))
    assert target.world.restorable(TOKENS) == 43
    assert not (target.paths.data_dir / ".restore").exists()


@pytest.mark.parametrize("moves", range(1, 4))
def test_a_restore_that_is_interrupted_while_its_parts_are_moved_in_goes_on(
    place: Place, target: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    place.session("chat", TOKENS)
    place.json("backup", str(tmp_path / "backup"))
    target.session("mine", some_tokens(2 * BLOCK, seed=5))
    note, left = backups._note_moved, [moves]

    def interrupted(*given: object) -> None:
        note(*given)  # type: ignore[arg-type]
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(backups, "_note_moved", interrupted)
        arguments = ("restore", str(tmp_path / "backup"), "--replace", "--yes")
        assert target.run(*arguments).exit_code == 130
    said = load({"data_dir": str(target.paths.data_dir), "lane_dir": str(target.paths.lane_dir)})
    with pytest.raises(StateRefused, match="run the same `concordia restore` again"):
        refuse_early(said)
    target.json("restore", str(tmp_path / "backup"))
    assert target.world.restorable(TOKENS) == 43 and target.json("verify")["ok"]
    assert [row["id"] for row in target.json("sessions", "ls")["data"]] == ["chat"]
    assert not (target.paths.data_dir / ".restore").exists()
    kept = [path.name for path in target.paths.data_dir.glob("replaced-*/store/data.mdb")]
    assert kept == ["data.mdb"], "what was there is kept once, and what was restored isn't beside it"


def test_a_store_that_was_cut_is_not_backed_up_and_what_helps_is_said(place: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    file = place.paths.store / "data.mdb"
    good = file.read_bytes()
    file.write_bytes(good[: len(good) * 2 // 3])
    assert "concordia repair" in place.refused(1, "backup", str(tmp_path / "backup"))
    assert "concordia repair" in place.refused(1, "export", "chat", "-o", str(tmp_path / "f"))
    file.write_bytes(good)
    place.json("backup", str(tmp_path / "backup"))


def test_a_backup_that_was_interrupted_is_no_backup(place: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    (tmp_path / "backup.part" / "store").mkdir(parents=True)
    assert place.run("restore", str(tmp_path / "backup.part")).exit_code == 6
    place.json("backup", str(tmp_path / "backup"))
    assert not (tmp_path / "backup.part").exists()
    assert json.loads((tmp_path / "backup" / "MANIFEST.json").read_text())["format"] == "concordia-backup"


def test_two_that_write_the_same_file_or_backup_do_not_write_into_each_other(place: Place, tmp_path: Path) -> None:
    place.session("chat", TOKENS)
    file, backup = tmp_path / "f", tmp_path / "backup"
    parts = [tmp_path / "f.part", tmp_path / "backup.part" / "half"]
    parts[1].parent.mkdir()
    for part in parts:
        part.write_text("half")
    for locked in (tmp_path / "f.part", tmp_path / "backup.part" / backups.LOCK):
        with open(locked, "a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            command = ("export", "chat", "-o", str(file)) if locked == parts[0] else ("backup", str(backup))
            assert "another process is writing it" in place.refused(5, *command)
    assert [part.read_text() for part in parts] == ["half", "half"], "nothing of the other's is touched"
    export(place, file)
    exported.check_exported(file)
    place.json("backup", str(backup))
    assert {path.name for path in backup.iterdir()} == {"MANIFEST.json", "journal", "sessions", "store"}


# ---------------------------------------------------------------- doctor


def test_doctor_measures_this_machine(place: Place) -> None:
    found = place.json("doctor")
    checks = {check["name"]: check for check in found["checks"]}
    assert found["ok"] and "ms for 4 KB" in checks["disk sync"]["found"]
    assert set(checks) >= {"memlock", "shared memory", "DAX", "disk sync", "CUDA", "kernel"}
    assert list(place.paths.data_dir.glob(".concordia-doctor*")) == []


def test_doctor_says_what_to_change(place: Place) -> None:
    place.paths.config.write_text("[tiers]\nlane_bytes = '100TiB'\n[engine]\ndevice = 'cuda'\n")
    said = place.run("doctor")
    assert said.exit_code == 1
    assert "lower tiers.lane_bytes" in " ".join(said.stdout.split())
    assert "shared memory" in said.stderr


@pytest.mark.process
def test_backup_beside_a_keeper_is_made_by_it_and_is_whole(
    place: Place, target: Place, keeper: Callable[[], None], tmp_path: Path
) -> None:
    place.session("chat", TOKENS, drained=False)
    keeper()
    made = place.json("backup", str(tmp_path / "backup"), "--limit-mb-s", "1000")
    assert made["checked"] and made["files"] == 2
    stats = keeper_client.stats(place.paths.keeper_socket)
    assert stats["snapshots"] == []
    assert place.world.restorable(TOKENS) == 43, "what is being served is as it was"
    target.json("restore", str(tmp_path / "backup"))
    assert target.world.restorable(TOKENS) == 43
    assert target.json("verify")["ok"]


@pytest.mark.process
def test_restore_into_a_directory_that_is_served_is_refused_and_changes_nothing(
    place: Place, target: Place, keeper: Callable[[], None], tmp_path: Path
) -> None:
    """By a keeper, by a host agent that has none just now, and by a `serve` that has just begun."""
    place.session("chat", TOKENS)
    target.session("mine", some_tokens(2 * BLOCK, seed=5))
    target.json("backup", str(tmp_path / "backup"))
    arguments = ("restore", str(tmp_path / "backup"), "--replace", "--yes")
    for lock in (place.paths.host_lock, place.paths.serve_lock):
        with open(lock, "a+") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert "being served" in place.refused(5, *arguments)
    keeper()
    assert "being served" in place.refused(5, *arguments)
    assert place.world.restorable(TOKENS) == 43
    assert not list(place.paths.data_dir.glob("replaced-*")) and not (place.paths.data_dir / ".restore").exists()


def test_rate_waits_for_what_is_ahead_of_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], list[float]()
    monkeypatch.setattr(backups.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(backups.time, "sleep", slept.append)
    rate = Rate(2.0)
    rate.take(1_000_000)
    now[0] += 10
    rate.take(1_000_000)
    assert slept == [pytest.approx(0.5), 0.0]
