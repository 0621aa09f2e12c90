"""What a conversion does to the weights of a GGUF file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ops import convert, gguf_file
from ops.errors import ModelError


def written(path: Path, *, quantised: bool) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    rows = np.random.default_rng(1).standard_normal((4, 64), dtype=np.float32)
    writer.add_tensor("output_norm.weight", rows[0])
    if quantised:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor("output.weight", gguf.quantize(rows, kind), raw_dtype=kind)
    else:
        writer.add_tensor("output.weight", rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_only_a_file_with_blocks_of_few_bits_is_quantised(tmp_path: Path) -> None:
    assert convert.is_quantised(written(tmp_path / "a.gguf", quantised=True))
    assert not convert.is_quantised(written(tmp_path / "b.gguf", quantised=False))


@pytest.mark.parametrize("quantised", [False, True])
def test_a_file_is_whole_or_cut_wherever_it_ends(quantised: bool, tmp_path: Path) -> None:
    file = written(tmp_path / "a.gguf", quantised=quantised)
    gguf_file.check(file)
    data = file.read_bytes()
    for end in range(0, len(data) - 32, 3):
        file.write_bytes(data[:end])
        with pytest.raises(ModelError, match="is cut|no GGUF file"):
            gguf_file.check(file)


def test_sizes_of_blocks_are_those_of_the_format() -> None:
    gguf = pytest.importorskip("gguf")
    known = {int(kind): tuple(block) for kind, block in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: known[kind] for kind in gguf_file.BLOCKS} == gguf_file.BLOCKS


def test_matrices_are_rounded_to_half_and_nothing_else() -> None:
    torch.manual_seed(4)
    module = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 32))
    with torch.no_grad():
        module[2].weight[0, 0] = 1e6
    before = [parameter.detach().clone() for parameter in module.parameters()]
    convert.round_to_half(module)
    first, *others = zip(before, module.parameters(), strict=True)
    assert first[1].dtype == torch.float32 and torch.equal(first[1], first[0].half().float())
    assert not torch.equal(*first)
    for old, new in others:
        assert torch.equal(old, new)
