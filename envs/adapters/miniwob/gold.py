"""How the tasks are solved: for each, the next right action, from what the model is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from roll_flash.envs.adapters.miniwob.elements import Element

Elements = Sequence[Element]
Rule = Callable[[str, Elements], str]
"""From the task's text and the elements to an action. Raises LookupError if there is none."""
_QUOTED = re.compile(r'"([^"]*)"')
_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__}


def texts_to_type(said: str) -> list[str]:
    """Return what a task may want to be typed: what is in quotes in its text, else each of its words."""
    return _QUOTED.findall(said) or re.findall(r"\w+", said)


def _click(elements: Elements, text: str | None = None, kind: str | None = None) -> str:
    """Click the first element with the text and of the kind, if they are given."""
    for element in elements:
        if element.kind != "text" and text in (None, element.text) and kind in (None, element.kind):
            return f"click {element.number}"
    raise LookupError(text)


def _click_quoted(said: str, elements: Elements, kind: str | None = None) -> str:
    return _click(elements, _QUOTED.findall(said)[0], kind)


def _click_first(said: str, elements: Elements) -> str:
    return _click(elements)


def _click_dialog(said: str, elements: Elements) -> str:
    wanted = _QUOTED.findall(said)[0]
    return _click(elements, {"x": "Close"}.get(wanted, wanted), "button")


def _click_tab(said: str, elements: Elements) -> str:
    return _click(elements, said.removeprefix("Click on ").rstrip("."))


def _click_sequence(said: str, elements: Elements) -> str:
    return _click(
        elements, "TWO" if any(element.text == "ONE" and element.is_focused for element in elements) else "ONE"
    )


def _expand(said: str, elements: Elements) -> str:
    """Open the section; its text is there when it is open."""
    is_open = any(element.kind == "text" for element in elements)
    return _click(elements, "Submit") if is_open else _click(elements)


def _focus(said: str, elements: Elements) -> str:
    fields = [element for element in elements if element.kind == "field"]
    place = re.search(r"([123])(?:st|nd|rd)", said)
    return f"click {fields[int(place[1]) - 1 if place else 0].number}"


def _select(said: str, elements: Elements) -> str:
    """Choose each of the boxes or options that the task names, then submit."""
    named = re.sub(r"^Select | (from the list )?and click Submit\.$", "", said)
    for text in () if named == "nothing" else named.split(", "):
        if not next((element.is_chosen for element in elements if element.text == text), True):
            return _click(elements, text)
    return _click(elements, "Submit", "button")


def _fill(texts: Callable[[str, Elements], Sequence[str]], button: str = "Submit") -> Rule:
    """Type the texts into the fields, each into the next one, then press the button."""

    def rule(said: str, elements: Elements) -> str:
        fields = [element for element in elements if element.kind == "field"]
        for field, text in zip(fields, texts(said, elements), strict=True):
            if field.value != text:
                return f"type {field.number} {text}"
        return _click(elements, button, "button")

    return rule


def _quoted(said: str, elements: Elements) -> list[str]:
    return _QUOTED.findall(said)


def _cased(said: str, elements: Elements) -> list[str]:
    (text,) = _QUOTED.findall(said)
    return [text.upper() if "upper case" in said else text.lower()]


def _result(said: str, elements: Elements) -> list[str]:
    problem = next(found for element in elements if (found := re.match(r"(\d+) ([-+x]) (\d+) =", element.text)))
    return [str(_OPERATIONS[problem[2]](int(problem[1]), int(problem[3])))]


def _cell(said: str, elements: Elements) -> list[str]:
    """The cell of a table after the one that the task names."""
    texts = [element.text for element in elements]
    return [texts[texts.index(re.sub(r"^Enter the value of | into the text field.*$", "", said)) + 1]]


GOLD: dict[str, Rule] = {
    "click-button": partial(_click_quoted, kind="button"),
    "click-link": partial(_click_quoted, kind="link"),
    "click-test": _click_first,
    "click-test-2": lambda said, elements: _click(elements, "ONE"),
    "click-button-sequence": _click_sequence,
    "click-dialog": _click_dialog,
    "click-dialog-2": _click_dialog,
    "click-tab": _click_tab,
    "click-collapsible": _expand,
    "click-checkboxes": _select,
    "click-checkboxes-large": _select,
    "click-option": _select,
    "choose-list": _select,
    "focus-text": _focus,
    "focus-text-2": _focus,
    "enter-text": _fill(_quoted),
    "enter-text-2": _fill(_cased),
    "enter-password": _fill(lambda said, elements: 2 * _quoted(said, elements)),
    "login-user": _fill(_quoted, "Login"),
    "simple-arithmetic": _fill(_result),
    "read-table": _fill(_cell),
}
"""The tasks that there are: those that these actions, and elements in words, are enough for."""
