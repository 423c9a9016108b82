"""Tiny random models of many architectures, to compare the learner with plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHORT_ROPE = {"factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, **_SHORT_ROPE}

SHARED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "smollm3": {},
    "olmo2": {},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "cohere": {"logit_scale": 0.25},
    "hyperclovax": {"logits_scaling": 0.25},
    "phi": {},
    "phimoe": {**_EXPERTS, "router_jitter_noise": 0.1, "input_jitter_noise": 0.1},
    "nanochat": {},
    "llama with attention dropout": {"model_type": "llama", "attention_dropout": 0.5},
    "deepseek_v2": _MLA | {"topk_method": "greedy"},
    "deepseek_v3": _MLA,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "mixtral": _EXPERTS,
}
"""Whose rows are prefix trees."""

ALONE: dict[str, dict[str, Any]] = {
    "gpt_neox_japanese": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "dropout": 0.1},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 16, "head_dim": 8, "num_hidden_layers": 3},
    "nemotron": {},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 16},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 16},
    "gemma2": {"head_dim": 8, "sliding_window": 16},
    "gemma3_text": {"head_dim": 8, "sliding_window": 16},
    "gpt_oss": _EXPERTS | {"head_dim": 8, "sliding_window": 16},
    "dynamic RoPE": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", **_SHORT_ROPE},
        "max_position_embeddings": 32,
    },
    "longrope": {
        "model_type": "phi3",
        "rope_parameters": _LONGROPE,
        "original_max_position_embeddings": 32,
        "max_position_embeddings": 128,
    },
    "phimoe with a window that it does not turn off": _EXPERTS
    | {"model_type": "phimoe", "sliding_window": 66, "use_sliding_window": False},
    "dynamic RoPE and longrope by kind of layer": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
        "rope_parameters": {
            "sliding_attention": _LONGROPE,
            "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        },
        "max_position_embeddings": 32,
    },
}
"""Whose sequences are computed one by one."""


def write_model(name: str, folder: Path, **changes: Any) -> Path:
    settings = _COMMON | (SHARED | ALONE)[name] | changes
    config = AutoConfig.for_model(settings.pop("model_type", name), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        head = model.get_output_embeddings()
        if head.bias is not None:  # it begins at zero, where nobody would miss it
            torch.nn.init.normal_(head.bias)
    model.save_pretrained(folder)
    return folder
