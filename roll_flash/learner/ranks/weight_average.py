"""Keeps an exponential average of the trained weights, whose policy is the proximal policy of PPO-EWMA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class WeightAverage:
    """Weighted mean of the weights after each optimizer step and before the first, with weights that fall by `decay`
    per step into the past. Each rank has its shards of it: a second copy of the trained weights.

    Source: PPO-EWMA, Hilton et al., arXiv 2110.00641, section 3.2 and its published code, which divides by the sum of
    the weights, so that the first steps are not dominated by the initial policy.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], decay: float) -> None:
        self._trained = trained
        self._decay = decay
        self._total = torch.ones(())
        self._averages: dict[str, Tensor] = {}
        self.restart()

    def restart(self) -> None:
        """Begin with the weights of now."""
        self._total.fill_(1.0)
        self._averages = {name: parameter.detach().clone() for name, parameter in self._trained.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights of now, after an optimizer step."""
        self._total.mul_(self._decay).add_(1.0)
        torch._foreach_lerp_(self._local_averages(), self._local_weights(), 1.0 / float(self._total))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with the average. Its weights must be sharded, before and after."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds; loading writes into these tensors."""
        return {"total": self._total, "weights": self._averages}

    @torch.no_grad()
    def _exchange(self) -> None:
        for weight, average in zip(self._local_weights(), self._local_averages(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _local_weights(self) -> list[Tensor]:
        return [local_part(parameter.detach()) for parameter in self._trained.values()]

    def _local_averages(self) -> list[Tensor]:
        return [local_part(average) for average in self._averages.values()]


def local_part(tensor: Tensor) -> Tensor:
    """Return the shard of this rank; a tensor that is not sharded itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
