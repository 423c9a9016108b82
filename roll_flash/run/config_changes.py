"""What a resumed run may change of its config, and what it did change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll_flash.config.tree import Config, load_config
from roll_flash.errors import ConfigError
from roll_flash.monitor.exporters.config_values import leaves

_WEIGHTS = "the checkpoint's weights have its names and shapes"
_TASKS = "the checkpoint has the place in its tasks"
_OF_TASKS = {"id", "kwargs", "levels", "task_source", "train_seeds", "weight"}
_METHOD = "unfinished groups were begun for it"


def check_same_run(config: Config, folder: Path) -> list[str]:
    """Return one line for each key that `config` changes in the run of `folder`.

    Raises ConfigError, with the reason, for a key that must stay, and if there is no run.
    """
    saved_path = folder / "config.yaml"
    if not saved_path.is_file():
        raise ConfigError(f"{folder}: there is no run to resume; start it without --resume")
    saved = load_config(saved_path)
    for (key, old, reason), (_, new, _) in zip(_fixed(saved), _fixed(config), strict=False):
        if old != new:
            raise ConfigError(
                f"{key}: the run in {folder} was started with {old!r}, not {new!r}, and {reason}; "
                "resume it with that value or start another run with name=OTHER"
            )
    return changed_keys(saved, config)


def _fixed(config: Config) -> list[tuple[str, Any, str]]:
    """Keys that a run keeps: name, value, reason."""
    model, learner = config.model, config.learner
    return [
        ("model.path", model.path, _WEIGHTS),
        ("model.revision", model.revision, _WEIGHTS),
        ("the number of envs", len(config.envs), _TASKS),
        *(
            (f"envs.{index}.{key}", value, _TASKS)
            for index, env in enumerate(config.envs)
            for key, value in env.model_dump(mode="json", include=_OF_TASKS).items()
        ),
        ("seed", config.seed, "the order of its tasks depends on it"),
        ("learner.engine", learner.engine, "each engine has checkpoints of its own"),
        ("learner.advantage", learner.advantage, _METHOD),
        ("learner.critic.kind", learner.critic.kind, _WEIGHTS),
        ("learner.loss.name", learner.loss.name, _METHOD),
        ("learner.lora.rank", learner.lora.rank, _WEIGHTS),
        ("learner.lora.targets", learner.lora.targets if learner.lora.rank else (), _WEIGHTS),
        ("learner.lora.alpha", learner.lora.alpha, "it scales the checkpoint's adapters"),
    ]


def changed_keys(old: Config, new: Config) -> list[str]:
    """Return `key: old -> new` for each key of which the two configs have different values, sorted by key."""
    before, after = (dict(leaves(config.model_dump(mode="json"))) for config in (old, new))
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
