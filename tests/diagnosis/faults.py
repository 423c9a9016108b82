"""Faults of the engine `transformers` that no config has. Servers that are opened in the block have the fault."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from roll_flash.inference.transformers import server
from roll_flash.inference.transformers.model import Request, TransformersModel
from roll_flash.sandboxes import Sandbox, SandboxSpec, providers
from roll_flash.sandboxes.local.provider import LocalProvider


class StaleCacheRequest(Request):
    """A prefix cache that no update clears: prompts that were seen before go on with their first keys and values."""

    cached: ClassVar[dict[tuple[int, ...], Any]] = {}

    def step(self, version: str) -> None:
        prompt, is_first = tuple(self.prompt), self.made == 0
        if is_first and prompt in self.cached:
            self._cache = copy.deepcopy(self.cached[prompt])
            self._cache.crop(len(prompt) - 1)
            self._next_input = [prompt[-1]]
        super().step(version)
        if is_first and prompt not in self.cached:
            self.cached[prompt] = copy.deepcopy(self._cache)


class OtherPromptRequest(Request):
    """A chat template that ends prompts without their last line, which begins the answer. The parity probe sends no
    chats."""

    LAST_LINE = len("assistant\n") + 1

    def __init__(self, token_ids: list[int], parameters: dict[str, Any], model: TransformersModel) -> None:
        super().__init__(token_ids, parameters, model)
        if not self.wants_prompt_logprobs:
            self._next_input = self.prompt[: -self.LAST_LINE]


class SameNumbersRequest(Request):
    """A sampler that begins its random numbers anew for each token: what was likely with them stays so."""

    def __init__(self, token_ids: list[int], parameters: dict[str, Any], model: TransformersModel) -> None:
        super().__init__(token_ids, parameters, model)
        self._first_numbers = self._generator.get_state()

    def step(self, version: str) -> None:
        self._generator.set_state(self._first_numbers)
        super().step(version)


class Float8Model(TransformersModel):
    """Weights that are rounded to eight bits, those of the start and those of each update."""

    def __init__(self, folder: str, *, returns_experts: bool = False) -> None:
        super().__init__(folder, returns_experts=returns_experts)
        self._round()

    def load(self, path: str, tag: str) -> None:
        super().load(path, tag)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for weight in self.model.parameters():
            weight.copy_(weight.to(torch.float8_e5m2))


class ForgottenHeadModel(TransformersModel):
    """An output head that is a copy of the first embedding and that no update reaches, as a packed copy can be."""

    def __init__(self, folder: str, *, returns_experts: bool = False) -> None:
        super().__init__(folder, returns_experts=returns_experts)
        self._head = torch.nn.Parameter(self.model.lm_head.weight.detach().clone())
        self.model.lm_head.weight = self._head

    def load(self, path: str, tag: str) -> None:
        first = self._head.detach().clone()
        super().load(path, tag)
        with torch.no_grad():
            self._head.copy_(first)


class SlowProvider(LocalProvider):
    """Sandboxes that take a second to start, as those of large images do."""

    async def open(self, spec: SandboxSpec, *, run: str, timeout_s: float) -> Sandbox:
        async with self._starts:
            await asyncio.sleep(1)
        return await super().open(spec, run=run, timeout_s=timeout_s)


@contextmanager
def stale_prefix_cache() -> Iterator[None]:
    StaleCacheRequest.cached.clear()
    with patch.object(server, "Request", StaleCacheRequest):
        yield


@contextmanager
def other_template() -> Iterator[None]:
    with patch.object(server, "Request", OtherPromptRequest):
        yield


@contextmanager
def same_random_numbers() -> Iterator[None]:
    with patch.object(server, "Request", SameNumbersRequest):
        yield


@contextmanager
def float8_servers() -> Iterator[None]:
    with patch.object(server, "TransformersModel", Float8Model):
        yield


@contextmanager
def forgotten_head() -> Iterator[None]:
    with patch.object(server, "TransformersModel", ForgottenHeadModel):
        yield


@contextmanager
def slow_starts() -> Iterator[None]:
    with patch.object(providers, "LocalProvider", SlowProvider):
        yield
