"""What a step must be, written down without packing, FSDP, Ray, streaming or chunks: one sequence after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll_flash.learner.losses.advantages import EPSILON
from roll_flash.types import Group, Trajectory

Sample = tuple[Trajectory, float]


def plain_loop(
    folder: Path,
    steps: Sequence[Sequence[Sequence[Group]]],
    *,
    learning_rate: float = 1e-3,
    by_sequence: bool = False,
    kl: float = 0.0,
    entropy: float = 0.0,
    teacher: Callable[[Trajectory], Tensor] | None = None,
    reward_weight: float = 1.0,
) -> dict[str, Tensor]:
    """Weights after decoupled PPO with truncation at 2; `steps` are lists of minibatches, which are lists of groups.
    `teacher` returns what is added to the advantage of each policy token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for minibatches in steps:
        samples = [[sample for group in part for sample in with_advantages(group)] for part in minibatches]
        trajectories = [trajectory for part in samples for trajectory, _ in part]
        total = len(trajectories) if by_sequence else sum(t.policy_tokens for t in trajectories)
        with torch.no_grad():
            prox = {t.episode_id: token_logprobs(model, t)[0] for t in trajectories}
            ref = {t.episode_id: token_logprobs(reference, t)[0] for t in trajectories}
        for part in samples:
            for trajectory, of_reward in part:
                advantage = reward_weight * of_reward + (0.0 if teacher is None else teacher(trajectory))
                logprobs, entropies = token_logprobs(model, trajectory)
                start = prox[trajectory.episode_id]
                behavior = torch.tensor(trajectory.logprobs[trajectory.policy_mask])
                ratio = (logprobs - start).exp()
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = -(start - behavior).exp().clamp(max=2.0) * surrogate
                loss = loss + kl * (logprobs - ref[trajectory.episode_id]).square() / 2 - entropy * entropies
                weight = 1 / trajectory.policy_tokens if by_sequence else 1.0
                (loss.sum() * weight / (total / len(minibatches))).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def plain_step(
    folder: Path, trajectories: Sequence[Trajectory], loss_of: Callable[[Trajectory, Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Weights after one step on the sum of any loss: `loss_of(trajectory, logprobs, entropies)`, a scalar."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for trajectory in trajectories:
        loss_of(trajectory, *token_logprobs(model, trajectory)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def logprobs_of(folder: Path, trajectory: Trajectory) -> Tensor:
    """Log-probabilities [policy tokens] under the weights of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return token_logprobs(model, trajectory)[0]


def with_advantages(group: Group) -> list[Sample]:
    rewards = torch.tensor([trajectory.reward for trajectory in group.trajectories], dtype=torch.float64)
    spread = rewards.std(correction=0)
    values = (rewards - rewards.mean()) / (spread + EPSILON)
    return list(zip(group.trajectories, values.tolist(), strict=True))


def token_logprobs(model: torch.nn.Module, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
    """(logprobs, entropies) [policy tokens], from the full logits of one sequence."""
    ids = torch.tensor(trajectory.token_ids, dtype=torch.int64)
    mask = torch.tensor(trajectory.policy_mask[1:])
    distribution = model(ids[None]).logits[0, :-1].log_softmax(-1)[mask]
    return distribution.gather(-1, ids[1:][mask, None])[:, 0], -(distribution.exp() * distribution).sum(-1)
