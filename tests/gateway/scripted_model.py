"""A tiny model here in the process: it says what a test wants, token by token, with the logprobs it gives to that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll_flash.engines.inference import Generation
from roll_flash.models.prepare import resolve_model
from roll_flash.types import SamplingParams

TEMPLATES = Path(__file__).parent / "templates"
EXTRA_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
END = {"chatml": "<|im_end|>", "qwen3": "<|im_end|>", "items": "<|im_end|>", "llama3": "<|eot_id|>"}

Script = Callable[[int], str]
"""From the number of the call to what the model says."""


class TinyModel:
    """The tiny model with tokens for every template. Says as the learner what each token's logprob is."""

    def __init__(self) -> None:
        folder = resolve_model("tiny")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._tokenizer.add_special_tokens({"additional_special_tokens": EXTRA_TOKENS})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model.resize_token_embeddings(len(self._tokenizer), mean_resizing=False)
        self._folder = folder

    def tokenizer(self, style: str) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(self._folder)
        tokenizer.add_special_tokens({"additional_special_tokens": EXTRA_TOKENS})
        tokenizer.chat_template = (TEMPLATES / f"{style}.jinja").read_text()
        return tokenizer

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> Any:
        """Of `token_ids[1:]`, float32 [T - 1]."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more cost more than they give for a model of this size, beside other work
        try:
            scores = self.model(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)
        finally:
            torch.set_num_threads(threads)
        return scores[:-1].gather(1, torch.tensor(list(token_ids[1:]))[:, None])[:, 0].numpy()

    def save(self, folder: Path, style: str) -> Path:
        self.model.generation_config.eos_token_id = self.tokenizer(style).convert_tokens_to_ids(END[style])
        self.model.save_pretrained(folder)
        self.tokenizer(style).save_pretrained(folder)
        return folder


class ScriptedClient:
    """`InferenceClient` whose samples are a script's. `version` labels them; `delay_s` passes before each."""

    def __init__(self, model: TinyModel, tokenizer: Any, script: Script, end: str) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._script = script
        self._end = end
        self.prompts: list[list[int]] = []
        self.sampling: list[SamplingParams] = []
        self.delay_s = 0.0
        self.version = 0
        self.error: Exception | None = None
        self.cancelled = 0
        self.scores = True
        """False gives every token the logprob 0, for answers that would take long to score."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        session: str | None = None,
        timeout_s: float,
        known_experts: int = 0,
    ) -> Generation:
        self.prompts.append(list(token_ids))
        self.sampling.append(sampling)
        text = self._script(len(self.prompts) - 1)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        sampled = self._tokenizer.encode(text + self._end, add_special_tokens=False)
        is_cut = len(sampled) > sampling.max_new_tokens
        sampled = sampled[: sampling.max_new_tokens]
        if self.scores:
            logprobs = self._model.logprobs([*token_ids, *sampled])[len(token_ids) - 1 :]
        else:
            logprobs = np.zeros(len(sampled), np.float32)
        return Generation(
            np.asarray(sampled, np.int32),
            np.asarray(logprobs, np.float32),
            np.full(len(sampled), self.version, np.int32),
            "length" if is_cut else "stop",
            "here",
            self.delay_s,
        )

    def metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        return
