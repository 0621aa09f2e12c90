"""Seeded random work on lanes and store with random kills, against a model in memory: `python -m tests.faults.soak --seconds 3600`.

The model holds, for every session, its tokens and how far they were captured; rows follow from (position, token), so every row that is
restored can be compared. Work: turns that append, branch, shrink and share prefixes; drains with and without sync; compaction, removal,
pins. Kills: SIGKILL of the keeper at a random moment and at random failpoints, of a writer in a record, and errors of the disk. After
each kill everything that was captured must be restorable, and at the end `verify` is clean. Now and then somebody deletes a lane, or the
store's file. It says once a minute how far it is; the keepers' log is in its directory, two files of LOG_BYTES at most, and stays with
it if something is found.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog

from tests.faults.layer import Layer
from tests.faults.processes import Processes, stats, wait_for
from tests.tiers.sample import BLOCK, LAYOUT, World, append_rows, read_all, sequence
from tiers import failpoints, keeper_client
from tiers.errors import KeeperAway, LaneFull, TierError
from tiers.lane import LaneWriter
from tiers.paths import Paths
from tiers.prefix import PrefixFinder
from tiers.verify import verify
from tiers.view import StoreReader

SAY_S = 60.0
LOG_BYTES = 4 << 20
BURST_STEPS = 10
SESSIONS = 24
TURN_TOKENS = 60
KILLS = [name for name in failpoints.NAMES if name.startswith(("drain.", "compact.base", "compact.free"))]


@dataclass
class Session:
    """One conversation: its tokens as the gateway would have them, and the newest submission's captured position."""

    name: str
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    turn: int = 0


