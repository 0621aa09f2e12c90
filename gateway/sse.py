"""The events of a stream as bytes: one for each token, ids consecutive from 0. Stage: deliver; pure.

    0            opening chunk (role; in /v1/completions empty text, or the prompt's with its log probabilities)
    1 .. T       token k (its text may be "": held back by an unfinished character or a possible stop string)
    T + 1        finish chunk: text that was still held back, finish_reason, `concordia`; or the error, which is the last
    T + 2        usage chunk, if stream_options.include_usage
    last         [DONE]

A function of the stream's records alone, so every replay is byte-identical.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import msgspec

from engine.messages import TokenLogprobs
from gateway.errors import ApiError
from gateway.streams import Stream
from gateway.tokenizer import TextCodec

_encode = msgspec.json.encode


class EventForm:
    """Renders events; one a gateway."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def ready_count(self, stream: Stream) -> int:
        """How many events there are by now."""
        if stream.end is None:
            return stream.token_count + 1 if stream.token_count else 0
        return stream.token_count + 2 + (0 if stream.failed else 1 + stream.spec.include_usage)

    def events(self, stream: Stream, start: int, end: int) -> bytes:
        """Events [start, end), each `id:` and `data:`."""
        head, tail = self.head(stream), _tail(stream)
        return b"".join([b"id: %d\ndata: %b\n\n" % (k, self._data(stream, k, head, tail)) for k in range(start, end)])

    def data(self, stream: Stream, k: int) -> bytes:
        """The `data:` of one event."""
        return self._data(stream, k, self.head(stream), _tail(stream))

    def head(self, stream: Stream) -> bytes:
        """What all chunks of a stream begin with."""
        spec = stream.spec
        kind = "chat.completion.chunk" if spec.kind == "chat" else "text_completion"
        head = _encode({"id": answer_id(stream), "object": kind, "created": spec.created, "model": spec.model})
        return head[:-1] + b',"choices":['

    def _data(self, stream: Stream, k: int, head: bytes, tail: bytes) -> bytes:
        count = stream.token_count
        if k == 0:
            return b"%b%b]%b" % (head, self._opening(stream), tail)
        if k <= count:
            return b"%b%b]%b" % (head, self._token(stream, k - 1), tail)
        if stream.failed:
            return _encode(end_error(stream).body)
        if k == count + 1:
            extra = b',"concordia":' + _encode(stream.concordia())
            return b"%b%b]%b%b" % (head, self._finish(stream), extra, tail)
        if k == count + 2 and stream.spec.include_usage:
            usage, concordia = _encode(stream.usage()), _encode(stream.concordia())
            return b'%b],"usage":%b,"concordia":%b}' % (head, usage, concordia)
        return b"[DONE]"

    def _opening(self, stream: Stream) -> bytes:
        index = stream.spec.choice
        if stream.spec.kind == "text":
            told = stream.spec.scored and not stream.lacks_scores
            text, logprobs = _encode(stream.echoed), _encode(self._of_prompt(stream) if told else None)
            return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}' % (index, text, logprobs)
        return b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index

    def _token(self, stream: Stream, index: int) -> bytes:
        choice, text = stream.spec.choice, _encode(stream.deltas[index])
        logprobs = b"null"
        if stream.spec.sampling.logprobs >= 0:
            logprobs = _encode(self.logprobs(stream, index, index + 1))
        if stream.spec.kind == "text":
            return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}' % (choice, text, logprobs)
        if index in stream.calls:
            delta = _encode(_delta(stream, index, stream.deltas[index]))
            return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}' % (choice, delta, logprobs)
        return b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}' % (choice, text, logprobs)

    def _finish(self, stream: Stream) -> bytes:
        assert stream.end is not None
        choice, text, reason = stream.spec.choice, stream.tail, _encode(finish_reason(stream))
        if stream.spec.kind == "text":
            return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b}' % (choice, _encode(text), reason)
        delta = _encode(_delta(stream, -1, text))
        return b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":%b}' % (choice, delta, reason)

    # ------------------------------------------------------------ whole answers

    def answer(self, stream: Stream) -> dict[str, Any]:
        """The answer so far, as one JSON object (not streamed, or fetched by id)."""
        spec = stream.spec
        return {
            "id": answer_id(stream),
            "object": "chat.completion" if spec.kind == "chat" else "text_completion",
            "created": spec.created,
            "model": spec.model,
            "choices": [self.choice(stream, spec.choice)],
            "usage": stream.usage(),
            "concordia": stream.concordia(),
        }

    def choice(self, stream: Stream, index: int, *, logprobs: bool = True) -> dict[str, Any]:
        """One choice of a whole answer."""
        reason = finish_reason(stream) if stream.end and not stream.failed else None
        wanted = logprobs and stream.spec.sampling.logprobs >= 0 and not stream.lacks_scores
        rows = self.logprobs(stream, 0, stream.token_count) if wanted else None
        if rows and stream.spec.scored:
            rows = {name: values + rows[name] for name, values in self._of_prompt(stream).items()}
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": rows}
        if stream.spec.kind == "chat":
            return {**choice, "message": _message(stream)}
        return {**choice, "text": stream.echoed + stream.text}

    def logprobs(self, stream: Stream, start: int, end: int) -> dict[str, Any]:
        """Log probabilities of answer tokens [start, end), in the form of the request's kind."""
        tokens = stream.tokens[stream.prompt_count + start : stream.prompt_count + end]
        rows = list(zip(tokens, stream.logprobs[start:end], strict=True))
        if stream.spec.kind == "chat":
            return {"content": [self._chat_row(token, row) for token, row in rows], "refusal": None}
        return self._text_rows(rows, [len(stream.echoed) + offset for offset in stream.offsets[start:end]])

    def _of_prompt(self, stream: Stream) -> dict[str, list[Any]]:
        """Log probabilities of the prompt's tokens; the first has none, since nothing stands before it."""
        rows = chain([None], stream.scored)
        tokens = stream.tokens[: stream.prompt_count]
        return self._text_rows(list(zip(tokens, rows, strict=False)), stream.prompt_offsets)

    def _text_rows(self, rows: list[tuple[int, TokenLogprobs | None]], offsets: list[int]) -> dict[str, list[Any]]:
        """In the form of completions."""
        text = self._codec.token_text
        return {
            "tokens": [text(token) for token, _ in rows],
            "token_logprobs": [row.chosen if row else None for _, row in rows],
            "top_logprobs": [_with_chosen(text, token, row) if row else None for token, row in rows],
            "text_offset": offsets,
        }

    def _chat_row(self, token: int, row: Any) -> dict[str, Any]:
        top = [self._chat_token(t, p) for t, p in row.top] if row else []
        return {**self._chat_token(token, row.chosen if row else -9999.0), "top_logprobs": top}

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._codec.token_bytes(token)
        return {"token": self._codec.token_text(token), "logprob": logprob, "bytes": list(data)}


