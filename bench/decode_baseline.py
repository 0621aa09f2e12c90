"""transformers' own `generate`, in a process of its own: the baseline of bench/decode.py.

    python -m bench.decode_baseline MODEL_DIR THREADS

One JSON line in, one out: {"render": texts} gives the chat prompts' token ids, {"generate": prompts, "tokens": n} decodes
them greedily as one left-padded batch and says how long that took and how many tokens it made (stop tokens included).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main(directory: str, threads: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    for line in sys.stdin:
        message = json.loads(line)
        answer = render(tokenizer, message) if "render" in message else generate(torch, model, message)
        print(json.dumps(answer), flush=True)


def render(tokenizer: Any, message: dict[str, Any]) -> dict[str, Any]:
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in message["render"]
    ]
    return {"prompts": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]}


def generate(torch: Any, model: Any, message: dict[str, Any]) -> dict[str, Any]:
    prompts, pad = message["generate"], model.config.pad_token_id or 0
    stop = model.generation_config.eos_token_id
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=message["tokens"], do_sample=False, pad_token_id=pad
        )
    seconds = time.perf_counter() - began
    stops = set(stop if isinstance(stop, list) else [stop])
    return {"seconds": seconds, "token_count": sum(count(row.tolist(), stops) for row in out[:, width:])}


def count(row: list[int], stops: set[int]) -> int:
    """Tokens up to and including the first stop token; what follows is padding."""
    return next((index + 1 for index, token in enumerate(row) if token in stops), len(row))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
