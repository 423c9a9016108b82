"""Parsers for text written by a model, with run time linear in its length for any text.

A worker parses the text of hundreds of episodes on one event loop. So no parser of such text may scan a part again and
again: no regular expression with two adjacent repeats that match the same characters, no search to the end of the text
from each of many positions, no copy of the rest per part. `tests/test_model_text.py` checks this for every parser.
"""

from __future__ import annotations

import ast
import html
import re
import warnings
from typing import Any

MAX_CALLS = 256
"""Maximum number of tool calls read from one text: each JSON error costs a scan of the text before it."""
MAX_COMPARED = 8
"""Maximum number of wrong names in one text that are compared with all known ones, to tell the model what it may have
meant: one takes 10 ms with 128 long names, up to 60 ms if these are chosen for it."""
MAX_PYTHON_CHARACTERS = 20_000
"""Maximum length of tool calls written as Python: Python's parser is slow for some texts that are not programs."""
MAX_DEPTH = 64
"""Maximum nesting of lists and objects: deeper values can be parsed, but later copying or writing them fails."""
MAX_VALUES = 20_000
"""Maximum number of values in the arguments of one call: checking each against several types takes 10 microseconds."""
_BLANKS = re.compile(r"\s*+")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?")
_LIST_MARK = re.compile(r"^(?:[-*>]|action:|\d+[.)])\s*", re.IGNORECASE)
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_SPECIAL_TOKEN = re.compile(
    r"<[|\uff5c][^<>\s]{1,40}>|<[^<>\s]{1,40}[|\uff5c]>|\[\|[^\[\]\s]{1,40}\|\]|<seed:[^<>\s]{1,40}>"
    r"|<(?:start|end)_of_(?:turn|utterance|sentence)>|</?s>|<(?:bos|eos)>|<</?SYS>>"
    r"|<(?:extra_id|SPECIAL|reserved)_[0-9]{1,4}>|</?longcat_[a-z_]{1,30}>|<_(?:user|bot|system|start|end)>"
    r"|\]~!?b[\[\]]|\[e~\["
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|ARGS|CALL_ID)\]"
)
_THINKING = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)


def after_blanks(text: str, position: int) -> int:
    """Return the end position of the white space at `position`."""
    found = _BLANKS.match(text, position)
    return found.end() if found else position


def split_thinking(text: str) -> tuple[str, str]:
    """Return (thinking, rest). Thinking is what is in `<think>...</think>`; an unclosed `<think>` reaches to the end of
    the text. Text before a first `</think>` without `<think>` is thinking too: the prompt may have opened it."""
    first_close = text.find(THINK_CLOSE)
    if first_close >= 0 and text.find(THINK_OPEN, 0, first_close) < 0:
        text = THINK_OPEN + text
    thoughts = (thought.strip() for thought in _THINKING.findall(text))
    return "\n".join(filter(None, thoughts)), _THINKING.sub("", text)


def without_thinking(text: str) -> str:
    """Return the text without thinking, as `split_thinking` finds it."""
    return split_thinking(text)[1]


def tagged(text: str, *names: str, ignore_case: bool = False) -> list[str]:
    """Return the contents of all `<name>...</name>`, in order, for any of the names, up to the first closing tag."""
    flags = re.IGNORECASE if ignore_case else 0
    opening, closing = (re.compile(rf"<{slash}(?:{'|'.join(names)})>", flags) for slash in ("", "/"))
    found: list[str] = []
    position = 0
    while (start := opening.search(text, position)) and (end := closing.search(text, start.end())):
        found.append(text[start.end() : end.start()])
        position = end.end()
    return found


def last_answer(text: str) -> str:
    """Return the content of the last `<answer>`, else the whole text; without thinking and without outer blanks."""
    text = without_thinking(text)
    answers = tagged(text, "answer")
    return (answers[-1] if answers else text).strip()


def action_line(text: str, max_characters: int) -> str:
    """Return the action in a reply: its first line that is not empty, or that of the last `<action>` or `<answer>`;
    without a mark of a list and without quotes around it."""
    text = without_thinking(text)
    marked = tagged(text, "action", "answer", ignore_case=True)
    lines = (line.strip() for line in (marked[-1] if marked else text).splitlines())
    chosen = next((line for line in lines if line), "")[:max_characters]
    return _LIST_MARK.sub("", chosen).strip("\"'`. ")


def decimal_number(text: str) -> float | None:
    """Return the value of a plain decimal number; None for all else that `float` reads, such as `nan` or `1_0`."""
    return float(text) if _DECIMAL.fullmatch(text) else None


def without_special_tokens(text: str) -> str:
    """Replace the tokens that begin and end messages in common chat templates. A server of another model takes them for
    what they spell, so that the text would end its message and go on as another."""
    return _SPECIAL_TOKEN.sub("(token)", text)


def cut_middle(text: str, max_characters: int) -> str:
    """Cut to about `max_characters`: head, tail, and between them a note of the length left out."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} of {len(text)} characters left out ...]\n{text[-half:]}"


def unescaped(text: str) -> str:
    """Replace HTML entities; return `text` unchanged if it has a number that is too long for Python."""
    try:
        return html.unescape(text)
    except ValueError:
        return text


def is_deeper(value: Any, limit: int) -> bool:
    """True if lists, tuples and objects are nested more than `limit` deep in `value`, which is one of them."""
    level = [value]
    for _ in range(limit):
        inner = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
        level = [item for item in inner if isinstance(item, dict | list | tuple)]
        if not level:
            return False
    return True


def has_more_values(value: Any, limit: int) -> bool:
    """True if the lists, tuples and objects in `value`, which is one of them, have more than `limit` values in all."""
    count, waiting = 0, [value]
    while waiting:
        outer = waiting.pop()
        inner = outer.values() if isinstance(outer, dict) else outer
        count += len(inner)
        if count > limit:
            return True
        waiting += [item for item in inner if isinstance(item, dict | list | tuple)]
    return False


def encodable(text: str) -> str:
    """Replace lone surrogates by question marks. A model can write them as `\\ud800` in JSON, but they can be neither
    tokenised nor sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def parse_python_calls(text: str) -> list[ast.Call]:
    """Parse a Python list of calls to trees, without running it; empty for any other expression. Raises ValueError with
    one line for text that is not Python."""
    if len(text) > MAX_PYTHON_CHARACTERS:
        raise ValueError(f": they are longer than {MAX_PYTHON_CHARACTERS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about a model's text are useless
            body = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f" at character {error.offset}" if error.offset else "") from None
    except (ValueError, RecursionError, MemoryError):
        raise ValueError("") from None
    elements = body.elts if isinstance(body, ast.List) else []
    calls = [element for element in elements if isinstance(element, ast.Call)]
    return calls if len(calls) == len(elements) else []