def answer_id(stream: Stream) -> str:
    """The `id` of OpenAI's objects; holds the id of the stream, or of the group that it is a choice of."""
    return ("chatcmpl-" if stream.spec.kind == "chat" else "cmpl-") + (stream.spec.group or stream.id)


def finish_reason(stream: Stream) -> str:
    """OpenAI's word for how it ended; "tool_calls" where an answer that ended by itself calls tools."""
    assert stream.end is not None
    reason = stream.end.finish_reason
    return "tool_calls" if reason == "stop" and stream.calls else reason


def _message(stream: Stream) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": stream.text, "refusal": None}
    if stream.calls:
        return {**message, "content": stream.text or None, "tool_calls": stream.tool_calls()}
    return message


def _with_chosen(text: Callable[[int], str], token: int, row: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens at a position and the one that was drawn, as OpenAI adds it."""
    return {**{text(other): value for other, value in row.top}, text(token): row.chosen}


def _delta(stream: Stream, token: int, text: str) -> dict[str, Any]:
    """What one token (-1: the end) adds: text, calls of tools, or both."""
    delta: dict[str, Any] = {"content": text} if text else {}
    if token in stream.calls:
        delta["tool_calls"] = [call.view() for call in stream.calls[token]]
    return delta


def _tail(stream: Stream) -> bytes:
    """What all chunks of a stream end with."""
    return b',"usage":null}' if stream.spec.include_usage else b"}"


def end_error(stream: Stream) -> ApiError:
    """The error that a stream ended with."""
    assert stream.end is not None and stream.end.error_status
    return ApiError(stream.end.error_status, stream.end.error_message, code=stream.end.error_code)
