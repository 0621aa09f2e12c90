"""Answers that must match a grammar: which tokens may come next, as a mask before the draw. Stage: decode.

The matcher's state is a function of the answer's tokens: a submission that brings some has them fed again, so a stream that is
killed at any token goes on inside the same JSON. Grammars are compiled on a thread of their own, kept by content, and a sequence
waits for its own only; what a grammar then costs a step is one mask a constrained row. Library: llguidance (MIT, no dependencies).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from engine.errors import BadRequest

log = structlog.get_logger()

_COMPILED_KEPT = 64
_TOKENIZERS_KEPT = 4


class Matcher:
    """Where one answer stands in its grammar. Main thread, once compiled."""

    def __init__(self, matcher: Any, vocab_count: int) -> None:
        self._matcher = matcher
        self._vocab_count = vocab_count

    def allowed(self) -> torch.Tensor:
        """(vocab_count,) bool, host memory: the tokens that may come next; the end token once the answer is whole.

        Raises  BadRequest if the grammar has grown beyond the library's limits
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise _failed(self._matcher)
        return torch.from_numpy(np.unpackbits(packed, bitorder="little")[: self._vocab_count].view(np.bool_))

    def advance(self, tokens: list[int]) -> None:
        """Take in tokens of the answer. Raises BadRequest if they don't match."""
        if tokens and not self._matcher.consume_tokens(tokens):
            raise _failed(self._matcher)


class Grammars:
    """Compiled grammars of one engine. `stop_tokens` are those that end an answer of this model.

    Cost  the vocabulary's trie 0.6 s for 49k tokens, once, mostly without the GIL; a schema of a few fields 1 ms, its first
          mask 8 ms; later masks 0.05 ms (docs/lab.md)
    """

    def __init__(self, model_dir: Path, vocab_count: int, stop_tokens: tuple[int, ...]) -> None:
        self._path = model_dir / "tokenizer.json"
        self._vocab_count = vocab_count
        self._stop_tokens = stop_tokens
        self._tokenizers: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self._compiled: OrderedDict[tuple[str, tuple[int, ...]], Any] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    def prepare(self, grammar: str, stop_tokens: list[int], answer: list[int]) -> Future[Matcher]:
        """Compile beside the step loop and feed the answer so far. The future raises BadRequest."""
        return self._start(lambda: self._matcher(grammar, tuple(stop_tokens) or self._stop_tokens, answer))

    def warm(self) -> None:
        """Read the vocabulary before anybody waits for it, so that a recovery does not."""
        if self._path.exists() and self._stop_tokens and not self._tokenizers:
            self._start(lambda: self._tokenizer(self._stop_tokens))

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _start(self, work: Callable[[], Any]) -> Future[Any]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar")
        return self._thread.submit(work)

    # ------------------------------------------------------------ thread `grammar`

    def _matcher(self, grammar: str, stop_tokens: tuple[int, ...], answer: list[int]) -> Matcher:
        key = grammar, stop_tokens
        if key not in self._compiled:
            self._compiled[key] = self._compile(grammar, stop_tokens)
            while len(self._compiled) > _COMPILED_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        matcher = Matcher(self._compiled[key].deep_copy(), self._vocab_count)
        matcher.advance(answer)
        return matcher

    def _compile(self, grammar: str, stop_tokens: tuple[int, ...]) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer(stop_tokens), grammar, log_level=0)
        matcher.compute_bitmask()  # builds what all later masks share
        if matcher.is_error():
            raise _failed(matcher)
        return matcher

    def _tokenizer(self, stop_tokens: tuple[int, ...]) -> Any:
        from llguidance import LLTokenizer

        if not self._path.exists():
            raise BadRequest(
                "bad_grammar", "this model has no tokenizer.json, so no grammar can be applied to its text"
            )
        if stop_tokens not in self._tokenizers:
            text = self._path.read_text()
            self._tokenizers[stop_tokens] = LLTokenizer(text, n_vocab=self._vocab_count, eos_token=list(stop_tokens))
            while len(self._tokenizers) > _TOKENIZERS_KEPT:
                self._tokenizers.popitem(last=False)
        return self._tokenizers[stop_tokens]


def _failed(matcher: Any) -> BadRequest:
    reason = matcher.get_error().split("\n")[0]
    log.warning("grammar.failed", reason=reason)
    return BadRequest("bad_grammar", f"the grammar can't be followed: {reason}; make it simpler")
