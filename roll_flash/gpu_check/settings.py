"""What is checked: the config of a run, with an environment that needs nothing, and a model.

On a machine without a GPU everything is rehearsed on the CPU with the tiny model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import roll_flash
from roll_flash.config.files import read_yaml
from roll_flash.config.tree import Config, load_config
from roll_flash.errors import ConfigError, ModelError
from roll_flash.models.folder import check_model_folder
from roll_flash.models.prepare import RECIPES, prepared_folder
from roll_flash.models.shape import SHAPES
from roll_flash.processes.gpus import is_cpu_installation, visible_gpus
from roll_flash.processes.nvml import read_driver

CONFIGS = Path(roll_flash.__file__).resolve().parents[1] / "configs"
"""Of the repository; not there if only the package is installed."""
DEFAULT_MODEL = "Qwen3-0.6B"
REHEARSED: Mapping[str, Any] = {
    "model": {"path": "tiny", "max_length": 256},
    "scheduler": {"groups_per_step": 2, "group_size": 4},
    "rollout": {"max_concurrent": 8, "max_new_tokens": 16},
    "inference": {"engine": "transformers", "kv_cache_gib": 0.25, "servers": 2},
    "learner": {"micro_batch_tokens": 1024, "ranks": 2},
}
"""Two ranks and two servers, in place of the checks with two GPUs."""
ON_GPU: Mapping[str, Any] = {
    "model": {"path": DEFAULT_MODEL, "max_length": 4096},
    "scheduler": {"groups_per_step": 8, "group_size": 8},
    "rollout": {"max_concurrent": 64, "max_new_tokens": 64},
    "inference": {"kv_cache_gib": 4.0},
    "learner": {"micro_batch_tokens": 8192, "gradient_checkpointing": True},
}
"""Without a recipe: fits on 24 GiB beside the server."""
REWARD = "reward.py"
ROWS = "rows.jsonl"


@dataclass(frozen=True, slots=True)
class Settings:
    output: Path
    config: Mapping[str, Any]
    """The resolved config, as a tree."""
    model_folder: Path
    """Made by the first check if it is missing."""
    gpus: int
    """GPUs that this process sees; 0 in a rehearsal."""
    shape: Mapping[str, Any] | None = None
    """The config.json of random weights that are made in `model_folder`; None: its weights are there."""
    recipe: str = ""
    """The config file that was given."""
    earlier: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Figures of the checks that have ended, by their names."""

    @property
    def rehearsal(self) -> bool:
        return self.gpus == 0

    def config_with(self, *overrides: str) -> Config:
        return load_config(self.config, overrides)

    def to_json(self) -> dict[str, Any]:
        paths = {"output": str(self.output), "model_folder": str(self.model_folder)}
        return {
            "config": self.config,
            "gpus": self.gpus,
            "shape": self.shape,
            "recipe": self.recipe,
            "earlier": self.earlier,
            **paths,
        }

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Settings:
        return cls(**{**tree, "output": Path(tree["output"]), "model_folder": Path(tree["model_folder"])})


def make_settings(output: Path, recipe: str | None, overrides: Sequence[str]) -> Settings:
    """Decide what is checked, with a report in the folder `output`, which `create_folder` creates.

    In a rehearsal a recipe gives way to the tiny model. Raises ConfigError, also if `output` exists and holds files.
    """
    gpus = 0 if is_cpu_installation() else len(visible_gpus(read_driver()))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output}: exists and is not empty; choose another folder with --output")
    output = output.resolve()
    tree = dict(REHEARSED if not gpus else ON_GPU if recipe is None else read_yaml(Path(recipe)))
    config = load_config(_without_needs(tree, output), overrides)
    folder, shape = _model(config.model.path, output)
    path = config.model.path if config.model.path in RECIPES else str(folder)
    resolved = config.model_dump(mode="json") | {"model": {**config.model.model_dump(), "path": path, "revision": None}}
    return Settings(output, resolved, folder, gpus, shape, recipe or "")


def create_folder(output: Path) -> None:
    """Create the folder of the report, with the data and the reward of the check's runs."""
    output.mkdir(parents=True, exist_ok=True)
    (output / REWARD).write_text(REWARD_CODE)
    rows = [json.dumps({"prompt": f"Say {number}.", "answer": str(number)}) for number in range(64)]
    (output / ROWS).write_text("\n".join(rows) + "\n")


REWARD_CODE = '''def variety(completion):
    """Share of different characters: even a random model gets different rewards."""
    return len(set(completion)) / max(1, len(completion))
'''


def _without_needs(tree: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Replace what needs a sandbox, files of the user, other machines or a network."""
    env = {"id": "Dataset-v0", "data": str(output / ROWS), "reward": f"{output / REWARD}:variety", "max_turns": 1}
    left = {key: value for key, value in tree.items() if key not in ("stages", "warm_start", "sandbox")}
    weights = {**tree.get("weights", {}), "publish_timeout_s": 300.0}
    return left | {
        "name": "run",
        "runs": str(output / "runs"),
        "envs": [env],
        "eval": {"before_and_after": False},
        "monitor": {"tensorboard": False},
        "ray": {},
        "weights": weights,
    }


def _model(path: str, output: Path) -> tuple[Path, Mapping[str, Any] | None]:
    """Return the folder of a model, and its shape if it must be made of random weights. Raises ModelError."""
    if path in RECIPES:
        return prepared_folder(path), None
    folder = Path(path).expanduser()
    made = output / "model" / folder.name
    if (folder / "config.json").is_file() and not any(folder.glob("*.safetensors*")):
        return made, dict(json.loads((folder / "config.json").read_text()))
    if folder.is_dir():
        check_model_folder(folder)
        return folder.resolve(), None
    if (known := SHAPES / f"{folder.name}.json").is_file():
        return made, dict(json.loads(known.read_text()))
    raise ModelError(
        f"{path}: there is no such model folder; give one, a folder with only a config.json for random weights in its "
        f"shape, or one of {', '.join([*RECIPES, *sorted(path.stem for path in SHAPES.glob('*.json'))])} (model.path)"
    )
