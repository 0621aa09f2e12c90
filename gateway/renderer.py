"""Tokens -> text deltas: incomplete UTF-8 and possible stop strings are held back. Stage: deliver; pure, no I/O.

A function of (prompt tail, stop strings, tokens) alone, fed one token at a time: a replay of the journal gives the
same deltas. Cost of a token: two decodes of the last few tokens, whatever the length of the answer.
Source of the moving window: the incremental detokenizers of text-generation-inference and vLLM.
"""

from __future__ import annotations

from functools import partial

from gateway.tokenizer import TextCodec

PROMPT_TAIL_TOKENS = 4
HELD_TOKENS_LIMIT = (
    16  # a character is at most 4 tokens; what stays broken for longer is no text and is shown as U+FFFD
)
REPLACEMENT = "\ufffd"


class Renderer:
    """The text side of one stream."""

    def __init__(
        self,
        codec: TextCodec,
        prompt: list[int],
        stops: list[str],
        *,
        special: bool = False,
        stop_shown: bool = False,
    ) -> None:
        """special: special tokens have a text; stop_shown: the stop string that ends the text is part of it."""
        self._decode = partial(codec.decode, special=True) if special else codec.decode
        self._context = prompt[
            -PROMPT_TAIL_TOKENS:
        ]  # decoders strip or add a space at the start of a text, so never start there
        self._context_text = self._decode(self._context)
        self._group: list[int] = []  # tokens whose text isn't whole yet
        self._stops = stops
        self._stop_shown = stop_shown
        self._held = ""  # may be the beginning of a stop string
        self.char_count = 0  # of all whole text so far, held or not, and whatever a stop string cut off
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that this token makes certain; may be "". Sets `stopped` when a stop string is complete."""
        self._group.append(token)
        text = self._decode(self._context + self._group)
        if text.endswith(REPLACEMENT) and len(self._group) < HELD_TOKENS_LIMIT:
            return ""
        return self._release(self._take(text))

    def finish(self) -> str:
        """What was held back and is now known to be the end of the text."""
        if self.stopped:
            return ""
        tail = self._take(self._decode(self._context + self._group)) if self._group else ""
        text = self._release(tail) + ("" if self.stopped else self._held)
        self._held = ""
        return text

    def _take(self, text: str) -> str:
        """New part of the window's text; the window moves on."""
        new = text[len(self._context_text) :]
        self.char_count += len(new)
        group_text = self._decode(self._group)
        if group_text:
            self._context, self._context_text = self._group, group_text
        else:  # special tokens have no text: keep real text in front of what follows
            self._context = (self._context + self._group)[-PROMPT_TAIL_TOKENS:]
            self._context_text = self._decode(self._context)
        self._group = []
        return new

    def _release(self, text: str) -> str:
        """Add to the held text and let go of what can't become a stop string; cut at the first that is complete."""
        if not self._stops:
            return text
        pool = self._held + text
        found = [(at, len(stop)) for at, stop in ((pool.find(stop), stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            at, size = min(found)
            return pool[: at + size if self._stop_shown else at]
        keep = self._possible_stop(pool)
        self._held = pool[len(pool) - keep :]
        return pool[: len(pool) - keep]

    def _possible_stop(self, pool: str) -> int:
        """Length of the longest end of `pool` that begins a stop string."""
        longest = min(len(pool), max(len(stop) for stop in self._stops) - 1)
        for count in range(longest, 0, -1):
            if any(stop.startswith(pool[-count:]) for stop in self._stops):
                return count
        return 0


def text_offsets(codec: TextCodec, tokens: list[int], text: str) -> list[int]:
    """By token, where in `text`, which became these tokens, its own text begins. One that the tokenizer added has none there."""
    renderer, at, offsets = Renderer(codec, [], [], special=True), 0, []
    for token in tokens:
        offsets.append(at)
        piece = renderer.push(token)
        at = min(len(text), at + _length_at(codec, token, piece, text, at))
    return offsets


def _length_at(codec: TextCodec, token: int, piece: str, text: str, at: int) -> int:
    """How much of `text` from `at` on a piece stands for, which the tokenizer may have written in another way."""
    for spelling in (piece, piece.lstrip(" ")):  # some put a space before a text
        if spelling and text.startswith(spelling, at):
            return len(spelling)
    return len(piece) if codec.decode([token]) else 0
