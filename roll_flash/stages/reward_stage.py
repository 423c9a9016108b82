"""What a stage is: a class with a method `score`. Found by the names that a config gives."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from roll_flash.config.stages import StageConfig
from roll_flash.config.tree import Config
from roll_flash.envs.check.source_files import import_module, load_file
from roll_flash.errors import ConfigError, RollFlashError
from roll_flash.types import Trajectory

BUILT_IN = {
    "judge": "roll_flash.stages.judge:JudgeStage",
    "reward_model": "roll_flash.stages.reward_model:RewardModelStage",
}


class RewardStage(Protocol):
    """Scores trajectories. Methods `start(self)` and `close(self)`, `async def` or plain, are called if there."""

    def score(self, trajectories: Sequence[Trajectory]) -> Sequence[float] | Awaitable[Sequence[float]]:
        """One finite number for each trajectory. May raise anything: the call is repeated, then given up and counted.

        `async def`, or a plain method, which is called in a thread; several calls may run at the same time.
        """
        ...


def check_stages(config: Config) -> None:
    """Makes each stage once and throws it away. Raises ConfigError for one that cannot be made or used."""
    for stage in config.stages:
        make_stage(stage)
    if config.stages and config.rollout.drop_groups_without_signal:
        raise ConfigError(
            "rollout.drop_groups_without_signal looks at rewards before stages have changed them; "
            "set it to false or remove stages"
        )


def make_stage(stage: StageConfig) -> RewardStage:
    """The object that a stage of the config names, not started. Raises ConfigError or ModelError."""
    made: RewardStage = _call(stage, _bound(stage))
    return made


def _bound(stage: StageConfig) -> Any:
    """The class, which has a `score` and takes `kwargs`."""
    known = f"known are {', '.join(BUILT_IN)} and module:Class"
    source, colon, name = BUILT_IN.get(stage.entry_point, stage.entry_point).partition(":")
    if not colon or not source or not name:
        raise ConfigError(f"stage {stage.name}: there is no entry point {stage.entry_point!r}; {known}")
    found: Any = getattr(_module(stage, source), name, None)
    if not callable(getattr(found, "score", None)):
        raise ConfigError(f"stage {stage.name}: {stage.entry_point} is no class with a method `score`")
    try:
        inspect.signature(found).bind(**stage.kwargs)
    except TypeError as error:
        parameters = inspect.signature(found).parameters.values()
        takes = ", ".join(str(each).split(":")[0] for each in parameters) or "nothing"
        raise ConfigError(f"stage {stage.name}: kwargs: {error}; {stage.entry_point} takes {takes}") from None
    return found


def _module(stage: StageConfig, source: str) -> Any:
    try:
        return load_file(source) if source.endswith(".py") else import_module(source)
    except ConfigError as error:
        raise ConfigError(f"stage {stage.name}: {error}") from None


def _call(stage: StageConfig, factory: Any) -> Any:
    try:
        return factory(**stage.kwargs)
    except RollFlashError:
        raise
    except Exception as error:  # users' code may raise anything
        raise ConfigError(f"stage {stage.name}: {stage.entry_point} raised {type(error).__name__}: {error}") from error
