"""Request bodies of the OpenAI API -> checked values. Stage: admit; pure; runs on the event loop.

Unknown fields that clients commonly send are ignored. Fields that would change the answer and aren't served are
refused with a 400 that names them: an ignored `tools` would be a silent lie.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from engine.messages import Sampling
from gateway.errors import ApiError, bad_request, not_supported

STOP_COUNT_LIMIT = 16
TOP_LOGPROBS_LIMIT = 20
CHOICES_LIMIT = 16
SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")


MAY_BE_SILENT = ("assistant", "tool", "function")  # roles whose messages may have no content
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message; `content` is text or a list of parts."""

    role: str
    content: str | list[dict[str, Any]] | None | msgspec.UnsetType = msgspec.UNSET
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both forms share. None is what clients send for "not set"."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_id: str | None = None
    adapter: str | None = None
    store: bool | None = None
    user: str | None = None
    capture: bool | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    regex: Any = None
    grammar: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None


class ChatRequest(_Common, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    audio: Any = None
    modalities: list[str] | None = None


class CompletionRequest(_Common, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    best_of: int | None = None


Request = ChatRequest | CompletionRequest


class Wish(msgspec.Struct, frozen=True):
    """What either form asks for, once checked. max_tokens 0: not named."""

    sampling: Sampling
    seeded: bool
    stop: list[str]
    max_tokens: int
    include_usage: bool
    stream: bool
    store: bool
    session: str
    capture: bool


def parse_chat(body: bytes) -> ChatRequest:
    """Bytes -> checked request. Raises ApiError that names the field, or the place of a JSON error."""
    request = decode(body, ChatRequest)
    _check_common(request)
    if not request.messages:
        raise bad_request("messages: must hold at least one message", "messages")
    if request.modalities not in (None, ["text"]):
        raise not_supported("modalities", "modalities: only ['text'] is served")
    _refuse(request, "audio")
    _check_range("max_completion_tokens", request.max_completion_tokens, 1, None)
    _check_range("top_logprobs", request.top_logprobs, 0, TOP_LOGPROBS_LIMIT)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs: needs logprobs to be true", "top_logprobs")
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Bytes -> checked request. Raises ApiError that names the field, or the place of a JSON error."""
    request = decode(body, CompletionRequest)
    _check_common(request)
    _check_range("logprobs", request.logprobs, 0, TOP_LOGPROBS_LIMIT)
    _check_range("best_of", request.best_of, 1, CHOICES_LIMIT)
    if request.best_of is not None and request.best_of < (request.n or 1):
        raise bad_request(
            f"best_of: must be at least n, got {request.best_of} for n {request.n}", "best_of", "out_of_range"
        )
    if request.stream and (request.best_of or 1) > (request.n or 1):
        raise bad_request("best_of: can't be streamed, since the best is known at the end only", "best_of")
    if request.echo:
        raise not_supported("echo", "echo: is not served; the prompt is not repeated")
    for name in ("tools", "tool_choice"):
        if getattr(request, name):
            raise not_supported(name, f"{name}: is served by /v1/chat/completions only")
    if request.suffix:
        raise not_supported("suffix", "suffix: is not served")
    return request


def wish_of(request: Request, session_header: str | None, random_seed: int) -> Wish:
    """The values that sampling and delivery need. `random_seed` is used if the request names none."""
    session = _session(request.session_id, session_header)
    if request.capture is False and (session or request.store):
        raise bad_request(
            "capture: a session or a stored stream is kept by capturing it; drop one of the two", "capture"
        )
    limits = [request.max_tokens]
    if isinstance(request, ChatRequest):
        limits.insert(0, request.max_completion_tokens)
    return Wish(
        sampling=_sampling(request, random_seed),
        seeded=request.seed is not None,
        stop=_stops(request.stop),
        max_tokens=next((limit for limit in limits if limit is not None), 0),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        stream=bool(request.stream),
        store=bool(request.store),
        session=session,
        capture=request.capture is not False,
    )


def choice_counts(request: Request) -> tuple[int, int]:
    """(choices that are answered, choices that are computed)."""
    shown = request.n or 1
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    return shown, best_of or shown


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: content is text."""
    return [_template_message(message, index) for index, message in enumerate(messages)]


def prompt_tokens(prompt: str | list[Any]) -> str | list[int]:
    """The one prompt of a completion request: text, or token ids. Lists of one prompt are unpacked."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], str | list):
        return prompt_tokens(prompt[0])
    if prompt and all(isinstance(item, str | list) for item in prompt):
        raise not_supported("prompt", f"prompt: one prompt a request is served, got {len(prompt)}")
    for index, item in enumerate(prompt):
        if not isinstance(item, int) or isinstance(item, bool):
            raise bad_request(f"prompt[{index}]: expected a token id, got {_type_name(item)}", "prompt", "invalid_type")
    return prompt


def check_session_id(session: str) -> str:
    """A session id that is safe in logs, headers and paths. Raises ApiError."""
    if not SESSION_ID.fullmatch(session):
        hint = "1 to 128 letters, digits or any of . _ : @ -, a letter or digit first"
        raise bad_request(f"session_id: expected {hint}", "session_id")
    return session


# ---------------------------------------------------------------- decoding


def decode(body: bytes, form: type) -> Any:
    try:
        return msgspec.json.decode(body, type=form)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error), body) from error
    except RecursionError as error:
        raise bad_request("the body is nested too deeply", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(body, str(error)) from error


def _malformed(body: bytes, cause: str) -> ApiError:
    """Line and column of what isn't JSON."""
    if not body.strip():
        return bad_request("the body is empty; send a JSON object", code="invalid_json")
    try:
        json.loads(body)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        return bad_request(f"the body is not valid JSON: {error.msg} at {where}", code="invalid_json")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        return bad_request(f"the body is not UTF-8: byte {error.start}, line {line}", code="invalid_json")
    except RecursionError:
        return bad_request("the body is nested too deeply", code="invalid_json")
    return bad_request(f"the body is not valid JSON: {cause}", code="invalid_json")


_VALIDATION = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]+)`")


def _wrong_type(cause: str, body: bytes) -> ApiError:
    """msgspec's message, turned to start with the field."""
    match = _VALIDATION.match(cause)
    assert match is not None, "the pattern matches any text"
    path = (match["path"] or "").removeprefix(".")
    missing = _MISSING.match(match["what"])
    if missing:
        field = f"{path}.{missing['field']}" if path else missing["field"]
        return bad_request(f"{field}: is required", field, "missing_required_parameter")
    value = json.loads(body).get(path) if path.isidentifier() else None
    if isinstance(value, float) and abs(value) >= 1 << 63:
        return bad_request(f"{path}: must be a whole number of 64 bits, got {value:g}", path, "out_of_range")
    what = match["what"].replace("`", "")
    what = what[:1].lower() + what[1:]
    return bad_request(f"{path or 'the body'}: {what}", path or None, "invalid_type")


