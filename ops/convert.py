"""Turns a GGUF file into safetensors and a tokenizer: `python -m ops.convert FILE.gguf OUT`. A process of its own, run by `ops/pull.py`.

The weights are unpacked to float32. Those of a quantised file are rounded to what float16 holds (by at most 2^-11 of a value, where
four bits were kept of it), since an engine on a CPU then reads half the bytes a step (engine/linear.py). Says where it is by lines
`stage: text` on stdout. Takes about half a minute for 135M parameters, which is why it is done once. Source: docs/operations.md.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

STAGES = ("import", "weights", "save", "tokenizer", "check")
CHECK_TEXT = "The sea, the sky; 42 ships.\n"


def say(stage: str) -> None:
    """Tell the parent which stage begins."""
    print(f"stage: {stage}", flush=True)


def convert(source: Path, target: Path) -> None:
    """Write config, weights and tokenizer of `source` into the directory `target`, then load config and tokenizer from there."""
    say("import")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    directory, name = str(source.parent), source.name
    say("weights")
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        gguf_file=name,
        quantization_config=GgufConfig(gguf_file=name, dequantize=True),
        dtype=torch.float32,
    )
    # transformers refuses to save a model that still says it is quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    if is_quantised(source):
        round_to_half(model)
    say("save")
    model.save_pretrained(str(target))
    say("tokenizer")
    AutoTokenizer.from_pretrained(directory, gguf_file=name).save_pretrained(str(target))
    say("check")
    check(target)


def is_quantised(source: Path) -> bool:
    """Whether any tensor of the file is kept in blocks of few bits."""
    from gguf import GGMLQuantizationType, GGUFReader

    whole = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F64}
    return any(tensor.tensor_type not in whole for tensor in GGUFReader(source).tensors)


def round_to_half(module: Any) -> None:
    """Give every matrix values that float16 holds exactly, save one with values beyond its range; vectors (norms) stay as they are."""
    for parameter in module.parameters():
        rounded = parameter.data.half()
        if parameter.dim() > 1 and rounded.isfinite().all():
            parameter.data = rounded.to(parameter.dtype)


def check(directory: Path) -> None:
    """Config loads, weights have the shapes it says, tokenizer gives a text back. Raises what transformers raises, or ValueError."""
    from engine import lean_torch

    lean_torch.import_lean()
    importlib.import_module("engine.lean_transformers")  # what engines use of it, in half the time
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(str(directory))
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    tokens = tokenizer(CHECK_TEXT, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(tokens) != CHECK_TEXT:
        raise ValueError(f"the tokenizer does not give {CHECK_TEXT!r} back, but {tokenizer.decode(tokens)!r}")
    vocabulary = config.get_text_config().vocab_size
    if not tokens or max(tokens) >= vocabulary:
        raise ValueError(f"the tokenizer has ids beyond the model's vocabulary of {vocabulary}")
    _check_weights(directory)


def _check_weights(directory: Path) -> None:
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), framework="numpy") as tensors:  # reads the header: a cut file is refused
            if not list(tensors.keys()):
                raise ValueError(f"{file.name} holds no tensors")


def main() -> int:
    """`--check DIRECTORY` only checks."""
    if sys.argv[1] == "--check":
        check(Path(sys.argv[2]))
    else:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
