"""Creates the learner engine that a config names."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from roll_flash.config.tree import Config
from roll_flash.config.user_code import absolute
from roll_flash.engines.learner import LearnerEngine
from roll_flash.errors import ConfigError

ENTRY_POINTS = "roll_flash.learner_engines"
"""Entry point group of plug-ins: each is a function of (config, model_folder) that returns a LearnerEngine."""


def check_learner(config: Config) -> None:
    """Raises ConfigError if the engine name is unknown or settings contradict each other. Imports nothing."""
    name, plugins = config.learner.engine, entry_points(group=ENTRY_POINTS)
    if name != "fsdp" and name not in plugins.names:
        known = ", ".join(["fsdp", *sorted(plugins.names)])
        raise ConfigError(f"learner.engine: nobody provides {name!r}; known here: {known}")
    transfer = config.inference.weight_transfer
    if name == "fsdp" and transfer != "shm" and config.learner.lora.rank and config.learner.lora.publish == "adapters":
        raise ConfigError(
            f"inference.weight_transfer={transfer} sends whole weights; set learner.lora.publish=merged, or use shm"
        )


def open_learner(config: Config, *, model_folder: Path) -> LearnerEngine:
    """Return the engine `config.learner.engine`, not started. Importing a plug-in may take seconds. Raises ConfigError
    as `check_learner` does."""
    check_learner(config)
    name = config.learner.engine
    if name == "fsdp":
        return _open_fsdp(config, model_folder)
    plugins = entry_points(group=ENTRY_POINTS)
    factory: Callable[[Config, Path], LearnerEngine] = plugins[name].load()
    return factory(config, model_folder)


def _open_fsdp(config: Config, model_folder: Path) -> LearnerEngine:
    from roll_flash.learner.ranks.fsdp import FsdpLearner

    # ranks on other nodes have another working directory
    kl, loss = config.learner.kl, config.learner.loss
    if kl.reference is not None:
        kl = kl.model_copy(update={"reference": str(Path(kl.reference).resolve())})
    loss = loss.model_copy(update={"name": absolute(loss.name)})
    learner = config.learner.model_copy(update={"kl": kl, "loss": loss})
    return FsdpLearner(
        model_folder,
        learner,
        async_ratio=config.scheduler.highest_async_ratio,
        seed=config.seed,
        temperature=config.rollout.temperature,
        run=config.name,
        transfer=config.inference.weight_transfer,
        max_length=config.model.max_length,
        steps=config.steps,
        distill=config.distill,
    )
