"""`concordia demo`: shows on a terminal what Concordia is for, and proves it; the same run without a terminal is a smoke test.

An answer streams, its engine gets SIGKILL in mid-sentence, the stream goes on; a timeline says what that cost, beside a cold
restart measured on this machine. Then every process gets SIGKILL in mid-answer, is started again, and the answer and the chat go on
from disk. Real processes, real model; runs in the command's process over `bench/driver.py`. Raises OpsError (exit 1) if anything differs.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.markup import escape
from rich.text import Text

from bench import scratch
from bench.driver import System
from bench.sse import Answer, StreamError
from engine import messages, wire
from engine.status_page import StatusPage
from ops import pull
from ops.config import Config
from ops.errors import OpsError
from ops.models import Model
from ops.processes import ChildCommand, child_environment
from ops.show import Progress, console
from tiers.paths import Paths

SESSION = "demo"
SYSTEM = (
    "You are the keeper of a lighthouse on a rock far out at sea. You have kept its lamp for thirty years and written down every "
    "night in a log: the wind, the height of the waves, the ships that passed and what became of them. You know that the lamp must "
    "never go out. When the oil runs low you row to the mainland; when a storm breaks the glass you mend it before dusk; when you "
    "are ill the lamp is lit all the same. Ships never learn of any of this. They only see that the light goes on. Answer in "
    "plain and vivid English, in long paragraphs, and tell everything in the order in which it happened."
)
FIRST_QUESTION = "Tell me about the night of the great storm, from dusk to dawn."
SECOND_QUESTION = "And what did you do on the morning after?"
SEED = 20
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PARTS = (
    ("detect", "red"),
    ("fence", "yellow"),
    ("wait", "magenta"),
    ("restore", "green"),
    ("force", "cyan"),
    ("next_token", "blue"),
)
BAR_CELLS_MOST = 60
BAR_MARGIN_CELLS = 32


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured, in ms; tokens where it says so."""

    seen_gap_ms: float
    parts_ms: dict[str, float]
    context_tokens: int
    restored_tokens: int
    forced_tokens: int
    cold_start_ms: float
    cold_recompute_ms: float
    restart_ms: float
    cached_tokens: int
    prompt_tokens: int

    @property
    def cold_ms(self) -> float:
        return self.cold_start_ms + self.cold_recompute_ms


