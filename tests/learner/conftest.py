"""A tiny random Qwen3 with a character tokenizer, and Ray, for all tests of the learner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 128


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def make_tiny_model(folder: Path, hidden_size: int = 48, tied: bool = True) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    vocabulary = {chr(index): index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=chr(1)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """It stays for the tests of other folders in this process, whose runs use it too: room for their parts."""
    if ray.is_initialized():  # for tests of another folder that came before in this process
        ray.shutdown()
    ray.init(address="local", num_cpus=16, include_dashboard=False, configure_logging=False, log_to_driver=True)
    yield
    ray.shutdown()
