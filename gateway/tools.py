"""`tools` and `tool_choice` of a request -> what the template is told, what the answer must match, how it is read. Stage: admit; pure.

The model's template says in which form its calls come. A model whose template knows nothing of tools is told of them in a system
message, in the Hermes form.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from gateway.errors import ApiError, bad_request, not_supported, quoted
from gateway.grammar import JSON_OPTIONS, check, json_grammar, lark_grammar

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TOOLS_LIMIT = 128
PREAMBLE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


class ToolPlan(msgspec.Struct, frozen=True):
    """How one request uses tools.

    tools    as the template takes them; empty if the model isn't to know of any
    form     "hermes" or "llama"; "" if the answer isn't searched for calls
    grammar  what the answer must match; "" if the model may answer in text
    rules    the rule `calls` of a grammar in Lark's notation, and what it needs
    """

    tools: list[dict[str, Any]] = []
    names: list[str] = []
    form: str = ""
    grammar: str = ""
    rules: list[str] = []


def plan_of(request: Any, form: str) -> ToolPlan:
    """Check `tools`, `tool_choice` and `parallel_tool_calls`. `form` is what the model's template writes. Raises ApiError."""
    choice = _choice(request)
    if choice == "none":
        return ToolPlan()
    tools = [_checked(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("tools: two have the same name", "tools")
    if not form:
        hint = "its template writes calls in a form that isn't known; set gateway.tool_form"
        raise not_supported("tools", f"tools: are not served for this model: {hint}")
    named = choice not in ("auto", "required")
    wanted = [tool for tool in tools if not named or tool["function"]["name"] == choice]
    if not wanted:
        raise bad_request(f"tool_choice: there is no tool {quoted(choice)} in tools", "tool_choice")
    rules = _rules(wanted, form, several=not named and request.parallel_tool_calls is not False)
    if choice == "auto":
        return ToolPlan(tools, names, form, rules=rules)
    grammar = lark_grammar("\n".join(["start: calls", *rules]))
    _check_schemas(grammar, tools, wanted)
    return ToolPlan(tools, names, form, grammar, rules)


def _check_schemas(grammar: str, tools: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Raises ApiError that names the tool whose arguments can't be enforced; in part is enough for those that aren't `strict`."""
    try:
        check(grammar, "tools", lenient=not any(_strict(tool) for tool in wanted))
    except ApiError:
        for tool in wanted:
            field = f"tools[{tools.index(tool)}].function.parameters"
            check(json_grammar(field, _arguments(tool)), field, lenient=not _strict(tool))
        check(grammar, "tools", lenient=True)  # each by itself is well; together they may be too large


def _strict(tool: dict[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _arguments(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    return {"type": "object", **(tool["function"].get("parameters") or {})}


def calls_or(plan: ToolPlan, answer: str, field: str) -> str:
    """A grammar of calls or an answer, for a model that decides by itself. Raises ApiError that names `field`."""
    grammar = lark_grammar("\n".join(["start: calls | answer", *plan.rules, f"answer: {answer}"]))
    check(grammar, field, lenient=True)  # the answer's schema was looked at by itself; calls are the model's own choice
    return grammar


def form_of_template(source: str) -> str:
    """The form in which a template's model writes calls: "hermes", "llama", or "" if it is another."""
    if "tools" not in source or "<tool_call>" in source:
        return "hermes"
    return "llama" if "python_tag" in source or "ipython" in source else ""


def told_in_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: calls and results as text, the tools in the system message."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    preamble = PREAMBLE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": plain[0]["content"] + "\n\n" + preamble}, *plain[1:]]
    return [{"role": "system", "content": preamble}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", [])]
    if not calls:
        return message
    text = "\n".join([*filter(None, [message["content"]]), *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])
    return {"role": message["role"], "content": text}


def _choice(request: Any) -> str:
    """ "none", "auto", "required", or the name of the tool that must be called."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice: needs tools", "tool_choice")
        return "none"
    if len(request.tools) > TOOLS_LIMIT:
        raise bad_request(f"tools: at most {TOOLS_LIMIT}, got {len(request.tools)}", "tools", "out_of_range")
    if choice is None:
        return "auto"
    if choice in ("none", "auto", "required"):
        return str(choice)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return str(function["name"])
    expected = '\'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": …}}'
    raise bad_request(f"tool_choice: expected {expected}", "tool_choice")


def _checked(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise bad_request(f'{where}: expected {{"type": "function", "function": {{"name": …}}}}', "tools")
    if not isinstance(function.get("name"), str) or not NAME.fullmatch(function["name"]):
        raise bad_request(f"{where}.function.name: expected 1 to 64 letters, digits or any of _ . -", "tools")
    if not isinstance(function.get("parameters") or {}, dict):
        raise bad_request(f"{where}.function.parameters: expected a JSON schema, an object", "tools", "invalid_type")
    return tool


def _rules(tools: list[dict[str, Any]], form: str, several: bool) -> list[str]:
    """Calls of these tools and nothing else. A rule for each tool's arguments, so that `$ref`s stay within their own schema."""
    key = "arguments" if form == "hermes" else "parameters"
    rules, bodies = [], []
    for index, tool in enumerate(tools):
        schema = {**_arguments(tool), "x-guidance": JSON_OPTIONS}
        head = json.dumps(f'{{"name": "{tool["function"]["name"]}", "{key}": ')
        rules.append(f'body_{index}: {head} arguments_{index} "}}"\narguments_{index}: %json {json.dumps(schema)}')
        bodies.append(f"body_{index}")
    call = f"call: {' | '.join(bodies)}"
    if form == "hermes":
        call = f'call: "<tool_call>\\n" ({" | ".join(bodies)}) "\\n</tool_call>"'
    calls = 'calls: call ("\\n" call)*' if several and form == "hermes" else "calls: call"
    return [calls, call, *rules]
