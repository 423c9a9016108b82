"""The scheduler under random schedules: nothing lost, nothing mixed, nothing trained that is too old."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_flash.rollout.scheduler import Scheduler
from roll_flash.rollout.scheduling_policy import SchedulingPolicy, has_signal
from roll_flash.rollout.staleness import StalenessRule
from roll_flash.types import EpisodeFailure, EpisodeSpec, SamplingParams, Task, Trajectory


def trajectory(episode: EpisodeSpec, versions: list[int], reward: float = 0.0) -> Trajectory:
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
    rule = StalenessRule(changes.pop("async_ratio", 1.0), changes.pop("groups_per_step", 2), changes.pop("extra", 0))
    policy = SchedulingPolicy(**{"group_size": 2, **changes})
    return Scheduler(rule, policy, max_turns=4, sampling=SamplingParams())


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
        self.running: dict[str, tuple[EpisodeSpec, list[int]]] = {}
        self.outcomes: Counter[str] = Counter()
        self.trained: list[tuple[int, Any]] = []
        self.seeds = 0

    def fill(self) -> None:
        self.seeds += admit_all(self.scheduler, self.seeds)
        for episode in self.scheduler.next_episodes(self.slots - self.scheduler.running):
            assert episode.episode_id not in self.running
            self.running[episode.episode_id] = (episode, [self.scheduler.server_version])
        assert len(self.running) == self.scheduler.running <= self.slots
        unit = 1 if self.replicate else self.replicas
        idle = self.slots - self.scheduler.running
        assert idle < unit or self.scheduler.startable == 0, "a slot is idle while work is queued"

    def play_one(self) -> None:
        episode, versions = self.running[self.random.choice(sorted(self.running))]
        if self.random.random() < 0.5:
            versions.append(self.scheduler.server_version)
            return
        del self.running[episode.episode_id]
        failed = self.random.random() < self.failure_rate
        self.outcomes["failed" if failed else "ended"] += 1
        self.scheduler.finished(failure(episode) if failed else self.trajectory(episode, versions))
        self.cancel()

    def trajectory(self, episode: EpisodeSpec, versions: list[int]) -> Trajectory:
        return trajectory(episode, versions, reward=self.random.choice([0.0, 1.0]))

    def train_if_ready(self) -> None:
        self.trained += [(self.scheduler.learner_version, group) for group in self.scheduler.take_ready()]
        self.cancel()
        if self.scheduler.groups_wanted() > 0:
            return
        self.scheduler.version_advanced(self.scheduler.learner_version + 1)
        self.cancel()

    def cancel(self) -> None:
        for episode_id in self.scheduler.take_cancelled():
            del self.running[episode_id]
            self.outcomes["cancelled"] += 1

    def publish(self) -> None:
        if self.scheduler.server_version < self.scheduler.learner_version:
            self.scheduler.published(
                self.random.randint(self.scheduler.server_version + 1, self.scheduler.learner_version)
            )

    def run(self, events: int) -> None:
        for _ in range(events):
            self.fill()
            if self.running:
                self.play_one()
            self.train_if_ready()
            if not self.running or self.random.random() < 0.3:
                self.publish()


settings_strategy = {
    "seed": st.integers(0, 10**6),
    "async_ratio": st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 4.0]),
    "groups_per_step": st.integers(1, 4),
    "group_size": st.integers(2, 4),
    "extra": st.integers(0, 3),
    "retries": st.integers(0, 2),
    "on_stale": st.sampled_from(["evict", "requeue", "wait"]),
    "mode": st.sampled_from(["queue", "queue", "batch"]),
    "replicate": st.booleans(),
    "extra_replicas": st.integers(0, 2),
    "surplus": st.sampled_from(["keep", "cancel"]),
    "on_failure": st.sampled_from(["smaller", "refill"]),
    "group_filter": st.sampled_from([None, has_signal]),
}


@given(**settings_strategy)
def test_no_token_is_trained_beyond_the_asynchronous_ratio(seed: int, **changes: Any) -> None:
    world = World(seed, **changes)
    world.run(400)
    for version, group in world.trained:
        assert group.oldest_version >= version - world.alpha


@given(**settings_strategy)
def test_every_episode_ends_once_and_the_books_balance(seed: int, **changes: Any) -> None:
    world = World(seed, **changes)
    world.run(400)
    scheduler = world.scheduler
    books = scheduler.trajectories
    assert books["produced"] == world.outcomes["ended"]
    dropped = sum(count for name, count in books.items() if name.startswith("dropped_"))
    assert books["produced"] == books["trained"] + dropped + scheduler.waiting_trajectories()
    assert sum(scheduler.failures.values()) == world.outcomes["failed"]
    held = len(scheduler.unfinished_tasks()) - len(scheduler.requeued_tasks)
    assert scheduler.admitted == scheduler.trained_groups + sum(scheduler.dropped_groups.values()) + held


@given(**settings_strategy)
def test_groups_hold_replicas_of_their_own_task_only(seed: int, **changes: Any) -> None:
    world = World(seed, **changes)
    world.run(300)
    seen: set[str] = set()
    for _, group in world.trained:
        assert {t.task for t in group.trajectories} == {group.task}
        assert len({t.episode_id for t in group.trajectories}) == len(group.trajectories) >= 2
        assert group.group_id not in seen
        seen.add(group.group_id)


@given(**{**settings_strategy, "seed": st.integers(0, 10**6)})
def test_the_learner_always_gets_another_step(seed: int, **changes: Any) -> None:
    """No deadlock: as long as some episodes succeed, versions advance."""
    world = World(seed, **changes)
    world.failure_rate = min(world.failure_rate, 0.1)
    events = 0
    while world.scheduler.learner_version < 5:
        world.run(50)
        events += 50
        assert events < 20_000, "no step finished"


@given(st.integers(0, 10**6))
def test_the_same_inputs_give_the_same_decisions(seed: int) -> None:
    first, second = World(seed), World(seed)
    first.run(200)
    second.run(200)
    assert [(v, g.group_id) for v, g in first.trained] == [(v, g.group_id) for v, g in second.trained]


def test_replicas_are_scheduled_on_their_own_and_a_free_slot_takes_the_next() -> None:
    scheduler = make_scheduler(group_size=3, groups_per_step=2, async_ratio=0.0)
    admit_all(scheduler)
    started = scheduler.next_episodes(4)
    assert [episode.episode_id for episode in started] == [
        "g00000000-r0", "g00000000-r1", "g00000000-r2", "g00000001-r0",
    ]  # fmt: skip
    assert scheduler.next_episodes(0) == []
    scheduler.finished(trajectory(started[3], [0]))
    assert [episode.episode_id for episode in scheduler.next_episodes(1)] == ["g00000001-r1"]


def test_groups_are_taken_in_the_order_they_complete() -> None:
    scheduler = make_scheduler(groups_per_step=2, async_ratio=0.0)
    admit_all(scheduler)
    first_a, first_b, second_a, second_b = scheduler.next_episodes(10)
    for episode in (second_a, second_b):
        scheduler.finished(trajectory(episode, [0]))
    assert [group.group_id for group in scheduler.take_ready()] == ["g00000001"]
    assert scheduler.groups_wanted() == 1
    for episode in (first_a, first_b):
        scheduler.finished(trajectory(episode, [0]))
    assert [group.group_id for group in scheduler.take_ready()] == ["g00000000"]
    assert scheduler.groups_wanted() == 0


def test_synchronous_training_starts_nothing_before_the_new_weights_are_served() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0)
    assert admit_all(scheduler) == 1
    for episode in scheduler.next_episodes(10):
        scheduler.finished(trajectory(episode, [0]))
    scheduler.take_ready()
    scheduler.version_advanced(1)
    assert scheduler.room() == 0
    scheduler.published(1)
    assert scheduler.room() == 1


def test_a_straggler_is_cancelled_as_soon_as_it_cannot_be_trained_in_time() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0, extra=1)
    admit_all(scheduler)
    fast_a, fast_b, slow_a, slow_b = scheduler.next_episodes(10)
    scheduler.finished(trajectory(fast_a, [0]))
    scheduler.finished(trajectory(fast_b, [0]))
    scheduler.finished(trajectory(slow_a, [0]))
    scheduler.take_ready()
    assert scheduler.take_cancelled() == [slow_b.episode_id], "the step is full: it need not finish first"
    assert [(group.reason, group.episodes_lost) for group in scheduler.take_dropped()] == [("stale", 1)]


def test_requeue_brings_the_task_of_a_stale_group_back() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0, extra=1, on_stale="requeue")
    admit_all(scheduler)
    fast_a, fast_b, slow_a, _ = scheduler.next_episodes(10)
    scheduler.finished(trajectory(fast_a, [0]))
    scheduler.finished(trajectory(fast_b, [0]))
    scheduler.take_ready()
    scheduler.version_advanced(1)
    assert list(scheduler.requeued_tasks) == [slow_a.task]


def test_wait_lets_no_step_finish_without_what_would_go_stale() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0, extra=1, on_stale="wait")
    admit_all(scheduler)
    fast_a, fast_b, slow_a, slow_b = scheduler.next_episodes(10)
    for episode in (fast_a, fast_b):
        scheduler.finished(trajectory(episode, [0]))
    scheduler.take_ready()
    assert scheduler.groups_wanted() == 1
    for episode in (slow_a, slow_b):
        scheduler.finished(trajectory(episode, [0]))
    scheduler.take_ready()
    assert scheduler.groups_wanted() == 0
    scheduler.version_advanced(1)
    assert (scheduler.take_cancelled(), scheduler.take_dropped()) == ([], [])


def test_a_failed_episode_is_started_again_and_then_its_group_goes_on_without_it() -> None:
    scheduler = make_scheduler(group_size=3, groups_per_step=1, async_ratio=0.0, retries=1)
    admit_all(scheduler)
    first, second, third = scheduler.next_episodes(10)
    scheduler.finished(failure(first))
    (again,) = scheduler.next_episodes(10)
    assert (again.episode_id, again.attempt) == (first.episode_id, 1)
    scheduler.finished(failure(again))
    scheduler.finished(trajectory(second, [0]))
    scheduler.finished(trajectory(third, [0]))
    (group,) = scheduler.take_ready()
    assert len(group.trajectories) == 2
    assert [item.cause for item in group.failures] == ["env_error"]
    assert scheduler.failures == {"env_error": 2}


def test_a_group_that_lost_too_many_members_is_dropped_and_replaced() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0)
    admit_all(scheduler)
    first, second = scheduler.next_episodes(10)
    scheduler.finished(failure(first))
    assert scheduler.room() == 0
    scheduler.finished(trajectory(second, [0]))
    (dropped,) = scheduler.take_dropped()
    assert dropped.reason == "too_few_trajectories"
    assert scheduler.room() == 1


def test_an_outcome_of_a_cancelled_episode_changes_nothing() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0, extra=1)
    admit_all(scheduler)
    fast_a, fast_b, slow_a, _ = scheduler.next_episodes(10)
    scheduler.finished(trajectory(fast_a, [0]))
    scheduler.finished(trajectory(fast_b, [0]))
    scheduler.take_ready()
    scheduler.version_advanced(1)
    before = Counter(scheduler.trajectories)
    scheduler.finished(trajectory(slow_a, [0]))
    assert scheduler.trajectories == before


def test_a_checkpoint_brings_back_every_task_that_was_not_trained() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=1.0)
    admit_all(scheduler)
    first_a, first_b, *_ = scheduler.next_episodes(2)
    scheduler.finished(trajectory(first_a, [0]))
    scheduler.finished(trajectory(first_b, [0]))
    assert [task.seed for task in scheduler.unfinished_tasks()] == [0, 1]
    scheduler.take_ready()
    assert [task.seed for task in scheduler.unfinished_tasks()] == [0, 1]
    scheduler.version_advanced(1)
    assert [task.seed for task in scheduler.unfinished_tasks()] == [1]


@pytest.mark.parametrize(
    ("alpha", "server", "learner", "groups"), [(0, 3, 3, 8), (1, 3, 3, 16), (1, 2, 3, 8), (0, 2, 3, 0), (0.5, 3, 3, 8)]
)
def test_only_what_can_still_be_trained_in_time_may_begin(alpha: float, server: int, learner: int, groups: int) -> None:
    assert StalenessRule(alpha, groups_per_step=8).startable(server, learner) == groups
