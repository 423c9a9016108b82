"""Conversion of a model's text to an action of an OpenEnv server, and of an observation to text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll_flash.chat.model_text import without_thinking
from roll_flash.envs.adapters.openenv.connection import NAME, WrongAction
from roll_flash.errors import ConfigError

SCALARS = ("string", "integer", "number", "boolean")
_decoder = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class TextActions:
    """For actions with one field: the whole text is its value."""

    field: str
    kind: str
    about: str

    @property
    def instructions(self) -> str:
        return f"Reply only with the {self.field}{': ' if self.about else '.'}{self.about}"

    def action(self, text: str) -> dict[str, Any]:
        said = without_thinking(text).strip()
        if self.kind == "string":
            return {self.field: said}
        try:
            return {self.field: json.loads(said)}
        except (ValueError, RecursionError):
            raise WrongAction(f"{self.field} must be of the type {self.kind}") from None


@dataclass(frozen=True, slots=True)
class JsonActions:
    """For other actions: the text contains a JSON object of the action's schema."""

    schema: Mapping[str, Any]

    @property
    def instructions(self) -> str:
        return f"Reply with a JSON object of this schema:\n{json.dumps(self.schema)}"

    def action(self, text: str) -> dict[str, Any]:
        said = without_thinking(text)
        start = said.find("{")
        try:
            value, _ = _decoder.raw_decode(said, start)
        except (ValueError, RecursionError):
            value = None
        if start < 0 or not isinstance(value, dict):
            raise WrongAction("there is no JSON object in the reply")
        return value


def actions_of(schema: Mapping[str, Any], field: str | None) -> TextActions | JsonActions:
    """Choose by the server's schema: for an action with one plain field the text is its value. Raises ConfigError."""
    fields = {name: about for name, about in schema.get("properties", {}).items() if name != "metadata"}
    if field is not None and field not in fields:
        raise ConfigError(f"{NAME}: action_field {field!r}: the server's actions have {', '.join(fields) or 'none'}")
    required = [name for name in schema.get("required", ()) if name in fields]
    chosen = field or (required[0] if len(required) == 1 else next(iter(fields)) if len(fields) == 1 else None)
    if chosen is not None and fields[chosen].get("type") in SCALARS:
        return TextActions(chosen, str(fields[chosen]["type"]), str(fields[chosen].get("description", "")))
    return JsonActions({"type": "object", "properties": fields, "required": required})


def takes_tools(schema: Mapping[str, Any]) -> bool:
    """Return True if the environment is a set of MCP tools."""
    return {"tool_name", "arguments"} <= set(schema.get("properties", {}))


def as_text(observation: Mapping[str, Any], field: str | None) -> str:
    """Return the given field, or the only text in it, else all of it as JSON. Raises ConfigError."""
    if field is not None:
        if field not in observation:
            has = ", ".join(observation) or "none"
            raise ConfigError(f"{NAME}: observation_field {field!r}: the server's observations have {has}")
        return str(observation[field])
    said = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
    if len(said) == 1 and isinstance(only := next(iter(said.values())), str):
        return only
    return json.dumps(said, ensure_ascii=False, default=str) if said else "(the environment says nothing)"
