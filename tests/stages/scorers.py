"""Stages as a user writes them: good ones and bad ones."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import roll_flash
from roll_flash.types import Trajectory


class Letters:
    """The share of `letter` in what the model wrote."""

    def __init__(self, letter: str = "a") -> None:
        self._letter = letter

    async def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        texts = ["".join(turn.action for turn in trajectory.turns) for trajectory in trajectories]
        return [text.count(self._letter) / max(1, len(text)) for text in texts]


@roll_flash.stage
def share_of(trajectories: Sequence[Trajectory], *, letter: str) -> list[float]:
    texts = ["".join(turn.action for turn in trajectory.turns) for trajectory in trajectories]
    return [text.count(letter) / max(1, len(text)) for text in texts]


@roll_flash.stage
async def share_of_async(trajectories: Sequence[Trajectory], letter: str = "b", *_: object) -> list[float]:
    scores: list[float] = await Letters(letter).score(trajectories)
    return scores


class Misbehaving:
    """Does `how` with every trajectory whose id ends with one of `victims`, and gives 1 to the others."""

    def __init__(self, how: str, victims: Sequence[str] = ("0",)) -> None:
        self._how = how
        self._victims = tuple(victims)

    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        if not any(trajectory.episode_id.endswith(self._victims) for trajectory in trajectories):
            return [1.0] * len(trajectories)
        match self._how:
            case "raise":
                raise RuntimeError("the service is down")
            case "await what was cancelled":
                raise asyncio.CancelledError
            case "hang":
                time.sleep(30)
            case "nan":
                return [float("nan")] * len(trajectories)
            case "huge":
                return [1e39] * len(trajectories)
            case "short":
                return []
            case "text":
                return ["good"] * len(trajectories)  # type: ignore[list-item]
        return [0.0]


class Together:
    """Answers when so many calls are there."""

    def __init__(self, calls: int) -> None:
        self._calls = asyncio.Barrier(calls)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        await self._calls.wait()
        return [0.5] * len(trajectories)


class InThreads:
    """Remembers on which threads it was called."""

    names: list[str] = []  # noqa: RUF012

    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        self.names.append(threading.current_thread().name)
        return [0.5] * len(trajectories)


class Closing:
    """Plain `start` and `close`; `close` raises if it is `broken`."""

    closed: list[str] = []  # noqa: RUF012

    def __init__(self, name: str, broken: bool = False) -> None:
        self._name = name
        self._broken = broken
        self._has_started = False

    def start(self) -> None:
        self._has_started = True

    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        return [float(self._has_started)] * len(trajectories)

    def close(self) -> None:
        self.closed.append(self._name)
        if self._broken:
            raise RuntimeError("the connection is gone")


class NeverStarts(Letters):
    def start(self) -> None:
        time.sleep(30)


class NoScore:
    pass
