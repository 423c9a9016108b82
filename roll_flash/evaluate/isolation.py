"""An evaluation runs code of any model there is: a sandbox with weak isolation is refused unless it is allowed."""

from __future__ import annotations

from roll_flash.config.tree import Config
from roll_flash.sandboxes import SandboxUnavailable


def require_isolation(config: Config, isolation: str | None) -> None:
    """`isolation` is that of the sandboxes which can be had here, None where none is needed. Raises SandboxUnavailable
    if it is weak."""
    if isolation == "weak" and not config.sandbox.allow_weak:
        ids = ", ".join(env.id for env in config.envs)
        raise SandboxUnavailable(
            f"{ids} would run in a sandbox whose isolation is weak (`local`): start a Docker engine "
            "(`make engine`), or, for a model that you trust, add --allow-weak (sandbox.allow_weak=true)"
        )
