"""The model that a client trains. Its requests are carried out in the order in which they come."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from roll_flash.config.sections.learner import LoraConfig
from roll_flash.engines.learner import AdamSettings
from roll_flash.gateway.apis.api_error import ApiError, bad_request
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.processes.background import call_in_thread
from roll_flash.tinker.messages import GradientRequest, gradient_output
from roll_flash.tinker.servers import BASE, Servers
from roll_flash.weight_sync.parity import load_probe, parity_threshold
from roll_flash.weight_sync.publication import Publisher

LORA_FILE = "lora.json"
"""Beside a checkpoint: the adapters that it is for."""


class TrainedModel:
    """Adapters in training, with a learner of their own."""

    def __init__(self, model_id: str, servers: Servers, folder: Path, lora: LoraConfig, seed: int | None) -> None:
        """`folder`: where its checkpoints are written."""
        self.model_id = model_id
        self.lora = lora
        self._servers = servers
        self._folder = folder
        self._turn = asyncio.Lock()
        """Locks are taken in the order in which tasks ask for them."""
        config = servers.config
        self.learner = FsdpLearner(
            servers.folder,
            config.learner.model_copy(update={"lora": lora, "log_logprobs": True}),
            async_ratio=0,
            seed=config.seed if seed is None else seed,
            run=config.name,
            transfer=config.inference.weight_transfer,
            max_length=config.model.max_length,
        )
        self._publisher: Publisher | None = None
        self._changed = False
        """The learner has other weights than the servers."""
        self._is_trained = False
        """The adapters may change what the model says; new ones do not."""
        self._publications = 0

    async def open(self, checkpoint: Path | None = None, *, with_optimizer: bool = True) -> dict[str, Any]:
        """Start the learner, and give the servers its weights."""
        async with self._turn:
            config = self._servers.config
            await self.learner.start()
            probe = await call_in_thread(
                lambda: load_probe(self._servers.folder, config.weights.parity_text, config.model.max_length)
            )
            self._publisher = Publisher(
                self.learner,
                self._servers.engine,
                config.weights,
                probe=probe,
                threshold=parity_threshold(config.weights, self._servers.engine.dtype),
                on_published=lambda version: None,
            )
            if checkpoint is not None:
                await self.learner.load(checkpoint)
                self._is_trained = True
                if not with_optimizer:
                    await self.learner.forget_moments()
            self._changed = True
            await self._publish()
        return {"model_id": self.model_id}

    async def gradient(self, request: GradientRequest) -> bytes:
        async with self._turn:
            if request.forward_only:
                return gradient_output(await self.learner.sequence_logprobs(request.sequences), {})
            logprobs, loss = await self.learner.add_gradient(request.sequences, request.loss)
        return gradient_output(logprobs, {"loss:sum": loss})

    async def step(self, adam: AdamSettings) -> dict[str, Any]:
        async with self._turn:
            result = await self.learner.adam_step(adam)
            if not result.skipped:
                self._is_trained = self._changed = True
        names = ("grad_norm", "learning_rate", "skipped")
        return {"type": "optim_step", "metrics": {f"{name}:mean": result.metrics[name] for name in names}}

    async def save_for_sampler(self, name: str | None) -> str:
        """Give the servers the newest weights and return their name; with `name`, also write a model folder."""
        async with self._turn:
            await self._publish()
            if name is not None:
                await (await self.learner.begin_export(self._new_folder("sampler_weights", name)))
            weights: str = self._servers.weights
        return weights

    async def save(self, name: str) -> dict[str, Any]:
        async with self._turn:
            folder = self._new_folder("weights", name)
            await (await self.learner.begin_save(folder))
            await asyncio.to_thread((folder / LORA_FILE).write_text, self.lora.model_dump_json())
        return {"type": "save_weights", "path": f"tinker://{self.model_id}/weights/{name}"}

    async def close(self) -> None:
        if self._publisher is not None:
            await self._publisher.close()
        await self.learner.close()

    async def _publish(self) -> None:
        if not self._changed:
            return
        assert self._publisher is not None, "open() comes first"
        self._publications += 1
        weights = f"{self.model_id}:{self._publications}" if self._is_trained else BASE
        await self._servers.update(weights, self._publish_now)
        self._changed = False

    async def _publish_now(self) -> None:
        assert self._publisher is not None
        await self._publisher.begin()
        await self._publisher.wait_published()

    def _new_folder(self, kind: str, name: str) -> Path:
        folder = checkpoint_folder(self._folder, self.model_id, kind, name)
        if folder.exists():
            raise bad_request(f"{name!r} exists already in {folder.parent}; choose another name: none is overwritten")
        folder.parent.mkdir(parents=True, exist_ok=True)
        return folder


def checkpoint_folder(folder: Path, model_id: str, kind: str, name: str) -> Path:
    return folder / model_id.replace(":", "-") / kind / name


def read_lora(checkpoint: Path) -> LoraConfig:
    """Raises ApiError if there is no such checkpoint."""
    try:
        return LoraConfig(**json.loads((checkpoint / LORA_FILE).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        raise ApiError(404, "checkpoint_not_found", f"{checkpoint}: no complete checkpoint of save_state") from None
