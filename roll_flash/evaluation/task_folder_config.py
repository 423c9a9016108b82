"""Config of an evaluation on task folders, with limits for such tasks instead of those for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll_flash.envs.adapters.task_folders.format import FolderOptions, find_tasks, longest_limits
from roll_flash.models.context_length import within_context
from roll_flash.models.prepare import resolve_model

MAX_LENGTH = 16_384
MAX_TURNS = 50
MAX_NEW_TOKENS = 2048
MARGIN_S = 120.0
"""Seconds for the sandbox start and the last answer, added to a task's limits for its agent and its tests."""


def task_folder_config(folder: str, model: str, *, at_endpoint: bool) -> dict[str, Any]:
    """`at_endpoint`: `model` is a name at an endpoint, not a folder or one of our names.

    Raises ConfigError if there is no task, or none is readable (other unreadable tasks show as failures when played),
    and ModelError.
    """
    tasks = find_tasks(folder)
    agent_s, tests_s = longest_limits(Path(folder), FolderOptions())
    length = MAX_LENGTH if at_endpoint else _model_length(model)
    return {
        "name": "eval",
        "model": {"path": model, "max_length": length},
        "envs": [{"id": "TaskFolder-v0", "kwargs": {"folder": folder}, "max_turns": MAX_TURNS}],
        "eval": {"tasks": len(tasks)},
        "rollout": {
            "max_new_tokens": min(MAX_NEW_TOKENS, length - 1),
            "generate_timeout_s": 600,
            # Tests without a verdict run again in a fresh sandbox, to find out what caused the problem.
            "step_timeout_s": agent_s + 2 * tests_s + MARGIN_S,
            "episode_timeout_s": 2 * agent_s + 2 * tests_s + MARGIN_S,
        },
    }


def _model_length(model: str) -> int:
    """Context length of the model, at most MAX_LENGTH. Raises ModelError."""
    return within_context(resolve_model(model), MAX_LENGTH)
