"""Norms in one call: only where every bit is the same."""

from __future__ import annotations

import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from engine import norms


def with_weights(norm: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(3)
    norm.weight.data = torch.randn_like(norm.weight)
    return norm


def test_both_forms_of_the_weight_are_found_and_bits_stay() -> None:
    module = torch.nn.Sequential(with_weights(LlamaRMSNorm(48)), with_weights(Gemma3RMSNorm(48)))
    inputs = torch.randn(3, 11, 48)
    with torch.inference_mode():
        expected = module(inputs)
        assert norms.join_norms(module) == 2
        assert torch.equal(module(inputs), expected)
        assert torch.equal(module(inputs[:1, 4:5]), expected[:1, 4:5])


def test_what_computes_something_else_is_left_alone() -> None:
    # The gated norm without its gate, as the check calls it, would be a plain one.
    layers = [torch.nn.LayerNorm(48), with_weights(MambaRMSNormGated(48, 48)), torch.nn.Linear(48, 48)]
    before = [layer.forward for layer in layers]
    assert norms.join_norms(torch.nn.Sequential(*layers)) == 0
    assert [layer.forward for layer in layers] == before
