"""The port that `serve` holds: who connects waits for the next gateway, but not for one that can't start."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from bench.ports import free_port
from ops import config, listening
from ops.processes import ChildCommand
from ops.serve import Supervisor

pytestmark = pytest.mark.process


async def test_who_waits_for_a_gateway_that_cannot_start_is_sent_away(tmp_path: Path) -> None:
    port = free_port()
    places = {"data_dir": str(tmp_path), "lane_dir": str(tmp_path / "lanes")}
    settings = config.load({**places, "gateway.port": port}, environment={})
    held = listening.listen("127.0.0.1", port)
    supervisor = Supervisor(settings, tmp_path, "x", held)
    gateway = supervisor._gateway
    settings.paths.make()
    gateway.command = ChildCommand("gateway", "tests.ops.no_such_module", {}, bare=True)
    gateway.proved = True  # it has served before
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    running = asyncio.create_task(gateway.run())
    try:
        async with asyncio.timeout(60.0):
            assert await reader.read() == b""
        assert gateway.started_count >= 4, "the next one could have answered"
        with socket.create_connection(("127.0.0.1", port)):
            pass  # the port is held on
    finally:
        await gateway.stop(5.0)
        await running
        writer.close()
        for one in held:
            one.close()
