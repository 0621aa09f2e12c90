"""The real nursery loop around the fake engine: `python -m tests.ops.fake_nursery --config-json ...`. No torch.

One more request: {"op": "stick"} has no answer, and no other one after it.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from engine.nursery import Nursery
from tests.ops.fake_engine import run


class Sticking(Nursery):
    """Can be made to wait for ever."""

    def _answer(self, line: bytes) -> dict[str, Any]:
        if json.loads(line)["op"] == "stick":
            threading.Event().wait()
        return super()._answer(line)


if __name__ == "__main__":
    Sticking(json.loads(sys.argv[sys.argv.index("--config-json") + 1]), run).serve()
