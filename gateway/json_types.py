"""Types by the names that JSON has for them: what messages to clients of any language speak. Stage: admit; pure."""

from __future__ import annotations

import re
from typing import Any

_NAMES = {
    "str": "string",
    "bytes": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "NoneType": "null",
}
_TYPES = re.compile(r"`([^`]*)`")


def json_type(value: Any) -> str:
    """Of a value that was JSON."""
    name = type(value).__name__
    return _NAMES.get(name, name)


def in_json_words(said: str) -> str:
    """msgspec's "Expected `float | null`, got `str`" as "Expected number or null, got string"; other messages without backquotes."""
    if not said.startswith("Expected `"):
        return said.replace("`", "")
    return _TYPES.sub(lambda types: " or ".join(_NAMES.get(name, name) for name in types[1].split(" | ")), said)
