"""Samples with plain transformers, one request and one token at a time, and builds answers in vLLM's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll_flash.inference.client.token_protocol import encode_experts
from roll_flash.models.routing import Routing
from roll_flash.weight_sync.checkpoint_format import write_stored
from roll_flash.weight_sync.published import ModelFolder, PublishedWeights

MIN_TEMPERATURE = 0.01
"""As in vLLM."""


class TransformersModel:
    """Model and tokenizer of a folder, float32 on CPU."""

    def __init__(self, folder: str, *, returns_experts: bool = False) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        self.model: Any = loaded[0]
        if missing := sorted(loaded[1]["missing_keys"]):  # transformers gives them random values
            raise ValueError(
                f"{len(missing)} tensors of the model are not in the files of {folder}, such as {missing[0]}"
            )
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model.eval()
        self.routing = Routing(self.model) if returns_experts else None
        ends = self.model.generation_config.eos_token_id
        self.end_ids = frozenset([ends] if isinstance(ends, int) else ends or [self.tokenizer.eos_token_id])

        self._folder = ModelFolder(Path(folder))
        self._differing: frozenset[str] = frozenset()
        """Names of the tensors that differ from the folder."""

    def load(self, path: str, tag: str) -> None:
        """Load new weights in the format of `weight_sync/published.py` that contain `tag`. Raises ValueError if they do
        not fit; then nothing changes."""
        tied = bool(getattr(self.model.config, "tie_word_embeddings", False))
        with PublishedWeights(path, self._folder, tied=tied, tag=tag) as weights:
            names = weights.changed | self._differing
            write_stored(self.model, {name: weights.tensor(name) for name in names})
            self._differing = weights.changed


class Request:
    """One request in flight. Keeps its KV cache across weight updates, like vLLM's pause mode `keep`."""

    def __init__(self, token_ids: list[int], parameters: dict[str, Any], model: TransformersModel) -> None:
        self.prompt = [int(token) for token in token_ids]
        if not self.prompt:
            raise ValueError("no tokens")
        self.max_tokens = int(parameters.get("max_tokens", 16))
        self.wants_prompt_logprobs = parameters.get("prompt_logprobs") is not None
        self.stream_interval = int(parameters.get("stream_interval") or 1)
        self.finish_reason: str | None = None
        self._model = model
        self._experts_from = int(parameters.get("routed_experts_prompt_start") or 0)
        self._experts: list[Any] = []
        self._temperature = float(parameters.get("temperature", 1.0))
        if self._temperature < 0:
            raise ValueError(f"temperature {self._temperature} is negative")
        self._top_p = float(parameters.get("top_p", 1.0))
        self._top_k = int(parameters.get("top_k", 0))
        self._stop = list(parameters.get("stop") or [])
        self._end_ids = model.end_ids | {int(token) for token in parameters.get("stop_token_ids") or ()}
        self._generator = torch.Generator()
        if parameters.get("seed") is not None:
            self._generator.manual_seed(int(parameters["seed"]))
        else:
            self._generator.seed()
        self._cache: Any = None
        self._next_input = self.prompt
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[dict[str, Any]] = []

    @torch.inference_mode()
    def step(self, version: str) -> None:
        """Sample one token with the current weights."""
        if (routing := self._model.routing) is not None:
            routing.start_recording()
        output = self._model.model(torch.tensor([self._next_input]), past_key_values=self._cache, use_cache=True)
        if routing is not None:
            self._experts.append(routing.recorded().numpy())
        self._cache = output.past_key_values
        logprobs = _sampling_logprobs(output.logits[0, -1], self._temperature, self._top_p, self._top_k)
        if self._temperature == 0:
            token = int(logprobs.argmax())
        else:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=self._generator))
        self._next_input = [token]
        self._append(token, float(logprobs[token]), version)

    @torch.inference_mode()
    def prompt_logprobs(self) -> list[dict[str, dict[str, float]] | None]:
        logprobs = self._model.model(torch.tensor([self.prompt])).logits[0].log_softmax(-1)
        scores = logprobs[:-1].gather(1, torch.tensor(self.prompt[1:], dtype=torch.long)[:, None])[:, 0].tolist()
        found = [{str(token): {"logprob": score}} for token, score in zip(self.prompt[1:], scores, strict=True)]
        return [None, *found]

    @property
    def made(self) -> int:
        """Number of tokens sampled so far."""
        return len(self._tokens)

    def abort(self) -> None:
        """End the request with the tokens so far. Must not be called while `step` runs."""
        if self.finish_reason is None:
            self.finish_reason = "abort"

    def choice(self, start: int = 0) -> dict[str, Any]:
        """Return the tokens from `start` on; the version spans cover all tokens."""
        tokens, logprobs = self._tokens[start:], self._logprobs[start:]
        content = [{"token_id": t, "logprob": lp} for t, lp in zip(tokens, logprobs, strict=True)]
        return {
            "index": 0,
            "token_ids": tokens,
            "logprobs": {"content": content},
            "finish_reason": self.finish_reason,
            "weight_versions": self._spans,
            "routed_experts": self._experts_of_all_tokens() if self.finish_reason is not None else None,
        }

    def _experts_of_all_tokens(self) -> str | None:
        return encode_experts(np.concatenate(self._experts)[self._experts_from :]) if self._experts else None

    def _append(self, token: int, logprob: float, version: str) -> None:
        self._tokens.append(token)
        self._logprobs.append(logprob)
        if not self._spans or self._spans[-1]["version"] != version:
            self._spans.append({"version": version, "start": len(self._tokens) - 1, "end": len(self._tokens)})
        self._spans[-1]["end"] = len(self._tokens)
        if token in self._end_ids or self._found_stop():
            self.finish_reason = "stop"
        elif len(self._tokens) >= self.max_tokens:
            self.finish_reason = "length"

    def _found_stop(self) -> bool:
        if not self._stop:
            return False
        text = self._model.tokenizer.decode(self._tokens, skip_special_tokens=True)
        return any(stop in text for stop in self._stop)


def _sampling_logprobs(logits: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Return the log-probabilities [V] of the sampled distribution; unscaled ones if sampling is greedy.

    An agent may ask for any temperature and top_p above 0: none may leave no token, as infinite logits would.
    """
    if temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / max(temperature, MIN_TEMPERATURE)
    if top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, len(logits))).values[-1], float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.index_fill(0, order[(before >= top_p) & (before > 0)], float("-inf"))
    return logits.log_softmax(-1)
