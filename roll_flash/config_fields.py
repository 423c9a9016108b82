"""What every section of the config tree is made of: its base class and the annotated types of its fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def _expand_home(value: Any) -> Any:
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~") else value


LocalPath = Annotated[str, BeforeValidator(_expand_home)]
NumberOrAuto = Annotated[
    Annotated[NonNegativeFloat, Tag("number")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if isinstance(value, str) else "number"),
]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
