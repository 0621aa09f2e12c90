"""Entry of an engine process: load, check, listen, run the step loop. `run` is called by the nursery's fork or by `python -m engine.main`.

One process per device; everything runs on its main thread. Exit codes: 0 stopped, 3 the model or the device can't be served (reason in
the log), 70 device failed, 71 fenced (it was replaced while it stood still).
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from engine import messages
from engine.adapters import Adapters
from engine.arena import Arena
from engine.attention import ArenaCache
from engine.capture import Capture
from engine.capture.device_rows import for_engine
from engine.check import self_check
from engine.decode_graph import graphs_for
from engine.errors import Fenced, UnsupportedDevice, UnsupportedModel
from engine.exactness import make_exact, prepare, step_tokens
from engine.follow import Follower
from engine.grammar import Grammars, warm
from engine.lane_watch import LaneWatch
from engine.link import GatewayLink
from engine.lookup import Lookup
from engine.loop import Engine
from engine.model import Model, load
from engine.points import Points
from engine.restore import Speeds
from engine.settings import EngineSettings
from engine.status_page import StatusPage
from tiers import copy_sum
from tiers.lane import LaneWriter
from tiers.paths import Paths
from tiers.prefix import PrefixFinder
from tiers.settings import TierSettings
from tiers.shares import LaneShares
from tiers.view import StoreReader

log = structlog.get_logger()

EXIT_DEVICE = 70
EXIT_FENCED = 71
_LEASE_S = 15.0
_LEASE_CHECK_S = 1.0


def run(engine: str, incarnation: int, settings: dict[str, Any]) -> int:
    """Be an engine until told to stop. Call on the main thread.

    settings  {"engine": {...}, "tiers": {...}, "data_dir", "lane_dir", "model_dir", "model_name"}, as JSON gives it
    Returns   the exit code of the process
    """
    paths = Paths.at(settings["data_dir"], settings.get("lane_dir"))
    options, tiers = EngineSettings(**settings["engine"]), TierSettings.of(settings["tiers"])
    page = StatusPage.create(paths.status(engine), incarnation)
    began = time.monotonic()
    torch.set_num_threads(thread_count(options, int(settings.get("engine_count", 1))))
    try:
        loop = build(engine, incarnation, settings, options, tiers, paths, page)
    except (UnsupportedModel, UnsupportedDevice) as error:
        log.error("engine.unsupported", engine=engine, reason=str(error))
        page.set_state("failed")
        return messages.EXIT_UNSUPPORTED
    signal.signal(signal.SIGTERM, lambda *_: loop.drain())
    signal.signal(signal.SIGINT, lambda *_: loop.stop())
    open_tiers(loop)
    gc.collect()
    gc.freeze()  # nothing of the model is ever garbage: keep collections short
    page.set_state("ready")
    log.info(
        "engine.ready",
        engine=engine,
        incarnation=incarnation,
        pid=os.getpid(),
        seconds=round(time.monotonic() - began, 3),
    )
    return _serve(loop, page)


def _serve(loop: Engine, page: StatusPage) -> int:
    try:
        loop.run()
    except Fenced as error:
        log.error("engine.fenced", engine=loop.name, incarnation=loop.incarnation, error=str(error))
        return EXIT_FENCED
    except RuntimeError as error:
        if loop.model.device.type == "cpu":
            raise
        log.error("engine.device_failed", engine=loop.name, error=str(error))
        page.set_state("failed")
        return EXIT_DEVICE
    page.set_state("draining")
    if loop.capture:
        loop.capture.let_go()
    loop.grammars.close()
    loop.link.close()
    return 0


def build(
    engine: str,
    incarnation: int,
    settings: dict[str, Any],
    options: EngineSettings,
    tiers: TierSettings,
    paths: Paths,
    page: StatusPage,
) -> Engine:
    """Load the model, allocate the arena, open lane and store, and measure what restore decisions lean on."""
    model = load(Path(settings["model_dir"]), settings["model_name"], options)
    page.beat()
    arena = Arena.allocate(
        model.layers,
        options.slots,
        model.context_tokens,
        model.dtype,
        model.device,
        states=model.states,
        step_tokens=options.prefill_chunk,
        block_tokens=tiers.block_tokens,
    )
    arena.prefault(options.prefault_tokens)
    page.beat()
    cache = ArenaCache(arena, page.beat, model.layers)
    if options.deterministic:
        prepare(model, cache)
    self_check(model, arena, cache)
    if options.deterministic:
        make_exact(model, arena, cache, options.prefill_chunk)
    root = model.root(arena.layout, tiers.block_tokens, exact=cache.exact)
    open_lane = partial(lane_of, engine, incarnation, tiers, paths)
    lane = open_lane()
    page.beat()
    capture = Capture(lane, arena, root, tiers.block_tokens) if options.capture else None
    if capture and model.device.type == "cuda":
        in_steps = options.decode_graph != "off" and not options.deterministic
        capture.rows, capture.without = for_engine(arena, options.capture_launch, lane.ring, in_steps=in_steps)
    graphs = graphs_for(model, arena, cache, options, capture.rows if capture else None)
    page.beat()
    warm(Path(settings["model_dir"]), model.vocab_count, model.stop_tokens)
    page.beat()
    speeds = measure(model, arena, cache)
    speeds.always_restore = options.restore == "always"
    adapters = Adapters(model.module, by_token=options.deterministic)
    cache.row_begins = adapters.only
    finder = PrefixFinder(StoreReader(paths.store, map_bytes=tiers.store_map_bytes), paths.lane_dir)
    return Engine(
        name=engine,
        incarnation=incarnation,
        model=model,
        arena=arena,
        cache=cache,
        capture=capture,
        lookup=Lookup(finder, arena, speeds, root, tiers.block_tokens, options.prefill_chunk),
        link=GatewayLink(paths.engine_socket(engine)),
        page=page,
        speeds=speeds,
        root=root,
        block_tokens=tiers.block_tokens,
        prefill_chunk=options.prefill_chunk,
        step_tokens=step_tokens(cache.exact, options.prefill_chunk),
        points=Points(
            arena,
            options.prefill_chunk,
            options.point_tail_tokens,
            options.point_answer_tokens,
            options.points_resident,
        ),
        keep_running=HostLease(paths.host_lock),
        adapters=adapters,
        grammars=Grammars(Path(settings["model_dir"]), model.vocab_count, model.stop_tokens),
        follower=Follower(arena, root, tiers.block_tokens, speeds),
        lane_watch=LaneWatch(open_lane),
        tiers=tiers,
        graphs=graphs,
        drain_s=options.drain_s,
    )


def lane_of(engine: str, incarnation: int, tiers: TierSettings, paths: Paths) -> LaneWriter:
    """Open the engine's lane for writing; made anew if there is none."""
    copy_sum.make_ready()  # where no nursery did: the first step that captures would wait for it
    paths.lane_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return LaneWriter.open(
        paths.lane(engine),
        lane_bytes=tiers.lane_bytes,
        record_count=tiers.lane_record_count,
        incarnation=incarnation,
        device=tiers.lane_device,
        flush=tiers.lane_flush,
        encryption=tiers.lane_encryption,
        shares=LaneShares(lambda namespace: tiers.tenant_limit(namespace, "lane")),
    )


