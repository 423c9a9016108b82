"""Registration with gymnasium."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium


def register_env(id: str, entry_point: str | Callable[..., gymnasium.Env[Any, Any]], **kwargs: Any) -> None:
    """Register an environment of text, so that `gymnasium.make(id)` and a config's `env.id` find it.

    A thin wrapper over `gymnasium.register` that leaves out the wrappers made for synchronous environments with
    arrays: they cannot check coroutines. Takes what `gymnasium.register` takes; `kwargs={...}` become defaults of the
    environment's arguments.
    """
    gymnasium.register(id, entry_point, disable_env_checker=True, order_enforce=False, **kwargs)


def register_shipped() -> None:
    """Register what ships here."""
    for id, entry_point in {"ShellMath-v0": "roll_flash.envs.shell_math:ShellMath"}.items():
        if id not in gymnasium.registry:
            register_env(id, entry_point)
