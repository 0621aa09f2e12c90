"""Request bodies of the OpenAI API -> checked values. Stage: admit; pure; runs on the event loop.

Unknown fields that clients commonly send are ignored. Fields that would change the answer and aren't served are
refused with a 400 that names them: an ignored `tools` would be a silent lie.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec

from engine.messages import Sampling
from gateway.errors import ApiError, bad_request, not_supported, quoted
from gateway.json_types import in_json_words, json_type

if TYPE_CHECKING:
    from gateway.chat_template import AnswerStart

INTEGER_LIMIT = (1 << 63) - 1
STOP_COUNT_LIMIT = 16
TOP_LOGPROBS_LIMIT = 20
CHOICES_LIMIT = 16
ALL_CHOICES_LIMIT = 128  # of all prompts of a request together
BIASED_TOKENS_LIMIT = 1024
TOKEN_ID_DIGITS = 19
STOP_TOKENS_LIMIT = 128
ALLOWED_TOKENS_LIMIT = 4096
BAD_WORDS_LIMIT = 128
# Fields of other servers that change the answer and aren't served, with the values that change nothing.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "documents": ([],),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "top_n_sigma": (-1, 0),
    "n_predict": (-1,),
    "json_schema": (),
}
HINTS = {
    "functions": "send them as tools: [{'type': 'function', 'function': …}]",
    "function_call": "send it as tool_choice",
    "web_search_options": "send a tool that searches",
    "documents": "send them in chat_template_kwargs, if the model's template writes them",
    "n_predict": "send max_tokens",
    "json_schema": "send response_format: {'type': 'json_schema', 'json_schema': {'schema': …}}",
    "prompt_logprobs": "send echo and logprobs to /v1/completions",
    "suffix": "put the model's own fill-in-the-middle tokens into the prompt, if it knows any",
    "repeat_penalty": "send repetition_penalty, which looks at the whole list",
}
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
    refusal: str | None = None
    function_call: dict[str, Any] | None = None


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
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    response_format: dict[str, Any] | None = None
    regex: Any = None
    grammar: Any = None
    functions: Any = None
    function_call: Any = None
    suffix: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    chat_template: Any = None
    repeat_penalty: Any = None
    typical_p: Any = None
    mirostat: Any = None
    dry_multiplier: Any = None
    xtc_probability: Any = None
    dynatemp_range: Any = None
    top_n_sigma: Any = None
    n_predict: Any = None
    json_schema: Any = None
    web_search_options: Any = None
    documents: Any = None
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
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    audio: Any = None
    modalities: list[str] | None = None


class CompletionRequest(_Common, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    best_of: int | None = None


Request = ChatRequest | CompletionRequest


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize, as vLLM takes it (`prompt` or `messages`) or llama-server (`content`)."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class Wish(msgspec.Struct, frozen=True):
    """What either form asks for, once checked. max_tokens 0: not named; stop_tokens: beside the model's own; namespace: whose it is."""

    sampling: Sampling
    seeded: bool
    stop: list[str]
    stop_tokens: list[int]
    max_tokens: int
    include_usage: bool
    stream: bool
    store: bool
    session: str
    capture: bool
    namespace: str = "default"


def parse_chat(body: bytes) -> ChatRequest:
    """Bytes -> checked request. Raises ApiError that names the field, or the place of a JSON error."""
    request = decode(body, ChatRequest)
    _check_common(request)
    _check_messages(request.messages)
    if request.modalities not in (None, ["text"]):
        raise not_supported("modalities", "modalities: only ['text'] is served")
    if request.audio:
        raise not_supported("audio", "audio: is not served; leave it out")
    _check_range("max_completion_tokens", request.max_completion_tokens, 1, INTEGER_LIMIT)
    _check_range("top_logprobs", request.top_logprobs, 0, TOP_LOGPROBS_LIMIT)
    _check_start(request, request.messages)
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs: needs logprobs to be true", "top_logprobs")
    return request


def _check_messages(messages: list[ChatMessage]) -> None:
    if not messages:
        raise bad_request("messages: must hold at least one message", "messages")


