"""`roll-flash train CONFIG --dry-run`: run every check that is possible before servers and learner start."""

from __future__ import annotations

import asyncio

from roll_flash.cluster.nodes import living_nodes, with_gpu_memory
from roll_flash.cluster.plan_checks import sandbox_load
from roll_flash.config.tree import Config
from roll_flash.config.user_code import described
from roll_flash.envs.hosting.environments import AsyncEnvironment, EnvironmentMaker
from roll_flash.envs.hosting.first_prompts import PromptCheck
from roll_flash.envs.hosting.sandbox_lease import default_spec, open_pool
from roll_flash.envs.tools.tool_chat import declared_tools
from roll_flash.errors import EnvError, RollFlashError
from roll_flash.planner.machines.fit import Fit, plan_on
from roll_flash.processes.background import DaemonThreads
from roll_flash.processes.ray.local_ray import local_ray, own_gpus, unused_gpus
from roll_flash.run.checkpoints.disk_use import check_disk
from roll_flash.run.run_dir import check_run_folder, list_checkpoints
from roll_flash.system.resume import check_tasks
from roll_flash.system.start_checks import check_parts
from roll_flash.types import Task


def dry_run(config: Config, *, resume: bool = False) -> list[str]:
    """Return one line per passed check. Raises the first error that the run would end with.

    A model given by name is prepared if needed; nothing else is left behind.
    """
    changes = [f"changed by --resume: {line}" for line in check_run_folder(config, resume=resume)]
    checked = check_parts(config, resume=resume)
    if resume:
        check_tasks(config)
    prompts = PromptCheck(config, checked.model_folder) if checked.model_folder is not None else None
    tried = [line for task in checked.first_tasks for line in asyncio.run(_try_environment(config, task, prompts))]
    tasks = "tasks: as many as their source gives" if checked.tasks is None else f"tasks: {checked.tasks:,} to train on"
    fit = checked.fit or asyncio.run(_fit_with_ray(config))
    placement = [f"placement: {line}" for line in [*fit.plan.lines(), *filter(None, [unused_gpus(config.ray)])]]
    placement += sandbox_load(config, fit.plan, checked.sandboxes)
    placement += [f"memory: {line}" for line in fit.memory]
    placement += [f"CPU: {line}" for line in fit.cpu]
    if checked.model_folder is not None:
        existing = len(list_checkpoints(config.run_folder)) if resume else 0
        placement.append(f"disk: {check_disk(config, checked.model_folder, existing=existing)}")
    folders = [f"run folder: {config.run_folder}", *changes]
    if config.monitor.export:
        folders.append(f"metrics also go to: {', '.join(config.monitor.export)}")
    return [f"model: {checked.model_folder}", tasks, *tried, *placement, *folders]


async def _fit_with_ray(config: Config) -> Fit:
    """Plan the parts on the nodes of a cluster, or with resources of this machine that only Ray knows."""
    async with local_ray(config.ray):
        own = own_gpus(config.ray)
        nodes = await asyncio.to_thread(lambda: with_gpu_memory(living_nodes(own)))
        return Fit.of(config, plan_on(config, nodes))


async def _try_environment(config: Config, task: Task, prompts: PromptCheck | None) -> list[str]:
    env = await EnvironmentMaker(DaemonThreads()).open(task)
    try:
        if env.sandbox_env is None:
            return [await _reset(config, task, env, prompts)]
        spec = env.sandbox_env.sandbox_spec or default_spec(config.sandbox)
        async with open_pool(config.sandbox, config.name) as pool, pool.lease(spec) as sandbox:
            env.sandbox_env.sandbox = sandbox
            started = f"sandbox: {sandbox.provider} started one ({spec.image})"
            return [started, await _reset(config, task, env, prompts)]
    finally:
        await env.close()


async def _reset(config: Config, task: Task, env: AsyncEnvironment, prompts: PromptCheck | None) -> str:
    try:
        async with asyncio.timeout(config.rollout.step_timeout_s):
            messages, about = await env.reset(task.seed)
    except TimeoutError:
        limit = config.rollout.step_timeout_s
        raise EnvError(f"{task.env_id}: reset took longer than {limit:g} s (rollout.step_timeout_s)") from None
    except EnvError as error:
        raise EnvError(f"{task.env_id}: {error}") from None
    except RollFlashError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise EnvError(f"{task.env_id}: reset(seed={task.seed}) raised {described(error)}") from error
    if not messages and not env.runs_own_loop:
        raise EnvError(f"{task.env_id}: reset returned an empty observation; say what the task is")
    line = f"environment: {task.env_id} resets with {len(messages)} messages"
    if prompts is None or env.sandbox_env is None or env.runs_own_loop or not messages:
        return line  # without a sandbox, `check_parts` has rendered the prompt
    return f"{line}, {prompts.tokens(task, messages, declared_tools(about)[0]):,} tokens"
