"""Task source `fork_points`: states within a run's episodes, from which episodes of another run begin.

A group whose replicas earned different rewards has states from which the model sometimes succeeds. Each turn but the
first of its episodes is such a state. All replicas of a new group begin there: the turns before are played again in a
fresh environment and are context, which is never trained (`Task.prefix`).
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from roll_flash.checked_files import decode
from roll_flash.config.tree import EnvConfig
from roll_flash.errors import ConfigError, RunError
from roll_flash.monitor.episode_files.steps import open_step, open_steps, removed_line
from roll_flash.monitor.json_lines import is_intact
from roll_flash.rollout.episodes.prefix import Prefix
from roll_flash.run.origin import require_own
from roll_flash.run.run_dir import find_run
from roll_flash.scheduling.tasks import FIRST_HELD_OUT_SEED, SeedTasks, ShuffledTasks
from roll_flash.types import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The state before turn `turn` of an episode, whose line in the log begins at byte `offset`."""

    log: Path
    offset: int
    episode_id: str
    turn: int


class _Turn(msgspec.Struct):
    in_prefix: bool = False


class _Episode(msgspec.Struct):
    """What is read of a line to find fork points."""

    kind: str
    episode_id: str
    group_id: str
    env_id: str
    reward: float | None
    turns: list[_Turn]


class ForkPoints(ShuffledTasks):
    """The fork points of a run in one environment, each once in an order shuffled by the seed, then again. The held-out
    tasks are the environment's own, from their beginning.

    Raises ConfigError if the run has none.
    """

    def __init__(
        self, env: EnvConfig, run: str, *, trust: bool = False, held_out_from: int = FIRST_HELD_OUT_SEED
    ) -> None:
        self._env = env
        self._run = find_run(run)
        require_own(self._run, trusted=trust)
        self._points = find_fork_points(self._run / "episodes", env.id, env.max_turns)
        if not self._points:
            raise ConfigError(
                f"{self._run} has no fork points: no group of {env.id} with different rewards has an episode of two "
                "turns or more"
            )
        self._own = SeedTasks(env.id, env.kwargs, env.train_seeds, max_turns=env.max_turns, held_out_from=held_out_from)
        super().__init__(len(self._points))

    def task(self, index: int) -> Task:
        point = self._points[index]
        with open_step(point.log) as log:
            log.seek(point.offset)
            line = log.readline()
        record = decode(line, dict[str, Any]) if is_intact(line) else {}
        if record.get("episode_id") != point.episode_id:
            raise RunError(f"{point.log}: changed while its fork points are in use; leave {self._run} as it is")
        return Task(
            f"{record['task_id']}@{point.episode_id}:{point.turn}",
            record["env_id"],
            record["seed"],
            record["env_kwargs"],
            max_turns=self._env.max_turns,
            level=f"{record['env_id']}:fork_points",
            prefix=Prefix.of_record(record, point.turn).encode(),
        )

    def held_out(self, count: int) -> Sequence[Task]:
        return self._own.held_out(count)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "fork_points": len(self._points)}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["fork_points"] != len(self._points):
            gone = removed_line(self._run / "episodes")
            raise ValueError(
                f"{self._run} had {state['fork_points']} fork points and has {len(self._points)} now; it must stay as "
                f"it is{gone and '; '}{gone}"
            )
        super().restore(state)


@functools.lru_cache(maxsize=8)
def find_fork_points(episodes: Path, env_id: str, max_turns: int) -> tuple[ForkPoint, ...]:
    """Return the fork points of an episode log in the order of its lines. Those that leave no turn of `max_turns`, and
    turns that were played from a recording, are left out. The result is kept: each check of a start asks for it."""
    groups: defaultdict[str, dict[str, tuple[Path, int, _Episode]]] = defaultdict(dict)
    for log, offset, episode in _trajectories(episodes):
        if episode.env_id == env_id:
            groups[episode.group_id][episode.episode_id] = (log, offset, episode)  # of two the last one counts
    return tuple(
        ForkPoint(log, offset, episode.episode_id, turn)
        for members in groups.values()
        if len({episode.reward for _, _, episode in members.values()}) > 1
        for log, offset, episode in members.values()
        for turn in range(1 + sum(turn.in_prefix for turn in episode.turns), min(len(episode.turns), max_turns))
    )


def _trajectories(episodes: Path) -> Iterator[tuple[Path, int, _Episode]]:
    damaged = 0
    for log, lines in open_steps(episodes):
        offset = 0
        for line in lines:
            try:
                episode = decode(line, _Episode)
                if episode.kind == "trajectory":
                    yield log, offset, episode
            except ValueError:
                damaged += 1
            offset += len(line)
    if damaged:
        logger.warning("%s: %d damaged lines are left out of its fork points", episodes, damaged)
