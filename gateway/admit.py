"""A parsed request -> a stream's spec: tokenize, bound, choose what the client left open. Stage: admit; on the event loop.

All that can be refused is refused here, before anything is journaled or an engine is asked.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from engine.messages import pack_tokens
from gateway import openai_schema as schema
from gateway.chat_template import AnswerStart, ChatTemplate, no_chat_template
from gateway.choices import choice_seed
from gateway.errors import ApiError, bad_request, not_found, not_supported, quoted
from gateway.grammar import answer_rule, grammar_of
from gateway.journal import GroupSpec, StreamSpec
from gateway.openai_schema import ChatRequest, CompletionRequest, Request, Wish
from gateway.streams import new_stream_id
from gateway.tenancy import DEFAULT, whole_name
from gateway.tokenizer import ModelFacts, TextCodec
from gateway.tools import ToolPlan, calls_or, plan_of


class Admission:
    """What requests are checked against. `limits` gives (context_tokens, vocab_count) of the engines; 0 is unknown."""

    def __init__(
        self,
        model_name: str,
        codec: TextCodec,
        template: ChatTemplate | None,
        facts: ModelFacts,
        default_max_tokens: int,
        limits: Callable[[], tuple[int, int]],
        tool_form: str = "auto",
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self._model_name = model_name
        self._codec = codec
        self._template = template
        self._facts = facts
        self._default_max_tokens = default_max_tokens
        self._limits = limits
        self._tool_form = tool_form
        self._adapters = {} if adapters is None else adapters

    def parse(self, kind: str, body: bytes) -> Request:
        """Body -> request for a model that is served here. Raises ApiError."""
        request: Request = schema.parse_chat(body) if kind == "chat" else schema.parse_completion(body)
        self._check_model(request.model)
        return request

    def tokenize(self, body: bytes) -> dict[str, Any]:
        """The answer of POST /tokenize: token ids of a text, or of messages as the model's template writes them. Raises ApiError."""
        request = schema.parse_tokenize(body)
        self._check_model(request.model or self._model_name)
        if request.messages is not None:
            start = schema.answer_start(request)
            tokens = self._chat_tokens(request.messages, request.tools or [], request.chat_template_kwargs or {}, start)
        else:
            special = request.add_special_tokens if request.add_special is None else request.add_special
            tokens = self._codec.encode(request.prompt or request.content or "", add_special=special is not False)
        pieces = [self._codec.token_text(token) for token in tokens]
        listed: list[Any] = tokens
        if request.with_pieces:
            listed = [{"id": token, "piece": piece} for token, piece in zip(tokens, pieces, strict=True)]
        answer = {"tokens": listed, "count": len(tokens), "max_model_len": self.context_tokens}
        return {**answer, "token_strs": pieces} if request.return_token_strs else answer

    def detokenize(self, body: bytes) -> dict[str, Any]:
        """The answer of POST /detokenize: the text of token ids, special tokens shown. Raises ApiError."""
        request = schema.parse_detokenize(body)
        self._check_model(request.model or self._model_name)
        self._check_tokens("tokens", request.tokens)
        text = self._codec.decode(request.tokens, special=True)
        return {"prompt": text, "content": text}

    def _check_model(self, name: str) -> None:
        if name != self._model_name and name not in self._adapters:
            message = f"model: there is no model {quoted(name)} here; GET /v1/models lists what is served"
            raise not_found(message, "model_not_found", "model")

    def specs(
        self, request: Request, session_header: str | None, namespace: str = DEFAULT
    ) -> tuple[list[StreamSpec], GroupSpec | None]:
        """What the streams of a request will be functions of, and what binds them together if they are several. Raises ApiError."""
        firsts = self._firsts(request, session_header, namespace)
        spec = firsts[0]
        shown, count = schema.choice_counts(request)
        if count * len(firsts) == 1:
            return firsts, None
        group = GroupSpec(
            group=new_stream_id(),
            streams=[new_stream_id() for _ in range(count * len(firsts))],
            shown=shown * len(firsts),
            include_usage=spec.include_usage,
            streamed=spec.streamed,
            stored=spec.stored,
            session=spec.session,
            logprobs=spec.sampling.logprobs >= 0,
            prompts=len(firsts),
        )
        return [
            _choice(firsts[index // count], group, index, index % count) for index in range(len(group.streams))
        ], group

    def _firsts(self, request: Request, session_header: str | None, namespace: str) -> list[StreamSpec]:
        """For each prompt, everything that its first stream will be a function of. Raises ApiError."""
        wish = schema.wish_of(request, session_header, secrets.randbits(63))
        wish = msgspec.structs.replace(wish, namespace=namespace, session=whole_name(namespace, wish.session))
        if isinstance(request, ChatRequest):
            tools = self._tools(request)
            return [self._spec(request, wish, tools, self._chat_prompt(request, tools))]
        special = request.add_special_tokens is not False
        prompts = [self._text_prompt(prompt, special) for prompt in schema.prompts_of(request)]
        if len(prompts) > 1 and wish.session:
            raise bad_request("session_id: a session goes on with one prompt a request", "session_id")
        first = self._spec(request, wish, ToolPlan(), prompts[0])
        ends = [self._max_position(len(prompt), wish, "prompt") for prompt in prompts]
        return [
            msgspec.structs.replace(first, prompt=pack_tokens(tokens), max_position=end, echoed=echoed)
            for tokens, end, echoed in zip(prompts, ends, self._echoed(request, prompts), strict=True)
        ]

    def _echoed(self, request: CompletionRequest, prompts: list[list[int]]) -> list[str]:
        """Each prompt as it was sent; of token ids their text, special tokens shown. "" if it is no part of the answer."""
        if not request.echo:
            return [""] * len(prompts)
        return [
            sent if isinstance(sent, str) else self._codec.decode(tokens, special=True)
            for sent, tokens in zip(schema.prompts_of(request), prompts, strict=True)
        ]

    def _spec(self, request: Request, wish: Wish, tools: ToolPlan, prompt: list[int]) -> StreamSpec:
        kind, field = ("chat", "messages") if isinstance(request, ChatRequest) else ("text", "prompt")
        grammar = self._grammar(request, tools)
        self._check_tokens("logit_bias", wish.sampling.logit_bias)
        self._check_tokens("stop_token_ids", wish.stop_tokens)
        self._check_tokens("allowed_token_ids", wish.sampling.allowed)
        if grammar and wish.sampling.allowed:
            raise not_supported(
                "allowed_token_ids",
                "allowed_token_ids: can't be combined with a grammar, which allows tokens by itself",
            )
        if grammar and request.ignore_eos:
            raise not_supported(
                "ignore_eos", "ignore_eos: an answer that must match a grammar ends with it; drop one of the two"
            )
        return StreamSpec(
            stream=new_stream_id(),
            kind=kind,
            created=int(time.time()),
            model=request.model,
            prompt=pack_tokens(prompt),
            sampling=msgspec.structs.replace(wish.sampling, barred=self._barred(request.bad_words or [])),
            stop=wish.stop,
            stop_tokens=[*([] if request.ignore_eos else self._facts.stop_tokens), *wish.stop_tokens],
            max_position=self._max_position(len(prompt), wish, field),
            include_usage=wish.include_usage,
            streamed=wish.stream,
            stored=wish.store or bool(wish.session),
            session=wish.session,
            namespace=wish.namespace,
            grammar=grammar,
            capture=wish.capture,
            adapter=self._adapter(request),
            tool_form=tools.form,
            tool_names=tools.names,
            echo=isinstance(request, CompletionRequest) and bool(request.echo),
            scored=isinstance(request, CompletionRequest) and bool(request.echo) and request.logprobs is not None,
            silent=schema.only_echoes(request),
            special=request.skip_special_tokens is False,
            stop_shown=bool(request.include_stop_str_in_output),
        )

    def _barred(self, words: list[str]) -> list[list[int]]:
        """What an answer must not hold, as tokens: each word as it begins a text, and as it follows a space."""
        if words and not self._codec.has_text:
            raise not_supported(
                "bad_words", "bad_words: needs a model with a tokenizer.json; bar token ids by logit_bias"
            )
        barred = []
        for word in words:
            if word.isspace():
                barred.append(self._codec.encode(word, add_special=False))
                continue
            alone, following = (self._codec.encode(space + word.lstrip(), add_special=False) for space in ("", " "))
            barred.append(alone)
            if following[-len(alone) :] != alone:
                barred.append(following)
        return [tokens for tokens in barred if tokens]

    def _adapter(self, request: Request) -> str:
        """Digest of the adapter that the request names, by `adapter` or as its model. Raises ApiError."""
        if request.adapter and request.adapter not in self._adapters:
            message = f"adapter: there is no adapter {quoted(request.adapter)}; GET /v1/models lists what is loaded"
            raise not_found(message, "adapter_not_found", "adapter")
        return self._adapters.get(request.adapter or request.model, "")

    def _tools(self, request: ChatRequest) -> ToolPlan:
        form = self._tool_form
        if form == "auto":
            form = self._template.tool_form if self._template else ""
        return plan_of(request, form)

    def _grammar(self, request: Request, tools: ToolPlan) -> str:
        """What the answer must match. Raises ApiError."""
        grammar, field = grammar_of(request)
        if grammar and tools.form:
            rule = "" if tools.grammar else answer_rule(request)
            if not rule:
                hint = "tool_choice 'auto' or 'none'" if tools.grammar else "a schema, a regex or a choice"
                raise not_supported(field, f"{field}: can't be combined with these tools, only with {hint}")
            grammar = calls_or(tools, rule, field)
        grammar, field = grammar or tools.grammar, field or "tool_choice"
        if grammar:
            self._check_text(field)
        return grammar

    def _check_text(self, field: str) -> None:
        """A grammar is about text, and its end is an end token's. Raises ApiError."""
        if not self._codec.has_text:
            raise not_supported(field, f"{field}: needs a model with a tokenizer.json; this one's text is token ids")
        if not self._facts.stop_tokens:
            raise not_supported(
                field, f"{field}: needs a model that names its end token (eos_token_id); this one names none"
            )

    def _chat_prompt(self, request: ChatRequest, tools: ToolPlan) -> list[int]:
        start = schema.answer_start(request)
        return self._chat_tokens(request.messages, tools.tools, request.chat_template_kwargs or {}, start)

    def _chat_tokens(
        self,
        messages: list[schema.ChatMessage],
        tools: list[dict[str, Any]],
        options: dict[str, Any],
        start: AnswerStart = "header",
    ) -> list[int]:
        if self._template is None or not self._codec.has_chat:
            raise no_chat_template()
        text = self._template.render(schema.template_messages(messages), tools, options, start=start)
        return self._codec.encode(text, add_special=False)

    def _text_prompt(self, prompt: str | list[int], special: bool) -> list[int]:
        tokens = self._codec.encode(prompt, add_special=special) if isinstance(prompt, str) else prompt
        if not tokens:
            raise bad_request("prompt: must hold at least one token", "prompt")
        self._check_tokens("prompt", tokens)
        return tokens

    def _check_tokens(self, field: str, tokens: Collection[int]) -> None:
        vocab = self.vocab_count
        if not tokens or 0 <= min(tokens) <= max(tokens) < vocab:
            return
        for index, token in enumerate(tokens):
            if not 0 <= token < vocab:
                raise bad_request(f"{field}[{index}]: token {token} is outside the vocabulary of {vocab}", field)

    def _max_position(self, prompt_count: int, wish: Wish, field: str) -> int:
        """Where the list ends at the latest: what was asked for, within the context."""
        context = self.context_tokens
        if prompt_count >= context:
            raise ApiError(
                400,
                f"{field}: the prompt has {prompt_count} tokens, and the context of {context} tokens has room for at most "
                f"{context - 1}, so that one can be answered; shorten it by {prompt_count - context + 1}",
                code="context_length_exceeded",
                param=field,
            )
        wanted = wish.max_tokens or self._default_max_tokens
        return min(context, prompt_count + wanted) if wanted else context

    @property
    def stop_tokens(self) -> list[int]:
        """Tokens that end a message."""
        return self._facts.stop_tokens

    @property
    def vocab_count(self) -> int:
        """Token ids lie below it."""
        return self._limits()[1] or self._facts.vocab_count or 1 << 31

    @property
    def context_tokens(self) -> int:
        """Longest list that an engine takes."""
        return self._limits()[0] or self._facts.context_tokens or 1 << 30


def _choice(spec: StreamSpec, group: GroupSpec, index: int, of_prompt: int) -> StreamSpec:
    """The spec of one of several choices, the `of_prompt`th of its prompt, and so with the seed that it would have alone.

    The session goes on with the first; `best_of` chooses by log probability.
    """
    ranked = group.shown < len(group.streams)
    sampling = msgspec.structs.replace(
        spec.sampling,
        seed=choice_seed(spec.sampling.seed, of_prompt),
        logprobs=max(spec.sampling.logprobs, 0) if ranked else spec.sampling.logprobs,
    )
    session = spec.session if index == 0 else ""
    return msgspec.structs.replace(
        spec, stream=group.streams[index], sampling=sampling, session=session, group=group.group, choice=index
    )
