"""Packed linear layers: right, and a row's bits are its own however many rows stand beside it."""

from __future__ import annotations

import pytest
import torch

from engine import linear


def packed(
    out: int, inside: int, *, bias: bool, kept: torch.dtype = torch.float32
) -> tuple[torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(1)
    layer = torch.nn.Linear(inside, out, bias=bias).eval()
    if kept == torch.bfloat16:  # with values far below float16's least
        layer.weight.data *= torch.logspace(-5, 0, inside)
    layer.weight.data = layer.weight.data.to(kept).float()
    inputs = torch.randn(16, inside)
    expected = torch.nn.functional.linear(inputs, layer.weight, layer.bias)
    module = torch.nn.Sequential(layer)
    assert linear.pack_linear_layers(module, lambda: module(inputs))
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


needs_fbgemm = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch was built without FBGEMM"
)


@needs_fbgemm
@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("out", "inside"), [(1024, 640), (576, 1536), (100, 30)])
def test_few_rows_over_weights_that_float16_holds_have_the_same_bits_in_every_batch(
    out: int, inside: int, kept: torch.dtype
) -> None:
    layer, inputs = packed(out, inside, bias=out == 1024, kept=kept)
    with torch.inference_mode():
        whole = layer(inputs)
        for count in range(1, 16):
            for at in (0, 1, 16 - count):
                assert torch.equal(layer(inputs[None, at : at + count])[0], whole[at : at + count][: 16 - at]), count


@needs_fbgemm
def test_float16_is_read_for_few_rows_only_and_only_where_it_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    product, seen = torch.ops.quantized.linear_dynamic_fp16, list[int]()

    def counted(inputs: torch.Tensor, weight: object) -> torch.Tensor:
        seen.append(inputs.numel() // inputs.shape[-1])
        out: torch.Tensor = product(inputs, weight)
        return out

    monkeypatch.setattr(torch.ops.quantized, "linear_dynamic_fp16", counted)
    packed(64, 64, bias=False)
    assert not seen
    packed(64, 64, bias=True, kept=torch.bfloat16)
    assert seen
    layer, inputs = packed(64, 64, bias=True, kept=torch.float16)
    seen.clear()
    with torch.inference_mode():
        many = torch.cat([inputs, inputs])
        assert torch.allclose(layer(many), torch.nn.functional.linear(many, layer.weight, layer.bias), atol=1e-4)
        assert not seen
        layer(inputs[:4])
        assert seen == [4]
    module = torch.nn.Sequential(torch.nn.Linear(64, 64)).eval()
    module[0].weight.data = module[0].weight.data.half().float()
    seen.clear()
    linear.pack_linear_layers(module, lambda: module(inputs), half=False)
    module(inputs[:4])
    assert not seen


@needs_fbgemm
@pytest.mark.parametrize(("out", "inside"), [(1024, 640), (576, 1536), (100, 30)])
def test_all_rows_alike_whatever_their_count_over_weights_that_are_kept_once(out: int, inside: int) -> None:
    layer = torch.nn.Linear(inside, out).eval()
    layer.weight.data = layer.weight.data.half().float()
    inputs, module = torch.randn(512, inside), torch.nn.Sequential(layer)
    assert linear.pack_linear_layers(module, lambda: module(inputs), alike=True)
    with torch.inference_mode():
        whole = layer(inputs)
        assert torch.allclose(whole, torch.nn.functional.linear(inputs, layer.weight, layer.bias), atol=1e-4)
        for count in (1, 2, 7, 14, 16, 17, 31, 32, 49, 100, 240, 256, 511):
            for at in (0, 512 - count):
                assert torch.equal(layer(inputs[at : at + count]), whole[at : at + count]), (count, at)


class WithVocabulary(torch.nn.Module):
    """One layer that is the vocabulary's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head = torch.nn.Linear(64, 200, bias=False)
        self.head.weight.data = self.head.weight.data.half().float()

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(inputs)
        return out


@needs_fbgemm
def test_the_vocabulary_is_kept_once_and_many_rows_are_computed_a_few_at_a_time() -> None:
    module, inputs = WithVocabulary().eval(), torch.randn(2, 25, 64)
    assert linear.pack_linear_layers(module, lambda: module(inputs))
    with torch.inference_mode():
        whole = module(inputs)
        assert torch.allclose(whole, torch.nn.functional.linear(inputs, module.head.weight), atol=1e-4)
        assert torch.equal(module(inputs[:1, :3]), whole[:1, :3])


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


class Projections(torch.nn.Module):
    """Two layers that share their inputs, and one that may not; `between` is done to the inputs after the first."""

    def __init__(self, between: str = "") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.query, self.key, self.out = (torch.nn.Linear(64, size, bias=size == 32) for size in (96, 32, 64))
        self.between = between

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query = self.query(inputs)
        if self.between == "changed":
            inputs.mul_(2)
        if self.between == "called twice":
            query = query + self.query(inputs)
        key = self.key(inputs)
        return self.out(torch.tanh(query[..., :64])) + torch.cat([key, key], dim=-1)


@pytest.mark.parametrize("between", ["", "changed", "called twice"])
def test_layers_that_share_their_inputs_are_one_product(between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = Projections(between).eval(), torch.randn(5, 64)
    with torch.inference_mode():
        expected = module(inputs.clone())
        assert linear.pack_linear_layers(module, lambda: module(inputs.clone()))
        product, calls = torch.ops.mkldnn._linear_pointwise, list[int]()

        def counted(*arguments: object) -> torch.Tensor:
            calls.append(1)
            out: torch.Tensor = product(*arguments)
            return out

        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
        for rows in (5, 1, 5):
            given = inputs[:rows].clone()
            assert torch.allclose(module(given), expected[:rows], atol=1e-4)
    assert len(calls) == 3 * {"": 2, "changed": 3, "called twice": 4}[between]


def test_another_tensor_is_never_given_the_kept_product() -> None:
    module = Projections().eval()
    with torch.inference_mode():
        linear.pack_linear_layers(module, lambda: module(torch.randn(2, 64)))
        first, second = torch.randn(2, 64), torch.randn(2, 64)
        module.query(first)
        assert torch.allclose(
            module.key(second), torch.nn.functional.linear(second, module.key.weight, module.key.bias), atol=1e-4
        )
