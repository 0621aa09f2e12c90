"""What the next step does. Pure: from counts of the sequences to one small action, tested without a model.

A step is a slice of a restore, one prefill chunk of one sequence, or one token of every sequence that has a token to be fed
(decode and forced decode alike). Decode takes turns with the others, so that nobody waits longer than one full chunk. A
prefill chunk never shares a step with anything: its bits then depend on its own tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Literal

from engine.sequence import Sequence

Kind = Literal["restore", "prefill", "decode", "idle"]


@dataclass(frozen=True, slots=True)
class Action:
    """The rows of the next step; prefill covers [start, end) of its one sequence."""

    kind: Kind
    rows: tuple[Sequence, ...] = ()
    start: int = 0
    end: int = 0


def choose(sequences: Listing[Sequence], spent_tokens: int, prefill_chunk: int) -> Action:
    """The next step for the sequences that hold slots, oldest first.

    spent_tokens  prefilled since the last decode step; decode waits for one chunk's worth at most, so several short
                  prompts go first and then decode together
    """
    restoring = [s for s in sequences if s.restore is not None]
    ready = [s for s in sequences if s.restore is None and s.computed < len(s.tokens)]
    prefilling = [s for s in ready if s.prompt_missing]
    feeding = [s for s in ready if not s.prompt_missing]
    other = _next_prefix_work(restoring, prefilling, prefill_chunk)
    if feeding and (other is None or _over_budget(other, spent_tokens, prefill_chunk)):
        return Action("decode", tuple(sorted(feeding, key=lambda s: s.slot.index if s.slot else 0)))
    return other or Action("idle")


def _next_prefix_work(restoring: Listing[Sequence], prefilling: Listing[Sequence], prefill_chunk: int) -> Action | None:
    if restoring:
        return Action("restore", (restoring[0],), 0, prefill_chunk)
    if prefilling:
        start = prefilling[0].computed
        submit = prefilling[0].submit
        end = cut_after(start, submit.prompt_count, prefill_chunk, prefilling[0].cuts)
        if start < submit.prefill_start < end:
            end = submit.prefill_start  # the first time, what lies before it was put back and the rest began here
        return Action("prefill", (prefilling[0],), start, end)
    return None


def _over_budget(action: Action, spent_tokens: int, prefill_chunk: int) -> bool:
    """A slice of a restore counts as a whole chunk."""
    return spent_tokens > 0 and spent_tokens + action.end - action.start > prefill_chunk


def cut_after(start: int, prompt_count: int, prefill_chunk: int, cuts: Listing[int] = ()) -> int:
    """End of the chunk that starts at `start`: the next multiple of the chunk size, the prompt's end, or one of its other cuts."""
    end = min(prompt_count, (start // prefill_chunk + 1) * prefill_chunk)
    return min((cut for cut in cuts if start < cut < end), default=end)


def exact_start(
    position: int, prefill_start: int, prompt_count: int, prefill_chunk: int, cuts: Listing[int] = ()
) -> int:
    """Where a recovery must begin so that the prompt's chunks are cut as they were the first time.

    A position inside a chunk goes back to the chunk's start, and one that leaves nothing of the prompt to compute (the
    logits of its last token are needed again) to the start of its last chunk.
    """
    if position >= prompt_count:
        position = prompt_count - 1
    cut = max([position // prefill_chunk * prefill_chunk, *(cut for cut in cuts if cut <= position)])
    if cut >= prefill_start:
        return cut
    return prefill_start if position >= prefill_start else position
