"""A selective scan that begins from a state. For models of the Mamba 1 kind, whose own scan always begins from nothing.

transformers prefills these models in one piece, so that its scan ignores the state which the sequence before the chunk left;
a second chunk would be computed as if it were the first. The models look the function up in their own module, so a
replacement there is all it takes. Everything else of the layer is the model's own. The start-up check would refuse the model
otherwise. Source: `mamba_selective_scan` in transformers, Gu and Dao 2023, equation 2.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from engine import attention

_NAME = "mamba_selective_scan"


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
