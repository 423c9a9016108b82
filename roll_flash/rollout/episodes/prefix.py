"""Recorded turns that an episode begins with: its environment is brought to a later turn without a model.

The actions are those of an episode in the log. Everything that the environment shows must be as it was recorded; at the
first difference the episode fails with the turn. The played turns are context: no policy tokens, and never trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import msgspec

from roll_flash.chat.model_text import cut_middle
from roll_flash.envs.hosting.environments import AsyncEnvironment, Step, why_not_repeatable
from roll_flash.errors import RollFlashError
from roll_flash.monitor.episodes import own_answers
from roll_flash.rollout.turns import checksum_of_prompt
from roll_flash.types import ENDS_OF_THE_RUN, FinishReason, Message, Task

SHOWN_CHARACTERS = 200
"""Maximum length of an answer in an error message."""


class PrefixError(RollFlashError):
    """An environment cannot be brought to where a recorded episode was."""


class PrefixTurn(msgspec.Struct, frozen=True):
    action: str
    finish_reason: FinishReason
    prompt: int
    """Checksum of the prompt's tokens. Only for a prompt with this checksum `token_ids` are those of the action."""
    token_ids: tuple[int, ...]
    """Tokens of the action; empty if they are not known."""
    observation: int
    """Checksum of the text that the environment answered."""
    reward: float | None
    """None if it is not known."""
    ended: bool
    """True if the environment ended the episode."""


class Prefix(msgspec.Struct, frozen=True):
    """The first turns of a recorded episode. `opening`: checksum of what the environment showed at `reset`."""

    opening: int = 0
    turns: tuple[PrefixTurn, ...] = ()

    @classmethod
    def of_record(cls, record: Mapping[str, Any], turns: int) -> Prefix:
        """Return the first `turns` turns of a trajectory in an episode log."""
        played: Sequence[Mapping[str, Any]] = record["turns"]
        own = own_answers(record["messages"], len(played)) if played else []
        scored = len(played) if record["end"] in ENDS_OF_THE_RUN else 0
        return cls(
            _checksum_of_opening(record["messages"][: own[0] if own else None]),
            tuple(
                PrefixTurn(
                    turn["action"],
                    turn["finish_reason"],
                    checksum_of_prompt(record["token_ids"][: turn["start"]]),
                    tuple(record["token_ids"][turn["start"] : turn["end"]]),
                    _checksum(turn["observation"]),
                    None if number == scored else turn["reward"],
                    number == len(played) and record["end"] in ("terminated", "truncated"),
                )
                for number, turn in enumerate(played[:turns], start=1)
            ),
        )

    @classmethod
    def of(cls, task: Task) -> Prefix:
        return msgspec.json.decode(task.prefix, type=cls) if task.prefix else cls()

    def encode(self) -> str:
        """Return it as `Task.prefix`."""
        return msgspec.json.encode(self).decode()

    def require_repeatable(self, env: AsyncEnvironment) -> None:
        """Raise PrefixError for an environment whose turns cannot be played again."""
        if self.turns and (reason := why_not_repeatable(env.unwrapped)):
            raise PrefixError(reason)

    def check_opening(self, messages: Sequence[Message]) -> None:
        """Compare what `reset` showed. Raises PrefixError."""
        if self.turns and _checksum_of_opening(messages) != self.opening:
            raise PrefixError(f"before turn 0 the environment shows {_shown(messages)}, which is not as recorded")

    def check_answer(self, number: int, step: Step) -> None:
        """Compare the answer to turn `number`. Raises PrefixError."""
        turn, ended = self.turns[number], step.terminated or step.truncated
        if ended != turn.ended:
            what = "ends the episode" if ended else "does not end the episode"
        elif _checksum(step.text) != turn.observation:
            what = f"answers {_shown(step.messages)}"
        elif turn.reward is not None and step.reward != turn.reward:
            what = f"gives the reward {step.reward:g} and not {turn.reward:g}"
        else:
            return
        raise PrefixError(f"in turn {number} the environment {what}, which is not as recorded")


def _checksum(text: str) -> int:
    return crc32(text.encode("utf-8", "replace"))


def _checksum_of_opening(messages: Sequence[Message]) -> int:
    """Without the system message, which may have the description of tools, or not."""
    return _checksum(_text([message for message in messages if message.get("role") != "system"]))


def _shown(messages: Sequence[Message]) -> str:
    return excerpt(_text(messages))


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(str(message.get("content", "")) for message in messages)


def excerpt(text: str) -> str:
    """Return a text for an error message, on one line."""
    return repr(cut_middle(text, SHOWN_CHARACTERS))
