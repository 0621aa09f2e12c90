"""What an answer must match -> a grammar as the engine takes it. Stage: admit; pure, off the event loop where a schema is long.

OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, and plain `regex` and `grammar` (Lark or GBNF) come to the
same: one llguidance grammar, checked here, so that one which can't be compiled is a 400 that names its field.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from engine.messages import grammar_fuel
from gateway.errors import ApiError, bad_request, not_supported, quoted
from gateway.json_types import json_type

REASON_LIMIT = 300  # characters
_TOO_LARGE = (
    "fuel exhausted",
    "too big",
    "too many",
    "precomputation failed",
)  # how llguidance says that a limit was reached
# Between JSON's tokens: enough for any indentation a model likes, and an end to it. What of a schema can't be enforced, llguidance
# tells then as a warning, which `check` decides about.
JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{1,24}", "lenient": True}
_NO_FAULT = "Unknown format"  # JSON Schema 2020-12 has it ignored
_EXCERPT = re.compile(r"\n +[0-9]+ \| ")  # llguidance repeats lines of a grammar in which the schema was put here
_SCHEMA_FIELD = "response_format.json_schema.schema"
_OF_A_SCHEMA = '{"grammars":[{"name":"json_schema",'
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
PLAIN = (*GUIDED, "regex", "grammar")
Wished = tuple[str, str, Any] | None  # field, form, value
STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")


def constrained(request: Any) -> bool:
    """Whether a request may need a grammar."""
    fields = ("response_format", "structured_outputs", "tool_choice", *PLAIN)
    return any(getattr(request, field) is not None for field in fields)


def grammar_of(request: Any) -> tuple[str, str]:
    """(grammar, the field that asks for it), both "" if the answer is free. Raises ApiError that names the field."""
    wish = _wish(request)
    if wish is None:
        return "", ""
    field, form, value = wish
    grammar = _FORMS[form](field, value)
    wrapped = request.response_format["json_schema"] if field == _SCHEMA_FIELD else {}
    check(grammar, field, lenient=wrapped.get("strict") is False)
    return grammar, field


def answer_rule(request: Any) -> str:
    """The same as the body of a rule in Lark's notation, for an answer that may also be a tool call. "": it can't be one."""
    wish = _wish(request)
    if wish is None or wish[1] == "grammar":
        return ""
    _, form, value = wish
    if form == "regex":
        return "/" + value.replace("/", "\\/") + "/"
    if form == "choice":
        return " | ".join(json.dumps(choice) for choice in value)
    schema = {"type": "object"} if form == "json_object" else json.loads(value) if isinstance(value, str) else value
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS} if isinstance(schema, dict) else schema)


def _wish(request: Any) -> Wished:
    """The one thing that says what the answer must match. Raises ApiError if there are several."""
    wishes = [wish for wish in (_response_format(request), _structured(request), *_guided(request)) if wish]
    if len(wishes) > 1:
        names = " and ".join(field for field, _, _ in wishes)
        raise bad_request(f"{wishes[1][0]}: {names} each say what the answer must match; send one", wishes[1][0])
    return wishes[0] if wishes else None


def check(grammar: str, field: str, *, lenient: bool = False) -> None:
    """Raises ApiError if a grammar can't be compiled, or not all of its schemas be enforced, unless `lenient`."""
    from llguidance import LLMatcher

    failed, said = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits(grammar))
    if failed:
        raise _refused(field, _EXCERPT.split(said[0].strip())[0] if said else "unknown reason")
    for trouble in said:
        if not lenient and not trouble.startswith(_NO_FAULT):
            overlaps = "an answer could match two branches of a oneOf; use anyOf"
            raise _refused(field, overlaps if trouble.startswith("oneOf") else trouble)
    trouble = _trouble_at_its_begin(grammar)
    if trouble.startswith("NoExtensionBias"):
        reason = "nothing can match it; give a rule or $ref that begins with itself a way out of itself"
        raise ApiError(400, f"{field}: {reason}", code="invalid_grammar", param=field)
    if any(words in trouble for words in _TOO_LARGE):
        reason = "it stands for too much; have it repeat less, above all what is repeated within something repeated"
        raise ApiError(400, f"{field}: {reason}", code="invalid_grammar", param=field)


def limits(grammar: str) -> Any:
    """What looking at a grammar may cost."""
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=grammar_fuel(grammar))


def _refused(field: str, reason: object) -> ApiError:
    return ApiError(400, f"{field}: it can't be compiled: {reason}", code="invalid_grammar", param=field)


