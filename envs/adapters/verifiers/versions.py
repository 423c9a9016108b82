"""Makes `Verifiers-v0` for the installed version of the package: environments (0.1), or tasksets (0.4 and newer)."""

from __future__ import annotations

from typing import Any

from roll_flash.envs.adapters.optional_package import import_optional
from roll_flash.envs.adapters.verifiers.loading import NAME
from roll_flash.envs.base import Env


def make_verifiers(env: str, **kwargs: Any) -> Env:
    """Take the arguments of `Verifiers`, or of `Tasksets`. Raises ConfigError."""
    package = import_optional("verifiers", package="verifiers", needed_by=NAME)
    if hasattr(package, "MultiTurnEnv"):
        from roll_flash.envs.adapters.verifiers.tasks import Verifiers

        return Verifiers(env, **kwargs)
    from roll_flash.envs.adapters.verifiers.tasksets import Tasksets

    return Tasksets(env, **kwargs)
