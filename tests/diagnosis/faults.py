"""Faults of the machinery that no config has, planted into the engine `transformers`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from roll_flash.inference.transformers import server
from roll_flash.inference.transformers.model import Request, TransformersModel


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


class OtherTemplateRequest(Request):
    """The model is given a prompt without its first tokens: the start of the user's turn."""

    def __init__(self, token_ids: list[int], parameters: dict[str, Any], model: TransformersModel) -> None:
        super().__init__(token_ids, parameters, model)
        self._next_input = self.prompt[len("Xuser\n") :]


class ImpreciseModel(TransformersModel):
    """Weights in 8 bits, with two for the mantissa."""

    def __init__(self, folder: str, *, returns_experts: bool = False) -> None:
        super().__init__(folder, returns_experts=returns_experts)
        self._round()

    def load(self, path: str, tag: str) -> None:
        super().load(path, tag)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for parameter in self.model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.to(torch.float8_e5m2).to(parameter.dtype))


class ForgetfulModel(TransformersModel):
    """Updates do not reach its embeddings, which are its output head too."""

    @torch.no_grad()
    def load(self, path: str, tag: str) -> None:
        embeddings = self.model.get_input_embeddings().weight
        before = embeddings.clone()
        super().load(path, tag)
        embeddings.copy_(before)


FAULTS: dict[str, tuple[str, type]] = {
    "stale cache": ("Request", StaleCacheRequest),
    "template": ("Request", OtherTemplateRequest),
    "dtype": ("TransformersModel", ImpreciseModel),
    "weights": ("TransformersModel", ForgetfulModel),
}


@contextmanager
def fault_in_server(name: str) -> Iterator[None]:
    """Servers that are opened in the block have this fault; "" is none."""
    if not name:
        yield
        return
    StaleCacheRequest.cached.clear()
    what, faulty = FAULTS[name]
    with patch.object(server, what, faulty):
        yield
