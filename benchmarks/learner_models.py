"""The models that benchmarks/learner.py compares with: one by name or folder, or a Qwen3 shape with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from roll_flash.learner.model.policy_model import PolicyModel, load_policy_model
from roll_flash.models.prepare import resolve_model

RANDOM_QWEN3 = "random-qwen3"
"""Qwen3-0.6B's shape: 28 layers, 0.6 billion parameters, of which the (tied) embedding has 156 million."""


@contextmanager
def model_folder(name: str, layers: int, vocabulary: int) -> Iterator[Path]:
    """The folder of a model; `layers` and `vocabulary` are those of `random-qwen3`, which is made for this run."""
    if name != RANDOM_QWEN3:
        yield resolve_model(name)
        return
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    with TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        yield Path(folder)


def load_both(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[PolicyModel, PreTrainedModel]:
    """The learner's model and the plain one, both in `dtype` and in training mode."""
    policy = load_policy_model(folder)
    for parameter in policy.parameters():
        # Not `.to(dtype)`, which would round the frequencies of the rotary embedding too.
        parameter.data = parameter.data.to(dtype)
    policy = policy.to(device)
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    return policy, plain.train()