def open_tiers(loop: Engine) -> None:
    """Look something up, so that the first request finds lanes and store open."""
    loop.lookup.finder.find(loop.root, "default", np.zeros(1, np.int32), limit=1, block_tokens=loop.block_tokens)


def measure(model: Model, arena: Arena, cache: ArenaCache) -> Speeds:
    """First estimate of both speeds: one prefill of 32 tokens, one copy of as many tokens' state. Later steps refine it."""
    slot, count = arena.slots[0], min(32, model.context_tokens)
    cache.begin([slot], [0], count)
    began = time.perf_counter()
    model.forward([[3] * count], [0], cache, logits=False)
    model.settle()
    prefill_s = time.perf_counter() - began
    frame = np.zeros(arena.layout.frame_bytes(count), dtype=np.uint8)
    state = np.zeros(arena.states.state_bytes, dtype=np.uint8)
    began = time.perf_counter()
    arena.copy_in(slot, 0, frame, count, (0, count))
    arena.states.put(slot.index, state)
    model.settle()
    copy_s = max(1e-6, time.perf_counter() - began)
    arena.forget(slot)
    return Speeds(count / prefill_s, max(1e6, min(2e9, (frame.nbytes + state.nbytes) / copy_s)))


def thread_count(options: EngineSettings, engine_count: int) -> int:
    """Torch threads of this engine: as set, else its share of the cores."""
    return options.threads or max(1, len(os.sched_getaffinity(0)) // max(1, engine_count))


class HostLease:
    """True while a host agent lives, or came back in time. An engine without one ends, so that nothing is orphaned for ever.

    The host agent holds an exclusive lock on the file; that the lock can be had means that it is gone. No file: no lease.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_check = 0.0
        self._gone_since: float | None = None

    def __call__(self) -> bool:
        """Whether to keep running. Looks at most once a second."""
        now = time.monotonic()
        if now < self._next_check:
            return True
        self._next_check = now + _LEASE_CHECK_S
        if self._held():
            self._gone_since = None
            return True
        self._gone_since = self._gone_since or now
        if now - self._gone_since < _LEASE_S:
            return True
        log.warning("engine.no_host", waited_s=_LEASE_S)
        return False

    def _held(self) -> bool:
        try:
            with open(self._path) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return True
        except BlockingIOError:
            return True
        return False


def main() -> int:
    """Command line of a directly spawned engine."""
    parser = argparse.ArgumentParser(prog="python -m engine.main", description="One engine process.")
    parser.add_argument("--engine", required=True, help="name, as in e0")
    parser.add_argument("--incarnation", type=int, required=True, help="how many times it was started")
    parser.add_argument("--config-json", required=True, help="resolved settings")
    arguments = parser.parse_args()
    return run(arguments.engine, arguments.incarnation, json.loads(arguments.config_json))


if __name__ == "__main__":
    sys.exit(main())
