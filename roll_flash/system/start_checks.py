"""Checks before anything slow starts, shared by training, its dry run and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_flash.config.sections.distill import TeacherConfig
from roll_flash.config.sections.learner import LearnerConfig, is_own
from roll_flash.config.tree import Config
from roll_flash.config.user_code import load_function
from roll_flash.envs.hosting.environments import check_environments
from roll_flash.envs.hosting.first_prompts import TASKS, PromptCheck
from roll_flash.envs.hosting.sandbox_lease import default_spec, open_pool
from roll_flash.envs.task_sources import first_tasks_of_levels, open_entries
from roll_flash.errors import ConfigError, TaskError
from roll_flash.evaluation.tasks import held_out_of
from roll_flash.gateway.policies import fixed_policies
from roll_flash.inference.open import check_engine, computes_on_gpus, why_no_replay
from roll_flash.learner.demonstrations import check_demonstrations
from roll_flash.learner.open import check_learner
from roll_flash.models.context_length import check_context_length
from roll_flash.models.folder import check_chat_template, check_model_folder
from roll_flash.models.prepare import resolve_model
from roll_flash.models.shape import has_experts
from roll_flash.monitor.exporters.export import check_exporters
from roll_flash.planner.machines.fit import Fit, fit_here
from roll_flash.run.checkpoints.store import check_store
from roll_flash.sandboxes import SandboxSpec, SandboxUnavailable
from roll_flash.scheduling.tasks import total_size
from roll_flash.stages.reward_stage import check_stages
from roll_flash.stages.same_tokenizer import check_same_tokenizer
from roll_flash.terminal import say
from roll_flash.types import Task

NO_ROLES_IN_GIGPO = "learner.advantage=gigpo compares the turns of one role; use grpo for an environment with roles"


@dataclass(frozen=True, slots=True)
class Checked:
    """Results of the checks."""

    model_folder: Path | None
    """None if an endpoint serves the model."""
    sandboxes: tuple[SandboxSpec, ...]
    """Sandboxes that environments will request, as far as known before their tasks; empty if none needs a sandbox."""
    first_tasks: tuple[Task, ...]
    """The first training task of each level of each environment, and one of each kind of rows."""
    tasks: int | None
    """Number of different training tasks; None: unknown or without end."""
    fit: Fit | None
    """What the run needs of this machine; None if that is known only when Ray runs."""


def check_parts(config: Config, *, trains: bool = True, serves: bool = True, resume: bool = False) -> Checked:
    """Check the parts of a config on this machine, without starting any; prepare a model given by name.

    `trains`: also check what only a learner needs; `serves`: also the model and its servers; `resume`: a run goes on.
    Raises RollFlashError.
    """
    folder = resolve_model(config.model.path, config.model.revision) if serves else None
    if folder is not None:
        check_chat_template(folder)
        check_context_length(folder, config.model.max_length)
        check_engine(config.inference, folder, trains=trains)
    fit = fit_here(config, trains=trains, serves=serves)
    if trains:
        _check_learner(config, folder)
    fixed_policies(config.policies)  # raises if a key is not set
    entries = open_entries(config)
    size = total_size([entry.source for entry in entries])
    levels = first_tasks_of_levels(entries, config.seed, TASKS)
    no_roles = NO_ROLES_IN_GIGPO if trains and config.learner.advantage == "gigpo" else ""
    in_sandboxes = check_environments([tasks[0] for tasks in levels], config.rollout, no_roles, config.policies)
    if not trains or config.eval.before_and_after or config.eval.every:
        for entry in entries:
            (first, *_) = held_out_of(entry.source, entry.env, config.eval)
            if entry.env.task_source is not None or entry.env.levels:  # else the first training task is like it
                try:
                    check_environments([first], config.rollout, policies=config.policies)
                except TaskError as error:
                    why = "; evaluations use kwargs without a level: give these all that it needs"
                    raise TaskError(f"{error}{why if entry.env.levels else ''}") from None
    specs = [env.sandbox_spec or default_spec(config.sandbox) for env in in_sandboxes]
    if trains:
        check_exporters(config.monitor.export)
        check_stages(config)
        if config.distill is not None and folder is not None:
            _check_teacher(config, config.distill.teacher, folder)
        check_store(config, resume=resume)
        if config.warm_start is not None and folder is not None:
            check_demonstrations(config.warm_start, folder, config.model)
    if folder is not None:
        _check_prompts(config, folder, levels)
    return Checked(folder, tuple(dict.fromkeys(specs)), tuple(tasks[0] for tasks in levels), size, fit)


def _check_learner(config: Config, folder: Path | None) -> None:
    """Check what a learner needs of the config and of the model, without data."""
    check_learner(config)
    _check_own_functions(config.learner)
    _check_equal_rewards(config)
    if folder is not None:
        why_no_replay(config, folder)
        if config.learner.router_aux_loss and not has_experts(folder):
            raise ConfigError("learner.router_aux_loss: the model has no experts; set it to 0")
    if config.learner.kl.coefficient and config.learner.kl.reference is not None:
        check_model_folder(Path(config.learner.kl.reference))


def _check_teacher(config: Config, teacher: TeacherConfig, folder: Path) -> None:
    """Check a teacher that the run starts servers for. One at an endpoint is asked later. Raises ConfigError."""
    if teacher.model is None:
        return
    if computes_on_gpus(config.inference):
        raise ConfigError(
            "distill.teacher.model: the run starts servers of a teacher on CPUs only; start `vllm serve` on GPUs that "
            "Ray does not use, and set distill.teacher.base_url"
        )
    its_folder = resolve_model(teacher.model)
    check_engine(config.inference.model_copy(update={"port": 0}), its_folder, trains=False)
    check_same_tokenizer(folder, its_folder)


def _check_own_functions(config: LearnerConfig) -> None:
    """Try the user's loss and advantage function. Raises ConfigError with what is wrong with one."""
    if not (is_own(config.loss.name) or is_own(config.advantage)):
        return
    from roll_flash.learner.losses.own import check_advantage, check_loss  # takes seconds: it imports torch

    checks: list[tuple[str, str, Callable[[Any], None]]] = [
        ("learner.loss.name", config.loss.name, lambda loss: check_loss(loss, **config.loss.params)),
        ("learner.advantage", config.advantage, check_advantage),
    ]
    for key, name, check in checks:
        if is_own(name):
            try:
                check(load_function(name, key))
            except ValueError as error:
                raise ConfigError(f"{key} {name}: {error}") from None


