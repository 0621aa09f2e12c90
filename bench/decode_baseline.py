"""transformers' own `generate`, in a process of its own: the baseline of bench/decode.py.

    python -m bench.decode_baseline MODEL_DIR THREADS

One JSON line in, one out: {"render": chats} gives their prompts' token ids, {"generate": prompts, "tokens": n} decodes n
tokens of each greedily as one left-padded batch, stop tokens or not, and says how long that took and the texts.
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
    model.generation_config.eos_token_id = None  # as many tokens as are asked for, as with `ignore_eos`
    for line in sys.stdin:
        message = json.loads(line)
        answer = render(tokenizer, message) if "render" in message else generate(torch, model, tokenizer, message)
        print(json.dumps(answer), flush=True)


def render(tokenizer: Any, message: dict[str, Any]) -> dict[str, Any]:
    texts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in message["render"]
    ]
    return {"prompts": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]}


def generate(torch: Any, model: Any, tokenizer: Any, message: dict[str, Any]) -> dict[str, Any]:
    prompts, tokens, pad = message["generate"], message["tokens"], model.config.pad_token_id or 0
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=pad
        )
    seconds = time.perf_counter() - began
    assert out.shape[1] == width + tokens, out.shape
    return {"seconds": seconds, "texts": tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
