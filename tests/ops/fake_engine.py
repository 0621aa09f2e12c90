"""An engine without a model: makes its status page, beats, and ends on SIGTERM. `python -m tests.ops.fake_engine --engine e0 ...`.

`die_at_start` in its settings' model_name makes it end before it is ready, `unsupported` as one that never can be;
`mute` keeps it from beating after it is ready,
`spin` makes it compute for ever without a beat, `fail` report its device broken after a while,
`linger` go on for a minute once it was told to end, as one that drains.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from engine.status_page import FIRST_STEPS, StatusPage
from tiers.paths import Paths


def run(engine: str, incarnation: int, settings: dict[str, Any]) -> int:
    """The same signature as engine.main.run."""
    if settings["model_name"] == "unsupported":
        return 3
    if settings["model_name"] == "die_at_start":
        return 7
    paths = Paths(Path(settings["data_dir"]), Path(settings["lane_dir"]))
    page = StatusPage.create(paths.status(engine), incarnation)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    page.set_state("ready")
    for _ in range(FIRST_STEPS):
        page.count_step()
    while settings["model_name"] == "spin":
        pass
    while not ended.wait(0.02):
        if settings["model_name"] != "mute":
            page.count_step()
        if settings["model_name"] == "fail" and page.step_count > 2 * FIRST_STEPS:
            page.set_state("failed")
            return 70
    page.set_state("draining")
    until = time.monotonic() + 60.0
    while settings["model_name"] == "linger" and time.monotonic() < until:
        time.sleep(0.02)
        page.beat()
    return 0


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--config-json", required=True)
    given = parser.parse_args()
    return run(given.engine, given.incarnation, json.loads(given.config_json))


if __name__ == "__main__":
    sys.exit(main())