def run(config: Config, keep_dir: Path | None, token_count: int, as_json: bool) -> None:
    """The whole show. Raises OpsError if the answer after a kill is not what it would have been."""
    model = pull.ensure(config.model, config.model_cache)
    with _ended_by_signals(), _directory(keep_dir) as data_dir:
        system = System(model.directory, data_dir)
        try:
            figures = Show(system, model, token_count, quiet=as_json).play()
        except StreamError as error:
            raise OpsError(f"the demo failed: {error}") from error
        finally:
            system.close(keep_data=keep_dir is not None)
    if as_json:
        click.echo(json.dumps(asdict(figures), indent=2))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A signal ends the demo as an error does: processes, shared memory and the temporary directory go. Main thread only."""
    before = {number: signal.signal(number, _end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: object) -> NoReturn:
    for each in ENDING:  # `timeout` and `make` send it twice: the second must not keep the first from cleaning up
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _directory(keep_dir: Path | None) -> Iterator[Path]:
    if keep_dir is not None:
        yield keep_dir
        return
    with scratch.directory("demo") as directory:
        yield directory / "data"


class Show:
    """The acts, in order."""

    def __init__(self, system: System, model: Model, token_count: int, *, quiet: bool) -> None:
        self._system = system
        self._model = model
        self._token_count = token_count
        self._quiet = quiet
        self._printed = 0
        self._killed_at = 0.0
        self._resumed_at = 0.0

    def play(self) -> Figures:
        """All acts; what they measured."""
        self._start("starting gateway, host agent and two engines")
        first = self._engine_killed()
        self._compare(first)
        context = first.usage["prompt_tokens"] + len(first.tokens) // 2
        cold_start_ms, cold_recompute_ms = self._cold(context)
        recovery = first.concordia["recoveries"][-1]
        restart_ms, second = self._everything_killed(first)
        figures = Figures(
            seen_gap_ms=(self._resumed_at - self._killed_at) * 1000,
            parts_ms={name: float(recovery.get(f"{name}_ms", 0.0)) for name, _ in PARTS},
            context_tokens=context,
            restored_tokens=int(recovery.get("restored_tokens", 0)),
            forced_tokens=int(recovery.get("forced_tokens", 0)),
            cold_start_ms=cold_start_ms,
            cold_recompute_ms=cold_recompute_ms,
            restart_ms=restart_ms,
            cached_tokens=int(second.usage["prompt_tokens_details"]["cached_tokens"]),
            prompt_tokens=int(second.usage["prompt_tokens"]),
        )
        self._timeline(figures)
        return figures

    # ------------------------------------------------------------ acts

    def _start(self, what: str) -> float:
        began = time.monotonic()
        with Progress(what):
            self._system.start()
        return (time.monotonic() - began) * 1000

    def _engine_killed(self) -> Answer:
        """Act one: SIGKILL of the serving engine in the middle of the answer."""
        self._title("1. An answer streams, and its engine is killed")
        self._ask(FIRST_QUESTION)
        answer = self._system.stream(
            "/v1/chat/completions",
            self._request([_user(FIRST_QUESTION)]),
            headers={"X-Session-Id": SESSION},
            watch=self._kill_midway,
        )
        self._end_answer(answer)
        if not answer.concordia.get("recoveries"):
            raise OpsError("the engine was killed, and the answer tells of no recovery")
        return answer

    def _kill_midway(self, answer: Answer) -> None:
        self._type(answer)
        if self._killed_at and not self._resumed_at and answer.events[-1].is_token:
            self._resumed_at = answer.events[-1].at
            self._mark(f"goes on after {(self._resumed_at - self._killed_at) * 1000:.0f} ms", "green")
        if not self._killed_at and len(answer.tokens) >= self._token_count // 2:
            engine = self._system.serving_engine(answer.stream_id)
            self._system.signal(engine.id)
            self._killed_at = time.perf_counter()
            self._mark(f"SIGKILL {engine.id}, pid {engine.pid}", "red")

    def _compare(self, interrupted: Answer) -> None:
        """The same request without a kill."""
        with Progress("asking the same again, without a kill, to compare"):
            again = self._system.stream("/v1/chat/completions", self._request([_user(FIRST_QUESTION)]))
        if again.text != interrupted.text or again.finish_reason != interrupted.finish_reason:
            raise OpsError(f"the answers differ:\ninterrupted: {interrupted.text!r}\nundisturbed: {again.text!r}")
        self._note("The same request undisturbed gives the same text, character by character.")

    def _cold(self, token_count: int) -> tuple[float, float]:
        with Progress("measuring what a cold restart of the engine would have cost"):
            return cold_restart(self._system, self._model, token_count)

    def _everything_killed(self, first: Answer) -> tuple[float, Answer]:
        """Act two: SIGKILL of every process in mid-answer; start again; the answer and the chat go on from disk."""
        self._title("2. Everything is killed, and started again")
        chat = [_user(FIRST_QUESTION), {"role": "assistant", "content": first.text}, _user(SECOND_QUESTION)]
        self._ask(SECOND_QUESTION)
        answer = Answer()
        with contextlib.suppress(StreamError):
            self._system.stream(
                "/v1/chat/completions",
                self._request(chat),
                headers={"X-Session-Id": SESSION},
                watch=self._kill_everything_midway,
                answer=answer,
            )
        restart_ms = self._start("starting everything again")
        self._mark(f"everything is back after {restart_ms / 1000:.1f} s", "green")
        while not answer.done:
            self._system.resume(answer, watch=self._type)
        self._end_answer(answer)
        _check_ids(answer)
        third = self._third_turn(chat, answer)
        return restart_ms, third

    def _kill_everything_midway(self, answer: Answer) -> None:
        self._type(answer)
        if len(answer.tokens) == self._token_count // 3:
            count = len(self._system.processes())
            self._system.kill_all()
            self._mark(f"SIGKILL to all {count} processes", "red")

    def _third_turn(self, chat: list[dict[str, str]], answer: Answer) -> Answer:
        chat = [*chat, {"role": "assistant", "content": answer.text}, _user("Thank you. Were you afraid?")]
        third = self._system.stream(
            "/v1/chat/completions", self._request(chat) | {"max_tokens": 8}, headers={"X-Session-Id": SESSION}
        )
        cached, prompt = third.usage["prompt_tokens_details"]["cached_tokens"], third.usage["prompt_tokens"]
        self._note(f"The next turn of that chat has {prompt} prompt tokens; {cached} of them came from disk or memory.")
        if not cached:
            raise OpsError("the next turn reused nothing")
        return third

    def _request(self, chat: list[dict[str, str]]) -> dict[str, Any]:
        return {
            "model": self._model.name,
            "messages": [{"role": "system", "content": SYSTEM}, *chat],
            "max_tokens": self._token_count,
            "temperature": 0.8,
            "seed": SEED,
            "stream_options": {"include_usage": True},
        }

    # ------------------------------------------------------------ output

    def _title(self, text: str) -> None:
        if self._quiet:
            return
        if console.is_terminal:
            console.rule(f"[bold]{text}", align="left")
        else:
            console.print(f"\n{text}\n")

    def _ask(self, question: str) -> None:
        self._printed = 0
        if not self._quiet:
            console.print(f"[dim]user:[/] {question}\n[dim]assistant:[/] ", end="")

    def _type(self, answer: Answer) -> None:
        new = answer.events[-1].text
        if new and not self._quiet:
            console.print(Text(new), end="", soft_wrap=True)

    def _mark(self, text: str, color: str) -> None:
        if not self._quiet:
            console.print(f" [bold {color}]⟨{escape(text)}⟩[/] ", end="")

    def _note(self, text: str) -> None:
        if not self._quiet:
            console.print(f"\n{text}\n", style="italic")

    def _end_answer(self, answer: Answer) -> None:
        if not answer.done:
            raise OpsError(f"the stream did not end as it should: {answer.describe()}")
        if not self._quiet:
            console.print()

    def _timeline(self, figures: Figures) -> None:
        if self._quiet:
            return
        self._title("What the kill of the engine cost")
        bar_cells = max(8, min(BAR_CELLS_MOST, console.width - BAR_MARGIN_CELLS))
        longest = max(figures.parts_ms.values(), default=0.0) or 1.0
        for name, color in PARTS:
            part = figures.parts_ms[name]
            cells = max(1, round(bar_cells * part / longest)) if part > 0 else 0
            console.print(f"  {name.replace('_', ' '):<12}{part:9.1f} ms  [{color}]{'█' * cells}[/]")
        total = sum(figures.parts_ms.values())
        console.print(f"  {'all':<12}{total:9.1f} ms  (seen by the client: {figures.seen_gap_ms:.1f} ms)")
        ratio = figures.cold_ms / figures.seen_gap_ms
        console.print(f"  {'cold restart':<12}{figures.cold_ms:9.1f} ms  [bold]{ratio:.0f} times as long[/]")
        console.print(f"  {'':<12}{figures.cold_start_ms:9.1f} ms  of it to start a process and load the model")
        console.print(
            f"  {'':<12}{figures.cold_recompute_ms:9.1f} ms  to compute {figures.context_tokens} tokens again"
        )
        console.print(
            f"  {figures.restored_tokens} tokens restored, {figures.forced_tokens} fed again by forced decode\n"
        )


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _check_ids(answer: Answer) -> None:
    if answer.ids != list(range(answer.ids[0], answer.ids[0] + len(answer.ids))):
        raise OpsError(f"event ids have a gap or a repeat: {answer.ids}")


# ---------------------------------------------------------------- the baseline


def cold_restart(system: System, model: Model, token_count: int) -> tuple[float, float]:
    """(start, recompute) in ms of a fresh engine process that knows nothing, for a context of that many tokens."""
    with scratch.directory("cold") as directory:
        paths = Paths.at(directory / "data", directory / "lanes").make()
        settings = _engine_settings(paths, model)
        arguments = ("--engine", "e0", "--incarnation", "1")
        command = ChildCommand("cold", "engine.main", settings, arguments)
        began = time.monotonic()
        process = subprocess.Popen(
            command.line,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
        )
        try:
            assert process.stdin is not None
            process.stdin.write(command.input)
            process.stdin.close()
            _wait_ready(paths, process)
            ready = time.monotonic()
            _first_token(paths, token_count)
            return (ready - began) * 1000, (time.monotonic() - ready) * 1000
        finally:
            process.kill()
            process.wait()


def _engine_settings(paths: Paths, model: Model) -> dict[str, Any]:
    from ops import config

    # The defaults, and a lane of its own on disk: this engine's captures are thrown away.
    flags = {"data_dir": str(paths.data_dir), "lane_dir": str(paths.lane_dir), "tiers.lane_bytes": 64 << 20}
    return config.load(flags, environment={}).engine_json(model.directory, model.name)


def _wait_ready(paths: Paths, process: subprocess.Popen[bytes], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            if StatusPage.open(paths.status("e0")).state == "ready":
                return
        time.sleep(0.005)
    raise OpsError(f"a cold engine did not start in {timeout_s:.0f} s (exit {process.poll()})")


def _first_token(paths: Paths, token_count: int, timeout_s: float = 120.0) -> None:
    """Submit a context of made-up tokens and wait for the token after it."""
    import socket

    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(timeout_s)
        link.connect(str(paths.engine_socket("e0")))
        link.sendall(wire.encode(messages.Attach("demo")))
        buffer = wire.FrameBuffer(wire.FROM_ENGINE)
        while data := link.recv(1 << 16):
            for message in buffer.feed(data):
                match message:
                    case messages.Hello():
                        link.sendall(wire.encode(_made_up(token_count, message.vocab_count)))
                    case messages.Step():
                        return
                    case messages.Refused():
                        raise OpsError(f"the cold engine refused {token_count} tokens: {message.message}")
    raise OpsError("the cold engine closed its socket")


def _made_up(token_count: int, vocab_count: int) -> messages.Submit:
    tokens = [17 + index % min(1000, vocab_count - 17) for index in range(token_count)]
    greedy = messages.Sampling(temperature=0.0)
    return messages.Submit("cold", 1, messages.pack_tokens(tokens), token_count, greedy, [], token_count + 1)
