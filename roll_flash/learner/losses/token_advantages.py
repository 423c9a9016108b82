"""Computes advantages as the config defines them: function, set of trajectories, scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roll_flash.config.sections.distill import DistillConfig
from roll_flash.config.sections.learner import LearnerConfig, is_own
from roll_flash.config.user_code import described, load_function
from roll_flash.errors import LearnerError
from roll_flash.learner.losses.advantages import ADVANTAGES, Advantage, gigpo, scale_by_batch
from roll_flash.types import FinishedEpisode

Members = Sequence[FinishedEpisode]
_Compared = tuple[int, str]
"""Place of a group, and role: whose rewards are compared."""
Scale = Literal["group", "batch", "none"]
_OWN_SCALE: dict[str, Scale] = {"rloo": "none", "reinforce++": "batch", "gae": "batch"}
"""Default scale per advantage; all others are divided by their group's standard deviation."""


def _default_scale(advantage: str) -> Scale:
    return "none" if is_own(advantage) else _OWN_SCALE.get(advantage, "group")


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """Rules for computing advantages and for choosing the tokens to train on."""

    advantage: str = "grpo"
    scale: Scale = "group"
    turn_weight: float = 1.0
    turn_discount: float = 0.95
    role_baseline: Literal["role", "group"] = "role"
    normalization: Literal["tokens", "sequences", "constant"] = "tokens"
    loss_length: int | None = None
    filter_overlong: bool = False
    keep_without_signal: bool = False
    """Also train on groups without a signal: entropy, divergence from a reference and a critic need every token."""
    distill: DistillConfig | None = None
    """Weights of rewards and teacher; None: there is no teacher."""

    @classmethod
    def of(cls, config: LearnerConfig, distill: DistillConfig | None = None) -> AdvantageConfig:
        return cls(
            advantage=config.advantage,
            scale=config.normalize_advantage or _default_scale(config.advantage),
            turn_weight=config.turn_weight,
            turn_discount=config.turn_discount,
            role_baseline=config.role_baseline,
            normalization=config.loss_normalization,
            loss_length=config.loss_length,
            filter_overlong=config.overlong.filter,
            keep_without_signal=config.regularises or config.has_critic,
            distill=distill,
        )

    @property
    def has_critic(self) -> bool:
        """True if the ranks compute advantages, from values; see `losses/critic.py`."""
        return self.advantage == "gae"

    @property
    def needs_whole_batch(self) -> bool:
        """True if an advantage that the driver computes depends on all groups of the step."""
        return not self.has_critic and (self.advantage == "reinforce++" or self.scale == "batch")


def turn_advantages(groups: Sequence[Members], rules: AdvantageConfig) -> list[list[tuple[float, ...]]]:
    """Return, per group and trajectory, one advantage for all tokens, or one for each turn (gigpo), or with roles one
    for each sample; zeros with a critic.

    `groups` must be the whole step if `needs_whole_batch`; otherwise any number of groups.
    Raises ValueError for a reward that is not finite, LearnerError if a function of the user fails, or if gigpo gets
    episodes with roles.
    """
    if rules.has_critic:
        return [[(0.0,)] * len(members) for members in groups]
    if rules.advantage == "gigpo":
        return [_by_turn(members, rules) for members in groups]
    rewards: dict[_Compared, list[float]] = {}
    for place, members in enumerate(groups):
        for each in members:
            for role, reward in each.role_rewards.items():
                rewards.setdefault((place, _compared_as(role, rules)), []).append(reward)
    values = {key: iter(found.tolist()) for key, found in _compare(rewards, rules).items()}
    found: list[list[tuple[float, ...]]] = []
    for place, members in enumerate(groups):
        found.append([])
        for each in members:
            of_role = {role: next(values[place, _compared_as(role, rules)]) for role in each.role_rewards}
            found[-1].append(tuple(of_role[role] for role, *_ in each.roles) or (of_role[""],))
    return found


def _compared_as(role: str, rules: AdvantageConfig) -> str:
    return role if rules.role_baseline == "role" else ""


def _compare(rewards: Mapping[_Compared, list[float]], rules: AdvantageConfig) -> dict[_Compared, NDArray[np.float64]]:
    """Return advantages for the rewards of a role in a group; reinforce++ compares those of a role in all groups."""
    function = _function(rules.advantage)
    if rules.advantage != "reinforce++":
        values = [function(each, rules.scale == "group") for each in rewards.values()]
        return dict(zip(rewards, scale_by_batch(values) if rules.scale == "batch" else values, strict=True))
    found: dict[_Compared, NDArray[np.float64]] = {}
    for role in dict.fromkeys(role for _, role in rewards):
        of_role = {key: each for key, each in rewards.items() if key[1] == role}
        ends = np.cumsum([len(each) for each in of_role.values()])[:-1]
        together = function([reward for each in of_role.values() for reward in each], rules.scale == "batch")
        found |= zip(of_role, np.split(together, ends), strict=True)
    return found


def own_advantage(function: Callable[[NDArray[np.float64]], ArrayLike], name: str) -> Advantage:
    """Return a user's function of the rewards of a group with checks of what it returns; `name` is for errors."""

    def checked(rewards: ArrayLike, _: bool) -> NDArray[np.float64]:
        given = np.asarray(rewards, np.float64)
        try:
            found = np.asarray(function(given.copy()), np.float64)
        except Exception as error:  # a user's function may raise anything
            raised = " ".join(described(error).split())
            raise LearnerError(f"{name} raised {raised}, with rewards {given.tolist()}") from error
        if found.shape != given.shape or not np.isfinite(found).all():
            raise LearnerError(
                f"{name} must return {len(given)} finite numbers for rewards {given.tolist()}, not {found.tolist()}"
            )
        return found

    return checked


def _function(advantage: str) -> Advantage:
    if not is_own(advantage):
        return ADVANTAGES[advantage]
    return own_advantage(load_function(advantage, "learner.advantage"), f"learner.advantage {advantage}")


def _by_turn(members: Members, rules: AdvantageConfig) -> list[tuple[float, ...]]:
    if not members:
        return []
    if any(each.roles for each in members):
        raise LearnerError("learner.advantage=gigpo compares the turns of one role; use grpo for self-play")
    advantages = gigpo(
        [[reward for _, reward, _ in trajectory.own_turns] for trajectory in members],
        [[state for _, _, state in trajectory.own_turns] for trajectory in members],
        episode_rewards=[trajectory.reward for trajectory in members],
        turn_weight=rules.turn_weight,
        discount=rules.turn_discount,
        normalize=rules.scale == "group",
    )
    return [tuple(values.tolist()) for values in advantages]
