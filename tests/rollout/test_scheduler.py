"""What the scheduler decides, one situation at a time."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import replace

import pytest
from scheduler_world import admit_all, failure, make_scheduler, trajectory

from roll_flash.scheduling.staleness import StalenessRule
from roll_flash.types import EpisodeSpec, Task


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
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0, extra_groups=1)
    admit_all(scheduler)
    fast_a, fast_b, slow_a, slow_b = scheduler.next_episodes(10)
    scheduler.finished(trajectory(fast_a, [0]))
    scheduler.finished(trajectory(fast_b, [0]))
    scheduler.finished(trajectory(slow_a, [0]))
    scheduler.take_ready()
    assert scheduler.take_cancelled() == [slow_b.episode_id], "the step is full: it need not finish first"
    assert [(group.reason, group.tokens_lost > 0) for group in scheduler.take_dropped()] == [("stale", True)]


def test_requeue_brings_the_task_of_a_stale_group_back() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0, extra_groups=1, on_stale="requeue")
    admit_all(scheduler)
    fast_a, fast_b, slow_a, _ = scheduler.next_episodes(10)
    scheduler.finished(trajectory(fast_a, [0]))
    scheduler.finished(trajectory(fast_b, [0]))
    scheduler.take_ready()
    scheduler.version_advanced(1)
    assert list(scheduler.requeued) == [(slow_a.task, 1)]


def test_wait_keeps_a_place_for_what_would_go_stale() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=2.0, on_stale="wait")
    admit_all(scheduler)
    begun = scheduler.next_episodes(10)
    for version in (1, 2):
        for episode in finish(begun, version - 1):
            scheduler.finished(trajectory(episode, [0]))
        assert len(scheduler.take_ready()) == 1, "a step takes what it is configured to take"
        scheduler.version_advanced(version)
        scheduler.published(version)
        admit_all(scheduler, 10 * version)
        begun += scheduler.next_episodes(10)
    for episode in finish(begun, 3):
        scheduler.finished(trajectory(episode, [1]))
    assert scheduler.take_ready() == [], "the straggler of version 0 has the last place that it can have"
    for episode in finish(begun, 2):
        scheduler.finished(trajectory(episode, [0]))
    assert [group.group_id for group in scheduler.take_ready()] == ["g00000002"]
    scheduler.version_advanced(3)
    assert (scheduler.take_cancelled(), scheduler.take_dropped()) == ([], [])


def test_with_extra_groups_wait_drops_the_redundant_ones_and_trains_steps_of_the_configured_size() -> None:
    scheduler = make_scheduler(groups_per_step=4, async_ratio=0.0, extra_groups=3, on_stale="wait")
    admit_all(scheduler)
    for episode in scheduler.next_episodes(100)[:-2]:
        scheduler.finished(trajectory(episode, [0]))
    assert (len(scheduler.take_ready()), scheduler.groups_wanted()) == (4, 0)
    assert [dropped.reason for dropped in scheduler.take_dropped()] == ["surplus"] * 3


def test_requeue_gives_a_task_up_after_its_limit_and_counts_it() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0, extra_groups=1, on_stale="requeue", max_requeues=2)
    plays = Counter[int]()
    for version in range(1, 12):
        while scheduler.room():
            if scheduler.admit_requeued() is None:
                admit_all(scheduler, 10 * (version - 1))
        for episode in scheduler.next_episodes(10):
            plays[episode.task.seed] += episode.replica == 0
            if episode.task.seed:  # task 0 never ends in time
                scheduler.finished(trajectory(episode, [version - 1]))
        assert len(scheduler.take_ready()) == 1
        scheduler.version_advanced(version)
        scheduler.published(version)
    assert plays[0] == 3, "once, and put back twice"
    assert scheduler.counts()["given_up"] == 1
    assert scheduler.counts()["requeued"] >= 2


def test_groups_that_all_lose_their_replicas_are_a_problem_with_a_name() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0, group_size=4, max_failures_in_a_row=5)
    for lost in range(5):
        assert scheduler.progress.problem is None, f"{lost} groups"
        admit_all(scheduler, lost)
        first, *others = scheduler.next_episodes(10)
        scheduler.finished(trajectory(first, [0]))  # so that episodes never fail in a row for long
        for episode in others:
            scheduler.finished(failure(episode))
    assert str(scheduler.progress.problem).startswith(
        "the last 5 groups could not be trained (env_error 15); mend what fails"
    )


def test_steps_of_which_no_group_has_signal_are_counted_and_then_a_problem() -> None:
    scheduler = make_scheduler(
        groups_per_step=1,
        async_ratio=0.0,
        drop_groups_without_signal=True,
        max_steps_without_signal=3,
    )
    for version in range(1, 4):
        assert scheduler.progress.problem is None
        while not scheduler.ready:
            admit_all(scheduler)
            for episode in scheduler.next_episodes(10):
                scheduler.finished(trajectory(episode, [version - 1], reward=1.0))
        scheduler.take_ready()
        scheduler.version_advanced(version)
        scheduler.published(version)
        assert scheduler.progress.steps_without_signal == version
    assert str(scheduler.progress.problem).startswith(
        "no group of the last 3 steps had replicas with different rewards"
    )
    assert scheduler.counts()["unfiltered"] == 3


def test_lowering_alpha_inside_a_wave_does_not_lock_batch_scheduling_up() -> None:
    scheduler = make_scheduler(groups_per_step=2, async_ratio=1.0, mode="batch")
    admit_all(scheduler)
    for episode in scheduler.next_episodes(100):
        scheduler.finished(trajectory(episode, [0]))
    begun = scheduler.next_episodes(2)  # one group of the second wave has begun, the other has no slot yet
    scheduler.set_async_ratio(0)
    assert len(scheduler.take_ready()) == 2
    scheduler.version_advanced(1)
    for episode in begun:
        scheduler.finished(trajectory(episode, [0]))
    assert len(scheduler.take_ready()) == 1, "the wave waits for no group that may not begin"


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
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0, extra_groups=1)
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
    assert [group.task.seed for group in scheduler.unfinished_groups()] == [0, 1]
    scheduler.take_ready()
    assert [group.task.seed for group in scheduler.unfinished_groups()] == [0, 1]
    scheduler.version_advanced(1)
    assert [group.task.seed for group in scheduler.unfinished_groups()] == [1]


@pytest.mark.parametrize(
    ("alpha", "server", "learner", "groups"), [(0, 3, 3, 8), (1, 3, 3, 16), (1, 2, 3, 8), (0, 2, 3, 0), (0.5, 3, 3, 8)]
)
def test_only_what_can_still_be_trained_in_time_may_begin(alpha: float, server: int, learner: int, groups: int) -> None:
    assert StalenessRule(alpha, groups_per_step=8).startable(server, learner) == groups


def finish(scheduler_episodes: list[EpisodeSpec], group: int) -> list[EpisodeSpec]:
    return [episode for episode in scheduler_episodes if episode.group_id == f"g{group:08d}"]


def test_batch_scheduling_hands_nothing_out_before_the_whole_batch_is_done() -> None:
    scheduler = make_scheduler(groups_per_step=2, async_ratio=1.0, mode="batch")
    admit_all(scheduler)
    wave = scheduler.next_episodes(100)
    assert {episode.group_id for episode in wave} == {"g00000000", "g00000001"}, "the next batch has not begun"
    for episode in wave[:3]:
        scheduler.finished(trajectory(episode, [0]))
    assert (scheduler.take_ready(), scheduler.next_episodes(100)) == ([], [])
    scheduler.finished(trajectory(wave[3], [0]))
    assert len(scheduler.take_ready()) == 2
    assert {episode.group_id for episode in scheduler.next_episodes(100)} == {"g00000002", "g00000003"}


def test_without_replication_a_group_starts_as_one_unit_or_not_at_all() -> None:
    scheduler = make_scheduler(group_size=3, groups_per_step=2, async_ratio=0.0, replicate=False)
    admit_all(scheduler)
    assert len(scheduler.next_episodes(5)) == 3
    assert scheduler.next_episodes(2) == []
    assert len(scheduler.next_episodes(3)) == 3


def test_a_group_is_complete_with_the_first_replicas_and_the_surplus_is_cancelled() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0, extra_replicas=1, surplus="cancel")
    admit_all(scheduler)
    first, second, third = scheduler.next_episodes(10)
    scheduler.finished(trajectory(third, [0]))
    scheduler.finished(trajectory(first, [0]))
    assert scheduler.take_cancelled() == [second.episode_id]
    (group,) = scheduler.take_ready()
    assert [t.episode_id for t in group.trajectories] == [third.episode_id, first.episode_id]


def test_a_kept_surplus_replica_joins_its_group_if_it_comes_before_the_learner() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0, extra_replicas=2, surplus="keep")
    admit_all(scheduler)
    first, second, third, fourth = scheduler.next_episodes(10)
    for episode in (first, second, third):
        scheduler.finished(trajectory(episode, [0]))
    (group,) = scheduler.take_ready()
    assert len(group.trajectories) == 3
    assert scheduler.take_cancelled() == [fourth.episode_id]


def test_surplus_groups_are_cancelled_when_the_step_has_enough() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=1.0, extra_groups=1, surplus="cancel")
    admit_all(scheduler)
    started = scheduler.next_episodes(10)
    for episode in finish(started, 1):
        scheduler.finished(trajectory(episode, [0]))
    scheduler.take_ready()
    assert scheduler.take_cancelled() == [episode.episode_id for episode in finish(started, 0)], "one place is left"


def test_a_lost_member_is_refilled_but_not_for_ever() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0, on_failure="refill")
    admit_all(scheduler)
    running = scheduler.next_episodes(10)
    scheduler.finished(trajectory(running[0], [0]))
    episode, attempts = running[1], 1
    while True:
        scheduler.finished(failure(episode))
        if not (again := scheduler.next_episodes(10)):
            break
        (episode,), attempts = again, attempts + 1
    assert attempts == 3, "the replica and as many new ones as the group has members"
    assert [dropped.reason for dropped in scheduler.take_dropped()] == ["too_few_trajectories"]


def test_groups_without_signal_are_replaced_but_a_step_always_ends() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=0.0, drop_groups_without_signal=True)
    for _ in range(5):
        admit_all(scheduler)
        for episode in scheduler.next_episodes(10):
            scheduler.finished(trajectory(episode, [0], reward=1.0))
    assert scheduler.dropped_groups == {"no_signal": 4}
    assert len(scheduler.take_ready()) == 1


def test_a_fraction_of_alpha_queues_tasks_that_may_not_begin_yet() -> None:
    scheduler = make_scheduler(groups_per_step=2, async_ratio=1.5)
    assert admit_all(scheduler) == 5
    assert len(scheduler.next_episodes(100)) == 2 * 4
    assert (scheduler.queued, scheduler.startable) == (2, 0)


def test_lowering_alpha_throws_nothing_away() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=1.0)
    admit_all(scheduler)
    started = scheduler.next_episodes(10)
    scheduler.set_async_ratio(0)
    for episode in finish(started, 0):
        scheduler.finished(trajectory(episode, [0]))
    scheduler.take_ready()
    scheduler.version_advanced(1)
    assert (scheduler.take_cancelled(), scheduler.room()) == ([], 0)
    for episode in finish(started, 1):
        scheduler.finished(trajectory(episode, [0]))
    assert len(scheduler.take_ready()) == 1


def test_a_group_may_have_one_replica() -> None:
    scheduler = make_scheduler(group_size=1, groups_per_step=2, async_ratio=0.0)
    admit_all(scheduler)
    for episode in scheduler.next_episodes(10):
        scheduler.finished(trajectory(episode, [0]))
    assert [len(group.trajectories) for group in scheduler.take_ready()] == [1, 1]
    assert not scheduler.dropped_groups


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"group_size": 0}, "group_size"),
        ({"async_ratio": -1.0}, "async_ratio"),
        ({"async_ratio": float("nan")}, "async_ratio"),
        ({"groups_per_step": 0}, "groups_per_step"),
        ({"extra_replicas": -1}, "extra_replicas"),
        ({"in_order": True, "extra_replicas": 1}, "in_order"),
        ({"in_order": True, "extra_groups": 1}, "in_order"),
    ],
)
def test_policies_that_make_no_sense_are_refused(changes: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_scheduler(**changes)


def cpu_s_per_event(running: int) -> float:
    scheduler = make_scheduler(group_size=4, groups_per_step=running // 8, async_ratio=1.0)
    started, events = deque[EpisodeSpec](), 0
    began_s = time.process_time()
    while scheduler.learner_version < 2:
        admit_all(scheduler)
        started.extend(scheduler.next_episodes(running - len(scheduler.running)))
        episode = started.popleft()
        scheduler.finished(trajectory(episode, [scheduler.server_version]))
        scheduler.take_ready()
        events += 1
        if scheduler.groups_wanted() == 0:
            scheduler.version_advanced(scheduler.learner_version + 1)
            scheduler.published(scheduler.learner_version)
    return (time.process_time() - began_s) / events


def test_an_event_costs_the_same_however_many_episodes_run() -> None:
    assert cpu_s_per_event(40_000) < 5 * cpu_s_per_event(800)


def test_a_batch_holds_no_group_that_may_not_begin_yet() -> None:
    scheduler = make_scheduler(groups_per_step=2, async_ratio=0.5, mode="batch", drop_groups_without_signal=True)
    admit_all(scheduler)
    wave = scheduler.next_episodes(100)
    for episode, reward in zip(wave, [0.0, 1.0, 1.0, 1.0], strict=True):
        scheduler.finished(trajectory(episode, [0], reward=reward))
    assert len(scheduler.take_ready()) == 1, "the other had no signal"
    admit_all(scheduler, 10)
    again = scheduler.next_episodes(100)
    assert len({episode.group_id for episode in again}) == 1
    for reward, episode in enumerate(again):
        scheduler.finished(trajectory(episode, [0], reward=float(reward)))
    assert len(scheduler.take_ready()) == 1
    assert scheduler.groups_wanted() == 0


def test_a_restored_group_gives_no_replica_an_id_that_it_had() -> None:
    scheduler = make_scheduler(groups_per_step=1, async_ratio=1.0, on_failure="refill", retries=0)
    spec = make_scheduler()
    admit_all(spec)
    first = spec.next_episodes(1)[0]
    refilled = trajectory(replace(first, episode_id="g00000000-r2"), [0])
    scheduler.restore_group(0, Task("t0", "Env-v0", 0), 0, [refilled])
    started = scheduler.next_episodes(10)
    assert [episode.episode_id for episode in started] == ["g00000000-r0", "g00000000-r1"]
    scheduler.finished(failure(started[0]))
    assert [episode.episode_id for episode in scheduler.next_episodes(10)] == ["g00000000-r3"]
