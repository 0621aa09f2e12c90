"""Text of an answer -> text for the user and calls of tools, as it comes. Stage: deliver; pure, no I/O.

A function of the text alone, fed piece by piece: a replay of the journal gives the same deltas. Two forms are known:

    hermes  <tool_call> {"name": "f", "arguments": {...}} </tool_call> on three lines; any number, text around them (Hermes, Qwen)
    llama   {"name": "f", "parameters": {...}} as the whole answer, several separated by ";" (Llama 3)

Arguments are passed on as the model writes them, so a client sees them grow. What turns out to be no call is given out as text.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What became known of one call; id and name come with the first delta of it only."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""

    def view(self) -> dict[str, Any]:
        """As OpenAI streams it."""
        function = {"name": self.name, "arguments": self.arguments} if self.name else {"arguments": self.arguments}
        head = {"index": self.index, "id": self.id, "type": "function"} if self.id else {"index": self.index}
        return {**head, "function": function}


@dataclass(slots=True)
class Said:
    """What a piece of text made certain."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolParser:
    """One answer. `form` is "hermes" or "llama"; `names` are the tools that were offered."""

    def __init__(self, form: str, names: list[str], stream_id: str) -> None:
        self._hermes = form == "hermes"
        self._names = names
        self._stream_id = stream_id
        self._buffer = ""
        self._state = "text" if self._hermes else "start"
        self._call: _Call | None = None
        self._space = ""  # behind a call
        self._sent = 0  # characters of the current call's arguments
        self.count = 0  # calls so far

    def push(self, text: str) -> Said:
        """Take in the next text."""
        said = Said()
        self._buffer += text
        while self._step(said):
            pass
        return said

    def finish(self) -> Said:
        """The text has ended: what was held back is text, unless a call's name was given out already."""
        said = Said()
        if self._call is not None and not self._call.announced:
            said.content = (OPEN if self._hermes else "") + self._call.raw
        if self._state in ("text", "start"):
            self._give(said, self._buffer)
        self._buffer, self._call = "", None
        return said

    def _step(self, said: Said) -> bool:
        """One move; False if more text is needed."""
        if not self._buffer:
            return False
        return {"text": self._text, "start": self._start, "call": self._in_call, "after": self._after}[self._state](
            said
        )

    def _text(self, said: Said) -> bool:
        """Outside of calls: hold back what may begin a tag."""
        if not self._hermes:
            self._give(said, self._buffer)
            self._buffer = ""
            return False
        at = self._buffer.find(OPEN)
        if at < 0:
            keep = _possible_start(self._buffer, OPEN)
            self._give(said, self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        self._give(said, self._buffer[:at])
        self._buffer = self._buffer[at + len(OPEN) :]
        self._begin()
        return True

    def _give(self, said: Said, text: str) -> None:
        """White space between calls is no text: it is held back until text follows it."""
        text = self._space + text
        self._space = text if self.count and not text.strip() else ""
        if not self._space:
            said.content += text

    def _start(self, said: Said) -> bool:
        """The beginning of a llama answer decides: an object is a call."""
        text = self._buffer.lstrip()
        if not text or (PYTHON_TAG.startswith(text) and text != PYTHON_TAG):
            return False
        text = text.removeprefix(PYTHON_TAG).lstrip()
        if not text:
            return False
        if text[0] == "{":
            self._buffer = text
            self._begin()
        else:
            self._state = "text"
        return True

    def _begin(self) -> None:
        self._call, self._sent, self._state, self._space = _Call(), 0, "call", ""

    def _in_call(self, said: Said) -> bool:
        call = self._call
        assert call is not None
        taken = call.push(self._buffer)
        self._buffer = self._buffer[taken:]
        broken = self._hermes and not call.done and (not call.begun_well or call.raw.endswith(CLOSE))
        if call.name and (self._hermes or call.name in self._names):
            self._announce(said, call)
        if call.done or broken:
            if not call.announced:
                self._give(said, (OPEN if self._hermes else "") + call.raw)
            self._call = None
            self._state = "text" if broken or not (self._hermes or call.announced) else "after"
            return True
        return False

    def _announce(self, said: Said, call: _Call) -> None:
        """Give out what is new of a call whose name is known."""
        known = call.arguments
        fragment = known[self._sent :]
        self._sent = len(known)
        if not call.announced:
            call.announced = True
            said.calls.append(CallDelta(self.count, fragment, self._call_id(), call.name))
            self.count += 1
        elif fragment:
            said.calls.append(CallDelta(self.count - 1, fragment))

    def _after(self, said: Said) -> bool:
        """Behind a call: its closing tag, or another llama call."""
        text = self._buffer.lstrip()
        if not text:
            return False
        if self._hermes:
            if CLOSE.startswith(text) and text != CLOSE:
                return False
            self._buffer, self._state = text.removeprefix(CLOSE), "text"
            return True
        text = text.lstrip("; \n\t\r")
        self._buffer, self._state = text, "start" if text.startswith("{") else "text" if text else "after"
        return bool(text)

    def _call_id(self) -> str:
        data = f"{self._stream_id}:{self.count}".encode()
        return "call_" + hashlib.blake2b(data, digest_size=12, person=b"concordia-tools").hexdigest()


class _Call:
    """One call's JSON object, read character by character: its name, and its arguments as far as they are written."""

    def __init__(self) -> None:
        self.raw = ""
        self.name = ""
        self.done = False
        self.announced = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._string_at = 0
        self._expect = "key"  # of the outer object: key, colon, value, comma
        self._key = ""
        self._value_at = -1
        self._arguments = ""
        self._arguments_at = -1  # of an object that is still being written

    @property
    def begun_well(self) -> bool:
        """What came so far may be an object."""
        return self.raw.lstrip()[:1] in ("", "{")

    @property
    def arguments(self) -> str:
        """JSON text of the arguments so far; "{}" for a call that ends without any."""
        if self._arguments_at >= 0:
            return self.raw[self._arguments_at :]
        return self._arguments or ("{}" if self.done else "")

    def push(self, text: str) -> int:
        """Take characters up to the end of the object; returns how many."""
        for index, char in enumerate(text):
            self.raw += char
            self._take(char, len(self.raw) - 1)
            if self.done or not self.begun_well or self.raw.endswith(CLOSE):
                return index + 1
        return len(text)

    def _take(self, char: str, at: int) -> None:
        if self._in_string:
            self._take_in_string(char, at)
        elif char == '"':
            self._in_string, self._string_at = True, at
            self._begin_value(at)
        elif char in "{[":
            self._begin_value(at)
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth <= 1 and self._value_at >= 0:
                self._end_value(at + (self._depth == 1))
            self.done = self._depth <= 0
        elif self._depth == 1 and char == ":" and self._expect == "colon":
            self._expect = "value"
        elif self._depth == 1 and char == ",":
            if self._value_at >= 0:
                self._end_value(at)
            self._expect = "key"
        elif not char.isspace():
            self._begin_value(at)

    def _take_in_string(self, char: str, at: int) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1 and self._expect == "key":
                self._key, self._expect = _loads(self.raw[self._string_at : at + 1]), "colon"
            elif self._depth == 1 and self._value_at >= 0:
                self._end_value(at + 1)

    def _begin_value(self, at: int) -> None:
        if self._depth == 1 and self._expect == "value" and self._value_at < 0:
            self._value_at = at
            if self.raw[at] == "{" and self._key in ("arguments", "parameters"):
                self._arguments_at = at

    def _end_value(self, end: int) -> None:
        text = self.raw[self._value_at : end].strip()
        self._value_at, self._expect = -1, "comma"
        if self._key == "name":
            self.name = _loads(text)
        elif self._key in ("arguments", "parameters"):
            self._arguments_at = -1
            self._arguments = _loads(text) if text.startswith('"') else "{}" if text == "null" else text


def _loads(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return text.strip('"')


def _possible_start(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    for count in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-count:]):
            return count
    return 0