def _check_start(request: ChatRequest | TokenizeRequest, messages: list[ChatMessage]) -> None:
    if not request.continue_final_message:
        return
    if request.add_generation_prompt:
        raise bad_request(
            "continue_final_message: add_generation_prompt begins a new answer; send one", "continue_final_message"
        )
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls:
        raise bad_request(
            "continue_final_message: needs a text of the assistant's as the last message", "continue_final_message"
        )


def answer_start(request: ChatRequest | TokenizeRequest) -> AnswerStart:
    """Where in the prompt the answer begins."""
    if request.continue_final_message:
        return "message"
    return "none" if request.add_generation_prompt is False else "header"


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
    for name in ("tools", "tool_choice"):
        if getattr(request, name):
            raise not_supported(name, f"{name}: is served by /v1/chat/completions only")
    return request


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Bytes -> checked request. Raises ApiError."""
    request: TokenizeRequest = decode(body, TokenizeRequest)
    if sum(given is not None for given in (request.prompt, request.content, request.messages)) != 1:
        raise bad_request("prompt: send one of prompt, content and messages", "prompt")
    if request.messages is not None:
        _check_messages(request.messages)
        _check_start(request, request.messages)
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Bytes -> checked request. Raises ApiError."""
    request: DetokenizeRequest = decode(body, DetokenizeRequest)
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
        stop_tokens=list(request.stop_token_ids or []),
        max_tokens=next((max(1, limit) for limit in limits if limit is not None), 0),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        stream=bool(request.stream),
        store=bool(request.store),
        session=session,
        capture=request.capture is not False,
    )


def only_echoes(request: _Common) -> bool:
    """Whether no answer is wanted, only the prompt, as a rule with its log probabilities."""
    return isinstance(request, CompletionRequest) and bool(request.echo) and request.max_tokens == 0


def choice_counts(request: Request) -> tuple[int, int]:
    """(choices that are answered, choices that are computed)."""
    shown = request.n or 1
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    return shown, best_of or shown


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: content is text."""
    return [_template_message(message, index) for index, message in enumerate(messages)]


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a completion request, each text or token ids. Raises ApiError."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt or not all(isinstance(item, str | list) for item in prompt):
        return [_token_ids(prompt, "prompt")]
    shown, computed = choice_counts(request)
    if len(prompt) * computed > ALL_CHOICES_LIMIT:
        said = f"{len(prompt)} prompts of {computed} choices are more than {ALL_CHOICES_LIMIT} answers"
        raise bad_request(f"prompt: {said}; send them in several requests", "prompt", "out_of_range")
    if len(prompt) > 1 and computed > shown:
        raise not_supported("best_of", "best_of: is served for one prompt a request")
    return [
        item if isinstance(item, str) else _token_ids(item, f"prompt[{index}]") for index, item in enumerate(prompt)
    ]


def _token_ids(given: list[Any], where: str) -> list[int]:
    if set(map(type, given)) == {int}:
        return given
    for index, item in enumerate(given):
        if not isinstance(item, int) or isinstance(item, bool):
            said = f"{where}[{index}]: expected a token id, got {json_type(item)}"
            raise bad_request(said, "prompt", "invalid_type")
    return given


def check_session_id(session: str) -> str:
    """A session id that is safe in logs, headers and paths. Raises ApiError."""
    if not SESSION_ID.fullmatch(session):
        hint = "1 to 128 letters, digits or any of . _ : @ -, a letter or digit first"
        empty = "" if session else "; it is empty, leave it out for none"
        raise bad_request(f"session_id: expected {hint}{empty}", "session_id")
    return session


# ---------------------------------------------------------------- decoding


# Made at import: to look through a form takes a millisecond or two, which the first request would wait for.
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    form: msgspec.json.Decoder(form) for form in (ChatRequest, CompletionRequest, TokenizeRequest)
}


def decode(body: bytes, form: type) -> Any:
    try:
        decoder = _DECODERS.get(form)
        return decoder.decode(body) if decoder is not None else msgspec.json.decode(body, type=form)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error), body) from error
    except RecursionError as error:
        raise bad_request("the body is nested too deeply", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(body, str(error)) from error


def decode_object(body: bytes, form: type) -> Any:
    """As `decode`, for what operators send: one code for everything that is JSON and not the object that is expected."""
    try:
        return decode(body, form)
    except ApiError as error:
        if error.code == "invalid_json":
            raise
        raise bad_request(error.message, error.param, "invalid_body") from error


# Halves of a character beyond U+FFFF, as JSON's escapes spell it; a whole pair is one character once it is read.
_SURROGATE = re.compile("[\ud800-\udfff]")


def _malformed(body: bytes, cause: str) -> ApiError:
    """Line and column of what isn't JSON."""
    if not body.strip():
        return bad_request("the body is empty; send a JSON object", code="invalid_json")
    try:
        half = _SURROGATE.search(json.dumps(json.loads(body), ensure_ascii=False))
        if half is not None:
            said = f"the body holds \\u{ord(half[0]):04x}, half of a surrogate pair, which is no text"
            return bad_request(f"{said}; send the whole character, or leave it out")
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        return bad_request(f"the body is not valid JSON: {error.msg} at {where}", code="invalid_json")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        return bad_request(f"the body is not UTF-8: byte {error.start}, line {line}", code="invalid_json")
    except RecursionError:
        return bad_request("the body is nested too deeply", code="invalid_json")
    except ValueError:
        pass  # a number of thousands of digits comes before what isn't JSON
    return bad_request(f"the body is not valid JSON: {cause}", code="invalid_json")


