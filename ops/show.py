"""What commands print for people: rich tables, a progress line, the welcome of `serve`. Pure output; runs in the command's process."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import rich.progress
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, TaskProgressColumn, TimeRemainingColumn
from rich.status import Status
from rich.syntax import Syntax
from rich.table import Table

from ops.config import Config
from ops.models import Model

# Into a file or a pipe nothing is folded at 80 columns.
console = Console(width=None if sys.stdout.isatty() else 200)
errors = Console(stderr=True)
PLAIN_INTERVAL_S = 5.0


class Progress:
    """One changing line on a terminal; on anything else a plain line whenever the text changes."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._status = Status(text, console=errors) if errors.is_terminal else None

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """Replace the line."""
        if text == self._text:
            return
        self._text = text
        if self._status is not None:
            self._status.update(text)
        else:
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr, flush=True)


class Bar:
    """A progress bar on a terminal; on anything else a line every few seconds. On stderr, and nothing at all if `quiet`."""

    def __init__(self, text: str, *, quiet: bool = False) -> None:
        self._text = text
        self._bar: rich.progress.Progress | None = None
        self._plain = not quiet and not errors.is_terminal
        self._said_at = time.monotonic()
        if not quiet and errors.is_terminal:
            columns = (
                "[progress.description]{task.description}",
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
            )
            self._bar = rich.progress.Progress(*columns, console=errors, transient=True)
            self._task = self._bar.add_task(text, total=None)

    def __enter__(self) -> Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, text: str = "") -> None:
        """Say how far it is."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=max(total, 1), description=text or self._text)
        elif self._plain and time.monotonic() - self._said_at >= PLAIN_INTERVAL_S:
            self._said_at = time.monotonic()
            with contextlib.suppress(OSError):  # nobody reads it, or its disk is full: that ends no work
                print(f"{text or self._text}: {100 * done // max(total, 1)} %", file=sys.stderr, flush=True)


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def counted(count: int, noun: str) -> str:
    """`1 session`, `2 sessions`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """A plain table; None is shown as a dash."""
    shown = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*("-" if cell is None else str(cell) for cell in row))
    return shown


def print_welcome(url: str, config: Config, model: Model, *, seconds: float) -> None:
    """What to try, once the gateway can serve."""
    curl, python = examples(url, config, model)
    if not console.is_terminal:
        print(f"concordia serves at {url} (after {seconds:.1f} s)\n\n{curl}\n\n{python}\n", flush=True)
        return
    console.print(Panel.fit(f"[bold]concordia[/] serves at [bold]{url}[/]  (after {seconds:.1f} s; Ctrl-C ends it)"))
    console.print("Try:\n")
    print_code(curl, "bash")
    console.print("\nor, with the openai client:\n")
    print_code(python, "python")
    console.print("\nThen kill an engine while it answers, with `kill -9` and its pid from `concordia status`.\n")


def print_code(code: str, language: str) -> None:
    """In colours, and never folded: a terminal shows a long line in several rows, and gives it back whole when it is copied."""
    console.print(Syntax("", language, background_color="default").highlight(code), soft_wrap=True, end="")


def examples(url: str, config: Config, model: Model) -> tuple[str, str]:
    """(a curl command, lines of Python) that this model answers: a chat, or a text to go on with where it knows no chat."""
    from gateway.chat_template import has_chat_template

    has_text = (model.directory / "tokenizer.json").exists()
    if has_text and has_chat_template(model.directory):
        method, body = "chat.completions", '"messages": [{"role": "user", "content": "Tell me about the sea."}]'
        arguments, part_text = 'messages=[{"role": "user", "content": "Hello"}]', "delta.content"
    else:  # without a tokenizer a prompt is token ids
        body = '"max_tokens": 64, "prompt": ' + ('"Once upon a time"' if has_text else "[1, 2, 3]")
        method, part_text = "completions", "text"
        arguments = "max_tokens=64, prompt=" + ('"Once upon a time"' if has_text else "[1, 2, 3]")
    key = ' \\\n  -H "Authorization: Bearer $CONCORDIA_API_KEY"' if config.gateway.api_key else ""
    curl = (
        f"curl -N {url}/v1/{method.replace('.', '/')} -H 'Content-Type: application/json'{key} \\\n"
        f"""  -d '{{"model": "{model.name}", "stream": true, {body}}}'"""
    )
    api_key = 'os.environ["CONCORDIA_API_KEY"]' if config.gateway.api_key else '"-"'
    imports = "import os\n\nimport openai" if config.gateway.api_key else "import openai"
    python = (
        f'{imports}\n\nclient = openai.OpenAI(base_url="{url}/v1", api_key={api_key})\n'
        f'for part in client.{method}.create(model="{model.name}", stream=True, {arguments}):\n'
        f'    print(part.choices[0].{part_text} or "", end="", flush=True)'
    )
    return curl, python
