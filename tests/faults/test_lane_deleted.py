"""A lane's file deleted, moved or replaced under a running engine: a new one is made, and nothing of a live stream is lost to the tiers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from engine import lane_watch
from tests.engine.driver import EngineDriver, random_tokens, submit
from tests.tiers.sample import BLOCK, World, append_rows, some_tokens
from tiers.drain import Drain
from tiers.errors import LaneBusy
from tiers.paths import Paths
from tiers.verify import verify

pytestmark = pytest.mark.process
PROMPT = random_tokens(5, 150)
ANSWER = 60
StartEngine = Callable[..., EngineDriver]


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_watch, "LOOK_S", 0.0)
    monkeypatch.setattr(lane_watch, "RETRY_S", 0.0)


def until_renewed(engine: EngineDriver, count: int = 1) -> None:
    deadline = time.monotonic() + 60
    while engine.engine.lane_watch.renewed < count:
        assert time.monotonic() < deadline, "no new lane"
        engine.engine.watch_lane()
        time.sleep(0.001)


def delete(lane: Path) -> None:
    lane.unlink()


def move(lane: Path) -> None:
    lane.rename(lane.with_name("elsewhere"))


def replace(lane: Path) -> None:
    shutil.copyfile(lane, lane.with_name("copy"))
    lane.with_name("copy").replace(lane)


def delete_directory(lane: Path) -> None:
    shutil.rmtree(lane.parent)


@pytest.mark.parametrize("act", [delete, move, replace, delete_directory])
def test_engine_goes_on_in_a_new_lane(
    act: Callable[[Path], None],
    start_engine: StartEngine,
    paths: Paths,
    drain: Drain,
) -> None:
    """The keeper had taken half of it, and the rest of the old lane is lost with it: the device still holds that."""
    engine = start_engine()
    engine.handle(submit("s", PROMPT, answer=ANSWER))
    engine.run_until_token("s", 10)
    drain.flush(sync=True)
    engine.run_until_token("s", 30)
    with structlog.testing.capture_logs() as logs:
        act(paths.lane("e0"))
        drain._lanes.close()  # as a keeper that was started anew: it knows only lanes that have names
        drain._assembly.forget()
        until_renewed(engine)
    events = [entry["event"] for entry in logs]
    assert events.count("capture.lane_gone") == 1 and events.count("capture.lane_renewed") == 1
    assert engine.engine.stats().lanes_renewed == 1 and engine.engine.stats().lane_gone == 0
    engine.run()
    drain.flush(sync=True)
    assert drain.counts["gap"] == drain.counts["orphan"] == 0
    answer = engine.tokens("s")
    engine.close()
    paths.lane("e0").unlink()
    other = start_engine("e1")
    other.handle(submit("again", PROMPT + answer, answer=1))
    other.run()
    assert other.started("again").reused == {"disk": len(PROMPT) + ANSWER - 1}
    other.close()
    drain.close()
    assert list(verify(paths.store, map_bytes=1 << 30)) == []


def test_keeper_that_lives_drains_the_old_lane_beside_the_new_one(
    start_engine: StartEngine,
    paths: Paths,
    drain: Drain,
) -> None:
    """A session that was idle then has its state in the old lane alone."""
    engine = start_engine()
    engine.handle(submit("idle", PROMPT[::-1], answer=5))
    engine.run()
    idle = PROMPT[::-1] + engine.tokens("idle")
    drain._lanes.scan()
    engine.handle(submit("s", PROMPT, answer=ANSWER))
    engine.run_until_token("s", 10)
    delete(paths.lane("e0"))
    until_renewed(engine)
    engine.run()
    drain.flush(sync=True)
    drain.flush(sync=True)
    assert list(drain.stats()["lanes"]) == ["e0"], "the old one is drained and let go of"
    tokens = PROMPT + engine.tokens("s")
    engine.close()
    other = start_engine("e1")
    for name, known in (("idle-again", idle), ("s-again", tokens)):
        other.handle(submit(name, known, answer=1))
        other.run()
        assert sum(other.started(name).reused.values()) == len(known) - 1


def test_lane_that_can_not_be_made_is_tried_again_and_said(
    start_engine: StartEngine,
    paths: Paths,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = start_engine()
    watch = engine.engine.lane_watch
    opened, tries = watch._open_lane, list[int]()

    def refused() -> object:
        tries.append(1)
        if len(tries) < 3:
            raise LaneBusy("another process writes this lane")
        return opened()

    monkeypatch.setattr(watch, "_open_lane", refused)
    engine.handle(submit("s", PROMPT, answer=10))
    engine.run_until_token("s", 2)
    delete(paths.lane("e0"))
    with structlog.testing.capture_logs() as logs:
        engine.engine.watch_lane()
        engine.engine.watch_lane()
        assert engine.engine.stats().lane_gone == 1
        until_renewed(engine)
    assert [entry["event"] for entry in logs].count("capture.lane_not_made") == 2
    assert [entry["event"] for entry in logs].count("capture.lane_gone") == 1
    engine.run()
    assert len(engine.tokens("s")) == 10


def test_sequence_that_begins_again_behind_what_is_known_is_taken(world: World) -> None:
    """Its rows up to there were in a lane that is lost, and are found under another sequence's blocks."""
    tokens = some_tokens(6 * BLOCK)
    lane = world.lane()
    world.capture(lane, "a", tokens, [BLOCK + 2])
    world.capture(lane, "b", tokens[: 4 * BLOCK], [4 * BLOCK])
    drain = world.drained()
    fresh = world.lane("e1")
    world.capture(fresh, "a", tokens, [], start=4 * BLOCK)
    append_rows(fresh, "a", 4 * BLOCK, tokens[4 * BLOCK :])
    drain.flush(sync=True)
    assert drain.counts["gap"] == 0
    drain.close()
    assert world.restorable(tokens) == len(tokens)
    assert list(verify(world.paths.store, map_bytes=world.settings.store_map_bytes)) == []
