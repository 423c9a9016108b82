"""The built-in stage `judge`: a language model that grades what an episode said, behind any OpenAI-compatible API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from roll_flash.envs.rewards.judge import Judge
from roll_flash.types import Message, Trajectory


class JudgeStage:
    """Score 0 to 1. `judged`: the model's last message, or everything after the task.

    `reference` names a key of the episode's `info` that holds the right answer. What is left of the arguments is that
    of `roll_flash.envs.rewards.judge.Judge`: criteria, best, api_key_env, max_concurrent, attempts, timeout_s,
    max_new_tokens.
    """

    def __init__(
        self,
        endpoint: str,
        model: str,
        *,
        judged: Literal["answer", "conversation"] = "answer",
        reference: str | None = None,
        **judge: Any,
    ) -> None:
        if judged not in ("answer", "conversation"):
            raise ValueError(f"judged must be answer or conversation, not {judged!r}")
        self._judge = Judge(endpoint, model, **judge)
        self._judged = judged
        self._reference = reference

    async def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Raises EnvError if the endpoint does not answer or its model gives no score."""
        return list(await asyncio.gather(*(self._score(trajectory) for trajectory in trajectories)))

    async def close(self) -> None:
        await self._judge.close()

    async def _score(self, trajectory: Trajectory) -> float:
        question, answer = split_conversation(trajectory.messages)
        reference = None
        if self._reference is not None:
            # A task without its reference would be judged by another measure than the others.
            reference = str(trajectory.info[self._reference])
        said = _text(answer[-1:] if self._judged == "answer" else answer)
        return await self._judge.score(question=_text(question), answer=said, reference=reference)


def split_conversation(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """What came before the model's first message, and from there to its last one."""
    own = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not own:
        raise ValueError("there is no message of the model to judge")
    return list(messages[: own[0]]), list(messages[own[0] : own[-1] + 1])


def _text(messages: Sequence[Message]) -> str:
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"[{message['role']}] {message['content']}" for message in messages)