_VALIDATION = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]+)`")


def _wrong_type(cause: str, body: bytes) -> ApiError:
    """msgspec's message, turned to start with the field."""
    match = _VALIDATION.match(cause)
    assert match is not None, "the pattern matches any text"
    path = (match["path"] or "").removeprefix(".").replace("[...]", "")
    missing = _MISSING.match(match["what"])
    if missing:
        field = f"{path}.{missing['field']}" if path else missing["field"]
        return bad_request(f"{field}: is required", field, "missing_required_parameter")
    what = in_json_words(match["what"])
    if what in ("Number out of range", "Integer value out of range"):
        return bad_request(f"{path or 'the body'}: the number does not fit in 64 bits", path or None, "out_of_range")
    if _is_large(path, body):
        return bad_request(f"{path}: must be a whole number of 64 bits", path, "out_of_range")
    what = what[:1].lower() + what[1:]
    return bad_request(f"{path or 'the body'}: {what}", path or None, "invalid_type")


def _is_large(path: str, body: bytes) -> bool:
    """Whether the field is a number like 1e30, which is written as a float."""
    if not path.isidentifier():
        return False
    try:
        value = json.loads(body, parse_int=float).get(path)
    except (ValueError, RecursionError):
        return False  # what comes after the field is no JSON
    return isinstance(value, float) and abs(value) > INTEGER_LIMIT


# ---------------------------------------------------------------- checks


def _check_common(request: Request) -> None:
    _check_range("n", request.n, 1, CHOICES_LIMIT)
    _check_range("temperature", request.temperature, 0, 2)
    _check_range("top_p", request.top_p, 0, 1, above=True)
    _check_range("top_k", request.top_k, -1, INTEGER_LIMIT)
    _check_range("min_p", request.min_p, 0, 1)
    _check_range("presence_penalty", request.presence_penalty, -2, 2)
    _check_range("frequency_penalty", request.frequency_penalty, -2, 2)
    _check_range("seed", request.seed, -(1 << 63), (1 << 64) - 1)
    _check_range("max_tokens", request.max_tokens, 0 if only_echoes(request) else 1, INTEGER_LIMIT)
    _check_range("repetition_penalty", request.repetition_penalty, 0, 2, above=True)
    _check_range("min_tokens", request.min_tokens, 0, INTEGER_LIMIT)
    _check_counts(request)
    for name, neutral in UNSERVED.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            raise not_supported(name, f"{name}: is not served; {HINTS.get(name, 'leave it out')}")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options: needs stream to be true", "stream_options")


def _check_counts(request: Request) -> None:
    biased, stops = request.logit_bias or {}, request.stop_token_ids or []
    if len(biased) > BIASED_TOKENS_LIMIT:
        raise bad_request(
            f"logit_bias: at most {BIASED_TOKENS_LIMIT} tokens, got {len(biased)}", "logit_bias", "out_of_range"
        )
    if len(stops) > STOP_TOKENS_LIMIT:
        raise bad_request(
            f"stop_token_ids: at most {STOP_TOKENS_LIMIT}, got {len(stops)}", "stop_token_ids", "out_of_range"
        )
    if request.allowed_token_ids == []:
        hint = "name at least one, or leave it out"
        raise bad_request(f"allowed_token_ids: with no token at all there is no answer; {hint}", "allowed_token_ids")
    allowed, words = request.allowed_token_ids or [], request.bad_words or []
    if len(allowed) > ALLOWED_TOKENS_LIMIT:
        raise bad_request(
            f"allowed_token_ids: at most {ALLOWED_TOKENS_LIMIT}, got {len(allowed)}",
            "allowed_token_ids",
            "out_of_range",
        )
    if len(words) > BAD_WORDS_LIMIT:
        raise bad_request(f"bad_words: at most {BAD_WORDS_LIMIT}, got {len(words)}", "bad_words", "out_of_range")
    if not all(words):
        raise bad_request("bad_words: an empty word would bar every answer", "bad_words")
    limit = getattr(request, "max_completion_tokens", None) or request.max_tokens
    if request.min_tokens and limit is not None and request.min_tokens > limit:
        raise bad_request(f"min_tokens: must be at most max_tokens, {limit}, got {request.min_tokens}", "min_tokens")


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
        logit_bias=_logit_bias(request.logit_bias or {}),
        repetition_penalty=1.0 if request.repetition_penalty is None else float(request.repetition_penalty),
        min_tokens=request.min_tokens or 0,
        allowed=list(request.allowed_token_ids or []),
    )


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit():
            raise bad_request(
                f"logit_bias: its keys must be token ids, got {quoted(key)}", "logit_bias", "invalid_type"
            )
        if len(key) > TOKEN_ID_DIGITS:
            said = f"logit_bias: a key of {len(key)} digits is no token id"
            raise bad_request(said, "logit_bias", "out_of_range")
        if not -100 <= value <= 100:
            said = f"logit_bias[{key}]: must be at least -100 and at most 100, got {value}"
            raise bad_request(said, "logit_bias", "out_of_range")
        biases[int(key)] = float(value)
    return biases


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
    given = [session for session in (field, header) if session is not None]
    if len(set(given)) > 1:
        said = f"body says {quoted(field)}, X-Session-Id says {quoted(header)}"
        raise bad_request(f"session_id: {said}; send one", "session_id")
    return check_session_id(given[0]) if given else ""


def _template_message(message: ChatMessage, index: int) -> dict[str, Any]:
    content = message.content
    if message.role not in ROLES:
        field = f"messages[{index}].role"
        raise bad_request(f"{field}: must be one of {', '.join(ROLES)}, got {quoted(message.role)}", field)
    if content is None and message.role not in MAY_BE_SILENT:
        field = f"messages[{index}].content"
        raise bad_request(f"{field}: must be text or a list of parts, not null", field, "invalid_type")
    if content is msgspec.UNSET:
        if message.role not in MAY_BE_SILENT:
            field = f"messages[{index}].content"
            raise bad_request(f"{field}: is required", field, "missing_required_parameter")
        content = None
    if isinstance(content, list):
        content = "\n".join(_part_text(part, f"messages[{index}].content[{at}]") for at, part in enumerate(content))
    if message.function_call:
        field = f"messages[{index}].function_call"
        raise not_supported(field, f"{field}: is not served; send it as tool_calls")
    rendered: dict[str, Any] = {"role": message.role, "content": content or message.refusal or ""}
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
        except (ValueError, RecursionError):
            pass  # as the model wrote it
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _part_text(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise not_supported(where, f"{where}: only parts of type 'text' are served, got {quoted(kind)}")
    field = "refusal" if kind == "refusal" else "text"
    text = part.get(field)
    if not isinstance(text, str):
        raise bad_request(f"{where}.{field}: expected string, got {json_type(text)}", where, "invalid_type")
    return text
