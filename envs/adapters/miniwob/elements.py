"""What the model is shown of a page, and the actions that it writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_flash.chat.model_text import action_line

MAX_CHARACTERS = 200
"""Maximum characters of an action."""
_ACTION = re.compile(r"(click|type)\s+[#\[]?([0-9]{1,4})\]?(?:\s+(.*))?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Element:
    number: int
    """0 for a text."""
    kind: str
    """`button`, `checkbox`, `field`, `link`, `option`, `radio`, or `text`, which cannot be clicked."""
    text: str
    """What it says, or its label says."""
    value: str
    """What is in a field."""
    marks: tuple[str, ...]
    """`chosen`, `focused`."""

    @property
    def is_chosen(self) -> bool:
        return "chosen" in self.marks

    @property
    def is_focused(self) -> bool:
        return "focused" in self.marks

    def __str__(self) -> str:
        """Return its line. The number comes behind the text: small models find what follows, not what precedes."""
        if self.kind == "text":
            return f"- {self.text}"
        value = f' = "{self.value}"' if self.value else ""
        marks = f" ({', '.join(self.marks)})" if self.marks else ""
        text = f' "{self.text}"' if self.text else ""
        return f"{self.kind}{text} [{self.number}]{value}{marks}"


@dataclass(frozen=True, slots=True)
class Action:
    number: int
    text: str | None
    """What is typed; None for a click."""


def read_elements(entries: Iterable[Mapping[str, Any]]) -> tuple[Element, ...]:
    return tuple(Element(**{**entry, "marks": tuple(entry["marks"])}) for entry in entries)


def read_action(reply: str, elements: Sequence[Element]) -> Action | str:
    """Return the action of a reply, or what is wrong with it, for the model."""
    found = _ACTION.match(action_line(reply, MAX_CHARACTERS))
    if found is None:
        return "This is no action; write `click N` or `type N TEXT`."
    verb, number, text = found[1].lower(), int(found[2]), found[3]
    kinds = {element.number: element.kind for element in elements if element.kind != "text"}
    if number not in kinds:
        return f"There is no element {number}."
    if verb == "click":
        return Action(number, None)
    if kinds[number] != "field":
        return f"Element {number} is no field to type into."
    if not text:
        return f"Write what to type: `type {number} TEXT`."
    return Action(number, text.strip("\"'`"))
