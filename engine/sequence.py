"""A sequence: one submission of one stream, as the engine works on it. Plain state, changed by the step loop only.

Everything that it needs next follows from four counts: `computed` (state in the arena), `prompt_count`, the length of the
token list, and whether it is finished. So a cold prompt, a prefix hit and a recovered stream take the same path.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engine.arena import Slot
from engine.capture import Cursor
from engine.grammar import Matcher
from engine.messages import Output, Refused, Scored, Started, Submit, unpack_tokens
from engine.plan import Damage
from engine.restore import Restore


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is the truth; the arena holds the state of the first `computed` of them."""

    submit: Submit
    tokens: list[int]
    submitted_count: int
    arrived: float = field(default_factory=time.monotonic)
    cuts: tuple[int, ...] = ()  # where its prefill is cut beside the multiples of a chunk
    slot: Slot | None = None
    cursor: Cursor | None = None
    restore: Restore | None = None
    damage: Damage = field(default_factory=Damage)
    computed: int = 0
    finish: str = ""
    started: Started | None = None
    outputs: list[Output] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    refused: Refused | None = None  # in the midst of its answer
    device_tokens: int = 0
    reason: str = ""
    began: float = 0.0
    told_forced: bool = False
    grammar: Future[Matcher] | None = None
    shared_prompts: dict[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, submit: Submit) -> Sequence:
        """A sequence that waits for a slot."""
        tokens = unpack_tokens(submit.tokens)
        return cls(submit, tokens, len(tokens))

    @property
    def key(self) -> tuple[str, int]:
        """(stream, epoch)."""
        return self.submit.stream, self.submit.epoch

    @property
    def compiling(self) -> bool:
        """Its grammar isn't ready yet."""
        return self.grammar is not None and not self.grammar.done()

    @property
    def recovering(self) -> bool:
        """Not the first submission of its stream: what was delivered must be continued bit for bit."""
        return self.submit.prefill_start >= 0 or self.submitted_count > self.submit.prompt_count

    @property
    def reusable(self) -> int:
        """How much of its list may be put back instead of computed: logits of its last token are needed, or of the prompt's too."""
        limit, scored = len(self.tokens) - 1, self.submit.scored
        return limit if scored < 0 or scored >= self.submit.prompt_count - 1 else min(limit, scored)

    @property
    def scoring(self) -> bool:
        """What computes a part of its prompt has to give log probabilities."""
        return self.reusable < len(self.tokens) - 1

    def shares_state_with(self, other: Sequence) -> bool:
        """Whether equal prefixes of the two have the same state."""
        return (self.submit.namespace, self.submit.adapter) == (other.submit.namespace, other.submit.adapter)

    def shared_prompt(self, other: Sequence) -> int:
        """Tokens that this list shares with another one's prompt, its own last token left out. Compared once."""
        if other.key not in self.shared_prompts:
            self.shared_prompts[other.key] = common_prefix(self.tokens[:-1], other.tokens[: other.submit.prompt_count])
        return self.shared_prompts[other.key]

    @property
    def prompt_missing(self) -> bool:
        """Part of the prompt is still to be prefilled."""
        return self.computed < self.submit.prompt_count

    @property
    def told_bytes(self) -> int:
        """About what a gateway is sent that is told again of it."""
        rows = len(self.outputs) + sum(len(scored.rows) for scored in self.scored)
        return 4 * len(self.tokens) + rows * (100 + 16 * max(0, self.submit.sampling.logprobs))

    @property
    def complete(self) -> bool:
        """Finished, and the state of every token is in the arena."""
        return bool(self.finish) and self.computed >= len(self.tokens)

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens."""
        return self.tokens[: self.submit.prompt_count]

    @property
    def generated(self) -> list[int]:
        """Tokens of the answer so far."""
        return self.tokens[self.submit.prompt_count :]

    @property
    def reused(self) -> dict[str, int]:
        """Tokens by the tier that they came from; what was put back but is computed again is taken off the last tier."""
        counts = {"device": self.device_tokens, **(self.restore.reused if self.restore else {})}
        surplus = sum(counts.values()) - self.computed
        for tier in reversed(list(counts)):
            off = min(surplus, counts[tier])
            counts[tier] -= off
            surplus -= off
        return {tier: count for tier, count in counts.items() if count}

    @property
    def verdict(self) -> str:
        """What became of the stored prefix, in one word."""
        if self.reason:
            return "partial" if self.computed else "recomputed"
        if not self.computed:
            return "new"
        return "restored" if self.restore and self.restore.reused else "resident"

    def array(self) -> np.ndarray:
        """The token list as int32, maybe read-only."""
        if len(self.tokens) == self.submitted_count:
            return np.frombuffer(self.submit.tokens, "<i4")
        return np.asarray(self.tokens, dtype=np.int32)


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens two lists share from the start."""
    count = min(len(a), len(b))
    if a[:count] == b[:count]:
        return count
    return next(index for index in range(count) if a[index] != b[index])
