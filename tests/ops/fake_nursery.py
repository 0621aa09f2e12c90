"""The real nursery loop around the fake engine: `python -m tests.ops.fake_nursery --config-json ...`. No torch."""

from __future__ import annotations

import json
import sys

from engine.nursery import Nursery
from tests.ops.fake_engine import run

if __name__ == "__main__":
    Nursery(json.loads(sys.argv[sys.argv.index("--config-json") + 1]), run).serve()
