"""Events that can't be written are lost; nobody ends for that."""

from __future__ import annotations

import json
import os
import sys

import pytest
import structlog

from ops import log


def test_a_full_disk_and_a_reader_that_is_gone_end_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    unread, pipe = os.pipe()
    os.close(unread)
    with open("/dev/full", "w") as full, open(pipe, "w") as broken:
        for target in (full, broken, None):
            monkeypatch.setattr(sys, "stderr", target)
            log.configure("test")
            for _ in range(1000):
                structlog.get_logger().info("stage.verb", text="x" * 100)
        full.flush()  # nothing waits to be tried again
        broken.flush()


def test_an_event_is_one_line_of_json_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with open(2, "w", closefd=False) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        log.configure("test")
        structlog.get_logger().info("stage.verb", text="half \udce4", count=2)
        structlog.get_logger().debug("stage.verb")
    lines = capfd.readouterr().err.splitlines()
    told = json.loads(lines[0])
    assert len(lines) == 1 and told.pop("timestamp")
    assert told == {"event": "stage.verb", "level": "info", "process": "test", "text": "half \udce4", "count": 2}
