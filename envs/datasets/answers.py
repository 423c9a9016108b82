"""Where in a model's text its answer is. Run time is linear in the text's length."""

from __future__ import annotations

import re
from typing import Literal, get_args

from roll_flash.chat.model_text import last_answer, without_thinking

AnswerIn = Literal["tag", "boxed", "last_number", "text"]
ANSWER_IN: tuple[str, ...] = get_args(AnswerIn)
_NUMBER = re.compile(r"(?:(?<!\w)[+-])?(?:[0-9][0-9,]*+(?:\.[0-9]++)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?")
"""A sign that follows a letter or a digit is none: `3-5`, `B-12`, `2024-05-17`."""
_BOXED = "\\boxed{"


def find_answer(text: str, answer_in: AnswerIn) -> str:
    """Return the answer in a model's text; empty if there is none.

    `tag`: in the last `<answer>`, else the whole text; `boxed`: in the last `\\boxed{}`; `last_number`; `text`: all of
    it. What the model thinks in `<think>` is no part of it.
    """
    if answer_in == "tag":
        return last_answer(text)
    text = without_thinking(text)
    if answer_in == "boxed":
        return _in_braces(text, text.rfind(_BOXED))
    if answer_in == "last_number":
        return _last_number(text)
    return text.strip()


def _last_number(text: str) -> str:
    last = ""
    for found in _NUMBER.finditer(text):
        last = found.group()
    return last.rstrip(",")


def _in_braces(text: str, start: int) -> str:
    if start < 0:
        return ""
    depth = 0
    begin = start + len(_BOXED)
    for place in range(begin, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            if not depth:
                return text[begin:place].strip()
            depth -= 1
    return ""
