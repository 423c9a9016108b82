"""An evaluation runs code of any model there is: a sandbox with weak isolation is refused unless it is allowed."""

from __future__ import annotations

import asyncio

from roll_flash.config import Config
from roll_flash.rollout.environments import check_environments
from roll_flash.sandboxes import SandboxUnavailable
from roll_flash.sandboxes.opening import connect_provider


async def require_isolation(config: Config) -> None:
    """Raises SandboxUnavailable if an environment needs a sandbox and only a weak one can be had here."""
    if config.sandbox.allow_weak or not await asyncio.to_thread(check_environments, config.envs, config.rollout):
        return
    provider = await connect_provider(config.sandbox.provider, engines=config.sandbox.engines)
    isolation, name = provider.isolation, provider.name
    await provider.close()
    if isolation == "weak":
        ids = ", ".join(env.id for env in config.envs)
        raise SandboxUnavailable(
            f"{ids} would run in the {name} sandbox, whose isolation is weak: start a Docker engine "
            "(`make engine`), or, for a model that you trust, add --allow-weak (sandbox.allow_weak=true)"
        )