def _check_equal_rewards(config: Config) -> None:
    """Raises ConfigError if groups are dropped from which the user's advantage function learns."""
    advantage = config.learner.advantage
    if not (config.scheduler.drop_groups_without_signal and is_own(advantage)):
        return
    from roll_flash.learner.losses.own import advantages_of_equal_rewards  # takes seconds: it imports torch

    if advantages_of_equal_rewards(load_function(advantage, "learner.advantage")):
        raise ConfigError(
            "scheduler.drop_groups_without_signal drops groups of equal rewards, from which "
            f"learner.advantage={advantage} learns too; set it to false"
        )


def _check_prompts(config: Config, folder: Path, levels: Sequence[Sequence[Task]]) -> None:
    prompts = PromptCheck(config, folder)
    prompts.check(levels)
    for warning in prompts.warnings():
        say(warning, error=True)


async def check_sandboxes(config: Config, specs: Sequence[SandboxSpec]) -> str | None:
    """Start and stop one sandbox per spec; return the isolation (`strong` or `weak`), None without specs.

    Raises SandboxError for a problem that would fail every episode.
    """
    if not specs:
        return None
    async with open_pool(config.sandbox, config.name) as pool:
        for spec in specs:
            async with pool.lease(spec):
                pass
        return pool.isolation


def require_isolation(config: Config, isolation: str | None) -> None:
    """Check the `isolation` of the sandboxes (None if none is needed). Raises SandboxUnavailable if it is weak."""
    if isolation == "weak" and not config.sandbox.allow_weak:
        ids = ", ".join(env.id for env in config.envs)
        raise SandboxUnavailable(
            f"{ids} would run in a sandbox whose isolation is weak (`local`): start a Docker engine "
            "(`make engine`), or, for a model that you trust, add --allow-weak (sandbox.allow_weak=true)"
        )
