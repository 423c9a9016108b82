"""Publishes changed weights of a model from a real learner to a real vLLM server, and compares what both compute.

Learner, server and publication are those of a training run, with the checks of `gpu_check`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from roll_flash.errors import RollFlashError, first_line
from roll_flash.gpu_check.check import Bench
from roll_flash.gpu_check.servers import Models, change_weights, check_new_weights, models, parity, publish
from roll_flash.gpu_check.settings import Settings
from roll_flash.inference.client.token_client import open_client
from roll_flash.types import SamplingParams
from roll_flash.weight_sync.parity import compare

DEADLINE_S = 600.0
"""Most seconds for one model, the start of its server included."""
_REQUEST_S = 120.0
_CONFIG: Mapping[str, Any] = {
    "name": "check-models",
    "envs": [{"id": "ShellMath-v0"}],
    "scheduler": {"groups_per_step": 2, "group_size": 4},
    "inference": {"engine": "vllm", "kv_cache_gib": 0.25, "dtype": "float32"},
    "learner": {"micro_batch_tokens": 1024},
}


@dataclass(frozen=True, slots=True)
class Published:
    """Result of one model. Differences of log-probabilities are the largest ones; None where it failed before."""

    name: str
    failure: str = ""
    """Why vLLM cannot serve the model here, or is wrong about it; empty if all agree."""
    at_start: float | None = None
    """With the weights that both sides loaded themselves."""
    after: float | None = None
    """With changed weights that were published."""
    sampled: float | None = None
    """Of the tokens that the server sampled with these, at temperature 1."""
    seconds: float = 0.0

    TABLE: ClassVar = ("published", ["architecture", "at the start", "after a publication", "sampled tokens"])

    @property
    def is_ok(self) -> bool:
        return not self.failure

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.is_ok}

    def line(self) -> str:
        """Return one line for the terminal."""
        names = ("at the start", "after a publication", "of sampled tokens")
        figures = [
            f"{value:.1e} {name}"
            for name, value in zip(names, (self.at_start, self.after, self.sampled), strict=True)
            if value is not None
        ]
        said = f"server and learner differ by {', '.join(figures)}" if figures else ""
        return f"{self.name}: {'; '.join(filter(None, (said, self.failure)))} ({self.seconds:.0f} s)"

    def cells(self) -> list[str]:
        """Return the columns of `TABLE`."""
        figures = ("" if value is None else f"{value:.1e}" for value in (self.at_start, self.after, self.sampled))
        return [self.name, *figures]


def publish_model(folder: Path, name: str, *, scratch: Path) -> Published:
    """Start learner and server with the model in `folder`, train a step, publish, sample. Logs go into `scratch`."""
    began, figures = time.monotonic(), {}

    def emit(said: dict[str, Any]) -> None:
        figures.update(said.get("figures", {}))

    config = {**_CONFIG, "model": {"path": str(folder), "max_length": 256}, "runs": str(scratch)}
    bench = Bench(Settings(scratch, config, folder, gpus=0), emit)
    result = Published(name)

    async def run() -> None:
        nonlocal result
        async with asyncio.timeout(DEADLINE_S), models(bench) as started:
            await parity(bench, started)
            result = replace(result, at_start=figures["parity_largest"])
            before = await started.learner.logprobs_of(started.probe.texts)
            await change_weights(bench, started, before)
            await publish(started)
            await check_new_weights(bench, started, before)
            result = replace(result, after=figures["parity_largest"])
            result = replace(result, sampled=await _sampled(started))

    try:
        asyncio.run(run())
    except TimeoutError:
        result = replace(result, failure=f"not done after {DEADLINE_S:g} s")
    except RollFlashError as error:
        result = replace(result, failure=first_line(error))
    return replace(result, seconds=time.monotonic() - began)


async def _sampled(models: Models) -> float:
    """Return the largest difference of log-probabilities of tokens that the server samples."""
    client = open_client(models.engine.client_spec())
    largest = 0.0
    try:
        for number, text in enumerate(models.probe.texts[:4]):
            prompt = [int(token) for token in text]
            sampling = SamplingParams(temperature=1.0, max_new_tokens=64, seed=number)
            answer = await client.generate(prompt, sampling, request_id=f"sampled-{number}", timeout_s=_REQUEST_S)
            whole = [*prompt, *answer.token_ids.tolist()]
            (expected,) = await models.learner.logprobs_of([whole])
            largest = max(largest, compare([expected[len(prompt) - 1 :]], [[answer.logprobs]]).largest)
    finally:
        await client.close()
    return largest if np.isfinite(largest) else float("inf")
