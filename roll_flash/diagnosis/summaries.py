"""Makes the `Episode` of a rule: from a line of the log, or from what the driver knows of a finished episode.

What models and environments wrote is only hashed, counted and cut, in time linear in its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from roll_flash.diagnosis.run_view import Episode, Texts
from roll_flash.scheduling.tasks import level_name
from roll_flash.types import FinishedGroup, Task

ANSWER_CHARACTERS = 200
LONG_TEXT = 200
"""Characters from which a text can be said to repeat itself."""
READ_CHARACTERS = 4096
"""Characters of a text that are looked at for repetition."""
WINDOW = 16
"""Characters that must be the same to count as a repetition: longer than usual words."""
_BLANKS = re.compile(r"\s++")


class LoggedTurn(msgspec.Struct):
    """The columns of a turn that are read (`roll_flash.monitor.episodes`)."""

    action: str = ""
    observation: str = ""
    finish_reason: str = ""
    generate_s: float = 0.0


class LoggedEpisode(msgspec.Struct):
    """The columns of an episode that are read; msgspec skips all others, such as the tokens."""

    kind: str
    step: int = 0
    task_id: str = ""
    env_id: str = ""
    seed: int = 0
    env_kwargs: dict[str, Any] = {}
    reward: float | None = None
    success: bool | None = None
    cause: str | None = None
    started_s: float | None = None
    finished_s: float | None = None
    turns: list[LoggedTurn] = []


def of_line(record: LoggedEpisode) -> Episode:
    """Summarize an episode of the log."""
    task = Task(record.task_id, record.env_id, record.seed, record.env_kwargs)
    return Episode(
        step=record.step,
        level=level_name(task),
        task_id=record.task_id,
        reward=record.reward,
        success=record.success,
        cause=record.cause,
        seconds=max(0.0, (record.finished_s or 0.0) - (record.started_s or 0.0)),
        texts=_texts(record) if record.kind == "trajectory" else None,
    )


def of_groups(step: int, groups: Iterable[FinishedGroup]) -> list[Episode]:
    """Summarize the episodes of the groups of a step, without their texts. `step`: version at its start."""
    found = []
    for group in groups:
        level = level_name(group.task)
        found += [
            Episode(step, level, each.task.task_id, each.reward, each.success, None, each.finished_s - each.started_s)
            for each in group.trajectories
        ]
        found += [Episode(step, level, each.task.task_id, None, None, each.cause, 0.0) for each in group.failures]
    return found


def _texts(record: LoggedEpisode) -> Texts:
    turns = record.turns
    longest = max((turn.action for turn in turns), key=len, default="")
    return Texts(
        is_cut=any(turn.finish_reason == "length" for turn in turns),
        generate_s=sum(turn.generate_s for turn in turns),
        answer=turns[-1].action[:ANSWER_CHARACTERS] if turns else "",
        repeated=repeated_share(longest),
        answers=_answers(record.task_id, turns),
    )


def repeated_share(text: str) -> float:
    """Return the share of places in the beginning of a text whose next WINDOW characters were there before; 0 for a
    short text."""
    text = _BLANKS.sub(" ", text[:READ_CHARACTERS])
    if len(text) < LONG_TEXT:
        return 0.0
    places = len(text) - WINDOW + 1
    return 1 - len({text[place : place + WINDOW] for place in range(places)}) / places


def _answers(task_id: str, turns: Sequence[LoggedTurn]) -> tuple[tuple[int, int], ...]:
    """See `Texts.answers`; the last turn has no answer."""
    said = blake2b(task_id.encode("utf-8", "replace"), digest_size=8)
    found = []
    for turn in turns[:-1]:
        said.update(_part(turn.action))
        found.append((_number(said.digest()), _number(blake2b(_part(turn.observation), digest_size=8).digest())))
        said.update(_part(turn.observation))
    return tuple(found)


def _part(text: str) -> bytes:
    encoded = text.encode("utf-8", "replace")
    return b"%d:" % len(encoded) + encoded


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "big")
