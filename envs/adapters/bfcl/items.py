"""The items of BFCL v4's multi-turn categories, read from the package bfcl-eval.

An item has a few user turns, the tool classes with their initial state, and the right calls.
The package is optional (`pip install --no-deps bfcl-eval`: these categories use only mpmath of its dependencies). This
module reads only its data and prompts; its tool classes run in the sandbox.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_flash.envs.adapters.optional_package import import_optional
from roll_flash.envs.tools.functions import ToolDescription
from roll_flash.errors import ConfigError

CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
ENVIRONMENT = "BFCL-v4"
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""JSON schema types for BFCL's type names."""
_PYTHON_HINT = " Note that the provided function is in Python 3 syntax."


@dataclass(frozen=True, slots=True)
class BfclItem:
    """One conversation. `question`, `ground_truth` and `held_out` are indexed by turn."""

    item_id: str
    question: tuple[tuple[Mapping[str, Any], ...], ...]
    """The user's messages of each turn; empty if functions are added instead."""
    ground_truth: tuple[tuple[str, ...], ...]
    """The right calls as Python source; empty if the turn needs none."""
    functions: tuple[Mapping[str, Any], ...]
    """Functions that are available from the start, in BFCL's format."""
    held_out: Mapping[int, tuple[Mapping[str, Any], ...]]
    """Functions that become available at a later turn, by turn."""
    involved_classes: tuple[str, ...]
    initial_config: Mapping[str, Any]

    @property
    def all_functions(self) -> tuple[Mapping[str, Any], ...]:
        return (*self.functions, *(function for added in self.held_out.values() for function in added))

    @property
    def is_long_context(self) -> bool:
        return "long_context" in self.item_id


def import_bfcl(module: str) -> Any:
    """Import a module of bfcl-eval. Raises ConfigError with the install command."""
    return import_optional(module, package="bfcl-eval", needed_by=ENVIRONMENT, pip_options="--no-deps ")


def package_folder() -> Path:
    """Return the package's folder. Raises ConfigError."""
    return Path(import_bfcl("bfcl_eval").__file__).parent


@functools.cache
def load_items(category: str) -> Sequence[BfclItem]:
    """Return all items of a category, in its order. Raises ConfigError."""
    if category not in CATEGORIES:
        raise ConfigError(f"{ENVIRONMENT}: category must be one of {', '.join(CATEGORIES)}, not {category!r}")
    data = package_folder() / "data"
    name = f"BFCL_v4_{category}.json"
    answers = {entry["id"]: entry["ground_truth"] for entry in _read_lines(data / "possible_answer" / name)}
    documented = _documented_functions()
    return tuple(_item(entry, answers[entry["id"]], documented) for entry in _read_lines(data / name))


def describe_function(function: Mapping[str, Any]) -> ToolDescription:
    """Convert a BFCL function to the form for chat templates and endpoints."""
    return ToolDescription(
        str(function["name"]), str(function["description"]), _as_json_schema(dict(function["parameters"]))
    )


def _item(entry: Mapping[str, Any], answer: Sequence[Sequence[str]], documented: Mapping[str, Any]) -> BfclItem:
    functions = [function for name in entry["involved_classes"] for function in documented[name]]
    by_name = {function["name"]: function for function in functions}
    held_out = {
        int(turn): tuple(by_name[name] for name in names) for turn, names in entry.get("missed_function", {}).items()
    }
    hidden = {function["name"] for added in held_out.values() for function in added}
    return BfclItem(
        item_id=entry["id"],
        question=tuple(tuple(turn) for turn in entry["question"]),
        ground_truth=tuple(tuple(calls) for calls in answer),
        functions=tuple(
            {**function, "description": function["description"] + _PYTHON_HINT}
            for function in functions
            if function["name"] not in hidden
        ),
        held_out=held_out,
        involved_classes=tuple(entry["involved_classes"]),
        initial_config=entry["initial_config"],
    )


@functools.cache
def _documented_functions() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    folder = package_folder() / "data" / "multi_turn_func_doc"
    backend = import_bfcl("bfcl_eval.constants.executable_backend_config")
    files: Mapping[str, str] = backend.MULTI_TURN_FUNC_DOC_FILE_MAPPING
    return {name: _read_lines(folder / file) for name, file in files.items()}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(
            f"{ENVIRONMENT}: {error}; another version of bfcl-eval? pip install --no-deps bfcl-eval==2026.3.23"
        ) from None


def _as_json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    schema = copy.copy(schema)
    schema["type"] = _JSON_TYPES.get(schema.get("type", "string"), schema.get("type", "string"))
    if "properties" in schema:
        schema["properties"] = {name: _as_json_schema(value) for name, value in schema["properties"].items()}
    if "items" in schema:
        schema["items"] = _as_json_schema(schema["items"])
    return schema
