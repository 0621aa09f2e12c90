"""PTX text, cut into functions and statements with their places, so that text can be put in between and nothing else changes.

Knows as much of the language as that needs: comments, strings, scopes, vector operands, labels, predicates, line directives.
Source: NVIDIA, PTX ISA, chapters "Syntax" and "Instruction Operands".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LINE_DIRECTIVES = (".loc", ".file")
_LABEL = re.compile(r"[A-Za-z_$%][\w$]*\s*:(?!:)")
_HEADER = re.compile(r"(\.entry|\.func)\b")
_NAME = re.compile(r"(?:\.entry|\.func)\s*(?:\([^)]*\)\s*)?([A-Za-z_$%][\w$]*)")
_PREDICATE = re.compile(r"@(!?)\s*([%\w$]+)\s+")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Statement:
    """One instruction or directive, `text[start:end]` with its semicolon; comments are blanked in `code`."""

    start: int
    end: int
    code: str

    @property
    def predicate(self) -> tuple[str, bool] | None:
        """(register, negated) of a guarded instruction."""
        match = _PREDICATE.match(self.code)
        return (match.group(2), match.group(1) == "!") if match else None

    @property
    def operation(self) -> str:
        """The opcode with its modifiers, as in `st.global.v4.b32`."""
        return _PREDICATE.sub("", self.code, count=1).split(None, 1)[0].rstrip(";")

    @property
    def operands(self) -> str:
        """What follows the opcode, without the semicolon."""
        parts = _PREDICATE.sub("", self.code, count=1).rstrip(";").split(None, 1)
        return parts[1].strip() if len(parts) > 1 else ""


@dataclass(slots=True)
class Function:
    """An `.entry` or a `.func` with a body, whose statements are listed in order, those of inner scopes too."""

    name: str
    is_entry: bool
    body_start: int  # just behind the opening brace
    body_end: int  # at the closing brace
    statements: list[Statement] = field(default_factory=list)


def blanked(text: str) -> str:
    """The text with comments and strings replaced by spaces, place by place."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group(0))

    return re.sub(r'"[^"\n]*"', blank, _COMMENT.sub(blank, text))


def functions(text: str) -> list[Function]:
    """All functions of a module that have a body."""
    code, found, at = blanked(text), [], 0
    while match := _HEADER.search(code, at):
        name = _NAME.match(code, match.start())
        body, stop = code.find("{", match.end()), code.find(";", match.end())
        if name is None or body < 0:
            at = match.end()
            continue
        if 0 <= stop < body:  # a declaration only
            at = stop
            continue
        end = _closing(code, body)
        function = Function(name.group(1), match.group(1) == ".entry", body + 1, end)
        function.statements = list(_statements(code, body + 1, end))
        found.append(function)
        at = end
    return found


def _closing(code: str, opening: int) -> int:
    depth = 0
    for at in range(opening, len(code)):
        if code[at] == "{":
            depth += 1
        elif code[at] == "}":
            depth -= 1
            if depth == 0:
                return at
    raise ValueError("a function of the PTX text has no end")


def _statements(code: str, at: int, end: int) -> list[Statement]:
    found = []
    while at < end:
        if code[at].isspace() or code[at] in "{};":  # between statements these are scopes and empty statements
            at += 1
            continue
        if code.startswith(_LINE_DIRECTIVES, at):
            at = _line_end(code, at, end)
            continue
        if label := _LABEL.match(code, at, end):
            at = label.end()
            continue
        stop = code.index(";", at, end) + 1
        found.append(Statement(at, stop, code[at:stop]))
        at = stop
    return found


def _line_end(code: str, at: int, end: int) -> int:
    stop = code.find("\n", at, end)
    return end if stop < 0 else stop + 1
