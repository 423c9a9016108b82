"""The scheduler under random schedules: nothing lost, nothing mixed, nothing trained that is too old."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_world import World

settings_strategy = {
    "seed": st.integers(0, 10**6),
    "async_ratio": st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 4.0]),
    "groups_per_step": st.integers(1, 4),
    "group_size": st.integers(1, 4),
    "extra_groups": st.integers(0, 3),
    "retries": st.integers(0, 2),
    "on_stale": st.sampled_from(["evict", "requeue", "wait"]),
    "mode": st.sampled_from(["queue", "queue", "batch"]),
    "replicate": st.booleans(),
    "extra_replicas": st.integers(0, 2),
    "surplus": st.sampled_from(["keep", "cancel"]),
    "on_failure": st.sampled_from(["smaller", "refill"]),
    "drop_groups_without_signal": st.booleans(),
}


@settings(max_examples=400)
@given(**settings_strategy)
def test_no_token_is_trained_beyond_the_asynchronous_ratio(seed: int, **changes: Any) -> None:
    world = World(seed, **changes)
    world.run(400)
    for version, group in world.trained:
        assert min(t.oldest_version for t in group.trajectories) >= version - world.alpha


@settings(max_examples=400)
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
    ended = world.outcomes["ended"] + world.outcomes["failed"] + world.outcomes["cancelled"]
    assert world.outcomes["started"] == ended + len(scheduler.running)
    assert scheduler.cancelled_episodes == world.outcomes["cancelled"]
    held = len(scheduler.unfinished_groups())
    assert scheduler.admitted == scheduler.trained_groups + sum(scheduler.dropped_groups.values()) + held


@settings(max_examples=400)
@given(**settings_strategy)
def test_groups_hold_replicas_of_their_own_task_only(seed: int, **changes: Any) -> None:
    world = World(seed, **changes)
    world.run(300)
    seen: set[str] = set()
    for _, group in world.trained:
        assert {t.task for t in group.trajectories} == {group.task}
        fewest = min(2, changes["group_size"])
        assert len({t.episode_id for t in group.trajectories}) == len(group.trajectories) >= fewest
        assert group.group_id not in seen
        seen.add(group.group_id)


@settings(max_examples=200)
@given(moves_alpha=st.booleans(), in_order=st.booleans(), **settings_strategy)
def test_the_learner_always_gets_another_step(seed: int, moves_alpha: bool, in_order: bool, **changes: Any) -> None:
    """No deadlock: as long as some episodes succeed, versions advance, also while alpha is raised and lowered."""
    if in_order:
        changes |= {"extra_groups": 0, "extra_replicas": 0}
    world = World(seed, in_order=in_order, **changes)
    world.moves_alpha = moves_alpha
    world.failure_rate = min(world.failure_rate, 0.1)
    events = 0
    while world.scheduler.learner_version < 5:
        world.run(50)
        events += 50
        assert events < 20_000, "no step finished"


@settings(max_examples=200)
@given(moves_alpha=st.booleans(), **settings_strategy)
def test_every_step_has_the_configured_size_and_wait_loses_no_group(
    seed: int, moves_alpha: bool, **changes: Any
) -> None:
    world = World(seed, **changes)
    world.moves_alpha = moves_alpha
    world.run(400)
    for version in range(world.scheduler.learner_version):
        assert world.step_sizes[version] == changes["groups_per_step"]
    if changes["on_stale"] == "wait":
        assert world.scheduler.dropped_groups["stale"] == 0
        if not changes["extra_groups"] and changes["surplus"] == "keep":
            assert world.scheduler.dropped_groups["surplus"] == 0


@settings(max_examples=200)
@given(**settings_strategy)
def test_the_same_inputs_give_the_same_decisions(seed: int, **changes: Any) -> None:
    first, second = World(seed, **changes), World(seed, **changes)
    first.run(200)
    second.run(200)
    assert [(v, g.group_id) for v, g in first.trained] == [(v, g.group_id) for v, g in second.trained]


@settings(max_examples=300)
@given(
    seed=st.integers(0, 10**6),
    async_ratio=st.sampled_from([0.0, 1.0, 2.5, 4.0]),
    groups_per_step=st.integers(1, 4),
    on_stale=st.sampled_from(["evict", "requeue", "wait"]),
    mode=st.sampled_from(["queue", "batch"]),
)
def test_in_order_what_is_trained_is_what_was_submitted(seed: int, **changes: Any) -> None:
    world = World(seed, in_order=True, **changes)
    world.failure_rate = 0.0
    world.run(300)
    assert [group.task.seed for _, group in world.trained] == list(range(len(world.trained)))
    assert all(len(group.trajectories) == 2 for _, group in world.trained)
    metrics = world.scheduler.bias.metrics()
    assert (metrics["length_distance_high"], metrics["latency_distance_high"], metrics["task_distance"]) == (0, 0, 0)
    assert metrics["unfinished"] == 0


@settings(max_examples=300)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(2, 4), st.booleans())
def test_alpha_0_is_the_synchronous_loop(seed: int, groups: int, size: int, replicate: bool) -> None:
    """for each step: draw `groups` tasks, play `size` replicas of each with the newest weights, train them all."""
    world = World(seed, async_ratio=0.0, groups_per_step=groups, group_size=size, replicate=replicate)
    world.failure_rate = 0.0
    world.run(300)
    for index, (version, group) in enumerate(sorted(world.trained, key=lambda item: item[1].task.seed)):
        assert version == index // groups == group.task.seed // groups
        assert len(group.trajectories) == size
        assert {v for t in group.trajectories for v, _ in t.versions} == {version}
    assert not world.scheduler.dropped_groups
    assert world.scheduler.cancelled_episodes == 0


@settings(max_examples=200)
@given(**settings_strategy)
def test_what_begins_is_dropped_only_for_a_straggler_a_failure_or_redundancy(seed: int, **changes: Any) -> None:
    """Every episode takes one turn and no redundancy is asked for: then nothing begins only to be thrown away."""
    changes |= {"extra_groups": 0, "extra_replicas": 0, "drop_groups_without_signal": False}
    world = World(seed, **changes)
    world.failure_rate, world.turn_rate = 0.0, 0.0
    world.play_in_order = True
    world.run(300)
    assert not world.scheduler.dropped_groups
    assert world.scheduler.cancelled_episodes == 0
