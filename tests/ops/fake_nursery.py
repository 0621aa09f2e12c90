"""The real nursery loop around the fake engine: `python -m tests.ops.fake_nursery --config-json ...`. No torch.

One more request: {"op": "stick"} has no answer, and no other one after it. With the model `orphan` the first engine is forked
and the nursery killed before it says so.
"""

from __future__ import annotations

import json
import os
import signal
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
        answer = super()._answer(line)
        if self._settings["model_name"] == "orphan" and json.loads(line).get("incarnation") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


if __name__ == "__main__":
    Sticking(json.loads(sys.argv[sys.argv.index("--config-json") + 1]), run).serve()
