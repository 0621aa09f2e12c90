"""Packed linear layers: right, and a row's bits are its own however many rows stand beside it."""

from __future__ import annotations

import pytest
import torch

from engine import linear


def packed(out: int, inside: int, *, bias: bool) -> tuple[torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(1)
    layer = torch.nn.Linear(inside, out, bias=bias).eval()
    inputs = torch.randn(16, inside)
    expected = torch.nn.functional.linear(inputs, layer.weight, layer.bias)
    assert linear.pack_linear_layers(torch.nn.Sequential(layer))
    assert torch.allclose(layer(inputs), expected, atol=1e-4)
    return layer, inputs


@pytest.mark.parametrize(("out", "inside"), [(1024, 640), (256, 640), (640, 2048), (576, 1536), (512, 64), (100, 30)])
def test_rows_have_the_same_bits_alone_and_beside_others(out: int, inside: int) -> None:
    layer, inputs = packed(out, inside, bias=out == 256)
    with torch.inference_mode():
        whole = layer(inputs)
        for count in range(1, 9):
            for at in range(0, 16 - count):
                assert torch.equal(layer(inputs[None, at : at + count])[0], whole[at : at + count]), (count, at)


def test_a_shape_with_another_kernel_for_few_rows_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    product, seen = torch.ops.mkldnn._linear_pointwise, list[int]()

    def other_below_three(inputs: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(inputs.numel() // inputs.shape[-1])
        out: torch.Tensor = product(inputs, *rest)
        return out if seen[-1] >= 3 else out * (1 + 1e-6)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", other_below_three)
    layer, inputs = packed(64, 64, bias=False)
    with torch.inference_mode():
        assert torch.equal(layer(inputs[:1]), layer(inputs)[:1])
    assert seen[-2:] == [3, 16]
