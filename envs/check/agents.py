"""Agents for testing an environment: one that does nothing, an oracle, and some between these extremes."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from roll_flash.envs.check.play import Agent
from roll_flash.processes.background import call_sync_or_async
from roll_flash.types import Message

_FRAGMENT = re.compile(r"<([A-Za-z_]\w*)>[^<>]{0,200}</\1>")
_WORD = re.compile(r"\w+")

LONG_TEXT = "I would like to think about this at length. " * 5000

MALFORMED = (
    "<tool_call>{",
    '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>',
    '{"name": 5, "parameters": [}',
    "<sh>",
    "<answer><answer></answer>",
    "\x00\x07\u202e\U0001f600\ufffd",
    "<" * 5000,
    "[" * 5000,
    "<move>\n\n</move>",
    "-9" * 3000,
    "NaN",
)


def constant_text(text: str) -> Agent:
    """Return an agent that always gives the same useless text."""

    async def act(env: Any, messages: Sequence[Message], turn: int) -> str:
        return text

    return act


async def malformed(env: Any, messages: Sequence[Message], turn: int) -> str:
    return MALFORMED[turn % len(MALFORMED)]


async def talkative(env: Any, messages: Sequence[Message], turn: int) -> str:
    return LONG_TEXT


async def oracle(env: Any, messages: Sequence[Message], turn: int) -> str:
    return str(await call_sync_or_async(env.oracle))


def random_fragments(seed: int) -> Agent:
    """Return an agent that repeats its prompt in pieces: words, and example calls with other words in them."""
    chance = random.Random(seed)

    async def act(env: Any, messages: Sequence[Message], turn: int) -> str:
        text = "\n".join(str(message.get("content", "")) for message in messages)
        words = _WORD.findall(text) or ["nothing"]
        fragments = [found[1] for found in _FRAGMENT.finditer(text)]
        said = " ".join(chance.choices(words, k=chance.randint(1, 3)))
        if fragments and chance.random() < 0.8:
            tag = chance.choice(fragments)
            return f"<{tag}>{said}</{tag}>"
        return said

    return act
