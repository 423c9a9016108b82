"""Prints episodes for a reader in a terminal.

All that a model or an environment wrote is indented, so that it cannot look like a line of ours. Long text is cut in
the middle, and `say` escapes what would control the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll_flash.chat.model_text import cut_middle
from roll_flash.terminal import one_line, say
from roll_flash.types import Message

MOST_CHARACTERS = 4000
INDENT = "    "


def show_text(title: str, text: str) -> None:
    say("\n".join([one_line(title), *indented(cut_middle(text, MOST_CHARACTERS) or "(nothing)")]))


def indented(text: str) -> list[str]:
    return [INDENT + line for line in text.split("\n")]


def show_opening(messages: Sequence[Message]) -> None:
    for message in messages:
        show_text(f"{message['role']}:", str(message.get("content") or ""))


def show_action(number: int, text: str) -> None:
    show_text(f"turn {number}, model:", text)


def show_answer(number: int, text: str, reward: float) -> None:
    show_text(f"turn {number}, environment (reward {reward:g}):", text)


def show_turns(record: Mapping[str, Any], first: int) -> None:
    """Show the turns of an episode from `first` on."""
    for number, turn in enumerate(record["turns"][first:], start=first):
        show_action(number, turn["action"])
        show_answer(number, turn["observation"], turn["reward"])


def ending(record: Mapping[str, Any]) -> str:
    """Return in a line how an episode ended."""
    name = f"{record['episode_id']} of {record['task_id']}"
    if record["kind"] == "failure":
        return one_line(f"{name}: failed in turn {record['failed_turn']} ({record['cause']}): {record['message']}")
    success = {True: ", success", False: ", no success", None: ""}[record["success"]]
    return one_line(f"{name}: reward {record['reward']:g}{success}, {record['end']} after {len(record['turns'])} turns")