@dataclass
class Soak:
    """One run. `step` does one random thing."""

    world: World
    layer: Layer
    random: np.random.Generator
    processes: Processes = field(default_factory=Processes)
    sessions: list[Session] = field(default_factory=lambda: [Session(f"session-{index}") for index in range(SESSIONS)])
    counts: Counter[str] = field(default_factory=Counter)
    log: Path = Path("keeper.log")
    lane: LaneWriter | None = None

    @classmethod
    def start(cls, directory: Path, lanes: Path, seed: int) -> Soak:
        world = World(Paths.at(directory / "data", lanes).make())
        settings = dataclasses.replace(
            world.settings, lane_bytes=1 << 18, lane_record_count=512, drain_interval_ms=5, sync_interval_ms=30,
            tail_interval_ms=50, compact_after_s=0.2, compact_interval_s=0.3, store_map_bytes=256 << 20,
        )  # fmt: skip
        soak = cls(World(world.paths, settings), Layer.over(world.paths.store, directory), np.random.default_rng(seed))
        soak.log = directory / "keeper.log"
        soak.lane = soak.world.lane()
        soak.new_keeper()
        return soak

    # ------------------------------------------------------------ work

    def step(self) -> None:
        """One random action of ten kinds, in proportions that keep lanes and store busy."""
        kinds = [self.turn] * 12 + [self.check_one] * 6 + [self.drain] * 3
        kinds += [self.compact, self.remove, self.kill_keeper, self.kill_at_failpoint, self.break_disk, self.new_writer]
        if self.random.random() < 0.03:
            kinds = [self.delete_lane, self.delete_store]
        act = kinds[int(self.random.integers(len(kinds)))]
        self.counts[act.__name__] += 1
        act()

    def turn(self) -> None:
        """A session goes on, goes on from an earlier point, or begins as another one does."""
        session = self.pick()
        keep = len(session.tokens)
        if keep and self.random.random() < 0.25:
            keep = int(self.random.integers(keep))
        tokens = session.tokens[:keep]
        if self.random.random() < 0.15:
            other = self.pick().tokens
            tokens = other[: int(self.random.integers(len(other) + 1))]
        if len(tokens) > 600:
            tokens = tokens[:0]
        fresh = self.random.integers(0, 50_000, int(self.random.integers(1, TURN_TOKENS))).astype(np.int32)
        session.turn += 1
        session.tokens = np.concatenate([tokens, fresh])
        self.capture(session)

    def capture(self, session: Session) -> None:
        """As an engine would: what is restorable isn't captured again; a full lane is waited for."""
        name, tokens = f"{session.name}-{session.turn}", session.tokens
        start = min(self.restorable(tokens), len(tokens) - 1) // BLOCK * BLOCK
        lane, position = self.lane, start
        assert lane is not None
        self.retried(lambda: self.world.capture(lane, name, tokens, [], start=start, session=session.name))
        while position < len(tokens):
            end = min(len(tokens), position + int(self.random.integers(1, 20)))
            begin = position
            self.retried(lambda: append_rows(lane, name, begin, tokens[begin:end]))  # noqa: B023
            position = end
        self.retried(lambda: lane.append_close(sequence(name), 1, len(tokens)))

    def retried(self, append: object) -> None:
        def attempt() -> bool:
            try:
                append()  # type: ignore[operator]
            except LaneFull:
                self.counts["lane_full"] += 1
                return False
            return True

        wait_for("room in the lane", attempt)

    def drain(self) -> None:
        self.ask(lambda: keeper_client.drain(self.world.paths.keeper_socket, sync=self.random.random() < 0.5))

    def compact(self) -> None:
        self.ask(lambda: keeper_client._ask(self.world.paths.keeper_socket, {"op": "compact"}, 30))

    def remove(self) -> None:
        """A session is deleted: what others share with it must stay."""
        session = self.pick()
        session.tokens = session.tokens[:0]
        request = {"op": "remove", "namespace": "default", "session": session.name, "force": True, "dry_run": False}
        self.ask(lambda: keeper_client._ask(self.world.paths.keeper_socket, request, 30))

    # ------------------------------------------------------------ faults

    def kill_keeper(self) -> None:
        time.sleep(float(self.random.uniform(0, 0.02)))
        self.keeper.kill()
        self.replace_keeper()

    def kill_at_failpoint(self) -> None:
        """The next keeper dies at a failpoint; the one after it goes on."""
        self.keeper.kill()
        self.keeper.wait(60)
        self.new_keeper(f"{KILLS[int(self.random.integers(len(KILLS)))]}:{int(self.random.integers(1, 6))}")
        for _ in range(3):
            self.turn()
        self.keeper.kill()
        self.replace_keeper()

    def delete_lane(self) -> None:
        """Somebody deletes it under engine and keeper: the keeper drains the old one, the engine goes on in a new one."""
        assert self.lane is not None
        self.await_keeper()
        self.lane.path.unlink()
        self.turn()
        self.lane.close()
        self.lane = self.world.lane()
        wait_for("a drain", lambda: self.ask(lambda: keeper_client.drain(self.world.paths.keeper_socket, sync=True)))
        self.check_all()

    def delete_store(self) -> None:
        """Somebody deletes its file under the keeper, which writes it anew."""
        self.await_keeper()
        before = stats(self.world)["store_rescued"]
        (self.world.paths.store / "data.mdb").unlink()
        wait_for("a commit", lambda: self.append_until_rescued(before))
        wait_for("the store", lambda: not stats(self.world)["failing"])
        self.check_all()

    def append_until_rescued(self, before: int) -> bool:
        assert self.lane is not None
        if self.lane.head - self.lane.tail < 100:
            self.retried(lambda: self.lane.append_close(sequence("nobody"), 1, 0))  # type: ignore[union-attr]
        return stats(self.world)["store_rescued"] > before

    def await_keeper(self) -> None:
        """Until it has seen the lane and all is well with the disk."""
        wait_for("the keeper", lambda: not stats(self.world)["failing"] and stats(self.world)["lanes"])

    def replace_keeper(self) -> None:
        self.keeper.wait(60)
        self.check_all()
        self.new_keeper()
        wait_for("the keeper", lambda: stats(self.world) is not None)

    def new_keeper(self, failpoint: str = "") -> None:
        self.processes.end()
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        with open(self.log, "ab") as log:
            self.keeper = self.processes.keeper(self.world, env=self.layer.environment(), failpoint=failpoint, log=log)

    def break_disk(self) -> None:
        """The disk fails for a while; the lane takes what comes, and every row can be read meanwhile."""
        fault = ["space", "sync", "write", "slow"][int(self.random.integers(4))]
        self.layer.fail(fault, "20" if fault == "slow" else "")
        assert self.lane is not None
        if self.lane.free_bytes > self.lane.lane_bytes // 2 and self.lane.head - self.lane.tail < 300:
            self.turn()
        self.check_one()
        time.sleep(float(self.random.uniform(0, 0.1)))
        self.layer.heal(fault)

    def new_writer(self) -> None:
        """The engine dies in the middle of a record, and another takes the lane over."""
        assert self.lane is not None
        try:
            self.lane.reserve_rows(LAYOUT, 3)
        except LaneFull:
            pass
        self.lane.close()
        self.lane = self.world.lane()

    # ------------------------------------------------------------ what must hold

    def check_one(self) -> None:
        self.check(self.pick())

    def check_all(self) -> None:
        for session in self.sessions:
            self.check(session)

    def check(self, session: Session) -> None:
        """Every token of the session is restorable, and every row is right."""
        found = self.restorable(session.tokens)
        assert found == len(session.tokens), f"{session.name}: {found} of {len(session.tokens)} tokens are left"
        self.counts["rows_compared"] += found

    def restorable(self, tokens: np.ndarray) -> int:
        """Read and compared row by row; tried again if the writer or a compaction was faster."""
        if not len(tokens):
            return 0
        for attempt in range(20):
            reader = StoreReader(self.world.paths.store, map_bytes=self.world.settings.store_map_bytes)
            finder = PrefixFinder(reader, self.world.paths.lane_dir)
            try:
                return read_all(finder, tokens)[0]
            except TierError:
                if attempt == 19:
                    raise
            finally:
                finder.close()
                reader.close()
        raise AssertionError

    def end(self) -> None:
        """A last round: everything to disk, checked; then clean."""
        for what in ("space", "sync", "write", "slow"):
            self.layer.heal(what)
        self.check_all()
        if self.keeper.poll() is not None:
            self.new_keeper()
        wait_for("a drain", lambda: self.ask(lambda: keeper_client.drain(self.world.paths.keeper_socket, sync=True)))
        self.keeper.terminate()
        assert self.keeper.wait(60) == 0
        self.check_all()
        paths = self.world.paths
        assert list(verify(paths.store, paths.lane_dir, map_bytes=self.world.settings.store_map_bytes)) == []

    def ask(self, question: object) -> bool:
        try:
            question()  # type: ignore[operator]
        except (KeeperAway, TierError):
            return False
        return True

    def pick(self) -> Session:
        return self.sessions[int(self.random.integers(len(self.sessions)))]


