"""A child that beats once and then stands still: `python -m ops.child --bare NAME tests.ops.still_child BEAT`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tiers import heartbeat

if __name__ == "__main__":
    heartbeat.beat(Path(sys.argv[1]))
    time.sleep(600)
