"""The config of asynchronous stages: what works on a trajectory between its episode and the learner."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, FiniteFloat

from roll_flash.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, Section


class StageConfig(Section):
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """How metrics and messages call it."""
    entry_point: str
    """`judge`, `reward_model`, or `module:Class` (`file.py:Class`) with a method `score`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    reward: Literal["add", "multiply", "replace"] = "add"
    """What `weight` x score does to the reward. Stages are applied in the order of this list."""
    weight: FiniteFloat = 1.0
    """What the score is multiplied with."""
    workers: PositiveInt = 4
    """Calls of `score` at the same time."""
    batch_size: PositiveInt = 1
    """Most trajectories of one call, which fail together."""
    timeout_s: PositiveFloat = 60.0
    """Deadline of one call."""
    retries: NonNegativeInt = 1
    """How often a call that failed is repeated."""
    on_failure: Literal["drop_row", "drop_group", "stop"] = "drop_row"
    """When a call failed for good: its trajectories are not trained, or all of their group, or the run stops. With
    `drop_group` a call gets one whole group. The reward is never made up."""
    max_failures_in_a_row: PositiveInt = 8
    """Calls that may fail for good one after the other before the run stops and says why."""


def _different_names(stages: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two stages are named {name!r}; their scores could not be told apart")
    if {"learner", "reward"} & set(names):
        raise ValueError("a stage cannot be named learner or reward")
    return stages


Stages = Annotated[tuple[StageConfig, ...], AfterValidator(_different_names)]
