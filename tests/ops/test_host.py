"""The host agent against engines without a model: death, hang, backoff, adoption, stop. Real processes, real signals, no torch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from bench.driver import process_state
from engine import messages, pid_file, wire
from engine.status_page import StatusPage
from ops import config
from ops.errors import ModelError
from ops.host import HostAgent, keeper_command
from ops.processes import Backoff, ChildCommand
from ops.settings import HostSettings
from tiers import heartbeat
from tiers.paths import Paths

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.at(tmp_path / "data", tmp_path / "lanes").make()


def agent_settings(paths: Paths, *, model_name: str = "fake", **host: Any) -> dict[str, Any]:
    values = HostSettings(engines=2, hang_floor_ms=400, watch_interval_ms=10, restart_backoff_ms=50, stop_timeout_s=5.0)
    return {
        "host": dataclasses.asdict(dataclasses.replace(values, **host)),
        "engine": {"threads": 1},
        "tiers": {},
        "data_dir": str(paths.data_dir),
        "lane_dir": str(paths.lane_dir),
        "model_dir": "",
        "model_name": model_name,
    }


class Agent(HostAgent):
    """Starts the fakes in place of engine and nursery."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings, engine_module="tests.ops.fake_engine", keeper=False)
        for kept in self._kept:
            kept.command = dataclasses.replace(kept.command, module="tests.ops.fake_nursery")


@contextlib.asynccontextmanager
async def running(settings: dict[str, Any]) -> AsyncIterator[Agent]:
    agent = Agent(settings)
    task = asyncio.create_task(agent.run())
    try:
        yield agent
    finally:
        agent.stop()
        async with asyncio.timeout(60):
            await task


