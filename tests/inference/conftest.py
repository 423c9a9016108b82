"""One tiny server of each kind for the whole room: starting vLLM takes most of a test's time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from safetensors.torch import save_file

from roll_flash.config.tree import InferenceConfig
from roll_flash.engines.inference import InferenceEngine, StagedWeights
from roll_flash.inference.open import open_engine
from roll_flash.models.prepare import resolve_model

MAX_MODEL_LEN = 512
T = TypeVar("T")


class Served:
    """A running engine with its event loop, and the same model here to compare with."""

    def __init__(self, engine: InferenceEngine, loop: asyncio.AbstractEventLoop, scratch: Path) -> None:
        self.engine = engine
        self.loop = loop
        self.scratch = scratch
        self.version = 0
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = resolve_model("tiny")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 240))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def logprobs(self, token_ids: list[int]) -> Any:
        """What transformers says about `token_ids[1:]`, as the learner would."""
        import torch

        with torch.no_grad():
            logprobs = self.model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        return logprobs[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].numpy()

    def change_weights(self) -> StagedWeights:
        """Change the model here, clearly, and stage it as the learner would. The file is the caller's to remove."""
        import torch

        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * 0.1 * parameter.abs().mean())
        path = self.scratch / f"version-{self.version}.safetensors"
        save_file({name: t for name, t in self.model.state_dict().items() if name != "lm_head.weight"}, path)
        return StagedWeights(self.version, str(path), path.stat().st_size)


@pytest.fixture(scope="session", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    scratch = tmp_path_factory.mktemp(request.param)
    config = InferenceConfig(engine=request.param, kv_cache_gib=0.25)
    engine = open_engine(config, model_folder=resolve_model("tiny"), max_model_len=MAX_MODEL_LEN, logs=scratch)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(engine.start())
        yield Served(engine, loop, scratch)
    finally:
        loop.run_until_complete(engine.close())
        loop.close()
