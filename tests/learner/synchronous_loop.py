"""A plain synchronous loop over recorded trajectories, for comparison bit by bit.

Equal bits need equal sums: it reads the same rows in the same order with the same model code as the learner. What it
does not have is everything between them: no FSDP, no driver, no stream, no versions, no staging, no proximal pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from roll_flash.learner.model.policy_model import load_policy_model
from roll_flash.learner.packing.rows import TrainSequence, pack
from roll_flash.types import Group
from tests.learner.plain_loop import with_advantages


@contextmanager
def _one_thread() -> Iterator[None]:
    """A rank has one by default; more add up in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def synchronous_loop(
    folder: Path, steps: Sequence[Sequence[Group]], *, row_tokens: int, learning_rate: float = 1e-3
) -> dict[str, Tensor]:
    """Weights after one optimizer step of truncated, decoupled PPO for each list of groups."""
    policy = load_policy_model(folder)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0, fused=True)
    for groups in steps:
        tokens = 0
        for group in groups:
            tokens += group.policy_tokens
            rows = pack(_sequences(group), row_tokens)
            for row in sorted(rows, key=lambda row: row.num_tokens, reverse=True):
                logprobs, _ = policy(row)
                weight = (logprobs.detach() - torch.tensor(row.behavior_logprobs)).exp().clamp(max=2.0)
                ratio = (logprobs - logprobs.detach()).exp()
                (weight * (-ratio * torch.tensor(row.advantages))).sum().backward()
        gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
        scale = 1 / tokens
        norm = float(torch.nn.utils.get_total_norm(gradients)) * scale
        torch._foreach_mul_(gradients, scale * min(1.0, 1.0 / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
    tied = policy.tied_names()
    return {name: tensor for name, tensor in policy.model.state_dict().items() if name not in tied}


def _sequences(group: Group) -> list[TrainSequence]:
    return [
        TrainSequence(
            token_ids=trajectory.token_ids,
            policy_mask=trajectory.policy_mask,
            behavior_logprobs=trajectory.logprobs,
            versions=trajectory.versions,
            advantages=torch.full((len(trajectory.token_ids),), advantage).numpy(),
        )
        for trajectory, advantage in with_advantages(group)
    ]
