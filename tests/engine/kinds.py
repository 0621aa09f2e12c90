"""Tiny models of every architecture that the contract suite runs: a new one is one line in `KINDS`.

Random weights from a seed, 0.1 to 0.5 million parameters, a vocabulary of 512, windows of 32 tokens. `initializer_range` 0.2
keeps greedy text from falling into a loop, so that a wrong state shows in the tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = dict(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    tie_word_embeddings=False, initializer_range=0.2,
)  # fmt: skip
WINDOWS = dict(sliding_window=32, layer_types=["sliding_attention"] * 3 + ["full_attention"])
DELTA = dict(layer_types=["linear_attention"] * 3 + ["full_attention"], linear_num_key_heads=2,
             linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)  # fmt: skip
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16, mamba_expand=2, mamba_chunk_size=16)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
NO_HEADS = dict(num_attention_heads=None, num_key_value_heads=None, head_dim=None, intermediate_size=None,
                max_position_embeddings=None, state_size=16)  # fmt: skip

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "deepseek_v3": dict(q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
                        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
                        first_k_dense_replace=2, head_dim=None, num_key_value_heads=4),
    "mistral": dict(sliding_window=32),
    "gemma2": dict(**WINDOWS, attn_logit_softcapping=5.0),
    "gemma3_text": WINDOWS,
    "gpt_oss": dict(**WINDOWS, num_local_experts=4, num_experts_per_tok=2),
    "short_window": dict(**(WINDOWS | {"sliding_window": 6})),
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "olmo_hybrid": {},
    "falcon_h1": dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16,
                      mamba_d_conv=4, mamba_chunk_size=16),
    "granitemoehybrid": dict(layer_types=["mamba"] * 3 + ["attention"], **MAMBA, num_local_experts=0,
                             shared_intermediate_size=128),
    "jamba": dict(attn_layer_period=4, attn_layer_offset=3, expert_layer_period=2, expert_layer_offset=1,
                  num_experts=2, num_experts_per_tok=1, mamba_d_state=8, mamba_dt_rank=8, use_mamba_kernels=False),
    "bamba": dict(attn_layer_indices=[3], **MAMBA),
    "nemotron_h": dict(mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=1, chunk_size=16),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2, conv_L_cache=3),
    "mamba": NO_HEADS,
    "mamba2": NO_HEADS | dict(num_heads=8, head_dim=16, n_groups=1, chunk_size=16, expand=2),
}  # fmt: skip
# What can't be served, and a word of the reason.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "recurrent_gemma": (dict(num_hidden_layers=3, lru_width=64, attention_window_size=32), "differ from the model's own"),
    "rwkv": (dict(attention_hidden_size=64, context_length=2048), "keeps no state in the cache"),
    "llama4_text": (dict(num_local_experts=2, intermediate_size_mlp=64, attention_chunk_size=32), "not known here"),
    "minimax": (dict(num_local_experts=2, layer_types=["linear_attention", "full_attention"] * 2), "not known here"),
}  # fmt: skip
# Not run through all cases.
VARIANTS = {"latent_dense": KINDS["deepseek_v3"] | {"first_k_dense_replace": 4}, "float16": KINDS["gemma3_text"]}
ARCHITECTURE = {"short_window": "gemma3_text", "latent_dense": "deepseek_v3", "float16": "gemma3_text"}
WINDOWED = {"mistral", "gemma2", "gemma3_text", "gpt_oss", "short_window"}
DENSE = {"llama", "qwen3", "deepseek_v3"}
RECURRENT = [name for name in KINDS if name not in WINDOWED | DENSE]
# One of each kind, where all would take too long.
SAMPLE = {"window": "gemma3_text", "latent": "deepseek_v3", "linear": "qwen3_5_text", "mamba": "granitemoehybrid",
          "convolution": "lfm2", "recurrent": "mamba2"}  # fmt: skip


def write_model(name: str, directory: Path, seed: int = 5, context_tokens: int = 2048) -> Path:
    """Write the named model's configuration and weights, float32 (`float16`: such as float16 holds)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    own = KINDS.get(name) or VARIANTS.get(name) or REFUSED.get(name, ({},))[0]
    wanted = {**COMMON, "max_position_embeddings": context_tokens, **own}
    options = {key: value for key, value in wanted.items() if value is not None}
    config = AutoConfig.for_model(ARCHITECTURE.get(name, name), **options)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight[:3] = 0.0  # greedy text never stops by itself
    if name == "float16":
        model = model.half().float()
    model.save_pretrained(directory)
    return directory
