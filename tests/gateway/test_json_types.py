"""Messages about types speak JSON's language, whatever the client is written in."""

from __future__ import annotations

import pytest

from gateway.json_types import in_json_words, json_type


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Expected `float | null`, got `str`", "Expected number or null, got string"),
        ("Expected `str | array | null`, got `int`", "Expected string or array or null, got integer"),
        ("Expected `object`, got `array`", "Expected object, got array"),
        ("Expected `bool | null`, got `float`", "Expected boolean or null, got number"),
        ("Object contains unknown field `int`", "Object contains unknown field int"),
    ],
)
def test_types_are_called_as_in_json(said: str, shown: str) -> None:
    assert in_json_words(said) == shown


def test_a_value_is_called_what_it_is_in_json() -> None:
    values = (None, True, 1, 1.5, "x", [], {})
    assert [json_type(value) for value in values] == [
        "null", "boolean", "integer", "number", "string", "array", "object",
    ]  # fmt: skip
