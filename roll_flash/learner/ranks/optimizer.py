"""Creates the optimizer of a rank, with its states, so that memory that is too small shows before the first rollout.

Keeps also an exponential average of the trained weights, whose policy is the proximal policy of PPO-EWMA.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from roll_flash.config.sections.learner import LearnerConfig
from roll_flash.learner.model.policy_model import PolicyModel
from roll_flash.learner.model.weight_files import local_part

HEAD_LEARNING_RATE = 1e-4
"""Default of a value head: larger than usual, because a linear function has little to unlearn."""


def open_optimizer(
    policy: PolicyModel, config: LearnerConfig, critic: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters, with all its states allocated. Groups of a critic have a constant
    learning rate, `own_lr`."""
    head = policy.value_weight
    groups = parameter_groups(policy, config.weight_decay, without=head)
    of_values = [] if head is None else [{"params": [head], "weight_decay": 0.0}]
    if critic is not None:
        of_values += parameter_groups(critic, config.weight_decay)
    default = HEAD_LEARNING_RATE if critic is None else config.learning_rate
    groups += [{**group, "own_lr": config.critic.learning_rate or default} for group in of_values]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
    allocate_states(optimizer)
    return optimizer


def trained_parts(policy: PolicyModel, critic: nn.Module | None) -> list[list[nn.Parameter]]:
    """Return the trained parameters of the policy, and those of its value head or of `critic` if there is one."""
    head = policy.value_weight
    parts = [[parameter for parameter in policy.parameters() if parameter.requires_grad and parameter is not head]]
    if head is not None:
        parts.append([head])
    if critic is not None:
        parts.append([parameter for parameter in critic.parameters() if parameter.requires_grad])
    return parts


def allocate_states(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer create its states as its first step would, and set them to what they are before that step.
    Weights stay as they are, gradients are removed. A checkpoint that is loaded later replaces the states."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()


def parameter_groups(policy: nn.Module, decay: float, *, without: nn.Parameter | None = None) -> list[dict[str, Any]]:
    """Return optimizer groups: weight decay for matrices, not for norms and biases; one group without decay."""
    trained = {
        name: parameter
        for name, parameter in policy.named_parameters()
        if parameter.requires_grad and parameter is not without
    }
    if not decay:
        return [{"params": list(trained.values()), "weight_decay": 0.0}]
    decays: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in trained.items():
        owner = policy.get_submodule(name.rpartition(".")[0])
        (decays if _is_matrix(name, parameter, owner) else others).append(parameter)
    groups = [{"params": decays, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _is_matrix(name: str, parameter: Tensor, owner: nn.Module) -> bool:
    """Return false for two-dimensional norms of heads and log decay rates of state space models too."""
    is_norm = "Norm" in type(owner).__name__ and not isinstance(owner, nn.Embedding)
    return parameter.ndim > 1 and not is_norm and not name.endswith(("bias", "A_log"))


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
