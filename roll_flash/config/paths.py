"""Relative paths in a config file: they are looked for beside the file first, then in the current folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

FILES: tuple[str, ...] = (
    "model.path",
    "envs.*.data",
    "envs.*.data.path",
    "envs.*.kwargs.folder",
    "envs.*.kwargs.program_files.*",
    "stages.*.kwargs.path",
    "warm_start.demonstrations",
    "learner.kl.reference",
    "distill.teacher.model",
)
OBJECTS: tuple[str, ...] = (
    "envs.*.id",
    "envs.*.data",
    "envs.*.data.path",
    "envs.*.data.held_out",
    "envs.*.data.environments.*",
    "envs.*.kwargs.opponent",
    "envs.*.kwargs.task_env",
    "envs.*.kwargs.tools.*",
    "envs.*.kwargs.verifier_function",
    "envs.*.reward",
    "envs.*.reward.*",
    "envs.*.reward.function",
    "envs.*.reward.*.function",
    "envs.*.task_source.entry_point",
    "stages.*.entry_point",
    "warm_start.demonstrations",
    "learner.advantage",
    "learner.loss.name",
)
"""Keys that may name an object in a file, `file.py:NAME`. In both, `*` is each entry of a list, and levels have the
keys of kwargs."""
OF_A_RUN = (".lock", "checkpoints")
"""In the folder of each run."""
HELD_OUT = "envs.*.data.held_out"
"""A file, or the name of a split, which has no suffix: a folder `test` is not meant by `held_out: test`."""


def beside(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the tree of a file in `folder`, with absolute paths for what is there.

    Paths in the config of a run are those of the folder that it was started in: `model.path: model` is not the model
    that the run has written.
    """
    if folder.resolve() == Path.cwd() or all((folder / name).exists() for name in OF_A_RUN):
        return dict(tree)
    for key in _with_levels(FILES):
        tree = _changed(tree, key.split("."), lambda text: _file(text, folder))
    for key in _with_levels(OBJECTS):
        tree = _changed(tree, key.split("."), lambda text: _object(text, folder))
    tree = _changed(tree, HELD_OUT.split("."), lambda text: _file(text, folder) if Path(text).suffix else text)
    return dict(tree)


def _with_levels(keys: Iterable[str]) -> set[str]:
    return {name for key in keys for name in (key, key.replace("envs.*.kwargs.", "envs.*.levels.*."))}


def _changed(node: Any, path: list[str], change: Callable[[str], str]) -> Any:
    if not path:
        return change(node) if isinstance(node, str) else node
    first, *rest = path
    if first == "*":
        return [_changed(each, rest, change) for each in node] if isinstance(node, list) else node
    if isinstance(node, Mapping) and first in node:
        return {**node, first: _changed(node[first], rest, change)}
    return node


def _file(text: str, folder: Path) -> str:
    file = folder / text
    return str(file.absolute()) if text and not Path(text).is_absolute() and file.exists() else text


def _object(text: str, folder: Path) -> str:
    file, separator, name = text.rpartition(":")
    return f"{_file(file, folder)}{separator}{name}" if file.endswith(".py") else text
