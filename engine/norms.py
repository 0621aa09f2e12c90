"""RMS norms as one call of torch instead of six, where that has the same bits. Main thread only, at start.

Small operations are a fifth of a decode step on a CPU, and every layer has two to four norms. Which modules are meant is not told
by their names: each one whose weight and epsilon can be found is compared on random rows, with its weight and with 1 + weight
(Gemma's form), and replaced if every bit is equal.
"""

from __future__ import annotations

import inspect
from functools import partial

import structlog
import torch
import torch.nn.functional as F

log = structlog.get_logger()

_EPSILON_NAMES = ("variance_epsilon", "eps")
# Rows, and sizes of what they hold: tiny ones show where epsilon stands.
_CHECKED = ((1, 1.0), (7, 30.0), (5, 1e-3))


@torch.inference_mode()
def join_norms(module: torch.nn.Module) -> int:
    """Replace what can be replaced, and return how many norms that were."""
    found = 0
    for norm in module.modules():
        weight = getattr(norm, "weight", None)
        if next(norm.children(), None) is not None or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
            continue
        epsilon = next((getattr(norm, name) for name in _EPSILON_NAMES if hasattr(norm, name)), None)
        if not isinstance(epsilon, float) or len(inspect.signature(norm.forward).parameters) != 1:
            continue  # a gate would be a second argument
        for form in (weight.data, 1.0 + weight.data):
            joined = partial(F.rms_norm, normalized_shape=(len(weight),), weight=form, eps=epsilon)
            if _same(norm, joined, len(weight)):
                norm.forward = joined  # type: ignore[method-assign]
                found += 1
                break
    log.info("norms.joined", count=found)
    return found


def _same(norm: torch.nn.Module, joined: partial[torch.Tensor], size: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    for rows, scale in _CHECKED:
        inputs = scale * torch.randn(1, rows, size, generator=generator)
        try:
            expected = norm(inputs)
        except (TypeError, RuntimeError, AttributeError):  # it wants something else than rows
            return False
        if not isinstance(expected, torch.Tensor) or not torch.equal(expected, joined(inputs)):
            return False
    return True
