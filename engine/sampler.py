"""Draw the token at a position: a pure function of (logits, tokens so far, seed, position).

Whoever continues a stream draws what the first engine would have drawn: the uniform number comes from Philox4x64, a
counter-based generator (Salmon et al. 2011), keyed by the request's seed with the position as counter. Runs on the
engine's main thread. The order is the field's (vLLM's): bias, penalties, what is barred, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch

from engine.messages import Sampling, TokenLogprobs

# Candidates that are sorted first for top-p; the whole vocabulary is sorted only when their mass is not enough.
_NUCLEUS_CANDIDATES = 1024
# Below it the argmax is taken: logits divided by less overflow (vLLM has the same bound).
GREEDY_BELOW = 1e-5


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, position)."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=[position, 0, 0, 0])
    return (int(bits.random_raw()) >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor,
    sampling: Sampling,
    generated: list[int],
    position: int,
    allowed: torch.Tensor | None = None,
    *,
    prompt: Sequence[int] = (),
    stop_tokens: Collection[int] = (),
) -> int:
    """Choose a token id.

    logits       (vocab,), any float dtype or device; not changed
    generated    tokens of this answer so far, for the penalties and `min_tokens`
    position     index that the chosen token will have in the token list
    allowed      (vocab,) bool: the tokens that a grammar lets through; None: all
    prompt       tokens before the answer, for `repetition_penalty`
    stop_tokens  not drawn before `min_tokens`, unless nothing else is let through; so with what is barred
    """
    scores = _penalised(_biased(logits.float(), sampling), sampling, generated, prompt)
    if allowed is not None:
        scores = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
    if sampling.allowed:
        scores = _only(scores, sampling.allowed)
    barred = [*_last_of_barred(sampling.barred, generated)]
    if len(generated) < sampling.min_tokens:
        barred += stop_tokens
    if barred:
        scores = _without(scores, barred)
    if sampling.temperature < GREEDY_BELOW:
        return int(scores.argmax())
    scores = scores / sampling.temperature
    draw = uniform(sampling.seed, position)
    if not sampling.top_k and sampling.top_p >= 1 and sampling.min_p <= 0:
        return _inverse(torch.softmax(scores, -1), draw)
    probabilities, ids = _filtered(scores, sampling)
    return int(ids[_inverse(probabilities, draw)])


def logprobs_of(logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Log probabilities under the model itself (before penalties, temperature and filters), `count` likeliest beside the chosen."""
    values = torch.log_softmax(logits.float(), -1)
    top: list[tuple[int, float]] = []
    if count > 0:
        best, ids = values.topk(min(count, values.numel()))
        top = list(zip(ids.tolist(), best.tolist(), strict=True))
    return TokenLogprobs(chosen=float(values[token]), top=top)


def _biased(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    if not sampling.logit_bias:
        return scores
    ids = torch.tensor(list(sampling.logit_bias), device=scores.device)
    biases = torch.tensor(list(sampling.logit_bias.values()), dtype=scores.dtype, device=scores.device)
    return scores.index_add(0, ids, biases)


def _last_of_barred(barred: Sequence[Sequence[int]], generated: list[int]) -> Iterator[int]:
    """Tokens that would complete a barred list."""
    for tokens in barred:
        before = len(tokens) - 1
        if not before or generated[-before:] == list(tokens[:-1]):
            yield tokens[-1]


def _only(scores: torch.Tensor, tokens: Collection[int]) -> torch.Tensor:
    ids = torch.tensor(list(tokens), dtype=torch.long, device=scores.device)
    return torch.full_like(scores, -torch.inf).index_copy(0, ids, scores[ids])


def _without(scores: torch.Tensor, barred: Collection[int]) -> torch.Tensor:
    """Scores with which these tokens can't be drawn; as they were if nothing else is left."""
    ids = torch.tensor([token for token in barred if token < scores.numel()], dtype=torch.long, device=scores.device)
    left = scores.index_fill(0, ids, -torch.inf)
    return left if bool(torch.isfinite(left).any()) else scores


def _repeated(scores: torch.Tensor, penalty: float, tokens: Sequence[int]) -> torch.Tensor:
    """Keskar et al. 2019, as vLLM and transformers apply it."""
    ids = torch.tensor(tokens, device=scores.device).unique()
    known = scores[ids]
    return scores.index_copy(0, ids, torch.where(known > 0, known / penalty, known * penalty))


def _penalised(scores: torch.Tensor, sampling: Sampling, generated: list[int], prompt: Sequence[int]) -> torch.Tensor:
    if sampling.repetition_penalty != 1 and (prompt or generated):
        scores = _repeated(scores, sampling.repetition_penalty, [*prompt, *generated])
    if not generated or not (sampling.presence_penalty or sampling.frequency_penalty):
        return scores
    ids, counts = torch.tensor(generated, device=scores.device).unique(return_counts=True)
    scores = scores.clone()
    scores[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    return scores


def _filtered(scores: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Surviving candidates, likeliest first: (probabilities, not normalised; ids)."""
    total = torch.logsumexp(scores, -1)
    count = min(sampling.top_k or _NUCLEUS_CANDIDATES, scores.numel())
    best, ids = scores.topk(count)
    probabilities = torch.exp(best - total)
    if not sampling.top_k and count < scores.numel() and not _enough(probabilities, sampling):
        best, ids = scores.sort(descending=True, stable=True)
        probabilities = torch.exp(best - total)
    if sampling.top_k:
        probabilities = probabilities / probabilities.sum()
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if sampling.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        keep &= before < sampling.top_p
    if sampling.min_p > 0:
        keep &= probabilities >= sampling.min_p * probabilities[0]
    keep[0] = True
    return probabilities[keep], ids[keep]


def _enough(probabilities: torch.Tensor, sampling: Sampling) -> bool:
    """Whether all survivors are certainly among the candidates."""
    by_mass = sampling.top_p < 1 and float(probabilities.sum()) >= sampling.top_p
    by_floor = sampling.min_p > 0 and float(probabilities[-1]) < sampling.min_p * float(probabilities[0])
    return by_mass or by_floor


def _inverse(weights: torch.Tensor, draw: float) -> int:
    """Index at which the cumulated weights pass `draw` of their sum."""
    cumulated = weights.double().cumsum(-1)
    index = int(torch.searchsorted(cumulated, draw * cumulated[-1], right=True))
    return index if index < weights.numel() else int(weights.nonzero()[-1])  # rounded up to the sum
