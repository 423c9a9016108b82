"""The task source of TaskFolder-v0: training tasks by seed, and each task folder is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roll_flash.config.tree import EnvConfig
from roll_flash.envs.adapters.task_folders.format import find_tasks
from roll_flash.errors import ConfigError
from roll_flash.scheduling.tasks import SeedTasks
from roll_flash.types import Task


class FolderTasks(SeedTasks):
    """Evaluates the task folders below `folder` of the kwargs, each named by its relative path."""

    def __init__(self, env: EnvConfig) -> None:
        if "folder" not in env.kwargs:
            raise ConfigError(f"{env.id}: kwargs need a folder: that of a task, or of several")
        super().__init__(env.id, env.kwargs, env.train_seeds, max_turns=env.max_turns)
        self._env = env

    def held_out(self, count: int) -> Sequence[Task]:
        """Return the first `count` task folders. Raises ConfigError if there is none."""
        env, root = self._env, Path(self._env.kwargs["folder"]).expanduser()
        found = find_tasks(root)[:count]
        names = [str(path.relative_to(root)) if path != root else path.resolve().name for path in found]
        return [
            Task(f"{env.id}:{name}", env.id, 0, {**env.kwargs, "folder": str(path)}, env.max_turns)
            for name, path in zip(names, found, strict=True)
        ]
