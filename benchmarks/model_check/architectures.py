"""Tiny random models of many architectures, to compare the learner with plain transformers and with vLLM.

Sizes are small, but every kind of computation is there: windows, chunks and original context lengths are shorter than
the texts that are compared, heads share keys, and experts are routed.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll_flash.errors import ModelError
from roll_flash.models import hub, tiny
from roll_flash.models.prepare import is_model, resolve_model

VOCABULARY = 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    # Large enough to make the next-token distribution far from uniform, so that errors show in log-probabilities.
    "initializer_range": 0.08,
    "init_std": 0.08,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT = {"n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 512, "rotary_dim": 16}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SHARED_EXPERT = _EXPERTS | {"shared_expert_intermediate_size": 64}
_WINDOW = {"sliding_window": 32}
_WINDOW_THEN_ALL = _WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
_LINEAR_THEN_ALL = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = _LINEAR_THEN_ALL | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_MAMBA = {"intermediate_size": 256, "state_size": 16, "time_step_rank": 8}
_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 32,
    "mamba_expand": 2,
}
_CONVOLUTION = {"layer_types": ["conv", "full_attention"], "block_ff_dim": 96}
_MLA = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,  # with 64, the only sizes that vLLM serves on a CPU
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 48,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
_GROUPED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_SHORT_ROPE = {"factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
_YARN = {"rope_type": "yarn", **_SHORT_ROPE}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, **_SHORT_ROPE}

SHARED: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "cohere": {"logit_scale": 0.25},
    "deepseek_v2": _MLA | {"topk_method": "greedy"},
    # transformers does not write `scoring_func`, without which vLLM takes softmax.
    "deepseek_v3": _MLA | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_intermediate_size": 64},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "flex_olmo": _EXPERTS,
    "gemma": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": _EXPERTS | _GROUPED,
    "glm4_moe_lite": _MLA,
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": {"num_key_value_heads": 4},  # which it does not have, but vLLM reads
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "granitemoe": _EXPERTS,
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": _EXPERTS | {"moe_topk": 2},
    "hy_v3": _EXPERTS,
    "hyperclovax": {"logits_scaling": 0.25},
    "jetmoe": _EXPERTS,
    "llama": {},
    "llama with attention dropout": {"model_type": "llama", "attention_dropout": 0.5},
    "llama with YaRN": {"model_type": "llama", "rope_parameters": _YARN, "max_position_embeddings": 128},
    "longcat_flash": _MLA,
    "minimax_m2": _EXPERTS,
    "ministral3": {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}},
    "mixtral": _EXPERTS,
    "nanochat": {},
    "olmo": {},
    "olmo2": {},
    "olmoe": _EXPERTS,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 128},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": _EXPERTS | {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1},
    "qwen2": {},
    "qwen2_moe": _SHARED_EXPERT,
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "seed_oss": {},
    "smollm3": {},
    "solar_open": _EXPERTS | _GROUPED,
    "starcoder2": {},
}
"""Models whose rows are prefix trees."""

ALONE: dict[str, dict[str, Any]] = {
    "afmoe": _EXPERTS | _WINDOW_THEN_ALL,
    "bamba": _MAMBA_2 | {"attn_layer_indices": [1]},
    "bloom": _GPT,
    "codegen": _GPT,
    "cohere2": {"logit_scale": 0.25} | _WINDOW_THEN_ALL,
    "dots1": _EXPERTS | _GROUPED | _WINDOW,
    "exaone4 with a window": {"model_type": "exaone4"} | _WINDOW_THEN_ALL,
    "exaone_moe": _EXPERTS | _WINDOW_THEN_ALL,
    "falcon": {"head_dim": None},
    "falcon_h1": _MAMBA_2 | {"mamba_d_ssm": 256},
    "falcon_mamba": _MAMBA,
    "gemma2": _WINDOW_THEN_ALL,
    "gemma3_text": _WINDOW_THEN_ALL,
    "gpt_neox_japanese": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "gpt_oss": _EXPERTS | _WINDOW_THEN_ALL | {"rope_parameters": _YARN},
    "gptj": _GPT,
    "granitemoehybrid": _EXPERTS | _MAMBA_2 | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 64},
    "jamba": _EXPERTS
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    | {"mamba_d_state": 16, "mamba_dt_rank": 8},
    "lfm2": _CONVOLUTION,
    "lfm2_moe": _EXPERTS | _CONVOLUTION | {"num_dense_layers": 1},
    "mamba": _MAMBA,
    "mamba2": {
        "intermediate_size": 256,
        "state_size": 16,
        "num_heads": 8,
        "head_dim": 32,
        "n_groups": 2,
        "chunk_size": 32,
    },
    "mimo_v2_flash": _EXPERTS | _WINDOW_THEN_ALL,
    "minimax": _EXPERTS | _LINEAR_THEN_ALL | {"block_size": 32},
    "mistral with a window": {"model_type": "mistral"} | _WINDOW,
    "mpt": {"d_model": 128, "n_heads": 4, "n_layers": 2},
    "nemotron": {},
    "nemotron_h": _EXPERTS | {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "chunk_size": 32},
    "olmo3": _WINDOW_THEN_ALL,
    "olmo_hybrid": _LINEAR_THEN_ALL,
    "qwen3_5_moe_text": _SHARED_EXPERT | _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _SHARED_EXPERT | _DELTA,
    "recurrent_gemma": {"lru_width": 128, "attention_window_size": 32, "num_hidden_layers": 3},
    "stablelm": {},
    "vaultgemma": _WINDOW_THEN_ALL,
    "xglm": {"d_model": 128, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4, "dropout": 0.1},
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
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
        "rope_parameters": {
            "sliding_attention": _LONGROPE,
            "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        },
        "max_position_embeddings": 32,
    },
}
"""Models whose sequences are computed one by one."""

SERVED = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "mistral with a window",
    "gemma2",
    "gemma3_text",
    "phi3",
    "granite",
    "olmo2",
    "olmo3",
    "glm4",
    "exaone4",
    "stablelm",
    "nemotron",
    "falcon_h1",
)
"""Architectures that are published to a vLLM server."""


def check_names(names: Sequence[str]) -> None:
    """Raises ModelError for the first name that is neither an architecture of the lists nor a model that can be
    trained. Imports no torch."""
    for name in names:
        if name in SHARED | ALONE:
            continue
        if is_model(name) or hub.is_hub_id(name) or Path(name).expanduser().exists():
            resolve_model(name)
            continue
        near = difflib.get_close_matches(name, [*SHARED, *ALONE], n=1)
        hint = f"did you mean {near[0]}?" if near else "give an architecture of docs/models.md or a model folder"
        raise ModelError(f"{name}: no architecture and no model has this name; {hint}")


def write_model(name: str, folder: Path, **changes: Any) -> Path:
    """Write the architecture called `name` into `folder`, with random weights and the tiny model's tokenizer.

    `changes` go into its config. Returns `folder`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = _COMMON | (SHARED | ALONE)[name] | changes
    if settings["head_dim"] is None:  # a config that computes it takes none
        del settings["head_dim"]
    config = AutoConfig.for_model(settings.pop("model_type", name), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        head = model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:  # it starts at zero, where nobody would miss it
            torch.nn.init.normal_(head.bias)
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder, tiny.vocabulary(VOCABULARY))
    return folder
