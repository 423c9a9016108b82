"""A world that plays random schedules against the scheduler: slots, lagging servers, a learner, failures."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np

from roll_flash.config.sections.scheduler import SchedulerConfig
from roll_flash.scheduling.scheduler import Scheduler
from roll_flash.stream import finished_episode
from roll_flash.types import EpisodeFailure, EpisodeSpec, FinishedEpisode, SamplingParams, Task, Trajectory


def trajectory(episode: EpisodeSpec, versions: list[int], reward: float = 0.0) -> FinishedEpisode:
    return finished_episode(whole_trajectory(episode, versions, reward))


def whole_trajectory(episode: EpisodeSpec, versions: list[int], reward: float = 0.0) -> Trajectory:
    count = len(versions)
    return Trajectory(
        episode_id=episode.episode_id,
        group_id=episode.group_id,
        task=episode.task,
        token_ids=np.arange(count + 1, dtype=np.int32),
        policy_mask=np.array([False] + [True] * count),
        logprobs=np.zeros(count + 1, np.float32),
        versions=np.array([-1, *versions], np.int32),
        turns=(),
        messages=(),
        reward=reward,
        success=None,
        end="terminated",
        prompt_length=1,
        started_s=0.0,
        finished_s=1.0,
    )


def failure(episode: EpisodeSpec) -> EpisodeFailure:
    return EpisodeFailure(episode.episode_id, episode.group_id, episode.task, "env_error", "boom", 0, episode.attempt)


def make_scheduler(**changes: Any) -> Scheduler:
    retries = changes.pop("retries", 0)
    config = SchedulerConfig(**{"group_size": 2, "groups_per_step": 2, **changes})
    return Scheduler(config, max_turns=4, sampling=SamplingParams(), retries=retries)


def admit_all(scheduler: Scheduler, first_seed: int = 0) -> int:
    count = scheduler.room()
    for index in range(count):
        scheduler.admit(Task(f"t{first_seed + index}", "Env-v0", first_seed + index))
    return count


class World:
    """Plays a random schedule against a scheduler: slots, servers that lag behind, a learner, failures."""

    def __init__(self, seed: int, **changes: Any) -> None:
        self.random = random.Random(seed)
        self.alpha = changes.get("async_ratio", 1.0)
        self.scheduler = make_scheduler(**changes)
        self.replicate = changes.get("replicate", True)
        self.replicas = changes.get("group_size", 2) + changes.get("extra_replicas", 0)
        self.slots = self.random.randint(1 if self.replicate else self.replicas, 12)
        self.failure_rate = self.random.choice([0.0, 0.1, 0.5])
        self.turn_rate = 0.5
        self.play_in_order = False
        self.moves_alpha = False
        self.running: dict[str, tuple[EpisodeSpec, list[int]]] = {}
        self.outcomes: Counter[str] = Counter()
        self.trained: list[tuple[int, Any]] = []
        self.step_sizes: Counter[int] = Counter()
        self.seeds = 0

    def fill(self) -> None:
        while self.scheduler.room() and self.scheduler.admit_requeued() is not None:
            pass
        self.seeds += admit_all(self.scheduler, self.seeds)
        for episode in self.scheduler.next_episodes(self.slots - len(self.scheduler.running)):
            assert episode.episode_id not in self.running
            self.outcomes["started"] += 1
            self.running[episode.episode_id] = (episode, [self.scheduler.server_version])
        assert len(self.running) == len(self.scheduler.running) <= self.slots
        unit = 1 if self.replicate else self.replicas
        idle = self.slots - len(self.scheduler.running)
        assert idle < unit or self.scheduler.startable == 0, "a slot is idle while work is queued"

    def play_one(self) -> None:
        names = list(self.running)
        episode, versions = self.running[names[0] if self.play_in_order else self.random.choice(names)]
        if self.random.random() < self.turn_rate:
            versions.append(self.scheduler.server_version)
            return
        del self.running[episode.episode_id]
        failed = self.random.random() < self.failure_rate
        self.outcomes["failed" if failed else "ended"] += 1
        self.scheduler.finished(failure(episode) if failed else self.trajectory(episode, versions))
        self.cancel()

    def trajectory(self, episode: EpisodeSpec, versions: list[int]) -> FinishedEpisode:
        return trajectory(episode, versions, reward=self.random.choice([0.0, 1.0]))

    def train_if_ready(self) -> None:
        taken = self.scheduler.take_ready()
        self.trained += [(self.scheduler.learner_version, group) for group in taken]
        self.step_sizes[self.scheduler.learner_version] += len(taken)
        self.cancel()
        if self.scheduler.groups_wanted() > 0:
            return
        self.scheduler.version_advanced(self.scheduler.learner_version + 1)
        self.cancel()

    def cancel(self) -> None:
        """Cancelled episodes stop, but for some the news comes too late."""
        for episode_id in self.scheduler.take_cancelled():
            episode, versions = self.running.pop(episode_id)
            self.outcomes["cancelled"] += 1
            if self.random.random() < 0.3:
                self.scheduler.finished(trajectory(episode, versions))

    def publish(self) -> None:
        if self.scheduler.server_version < self.scheduler.learner_version:
            self.scheduler.published(
                self.random.randint(self.scheduler.server_version + 1, self.scheduler.learner_version)
            )

    def run(self, events: int) -> None:
        for _ in range(events):
            self.fill()
            if self.moves_alpha and self.random.random() < 0.05:
                self.scheduler.set_async_ratio(self.random.choice([0.0, 1.0, self.alpha]))
            if self.running:
                self.play_one()
            self.train_if_ready()
            if not self.running or self.random.random() < 0.3:
                self.publish()
