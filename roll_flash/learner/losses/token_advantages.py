"""Computes advantages as the config defines them: function, set of trajectories, scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from roll_flash.config.sections.learner import LearnerConfig
from roll_flash.learner.losses.advantages import ADVANTAGES, gigpo, scale_by_batch
from roll_flash.types import FinishedEpisode

Members = Sequence[FinishedEpisode]
Scale = Literal["group", "batch", "none"]
_OWN_SCALE: dict[str, Scale] = {"rloo": "none", "reinforce++": "batch"}
"""Default scale per advantage; all others are divided by their group's standard deviation."""


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """Rules for computing advantages and for choosing the tokens to train on."""

    advantage: str = "grpo"
    scale: Scale = "group"
    turn_weight: float = 1.0
    turn_discount: float = 0.95
    normalization: Literal["tokens", "sequences"] = "tokens"
    keep_without_signal: bool = False
    """Also train on groups without a signal, because entropy and divergence from a reference need every token."""

    @classmethod
    def of(cls, config: LearnerConfig) -> AdvantageConfig:
        return cls(
            advantage=config.advantage,
            scale=config.normalize_advantage or _OWN_SCALE.get(config.advantage, "group"),
            turn_weight=config.turn_weight,
            turn_discount=config.turn_discount,
            normalization=config.loss_normalization,
            keep_without_signal=config.entropy_bonus > 0 or config.kl.coefficient > 0,
        )

    @property
    def needs_whole_batch(self) -> bool:
        """True if an advantage depends on all groups of the step."""
        return self.advantage == "reinforce++" or self.scale == "batch"


def turn_advantages(groups: Sequence[Members], rules: AdvantageConfig) -> list[list[tuple[float, ...]]]:
    """Return, per group and trajectory, one advantage for all tokens, or one for each turn.

    `groups` must be the whole step if `needs_whole_batch`; otherwise any number of groups.
    Raises ValueError for a reward that is not finite.
    """
    if rules.advantage == "gigpo":
        return [_by_turn(members, rules) for members in groups]
    normalize = rules.scale == "group"
    function = ADVANTAGES[rules.advantage]
    if rules.advantage == "reinforce++":
        rewards = [trajectory.reward for members in groups for trajectory in members]
        ends = np.cumsum([len(members) for members in groups])[:-1]
        values = np.split(function(rewards, rules.scale == "batch"), ends)
    else:
        values = [function([trajectory.reward for trajectory in members], normalize) for members in groups]
        if rules.scale == "batch":
            values = scale_by_batch(values)
    return [[(value,) for value in group.tolist()] for group in values]


def _by_turn(members: Members, rules: AdvantageConfig) -> list[tuple[float, ...]]:
    if not members:
        return []
    advantages = gigpo(
        [[reward for _, reward, _ in trajectory.own_turns] for trajectory in members],
        [[state for _, _, state in trajectory.own_turns] for trajectory in members],
        episode_rewards=[trajectory.reward for trajectory in members],
        turn_weight=rules.turn_weight,
        discount=rules.turn_discount,
        normalize=rules.scale == "group",
    )
    return [tuple(values.tolist()) for values in advantages]
