"""Everything about a run that can be checked without starting it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

from roll_flash.config import Config, SandboxConfig
from roll_flash.errors import ConfigError
from roll_flash.models import resolve_model
from roll_flash.rollout.environments import check_environment, open_environment
from roll_flash.rollout.tasks import make_task
from roll_flash.sandboxes import SandboxPool, SandboxSpec


def dry_run(config: Config) -> None:
    """Check the model folder, the run's name, the environment and one sandbox. Raises RollFlashError saying what fails."""
    if any(config.run_folder.glob("*")):
        raise ConfigError(f"{config.run_folder} exists; choose another name=OTHER or go on with --resume")
    resolve_model(config.model.path)
    needs_sandbox = check_environment(config.env.id, config.env.kwargs)
    asyncio.run(_reset_once(config, config.sandbox if needs_sandbox else None))


async def _reset_once(config: Config, sandbox: SandboxConfig | None) -> None:
    task = make_task(config.env.id, config.env.train_seeds[0], config.env.kwargs)
    async with AsyncExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        env = await open_environment(task, threads)
        stack.push_async_callback(env.close)
        if sandbox is not None and env.sandbox_env is not None:
            pool = await stack.enter_async_context(SandboxPool(provider=sandbox.provider, size=1, run=config.name))
            spec = env.sandbox_env.sandbox_spec or SandboxSpec(image=sandbox.image)
            env.sandbox_env.sandbox = await stack.enter_async_context(pool.lease(spec))
        try:
            async with asyncio.timeout(config.rollout.step_timeout_s):
                await env.reset(task.seed)
        except Exception as error:  # users' code may raise anything
            raise ConfigError(f"env.id {config.env.id!r}: reset raised {type(error).__name__}: {error}") from None
