"""What can be known to fail is said before anything slow starts: by training, its dry run, and evaluation alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roll_flash.config.tree import Config
from roll_flash.envs.hosting.environments import check_environments
from roll_flash.envs.hosting.sandbox_lease import default_spec, open_pool
from roll_flash.inference.open import check_engine
from roll_flash.learner.open import check_learner
from roll_flash.learner.warm_start import check_demonstrations
from roll_flash.models.prepare import check_model_folder, resolve_model
from roll_flash.sandboxes import SandboxSpec
from roll_flash.stages.reward_stage import check_stages


@dataclass(frozen=True, slots=True)
class Checked:
    """What the checks found out on their way."""

    model_folder: Path | None
    """None where an endpoint serves the model."""
    sandboxes: tuple[SandboxSpec, ...]
    """Those that environments will ask for, as far as that is known before their tasks are; empty where none does."""


def check_parts(config: Config, *, trains: bool = True, serves: bool = True) -> Checked:
    """The parts that a config names, on this machine, without starting any; a model by name is prepared.

    `trains`: with what only a learner needs; `serves`: with the model and its servers. Raises RollFlashError.
    """
    folder = resolve_model(config.model.path) if serves else None
    if folder is not None:
        check_engine(config.inference, folder, trains=trains)
    in_sandboxes = check_environments(config.envs, config.rollout)
    specs = [env.sandbox_spec or default_spec(config.sandbox) for env in in_sandboxes]
    if trains:
        check_stages(config)
        check_learner(config)
        if config.learner.kl.coefficient and config.learner.kl.reference is not None:
            check_model_folder(Path(config.learner.kl.reference))
        if config.warm_start is not None:
            check_demonstrations(config.warm_start)
    return Checked(folder, tuple(dict.fromkeys(specs)))


async def check_sandboxes(config: Config, specs: Sequence[SandboxSpec]) -> str | None:
    """Starts one of each and ends it; returns how isolated they are (`strong` or `weak`), None without any.

    Raises SandboxError for what every episode would fail with.
    """
    if not specs:
        return None
    async with open_pool(config.sandbox, config.name) as pool:
        for spec in specs:
            async with pool.lease(spec):
                pass
        return pool.isolation
