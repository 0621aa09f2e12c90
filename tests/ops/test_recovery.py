"""verify, recover, repair and inspect as an operator meets them: exit codes, JSON, seeded damage, done twice."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest

from engine.messages import Sampling, pack_tokens
from gateway import journal
from gateway.sessions import SessionFile, SessionRecord
from tests.ops.conftest import TOKENS, Place
from tests.tiers.sample import BLOCK, append_rows, flip, rows, sequence, some_tokens
from tiers import store_file
from tiers.free_list import free_list_problem
from tiers.lane_format import data_offset
from tiers.lane_reader import LaneReader
from tiers.offline import keeper_lock
from tiers.repair import ASIDE
from tiers.salvage import salvage


def damage(place: Place, wanted: bytes, databases: tuple[bytes, ...] = (b"blocks", b"tails")) -> None:
    """Flip one bit of the stored value that holds these bytes."""
    environment = lmdb.open(str(place.paths.store), max_dbs=32, map_size=place.world.settings.store_map_bytes)
    found = 0
    for name in databases:
        database = environment.open_db(name)
        with environment.begin(db=database, write=True) as transaction:
            for key, value in list(transaction.cursor()):
                if (at := value.find(wanted)) >= 0:
                    transaction.put(key, value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :])
                    found += 1
    environment.close()
    assert found == 1


def damage_block(place: Place, number: int, tokens: np.ndarray = TOKENS) -> None:
    start = number * BLOCK
    damage(place, rows(start, tokens[start : start + BLOCK]).tobytes())


# ---------------------------------------------------------------- recover


def test_recover_brings_the_lanes_to_the_disk_and_a_second_time_finds_nothing(place: Place) -> None:
    place.session("chat", TOKENS, cuts=[10, 43], drained=False)
    found = place.json("recover")
    assert (found["by"], found["records"], found["lanes"]) == ("command", 3, {"e0": 3})
    assert found["sessions"] == [{"session": "chat", "stream": "stream-chat", "durable": 43}]
    assert place.world.restorable(TOKENS) == 43
    again = place.json("recover")
    assert (again["records"], again["lanes"], again["sessions"]) == (0, {}, [])
    assert "nothing waits" in place.run("recover").stdout


def test_recover_passes_over_a_damaged_record_and_says_so(place: Place) -> None:
    place.session("chat", TOKENS, cuts=[10, 20, 43], drained=False)
    header = LaneReader.open(place.paths.lane("e0")).records(0)[2]
    flip(place.paths.lane("e0"), data_offset(64) + header.payload_offset + 70)
    found = place.json("recover")
    assert (found["bad_records"], found["unusable_records"]) == (1, 1), "the rows after it lean on it"
    assert place.world.restorable(TOKENS) == 10


def test_recover_does_not_take_a_live_keepers_place(place: Place) -> None:
    place.session("chat", TOKENS)
    with open(keeper_lock(place.paths), "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "keeper owns" in place.refused(5, "recover")
    assert place.run("recover").exit_code == 0


def test_recover_of_nothing_is_refused(place: Place) -> None:
    shutil.rmtree(place.paths.data_dir)
    assert "no data directory" in place.refused(5, "recover")


# ---------------------------------------------------------------- verify


def test_verify_says_what_it_read(place: Place) -> None:
    place.session("chat", TOKENS)
    found = place.json("verify", "--limit-mb-s", "1000")
    assert found["ok"] and found["checked"]["blocks"] == 5 and found["findings"] == []
    assert "all whole" in place.run("verify").stdout


def test_verify_names_the_damage(place: Place) -> None:
    place.session("chat", TOKENS)
    damage_block(place, 2)
    found = place.json("verify", code=6)
    assert found["findings"][0]["affected"][0] | {"stream": ""} == {
        "session": "chat", "stream": "", "token_start": 16, "token_end": 24,
    }  # fmt: skip
    assert "concordia repair" in place.refused(6, "verify")


def test_verify_finds_a_damaged_journal(place: Place) -> None:
    place.session("chat", TOKENS)
    records = [journal.Placed(1, "e0", 1), journal.Tokens(3, b"\1\0\0\0"), journal.End("stop", "stop", 1.0)]
    path = place.paths.journal("s1")
    path.write_bytes(b"".join(journal.encode(record) for record in records) + journal.CLOSED)
    assert place.json("verify")["checked"]["journals"] == 1
    flip(path, 40)
    assert [row["kind"] for row in place.json("verify", code=6)["findings"]] == ["journal"]


def test_a_journal_that_cannot_be_read_is_named_and_keeps_nothing_from_being_saved(
    place: Place, tmp_path: Path
) -> None:
    place.session("chat", TOKENS)
    place.paths.journal("s1").mkdir()  # reading it is an OSError, as on a bad sector
    (found,) = place.json("verify", code=6)["findings"]
    assert (found["kind"], found["key"]) == ("journal", "s1.journal") and "can't be read" in found["reason"]
    assert "s1.journal: can't be read: Is a directory, nothing is changed" in place.run("repair").stdout
    file = SessionFile(place.paths.sessions, writable=True)
    file.put(SessionRecord("chat", 1.0, 2.0, turns=1, token_count=BLOCK, streams=["s1"]), TOKENS[:BLOCK].tobytes())
    file.close()
    assert place.json("sessions", "ls")["data"][0]["tokens"] == BLOCK
    made = place.run("backup", str(tmp_path / "backup"))
    assert made.exit_code == 0 and "backup.journal_left_out" in made.stderr, (made.stderr, made.exception)
    assert place.json("verify", str(tmp_path / "backup"))["ok"]


def test_a_session_that_was_broken_off_shows_what_its_journal_holds(place: Place) -> None:
    prompt, answered = TOKENS[: 3 * BLOCK], TOKENS[3 * BLOCK :]
    place.session("chat", TOKENS[:BLOCK])
    place.world.capture(place.world.lane(), "s2", TOKENS, [len(TOKENS)], session="chat")
    sampling = Sampling(temperature=0.0, seed=1)
    spec = journal.StreamSpec("s2", "chat", 1, "m", pack_tokens(prompt.tolist()), sampling, [], [], 999, session="chat")
    told = [journal.Placed(1, "e0", 1), journal.Tokens(len(prompt), pack_tokens(answered.tolist()))]
    path = place.paths.journal("s2")
    path.write_bytes(b"".join(map(journal.encode, [spec, *told])) + b"torn")
    file = SessionFile(place.paths.sessions, writable=True)
    file.put(SessionRecord("chat", 1.0, 2.0, turns=2, token_count=BLOCK, streams=["s1", "s2"]), b"")
    file.close()
    (row,) = place.json("sessions", "ls")["data"]
    assert (row["state"], row["tokens"], row["live_streams"]) == ("broken off", len(TOKENS), ["s2"])
    assert row["captured"] == row["durable"] == BLOCK, "the rest waits in the lane"
    place.json("recover")
    assert place.json("sessions", "show", "chat")["durable"] == len(TOKENS)
    end = journal.encode(journal.End("stop", "stop", 1.0))
    path.write_bytes(path.read_bytes()[: -len(b"torn")] + end)
    assert place.json("sessions", "show", "chat")["state"] == "parked", "it has an end"
    path.write_bytes(path.read_bytes()[: -len(end)])
    place.json("sessions", "rm", "chat", "--yes")
    assert place.world.restorable(TOKENS) == 0, "what the answer had stored is gone, too"


@pytest.mark.parametrize("database", ["records", "tokens"])
def test_verify_and_export_say_what_becomes_of_a_damaged_value_of_the_table_of_sessions(
    place: Place, database: str, tmp_path: Path
) -> None:
    place.session("chat", TOKENS)
    with lmdb.open(str(place.paths.sessions), max_dbs=8) as environment:
        with environment.begin(write=True, db=environment.open_db(database.encode())) as transaction:
            value = transaction.get(b"chat")
            transaction.put(b"chat", value[:-1] + bytes([value[-1] ^ 1]))
    result = place.run("verify")
    assert result.exit_code == 6 and "    session chat\n" in result.stdout, result.stdout
    assert "does not touch DATA/sessions" in result.stderr
    assert "nothing else is affected" not in result.stderr and "takes it out" not in result.stderr
    assert "nothing is damaged in store and lanes" in place.run("repair", "--yes").stdout
    said = place.refused(6, "export", "chat", "-o", str(tmp_path / "f"))
    assert ("'chat'. Only this value" if database == "records" else f"{len(TOKENS)} tokens of session 'chat'") in said
    assert "move that directory away" not in said and "first turn" not in said


def test_verify_of_nothing_says_where_it_looked(place: Place) -> None:
    assert "--data-dir" in place.refused(1, "verify")


# ---------------------------------------------------------------- repair


def test_repair_finds_nothing(place: Place) -> None:
    place.session("chat", TOKENS)
    assert place.json("repair")["dropped"] == 0
    assert "nothing is damaged" in place.run("repair").stdout


def test_repair_drops_only_what_is_bad_and_says_what_it_costs(place: Place) -> None:
    other = some_tokens(4 * BLOCK, seed=2)
    place.session("chat", TOKENS)
    place.session("other", other)
    damage_block(place, 2)
    would = place.json("repair", "--dry-run")
    assert would["recompute"] == [{"session": "chat", "stream": "stream-chat", "token_start": 16, "token_end": 43}]
    assert place.run("verify").exit_code == 6, "a dry run changes nothing"
    assert "--yes" in place.refused(5, "repair")
    done = place.json("repair", "--yes")
    assert (done["dropped"], done["recompute"]) == (1, would["recompute"])
    (kept,) = done["kept_aside"]
    assert Path(kept).parent == place.paths.store / ASIDE and Path(kept).suffix == ".broken"
    assert len(Path(kept).read_bytes()) > BLOCK
    assert place.json("verify")["ok"]
    assert place.world.restorable(TOKENS) == 16
    assert place.world.restorable(other) == len(other)
    assert place.json("repair", "--yes")["dropped"] == 0


def test_repair_drops_a_bad_tail_piece(place: Place) -> None:
    place.session("chat", TOKENS)
    damage(place, rows(40, TOKENS[40:43]).tobytes())
    done = place.json("repair", "--yes")
    assert [(row["token_start"], row["token_end"]) for row in done["recompute"]] == [(40, 43)]
    assert place.json("verify")["ok"]
    assert place.world.restorable(TOKENS) == 40


def test_repair_leaves_a_turn_alone_whose_end_the_next_one_has_taken_over(place: Place) -> None:
    other = some_tokens(4 * BLOCK, seed=2)
    place.session("other", other)
    lane = place.world.lane()
    place.world.capture(lane, "first", TOKENS[:20], [20], session="chat")
    lane.append_close(sequence("first"), 1, 20)
    place.world.drain()
    place.world.capture(lane, "second", TOKENS, [43], start=16, session="chat")
    lane.close()
    place.world.drain()
    damage_block(place, 1, other)
    assert [row["session"] for row in place.json("repair", "--yes")["recompute"]] == ["other"]
    assert place.world.restorable(TOKENS) == 43


def test_repair_keeps_a_lanes_damaged_record_aside_and_drains_the_rest(place: Place) -> None:
    place.session("chat", TOKENS, cuts=[10, 20, 43], drained=False)
    header = LaneReader.open(place.paths.lane("e0")).records(0)[2]
    flip(place.paths.lane("e0"), data_offset(64) + header.payload_offset + 70)
    place.world.lane().close()
    place.paths.store.mkdir(exist_ok=True)
    assert place.run("repair", "--dry-run").exit_code in (0, 1)
    done = place.json("repair", "--yes")
    assert [(row["token_start"], row["token_end"]) for row in done["recompute"]] == [(10, 43)]
    assert len(done["kept_aside"]) == 1
    assert place.json("verify")["ok"]
    assert place.world.restorable(TOKENS) == 10


@pytest.mark.parametrize("seed", range(6))
def test_repair_of_seeded_damage_leaves_a_clean_store(place: Place, seed: int) -> None:
    draw = np.random.default_rng(seed)
    conversations = [some_tokens(int(draw.integers(2 * BLOCK, 6 * BLOCK)), seed=10 + n) for n in range(4)]
    for number, tokens in enumerate(conversations):
        place.session(f"s{number}", tokens)
    broken: dict[int, int] = {}
    for number in draw.choice(4, size=2, replace=False):
        tokens = conversations[number]
        broken[int(number)] = block = int(draw.integers(0, len(tokens) // BLOCK))
        damage_block(place, block, tokens)
    place.json("verify", code=6)
    done = place.json("repair", "--yes")
    assert done["dropped"] == 2
    assert place.json("verify")["ok"]
    for number, tokens in enumerate(conversations):
        expected = broken[number] * BLOCK if number in broken else len(tokens)
        assert place.world.restorable(tokens) == expected
    named = {(row["session"], row["token_start"]) for row in done["recompute"]}
    assert named == {(f"s{number}", block * BLOCK) for number, block in broken.items()}


@pytest.mark.parametrize("at, kept", [(8, 43), (16, 0)])
def test_a_damaged_lane_header_is_found_and_made_good_or_set_aside(place: Place, at: int, kept: int) -> None:
    """The version; or the record count, of a lane that has another size than the settings say."""
    place.session("other", some_tokens(2 * BLOCK, seed=3))
    place.session("chat", TOKENS, cuts=[10, 43], drained=False)
    flip(place.paths.lane("e0"), at)
    assert [row["kind"] for row in place.json("verify", code=6)["findings"]] == ["lane"]
    assert place.json("repair", "--dry-run")["lanes"] == {}
    done = place.json("repair", "--yes")
    assert ("made good" if kept else "e0.lane.broken") in done["lanes"]["e0.lane"]
    assert place.json("verify")["ok"] and place.world.restorable(TOKENS) == kept
    assert place.world.restorable(some_tokens(2 * BLOCK, seed=3)) == 2 * BLOCK


# ---------------------------------------------------------------- inspect


def test_inspect_shows_a_lane_record_by_record(place: Place) -> None:
    place.session("chat", TOKENS, cuts=[10, 43], drained=False)
    found = place.json("inspect", "e0")
    assert (found["lane"]["tail"], found["lane"]["head"]) == (0, 3)
    assert [(row["type"], row["token_end"], row["state"]) for row in found["records"]] == [
        ("OPEN", 0, "ok"), ("ROWS", 10, "ok"), ("ROWS", 43, "ok"),
    ]  # fmt: skip
    assert {row["session"] for row in found["records"]} == {"chat"}
    assert [row["number"] for row in place.json("inspect", "e0", "--from", "1", "--limit", "1")["records"]] == [1]
    assert "ROWS" in place.run("inspect", str(place.paths.lane("e0"))).stdout
    place.json("recover")
    assert place.json("inspect", "e0")["records"] == []
    assert [row["freed"] for row in place.json("inspect", "e0", "--freed")["records"]] == [True] * 3


def test_inspect_marks_a_bad_record_and_goes_on(place: Place) -> None:
    place.session("chat", TOKENS, cuts=[10, 43], drained=False)
    flip(place.paths.lane("e0"), data_offset(64) + LaneReader.open(place.paths.lane("e0")).records(0)[1].payload_offset)
    found = place.json("inspect", "e0", code=6)
    assert [row["state"][:3] for row in found["records"]] == ["ok", "bad", "ok"]


def test_inspect_shows_a_session_block_by_block(place: Place) -> None:
    place.session("chat", TOKENS)
    (sequence,) = place.json("inspect", "chat")["sequences"]
    assert sequence["position"] == 43
    spans = [(row["kind"], row["token_start"], row["token_end"]) for row in sequence["stored"]]
    assert spans == [*(("block", n * BLOCK, (n + 1) * BLOCK) for n in range(5)), ("tail", 40, 43)]
    assert place.json("inspect", sequence["sequence"])["sequences"][0]["sequence"] == sequence["sequence"]
    assert place.run("inspect", "stream-chat").exit_code == 0
    damage_block(place, 1)
    (sequence,) = place.json("inspect", "chat", code=6)["sequences"]
    assert [row["state"].startswith("bad") for row in sequence["stored"]] == [False, True, *[False] * 4]


def test_inspect_of_what_is_not_there(place: Place) -> None:
    assert "no lane, file, session" in place.refused(1, "inspect", "nothing")
    lane = place.world.lane()
    append_rows(lane, "x", 0, some_tokens(2))
    lane.close()
    flip(place.paths.lane("e0"), 3)
    place.run("inspect", "e0")
    assert place.run("inspect", "e0").exit_code == 6


# ---------------------------------------------------------------- beside a running keeper


@pytest.mark.process
def test_a_running_keeper_recovers_and_repairs_on_request(place: Place, keeper: Callable[[], None]) -> None:
    place.session("chat", TOKENS)
    damage_block(place, 2)
    keeper()
    assert place.json("recover")["by"] == "keeper"
    assert [row["kind"] for row in place.json("verify", code=6)["findings"]] == ["block"]
    done = place.json("repair", "--yes")
    assert (done["dropped"], len(done["kept_aside"])) == (1, 1)
    assert [(row["session"], row["token_start"], row["token_end"]) for row in done["recompute"]] == [("chat", 16, 43)]
    assert place.json("verify")["ok"]
    lane = place.world.lane()
    place.world.capture(lane, "again", TOKENS, [43], session="chat")
    lane.close()
    assert place.json("recover")["by"] == "keeper"
    assert place.world.restorable(TOKENS) == 43, "what was dropped is stored again when it is computed again"


@pytest.mark.process
def test_what_a_command_may_not_do_beside_a_keeper_is_refused(
    place: Place, keeper: Callable[[], None], tmp_path: Path
) -> None:
    place.session("chat", TOKENS)
    keeper()
    assert place.run("backup", str(tmp_path / "backup")).exit_code == 0
    assert "served" in place.refused(5, "restore", str(tmp_path / "backup"), "--replace", "--yes")
    assert place.run("export", "chat", "-o", str(tmp_path / "f")).exit_code == 0
    said = place.refused(4, "import", str(tmp_path / "f"), "--as", "copy")
    assert "needs the gateway" in said, "the gateway keeps sessions in memory"
    assert place.refused(5, "sessions", "rm", "chat", "--yes")


def test_a_damaged_block_of_a_compacted_session_shortens_its_base(place: Place) -> None:
    from tests.ops.test_compaction import close

    other = np.concatenate([TOKENS[:16], some_tokens(3 * BLOCK, seed=4)])
    for name, tokens in (("chat", TOKENS), ("other", other)):
        place.session(name, tokens)
        close(place, name, len(tokens))
    assert place.json("compact")["counts"]["folded"] == 2
    damage_block(place, 3)
    (finding,) = place.json("verify", code=6)["findings"]
    assert [(part["session"], part["token_start"]) for part in finding["affected"]] == [("chat", 24)]
    would = place.json("repair", "--dry-run")["recompute"]
    done = place.json("repair", "--yes")
    assert [(row["session"], row["token_start"], row["token_end"]) for row in done["recompute"]] == [("chat", 24, 43)]
    assert would == done["recompute"]
    assert place.json("verify")["ok"]
    (shown,) = place.json("inspect", "chat")["sequences"]
    assert (shown["compacted"], shown["position"]) == (True, 24)
    place.json("gc")
    assert (place.world.restorable(TOKENS), place.world.restorable(other)) == (24, len(other))


def damage_base(place: Place) -> None:
    """Cut the only base short, so that it says nothing any more."""
    environment = lmdb.open(str(place.paths.store), max_dbs=32, map_size=place.world.settings.store_map_bytes)
    bases = environment.open_db(b"bases")
    with environment.begin(db=bases, write=True) as transaction:
        ((key, value),) = list(transaction.cursor())
        transaction.put(key, value[:40])
    environment.close()


def test_a_damaged_base_is_made_again_also_on_a_full_disk(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.ops.test_compaction import close

    place.session("chat", TOKENS)
    close(place, "chat", len(TOKENS))
    place.json("compact")
    damage_base(place)
    monkeypatch.setattr(store_file, "FREE_DISK_RESERVE_BYTES", 1 << 60)
    assert len(place.json("repair", "--yes")["rebuilt"]) == 1
    assert place.json("verify")["ok"] and place.world.restorable(TOKENS) == len(TOKENS)


@pytest.mark.parametrize("known", [True, False], ids=["its list is known", "nobody knows it"])
def test_a_damaged_base_is_made_again_or_dropped_and_its_blocks_stay(place: Place, known: bool) -> None:
    from tests.ops.test_compaction import close

    place.session("chat", TOKENS)
    close(place, "chat", len(TOKENS))
    place.json("compact")
    damage_base(place)
    if not known:
        place.record("chat", TOKENS[:0])
    found = place.json("verify", code=6)
    assert [row["kind"] for row in found["findings"]] == ["base"] and found["rebuilt"] == []
    done = place.json("repair", "--yes")
    assert (done["dropped"], len(done["rebuilt"]), len(done["kept_aside"])) == ((0, 1, 1) if known else (1, 0, 1))
    assert place.json("verify")["ok"]
    assert place.world.restorable(TOKENS) == 43, "it is found by its content, until it is collected"
    assert place.json("gc", "--grace-s", "0")["counts"].get("freed_blocks", 0) == (0 if known else 5)


@pytest.mark.process
def test_a_running_keeper_makes_a_base_again_that_verify_has_found(place: Place, keeper: Callable[[], None]) -> None:
    from tests.ops.test_compaction import close

    place.session("chat", TOKENS)
    close(place, "chat", len(TOKENS))
    place.json("compact")
    damage(place, TOKENS[8:16].astype("<i4").tobytes(), (b"bases",))
    keeper()
    found = place.json("verify", code=6)
    assert [row["key"] for row in found["findings"]] == found["rebuilt"] and len(found["rebuilt"]) == 1
    assert place.json("verify")["ok"]


# ---------------------------------------------------------------- a store whose file itself is damaged


def filled(place: Place) -> list[np.ndarray]:
    conversations = [some_tokens(6 * BLOCK + n, seed=40 + n) for n in range(12)]
    for number, tokens in enumerate(conversations):
        place.session(f"s{number}", tokens)
    return conversations


@pytest.mark.process
@pytest.mark.parametrize("share", [0.95, 0.5, 0.0])
def test_a_cut_store_is_saved_as_far_as_it_can_be_read(place: Place, share: float) -> None:
    conversations = filled(place)
    file = place.paths.store / "data.mdb"
    size = int(file.stat().st_size * share)
    with open(file, "r+b") as store:
        store.truncate(size)
    assert place.run("verify").exit_code in (0, 6)
    assert place.run("repair", "--dry-run").exit_code in (0, 6)
    done = place.json("repair", "--yes")
    assert place.json("verify")["ok"]
    restorable = [place.world.restorable(tokens) for tokens in conversations]
    known = {row["session"] for row in done["recompute"]}
    for number, position in enumerate(restorable):
        assert position <= len(conversations[number])
        assert position == len(conversations[number]) or f"s{number}" in known or done["kept_aside"]
    if share >= 0.95:
        assert sum(restorable) > 0
    place.session("after", TOKENS)
    assert place.world.restorable(TOKENS) == len(TOKENS), "it goes on"


PAGE = 4096
ROOT_OF_NAMES = 128  # in a root page: where the tree of the databases' names begins


@pytest.mark.process
@pytest.mark.parametrize(
    "offsets",
    [[16], [PAGE + 16], [20], [40], [ROOT_OF_NAMES], [PAGE + ROOT_OF_NAMES], [16, PAGE + 16]],
    ids=["magic", "the other one's", "version", "page size", "root", "the other one's root", "both magics"],
)
def test_a_damaged_root_page_costs_no_more_than_the_last_commit(place: Place, offsets: list[int]) -> None:
    for number, tokens in enumerate(filled_few := [some_tokens(3 * BLOCK + n, seed=40 + n) for n in range(3)]):
        place.session(f"s{number}", tokens)
    file = place.paths.store / "data.mdb"
    for at in offsets:
        flip(file, at)
    damaged = file.read_bytes()
    walkable = place.run("verify").exit_code == 0  # a root that isn't the newest is never looked at
    done = place.json("repair", "--yes")
    assert place.json("verify")["ok"]
    assert place.json("repair", "--yes")["saved"] is None
    restorable = [place.world.restorable(tokens) for tokens in filled_few]
    assert restorable[:2] == [len(tokens) for tokens in filled_few[:2]]
    if walkable:
        assert done["saved"] is None
        return
    saved = done["saved"]
    assert saved["root"] and not saved["no_root"] and not saved["lost"] and not saved["cut_short"]
    assert restorable[2] == len(filled_few[2]) or "last commit" in saved["root"]
    assert Path(saved["kept_aside"]).read_bytes() == damaged, "the old file is as it was"
    assert not (place.paths.store / "salvage-root").exists()


@pytest.mark.process
def test_a_store_without_a_readable_root_is_said_to_be_lost(place: Place) -> None:
    place.session("chat", TOKENS)
    file = place.paths.store / "data.mdb"
    data = bytearray(file.read_bytes())
    data[: 2 * PAGE] = bytes(2 * PAGE)
    file.write_bytes(data)
    said = place.run("repair", "--yes")
    assert said.exit_code == 0 and "nothing was saved" in said.stdout
    assert "lost: none" not in said.stdout and "nothing is damaged" not in said.stdout
    assert place.world.restorable(TOKENS) == 0


@pytest.mark.process
@pytest.mark.parametrize("seed", range(3))
def test_flipped_pages_of_the_store_never_end_in_wrong_rows(place: Place, seed: int) -> None:
    conversations = filled(place)
    file = place.paths.store / "data.mdb"
    draw = np.random.default_rng(seed)
    data = bytearray(file.read_bytes())
    for page in draw.choice(np.arange(2, len(data) // 4096), size=3, replace=False):
        data[page * 4096 : page * 4096 + 64] = draw.bytes(64)
    file.write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-m", "ops.cli", "repair", "--yes", "--json", "--data-dir", str(place.paths.data_dir),
         "--lane-dir", str(place.paths.lane_dir)],
        capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert place.json("verify")["ok"]
    for tokens in conversations:
        place.world.restorable(tokens)  # compares every row


@pytest.mark.process
@pytest.mark.parametrize("part", ["count", "page"])
def test_a_damaged_list_of_free_pages_is_found_and_repaired(place: Place, part: str) -> None:
    """Readers don't look at it; whoever writes the store dies of it."""
    conversations = [some_tokens(4 * BLOCK, seed=30 + n) for n in range(6)]
    for number, tokens in enumerate(conversations):
        place.session(f"s{number}", tokens)
    for number in range(4):
        place.json("sessions", "rm", f"s{number}", "--yes")
    data = place.paths.store / "data.mdb"
    assert free_list_problem(data) == ""
    image = data.read_bytes()
    _, root = max(
        struct.unpack_from("<Q", image, at + 144) + struct.unpack_from("<Q", image, at + 80) for at in (0, 4096)
    )
    node = root * 4096 + int.from_bytes(image[root * 4096 + 16 : root * 4096 + 18], "little")
    flip(data, node + 16 + (1 if part == "count" else 8 + 2))
    assert free_list_problem(data)
    assert "concordia repair" in place.refused(1, "compact")
    assert place.world.restorable(conversations[5]) == 32
    assert "repair" in place.refused(6, "verify")
    assert place.json("repair", "--yes")["saved"]["lost"] == {}
    assert place.json("verify")["ok"] and place.run("compact").exit_code == 0
    assert [place.world.restorable(tokens) for tokens in conversations[4:]] == [32, 32]


def test_a_repair_that_is_killed_before_its_new_file_is_in_place_leaves_the_old_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.session("chat", TOKENS)
    file, map_bytes = place.paths.store / "data.mdb", place.world.settings.store_map_bytes
    before = file.read_bytes()

    rename = os.rename

    def killed(source: Path, target: Path) -> None:
        if "salvage" in source.parts:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "replace", killed)
    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        salvage(place.paths.store, place.paths.store / ASIDE, map_bytes=map_bytes)
    assert file.read_bytes() == before and place.world.restorable(TOKENS) == len(TOKENS)
