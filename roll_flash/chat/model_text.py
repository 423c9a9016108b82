"""Reading what a model wrote, in time that grows with its length, whatever it is.

A worker reads the text of hundreds of episodes on one loop. No parser of such text may look at a part of it again and
again: no regular expression with two repeats side by side that take the same characters, no search to the end of the
text from each of many places, no copy of the rest for each part. `tests/test_model_text.py` holds every parser to that.
"""

from __future__ import annotations

import ast
import html
import re
import warnings
from typing import Any

MOST_CALLS = 256
"""Tool calls that are read of one text: each error in JSON costs a look at the text before it."""
LONGEST_PYTHON_CHARACTERS = 20_000
"""Of calls that are written as Python, whose parser is quick with programs and slow with some other texts."""
MOST_DEPTH = 64
"""Of lists and objects in each other: what is deeper can be read here and not copied, compared or written there."""
_BLANKS = re.compile(r"\s*+")


def after_blanks(text: str, position: int) -> int:
    """Where the blanks at `position` end."""
    found = _BLANKS.match(text, position)
    return found.end() if found else position


def tagged(text: str, *names: str, ignore_case: bool = False) -> list[str]:
    """What stands in `<name>...</name>`, in order, for any of the names; the first closing tag ends it."""
    flags = re.IGNORECASE if ignore_case else 0
    opening, closing = (re.compile(rf"<{slash}(?:{'|'.join(names)})>", flags) for slash in ("", "/"))
    found: list[str] = []
    position = 0
    while (start := opening.search(text, position)) and (end := closing.search(text, start.end())):
        found.append(text[start.end() : end.start()])
        position = end.end()
    return found


def unescaped(text: str) -> str:
    """HTML's entities as what they stand for; a number that is too long for Python stays as it is."""
    try:
        return html.unescape(text)
    except ValueError:
        return text


def is_deeper(value: Any, limit: int) -> bool:
    """Whether more than `limit` lists, tuples and objects lie in each other below `value`, which is one."""
    level = [value]
    for _ in range(limit):
        inner = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
        level = [item for item in inner if isinstance(item, dict | list | tuple)]
        if not level:
            return False
    return True


def encodable(text: str) -> str:
    """Halves of characters, which a model can write as `\\ud800` in JSON, become question marks: they can be neither
    tokenised nor sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def parse_python(text: str) -> ast.expr:
    """One Python expression as a tree; nothing of it is run. Raises ValueError with one line."""
    if len(text) > LONGEST_PYTHON_CHARACTERS:
        raise ValueError(f": they are longer than {LONGEST_PYTHON_CHARACTERS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's advice on what a model wrote is of use to nobody
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f" at character {error.offset}" if error.offset else "") from None
    except (ValueError, RecursionError, MemoryError):
        raise ValueError("") from None
