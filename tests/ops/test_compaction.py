"""compact, gc, stats and pin as an operator meets them, on a store that nobody serves and beside a running keeper."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ops.conftest import TOKENS, Place
from tests.tiers.sample import BLOCK, some_tokens


def close(place: Place, name: str, tokens_end: int) -> None:
    """End a session's stream, so that nothing of it is live."""
    from tests.tiers.sample import sequence

    lane = place.world.lane()
    lane.append_close(sequence(f"stream-{name}"), 1, tokens_end)
    lane.close()
    place.world.drain()


@pytest.fixture(params=["offline", pytest.param("keeper", marks=pytest.mark.process)])
def served(request: pytest.FixtureRequest, place: Place, keeper: Callable[[], None]) -> Callable[[], None]:
    """Call it when the store is as it should be: then the keeper starts, or nobody."""
    return keeper if request.param == "keeper" else lambda: None


def test_compact_folds_a_session_and_changes_nothing_for_it(place: Place, served: Callable[[], None]) -> None:
    place.session("chat", TOKENS)
    close(place, "chat", len(TOKENS))
    served()
    would = place.json("compact", "--dry-run", "--grace-s", "0")
    assert would["dry_run"]
    done = place.json("compact", "--grace-s", "0")
    assert done["counts"]["folded"] == 1
    assert place.world.restorable(TOKENS) == 43
    again = place.json("compact", "--grace-s", "0")
    assert again["counts"].get("folded", 0) == 0
    assert place.json("verify")["ok"]
    (row,) = place.json("stats")["sessions"]
    assert (row["session"], row["stored"], row["compacted"], row["pinned"]) == ("chat", 43, True, False)


def test_a_compacted_session_is_still_shown_exported_and_removed(
    place: Place, served: Callable[[], None], tmp_path: object
) -> None:
    place.session("chat", TOKENS)
    close(place, "chat", len(TOKENS))
    served()
    place.json("compact", "--grace-s", "0")
    (shown,) = place.json("inspect", "chat")["sequences"]
    assert shown["position"] == 43
    assert [row["kind"] for row in shown["stored"]] == [*["block"] * 5, "tail"]
    assert place.json("export", "chat", "-o", f"{tmp_path}/f")["position"] == 43


def test_gc_frees_only_what_nothing_names(place: Place, served: Callable[[], None]) -> None:
    other = some_tokens(4 * BLOCK, seed=2)
    place.session("chat", TOKENS)
    place.session("other", other)
    from tests.ops.test_recovery import damage_block

    damage_block(place, 1)
    place.json("repair", "--yes")  # blocks after the hole have no name any more
    served()
    would = place.json("gc", "--dry-run", "--grace-s", "0")["counts"]
    assert would["freed_blocks"] == 3
    assert place.json("gc", "--grace-s", "0")["counts"]["freed_blocks"] == 3
    assert place.json("gc", "--grace-s", "0")["counts"].get("freed_blocks", 0) == 0
    assert place.world.restorable(TOKENS) == 8
    assert place.world.restorable(other) == len(other)
    assert "nothing to free" in place.run("gc", "--grace-s", "0").stdout


@pytest.mark.process
def test_shrink_makes_the_file_smaller_and_loses_nothing(place: Place, served: Callable[[], None]) -> None:
    conversations = [some_tokens(5 * BLOCK, seed=20 + n) for n in range(24)]
    for number, tokens in enumerate(conversations):
        place.session(f"s{number}", tokens)
        close(place, f"s{number}", len(tokens))
    for number in range(22):
        place.json("sessions", "rm", f"s{number}", "--yes")
    served()
    before = (place.paths.store / "data.mdb").stat().st_size
    done = place.json("compact", "--shrink", "--grace-s", "0")
    assert done["counts"]["copied_records"] > 0
    assert (place.paths.store / "data.mdb").stat().st_size < before
    assert [place.world.restorable(tokens) for tokens in conversations[22:]] == [40, 40]
    assert place.json("verify")["ok"]


def test_pin_and_unpin(place: Place, served: Callable[[], None]) -> None:
    place.session("chat", TOKENS)
    served()
    assert place.json("sessions", "pin", "chat") == {"session": "chat", "namespace": "default", "pinned": True}
    assert place.json("stats")["sessions"][0]["pinned"]
    assert place.json("sessions", "show", "chat")["pinned"]
    assert [row["pinned"] for row in place.json("sessions", "ls")["data"]] == [True]
    assert "pinned" in place.run("stats").stdout
    assert place.run("sessions", "pin", "no such name!").exit_code == 2
    place.json("sessions", "unpin", "chat")
    assert not place.json("stats")["sessions"][0]["pinned"]


def test_stats_say_who_has_what(place: Place, served: Callable[[], None]) -> None:
    place.session("chat", TOKENS)
    served()
    found = place.json("stats")
    assert found["stats"]["stored_blocks"] == 5
    assert found["tenants"]["default"]["blocks"][0] == 5 and found["tenants"]["default"]["bytes"] > 0
    assert "default" in place.run("stats").stdout


def test_evicting_asks(place: Place) -> None:
    place.session("chat", TOKENS)
    place.paths.config.write_text("[tiers]\nsession_ttl_s = 1\n")
    assert "--yes" in place.refused(5, "compact")
    assert place.json("compact", "--dry-run")["dry_run"]