def say(soak: Soak, began: float, seconds: float) -> None:
    counts = soak.counts
    kills = counts["kill_keeper"] + counts["kill_at_failpoint"]
    size = (soak.world.paths.store / "data.mdb").stat().st_size / 1e6
    text = f"{counts['turn']} turns, {kills} kills, {counts['rows_compared']} rows compared, store of {size:.1f} MB"
    print(f"soak: {time.monotonic() - began:.0f} of {seconds:.0f} s, {text}", flush=True)


def run(seconds: float, seed: int, rest_s: float = 0.0) -> Counter[str]:
    """Work for so long; returns what was done. Raises AssertionError.

    rest_s  after each BURST_STEPS, for whoever needs the processor too
    """
    directory = Path(tempfile.mkdtemp(prefix="concordia-soak-"))
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    lanes = Path(tempfile.mkdtemp(prefix="concordia-soak-", dir=shared))
    print(f"soak: seed {seed}, {seconds:.0f} s, in {directory}", flush=True)
    soak = Soak.start(directory, lanes, seed)
    try:
        began = said = time.monotonic()
        while time.monotonic() < began + seconds:
            if time.monotonic() - said > SAY_S:
                said = time.monotonic()
                say(soak, began, seconds)
            for _ in range(BURST_STEPS):
                soak.step()
            time.sleep(rest_s)
        soak.end()
        say(soak, began, seconds)
    except BaseException:
        print(f"soak: ended after {time.monotonic() - began:.0f} s, seed {seed}; what it left is in {directory}")
        raise
    finally:
        soak.processes.close()
        shutil.rmtree(lanes, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)  # what failed stays, to be looked at
    return soak.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--nice", type=int, default=0, help="lower its priority by so much")
    parser.add_argument("--rest-s", type=float, default=0.0, help=f"pause after each {BURST_STEPS} steps")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    options = parser.parse_args()
    os.nice(options.nice)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))
    done = run(options.seconds, options.seed, options.rest_s)
    if options.json:
        print(json.dumps(done))
        return
    for name, count in done.most_common():
        print(f"{name:20} {count}")


if __name__ == "__main__":
    main()