def _trouble_at_its_begin(grammar: str) -> str:
    """Why no answer can begin, in llguidance's words; "" if one can. What else is wrong with it, the model's own tokens show."""
    from llguidance import LLMatcher

    if grammar.startswith(_OF_A_SCHEMA) and "$ref" not in grammar and '"pattern' not in grammar:
        return ""  # a large schema takes as long again to look at
    matcher = LLMatcher(_bytes_vocabulary(), grammar, log_level=0, limits=limits(grammar))
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    if mask.bit_count() == 1 and not matcher.is_error():  # what must come was looked at as well; the first step tells
        matcher.consume_token(mask.bit_length() - 1)
    return str(matcher.get_error()) if matcher.is_error() else ""


@lru_cache(maxsize=1)
def _bytes_vocabulary() -> Any:
    """A token for each byte."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def json_grammar(field: str, schema: Any) -> str:
    """A JSON schema (object, true, or text of one) as a grammar."""
    from llguidance import LLMatcher

    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"{field}: expected a JSON schema, got text that is no JSON: {error}", field) from error
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        said = f"{field}: expected a JSON schema, an object, got {json_type(schema)}"
        raise bad_request(said, field, "invalid_type")
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:  # such as a number of hundreds of digits
        raise _refused(field, _short(error)) from error


def _short(error: Exception) -> str:
    """What it says, without repeating a long input."""
    said = str(error)
    return said if len(said) <= REASON_LIMIT else said[:REASON_LIMIT] + "…"


def lark_grammar(text: str) -> str:
    """A grammar in Lark's notation."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


def _regex_grammar(field: str, text: Any) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(_text(field, text))


def _choice_grammar(field: str, choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise bad_request(f"{field}: expected a list of texts, at least one, none empty", field, "invalid_type")
    return lark_grammar("start: " + " | ".join(json.dumps(choice) for choice in choices))


def _free_grammar(field: str, text: Any) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    text = _text(field, text)
    try:
        return lark_grammar(any_to_lark(text))
    except Exception as error:  # the converter raises bare ones
        hint = "a grammar in Lark's notation has a rule `start:`, one in GBNF's a rule `root ::=`"
        raise _refused(field, f"{_short(error)}; {hint}") from error


def _object_grammar(field: str, wanted: Any) -> str:
    return json_grammar(field, {"type": "object"})


_FORMS = {
    "json": json_grammar,
    "json_object": _object_grammar,
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "grammar": _free_grammar,
}


def _response_format(request: Any) -> Wished:
    given = request.response_format or {}
    form = given.get("type", "text")
    if form == "text":
        return None
    if form == "json_object":  # llama-server takes a schema beside it
        if given.get("schema") is not None:
            return "response_format.schema", "json", given["schema"]
        return "response_format", "json_object", True
    if form != "json_schema":
        served = "text, json_object, json_schema"
        raise not_supported("response_format", f"response_format: type must be one of {served}, got {quoted(form)}")
    field = _SCHEMA_FIELD.removesuffix(".schema")
    wrapped = given.get("json_schema")
    if not isinstance(wrapped, dict):
        raise bad_request(f"{field}: expected an object with a schema", field, "missing_required_parameter")
    if "schema" not in wrapped:
        raise bad_request(f"{_SCHEMA_FIELD}: is required", _SCHEMA_FIELD, "missing_required_parameter")
    return _SCHEMA_FIELD, "json", wrapped["schema"]


def _structured(request: Any) -> Wished:
    given = request.structured_outputs
    if given is None:
        return None
    if not isinstance(given, dict):
        raise bad_request("structured_outputs: expected an object", "structured_outputs", "invalid_type")
    wishes = {key: value for key, value in given.items() if value not in (None, False)}
    unknown = [key for key in wishes if key not in STRUCTURED]
    if unknown:
        field = f"structured_outputs.{unknown[0]}"
        raise not_supported(field, f"{field}: is not served; one of {', '.join(STRUCTURED)} is")
    if len(wishes) != 1:
        raise bad_request(f"structured_outputs: needs one of {', '.join(STRUCTURED)}", "structured_outputs")
    form, value = next(iter(wishes.items()))
    return f"structured_outputs.{form}", form, value


def _guided(request: Any) -> list[Wished]:
    found: list[Wished] = []
    for field in PLAIN:
        value = getattr(request, field)
        if value is not None:
            found.append((field, field.removeprefix("guided_"), value))
    return found


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise bad_request(f"{field}: expected text", field, "invalid_type")
    return value
