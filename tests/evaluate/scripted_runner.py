"""A named stand-in for the rollout room: outcomes by script, so that every figure of an evaluation is known."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from roll_flash.types import EpisodeFailure, EpisodeSpec, FailureCause, Trajectory, Turn

Script = Callable[[EpisodeSpec], bool | FailureCause | None]
"""True, False or None for an episode that ended with that success; a cause for one that failed."""


def trajectory_of(spec: EpisodeSpec, success: bool | None) -> Trajectory:
    return Trajectory(
        episode_id=spec.episode_id,
        group_id=spec.group_id,
        task=spec.task,
        token_ids=np.arange(5, dtype=np.int32),
        policy_mask=np.array([0, 0, 1, 1, 1], np.bool_),
        logprobs=np.zeros(5, np.float32),
        versions=np.array([-1, -1, 0, 0, 0], np.int32),
        turns=(Turn(2, 5, "42", "", float(bool(success)), "stop", 0.1, 0.1),),
        messages=({"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "42"}),
        reward=float(bool(success)),
        success=success,
        end="terminated",
        prompt_length=2,
        started_s=0.0,
        finished_s=1.0,
    )


class ScriptedRunner:
    """Yields in reverse order, as real episodes finish in any. `stop_after` raises KeyboardInterrupt, like Ctrl-C."""

    def __init__(self, script: Script, stop_after: int | None = None) -> None:
        self.script = script
        self.stop_after = stop_after
        self.ran: list[EpisodeSpec] = []
        self.closed = False

    async def run(
        self, episodes: Sequence[EpisodeSpec], *, max_concurrent: int
    ) -> AsyncIterator[Trajectory | EpisodeFailure]:
        try:
            for number, spec in enumerate(reversed(episodes)):
                if number == self.stop_after:
                    raise KeyboardInterrupt
                self.ran.append(spec)
                outcome = self.script(spec)
                if isinstance(outcome, str):
                    yield EpisodeFailure(spec.episode_id, spec.group_id, spec.task, outcome, "broke", 0, 0)
                else:
                    yield trajectory_of(spec, outcome)
        finally:
            self.closed = True
