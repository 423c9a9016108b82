"""The engine `transformers` with one fault: `python -m tests.diagnosis.faulty_server FAULT` and its own arguments."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from roll_flash.config.tree import InferenceConfig
from roll_flash.inference.servers.control import Launcher
from roll_flash.inference.transformers import server
from roll_flash.inference.transformers.model import Request, TransformersModel

MAX_CACHED = 256


class StaleCacheRequest(Request):
    """A prefix cache that no update clears: prompts that were seen before go on with their first keys and values."""

    _cached: ClassVar[dict[tuple[int, ...], Any]] = {}

    def step(self, version: str) -> None:
        prompt = tuple(self.prompt)
        if self.made == 0 and prompt in self._cached:
            self._cache = copy.deepcopy(self._cached[prompt])
            self._cache.crop(len(prompt) - 1)
            self._next_input = [prompt[-1]]
        first = self.made == 0
        super().step(version)
        if first and prompt not in self._cached and len(self._cached) < MAX_CACHED:
            self._cached[prompt] = copy.deepcopy(self._cache)


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
    """Updates do not reach its embeddings."""

    @torch.no_grad()
    def load(self, path: str, tag: str) -> None:
        embeddings = self.model.get_input_embeddings().weight
        before = embeddings.clone()
        super().load(path, tag)
        embeddings.copy_(before)


def plant(fault: str) -> None:
    match fault:
        case "stale cache":
            server.Request = StaleCacheRequest  # type: ignore[misc]
        case "template":
            server.Request = OtherTemplateRequest  # type: ignore[misc]
        case "dtype":
            server.TransformersModel = ImpreciseModel  # type: ignore[misc]
        case "weights":
            server.TransformersModel = ForgetfulModel  # type: ignore[misc]
        case _:
            raise ValueError(fault)


def faulty_launcher(fault: str) -> Callable[..., Launcher]:
    """Return what replaces `transformers_launcher`."""

    def launcher(config: InferenceConfig, *, model_folder: Any, max_model_len: int, returns_experts: bool) -> Launcher:
        def command(_: int, host: str, port: int) -> list[str]:
            module = [sys.executable, "-m", "tests.diagnosis.faulty_server", fault]
            return [*module, str(model_folder), host, str(port), str(max_model_len)]

        environment = {"OMP_NUM_THREADS": str(config.threads), "PYTHONPATH": str(Path(__file__).parents[2])}
        return Launcher("transformers", "float32", command, environment, returns_experts=returns_experts)

    return launcher


if __name__ == "__main__":
    plant(sys.argv[1])
    server.main(sys.argv[2:])
