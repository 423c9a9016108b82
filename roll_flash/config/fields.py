"""Base class and annotated field types of every section of the config tree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from roll_flash.errors import ConfigError

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def _expand_home(value: Any) -> Any:
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~") else value


def require_json(value: Any) -> None:
    """Raises TypeError or ValueError for a value that JSON cannot hold, such as a date, or holds as another: a key that
    is a number would be a text, and NaN null, for an episode that goes on after a checkpoint or is played again."""
    json.dumps(value, allow_nan=False)
    if others := [key for key in _keys(value) if not isinstance(key, str)]:
        raise TypeError(f"The key {others[0]!r} is no text")


def require_lists(environment: str, **lists: Any) -> None:
    """Raises ConfigError for an argument of an environment that should be a list of texts and is one: Python takes each
    of its characters for an entry."""
    for name, given in lists.items():
        if isinstance(given, str):
            raise ConfigError(f"{environment}: {name} is a list; write {name}: [{json.dumps(given)}]")


def _keys(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    for item in value if isinstance(value, list | tuple) else ():
        yield from _keys(item)


def _require_json(value: dict[str, Any]) -> dict[str, Any]:
    """Reject values that checkpoints (JSON) cannot hold, such as dates, which YAML makes of date-like text."""
    try:
        require_json(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error}, so no checkpoint can hold it; write it in quotes, or as a list") from None
    return value


RayResources = Annotated[dict[str, PositiveFloat], Field(min_length=1)]
KeywordArguments = Annotated[dict[str, Any], AfterValidator(_require_json)]
LocalPath = Annotated[str, BeforeValidator(_expand_home)]
NumberOrAuto = Annotated[
    Annotated[NonNegativeFloat, Tag("number")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if isinstance(value, str) else "number"),
]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
