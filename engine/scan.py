"""Scans as they should be: of Mamba 1, one that begins from a state; of Mamba 2, single tokens within the bounds that a scan keeps.

transformers prefills these models in one piece, so that its scan ignores the state which the sequence before the chunk left;
a second chunk would be computed as if it were the first. And where a model bounds its time steps (Nemotron-H: at least
`time_step_min`), transformers does so in a scan of many tokens, not in the update by one. The models look the functions up in their own
module, so a replacement there is all it takes. Everything else of the layer is the model's own. The start-up check would refuse the
models otherwise. Source: `mamba_selective_scan` and `mamba2_chunk_scan` in transformers, Gu and Dao 2023, equation 2.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from engine import attention

_NAME = "mamba_selective_scan"
_STEP = "mamba2_selective_state_update"


def continue_scans(module: torch.nn.Module) -> bool:
    """Let the model's scans begin from the cache's state; False if it has none of this kind."""
    found = False
    for name in {type(part).__module__ for part in module.modules()}:
        code = sys.modules.get(name)
        if code is not None and hasattr(code, _NAME):
            setattr(code, _NAME, _scan)
            found = True
        for part in module.modules():  # what was bound to the layer at construction
            if type(part).__module__ == name and _NAME in vars(part):
                setattr(part, _NAME, _scan)
    return found


def _scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    """hidden_states, dt, z (rows, channels, tokens); A (channels, states); B, C (rows, states, tokens); D, delta_bias (channels,).

    Returns (rows, channels, tokens), with the last state (rows, channels, states) if it is asked for
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    decay = torch.exp(A[None, :, None, :] * dt[..., None])
    added = dt[..., None] * B.transpose(1, 2)[:, None].float() * hidden_states[..., None].float()
    before = attention.current().recurrent
    state = torch.zeros_like(added[:, :, 0]) if before is None else before.to(added.dtype)
    outputs = []
    for index in range(hidden_states.shape[-1]):
        state = decay[:, :, index] * state + added[:, :, index]
        outputs.append(torch.matmul(state.to(hidden_states.dtype), C[:, :, index, None])[..., 0])
    out = torch.stack(outputs, dim=-1)
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    if z is not None:
        out = out * F.silu(z)
    return (out, state) if return_last_state else out


def bound_steps(module: torch.nn.Module) -> bool:
    """Let updates by one token keep the bounds of the model's time steps; False if it has none."""
    bounded = False
    for part in module.modules():
        low, high = getattr(part, "time_step_limit", None) or (0.0, math.inf)
        code = sys.modules.get(type(part).__module__)
        if (low <= 0.0 and high == math.inf) or not hasattr(code, _STEP):
            continue
        update = getattr(code, _STEP)  # bounded already, if another model of this kind was loaded before
        whole = update.args[0] if isinstance(update, partial) else update
        setattr(code, _STEP, partial(_bounded_step, whole, (low, high)))
        bounded = True
    return bounded


def _bounded_step(
    whole: Callable[..., torch.Tensor],
    bounds: tuple[float, float],
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    *args: Any,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """dt (rows, heads, head_dim), dt_bias (heads, head_dim); the rest, and what is returned, as `whole` has it."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    return whole(state, hidden_states, dt.clamp(*bounds), *args, **kwargs)
