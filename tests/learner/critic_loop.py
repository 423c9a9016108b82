"""A step with a critic, written down without packing, FSDP, Ray or streaming: one sequence after the other.

The recursion of the advantages runs over all tokens, with a mask, as in verl; the learner's runs over decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll_flash.learner.losses.advantages import EPSILON
from roll_flash.types import Group, Trajectory

Weights = dict[str, Tensor]


def plain_critic_loop(
    folder: Path,
    steps: Sequence[Sequence[Sequence[Group]]],
    *,
    by_turn: bool = False,
    detach: bool = True,
    whiten: bool = True,
    own_model: bool = False,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    clip: float = 0.5,
    learning_rate: float = 1e-3,
) -> tuple[Weights, Tensor]:
    """Weights and value head after decoupled PPO with truncation at 2; `steps` are lists of minibatches, which are
    lists of groups. `learning_rate` is that of policy and critic."""
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trunk = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) if own_model else policy
    head = torch.zeros(policy.config.hidden_size, requires_grad=True)
    critic = [head, *(trunk.parameters() if own_model else ())]
    optimizer = torch.optim.AdamW([*policy.parameters(), *critic], lr=learning_rate, betas=(0.9, 0.95), weight_decay=0)
    weight = 1.0 if detach or own_model else 0.1

    def values_of(trajectory: Trajectory) -> Tensor:
        hidden = hidden_of(trunk, trajectory)
        return (hidden.detach() if detach and not own_model else hidden) @ head

    for minibatches in steps:
        parts = [[t for group in part for t in group.trajectories] for part in minibatches]
        trajectories = [trajectory for part in parts for trajectory in part]
        with torch.no_grad():
            start = {t.episode_id: (logprobs_of(policy, t), values_of(t)) for t in trajectories}
        estimates = {
            t.episode_id: estimate(t, start[t.episode_id][1], by_turn, discount, gae_lambda) for t in trajectories
        }
        everything = np.concatenate([advantages for advantages, _, _ in estimates.values()])
        mean, spread = (everything.mean(), everything.std() + EPSILON) if whiten else (0.0, 1.0)
        total = sum(t.policy_tokens for t in trajectories) / len(minibatches)
        for part in parts:
            for trajectory in part:
                old_logprobs, old_values = start[trajectory.episode_id]
                advantages, returns, at = estimates[trajectory.episode_id]
                a = torch.tensor((advantages - mean) / spread, dtype=torch.float32)
                r = torch.tensor(returns, dtype=torch.float32)
                ratio = (logprobs_of(policy, trajectory) - old_logprobs).exp()
                rho = (old_logprobs - torch.tensor(trajectory.logprobs[trajectory.policy_mask])).exp().clamp(max=2.0)
                loss = -rho * torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
                v, old = values_of(trajectory)[at], old_values[at]
                near = old + (v - old).clamp(-clip, clip)
                of_values = torch.maximum((v - r) ** 2, (near - r) ** 2) / 2
                ((loss + weight * of_values).sum() / total).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            torch.nn.utils.clip_grad_norm_(critic, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor for name, tensor in policy.state_dict().items() if name != "lm_head.weight"}, head.detach()


def estimate(
    trajectory: Trajectory, values: Tensor, by_turn: bool, discount: float, gae_lambda: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[int]]:
    """Advantages and returns of the policy tokens, and which of `values` [policy tokens] belongs to each."""
    mask = trajectory.policy_mask
    number = np.cumsum(mask) - 1  # of each policy token
    begins = {turn.start for turn in trajectory.turns}
    decides = [bool(mask[t]) and (not by_turn or t in begins) for t in range(len(mask))]
    ends = {turn.end - 1: turn.reward for turn in trajectory.turns}
    ends[max(ends)] += trajectory.reward - sum(turn.reward for turn in trajectory.turns)
    advantages: dict[int, tuple[float, float]] = {}
    next_value = last = earned = 0.0
    for t in reversed(range(len(mask))):
        earned += ends.get(t, 0.0)
        if decides[t]:
            value = float(values[number[t]])
            last = earned + discount * next_value - value + discount * gae_lambda * last
            advantages[t] = (last, last + value)
            next_value, earned = value, 0.0
    found, at, current = [], [], -1
    for t in np.flatnonzero(mask):
        current = int(t) if decides[t] else current
        found.append(advantages[current])
        at.append(int(number[current]))
    pairs = np.array(found)
    return pairs[:, 0], pairs[:, 1], at


def hidden_of(model: Any, trajectory: Trajectory) -> Tensor:
    """Last hidden state [policy tokens, D] before each policy token."""
    ids = torch.tensor(trajectory.token_ids, dtype=torch.int64)[None]
    hidden: Tensor = model.model(ids).last_hidden_state[0, :-1][torch.tensor(trajectory.policy_mask[1:])]
    return hidden


def logprobs_of(model: Any, trajectory: Trajectory) -> Tensor:
    targets = torch.tensor(trajectory.token_ids, dtype=torch.int64)[torch.tensor(trajectory.policy_mask)]
    found: Tensor = model.lm_head(hidden_of(model, trajectory)).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return found
