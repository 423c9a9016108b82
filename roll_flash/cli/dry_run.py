"""`roll-flash train CONFIG --dry-run`: run every check that is possible before servers and learner start."""

from __future__ import annotations

import asyncio

from roll_flash.config.tree import Config, EnvConfig
from roll_flash.envs.hosting.environments import AsyncEnvironment, open_environment
from roll_flash.envs.hosting.sandbox_lease import default_spec, open_pool
from roll_flash.errors import EnvError, RollFlashError
from roll_flash.processes.background import DaemonThreads
from roll_flash.run.run_dir import check_run_folder
from roll_flash.scheduling.tasks import make_task
from roll_flash.start_checks import check_parts


def dry_run(config: Config, *, resume: bool = False) -> list[str]:
    """Return one line per passed check. Raises the first error that the run would end with.

    A model given by name is prepared if needed; nothing else is left behind.
    """
    check_run_folder(config, resume=resume)
    checked = check_parts(config)
    tried = [line for env in config.envs for line in asyncio.run(_try_environment(config, env))]
    return [f"model: {checked.model_folder}", *tried, f"run folder: {config.run_folder}"]


async def _try_environment(config: Config, tried: EnvConfig) -> list[str]:
    seed = tried.train_seeds[0]
    task = make_task(tried.id, seed, tried.kwargs)
    env = await open_environment(task, DaemonThreads())
    try:
        if env.sandbox_env is None:
            return [await _reset(config, tried.id, env, seed)]
        spec = env.sandbox_env.sandbox_spec or default_spec(config.sandbox)
        async with open_pool(config.sandbox, config.name) as pool, pool.lease(spec) as sandbox:
            env.sandbox_env.sandbox = sandbox
            started = f"sandbox: {sandbox.provider} started one ({spec.image})"
            return [started, await _reset(config, tried.id, env, seed)]
    finally:
        await env.close()


async def _reset(config: Config, env_id: str, env: AsyncEnvironment, seed: int) -> str:
    try:
        async with asyncio.timeout(config.rollout.step_timeout_s):
            messages, _ = await env.reset(seed)
    except TimeoutError:
        limit = config.rollout.step_timeout_s
        raise EnvError(f"{env_id}: reset took longer than {limit:g} s (rollout.step_timeout_s)") from None
    except RollFlashError:
        raise
    except Exception as error:  # user code may raise anything
        raise EnvError(f"{env_id}: reset(seed={seed}) raised {type(error).__name__}: {error}") from error
    return f"environment: {env_id} resets with {len(messages)} messages"