# ---------------------------------------------------------------- checks


def _check_common(request: Request) -> None:
    _check_range("n", request.n, 1, CHOICES_LIMIT)
    _check_range("temperature", request.temperature, 0, 2)
    _check_range("top_p", request.top_p, 0, 1, above=True)
    _check_range("top_k", request.top_k, -1, None)
    _check_range("min_p", request.min_p, 0, 1)
    _check_range("presence_penalty", request.presence_penalty, -2, 2)
    _check_range("frequency_penalty", request.frequency_penalty, -2, 2)
    _check_range("seed", request.seed, -(1 << 63), (1 << 64) - 1)
    _check_range("max_tokens", request.max_tokens, 1, None)
    for name in ("functions", "function_call", "logit_bias"):
        _refuse(request, name)
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options: needs stream to be true", "stream_options")


def _refuse(request: Request, name: str) -> None:
    if getattr(request, name):
        raise not_supported(name, f"{name}: is not served; leave it out")


def _check_range(name: str, value: float | None, low: float | None, high: float | None, *, above: bool = False) -> None:
    if value is None:
        return
    too_low = low is not None and (value < low or (above and value == low))
    if too_low or (high is not None and value > high):
        start = "above" if above else "at least"
        bounds = [f"{start} {low}"] if low is not None else []
        bounds += [f"at most {high}"] if high is not None else []
        raise bad_request(f"{name}: must be {' and '.join(bounds)}, got {value}", name, "out_of_range")


# ---------------------------------------------------------------- values


def _sampling(request: Request, random_seed: int) -> Sampling:
    seed = random_seed if request.seed is None else request.seed % (1 << 63)
    return Sampling(
        temperature=1.0 if request.temperature is None else float(request.temperature),
        top_p=1.0 if request.top_p is None else float(request.top_p),
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        seed=seed,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logprobs=_logprobs(request),
    )


def _logprobs(request: Request) -> int:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else -1
    return -1 if request.logprobs is None else request.logprobs


def _stops(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else list(stop or [])
    if len(stops) > STOP_COUNT_LIMIT:
        raise bad_request(f"stop: at most {STOP_COUNT_LIMIT} strings, got {len(stops)}", "stop", "out_of_range")
    if "" in stops:
        raise bad_request("stop: an empty string would stop every answer at once", "stop")
    return stops


def _session(field: str | None, header: str | None) -> str:
    if field and header and field != header:
        raise bad_request(f"session_id: body says {field!r}, X-Session-Id says {header!r}; send one", "session_id")
    session = field or header or ""
    return check_session_id(session) if session else ""


def _template_message(message: ChatMessage, index: int) -> dict[str, Any]:
    content = message.content
    if message.role not in ROLES:
        field = f"messages[{index}].role"
        raise bad_request(f"{field}: must be one of {', '.join(ROLES)}, got {message.role!r}", field)
    if content is None and message.role not in MAY_BE_SILENT:
        field = f"messages[{index}].content"
        raise bad_request(f"{field}: must be text or a list of parts, not null", field, "invalid_type")
    if content is msgspec.UNSET:
        if message.role not in MAY_BE_SILENT:
            field = f"messages[{index}].content"
            raise bad_request(f"{field}: is required", field, "missing_required_parameter")
        content = None
    if isinstance(content, list):
        content = "".join(_part_text(part, f"messages[{index}].content[{at}]") for at, part in enumerate(content))
    rendered: dict[str, Any] = {"role": message.role, "content": content or ""}
    if message.name:
        rendered["name"] = message.name
    if message.tool_call_id:
        rendered["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        where = f"messages[{index}].tool_calls"
        rendered["tool_calls"] = [_call(call, f"{where}[{at}]") for at, call in enumerate(message.tool_calls)]
    return rendered


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call of an earlier answer; templates take its arguments as an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        field = f"{where}.function.name"
        raise bad_request(f"{field}: is required", field, "missing_required_parameter")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # as the model wrote it
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _part_text(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text"):
        raise not_supported(where, f"{where}: only parts of type 'text' are served, got {kind!r}")
    text = part.get("text")
    if not isinstance(text, str):
        raise bad_request(f"{where}.text: expected str, got {_type_name(text)}", where, "invalid_type")
    return text


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
