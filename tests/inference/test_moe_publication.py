"""A mixture of experts goes through a real learner, a real publication and a real server.

In memory its experts are one tensor, in its folder each is its own; vLLM on a CPU packs them in an order of its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from roll_flash.config.tree import InferenceConfig, WeightsConfig
from roll_flash.inference.open import open_engine
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.models.prepare import resolve_model
from roll_flash.weight_sync.parity import Probe
from roll_flash.weight_sync.publication import Publisher
from tests.learner.in_process import in_process
from tests.learner.samples import make_group

VOCABULARY = 128


def write_mixture(kind: str, folder: Path) -> Path:
    """A tiny random mixture of experts with the tiny model's tokenizer."""
    tiny = resolve_model("tiny")
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("model.safetensors", "config.json"))
    settings: dict[str, Any] = {
        "vocab_size": AutoConfig.from_pretrained(tiny).vocab_size,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 48,  # which vLLM pads
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "eos_token_id": AutoConfig.from_pretrained(tiny).eos_token_id,
        "bos_token_id": None,
        "dtype": "float32",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("transformers", "mixtral"),
        pytest.param("vllm", "qwen3_moe", marks=pytest.mark.vllm),
        pytest.param("vllm", "mixtral", marks=[pytest.mark.vllm, pytest.mark.nightly]),
    ],
)
def test_a_mixture_of_experts_is_published_and_exported(engine: str, kind: str, tmp_path: Path) -> None:
    folder = write_mixture(kind, tmp_path / "model")
    probe = Probe([np.random.default_rng(0).integers(4, VOCABULARY // 2, 40).tolist()])

    async def use(learner: FsdpLearner) -> None:
        config = InferenceConfig(engine=engine, kv_cache_gib=0.25)  # type: ignore[arg-type]
        servers = open_engine(config, model_folder=folder, max_model_len=512, logs=tmp_path)
        try:
            await servers.start()
            publisher = Publisher(
                learner,
                servers,
                WeightsConfig(),
                probe=probe,
                threshold=1e-3,
                on_published=lambda version: None,
            )
            await publisher.check()
            before = (await learner.logprobs_of([probe.texts[0]]))[0]
            await learner.accumulate([make_group(0, vocabulary=64), make_group(1, vocabulary=64)])
            await learner.finish_step()
            await publisher.begin()
            assert await publisher.wait_published() is not None
            after = (await learner.logprobs_of([probe.texts[0]]))[0]
            assert np.abs(after - before).max() > 0.01
            await (await learner.begin_export(tmp_path / "exported"))
            exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
            tokens = torch.tensor(probe.texts[0])
            with torch.no_grad():
                plain = exported(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
            np.testing.assert_allclose(plain.numpy(), after, atol=1e-4)
        finally:
            await servers.close()

    in_process(folder, use, learning_rate=1e-2)
