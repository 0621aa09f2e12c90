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
from engine.messages import grammar_fuel

log = structlog.get_logger()

_COMPILED_KEPT = 64
_VOCABULARIES_KEPT = 4
# Of this process, by (tokenizer.json, tokens, stop tokens): what the nursery has read, its engines have from their first moment.
_vocabularies: OrderedDict[tuple[Path, int, tuple[int, ...]], Any] = OrderedDict()


def read_vocabulary(model_dir: Path, vocab_count: int, stop_tokens: tuple[int, ...]) -> Any:
    """The tokens of a model as grammars need them (llguidance's LLTokenizer), read once a process.

    Holds the GIL all the while, 0.4 s for 49k tokens and 4 s for 262k (docs/lab.md): before anything is served.
    Raises  BadRequest if there is no tokenizer.json, ValueError if the library can't use it
    """
    from llguidance import LLTokenizer

    key = model_dir / "tokenizer.json", vocab_count, stop_tokens
    if not key[0].exists():
        raise BadRequest("bad_grammar", "this model has no tokenizer.json, so no grammar can be applied to its text")
    if key not in _vocabularies:
        _vocabularies[key] = LLTokenizer(str(key[0]), n_vocab=vocab_count, eos_token=list(stop_tokens))
        while len(_vocabularies) > _VOCABULARIES_KEPT:
            _vocabularies.popitem(last=False)
    return _vocabularies[key]


def warm(model_dir: Path, vocab_count: int, stop_tokens: tuple[int, ...]) -> None:
    """Read the vocabulary now, so that no request waits for it and no step stands still meanwhile; only logs what goes wrong."""
    if not stop_tokens or not (model_dir / "tokenizer.json").exists():
        return
    try:
        read_vocabulary(model_dir, vocab_count, stop_tokens)
    except Exception as error:  # a request with a grammar will be refused with it
        log.warning("grammar.vocabulary_unreadable", model_dir=str(model_dir), error=str(error))


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

    Cost  a schema of a few fields 1 ms, its first mask 8 ms; later masks 0.05 ms (docs/lab.md); the vocabulary: `read_vocabulary`
    """

    def __init__(self, model_dir: Path, vocab_count: int, stop_tokens: tuple[int, ...]) -> None:
        self._model_dir = model_dir
        self._vocab_count = vocab_count
        self._stop_tokens = stop_tokens
        self._compiled: OrderedDict[tuple[str, tuple[int, ...]], Any] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    def prepare(self, grammar: str, stop_tokens: list[int], answer: list[int]) -> Future[Matcher]:
        """Compile beside the step loop and feed the answer so far. The future raises BadRequest."""
        return self._start(lambda: self._matcher(grammar, tuple(stop_tokens) or self._stop_tokens, answer))

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
        from llguidance import LLMatcher, LLParserLimits

        vocabulary = read_vocabulary(self._model_dir, self._vocab_count, stop_tokens)
        limits = LLParserLimits(initial_lexer_fuel=grammar_fuel(grammar))
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # builds what all later masks share
        if matcher.is_error():
            raise _failed(matcher)
        return matcher


def _failed(matcher: Any) -> BadRequest:
    reason = matcher.get_error().split("\n")[0]
    log.warning("grammar.failed", reason=reason)
    said = "no token of this model may come next" if reason == "NoExtensionBias" else reason
    return BadRequest("bad_grammar", f"the grammar can't be followed: {said}; make it simpler, or wider")
