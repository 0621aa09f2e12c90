"""Make the tiny seeded model of the system tests: a llama of 0.2 million random weights with a tokenizer of 512 tokens.

`harness.build_tiny_model` caches the result. The same seed gives the same weights. `initializer_range` 0.2 keeps greedy text from
falling into a one-token loop. The tokenizer is byte-level, so a random model also produces pieces of broken UTF-8, which a
detokenizer has to survive.
"""

from __future__ import annotations

from pathlib import Path

SEED = 11
CONTEXT_TOKENS = 2048
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "The engine copies what a step changed into a log in shared memory, and the keeper drains the log to the disk.",
    "A session that was parked yesterday goes on today from the next token, and nothing is computed again.",
    "user assistant system message answer question the of and to in is that it for on with as at by from",
    "When the machine restarts, the stream is resumed: no gap, no repeat. 0 1 2 3 4 5 6 7 8 9, 10, 100, 1,000.",
    "Blocks are named by what they hold; equal prefixes are stored once, whoever asked, and a fork costs nothing.",
    "Sampling draws with a counter: seed and position decide, so another engine would have drawn the very same token.",
    "Kill any process; the client's stream goes on. Restore the prefix, force the tail, deliver the next token.",
]


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json and its configuration: byte-level BPE of exactly 512 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    missing = 512 - tokenizer.get_vocab_size()
    assert missing == 0, f"the corpus is too short for 512 tokens: {missing} missing"
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[1], eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)


def write_model(directory: Path) -> None:
    """Seeded random weights, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[: len(SPECIAL)] = 0.0  # greedy text never stops by itself, sampled text hardly ever
    model.save_pretrained(directory)


def write(directory: Path) -> None:
    """All of it, into a directory that is made."""
    directory.mkdir(parents=True, exist_ok=True)
    write_model(directory)
    write_tokenizer(directory)