async def until(what: str, probe: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := probe()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        await asyncio.sleep(0.01)
    return value


def all_ready(agent: Agent) -> bool:
    return len(agent.watches) == agent.host.engines and all(watch.ready for watch in agent.watches.values())


class Gateway:
    """A subscriber of the host agent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._buffer = wire.FrameBuffer(wire.FROM_HOST)
        self._messages: list[Any] = []

    @classmethod
    async def connect(cls, paths: Paths) -> Gateway:
        gateway = cls(*await asyncio.open_unix_connection(str(paths.host_socket)))
        gateway.send(messages.Subscribe("test"))
        return gateway

    def send(self, message: messages.Message) -> None:
        self._writer.write(wire.encode(message))

    async def next(self) -> Any:
        async with asyncio.timeout(60):
            while not self._messages:
                data = await self._reader.read(4096)
                assert data, "the host agent closed the link"
                self._messages += self._buffer.feed(data)
        return self._messages.pop(0)

    async def next_of(self, kind: type) -> Any:
        while not isinstance(message := await self.next(), kind):
            pass
        return message

    def close(self) -> None:
        self._writer.close()


@pytest.fixture(params=[True, False], ids=["nursery", "direct"])
def nursery(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_killed_engine_is_reported_and_started_again(paths: Paths, nursery: bool) -> None:
    async with running(agent_settings(paths, nursery=nursery)) as agent:
        await until("engines", lambda: all_ready(agent))
        gateway = await Gateway.connect(paths)
        ups = [await gateway.next(), await gateway.next()]
        assert {up.engine for up in ups} == {"e0", "e1"}
        victim = ups[0]
        os.kill(victim.pid, signal.SIGKILL)
        down = await gateway.next()
        assert (down.engine, down.incarnation, down.reason) == (victim.engine, victim.incarnation, "killed")
        news: dict[type, Any] = {}  # how it died may be known before or after the next one is up
        while not news.keys() >= {messages.EngineGone, messages.EngineUp}:
            message = await gateway.next()
            news[type(message)] = message
        gone, again = news[messages.EngineGone], news[messages.EngineUp]
        assert gone == messages.EngineGone(victim.engine, victim.incarnation, -signal.SIGKILL, True)
        assert (again.engine, again.incarnation) == (victim.engine, victim.incarnation + 1)
        gateway.close()
    assert not list(paths.lane_dir.glob("*.sock")), "sockets left"
    assert not list(paths.lane_dir.glob("e*.pid")), "pid files left"


async def test_a_nursery_that_is_stuck_is_replaced(paths: Paths) -> None:
    async with running(agent_settings(paths, engines=1, silent_limit_s=1.0)) as agent:
        await until("an engine", lambda: all_ready(agent))
        (nursery,), watch = agent._kept, agent.watches["e0"]
        await until(
            "its heartbeat", lambda: (beat := heartbeat.read(paths.beat("nursery"))) and beat.pid == nursery.pid
        )
        stuck, (_, writer) = nursery.pid, await asyncio.open_unix_connection(str(paths.nursery_socket))
        writer.write(b'{"op": "stick"}\n')
        await until("another nursery", lambda: nursery.pid not in (0, stuck))
        writer.close()
        watch.signal(signal.SIGKILL)
        await until("an engine of the new one", lambda: all_ready(agent) and agent.watches["e0"].incarnation == 2)


async def test_an_engine_whose_nursery_died_before_it_told_of_it_is_taken_on(paths: Paths) -> None:
    async with running(agent_settings(paths, engines=1, model_name="orphan", restart_backoff_ms=500)) as agent:
        await until("an engine", lambda: all_ready(agent))
        first = pid_file.read(paths.pid_file("e0"))
        assert first is not None and first.alive
        assert (agent.watches["e0"].incarnation, agent.watches["e0"].pid) == (1, first.pid)
        await until("another nursery", lambda: agent._kept[0].started_count == 2 and paths.nursery_socket.exists())


async def test_engine_that_crashed_died_by_itself_and_a_fenced_one_too(paths: Paths, nursery: bool) -> None:
    async with running(agent_settings(paths, nursery=nursery)) as agent:
        await until("engines", lambda: all_ready(agent))
        gateway = await Gateway.connect(paths)
        crashed, fenced = await gateway.next(), await gateway.next()
        os.kill(crashed.pid, signal.SIGSEGV)
        gone = await gateway.next_of(messages.EngineGone)
        assert (gone.engine, gone.exit, gone.from_outside) == (crashed.engine, -signal.SIGSEGV, False)
        gateway.send(messages.Suspect(fenced.engine, fenced.incarnation, "socket closed"))
        gone = await gateway.next_of(messages.EngineGone)
        assert (gone.engine, gone.exit, gone.from_outside) == (fenced.engine, -signal.SIGKILL, False)
        gateway.close()


async def until_serves(agent: Agent, incarnation: int) -> None:
    await until(
        f"e0's start {incarnation}", lambda: all_ready(agent) and agent.watches["e0"].incarnation == incarnation
    )


async def test_gateway_that_was_away_hears_of_every_death_that_it_missed(paths: Paths) -> None:
    async with running(agent_settings(paths, nursery=False, engines=1)) as agent:
        for incarnation in (1, 2):
            await until_serves(agent, incarnation)
            os.kill(agent.watches["e0"].pid, signal.SIGKILL if incarnation == 1 else signal.SIGSEGV)
        await until_serves(agent, 3)
        gateway = await Gateway.connect(paths)
        assert (await gateway.next()).incarnation == 3
        heard = [await gateway.next_of(messages.EngineGone) for _ in range(2)]
        assert sorted((gone.incarnation, gone.exit, gone.from_outside) for gone in heard) == [
            (1, -signal.SIGKILL, True),
            (2, -signal.SIGSEGV, False),
        ]
        gateway.close()


async def test_stopped_engine_is_hung_and_fenced(paths: Paths) -> None:
    async with running(agent_settings(paths, nursery=False)) as agent:
        await until("engines", lambda: all_ready(agent))
        gateway = await Gateway.connect(paths)
        victim = await gateway.next()
        os.kill(victim.pid, signal.SIGSTOP)
        down = await gateway.next_of(messages.EngineDown)
        assert (down.engine, down.reason, down.cause) == (victim.engine, "hung", "stopped")
        assert down.detect_ms >= agent.host.stopped_ms
        await until("its end", lambda: not pid_file.PidFile(victim.pid, 1).alive)
        gateway.close()


async def test_engine_that_waits_for_ever_is_hung(paths: Paths) -> None:
    async with running(agent_settings(paths, nursery=False, engines=1, model_name="mute")) as agent:
        await until("its start", lambda: agent.watches.get("e0") and agent.watches["e0"].ready)
        gateway = await Gateway.connect(paths)
        down = await gateway.next_of(messages.EngineDown)
        assert (down.reason, down.cause) == ("hung", "blocked")
        gateway.close()


async def test_engine_that_computes_without_a_beat_is_slow_then_hung(paths: Paths) -> None:
    settings = agent_settings(paths, nursery=False, engines=1, model_name="spin", hang_floor_ms=100, spin_limit_s=1)
    async with running(settings):
        await until("the host agent", paths.host_socket.exists)
        gateway = await Gateway.connect(paths)
        slow = await gateway.next_of(messages.EngineSlow)
        assert slow.cause in ("computing", "starved")
        down = await gateway.next_of(messages.EngineDown)
        assert (down.reason, down.cause) == ("hung", "spinning")
        gateway.close()


async def test_broken_device_is_what_the_engine_says_it_died_of(paths: Paths) -> None:
    async with running(agent_settings(paths, nursery=False, engines=1, model_name="fail")):
        await until("the host agent", paths.host_socket.exists)
        gateway = await Gateway.connect(paths)
        down = await gateway.next_of(messages.EngineDown)
        assert (down.engine, down.incarnation, down.reason) == ("e0", 1, "device error")
        gone = await gateway.next_of(messages.EngineGone)
        assert (gone.exit, gone.from_outside) == (70, False)
        gateway.close()


async def test_engine_starved_of_processor_is_not_hung(paths: Paths) -> None:
    await beside_noise(paths, 3.0)


async def beside_noise(paths: Paths, noise_s: float) -> None:
    """A noisy neighbour: the engines run at the lowest priority beside busy loops, and nobody dies of it."""
    async with running(agent_settings(paths, nursery=False, hang_floor_ms=60)) as agent:
        await until("engines", lambda: all_ready(agent))
        before = {name: watch.pid for name, watch in agent.watches.items()}
        for pid in before.values():
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        noise = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
        try:
            await asyncio.sleep(noise_s)
        finally:
            for process in noise:
                process.kill()
                process.wait()
        assert {name: watch.pid for name, watch in agent.watches.items()} == before


async def test_suspected_engine_is_fenced(paths: Paths) -> None:
    async with running(agent_settings(paths, nursery=False, engines=1)) as agent:
        await until("engines", lambda: all_ready(agent))
        gateway = await Gateway.connect(paths)
        up = await gateway.next()
        gateway.send(messages.Suspect(up.engine, up.incarnation, "socket closed"))
        down = await gateway.next_of(messages.EngineDown)
        assert (down.engine, down.incarnation) == (up.engine, up.incarnation)
        gateway.send(messages.Suspect(up.engine, up.incarnation, "again"))
        down = await gateway.next_of(messages.EngineDown)
        assert down.incarnation == up.incarnation, "an incarnation that is long dead is said to be so again"
        gateway.close()


async def test_engine_that_never_starts_backs_off_and_is_given_up(paths: Paths) -> None:
    agent = Agent(agent_settings(paths, nursery=False, engines=1, model_name="die_at_start", restart_backoff_ms=100))
    began = time.monotonic()
    with pytest.raises(ModelError, match="e0 ended 4 times"):
        await agent.run()
    assert time.monotonic() - began > 0.1 + 0.2 + 0.4, "starts must come ever slower"


async def test_engine_that_can_never_serve_is_not_started_again(paths: Paths, nursery: bool) -> None:
    agent = Agent(agent_settings(paths, nursery=nursery, engines=1, model_name="unsupported"))
    with pytest.raises(ModelError, match="e0 ended once"):
        await agent.run()


def test_waits_double_up_to_the_limit() -> None:
    backoff = Backoff(100, 1000, 60)
    assert [backoff.wait_s(deaths) for deaths in (1, 2, 3, 4, 5, 99)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


async def test_running_engines_are_adopted(paths: Paths) -> None:
    settings = agent_settings(paths, nursery=False)
    first = Agent(settings)
    task = asyncio.create_task(first.run())
    await until("engines", lambda: all_ready(first))
    before = {name: watch.pid for name, watch in first.watches.items()}
    task.cancel()  # as if it died: nothing is stopped, nothing cleaned up
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await _cancel_all_but_me()
    async with running(settings) as second:
        await until("adoption", lambda: all_ready(second))
        assert {name: watch.pid for name, watch in second.watches.items()} == before
        os.kill(before["e0"], signal.SIGKILL)
        await until("restart", lambda: all_ready(second) and second.watches["e0"].pid != before["e0"])
        assert second.watches["e0"].incarnation == 2


async def test_engine_that_drains_is_adopted_and_its_end_is_told(paths: Paths) -> None:
    settings = agent_settings(paths, nursery=False, engines=1, model_name="linger", stop_timeout_s=0.2)
    first = Agent(settings)
    task = asyncio.create_task(first.run())
    await until("an engine", lambda: all_ready(first))
    pid = first.watches["e0"].pid
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await _cancel_all_but_me()
    page = StatusPage.open(paths.status("e0"))
    os.kill(pid, signal.SIGTERM)
    await until("its drain", lambda: page.state == "draining")
    async with running(settings) as second:
        await until("adoption", lambda: all_ready(second))
        gateway = await Gateway.connect(paths)
        up = await gateway.next_of(messages.EngineUp)
        assert (up.pid, up.incarnation) == (pid, 1)
        os.kill(pid, signal.SIGKILL)
        down = await gateway.next_of(messages.EngineDown)
        assert (down.incarnation, down.reason) == (1, "exited")
        assert (await gateway.next_of(messages.EngineUp)).incarnation == 2
        gateway.close()


async def test_engines_with_other_settings_are_not_adopted(paths: Paths) -> None:
    first = Agent(agent_settings(paths, nursery=False))
    task = asyncio.create_task(first.run())
    await until("engines", lambda: all_ready(first))
    before = {watch.pid for watch in first.watches.values()}
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await _cancel_all_but_me()
    async with running(agent_settings(paths, nursery=False, engines=1, model_name="other")) as second:
        await until("engines", lambda: all_ready(second))
        assert not before & {watch.pid for watch in second.watches.values()}
        assert not paths.pid_file("e1").exists(), "an engine that is not wanted any more is ended"


async def _cancel_all_but_me() -> None:
    """What a killed process's tasks do: stop. (Its lock goes with the garbage collector's file.)"""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_recycled_pid_is_not_mistaken(paths: Paths) -> None:
    written = pid_file.write(paths.pid_file("e0"), pid=os.getpid(), incarnation=3)
    assert written.alive
    assert pid_file.read(paths.pid_file("e0")) == written
    assert not dataclasses.replace(written, start_ticks=written.start_ticks - 1).alive


def test_child_gets_settings_by_pipe_not_by_command_line(paths: Paths) -> None:
    command = ChildCommand("gateway", "gateway", {"gateway": {"api_key": "secret"}})
    assert "secret" not in " ".join(command.line)
    assert b"secret" in command.input


def test_page_of_an_older_incarnation_raises_the_next(paths: Paths) -> None:
    StatusPage.create(paths.status("e0"), 41)
    assert Agent(agent_settings(paths, nursery=False))._next_incarnation("e0") == 42


def test_a_keeper_can_be_told_of_more_tenants_than_a_command_line_holds(tmp_path: Path) -> None:
    tenants = "".join(f'[tenants.customer-{number}]\napi_key = "key of {number}"\n' for number in range(2000))
    (tmp_path / "concordia.toml").write_text(tenants)
    settings = config.load({"data_dir": str(tmp_path)}, environment={}).host_json(tmp_path, "m")
    command = keeper_command(settings)
    program = dataclasses.replace(command, module="tests.ops.say_arguments", with_parent=False)
    done = subprocess.run(program.line, input=program.input, capture_output=True, check=True)
    given = json.loads(done.stdout)
    assert given[:4] == ["--data-dir", settings["data_dir"], "--lane-dir", settings["lane_dir"]]
    assert len(json.loads(given[given.index("--settings-json") + 1])["tenants"]) == 2000


async def test_an_engine_that_is_being_born_at_the_stop_ends_too(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(agent_settings(paths, nursery=False, engines=1))
    spawn, born = agent._spawn, list[int]()

    async def late(engine: str, incarnation: int) -> int:
        agent.stop()
        await stopping.wait()
        born.append(await spawn(engine, incarnation))
        return born[0]

    async def drain() -> None:
        stopping.set()  # the engines that it knew of have ended
        await until("it is watched", lambda: agent.watches)

    stopping = asyncio.Event()
    monkeypatch.setattr(agent, "_spawn", late)
    monkeypatch.setattr(agent, "_drain_keeper", drain)
    async with asyncio.timeout(60):
        await agent.run()
    assert not Path(f"/proc/{born[0]}").exists() or process_state(born[0]) == "Z"
