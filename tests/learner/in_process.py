"""The learner with its one rank in this process instead of a Ray actor: the same code, started in milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from roll_flash.config.sections.distill import DistillConfig
from roll_flash.config.sections.learner import LearnerConfig
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.learner.ranks.node_folders import NodeFolders
from roll_flash.learner.ranks.rank import LearnerRank
from roll_flash.weight_sync.published import ModelFolder, PublishedWeights

Result = TypeVar("Result")


class _Method:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class _Handle:
    """What a Ray actor handle looks like to the learner."""

    def __init__(self, rank: LearnerRank) -> None:
        self._rank = rank
        self.call = _Method(lambda method, *args, **kwargs: getattr(rank, method)(*args, **kwargs))


def in_process(
    model: Path,
    use: Callable[[FsdpLearner], Awaitable[Result]],
    *,
    async_ratio: float = 10,
    temperature: float = 1.0,
    distill: DistillConfig | None = None,
    **settings: Any,
) -> Result:
    """What `use` returns, given a started learner of one rank with `settings` of its config."""
    config = LearnerConfig(**{"learning_rate": 1e-3} | settings)
    rank = LearnerRank(model, config, rank=0, seed=0, temperature=temperature, run="test")
    learner = FsdpLearner(model, config, async_ratio=async_ratio, distill=distill)
    threads = torch.get_num_threads()

    async def run() -> Result:
        forms = rank.check_model()
        learner._fingerprint = rank.start(rank.open_store(None), forms)
        learner._frozen = rank.digest_of_frozen()
        if not rank.shares_prefixes():
            learner._row_tokens = 1
        learner._ranks = [_Handle(rank)]  # type: ignore[list-item]
        learner._node_folders = NodeFolders(["here"], "here")
        learner._failure = None
        return await use(learner)

    try:
        return asyncio.run(run())
    finally:
        if learner._ranks:
            rank.close()
        elif dist.is_initialized():  # the rank failed while it started
            dist.destroy_process_group()
        torch.set_num_threads(threads)


async def weights_of(learner: FsdpLearner) -> dict[str, torch.Tensor]:
    """A copy of what a server would have after a publication."""
    staged = await learner.stage_weights()
    with PublishedWeights(staged.path, ModelFolder(learner._folder), tied=True) as weights:
        tensors = {name: weights.tensor(name).clone() for name in weights.names}
    await learner.release_weights(staged)
    return tensors


def assert_same_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Equal up to the rounding of sums in another order, after steps of about 1e-3.

    Adam divides by the gradient's own size, so where that is next to nothing its rounding decides the step: a few
    elements may differ by as much as a step, their root mean square by half a per cent of one.
    """
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        difference = (tensor - second[name]).double()
        assert float(difference.square().mean().sqrt()) <= 5e-6, name
        assert float(difference.abs().max()) <= 1e-3, name


def assert_equal_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Equal bit by bit."""
    torch.testing.assert_close(first, second, atol=0, rtol=0)
