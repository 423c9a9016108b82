"""Which prompts have more tokens than the model may take: each of their episodes would fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from roll_flash.chat.templates import chat_template_of
from roll_flash.chat.tokenizer import load_checked_tokenizer
from roll_flash.config.sections.data import DataConfig
from roll_flash.config.tree import ModelConfig
from roll_flash.models.prepare import resolve_model
from roll_flash.terminal import say
from roll_flash.types import Message

Numbers = np.ndarray[Any, np.dtype[np.int64]]
TEMPLATE_TOKENS = 256
"""Tokens that no chat template adds to a short prompt. Prompts with fewer bytes than the rest need no tokenizer."""
SLACK = 8
"""Tokens that can come from where two texts are joined."""
MAX_BYTES, MAX_PROMPTS = 1 << 24, 20_000
"""Most text that is tokenised, the longest prompts first, in seconds. A data set with more is checked in part."""


def too_long(
    model: ModelConfig,
    data: DataConfig,
    prompt_bytes: Numbers,
    longest_first: Numbers,
    messages_of: Callable[[int], Sequence[Message]],
) -> list[int]:
    """Return those of the rows `longest_first` whose prompt leaves no token of `model.max_length` for an answer.

    A token has at least one byte, so only prompts with more bytes than room are tokenised. Tools, which an environment
    adds to the prompt, do not count. Raises ModelError without a model.
    """
    system_bytes = len((data.system or "").encode())
    room = model.max_length - system_bytes
    if not longest_first.size or prompt_bytes[longest_first[0]] < room - TEMPLATE_TOKENS:
        return []
    tokens_of = _counter(model)
    of_template = tokens_of([{**message, "content": ""} for message in messages_of(int(longest_first[0]))])
    found, total = [], 0
    for number, index in enumerate(longest_first):
        size = int(prompt_bytes[index])
        if size < room - of_template - SLACK:
            break
        total += size
        if number >= MAX_PROMPTS or (number and total > MAX_BYTES):
            left = len(longest_first) - number
            say(
                f"data {data.path}: tokens of the longest {number:,} prompts were counted, not of {left:,} others",
                error=True,
            )
            break
        if tokens_of(messages_of(int(index))) >= model.max_length:
            found.append(int(index))
    return found


def _counter(model: ModelConfig) -> Callable[[Sequence[Message]], int]:
    folder = resolve_model(model.path, model.revision)
    template = chat_template_of(load_checked_tokenizer(folder, model.chat_template_kwargs))
    return lambda messages: len(template.prompt(list(messages), room=model.max_length))
