"""Checks what a config trains on: the rows of its data sets, and each of its environments."""

from __future__ import annotations

from collections.abc import Sequence

from roll_flash.chat.rendered_conversation import open_conversation
from roll_flash.chat.tokenizer import load_checked_tokenizer
from roll_flash.config.tree import Config, load_config
from roll_flash.envs.check.checks import EnvReport, check_environment
from roll_flash.envs.check.datasets import Room, check_data_set
from roll_flash.envs.hosting.sandbox_lease import default_spec
from roll_flash.envs.task_sources import first_tasks
from roll_flash.errors import ModelError
from roll_flash.models.prepare import resolve_model
from roll_flash.types import Message


def check_config(
    file: str, overrides: Sequence[str], *, provider: str, seeds: int, timeout_s: float
) -> list[EnvReport]:
    """Return the reports of all data sets, then those of the first task of each environment and level.

    Raises ConfigError as `load_config`, `check_data_set` and `check_environment` do, SandboxError as the last.
    """
    config = load_config(file, overrides)
    with_rows = [env for env in config.envs if env.data is not None]
    room = _room(config) if with_rows else None
    spec = default_spec(config.sandbox)
    provider = config.sandbox.provider if provider == "auto" else provider
    played = (
        check_environment(task.env_id, task.kwargs, provider=provider, seeds=seeds, timeout_s=timeout_s, spec=spec)
        for task in first_tasks(config)
    )
    model = None if room is None else config.model
    return [*(check_data_set(env, room, model) for env in with_rows), *played]


def _room(config: Config) -> Room | None:
    """Return how to count the tokens of prompts; None if the model is not there."""
    try:
        folder = resolve_model(config.model.path, config.model.revision)
    except ModelError:
        return None
    tokenizer = load_checked_tokenizer(folder, config.model.chat_template_kwargs)

    def count(messages: Sequence[Message]) -> int:
        return open_conversation(config.model.thinking, tokenizer, messages).prompt_length

    return Room(count, config.model.max_length, config.rollout.max_new_tokens)
