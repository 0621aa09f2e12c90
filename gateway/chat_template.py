"""Messages -> prompt text by the model's own Jinja template. Stage: admit; pure, sandboxed; runs on the event loop.

Globals and filters are those that chat templates are written against in transformers (`raise_exception`,
`strftime_now`, `tojson`, special tokens by name). Source: chat_template.jinja, else tokenizer_config.json.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import ApiError, bad_request
from gateway.grammar import REASON_LIMIT
from gateway.tools import form_of_template, told_in_text

AnswerStart = Literal["header", "none", "message"]
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._knows_tools = "tools" in source
        self._knows_developer = "developer" in source
        self.tool_form = form_of_template(source)
        self._special_tokens = special_tokens

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
        *,
        start: AnswerStart = "header",
    ) -> str:
        """Prompt text up to where the assistant's answer starts. Raises ApiError if the template refuses the messages.

        options  the request's own variables for the template (`chat_template_kwargs`)
        start    behind what the template writes before an answer; behind the last message, as it is written when it has ended
                 (`none`), or within it (`message`)
        """
        own = {"messages", "tools", "add_generation_prompt", *self._special_tokens}
        for name in sorted(own.intersection(options or {})):
            raise bad_request(f"chat_template_kwargs: {name} is not yours to set", "chat_template_kwargs")
        if not self._knows_developer:  # such a template drops that role, or writes one that its model never saw
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if not self._knows_tools:
            messages, tools = told_in_text(messages, tools or []), None
        try:
            text = self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=start == "header",
                **self._special_tokens,
                **(options or {}),
            )
        except Exception as error:  # a template is foreign code, and what it computes with is the request's
            said = str(error)[:REASON_LIMIT] or type(error).__name__
            raise bad_request(f"messages: the model's chat template refuses them: {said}", "messages") from error
        return _unfinished(text, messages[-1]["content"].rstrip()) if start == "message" else text


def _unfinished(text: str, content: str) -> str:
    """A prompt up to the end of what its last message says. Raises ApiError if the template does not write that as it is."""
    at = text.rfind(content) if content else -1
    if at < 0:
        hint = "the last message is empty, or the model's chat template does not write it as it is"
        raise bad_request(f"continue_final_message: {hint}", "continue_final_message")
    return text[: at + len(content)]


def load_chat_template(model_dir: Path) -> ChatTemplate | None:
    """The model's template, or None if it has none (then only /v1/completions serves)."""
    config = _tokenizer_config(model_dir)
    source = _source(model_dir, config)
    return None if source is None else ChatTemplate(source, _special_tokens(config))


def has_chat_template(model_dir: Path) -> bool:
    """Whether the model has one, without compiling it."""
    return _source(model_dir, _tokenizer_config(model_dir)) is not None


def _tokenizer_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "tokenizer_config.json"
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}


def _source(model_dir: Path, config: dict[str, Any]) -> Any:
    file = model_dir / "chat_template.jinja"
    return file.read_text() if file.exists() else _named_default(config.get("chat_template"))


def no_chat_template() -> ApiError:
    hint = "this model has no chat template; use /v1/completions"
    return ApiError(400, f"messages: {hint}", code="no_chat_template", param="messages")


def _named_default(value: Any) -> str | None:
    """Older files hold a list of named templates; `default` is the one for plain chat."""
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        return named.get("default")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what training learns from; for a prompt it is just its content."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML characters, which a model must not see."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
